// The formulas of the optimizer rules over the vectors that adamw_planes.h describes.
#pragma once

#include "adamw_planes.h"

namespace {

using flex::Master;
using flex::Rule;
using flex::States;
using flex::Step;
using flex::StreamKeys;

// Multipliers of the counter hash, as in flexengine/optim/rounding.py.
constexpr uint32_t kGolden = 0x9E3779B1u, kMixA = 0x7FEB352Du, kMixB = 0x846CA68Bu;
// How far ahead of the arithmetic memory is asked for: it has so many instructions per byte that the processor by
// itself does not look far enough, and hardware prefetching begins anew at every page of every plane.
constexpr int64_t kPrefetchBytes = 1024;

// One stream of random bits, at counters whose upper halves are those of `first`.
template <class V>
struct Stream {
    typename V::I key_low, high_term;

    FLEX_INLINE Stream at(const StreamKeys& keys, uint64_t first) {
        return {V::set_i(keys.low), V::set_i(static_cast<uint32_t>(first >> 32) * kGolden + keys.high)};
    }
};

// 16 random bits per lane: `random_bits16` of rounding.py for the counters whose lower halves are `counter`.
template <class V>
FLEX_INLINE typename V::I random_bits16(const Stream<V>& stream, typename V::I counter) {
    using I = typename V::I;
    I x = V::mul_i(V::xor_i(counter, stream.key_low), V::set_i(kGolden));
    x = V::add_i(V::xor_i(x, V::template shift_right<16>(x)), stream.high_term);
    x = V::mul_i(V::xor_i(x, V::template shift_right<16>(x)), V::set_i(kMixA));
    x = V::mul_i(V::xor_i(x, V::template shift_right<15>(x)), V::set_i(kMixB));
    return V::template shift_right<16>(x);
}

template <bool kBf16>
FLEX_INLINE void prefetch(const void* plane, int64_t at) {
    __builtin_prefetch(static_cast<const char*>(plane) + at * (kBf16 ? 2 : 4) + kPrefetchBytes);
}

template <class V, bool kBf16>
FLEX_INLINE typename V::F load(const void* plane, int64_t at) {
    if constexpr (kBf16) {
        return Halves<V>::load_bf16(static_cast<const uint16_t*>(plane) + at);
    } else {
        return V::load_f32(static_cast<const float*>(plane) + at);
    }
}

template <class V, bool kFinite>
FLEX_INLINE typename V::I bits_of(typename V::F value) {
    return kFinite ? V::bits(value) : V::canonical_bits(value);
}

// Stores to bf16 round stochastically. kFinite: every lane is known to be.
template <class V, bool kBf16, bool kFinite>
FLEX_INLINE void store(void* plane, int64_t at, typename V::F value, const Stream<V>& stream, typename V::I counter) {
    using I = typename V::I;
    const I bits = bits_of<V, kFinite>(value);
    if constexpr (kBf16) {
        I random = random_bits16<V>(stream, counter);
        if constexpr (!kFinite) random = V::zero_unless_finite(random, bits);
        Halves<V>::store_upper(static_cast<uint16_t*>(plane) + at, V::add_i(bits, random));
    } else {
        V::store_f32(static_cast<float*>(plane) + at, V::floats(bits));
    }
}

template <class V, bool kFinite>
FLEX_INLINE void store_split(void* weight, int16_t* remainder, int64_t at, typename V::F value) {
    const typename V::I bits = bits_of<V, kFinite>(value);
    Halves<V>::store_upper(static_cast<uint16_t*>(weight) + at, V::add_i(bits, V::set_i(0x8000u)));
    Halves<V>::store_lower(reinterpret_cast<uint16_t*>(remainder) + at, bits);
}

template <class V>
struct Streams {
    Stream<V> weight, exp_avg, exp_avg_sq;
};

template <class V>
struct Values {
    typename V::F master, exp_avg, exp_avg_sq;
};

template <class V, Master kMaster, bool kFinite>
FLEX_INLINE void store_master(const Step& call, int64_t at, typename V::F master, const Streams<V>& streams,
                              typename V::I counter) {
    if constexpr (kMaster == Master::kSplit) {
        store_split<V, kFinite>(call.to.weight, call.to.remainder, at, master);
    } else {
        store<V, kMaster == Master::kBf16, kFinite>(call.to.weight, at, master, streams.weight, counter);
    }
}

template <class V, Rule kRule, Master kMaster, bool kBf16States, bool kFinite>
FLEX_INLINE void store_all(const Step& call, int64_t at, const Values<V>& values, const Streams<V>& streams,
                           typename V::I counter) {
    store_master<V, kMaster, kFinite>(call, at, values.master, streams, counter);
    store<V, kBf16States, kFinite>(call.to.exp_avg, at, values.exp_avg, streams.exp_avg, counter);
    if constexpr (kRule == Rule::kAdamW) {
        store<V, kBf16States, kFinite>(call.to.exp_avg_sq, at, values.exp_avg_sq, streams.exp_avg_sq, counter);
    }
}

// x - x is 0, or NaN where x is not finite.
template <class V>
FLEX_INLINE bool all_finite(const Values<V>& values) {
    const typename V::F master = V::sub(values.master, values.master);
    const typename V::F exp_avg = V::sub(values.exp_avg, values.exp_avg);
    return V::is_ordered(V::add(V::add(master, exp_avg), V::sub(values.exp_avg_sq, values.exp_avg_sq)));
}

template <class V, Master kMaster>
FLEX_INLINE typename V::F load_master(const Step& call, int64_t at) {
    if constexpr (kMaster == Master::kSplit) {
        return Halves<V>::load_split(static_cast<const uint16_t*>(call.weight) + at,
                                     reinterpret_cast<const uint16_t*>(call.remainder) + at);
    } else {
        return load<V, kMaster == Master::kBf16>(call.weight, at);
    }
}

// -1, 0 or 1 by the sign; NaN where x is not finite.
template <class V>
FLEX_INLINE typename V::F sign(typename V::F x) {
    using I = typename V::I;
    const I bits = V::bits(x), magnitude = V::template shift_left<1>(bits);
    const I nonzero = V::template shift_right<31>(V::or_i(magnitude, V::sub_i(V::set_i(0), magnitude)));
    const I one = V::and_i(V::sub_i(V::set_i(0), nonzero), V::set_i(0x3F800000u));
    const I signed_one = V::or_i(one, V::and_i(bits, V::set_i(0x80000000u)));
    return V::add(V::floats(signed_one), V::sub(x, x));
}

// The numbers of a step on every lane.
template <class V>
struct Factors {
    typename V::F scale, decay, one_minus_beta1, beta2, one_minus_beta2, inverse_root_correction2, eps, step_size;

