#include "parallel.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>

namespace {

struct Job {
    void (*body)(void*, int64_t);
    void* context;
    int64_t num_pieces;
    std::atomic<int64_t> next_piece{0};
    int num_helpers_inside = 0;  // guarded by the pool's mutex

    void run() {
        for (;;) {
            const int64_t piece = next_piece.fetch_add(1, std::memory_order_relaxed);
            if (piece >= num_pieces) return;
            body(context, piece);
        }
    }
};

// Signals belong to the threads of the interpreter: while it lives, threads start with all of them blocked.
class SignalsBlocked {
 public:
    SignalsBlocked() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
    sigset_t before_;
};

// The queue holds one entry per helper that a job may still have. A job lies on its caller's stack: the caller takes
// its unclaimed entries back and waits for the helpers inside before it returns.
class Pool {
 public:
    void run(Job& job, int num_helpers) {
        call_helpers(job, num_helpers);
        job.run();
        std::unique_lock<std::mutex> lock(mutex_);
        queue_.erase(std::remove(queue_.begin(), queue_.end(), &job), queue_.end());
        done_.wait(lock, [&] { return job.num_helpers_inside == 0; });
    }

 private:
    // Fewer helpers come, or none, where the system refuses threads or memory: the caller takes their pieces.
    void call_helpers(Job& job, int num_helpers) {
        const std::lock_guard<std::mutex> lock(mutex_);
        grow(num_helpers);
        try {
            queue_.insert(queue_.end(), num_helpers, &job);
        } catch (const std::bad_alloc&) {
            return;  // an insertion at the end leaves nothing behind
        }
        work_.notify_all();
    }

    void grow(int num_workers) {
        const SignalsBlocked blocked;
        try {
            for (; num_workers_ < num_workers; ++num_workers_) std::thread([this] { work(); }).detach();
        } catch (const std::system_error&) {
        } catch (const std::bad_alloc&) {
        }
    }

    void work() {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            work_.wait(lock, [&] { return !queue_.empty(); });
            Job* job = queue_.front();
            queue_.pop_front();
            ++job->num_helpers_inside;
            lock.unlock();
            job->run();
            lock.lock();
            if (--job->num_helpers_inside == 0) done_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable work_, done_;
    std::deque<Job*> queue_;
    int num_workers_ = 0;
};

std::atomic<Pool*> current_pools[2] = {{nullptr}, {nullptr}};
std::mutex creation;

// A pool is never destroyed: its threads wait in it until the process ends. A forked child has none of the threads,
// and perhaps a locked mutex, so it forgets the pools. Null where there is no memory for a pool.
Pool* pool(flex::Threads whose) {
    std::atomic<Pool*>& current_pool = current_pools[static_cast<int>(whose)];
    Pool* found = current_pool.load(std::memory_order_acquire);
    if (found != nullptr) return found;
    std::lock_guard<std::mutex> lock(creation);
    static const int registered = pthread_atfork([] { creation.lock(); }, [] { creation.unlock(); },
                                                 [] {
                                                     for (std::atomic<Pool*>& each : current_pools)
                                                         each.store(nullptr, std::memory_order_relaxed);
                                                     creation.unlock();
                                                 });
    (void)registered;
    found = current_pool.load(std::memory_order_acquire);
    if (found == nullptr) {
        try {
            found = new Pool;
        } catch (const std::bad_alloc&) {
            return nullptr;
        }
        current_pool.store(found, std::memory_order_release);
    }
    return found;
}

}  // namespace

namespace flex {

void parallel_for(int64_t num_pieces, int num_threads, void (*body)(void*, int64_t), void* context, Threads whose) {
    Job job{body, context, num_pieces};
    const int64_t num_helpers = std::min<int64_t>(num_threads, num_pieces) - 1;
    Pool* const helpers = num_helpers < 1 ? nullptr : pool(whose);
    if (helpers == nullptr) {
        job.run();
        return;
    }
    helpers->run(job, static_cast<int>(num_helpers));
}

}  // namespace flex
