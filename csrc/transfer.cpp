// Transfer engine: copies, event waits and event records in one call, without Python in between.
//
// Two ways in:
// - submit: a batch goes to the driver at once, in order, on the streams it names. This is how a program's commands are
//   issued; events mean what CUDA says.
// - post: bulk copies outside a program go to a lane, a thread with a stream of its own for each direction, which cuts
//   them into pieces and hands the driver at most `pieces_in_flight` at a time.
//
// Why a lane and not a stream of low priority: priorities do not reach the copy engines ("Stream priorities have no
// effect on host-to-device and device-to-host memory operations", CUDA Driver API, cuStreamCreateWithPriority), and how
// they choose among streams is not documented; at worst they serve the copies of one direction in the order in which
// they were handed over. What is not handed over yet cannot be in the way. So a copy that is submitted while a posted
// one runs waits for pieces_in_flight pieces at most, 0.6 ms with two of 16 MiB at 55 GB/s; two keep the link busy.
// Submitted copies are cut as well, without being held back: the hardware may switch between streams at the seams.
//
// One thread at a time calls an engine; the lanes' threads are internal. Another may call flex_transfer_synchronize
// beside it, for an event that was recorded before and is not recorded meanwhile.
#include <signal.h>

#include <memory>
#include <new>
#include <system_error>

#include "transfer_lane.h"

namespace {

using namespace flex;

int submit_one(TransferEngine& engine, const Operation& operation, uint64_t index) {
    if (int status = check_operation(operation, index)) return status;
    const CuStream stream = reinterpret_cast<CuStream>(operation.stream);
    if (operation.kind == kCopy) {
        return for_each_piece(engine, operation, [&](uint64_t start, uint64_t num_bytes) {
            return copy_piece(engine, operation, start, num_bytes, stream);
        });
    }
    Event& event = *event_of(operation);
    if (int status = await_issued(engine, event, event.requested, event.recorder)) return status;
    if (operation.kind == kWait) {
        FLEX_CUDA(engine.driver, stream_wait_event, (stream, event.handle, 0));
        return kOk;
    }
    FLEX_CUDA(engine.driver, event_record, (event.handle, stream));
    event.issued.store(++event.requested, std::memory_order_release);
    return kOk;
}

// Operations of a post, each with its place in the order of records of its event.
std::vector<LaneOperation> in_sequence(const Lane& lane, const Operation* operations, uint64_t count) {
    std::vector<LaneOperation> result;
    for (uint64_t i = 0; i < count; ++i) {
        Event* event = operations[i].kind == kCopy ? nullptr : event_of(operations[i]);
        if (operations[i].kind == kRecord) ++event->requested, event->recorder = &lane;
        result.push_back({operations[i], event == nullptr ? 0 : event->requested});
    }
    return result;
}

// Signals belong to the threads of the interpreter: a lane starts with all of them blocked.
void start_lane(TransferEngine& engine, Lane& lane) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    const auto restore = [&] { pthread_sigmask(SIG_SETMASK, &before, nullptr); };
    try {
        lane.thread = std::thread(run_lane, std::ref(engine), std::ref(lane));
    } catch (...) {
        restore();
        throw;
    }
    restore();
}

int post(TransferEngine& engine, Lane& lane, const Operation* operations, uint64_t count, uint64_t* ticket_out) {
    for (uint64_t i = 0; i < count; ++i) {
        if (int status = check_operation(operations[i], i)) return status;
    }
    const std::lock_guard<std::mutex> lock(engine.mutex);
    for (const Lane& failed : engine.lanes) {
        if (!failed.failure.empty()) return lane_failure(failed);
    }
    if (!lane.thread.joinable()) start_lane(engine, lane);
    lane.queue.push_back({lane.posted + 1, in_sequence(lane, operations, count)});
    *ticket_out = ++lane.posted;
    engine.changed.notify_all();
    return kOk;
}

