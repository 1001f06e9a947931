// A lane: the thread that hands the posted copies of one direction to the driver, a few pieces at a time.
#pragma once

#include "transfer_engine.h"

extern "C" const char* flex_last_error();

namespace flex {

// Waits for the oldest piece in flight and publishes its ticket, unless this piece or one before it failed.
inline int land_one(TransferEngine& engine, Lane& lane) {
    const InFlight oldest = lane.flying.front();
    lane.flying.pop_front();
    lane.resting.push_back(oldest.event);
    if (const CuResult result = engine.driver.event_synchronize(oldest.event)) {
        for (InFlight& later : lane.flying) later.ticket = 0;
        return FLEX_FAIL(kSystem, "cuEventSynchronize", "CUDA driver error %d: %s", result, engine.driver.text(result));
    }
    if (oldest.ticket != 0) {
        const std::lock_guard<std::mutex> lock(engine.mutex);
        lane.completed = oldest.ticket;
        engine.changed.notify_all();
    }
    return kOk;
}

// Counts what the lane has issued last as in flight.
inline int take_off(TransferEngine& engine, Lane& lane, uint64_t ticket) {
    if (lane.resting.empty()) {
        CuEvent event = nullptr;
        FLEX_CUDA(engine.driver, event_create, (&event, kEventBlockingSync | kEventDisableTiming));
        lane.resting.push_back(event);
    }
    FLEX_CUDA(engine.driver, event_record, (lane.resting.back(), lane.stream));
    lane.flying.push_back({lane.resting.back(), ticket});
    lane.resting.pop_back();
    return kOk;
}

inline int lane_copy(TransferEngine& engine, Lane& lane, const Operation& copy) {
    return for_each_piece(engine, copy, [&](uint64_t start, uint64_t num_bytes) {
        while (lane.flying.size() >= engine.pieces_in_flight) {
            if (int status = land_one(engine, lane)) return status;
        }
        if (int status = copy_piece(engine, copy, start, num_bytes, lane.stream)) return status;
        return take_off(engine, lane, 0);
    });
}

// Records that are missing when a lane comes to an event are the other's: its own and submitted ones are out by then.
inline int await_other(TransferEngine& engine, Lane& lane, Event& event, uint64_t count) {
    return await_issued(engine, event, count, &engine.lanes[&lane == engine.lanes ? 1 : 0]);
}

inline int lane_wait(TransferEngine& engine, Lane& lane, Event& event, uint64_t sequence) {
    if (int status = await_other(engine, lane, event, sequence)) return status;
    FLEX_CUDA(engine.driver, stream_wait_event, (lane.stream, event.handle, 0));
    return kOk;
}

inline int lane_record(TransferEngine& engine, Lane& lane, Event& event, uint64_t sequence) {
    if (int status = await_other(engine, lane, event, sequence - 1)) return status;
    FLEX_CUDA(engine.driver, event_record, (event.handle, lane.stream));
    const std::lock_guard<std::mutex> lock(engine.mutex);
    event.issued.store(sequence, std::memory_order_release);
    engine.changed.notify_all();
    return kOk;
}

inline int issue_post(TransferEngine& engine, Lane& lane, const Posted& posted) {
    int status = kOk;
    bool ends_with_copy = false;
    for (const LaneOperation& item : posted.operations) {
        const Operation& operation = item.operation;
        if (operation.kind == kCopy) status = lane_copy(engine, lane, operation);
        if (operation.kind == kWait) status = lane_wait(engine, lane, *event_of(operation), item.sequence);
        if (operation.kind == kRecord) status = lane_record(engine, lane, *event_of(operation), item.sequence);
        if (status != kOk) return status;
        ends_with_copy = operation.kind == kCopy && operation.num_bytes > 0;
    }
    if (!ends_with_copy) return take_off(engine, lane, posted.ticket);
    lane.flying.back().ticket = posted.ticket;  // the last piece ends the post
    return kOk;
}

// Takes the next post, or leaves `posted` empty when pieces are in flight and nothing is queued. Blocks when there is
// nothing to do; false when the lane may end.
inline bool next_post(TransferEngine& engine, Lane& lane, Posted& posted) {
    posted = Posted{0, {}};
    std::unique_lock<std::mutex> lock(engine.mutex);
    if (lane.queue.empty() && !lane.flying.empty()) return true;
    engine.changed.wait(lock, [&] { return !lane.queue.empty() || engine.closing; });
    if (lane.queue.empty()) return false;
    posted = std::move(lane.queue.front());
    lane.queue.pop_front();
    return true;
}

// Ends a lane after a failure: lets all that is in flight land, then tells of it. Who is told may free memory, which
// the device must not write any more.
inline void give_up(TransferEngine& engine, Lane& lane) {
    const std::string failure = flex_last_error();
    while (!lane.flying.empty()) land_one(engine, lane);
    engine.driver.stream_synchronize(lane.stream);  // a last copy may have no event; where this fails, nothing runs
    const std::lock_guard<std::mutex> lock(engine.mutex);
    lane.failure = failure;
    engine.changed.notify_all();
}

// The lane's thread. It ends at the first failure, which every later post reports: CUDA errors seldom pass.
inline void run_lane(TransferEngine& engine, Lane& lane) {
    engine.driver.ctx_set_current(engine.context);
    Posted posted;
    while (next_post(engine, lane, posted)) {
        const int status = posted.ticket == 0 ? land_one(engine, lane) : issue_post(engine, lane, posted);
        if (status != kOk) return give_up(engine, lane);
    }
}

}  // namespace flex
