// A parallel loop over a pool of threads that lives as long as the process.
#pragma once

#include <cstdint>

namespace flex {

// Whose threads run a loop: those that compute, or others for bodies that wait for a device meanwhile.
enum class Threads { kComputing, kWaiting };

// Calls body(context, piece) once for every piece in [0, num_pieces), on the calling thread and up to num_threads - 1
// others, which take the next piece as they become free. Returns when all are done. Which thread takes which piece
// differs from run to run, so results must not depend on it.
//
// Calls from several threads at once share the pool; each makes progress by itself, so none waits for another. The pool
// grows to the largest num_threads seen; where the system refuses a thread or memory, the loop runs on fewer. It never
// throws. A forked child starts a pool of its own. body must not throw and must not call parallel_for.
void parallel_for(int64_t num_pieces, int num_threads, void (*body)(void* context, int64_t piece), void* context,
                  Threads whose = Threads::kComputing);

// The same for a callable: parallel_for(n, threads, [&](int64_t piece) { ... });
template <class Body>
void parallel_for(int64_t num_pieces, int num_threads, Body&& body, Threads whose = Threads::kComputing) {
    parallel_for(
        num_pieces, num_threads, [](void* context, int64_t piece) { (*static_cast<Body*>(context))(piece); }, &body,
        whose);
}

}  // namespace flex