int open_engine(TransferEngine& engine, const char* driver_path) {
    if (int status = engine.driver.load(driver_path)) return status;
    FLEX_CUDA(engine.driver, ctx_get_current, (&engine.context));
    FLEX_REQUIRE(engine.context != nullptr, "no CUDA context on this thread; use the device once before");
    int least = 0, greatest = 0;
    FLEX_CUDA(engine.driver, ctx_get_stream_priority_range, (&least, &greatest));
    for (Lane& lane : engine.lanes) {
        FLEX_CUDA(engine.driver, stream_create, (&lane.stream, kStreamNonBlocking, least));
        FLEX_CUDA(engine.driver, stream_create, (&lane.urgent_stream, kStreamNonBlocking, greatest));
    }
    return kOk;
}

void destroy_event(TransferEngine& engine, Event* event) {
    engine.driver.event_destroy(event->handle);
    delete event;
}

// Of a lane whose thread has ended: waits for the last copies, which nobody can wait for afterwards.
void close_lane(TransferEngine& engine, Lane& lane) {
    for (CuStream stream : {lane.stream, lane.urgent_stream}) {
        if (stream == nullptr) continue;
        engine.driver.stream_synchronize(stream);
        engine.driver.stream_destroy(stream);
    }
    for (const InFlight& piece : lane.flying) lane.resting.push_back(piece.event);
    for (CuEvent event : lane.resting) engine.driver.event_destroy(event);
}

void close_engine(TransferEngine& engine) {
    if (engine.context == nullptr) return;
    {
        const std::lock_guard<std::mutex> lock(engine.mutex);
        engine.closing = true;
        engine.changed.notify_all();
    }
    const InContext in_context(engine);
    for (Lane& lane : engine.lanes) {
        if (lane.thread.joinable()) lane.thread.join();
    }
    for (Lane& lane : engine.lanes) close_lane(engine, lane);
    for (Event* event : engine.events) destroy_event(engine, event);  // the lanes used them until here
}

// Runs `body`; what the standard library throws becomes a status.
template <typename Body>
int guarded(const char* statement, Body body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return FLEX_FAIL(kNoMemory, statement, "out of host memory");
    } catch (const std::system_error& error) {
        return FLEX_FAIL(kSystem, statement, "cannot start a thread: %s", error.what());
    }
}

int check_direction(uint32_t direction) {
    FLEX_REQUIRE(direction < 2, "direction is %u, expected 0 (host to device) or 1 (device to host)", direction);
    return kOk;
}

}  // namespace

