// The AdamW formula over the vectors that adamw_planes.h describes.
#pragma once

#include "adamw_planes.h"

namespace {

using flex::Master;
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

template <class V, Master kMaster, bool kBf16States, bool kFinite>
FLEX_INLINE void store_all(const FlexAdamW& call, int64_t at, const Values<V>& values, const Streams<V>& streams,
                           typename V::I counter) {
    if constexpr (kMaster == Master::kSplit) {
        store_split<V, kFinite>(call.weight, call.remainder, at, values.master);
    } else {
        store<V, kMaster == Master::kBf16, kFinite>(call.weight, at, values.master, streams.weight, counter);
    }
    store<V, kBf16States, kFinite>(call.exp_avg, at, values.exp_avg, streams.exp_avg, counter);
    store<V, kBf16States, kFinite>(call.exp_avg_sq, at, values.exp_avg_sq, streams.exp_avg_sq, counter);
}

// x - x is 0, or NaN where x is not finite.
template <class V>
FLEX_INLINE bool all_finite(const Values<V>& values) {
    const typename V::F master = V::sub(values.master, values.master);
    const typename V::F exp_avg = V::sub(values.exp_avg, values.exp_avg);
    return V::is_ordered(V::add(V::add(master, exp_avg), V::sub(values.exp_avg_sq, values.exp_avg_sq)));
}

// Whole vectors of [begin, end); returns where they end.
template <class V, Master kMaster, bool kBf16States, bool kBf16Grad>
FLEX_TARGET int64_t update_vectors(const FlexAdamW& shared, int64_t begin, int64_t end) {
    using F = typename V::F;
    const FlexAdamW call = shared;  // a copy, which no store below can change: its pointers stay in registers
    constexpr bool kBf16Weight = kMaster != Master::kFloat32;
    constexpr bool kStochastic = kBf16States || kMaster == Master::kBf16;
    const F scale = V::set(call.grad_scale), decay = V::set(call.decay), step_size = V::set(call.step_size);
    const F one_minus_beta1 = V::set(call.one_minus_beta1);
    const F beta2 = V::set(call.beta2), one_minus_beta2 = V::set(call.one_minus_beta2);
    const F inverse_root_correction2 = V::set(call.inverse_root_correction2), eps = V::set(call.eps);
    const uint64_t first = call.element_offset + static_cast<uint64_t>(begin);
    const Streams<V> streams = {Stream<V>::at(call.weight_keys, first), Stream<V>::at(call.exp_avg_keys, first),
                                Stream<V>::at(call.exp_avg_sq_keys, first)};
    typename V::I counter = Halves<V>::counters(static_cast<uint32_t>(first));

    int64_t at = begin;
    for (; at + V::kWidth <= end; at += V::kWidth) {
        prefetch<kBf16Grad>(call.grad, at);
        prefetch<kBf16States>(call.exp_avg, at);
        prefetch<kBf16States>(call.exp_avg_sq, at);
        prefetch<kBf16Weight>(call.weight, at);
        if constexpr (kMaster == Master::kSplit) prefetch<true>(call.remainder, at);

        const F grad = V::mul(load<V, kBf16Grad>(call.grad, at), scale);
        F exp_avg = load<V, kBf16States>(call.exp_avg, at);
        F exp_avg_sq = load<V, kBf16States>(call.exp_avg_sq, at);
        F master;
        if constexpr (kMaster == Master::kSplit) {
            master = Halves<V>::load_split(static_cast<const uint16_t*>(call.weight) + at,
                                           reinterpret_cast<const uint16_t*>(call.remainder) + at);
        } else {
            master = load<V, kBf16Weight>(call.weight, at);
        }

        exp_avg = V::add(exp_avg, V::mul(V::sub(grad, exp_avg), one_minus_beta1));
        exp_avg_sq = V::add(V::mul(exp_avg_sq, beta2), V::mul(V::mul(grad, grad), one_minus_beta2));
        const F denominator = V::add(V::mul(V::sqrt(exp_avg_sq), inverse_root_correction2), eps);
        master = V::sub(V::mul(master, decay), V::mul(V::div(exp_avg, denominator), step_size));

        const Values<V> values = {master, exp_avg, exp_avg_sq};
        if (kStochastic && __builtin_expect(all_finite<V>(values), 1)) {  // a fifth faster than lane by lane
            store_all<V, kMaster, kBf16States, true>(call, at, values, streams, counter);
        } else {
            store_all<V, kMaster, kBf16States, false>(call, at, values, streams, counter);
        }
        counter = V::add_i(counter, V::set_i(V::kWidth));
    }
    return at;
}

// Calls whose planes are all of 16 bits go by pairs, where there are vectors at all.
template <class V, Master kMaster>
FLEX_TARGET int64_t update_halves(const FlexAdamW& call, int64_t begin, int64_t end) {
    if constexpr (kMaster != Master::kFloat32 && V::kWidth > 1) {
        return update_vectors<Pairs<V>, kMaster, true, true>(call, begin, end);
    } else {
        return update_vectors<V, kMaster, true, true>(call, begin, end);
    }
}

template <class V, Master kMaster>
FLEX_TARGET int64_t update_with_master(const FlexAdamW& call, int64_t begin, int64_t end) {
    if (call.bf16_states) {
        return call.bf16_grad ? update_halves<V, kMaster>(call, begin, end)
                              : update_vectors<V, kMaster, true, false>(call, begin, end);
    }
    return call.bf16_grad ? update_vectors<V, kMaster, false, true>(call, begin, end)
                          : update_vectors<V, kMaster, false, false>(call, begin, end);
}

template <class V>
FLEX_TARGET int64_t update_range(const FlexAdamW& call, int64_t begin, int64_t end) {
    switch (call.master) {
        case Master::kFloat32: return update_with_master<V, Master::kFloat32>(call, begin, end);
        case Master::kSplit: return update_with_master<V, Master::kSplit>(call, begin, end);
        case Master::kBf16: return update_with_master<V, Master::kBf16>(call, begin, end);
    }
    return end;
}

}  // namespace
