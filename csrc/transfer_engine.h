// What both ways into the transfer engine share: operations, events, lanes' state, and the cutting of copies.
// transfer.cpp tells how the parts play together.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "cuda_driver.h"

namespace flex {

enum Kind : uint64_t { kCopy = 0, kWait = 1, kRecord = 2 };

// Mirrored by `_Operation` in flexengine/native/transfer.py.
struct Operation {
    uint64_t kind;
    uint64_t stream;  // CUstream; ignored by lanes, which have their own
    uint64_t event;   // address of an Event; waits and records
    uint64_t target;  // copies: addresses on either side, and bytes
    uint64_t source;
    uint64_t num_bytes;
};

struct Lane;

// A CUDA event, and how many of its records have been asked for and handed to the driver. They differ only while a
// lane still holds a record back; whoever waits for the event must then wait for the handing over first, since
// cuStreamWaitEvent sees only records that the driver knows of.
struct Event {
    CuEvent handle = nullptr;
    uint64_t requested = 0;          // written by the calling thread alone
    const Lane* recorder = nullptr;  // of the last record that was posted; touched by the calling thread alone
    std::atomic<uint64_t> issued{0};
};

inline Event* event_of(const Operation& operation) { return reinterpret_cast<Event*>(operation.event); }

// An operation of a lane with the number of records of its event that must be out before it (wait) or with it (record).
struct LaneOperation {
    Operation operation;
    uint64_t sequence;
};

struct Posted {
    uint64_t ticket;  // 0: no post
    std::vector<LaneOperation> operations;
};

struct InFlight {
    CuEvent event;
    uint64_t ticket;  // finished with this piece; 0 when more of the same post follows
};

// The bulk copies of one direction. `posted` and `completed` are tickets, counted from 1.
struct Lane {
    CuStream stream = nullptr;
    CuStream urgent_stream = nullptr;
    std::thread thread;
    std::deque<Posted> queue;      // under Engine::mutex
    uint64_t posted = 0;           // under Engine::mutex
    uint64_t completed = 0;        // under Engine::mutex
    std::string failure;           // under Engine::mutex; final. Set when nothing of the lane is in flight any more
    std::deque<InFlight> flying;   // the lane's thread alone
    std::vector<CuEvent> resting;  // the lane's thread alone: events of finished pieces
};

struct TransferEngine {
    CudaDriver driver;
    CuContext context = nullptr;
    uint64_t piece_bytes = 0;
    uint32_t pieces_in_flight = 0;
    Lane lanes[2];            // host to device, device to host
    std::set<Event*> events;  // that exist; touched by the calling thread alone
    std::mutex mutex;
    std::condition_variable changed;
    bool closing = false;  // under mutex
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

inline int lane_failure(const Lane& lane) { return FLEX_FAIL(kSystem, "bulk copy", "%s", lane.failure.c_str()); }

// Blocks until the driver has been given `count` records of the event, or until the lane that has the missing ones
// fails. `recorder` may be null only where none can be missing.
inline int await_issued(TransferEngine& engine, Event& event, uint64_t count, const Lane* recorder) {
    if (event.issued.load(std::memory_order_acquire) >= count) return kOk;
    std::unique_lock<std::mutex> lock(engine.mutex);
    engine.changed.wait(lock, [&] { return event.issued.load() >= count || !recorder->failure.empty(); });
    return event.issued.load() >= count ? kOk : lane_failure(*recorder);
}

inline int copy_piece(TransferEngine& engine, const Operation& copy, uint64_t start, uint64_t num_bytes,
                      CuStream stream) {
    const uint64_t target = copy.target + start, source = copy.source + start;
    const CuResult result = engine.driver.memcpy_async(target, source, num_bytes, stream);
    if (result == 0) return kOk;
    using Number = unsigned long long;
    return FLEX_FAIL(kSystem, "cuMemcpyAsync", "CUDA driver error %d: %s (%llu bytes from 0x%llx to 0x%llx)", result,
                     engine.driver.text(result), Number(num_bytes), Number(source), Number(target));
}

// Calls issue(start, bytes) for every piece of a copy until one fails.
template <typename Issue>
int for_each_piece(const TransferEngine& engine, const Operation& copy, Issue issue) {
    int status = kOk;
    for (uint64_t start = 0; start < copy.num_bytes && status == kOk; start += engine.piece_bytes)
        status = issue(start, std::min(engine.piece_bytes, copy.num_bytes - start));
    return status;
}

// Refuses what the driver would take silently for something else.
inline int check_operation(const Operation& operation, uint64_t index) {
    using Number = unsigned long long;
    FLEX_REQUIRE(operation.kind <= kRecord, "operation %llu has kind %llu, expected 0 (copy), 1 (wait) or 2 (record)",
                 Number(index), Number(operation.kind));
    FLEX_REQUIRE(operation.kind == kCopy || operation.event != 0, "operation %llu has no event", Number(index));
    FLEX_REQUIRE(operation.kind != kWait || event_of(operation)->requested > 0,
                 "operation %llu waits for an event that nothing has recorded; CUDA would not wait at all",
                 Number(index));
    return kOk;
}

}  // namespace flex
