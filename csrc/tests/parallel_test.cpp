// The parallel loop under sanitizers, in particular where memory runs out at any of its allocations: every piece is
// still done once, nothing is thrown, and the calling thread keeps its signals.
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <new>
#include <vector>

#include "../parallel.h"

namespace {

std::atomic<int> allocations_left{-1};  // -1: any number
int failures = 0;

void expect(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "FAILED: %s\n", what);
    ++failures;
}

bool may_allocate() {
    int left = allocations_left.load();
    while (left > 0 && !allocations_left.compare_exchange_weak(left, left - 1)) {
    }
    return left != 0;
}

void check_every_piece_is_done_once(int64_t num_pieces, int num_threads, const char* what) {
    static std::atomic<int> done[1000];
    for (auto& count : done) count.store(0);
    flex::parallel_for(num_pieces, num_threads, [&](int64_t piece) { done[piece].fetch_add(1); });
    const int left = allocations_left.exchange(-1);
    for (int64_t i = 0; i < 1000; ++i) expect(done[i].load() == (i < num_pieces), what);
    allocations_left.store(left);
}

void check_signals_are_open() {
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    for (int signal : {SIGINT, SIGTERM, SIGUSR1})
        expect(sigismember(&blocked, signal) == 0, "signals stay as they were");
}

// Each time with more threads than before, so that the pool has to grow.
void check_exhausted_memory() {
    for (int left = 0; left < 12; ++left) {
        allocations_left.store(left);
        check_every_piece_is_done_once(1000, 2 + left, "pieces where memory runs out");
        allocations_left.store(-1);
        check_signals_are_open();
    }
}

}  // namespace

void* operator new(std::size_t num_bytes) {
    void* const memory = may_allocate() ? std::malloc(num_bytes) : nullptr;
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

int main() {
    check_exhausted_memory();
    for (int threads : {1, 2, 16, 1000}) check_every_piece_is_done_once(threads, threads, "pieces");
    check_every_piece_is_done_once(0, 8, "no piece");
    check_signals_are_open();
    return failures == 0 ? 0 : 1;
}
