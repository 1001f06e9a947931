// FP8 codes (e4m3) with a power of two as the scale of every block of elements, and back.
//
// One rounding per operator and the integers of torch's path beside it (flexengine/native/fp8.py), so both give the
// same bits on any number of threads.
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "common.h"
#include "parallel.h"

#define FLEX_INLINE static inline __attribute__((always_inline))

namespace flex {
namespace {

constexpr int64_t kFp8Block = 128;               // BLOCK of flexengine/native/fp8.py
constexpr int64_t kPiece = 128 * kFp8Block;      // elements that a thread takes at once
constexpr uint32_t kInfinity = 0x7F800000u;      // and what lies above it is NaN
constexpr uint32_t kAboveLargest = 0x001FFFFFu;  // carries into the exponent what is above 1.75 * 2^k: 448 * 2^(k - 8)
constexpr uint32_t kSmallestNormal = 0x3C800000u;  // 2^-6
constexpr uint32_t kBias = (127u - 7u) << 3;       // of float32's exponent beside that of e4m3, in codes
constexpr uint8_t kNotFinite = 255, kNan = 0x7F;   // a scale, and the codes beneath it

template <class To, class From>
FLEX_INLINE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit patterns of one size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

// A choice that the compiler cannot turn into a branch, which would keep the loop from being vectorised.
FLEX_INLINE uint32_t choose(bool condition, uint32_t yes, uint32_t no) {
    const uint32_t mask = 0u - static_cast<uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

// Rounds to the nearest code, ties to even, and leaves in `values` what that loses; 0 where the block is not finite.
FLEX_INLINE uint8_t encode_block(float* __restrict values, uint8_t* __restrict codes, int64_t count) {
    uint32_t most = 0;
    for (int64_t i = 0; i < count; ++i) most = std::max(most, bits_as<uint32_t>(values[i]) & 0x7FFFFFFFu);
    const uint32_t exponent = (std::min(most, kInfinity) + kAboveLargest) >> 23;
    if (exponent >= 255u) {
        std::memset(codes, kNan, static_cast<size_t>(count));
        std::memset(values, 0, static_cast<size_t>(count) * sizeof(float));
        return kNotFinite;
    }
    const uint32_t scale = exponent > 9u ? exponent - 8u : 1u;
    const float up = bits_as<float>((254u - scale) << 23), down = bits_as<float>(scale << 23);
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = bits_as<uint32_t>(values[i] * up);
        const uint32_t sign = bits & 0x80000000u, magnitude = bits & 0x7FFFFFFFu;
        const uint32_t normal = (magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u)) & 0xFFF00000u;
        const float shifted = bits_as<float>(magnitude) + 0x1p14f;  // whose last bit is 2^-9, the smallest code
        const uint32_t subnormal = bits_as<uint32_t>(shifted - 0x1p14f);
        const bool small = magnitude < kSmallestNormal;
        const uint32_t code =
            choose(small, bits_as<uint32_t>(shifted) - bits_as<uint32_t>(0x1p14f), (normal >> 20) - kBias);
        codes[i] = static_cast<uint8_t>(code | (sign >> 24));
        values[i] -= bits_as<float>(choose(small, subnormal, normal) | sign) * down;
    }
    return static_cast<uint8_t>(scale);
}

template <bool Add>
FLEX_INLINE void decode_block(const uint8_t* __restrict codes, uint8_t scale, float* __restrict out, int64_t count) {
    const float down = bits_as<float>(static_cast<uint32_t>(scale) << 23);
    const uint32_t special = scale == kNotFinite ? 0x7FC00000u : 0u;
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t code = codes[i], magnitude = code & 0x7Fu;
        const float small = static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f;
        const uint32_t bits = choose(magnitude < 8u, bits_as<uint32_t>(small), (magnitude + kBias) << 20);
        const float value = bits_as<float>(bits | ((code & 0x80u) << 24)) * down;
        const float found = bits_as<float>(bits_as<uint32_t>(value) | special);
        out[i] = Add ? out[i] + found : found;
    }
}

FLEX_INLINE void encode_all(float* values, uint8_t* codes, uint8_t* scales, int64_t count) {
    for (int64_t at = 0; at < count; at += kFp8Block)
        scales[at / kFp8Block] = encode_block(values + at, codes + at, std::min(kFp8Block, count - at));
}

template <bool Add>
FLEX_INLINE void decode_all(const uint8_t* codes, const uint8_t* scales, float* out, int64_t count) {
    for (int64_t at = 0; at < count; at += kFp8Block)
        decode_block<Add>(codes + at, scales[at / kFp8Block], out + at, std::min(kFp8Block, count - at));
}

using Encode = void (*)(float*, uint8_t*, uint8_t*, int64_t);
using Decode = void (*)(const uint8_t*, const uint8_t*, float*, int64_t);

void encode_plain(float* v, uint8_t* c, uint8_t* s, int64_t n) { encode_all(v, c, s, n); }
template <bool Add>
void decode_plain(const uint8_t* c, const uint8_t* s, float* out, int64_t n) {
    decode_all<Add>(c, s, out, n);
}

#if defined(__x86_64__)
__attribute__((target("avx2"))) void encode_avx2(float* v, uint8_t* c, uint8_t* s, int64_t n) {
    encode_all(v, c, s, n);
}
template <bool Add>
__attribute__((target("avx2"))) void decode_avx2(const uint8_t* c, const uint8_t* s, float* out, int64_t n) {
    decode_all<Add>(c, s, out, n);
}
bool has_avx2() { return __builtin_cpu_supports("avx2"); }
#else
#define encode_avx2 encode_plain
#define decode_avx2 decode_plain
bool has_avx2() { return false; }
#endif

template <class Body>
void in_pieces(int64_t count, int threads, Body&& body) {
    parallel_for((count + kPiece - 1) / kPiece, threads,
                 [&](int64_t piece) { body(piece * kPiece, std::min(kPiece, count - piece * kPiece)); });
}

}  // namespace
}  // namespace flex

// Codes of `count` values and a scale for every kFp8Block of them; the values become what rounding loses.
extern "C" FLEX_API int flex_fp8_encode(float* values, uint8_t* codes, uint8_t* scales, int64_t count, int threads) {
    const flex::Encode encode = flex::has_avx2() ? flex::encode_avx2 : flex::encode_plain;
    flex::in_pieces(count, threads,
                    [&](int64_t at, int64_t n) { encode(values + at, codes + at, scales + at / flex::kFp8Block, n); });
    return flex::kOk;
}

// What the codes stand for, in `out` or added to it.
extern "C" FLEX_API int flex_fp8_decode(const uint8_t* codes, const uint8_t* scales, float* out, int64_t count, int add,
                                        int threads) {
    const flex::Decode decode = flex::has_avx2() ? (add ? flex::decode_avx2<true> : flex::decode_avx2<false>)
                                                 : (add ? flex::decode_plain<true> : flex::decode_plain<false>);
    flex::in_pieces(count, threads,
                    [&](int64_t at, int64_t n) { decode(codes + at, scales + at / flex::kFp8Block, out + at, n); });
    return flex::kOk;
}
