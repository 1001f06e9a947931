// The transfer engine under sanitizers, over the fake driver: copies in pieces, events between streams and lanes,
// urgent copies while lanes work, failures, closing with work left. Link with -rdynamic: the engine looks the fake
// driver's functions up by name in this program.
#include <cstdio>

#include "fake_cuda.cpp"

struct Operation {
    uint64_t kind, stream, event, target, source, num_bytes;
};

extern "C" int flex_transfer_open(const char*, uint64_t, uint32_t, void**);
extern "C" int flex_transfer_close(void*);
extern "C" int flex_transfer_create_events(void*, uint64_t, int, uint64_t*);
extern "C" int flex_transfer_release_events(void*, uint64_t, const uint64_t*);
extern "C" int flex_transfer_submit(void*, const Operation*, uint64_t);
extern "C" int flex_transfer_post(void*, uint32_t, const Operation*, uint64_t, uint64_t*);
extern "C" int flex_transfer_wait(void*, uint32_t, uint64_t);
extern "C" int flex_transfer_synchronize(void*, uint64_t);
extern "C" int flex_transfer_elapsed(void*, uint64_t, uint64_t, double*);
extern "C" int flex_transfer_urgent_stream(void*, uint32_t, uint64_t*);
extern "C" const char* flex_last_error();

namespace {

using Bytes = std::vector<unsigned char>;
constexpr uint64_t kToDevice = 0, kToHost = 1;
int failures = 0;

void expect(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "FAILED: %s; last error: %s\n", what, flex_last_error());
    ++failures;
}

Bytes pattern(size_t count, unsigned seed) {
    Bytes bytes(count);
    for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<unsigned char>(i * 31 + i / 251 + seed * 77);
    return bytes;
}

Operation copy(uint64_t stream, Bytes& target, const Bytes& source) {
    return {0,
            stream,
            0,
            reinterpret_cast<uint64_t>(target.data()),
            reinterpret_cast<uint64_t>(source.data()),
            source.size()};
}
Operation wait_for(uint64_t stream, uint64_t event) { return {1, stream, event, 0, 0, 0}; }
Operation record(uint64_t stream, uint64_t event) { return {2, stream, event, 0, 0, 0}; }

void* open(uint64_t piece_bytes, uint32_t pieces_in_flight) {
    void* engine = nullptr;
    expect(flex_transfer_open(nullptr, piece_bytes, pieces_in_flight, &engine) == 0, "open");
    return engine;
}

int submit(void* engine, const std::vector<Operation>& operations) {
    return flex_transfer_submit(engine, operations.data(), operations.size());
}

uint64_t post(void* engine, uint32_t direction, const std::vector<Operation>& operations) {
    uint64_t ticket = 0;
    expect(flex_transfer_post(engine, direction, operations.data(), operations.size(), &ticket) == 0, "post");
    return ticket;
}

// Two streams, one event, many rounds: the event's records follow each other.
void check_streams() {
    void* engine = open(100, 2);
    uint64_t streams[2], events[2];
    for (uint32_t d : {0u, 1u}) expect(flex_transfer_urgent_stream(engine, d, streams + d) == 0, "stream");
    expect(flex_transfer_create_events(engine, 2, 1, events) == 0, "events");
    Bytes middle(5000), target(5000);
    for (unsigned round = 0; round < 30; ++round) {
        const Bytes source = pattern(5000, round);
        expect(submit(engine, {record(streams[0], events[0]), copy(streams[0], middle, source),
                               record(streams[0], events[1]), wait_for(streams[1], events[1]),
                               copy(streams[1], target, middle), record(streams[1], events[1])}) == 0,
               "submit");
        expect(flex_transfer_synchronize(engine, events[1]) == 0, "synchronize");
        expect(target == source, "contents after two streams");
    }
    double seconds = 0;
    expect(flex_transfer_elapsed(engine, events[0], events[1], &seconds) == 0 && seconds > 0, "elapsed");
    expect(flex_transfer_release_events(engine, 2, events) == 0, "release");
    expect(flex_transfer_close(engine) == 0, "close");
}

