// The formulas on 16 floats at a time; BW is for pairs of 16-bit values, and part of every server's AVX-512.
#if defined(__x86_64__)
// AVX-512 brings fused multiply-add; -ffp-contract=off (setup.py) keeps the compiler from using it.
#define FLEX_TARGET __attribute__((target("avx512f,avx512bw")))
#include "adamw_formula.h"

// GCC before 12.3 takes the don't-care operands of its own intrinsics for a mistake: https://gcc.gnu.org/PR105593
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>

namespace {

struct Avx512 {
    using F = __m512;
    using I = __m512i;
    static constexpr int kWidth = 16;

    FLEX_INLINE F set(float x) { return _mm512_set1_ps(x); }
    FLEX_INLINE I set_i(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
    FLEX_INLINE I count_from(uint32_t first) {
        return add_i(set_i(first), _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    }
    FLEX_INLINE F load_f32(const float* from) { return _mm512_loadu_ps(from); }
    FLEX_INLINE I load_u16(const uint16_t* from) {
        return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    }
    FLEX_INLINE void store_f32(float* to, F x) { _mm512_storeu_ps(to, x); }
    FLEX_INLINE void store_u16(uint16_t* to, I x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x));
    }

    FLEX_INLINE void stream_f32(float* to, F x) { _mm512_stream_ps(to, x); }
    FLEX_INLINE void stream_u16(uint16_t* to, I x) {
        _mm256_stream_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi32_epi16(x));
    }
    FLEX_INLINE void stream_i(void* to, I x) { _mm512_stream_si512(static_cast<__m512i*>(to), x); }

    FLEX_INLINE I load_i(const void* from) { return _mm512_loadu_si512(from); }
    FLEX_INLINE void store_i(void* to, I x) { _mm512_storeu_si512(to, x); }
    // Upper halves of the lanes of `high`, lower halves of those of `low`.
    FLEX_INLINE I blend_low(I high, I low) { return _mm512_mask_blend_epi16(0x55555555u, high, low); }
    FLEX_INLINE I sub_16(I a, I b) { return _mm512_sub_epi16(a, b); }
    template <int n>
    FLEX_INLINE I shift_right_16(I a) {
        return _mm512_srli_epi16(a, n);
    }

    FLEX_INLINE I load_u8(const uint8_t* from) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    FLEX_INLINE void store_u8(uint8_t* to, I x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(x));
    }
    FLEX_INLINE void store_u32(uint32_t* to, I x) { store_i(to, x); }
    FLEX_INLINE F gather_f32(const float* table, I index) { return _mm512_i32gather_ps(index, table, 4); }
    FLEX_INLINE I gather_i32(const int32_t* table, I index) { return _mm512_i32gather_epi32(index, table, 4); }
    FLEX_INLINE I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
    FLEX_INLINE I min_i(I a, I b) { return _mm512_min_epi32(a, b); }
    FLEX_INLINE I one_where_greater(I a, I b) {
        return _mm512_maskz_mov_epi32(_mm512_cmpgt_epi32_mask(a, b), set_i(1));
    }

    FLEX_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
    FLEX_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    FLEX_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    FLEX_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
    FLEX_INLINE F sqrt(F a) { return _mm512_sqrt_ps(a); }
    FLEX_INLINE I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
    FLEX_INLINE I sub_i(I a, I b) { return _mm512_sub_epi32(a, b); }
    FLEX_INLINE I mul_i(I a, I b) { return _mm512_mullo_epi32(a, b); }
    FLEX_INLINE I and_i(I a, I b) { return _mm512_and_si512(a, b); }
    FLEX_INLINE I or_i(I a, I b) { return _mm512_or_si512(a, b); }
    FLEX_INLINE I xor_i(I a, I b) { return _mm512_xor_si512(a, b); }
    template <int n>
    FLEX_INLINE I shift_left(I a) {
        return _mm512_slli_epi32(a, n);
    }
    template <int n>
    FLEX_INLINE I shift_right(I a) {
        return _mm512_srli_epi32(a, n);
    }

    FLEX_INLINE I bits(F x) { return _mm512_castps_si512(x); }
    FLEX_INLINE F floats(I x) { return _mm512_castsi512_ps(x); }
    FLEX_INLINE bool is_ordered(F x) { return _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q) == 0; }
    FLEX_INLINE I canonical_bits(F x) {
        return _mm512_mask_mov_epi32(bits(x), _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), set_i(kQuietNan));
    }
    FLEX_INLINE I zero_unless_finite(I value, I float_bits) {
        const I exponent = set_i(kExponent);
        return _mm512_maskz_mov_epi32(_mm512_cmpneq_epi32_mask(and_i(float_bits, exponent), exponent), value);
    }
};

}  // namespace

void flex::update_range_avx512(const Step& call, int64_t begin, int64_t end) {
    update_range_scalar(call, update_range<Avx512>(call, begin, end), end);
}
#endif