    FLEX_INLINE Factors of(const Step& call) {
        return {V::set(call.grad_scale), V::set(call.decay),           V::set(call.one_minus_beta1),
                V::set(call.beta2),      V::set(call.one_minus_beta2), V::set(call.inverse_root_correction2),
                V::set(call.eps),        V::set(call.step_size)};
    }
};

// The formula: old values become new ones. `grad` is scaled already.
template <class V, Rule kRule>
FLEX_INLINE Values<V> new_values(const Factors<V>& f, typename V::F grad, const Values<V>& old) {
    using F = typename V::F;
    const F decayed = V::mul(old.master, f.decay);
    if constexpr (kRule == Rule::kAdamW) {
        const F exp_avg = V::add(old.exp_avg, V::mul(V::sub(grad, old.exp_avg), f.one_minus_beta1));
        const F exp_avg_sq = V::add(V::mul(old.exp_avg_sq, f.beta2), V::mul(V::mul(grad, grad), f.one_minus_beta2));
        const F denominator = V::add(V::mul(V::sqrt(exp_avg_sq), f.inverse_root_correction2), f.eps);
        return {V::sub(decayed, V::mul(V::div(exp_avg, denominator), f.step_size)), exp_avg, exp_avg_sq};
    } else if constexpr (kRule == Rule::kLion) {
        const F difference = V::sub(grad, old.exp_avg);
        const F direction = V::add(old.exp_avg, V::mul(difference, f.one_minus_beta1));
        const F exp_avg = V::add(old.exp_avg, V::mul(difference, f.one_minus_beta2));
        return {V::sub(decayed, V::mul(sign<V>(direction), f.step_size)), exp_avg, old.exp_avg_sq};
    } else {
        const F momentum = V::add(V::mul(old.exp_avg, f.beta2), grad);
        return {V::sub(decayed, V::mul(momentum, f.step_size)), momentum, old.exp_avg_sq};
    }
}

template <class V>
FLEX_INLINE Streams<V> streams_at(const Step& call, uint64_t first) {
    return {Stream<V>::at(call.weight_keys, first), Stream<V>::at(call.exp_avg_keys, first),
            Stream<V>::at(call.exp_avg_sq_keys, first)};
}

// Whole vectors of [begin, end); returns where they end.
template <class V, Rule kRule, Master kMaster, bool kBf16States, bool kBf16Grad>
FLEX_TARGET int64_t update_vectors(const Step& shared, int64_t begin, int64_t end) {
    using F = typename V::F;
    const Step call = shared;  // a copy, which no store below can change: its pointers stay in registers
    constexpr bool kBf16Weight = kMaster != Master::kFloat32;
    constexpr bool kStochastic = kBf16States || kMaster == Master::kBf16;
    constexpr bool kAdamW = kRule == Rule::kAdamW;
    const Factors<V> factors = Factors<V>::of(call);
    const uint64_t first = call.element_offset + static_cast<uint64_t>(begin);
    const Streams<V> streams = streams_at<V>(call, first);
    typename V::I counter = Halves<V>::counters(static_cast<uint32_t>(first));

    int64_t at = begin;
    for (; at + V::kWidth <= end; at += V::kWidth) {
        prefetch<kBf16Grad>(call.grad, at);
        prefetch<kBf16States>(call.exp_avg, at);
        if constexpr (kAdamW) prefetch<kBf16States>(call.exp_avg_sq, at);
        prefetch<kBf16Weight>(call.weight, at);
        if constexpr (kMaster == Master::kSplit) prefetch<true>(call.remainder, at);

        const F grad = V::mul(load<V, kBf16Grad>(call.grad, at), factors.scale);
        Values<V> old = {V::set(0.0f), load<V, kBf16States>(call.exp_avg, at), V::set(0.0f)};
        if constexpr (kAdamW) old.exp_avg_sq = load<V, kBf16States>(call.exp_avg_sq, at);
        old.master = load_master<V, kMaster>(call, at);

        const Values<V> values = new_values<V, kRule>(factors, grad, old);
        if (kStochastic && __builtin_expect(all_finite<V>(values), 1)) {  // a fifth faster than lane by lane
            store_all<V, kRule, kMaster, kBf16States, true>(call, at, values, streams, counter);
        } else {
            store_all<V, kRule, kMaster, kBf16States, false>(call, at, values, streams, counter);
        }
        counter = V::add_i(counter, V::set_i(V::kWidth));
    }
    return at;
}

// ---- states in blocks of 8-bit codes -----------------------------------------------------------------------------

constexpr int kBlock = static_cast<int>(flex::kBlock);

// The largest magnitude of a block as a bit pattern: NaN above infinity above all others.
template <class V>
FLEX_INLINE float largest_of(typename V::I patterns) {
    alignas(64) uint32_t lanes[V::kWidth];
    V::store_u32(lanes, patterns);
    uint32_t largest = 0;
    for (int i = 0; i < V::kWidth; ++i) largest = lanes[i] > largest ? lanes[i] : largest;
    float value;
    __builtin_memcpy(&value, &largest, sizeof value);
    return value;
}

template <class V>
FLEX_INLINE typename V::I magnitude_bits(typename V::F x) {
    return V::and_i(V::canonical_bits(x), V::set_i(0x7FFFFFFFu));
}

// `steps` of flexengine/optim/blockwise.py: buckets by the upper halves of magnitudes from the least on to that of 1,
// and what an entry packs.
constexpr uint32_t kLeastBucket = 0x33FF, kLastBucket = 0x3F80, kZeroCode = 127;
constexpr int kRankShift = 18, kTieShift = 17;

// The code of the nearest value of a book. It counts middles between neighbours up to a magnitude: all of them below
// its bucket, and perhaps one in it.
template <class V, bool kSigned>
FLEX_INLINE typename V::I code_of(const FlexCodebook& book, typename V::F x) {
    using I = typename V::I;
    const I bits = V::bits(x);
    const I upper = V::template shift_right<16>(V::and_i(bits, V::set_i(0x7FFFFFFFu)));
    const I bucket = V::min_i(V::max_i(upper, V::set_i(kLeastBucket)), V::set_i(kLastBucket));
    const I step = V::gather_i32(book.steps, V::sub_i(bucket, V::set_i(kLeastBucket)));
    const I middle = V::and_i(step, V::set_i((1u << kTieShift) - 1));
    const I negative = V::template shift_right<31>(bits), flip = V::sub_i(V::set_i(0), negative);
    I above = V::add_i(V::and_i(bits, V::set_i(0xFFFFu)), V::set_i(1));  // greater than a middle that x reaches
    if constexpr (kSigned) {  // a middle itself takes the higher code: the lesser magnitude
        above = V::sub_i(above, V::and_i(negative, V::template shift_right<kTieShift>(step)));
    }
    I code = V::add_i(V::template shift_right<kRankShift>(step), V::one_where_greater(above, middle));
    if constexpr (kSigned) {
        code = V::add_i(V::sub_i(V::xor_i(code, flip), flip), V::set_i(kZeroCode));
        code = V::max_i(code, V::set_i(0));  // there is 1, and no -1
    }
    return V::zero_unless_finite(code, bits);
}

// Codes of `count` values divided by the block's scale, which is stored too.
template <class V, bool kSigned>
FLEX_INLINE void store_codes(const FlexCodebook& book, uint8_t* codes, float* scale, const float* values, int count,
                             float largest) {
    *scale = largest;
    const typename V::F divisor = V::set(largest == 0.0f ? 1.0f : largest);
    for (int i = 0; i < count; i += V::kWidth) {
        const typename V::F x = V::div(V::load_f32(values + i), divisor);
        V::store_u8(codes + i, code_of<V, kSigned>(book, x));
    }
}

// AdamW on whole blocks of [begin, end); without vectors also on the part of a block at the end, and with any counters.
// Returns where they end.
template <class V, Master kMaster, bool kBf16Grad>
FLEX_TARGET int64_t update_blocks(const Step& shared, int64_t begin, int64_t end) {
    using F = typename V::F;
    using I = typename V::I;
    const Step call = shared;
    const Factors<V> factors = Factors<V>::of(call);
    uint8_t* const averages = static_cast<uint8_t*>(call.exp_avg);
    uint8_t* const squares = static_cast<uint8_t*>(call.exp_avg_sq);
    alignas(64) float new_averages[kBlock], new_squares[kBlock];

    int64_t at = begin;
    while (at < end && (V::kWidth == 1 || at + kBlock <= end)) {
        const int count = end - at < kBlock ? static_cast<int>(end - at) : kBlock;
        float* const average_scale = call.exp_avg_scales + at / kBlock;
        float* const square_scale = call.exp_avg_sq_scales + at / kBlock;
        const F old_average_scale = V::set(*average_scale), old_square_scale = V::set(*square_scale);
        I largest_average = V::set_i(0), largest_square = V::set_i(0);
        const uint64_t first = call.element_offset + static_cast<uint64_t>(at);
        Streams<V> streams = streams_at<V>(call, first);
        for (int i = 0; i < count; i += V::kWidth) {
            prefetch<kBf16Grad>(call.grad, at + i);
            prefetch<kMaster != Master::kFloat32>(call.weight, at + i);
            if constexpr (kMaster == Master::kSplit) prefetch<true>(call.remainder, at + i);
            if constexpr (V::kWidth == 1) streams = streams_at<V>(call, first + static_cast<uint64_t>(i));

            const F grad = V::mul(load<V, kBf16Grad>(call.grad, at + i), factors.scale);
            const F average = V::gather_f32(call.signed_book.values, V::load_u8(averages + at + i));
            const F square = V::gather_f32(call.unsigned_book.values, V::load_u8(squares + at + i));
            const Values<V> old = {load_master<V, kMaster>(call, at + i), V::mul(average, old_average_scale),
                                   V::mul(square, old_square_scale)};
            const Values<V> values = new_values<V, Rule::kAdamW>(factors, grad, old);
            const I counter = Halves<V>::counters(static_cast<uint32_t>(first + static_cast<uint64_t>(i)));
            store_master<V, kMaster, false>(call, at + i, values.master, streams, counter);
            V::store_f32(new_averages + i, values.exp_avg);
            V::store_f32(new_squares + i, values.exp_avg_sq);
            largest_average = V::max_i(largest_average, magnitude_bits<V>(values.exp_avg));
            largest_square = V::max_i(largest_square, magnitude_bits<V>(values.exp_avg_sq));
        }
        store_codes<V, true>(call.signed_book, averages + at, average_scale, new_averages, count,
                             largest_of<V>(largest_average));
        store_codes<V, false>(call.unsigned_book, squares + at, square_scale, new_squares, count,
                              largest_of<V>(largest_square));
        at += count;
    }
    return at;
}

// Calls whose planes are all of 16 bits go by pairs, where there are vectors at all.
template <class V, Rule kRule, Master kMaster>
FLEX_TARGET int64_t update_halves(const Step& call, int64_t begin, int64_t end) {
    if constexpr (kMaster != Master::kFloat32 && V::kWidth > 1) {
        return update_vectors<Pairs<V>, kRule, kMaster, true, true>(call, begin, end);
    } else {
        return update_vectors<V, kRule, kMaster, true, true>(call, begin, end);
    }
}

template <class V, Rule kRule, Master kMaster>
FLEX_TARGET int64_t update_with_master(const Step& call, int64_t begin, int64_t end) {
    if (call.states == States::kBf16) {
        return call.bf16_grad ? update_halves<V, kRule, kMaster>(call, begin, end)
                              : update_vectors<V, kRule, kMaster, true, false>(call, begin, end);
    }
    if constexpr (!kIsStreaming<V>) {
        if (call.states == States::kBlocks) {
            return call.bf16_grad ? update_blocks<V, kMaster, true>(call, begin, end)
                                  : update_blocks<V, kMaster, false>(call, begin, end);
        }
    }
    return call.bf16_grad ? update_vectors<V, kRule, kMaster, false, true>(call, begin, end)
                          : update_vectors<V, kRule, kMaster, false, false>(call, begin, end);
}

template <class V, Rule kRule>
FLEX_TARGET int64_t update_by_rule(const Step& call, int64_t begin, int64_t end) {
    switch (call.master) {
        case Master::kFloat32: return update_with_master<V, kRule, Master::kFloat32>(call, begin, end);
        case Master::kSplit: return update_with_master<V, kRule, Master::kSplit>(call, begin, end);
        case Master::kBf16: return update_with_master<V, kRule, Master::kBf16>(call, begin, end);
    }
    return end;
}

template <class V>
FLEX_TARGET int64_t update_all_rules(const Step& call, int64_t begin, int64_t end) {
    switch (call.rule) {
        case Rule::kAdamW: return update_by_rule<V, Rule::kAdamW>(call, begin, end);
        case Rule::kLion: return update_by_rule<V, Rule::kLion>(call, begin, end);
        case Rule::kSgd: return update_by_rule<V, Rule::kSgd>(call, begin, end);
    }
    return end;
}

constexpr uintptr_t kLineBytes = 64;

inline bool begins_line(const void* plane, int64_t begin, int64_t width) {
    return (reinterpret_cast<uintptr_t>(plane) + static_cast<uintptr_t>(begin * width)) % kLineBytes == 0;
}

// Whether results go elsewhere, and from borders of cache lines on.
inline bool may_stream(const Step& call, int64_t begin) {
    const int64_t weight_width = call.master == Master::kFloat32 ? 4 : 2;
    const int64_t state_width = call.states == States::kFloat32 ? 4 : 2;
    return call.to.weight != call.weight && begins_line(call.to.weight, begin, weight_width) &&
           (call.to.remainder == nullptr || begins_line(call.to.remainder, begin, 2)) &&
           begins_line(call.to.exp_avg, begin, state_width) &&
           (call.to.exp_avg_sq == nullptr || begins_line(call.to.exp_avg_sq, begin, state_width));
}

template <class V>
FLEX_TARGET int64_t update_range(const Step& call, int64_t begin, int64_t end) {
    if constexpr (V::kWidth > 1) {
        if (may_stream(call, begin)) return update_all_rules<Streaming<V>>(call, begin, end);
    }
    return update_all_rules<V>(call, begin, end);
}

}  // namespace
