// Words of memory that processes share, by which one tells another that what it wrote before is there.
//
// A word only rises. Words are compared as cuStreamWaitValue32 compares them: reached when the signed difference is not
// negative, so a GPU and a CPU can wait for the same word.
#include <time.h>

#include <chrono>
#include <cstdint>

#include "common.h"

namespace {

constexpr int kSpins = 2000;                // some 20 to 100 us of polling before the first nap
constexpr int64_t kNapNanoseconds = 50000;  // what a nap adds to a wait

// A waiting core leaves its execution units to its sibling.
void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

uint32_t load(const uint32_t* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

bool all_reached(const uint32_t* words, int64_t stride, int64_t count, uint32_t value) {
    for (int64_t i = 0; i < count; ++i) {
        if (static_cast<int32_t>(load(words + i * stride) - value) < 0) return false;
    }
    return true;
}

bool any_set(const uint32_t* words, int64_t stride, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        if (load(words + i * stride) != 0) return true;
    }
    return false;
}

}  // namespace

// Writes a word after everything that this thread wrote or read before.
extern "C" FLEX_API int flex_signal_store(uint32_t* word, uint32_t value) {
    FLEX_REQUIRE(reinterpret_cast<uintptr_t>(word) % sizeof(uint32_t) == 0, "the word is not aligned");
    __atomic_store_n(word, value, __ATOMIC_SEQ_CST);
    return flex::kOk;
}

// Reads a word before everything that this thread reads or writes afterwards.
extern "C" FLEX_API int flex_signal_load(const uint32_t* word, uint32_t* value_out) {
    *value_out = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    return flex::kOk;
}

// Waits until each of `count` words, `stride` words apart, has reached `value`; what their writers wrote before is then
// visible. Ends early when one of num_aborts words, abort_stride apart, is not 0. Writes to result: 0 reached, 1
// aborted, 2 neither within `seconds`.
extern "C" FLEX_API int flex_signal_wait(const uint32_t* words, int64_t stride, int64_t count, uint32_t value,
                                         const uint32_t* aborts, int64_t abort_stride, int64_t num_aborts,
                                         double seconds, int* result_out) {
    using Clock = std::chrono::steady_clock;
    const Clock::time_point end = Clock::now() + std::chrono::duration_cast<Clock::duration>(
                                                     std::chrono::duration<double>(seconds < 0 ? 0 : seconds));
    for (int64_t tries = 0;; ++tries) {
        // Aborts are read last: who aborts sets its word first, and then raises all semaphores.
        const bool reached = all_reached(words, stride, count, value);
        *result_out = any_set(aborts, abort_stride, num_aborts) ? 1 : reached ? 0 : 2;
        if (*result_out != 2 || Clock::now() >= end) return flex::kOk;
        if (tries < kSpins) {
            relax();
        } else {
            const timespec nap{0, kNapNanoseconds};
            nanosleep(&nap, nullptr);
        }
    }
}
