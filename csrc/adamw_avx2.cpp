// The formulas on 8 floats at a time. No fused multiply-add: AVX2 does not bring it.
#if defined(__x86_64__)
#define FLEX_TARGET __attribute__((target("avx2")))
#include "adamw_formula.h"

#include <immintrin.h>

namespace {

struct Avx2 {
    using F = __m256;
    using I = __m256i;
    static constexpr int kWidth = 8;

    FLEX_INLINE F set(float x) { return _mm256_set1_ps(x); }
    FLEX_INLINE I set_i(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
    FLEX_INLINE I count_from(uint32_t first) {
        return _mm256_add_epi32(set_i(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
    }
    FLEX_INLINE F load_f32(const float* from) { return _mm256_loadu_ps(from); }
    FLEX_INLINE I load_u16(const uint16_t* from) {
        return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    FLEX_INLINE void store_f32(float* to, F x) { _mm256_storeu_ps(to, x); }
    FLEX_INLINE void store_u16(uint16_t* to, I x) {  // every lane is below 65536: nothing saturates
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to), packed);
    }

    FLEX_INLINE void stream_f32(float* to, F x) { _mm256_stream_ps(to, x); }
    FLEX_INLINE void stream_u16(uint16_t* to, I x) {  // as store_u16
        const __m128i packed = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_stream_si128(reinterpret_cast<__m128i*>(to), packed);
    }
    FLEX_INLINE void stream_i(void* to, I x) { _mm256_stream_si256(static_cast<__m256i*>(to), x); }

    FLEX_INLINE I load_i(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
    FLEX_INLINE void store_i(void* to, I x) { _mm256_storeu_si256(static_cast<__m256i*>(to), x); }
    // Upper halves of the lanes of `high`, lower halves of those of `low`.
    FLEX_INLINE I blend_low(I high, I low) { return _mm256_blend_epi16(high, low, 0x55); }
    FLEX_INLINE I sub_16(I a, I b) { return _mm256_sub_epi16(a, b); }
    template <int n>
    FLEX_INLINE I shift_right_16(I a) {
        return _mm256_srli_epi16(a, n);
    }

    FLEX_INLINE I load_u8(const uint8_t* from) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    }
    FLEX_INLINE void store_u8(uint8_t* to, I x) {  // every lane is below 256: nothing saturates
        const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
        _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
    }
    FLEX_INLINE void store_u32(uint32_t* to, I x) { store_i(to, x); }
    FLEX_INLINE F gather_f32(const float* table, I index) { return _mm256_i32gather_ps(table, index, 4); }
    FLEX_INLINE I gather_i32(const int32_t* table, I index) { return _mm256_i32gather_epi32(table, index, 4); }
    FLEX_INLINE I max_i(I a, I b) { return _mm256_max_epi32(a, b); }
    FLEX_INLINE I min_i(I a, I b) { return _mm256_min_epi32(a, b); }
    FLEX_INLINE I one_where_greater(I a, I b) { return _mm256_srli_epi32(_mm256_cmpgt_epi32(a, b), 31); }

    FLEX_INLINE F add(F a, F b) { return _mm256_add_ps(a, b); }
    FLEX_INLINE F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    FLEX_INLINE F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    FLEX_INLINE F div(F a, F b) { return _mm256_div_ps(a, b); }
    FLEX_INLINE F sqrt(F a) { return _mm256_sqrt_ps(a); }
    FLEX_INLINE I add_i(I a, I b) { return _mm256_add_epi32(a, b); }
    FLEX_INLINE I sub_i(I a, I b) { return _mm256_sub_epi32(a, b); }
    FLEX_INLINE I mul_i(I a, I b) { return _mm256_mullo_epi32(a, b); }
    FLEX_INLINE I and_i(I a, I b) { return _mm256_and_si256(a, b); }
    FLEX_INLINE I or_i(I a, I b) { return _mm256_or_si256(a, b); }
    FLEX_INLINE I xor_i(I a, I b) { return _mm256_xor_si256(a, b); }
    template <int n>
    FLEX_INLINE I shift_left(I a) {
        return _mm256_slli_epi32(a, n);
    }
    template <int n>
    FLEX_INLINE I shift_right(I a) {
        return _mm256_srli_epi32(a, n);
    }

    FLEX_INLINE I bits(F x) { return _mm256_castps_si256(x); }
    FLEX_INLINE F floats(I x) { return _mm256_castsi256_ps(x); }
    FLEX_INLINE bool is_ordered(F x) { return _mm256_movemask_ps(_mm256_cmp_ps(x, x, _CMP_UNORD_Q)) == 0; }
    FLEX_INLINE I canonical_bits(F x) {
        return bits(_mm256_blendv_ps(x, floats(set_i(kQuietNan)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
    }
    FLEX_INLINE I zero_unless_finite(I value, I float_bits) {
        const I exponent = set_i(kExponent);
        return _mm256_andnot_si256(_mm256_cmpeq_epi32(and_i(float_bits, exponent), exponent), value);
    }
};

}  // namespace

void flex::update_range_avx2(const Step& call, int64_t begin, int64_t end) {
    update_range_scalar(call, update_range<Avx2>(call, begin, end), end);
}
#endif
