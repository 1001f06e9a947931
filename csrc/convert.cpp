// Loops over elements that the compiler vectorises, once for any x86-64 (or other) processor and once for AVX2.
#include "convert.h"

#define FLEX_INLINE static inline __attribute__((always_inline))

namespace {

using flex::Convert;
using flex::Type;

constexpr uint32_t kQuietNan = 0x7FC00000u;

template <class To, class From>
FLEX_INLINE To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From), "bit patterns of one size");
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}

FLEX_INLINE bool is_nan(uint32_t float_bits) { return (float_bits & 0x7FFFFFFFu) > 0x7F800000u; }

struct Bf16 {
    uint16_t bits;
};
struct F16 {
    uint16_t bits;
};

FLEX_INLINE float to_float(Bf16 x) { return bits_as<float>(static_cast<uint32_t>(x.bits) << 16); }

// All ones where a condition holds: a choice that the compiler cannot turn into a branch, which would keep the loop
// from being vectorised.
FLEX_INLINE uint32_t choose(bool condition, uint32_t yes, uint32_t no) {
    const uint32_t mask = 0u - static_cast<uint32_t>(condition);
    return (yes & mask) | (no & ~mask);
}

// binary16 of IEEE 754: 1 sign, 5 exponent, 10 mantissa bits; subnormals are multiples of 2^-24.
FLEX_INLINE float to_float(F16 x) {
    const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
    const uint32_t magnitude = x.bits & 0x7FFFu;
    const uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
    const uint32_t special = (magnitude << 13) | 0x7F800000u | choose(magnitude > 0x7C00u, 0x00400000u, 0u);
    const uint32_t subnormal = bits_as<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t finite = choose(magnitude < 0x0400u, subnormal, normal);
    return bits_as<float>(sign | choose(magnitude >= 0x7C00u, special, finite));
}

FLEX_INLINE float to_float(float x) { return x; }
FLEX_INLINE float to_float(double x) { return static_cast<float>(x); }

// To the nearest bf16, ties to even.
FLEX_INLINE void store(Bf16* target, float value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t rounded = bits + 0x7FFFu + ((bits >> 16) & 1u);
    target->bits = static_cast<uint16_t>(choose(is_nan(bits), kQuietNan, rounded) >> 16);
}
FLEX_INLINE void store(float* target, float value) { *target = value; }
FLEX_INLINE void store(double* target, float value) { *target = value; }

// `split_fp32` of flexengine/optim/rounding.py: nearest bf16, ties away from zero, and the low half as it is.
FLEX_INLINE void store_split(Bf16* target, uint16_t* remainder, float value) {
    const uint32_t bits = bits_as<uint32_t>(value);
    const uint32_t canonical = choose(is_nan(bits), kQuietNan, bits);
    target->bits = static_cast<uint16_t>((canonical + 0x8000u) >> 16);
    *remainder = static_cast<uint16_t>(canonical);
}

template <class Source, class Target>
FLEX_INLINE void convert_all(const void* source, void* target, uint64_t count) {
    const Source* __restrict from = static_cast<const Source*>(source);
    Target* __restrict to = static_cast<Target*>(target);
    for (uint64_t i = 0; i < count; ++i) store(to + i, to_float(from[i]));
}

template <class Source>
FLEX_INLINE void split_all(const void* source, void* target, void* remainder, uint64_t count) {
    const Source* __restrict from = static_cast<const Source*>(source);
    Bf16* __restrict to = static_cast<Bf16*>(target);
    uint16_t* __restrict low = static_cast<uint16_t*>(remainder);
    for (uint64_t i = 0; i < count; ++i) store_split(to + i, low + i, to_float(from[i]));
}

template <class Source, class Target>
void convert_plain(const void* source, void* target, void*, uint64_t count) {
    convert_all<Source, Target>(source, target, count);
}
template <class Source>
void split_plain(const void* source, void* target, void* remainder, uint64_t count) {
    split_all<Source>(source, target, remainder, count);
}

#if defined(__x86_64__)
template <class Source, class Target>
__attribute__((target("avx2"))) void convert_avx2(const void* source, void* target, void*, uint64_t count) {
    convert_all<Source, Target>(source, target, count);
}
template <class Source>
__attribute__((target("avx2"))) void split_avx2(const void* source, void* target, void* remainder, uint64_t count) {
    split_all<Source>(source, target, remainder, count);
}
bool has_avx2() { return __builtin_cpu_supports("avx2"); }
#else
#define convert_avx2 convert_plain
#define split_avx2 split_plain
bool has_avx2() { return false; }
#endif

template <class Source, class Target>
Convert conversion() {
    return has_avx2() ? convert_avx2<Source, Target> : convert_plain<Source, Target>;
}
template <class Source>
Convert splitting() {
    return has_avx2() ? split_avx2<Source> : split_plain<Source>;
}

template <class Source>
Convert conversion_from(Type target, bool split) {
    if (split) return target == Type::kBf16 ? splitting<Source>() : nullptr;
    switch (target) {
        case Type::kBf16: return conversion<Source, Bf16>();
        case Type::kF32: return conversion<Source, float>();
        case Type::kF64: return conversion<Source, double>();
        default: return nullptr;
    }
}

}  // namespace

Convert flex::find_conversion(Type source, Type target, bool split) {
    if (source == target) return nullptr;
    switch (source) {
        case Type::kBf16: return conversion_from<Bf16>(target, split);
        case Type::kF16: return conversion_from<F16>(target, split);
        case Type::kF32: return conversion_from<float>(target, split);
        case Type::kF64: return conversion_from<double>(target, split);
        default: return nullptr;
    }
}
