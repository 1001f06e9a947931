// An update whose results go to other planes than it reads: a step that may still be thrown away leaves the old ones.
#pragma once

#include "adamw.h"

#include <cstring>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

// Where new values go; mirrored field by field by flexengine/native/update.py. Null where a call has no such plane.
struct FlexTargets {
    void* weight;
    int16_t* remainder;
    void* exp_avg;
    void* exp_avg_sq;
};

namespace flex {

constexpr int64_t kIntoElements = 1024;  // updated at once in a buffer, 16 KB at the most, that stays in the first cache
constexpr int64_t kIntoBytes = 4 * kIntoElements;  // of the buffer of one plane

// Copies past the caches where it can, so that memory is not read only to be overwritten.
inline void stream_out(char* to, const char* from, int64_t num_bytes) {
    int64_t done = 0;
#if defined(__x86_64__)
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0) {
        for (; done + 16 <= num_bytes; done += 16) {
            const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done));
            _mm_stream_si128(reinterpret_cast<__m128i*>(to + done), value);
        }
    }
#endif
    std::memcpy(to + done, from + done, static_cast<size_t>(num_bytes - done));
}

// Orders what `stream_out` has written before what the thread writes next, such as that it is done.
inline void end_streaming() {
#if defined(__x86_64__)
    _mm_sfence();
#endif
}

// One plane on its way through a buffer.
struct IntoPlane {
    char* from;
    char* to;
    int64_t width;  // bytes of an element

    void read(char* buffer, int64_t at, int64_t count) const {
        if (from != nullptr) std::memcpy(buffer, from + at * width, static_cast<size_t>(count * width));
    }
    void write(const char* buffer, int64_t at, int64_t count) const {
        if (from != nullptr) stream_out(to + at * width, buffer, count * width);
    }
};

// Elements [begin, end): `update(call, begin, end)` runs in place on copies, which then go to the targets.
template <class Update>
void update_into(const FlexUpdate& call, const FlexTargets& targets, int64_t begin, int64_t end, Update&& update) {
    alignas(64) char buffers[4][kIntoBytes];
    const int64_t weight_width = call.master == Master::kFloat32 ? 4 : 2;
    const int64_t state_width = call.states == States::kFloat32 ? 4 : 2;
    const IntoPlane planes[4] = {
        {static_cast<char*>(call.weight), static_cast<char*>(targets.weight), weight_width},
        {reinterpret_cast<char*>(call.remainder), reinterpret_cast<char*>(targets.remainder), 2},
        {static_cast<char*>(call.exp_avg), static_cast<char*>(targets.exp_avg), state_width},
        {static_cast<char*>(call.exp_avg_sq), static_cast<char*>(targets.exp_avg_sq), state_width},
    };
    const int64_t grad_width = call.bf16_grad ? 2 : 4;
    for (int64_t at = begin; at < end; at += kIntoElements) {
        const int64_t count = end - at < kIntoElements ? end - at : kIntoElements;
        for (int i = 0; i < 4; ++i) planes[i].read(buffers[i], at, count);
        FlexUpdate part = call;
        part.weight = buffers[0];
        part.remainder = call.remainder == nullptr ? nullptr : reinterpret_cast<int16_t*>(buffers[1]);
        part.exp_avg = buffers[2];
        part.exp_avg_sq = call.exp_avg_sq == nullptr ? nullptr : buffers[3];
        part.grad = static_cast<const char*>(call.grad) + at * grad_width;
        part.element_offset = call.element_offset + static_cast<uint64_t>(at);
        part.num_elements = count;
        update(part, 0, count);
        for (int i = 0; i < 4; ++i) planes[i].write(buffers[i], at, count);
    }
    end_streaming();
}

}  // namespace flex
