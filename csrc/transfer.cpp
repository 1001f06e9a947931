// Transfer engine: hands copies, event waits and event records to the CUDA driver in one call, without Python in
// between. Streams also wait for words of host memory, and write them, by which processes order each other. A program's
// commands are issued this way: in order, on the streams that they name. Events mean what CUDA says.
//
// Copies are cut into pieces. The hardware may switch between streams at the seams; priorities do not reach the copy
// engines ("Stream priorities have no effect on host-to-device and device-to-host memory operations", CUDA Driver API,
// cuStreamCreateWithPriority).
//
// One thread at a time calls an engine. Another may call flex_transfer_synchronize beside it, for an event that was
// recorded before and is not recorded meanwhile.
#include <algorithm>
#include <memory>
#include <new>
#include <set>

#include "cuda_driver.h"

namespace {

using namespace flex;

enum Kind : uint64_t { kCopy = 0, kWait = 1, kRecord = 2, kAwait = 3, kRaise = 4 };

// Mirrored by `_Operation` in flexengine/native/transfer.py.
struct Operation {
    uint64_t kind;
    uint64_t stream;  // CUstream
    uint64_t event;   // address of an Event; waits and records
    uint64_t target;  // copies: addresses on either side, and bytes; awaits and raises: a word's address on the device
    uint64_t source;  // awaits and raises: the value
    uint64_t num_bytes;
};

struct Event {
    CuEvent handle = nullptr;
    bool recorded = false;
};

Event* event_at(uint64_t address) { return reinterpret_cast<Event*>(address); }

struct TransferEngine {
    CudaDriver driver;
    CuContext context = nullptr;
    uint64_t piece_bytes = 0;
    std::set<Event*> events;  // that exist
};

// Makes the engine's context current for the duration of a call, whatever thread it comes from.
class InContext {
 public:
    explicit InContext(TransferEngine& engine) : engine_(engine) {
        engine.driver.ctx_get_current(&before_);
        if (before_ != engine.context) engine.driver.ctx_set_current(engine.context);
    }
    ~InContext() {
        if (before_ != engine_.context) engine_.driver.ctx_set_current(before_);
    }
    InContext(const InContext&) = delete;
    InContext& operator=(const InContext&) = delete;

 private:
    TransferEngine& engine_;
    CuContext before_ = nullptr;
};

// Refuses what the driver would take silently for something else.
int check_operation(const Operation& operation, uint64_t index) {
    using Number = unsigned long long;
    FLEX_REQUIRE(operation.kind <= kRaise,
                 "operation %llu has kind %llu, expected 0 (copy), 1 (wait), 2 (record), 3 (await) or 4 (raise)",
                 Number(index), Number(operation.kind));
    if (operation.kind >= kAwait) {
        FLEX_REQUIRE(
            operation.target != 0 && operation.target % sizeof(uint32_t) == 0 && operation.source <= UINT32_MAX,
            "operation %llu has word 0x%llx and value %llu", Number(index), Number(operation.target),
            Number(operation.source));
        return kOk;
    }
    FLEX_REQUIRE(operation.kind == kCopy || operation.event != 0, "operation %llu has no event", Number(index));
    FLEX_REQUIRE(operation.kind != kWait || event_at(operation.event)->recorded,
                 "operation %llu waits for an event that nothing has recorded; CUDA would not wait at all",
                 Number(index));
    return kOk;
}

int copy_piece(TransferEngine& engine, const Operation& copy, uint64_t start, uint64_t num_bytes) {
    const uint64_t target = copy.target + start, source = copy.source + start;
    const CuStream stream = reinterpret_cast<CuStream>(copy.stream);
    const CuResult result = engine.driver.memcpy_async(target, source, num_bytes, stream);
    if (result == 0) return kOk;
    using Number = unsigned long long;
    return FLEX_FAIL(kSystem, "cuMemcpyAsync", "CUDA driver error %d: %s (%llu bytes from 0x%llx to 0x%llx)", result,
                     engine.driver.text(result), Number(num_bytes), Number(source), Number(target));
}

int submit_copy(TransferEngine& engine, const Operation& copy) {
    uint64_t num_bytes = 0;
    for (uint64_t start = 0; start < copy.num_bytes; start += num_bytes) {
        num_bytes = std::min(engine.piece_bytes, copy.num_bytes - start);
        if (int status = copy_piece(engine, copy, start, num_bytes)) return status;
    }
    return kOk;
}

int submit_word(TransferEngine& engine, const Operation& operation) {
    const CuStream stream = reinterpret_cast<CuStream>(operation.stream);
    const uint32_t value = static_cast<uint32_t>(operation.source);
    FLEX_REQUIRE(engine.driver.stream_wait_value != nullptr && engine.driver.stream_write_value != nullptr,
                 "the CUDA driver has no stream memory operations; ask flex_transfer_word_address first");
    if (operation.kind == kAwait) {
        FLEX_CUDA(engine.driver, stream_wait_value, (stream, operation.target, value, kWaitValueGreaterEqual));
    } else {
        FLEX_CUDA(engine.driver, stream_write_value, (stream, operation.target, value, kWriteValueDefault));
    }
    return kOk;
}

int submit_one(TransferEngine& engine, const Operation& operation, uint64_t index) {
    if (int status = check_operation(operation, index)) return status;
    if (operation.kind == kCopy) return submit_copy(engine, operation);
    if (operation.kind >= kAwait) return submit_word(engine, operation);
    const CuStream stream = reinterpret_cast<CuStream>(operation.stream);
    Event& event = *event_at(operation.event);
    if (operation.kind == kWait) {
        FLEX_CUDA(engine.driver, stream_wait_event, (stream, event.handle, 0));
        return kOk;
    }
    FLEX_CUDA(engine.driver, event_record, (event.handle, stream));
    event.recorded = true;
    return kOk;
}

void destroy_event(TransferEngine& engine, Event* event) {
    engine.driver.event_destroy(event->handle);
    delete event;
}

// Runs `body`; exhausted memory becomes a status.
template <typename Body>
int guarded(const char* statement, Body body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        return FLEX_FAIL(kNoMemory, statement, "out of host memory");
    }
}

}  // namespace

