// How vectors of one instruction set are read from and written to planes in memory, 16-bit ones above all.
//
// A file that includes this first defines FLEX_TARGET, the attribute of its instruction set, and afterwards a class V:
//   V::F, V::I     kWidth float32, kWidth 32-bit integers
//   V::set, set_i, count_from; load_f32, store_f32; load_u16, store_u16 (widened to lanes, low halves of lanes)
//   V::add, sub, mul, div, sqrt on F, each rounded once as IEEE 754 says
//   V::add_i, sub_i, mul_i, and_i, or_i, xor_i, shift_left<n>, shift_right<n> (logical) on I
//   V::bits, floats (reinterpret), canonical_bits (any NaN as the quiet one), zero_unless_finite, is_ordered
//   V::load_u8, store_u8 (widened to lanes, low quarters of lanes), store_u32; gather_f32, gather_u8 (by index; reads
//   four bytes); max_i (of values below 2^31); one_where_reached(x, y) (1 where x >= y, else 0)
// for Streaming<V>: stream_f32, stream_u16, stream_i; and for Pairs<V>: load_i, store_i, blend_low, sub_16,
// shift_right_16<n>. Everything lies in an unnamed namespace, so that no linker takes one instruction set's copy for
// another's.
#pragma once

#include "adamw.h"

#define FLEX_INLINE static inline __attribute__((always_inline)) FLEX_TARGET

namespace {

constexpr uint32_t kExponent = 0x7F800000u;  // all ones: infinity or NaN
constexpr uint32_t kQuietNan = 0x7FC00000u;

// Twice the lanes of V: elements of even number in one half, of odd number in the other. A 32-bit lane of memory then
// holds one of each, and 16-bit planes are taken apart and put together by a shift and a mask instead of being widened
// and packed. For calls whose planes are all of 16 bits.
template <class V>
struct Pairs {
    struct F {
        typename V::F even, odd;
    };
    struct I {
        typename V::I even, odd;
    };
    static constexpr int kWidth = 2 * V::kWidth;

    FLEX_INLINE F set(float x) { return {V::set(x), V::set(x)}; }
    FLEX_INLINE I set_i(uint32_t x) { return {V::set_i(x), V::set_i(x)}; }
    FLEX_INLINE F add(F a, F b) { return {V::add(a.even, b.even), V::add(a.odd, b.odd)}; }
    FLEX_INLINE F sub(F a, F b) { return {V::sub(a.even, b.even), V::sub(a.odd, b.odd)}; }
    FLEX_INLINE F mul(F a, F b) { return {V::mul(a.even, b.even), V::mul(a.odd, b.odd)}; }
    FLEX_INLINE F div(F a, F b) { return {V::div(a.even, b.even), V::div(a.odd, b.odd)}; }
    FLEX_INLINE F sqrt(F a) { return {V::sqrt(a.even), V::sqrt(a.odd)}; }
    FLEX_INLINE I add_i(I a, I b) { return {V::add_i(a.even, b.even), V::add_i(a.odd, b.odd)}; }
    FLEX_INLINE I mul_i(I a, I b) { return {V::mul_i(a.even, b.even), V::mul_i(a.odd, b.odd)}; }
    FLEX_INLINE I sub_i(I a, I b) { return {V::sub_i(a.even, b.even), V::sub_i(a.odd, b.odd)}; }
    FLEX_INLINE I and_i(I a, I b) { return {V::and_i(a.even, b.even), V::and_i(a.odd, b.odd)}; }
    FLEX_INLINE I or_i(I a, I b) { return {V::or_i(a.even, b.even), V::or_i(a.odd, b.odd)}; }
    FLEX_INLINE I xor_i(I a, I b) { return {V::xor_i(a.even, b.even), V::xor_i(a.odd, b.odd)}; }
    template <int n>
    FLEX_INLINE I shift_left(I a) {
        return {V::template shift_left<n>(a.even), V::template shift_left<n>(a.odd)};
    }
    template <int n>
    FLEX_INLINE I shift_right(I a) {
        return {V::template shift_right<n>(a.even), V::template shift_right<n>(a.odd)};
    }
    FLEX_INLINE I bits(F a) { return {V::bits(a.even), V::bits(a.odd)}; }
    FLEX_INLINE F floats(I a) { return {V::floats(a.even), V::floats(a.odd)}; }
    FLEX_INLINE I canonical_bits(F a) { return {V::canonical_bits(a.even), V::canonical_bits(a.odd)}; }
    FLEX_INLINE I zero_unless_finite(I a, I b) {
        return {V::zero_unless_finite(a.even, b.even), V::zero_unless_finite(a.odd, b.odd)};
    }
    FLEX_INLINE bool is_ordered(F a) { return V::is_ordered(V::add(a.even, a.odd)); }
};

// The same vectors with stores past the caches, so that memory is not read only to be overwritten; to borders of their
// own size.
template <class V>
struct Streaming : V {
    FLEX_INLINE void store_f32(float* to, typename V::F x) { V::stream_f32(to, x); }
    FLEX_INLINE void store_u16(uint16_t* to, typename V::I x) { V::stream_u16(to, x); }
    FLEX_INLINE void store_i(void* to, typename V::I x) { V::stream_i(to, x); }
};

template <class V>
constexpr bool kIsStreaming = false;
template <class V>
constexpr bool kIsStreaming<Streaming<V>> = true;

// 16-bit planes of vectors whose lanes are in the order of memory.
template <class V>
struct Halves {
    using F = typename V::F;
    using I = typename V::I;

