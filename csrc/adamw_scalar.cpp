// The reference: the formulas on one float at a time, for any processor.
#define FLEX_TARGET
#include "adamw_formula.h"

#include <cmath>
#include <cstring>

namespace {

struct Scalar {
    using F = float;
    using I = uint32_t;
    static constexpr int kWidth = 1;

    FLEX_INLINE F set(float x) { return x; }
    FLEX_INLINE I set_i(uint32_t x) { return x; }
    FLEX_INLINE I count_from(uint32_t first) { return first; }
    FLEX_INLINE F load_f32(const float* from) { return *from; }
    FLEX_INLINE I load_u16(const uint16_t* from) { return *from; }
    FLEX_INLINE void store_f32(float* to, F x) { *to = x; }
    FLEX_INLINE void store_u16(uint16_t* to, I x) { *to = static_cast<uint16_t>(x); }

    FLEX_INLINE I load_u8(const uint8_t* from) { return *from; }
    FLEX_INLINE void store_u8(uint8_t* to, I x) { *to = static_cast<uint8_t>(x); }
    FLEX_INLINE void store_u32(uint32_t* to, I x) { *to = x; }
    FLEX_INLINE F gather_f32(const float* table, I index) { return table[index]; }
    FLEX_INLINE I gather_i32(const int32_t* table, I index) { return static_cast<I>(table[index]); }
    FLEX_INLINE I one_where_greater(I a, I b) { return static_cast<int32_t>(a) > static_cast<int32_t>(b) ? 1 : 0; }
    FLEX_INLINE I max_i(I a, I b) { return one_where_greater(a, b) ? a : b; }
    FLEX_INLINE I min_i(I a, I b) { return one_where_greater(a, b) ? b : a; }

    FLEX_INLINE F add(F a, F b) { return a + b; }
    FLEX_INLINE F sub(F a, F b) { return a - b; }
    FLEX_INLINE F mul(F a, F b) { return a * b; }
    FLEX_INLINE F div(F a, F b) { return a / b; }
    FLEX_INLINE F sqrt(F a) { return std::sqrt(a); }
    FLEX_INLINE I add_i(I a, I b) { return a + b; }
    FLEX_INLINE I sub_i(I a, I b) { return a - b; }
    FLEX_INLINE I mul_i(I a, I b) { return a * b; }
    FLEX_INLINE I and_i(I a, I b) { return a & b; }
    FLEX_INLINE I or_i(I a, I b) { return a | b; }
    FLEX_INLINE I xor_i(I a, I b) { return a ^ b; }
    template <int n>
    FLEX_INLINE I shift_left(I a) {
        return a << n;
    }
    template <int n>
    FLEX_INLINE I shift_right(I a) {
        return a >> n;
    }

    FLEX_INLINE I bits(F x) {
        I result;
        std::memcpy(&result, &x, sizeof result);
        return result;
    }
    FLEX_INLINE F floats(I x) {
        F result;
        std::memcpy(&result, &x, sizeof result);
        return result;
    }
    FLEX_INLINE bool is_ordered(F x) { return x == x; }
    FLEX_INLINE I canonical_bits(F x) { return x != x ? kQuietNan : bits(x); }
    FLEX_INLINE I zero_unless_finite(I value, I float_bits) {
        return (float_bits & kExponent) == kExponent ? 0 : value;
    }
};

}  // namespace

void flex::update_range_scalar(const Step& call, int64_t begin, int64_t end) { update_range<Scalar>(call, begin, end); }