// Both lanes at work, a record of one awaited by the other, while urgent copies are submitted.
void check_lanes(uint32_t pieces_in_flight) {
    void* engine = open(64, pieces_in_flight);
    uint64_t urgent = 0, events[2];
    expect(flex_transfer_urgent_stream(engine, kToDevice, &urgent) == 0, "urgent stream");
    expect(flex_transfer_create_events(engine, 2, 0, events) == 0, "events");
    Bytes middle(3000), target(3000), urgent_target(200);
    for (unsigned round = 0; round < 20; ++round) {
        const Bytes source = pattern(3000, round), urgent_source = pattern(200, round + 1);
        const uint64_t first = post(engine, kToDevice, {copy(0, middle, source), record(0, events[0])});
        const uint64_t second = post(engine, kToHost, {wait_for(0, events[0]), copy(0, target, middle)});
        expect(submit(engine, {copy(urgent, urgent_target, urgent_source), record(urgent, events[1])}) == 0, "urgent");
        expect(flex_transfer_synchronize(engine, events[1]) == 0, "urgent copy done");
        expect(urgent_target == urgent_source, "contents of the urgent copy");
        expect(flex_transfer_wait(engine, kToHost, second) == 0, "wait for the second lane");
        expect(target == source, "contents after two lanes");
        expect(flex_transfer_wait(engine, kToDevice, first) == 0, "wait for the first lane");
    }
    expect(flex_transfer_release_events(engine, 2, events) == 0, "release");
    expect(flex_transfer_close(engine) == 0, "close");
}

// A stream waits for a record that a lane still holds back.
void check_queued_record() {
    void* engine = open(10, 1);
    uint64_t urgent = 0, event = 0;
    expect(flex_transfer_urgent_stream(engine, kToHost, &urgent) == 0, "urgent stream");
    expect(flex_transfer_create_events(engine, 1, 0, &event) == 0, "event");
    const Bytes source = pattern(2000, 3);
    Bytes middle(2000), target(2000);
    post(engine, kToDevice, {copy(0, middle, source), record(0, event)});
    expect(submit(engine, {wait_for(urgent, event), copy(urgent, target, middle), record(urgent, event)}) == 0,
           "submit");
    expect(flex_transfer_synchronize(engine, event) == 0 && target == source, "contents behind a queued record");
    expect(flex_transfer_release_events(engine, 1, &event) == 0, "release");
    expect(flex_transfer_close(engine) == 0, "close");
}

void check_failures() {
    void* engine = open(10, 2);
    uint64_t event = 0, ticket = 0;
    expect(flex_transfer_create_events(engine, 1, 0, &event) == 0, "event");
    const Operation wait = wait_for(0, event);
    expect(flex_transfer_submit(engine, &wait, 1) == -1, "a wait for nothing is refused");
    const Bytes source = pattern(1000, 4);
    Bytes target(1000);
    fake_fail("cuMemcpyAsync", 20, 700);
    ticket = post(engine, kToDevice, {copy(0, target, source), record(0, event)});
    expect(flex_transfer_submit(engine, &wait, 1) == -3, "waiting for a record that failed");
    expect(flex_transfer_wait(engine, kToDevice, ticket) == -3, "waiting for a post that failed");
    expect(std::strstr(flex_last_error(), "fake error 700") != nullptr, "the driver's words");
    expect(flex_transfer_post(engine, kToHost, &wait, 1, &ticket) == -3, "posting after a failure");
    expect(flex_transfer_release_events(engine, 1, &event) == 0, "release");
    expect(flex_transfer_close(engine) == 0, "close after a failure");
}

// Lets the paused device go on once `name` has been called `count` times; after 5 s in any case.
std::thread resume_after(const char* name, int count) {
    return std::thread([=] {
        expect(fake_await_calls(name, count, 5), name);
        fake_pause(0);
    });
}

// Who is told of a failure may free memory: the device has written by then what it had been given. The third copy
// fails, or its event, and then the copy is under way without one.
void check_failures_are_told_after_landing(const char* function, size_t num_copied_bytes) {
    fake_reset();
    void* engine = open(16, 3);
    const Bytes source = pattern(1000, 6);
    auto target = std::make_unique<Bytes>(1000);
    fake_fail(function, 2, 700);
    fake_pause(1);
    std::thread resume = resume_after("cuEventSynchronize", 1);
    const uint64_t ticket = post(engine, kToDevice, {copy(0, *target, source)});
    expect(flex_transfer_wait(engine, kToDevice, ticket) == -3, "waiting for a post that failed");
    expect(std::strstr(flex_last_error(), "fake error 700") != nullptr, "the driver's words, of the first failure");
    expect(std::memcmp(target->data(), source.data(), num_copied_bytes) == 0, "told before the device was done");
    target.reset();
    resume.join();
    expect(flex_transfer_close(engine) == 0, "close");
}