    FLEX_INLINE I counters(uint32_t first) { return V::count_from(first); }
    FLEX_INLINE F load_bf16(const uint16_t* from) { return V::floats(V::template shift_left<16>(V::load_u16(from))); }
    FLEX_INLINE void store_upper(uint16_t* to, I bits) { V::store_u16(to, V::template shift_right<16>(bits)); }
    FLEX_INLINE void store_lower(uint16_t* to, I bits) { V::store_u16(to, V::and_i(bits, V::set_i(0xFFFFu))); }
    // The float32 of which `weight` is the nearest bf16 (ties away) and `remainder` the lower half.
    FLEX_INLINE F load_split(const uint16_t* weight, const uint16_t* remainder) {
        const I low = V::load_u16(remainder);
        const I upper = V::sub_i(V::load_u16(weight), V::template shift_right<15>(low));
        return V::floats(V::or_i(V::template shift_left<16>(upper), low));
    }
};

// The same for pairs. The upper half of a 32-bit lane of memory is the odd element (little endian).
template <class V>
struct Halves<Pairs<V>> {
    using F = typename Pairs<V>::F;
    using I = typename Pairs<V>::I;

    FLEX_INLINE I counters(uint32_t first) {
        const typename V::I even = V::add_i(V::set_i(first), V::template shift_left<1>(V::count_from(0)));
        return {even, V::add_i(even, V::set_i(1))};
    }
    FLEX_INLINE F load_bf16(const uint16_t* from) {
        const typename V::I both = V::load_i(from);
        return {V::floats(V::template shift_left<16>(both)), V::floats(V::and_i(both, V::set_i(0xFFFF0000u)))};
    }
    FLEX_INLINE void store_upper(uint16_t* to, I bits) {
        V::store_i(to, V::blend_low(bits.odd, V::template shift_right<16>(bits.even)));
    }
    FLEX_INLINE void store_lower(uint16_t* to, I bits) {
        V::store_i(to, V::blend_low(V::template shift_left<16>(bits.odd), bits.even));
    }
    FLEX_INLINE F load_split(const uint16_t* weight, const uint16_t* remainder) {
        const typename V::I low = V::load_i(remainder);
        const typename V::I upper = V::sub_16(V::load_i(weight), V::template shift_right_16<15>(low));
        return {V::floats(V::blend_low(V::template shift_left<16>(upper), low)),
                V::floats(V::blend_low(upper, V::template shift_right<16>(low)))};
    }
};

}  // namespace