extern "C" {

// Opens an engine on the calling thread's CUDA context. driver_path: libcuda; copies are cut into pieces of
// piece_bytes.
FLEX_API int flex_transfer_open(const char* driver_path, uint64_t piece_bytes, TransferEngine** engine_out) {
    FLEX_REQUIRE(piece_bytes > 0, "piece_bytes is 0, expected at least 1");
    return guarded("open", [&]() -> int {
        auto engine = std::make_unique<TransferEngine>();
        engine->piece_bytes = piece_bytes;
        if (int status = engine->driver.load(driver_path)) return status;
        FLEX_CUDA(engine->driver, ctx_get_current, (&engine->context));
        FLEX_REQUIRE(engine->context != nullptr, "no CUDA context on this thread; use the device once before");
        *engine_out = engine.release();
        return kOk;
    });
}

// Frees the engine and the events that are left. What was submitted still runs to its end.
FLEX_API int flex_transfer_close(TransferEngine* engine) {
    {
        const InContext in_context(*engine);
        for (Event* event : engine->events) destroy_event(*engine, event);
    }
    delete engine;
    return kOk;
}

// Creates `count` events; `timing` makes them fit for flex_transfer_elapsed. A thread that waits for a `blocking` one
// sleeps, which leaves its core to others; for any other it looks again and again, and so goes on sooner.
FLEX_API int flex_transfer_create_events(TransferEngine* engine, uint64_t count, int timing, int blocking,
                                         uint64_t* events_out) {
    const InContext in_context(*engine);
    const unsigned flags = (timing ? 0 : kEventDisableTiming) | (blocking ? kEventBlockingSync : 0);
    return guarded("create events", [&]() -> int {
        for (uint64_t i = 0; i < count; ++i) {
            auto event = std::make_unique<Event>();
            FLEX_CUDA(engine->driver, event_create, (&event->handle, flags));
            engine->events.insert(event.get());
            events_out[i] = reinterpret_cast<uint64_t>(event.release());
        }
        return kOk;
    });
}

// Frees events; nothing that is submitted later may name them.
FLEX_API int flex_transfer_release_events(TransferEngine* engine, uint64_t count, const uint64_t* events) {
    const InContext in_context(*engine);
    for (uint64_t i = 0; i < count; ++i) {
        Event* const event = event_at(events[i]);
        FLEX_REQUIRE(engine->events.erase(event) == 1, "event %llu of %llu is not, or no longer, of this engine",
                     static_cast<unsigned long long>(i), static_cast<unsigned long long>(count));
        destroy_event(*engine, event);
    }
    return kOk;
}

// The device's address of a word of registered host memory, which streams can then await and raise; 0 where they
// cannot.
FLEX_API int flex_transfer_word_address(TransferEngine* engine, uint64_t host_address, uint64_t* address_out) {
    const InContext in_context(*engine);
    *address_out = 0;
    if (!engine->driver.has_stream_memory_operations()) return kOk;
    FLEX_CUDA(engine->driver, host_get_device_pointer, (address_out, reinterpret_cast<void*>(host_address), 0));
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

// Blocks until the last record of an event has been reached; returns at once if nothing has recorded it.
FLEX_API int flex_transfer_synchronize(TransferEngine* engine, uint64_t event) {
    const InContext in_context(*engine);
    FLEX_CUDA(engine->driver, event_synchronize, (event_at(event)->handle));
    return kOk;
}

// Seconds between two reached records of events made with `timing`.
FLEX_API int flex_transfer_elapsed(TransferEngine* engine, uint64_t from, uint64_t to, double* seconds_out) {
    const InContext in_context(*engine);
    float milliseconds = 0;
    FLEX_CUDA(engine->driver, event_elapsed_time, (&milliseconds, event_at(from)->handle, event_at(to)->handle));
    *seconds_out = milliseconds * 1e-3;
    return kOk;
}

}  // extern "C"