// The lane of one direction fails: posts before the failing one, those of the other direction and their events do not.
void check_failures_stay_where_they_are() {
    fake_reset();
    void* engine = open(16, 3);
    uint64_t event = 0;
    expect(flex_transfer_create_events(engine, 1, 0, &event) == 0, "event");
    const Bytes source = pattern(100, 7), short_source = pattern(20, 8);
    Bytes target(100), short_target(20);
    fake_pause(1);
    const uint64_t other = post(engine, kToHost, {copy(0, target, source), record(0, event)});
    expect(fake_await_calls("cuMemcpyAsync", 3, 5), "all pieces that may be in flight");
    fake_fail("cuMemcpyAsync", 2, 700);
    fake_block(1);  // until both posts are queued
    const uint64_t before = post(engine, kToDevice, {copy(0, short_target, short_source)});
    const uint64_t failing = post(engine, kToDevice, {copy(0, target, source)});
    fake_block(0);
    std::thread resume = resume_after("cuMemcpyAsync", 6);
    expect(flex_transfer_wait(engine, kToDevice, failing) == -3, "the post that fails");
    expect(flex_transfer_wait(engine, kToDevice, before) == 0 && short_target == short_source, "the post before it");
    expect(flex_transfer_synchronize(engine, event) == 0 && target == source, "an event of the other direction");
    expect(flex_transfer_wait(engine, kToHost, other) == 0, "a post of the other direction");
    resume.join();
    expect(flex_transfer_close(engine) == 0, "close");
}

// Closing finishes posts and urgent copies, and frees events only when no lane uses them any more.
void check_closing_with_work_left() {
    fake_reset();
    const Bytes source = pattern(4000, 5);
    Bytes targets[2] = {Bytes(4000), Bytes(4000)}, urgent_target(4000);
    void* engine = open(16, 3);
    uint64_t events[2], urgent = 0;
    expect(flex_transfer_urgent_stream(engine, kToHost, &urgent) == 0, "urgent stream");
    expect(flex_transfer_create_events(engine, 2, 0, events) == 0, "events");
    fake_pause(1);
    for (uint32_t d : {0u, 1u}) {
        const Operation first = copy(0, targets[d], source);
        post(engine, d, {record(0, events[d]), first, record(0, events[d]), first, record(0, events[d])});
    }
    expect(submit(engine, {copy(urgent, urgent_target, source)}) == 0, "urgent copy");
    std::thread resume = resume_after("cuEventSynchronize", 1);
    expect(flex_transfer_close(engine) == 0, "close");
    resume.join();
    expect(targets[0] == source && targets[1] == source, "what was posted is finished");
    expect(urgent_target == source, "what was submitted to the engine's own streams is finished");
    expect(fake_calls("cuEventCreate") == fake_calls("cuEventDestroy_v2"), "events are freed");
}

void check_events_are_released_once() {
    void* engine = open(16, 1);
    uint64_t event = 0, other = 1;
    expect(flex_transfer_create_events(engine, 1, 0, &event) == 0, "event");
    expect(flex_transfer_release_events(engine, 1, &other) == -1, "an event of nobody");
    expect(flex_transfer_release_events(engine, 1, &event) == 0, "release");
    expect(flex_transfer_release_events(engine, 1, &event) == -1, "a second release");
    expect(flex_transfer_close(engine) == 0, "close");
}

}  // namespace

int main() {
    check_streams();
    for (uint32_t pieces_in_flight : {1u, 2u, 7u}) check_lanes(pieces_in_flight);
    check_queued_record();
    check_failures();
    check_failures_are_told_after_landing("cuMemcpyAsync", 32);
    check_failures_are_told_after_landing("cuEventRecord", 48);
    check_failures_are_told_after_landing("cuEventCreate", 48);
    check_failures_stay_where_they_are();
    check_events_are_released_once();
    check_closing_with_work_left();
    fake_reset();
    return failures == 0 ? 0 : 1;
}
