// The transfer engine under sanitizers, over the fake driver: copies in pieces, events between streams, another thread
// that waits for events, failures, closing with work left. Link with -rdynamic: the engine looks the fake driver's
// functions up by name in this program.
#include <cstdio>

#include "fake_cuda.cpp"

struct Operation {
    uint64_t kind, stream, event, target, source, num_bytes;
};

extern "C" int flex_transfer_open(const char*, uint64_t, void**);
extern "C" int flex_transfer_close(void*);
extern "C" int flex_transfer_create_events(void*, uint64_t, int, int, uint64_t*);
extern "C" int flex_transfer_release_events(void*, uint64_t, const uint64_t*);
extern "C" int flex_transfer_submit(void*, const Operation*, uint64_t);
extern "C" int flex_transfer_synchronize(void*, uint64_t);
extern "C" int flex_transfer_elapsed(void*, uint64_t, uint64_t, double*);
extern "C" int flex_transfer_word_address(void*, uint64_t, uint64_t*);
extern "C" const char* flex_last_error();

namespace {

using Bytes = std::vector<unsigned char>;
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

Operation await_word(uint64_t stream, uint64_t word, uint32_t value) { return {3, stream, 0, word, value, 0}; }
Operation raise_word(uint64_t stream, uint64_t word, uint32_t value) { return {4, stream, 0, word, value, 0}; }

void* open(uint64_t piece_bytes) {
    void* engine = nullptr;
    expect(flex_transfer_open(nullptr, piece_bytes, &engine) == 0, "open");
    return engine;
}

int submit(void* engine, const std::vector<Operation>& operations) {
    return flex_transfer_submit(engine, operations.data(), operations.size());
}

// Two streams, one event, many rounds: the event's records follow each other.
void check_streams() {
    void* engine = open(100);
    const uint64_t streams[2] = {fake_stream(), fake_stream()};
    uint64_t events[2];
    expect(flex_transfer_create_events(engine, 2, 1, 0, events) == 0, "events");
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

// Another thread waits for an event while this one goes on submitting.
void check_another_thread_waits() {
    void* engine = open(64);
    const uint64_t streams[2] = {fake_stream(), fake_stream()};
    uint64_t events[2];
    expect(flex_transfer_create_events(engine, 2, 0, 0, events) == 0, "events");
    for (unsigned round = 0; round < 20; ++round) {
        const Bytes source = pattern(3000, round), other_source = pattern(200, round + 1);
        Bytes target(3000), other_target(200);
        expect(submit(engine, {copy(streams[0], target, source), record(streams[0], events[0])}) == 0, "submit");
        std::thread waiting([&] {
            expect(flex_transfer_synchronize(engine, events[0]) == 0, "synchronize beside a submit");
            expect(target == source, "contents of the first stream");
        });
        expect(submit(engine, {copy(streams[1], other_target, other_source), record(streams[1], events[1])}) == 0,
               "submit beside a synchronize");
        expect(flex_transfer_synchronize(engine, events[1]) == 0, "synchronize");
        expect(other_target == other_source, "contents of the second stream");
        waiting.join();
    }
    expect(flex_transfer_release_events(engine, 2, events) == 0, "release");
    expect(flex_transfer_close(engine) == 0, "close");
}

void check_failures() {
    void* engine = open(10);
    const uint64_t stream = fake_stream();
    uint64_t event = 0;
    expect(flex_transfer_create_events(engine, 1, 0, 0, &event) == 0, "event");
    expect(submit(engine, {wait_for(stream, event)}) == -1, "a wait for nothing is refused");
    const Bytes source = pattern(1000, 4);
    Bytes target(1000);
    fake_fail("cuMemcpyAsync", 20, 700);
    expect(submit(engine, {copy(stream, target, source), record(stream, event)}) == -3, "a copy that fails");
    expect(std::strstr(flex_last_error(), "fake error 700") != nullptr, "the driver's words");
    expect(submit(engine, {wait_for(stream, event)}) == -1, "a record behind a failure was not issued");
    fake_settle();
    expect(std::memcmp(target.data(), source.data(), 200) == 0 && target[200] == 0, "what came before was issued");
    expect(flex_transfer_release_events(engine, 1, &event) == 0, "release");
    expect(flex_transfer_close(engine) == 0, "close after a failure");
}

// Closing frees the events and leaves to the device what it has been given.
void check_closing_with_work_left() {
    fake_reset();
    const Bytes source = pattern(4000, 5);
    Bytes target(4000);
    void* engine = open(16);
    const uint64_t stream = fake_stream();
    uint64_t events[2];
    expect(flex_transfer_create_events(engine, 2, 0, 0, events) == 0, "events");
    fake_pause(1);
    expect(submit(engine, {record(stream, events[0]), copy(stream, target, source), record(stream, events[1])}) == 0,
           "submit");
    expect(flex_transfer_close(engine) == 0, "close");
    expect(fake_calls("cuEventCreate") == fake_calls("cuEventDestroy_v2"), "events are freed");
    fake_pause(0);
    fake_settle();
    expect(target == source, "what was submitted is finished");
}

void check_events_are_released_once() {
    void* engine = open(16);
    uint64_t event = 0, other = 1;
    expect(flex_transfer_create_events(engine, 1, 0, 0, &event) == 0, "event");
    expect(flex_transfer_release_events(engine, 1, &other) == -1, "an event of nobody");
    expect(flex_transfer_release_events(engine, 1, &event) == 0, "release");
    expect(flex_transfer_release_events(engine, 1, &event) == -1, "a second release");
    expect(flex_transfer_close(engine) == 0, "close");
}

// Two engines order their copies by words of memory; the one that waits goes on when the other has raised.
void check_words() {
    void *first = open(100), *second = open(100);
    const uint64_t streams[2] = {fake_stream(), fake_stream()};
    uint32_t words[2] = {};
    uint64_t addresses[2], event = 0;
    for (int i = 0; i < 2; ++i) {
        expect(flex_transfer_word_address(first, reinterpret_cast<uint64_t>(&words[i]), &addresses[i]) == 0, "address");
        expect(addresses[i] != 0, "words can be awaited");
    }
    expect(flex_transfer_create_events(second, 1, 0, 0, &event) == 0, "event");
    Bytes middle(3000), target(3000);
    for (uint32_t round = 1; round <= 30; ++round) {
        const Bytes source = pattern(3000, round);
        expect(submit(second, {await_word(streams[1], addresses[0], round), copy(streams[1], target, middle),
                               raise_word(streams[1], addresses[1], round), record(streams[1], event)}) == 0,
               "submit what waits");
        expect(submit(first, {await_word(streams[0], addresses[1], round - 1), copy(streams[0], middle, source),
                              raise_word(streams[0], addresses[0], round)}) == 0,
               "submit what raises");
        expect(flex_transfer_synchronize(second, event) == 0, "synchronize");
        expect(target == source, "contents in the order of words");
    }
    expect(submit(first, {await_word(streams[0], 0, 1)}) == -1, "no word");
    expect(submit(first, {await_word(streams[0], addresses[0] + 1, 1)}) == -1, "a word that is not aligned");
    fake_fail("cuStreamWriteValue32_v2", 0, 801);
    expect(submit(first, {raise_word(streams[0], addresses[0], 1)}) == -3, "a write that fails");
    fake_memory_operations(0);
    expect(flex_transfer_word_address(first, addresses[0], &addresses[0]) == 0 && addresses[0] == 0, "no operations");
    expect(flex_transfer_close(first) == 0 && flex_transfer_close(second) == 0, "close");
}

}  // namespace

int main() {
    check_words();
    check_streams();
    check_another_thread_waits();
    check_failures();
    check_events_are_released_once();
    check_closing_with_work_left();
    fake_reset();
    return failures == 0 ? 0 : 1;
}