extern "C" {

// Opens an engine on the calling thread's CUDA context. driver_path: libcuda; copies are cut into pieces of
// piece_bytes.
FLEX_API int flex_transfer_open(const char* driver_path, uint64_t piece_bytes, uint32_t pieces_in_flight,
                                TransferEngine** engine_out) {
    FLEX_REQUIRE(piece_bytes > 0, "piece_bytes is 0, expected at least 1");
    FLEX_REQUIRE(pieces_in_flight > 0, "pieces_in_flight is 0, expected at least 1");
    return guarded("open", [&] {
        auto engine = std::make_unique<TransferEngine>();
        engine->piece_bytes = piece_bytes;
        engine->pieces_in_flight = pieces_in_flight;
        const int status = open_engine(*engine, driver_path);
        if (status != kOk) close_engine(*engine);
        if (status == kOk) *engine_out = engine.release();
        return status;
    });
}

// Finishes what was posted, and what was submitted to the urgent streams; then frees threads, streams and the events
// that are left.
FLEX_API int flex_transfer_close(TransferEngine* engine) {
    close_engine(*engine);
    delete engine;
    return kOk;
}

// Creates `count` events; `timing` makes them fit for flex_transfer_elapsed.
FLEX_API int flex_transfer_create_events(TransferEngine* engine, uint64_t count, int timing, uint64_t* events_out) {
    const InContext in_context(*engine);
    return guarded("create events", [&]() -> int {
        for (uint64_t i = 0; i < count; ++i) {
            auto event = std::make_unique<Event>();
            FLEX_CUDA(engine->driver, event_create, (&event->handle, timing ? 0 : kEventDisableTiming));
            engine->events.insert(event.get());
            events_out[i] = reinterpret_cast<uint64_t>(event.release());
        }
        return kOk;
    });
}

// Frees events; no post that names one may be unfinished.
FLEX_API int flex_transfer_release_events(TransferEngine* engine, uint64_t count, const uint64_t* events) {
    const InContext in_context(*engine);
    for (uint64_t i = 0; i < count; ++i) {
        Event* const event = reinterpret_cast<Event*>(events[i]);
        FLEX_REQUIRE(engine->events.erase(event) == 1, "event %llu of %llu is not, or no longer, of this engine",
                     static_cast<unsigned long long>(i), static_cast<unsigned long long>(count));
        destroy_event(*engine, event);
    }
    return kOk;
}

// Hands `count` operations to the driver in order. What came before a failing one has been issued.
FLEX_API int flex_transfer_submit(TransferEngine* engine, const Operation* operations, uint64_t count) {
    const InContext in_context(*engine);
    for (uint64_t i = 0; i < count; ++i) {
        if (int status = submit_one(*engine, operations[i], i)) return status;
    }
    return kOk;
}

// Queues operations for the lane of `direction` (0: host to device, 1: device to host) and returns at once.
FLEX_API int flex_transfer_post(TransferEngine* engine, uint32_t direction, const Operation* operations, uint64_t count,
                                uint64_t* ticket_out) {
    if (int status = check_direction(direction)) return status;
    return guarded("post", [&] { return post(*engine, engine->lanes[direction], operations, count, ticket_out); });
}

// Blocks until a post has finished on the device; or, if it or one before it in its direction failed, until nothing of
// that direction is in flight any more.
FLEX_API int flex_transfer_wait(TransferEngine* engine, uint32_t direction, uint64_t ticket) {
    if (int status = check_direction(direction)) return status;
    Lane& lane = engine->lanes[direction];
    std::unique_lock<std::mutex> lock(engine->mutex);
    using Number = unsigned long long;
    FLEX_REQUIRE(ticket <= lane.posted, "ticket %llu was never given out; the last is %llu", Number(ticket),
                 Number(lane.posted));
    engine->changed.wait(lock, [&] { return lane.completed >= ticket || !lane.failure.empty(); });
    return lane.completed >= ticket ? kOk : lane_failure(lane);
}

// Blocks until the last record of an event has been reached; returns at once if nothing has recorded it.
FLEX_API int flex_transfer_synchronize(TransferEngine* engine, uint64_t event_address) {
    Event& event = *reinterpret_cast<Event*>(event_address);
    const InContext in_context(*engine);
    if (int status = await_issued(*engine, event, event.requested, event.recorder)) return status;
    FLEX_CUDA(engine->driver, event_synchronize, (event.handle));
    return kOk;
}

// Seconds between two reached records of events made with `timing`.
FLEX_API int flex_transfer_elapsed(TransferEngine* engine, uint64_t from, uint64_t to, double* seconds_out) {
    const InContext in_context(*engine);
    float milliseconds = 0;
    const CuEvent first = reinterpret_cast<Event*>(from)->handle, last = reinterpret_cast<Event*>(to)->handle;
    FLEX_CUDA(engine->driver, event_elapsed_time, (&milliseconds, first, last));
    *seconds_out = milliseconds * 1e-3;
    return kOk;
}

// A stream of the highest priority, for submitted copies of one direction that shall pass posted ones.
FLEX_API int flex_transfer_urgent_stream(TransferEngine* engine, uint32_t direction, uint64_t* stream_out) {
    if (int status = check_direction(direction)) return status;
    *stream_out = reinterpret_cast<uint64_t>(engine->lanes[direction].urgent_stream);
    return kOk;
}

}  // extern "C"
