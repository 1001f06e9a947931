// A CUDA driver without a GPU: the functions of cuda_driver.h over a device thread, so that transfers are tested
// anywhere.
//
// Streams are queues of copies, waits and records; one thread runs their heads. It models the least favourable
// hardware: one copy engine, which of all copies that may start takes the one that was issued first. Tests stop and
// slow streams, make calls fail or block, and read a log of what ran in which order. Nothing depends on time: an
// operation lasts 1 ms of a clock that only operations move. Words that streams await are looked at every 0.2 ms.
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

constexpr int kInvalidValue = 1, kInvalidHandle = 400;
constexpr unsigned kBlockingSync = 1, kDisableTiming = 2, kLazyPeerAccess = 1;
constexpr uint64_t kPageBytes = 4096;

struct IpcHandle {
    char bytes[64];
};

struct Mark {  // one record of an event
    bool reached = false;
    int64_t clock_ms = 0;
};

struct Event {
    unsigned flags;
    std::shared_ptr<Mark> mark;  // of the last record; null before the first
};

enum class Kind { kCopy, kWait, kRecord, kAwait, kRaise };
constexpr int kStreamMemoryOperations = 122;
constexpr auto kLook = std::chrono::microseconds(200);

uint32_t* word_at(uint64_t address) { return reinterpret_cast<uint32_t*>(address); }

struct Item {
    Kind kind;
    uint64_t number;  // order of issue
    std::shared_ptr<Mark> mark;
    uint64_t target = 0, source = 0, num_bytes = 0;  // of a word: its address and the value

    bool reached() const {  // as GPUs compare: by the sign of the difference
        const uint32_t found = __atomic_load_n(word_at(target), __ATOMIC_SEQ_CST);
        return static_cast<int32_t>(found - static_cast<uint32_t>(source)) >= 0;
    }
};

struct Stream {
    std::deque<Item> items;
    bool held = false, lagging = false;
};

struct LogEntry {
    uint64_t stream, target, source, num_bytes;
};

struct Failure {
    int calls_before;
    int code;
};

class Device {
 public:
    std::mutex mutex;
    std::condition_variable changed;
    std::map<uint64_t, Stream> streams;
    std::set<const Event*> events;  // that exist
    std::vector<LogEntry> log;      // copies in the order in which they ran
    std::map<std::string, int> calls;
    std::map<std::string, Failure> failures;
    uint64_t next_number = 1, next_stream = 0x1000;
    int64_t clock_ms = 0;
    int num_blocked = 0;
    bool blocking = false, paused = false, busy = false, started = false, memory_operations = true;
    void* context = reinterpret_cast<void*>(0xC0);

    void start() {
        if (started) return;
        started = true;
        std::thread([this] { run(); }).detach();
    }

    void issue(uint64_t stream, Item item) {
        item.number = next_number++;
        streams[stream].items.push_back(std::move(item));
        start();
        changed.notify_all();
    }

    // The stream whose head runs next, or null: a wait or record that may run, else the copy that was issued first.
    // Streams that lag take part only when no other can go on.
    std::pair<const uint64_t, Stream>* runnable() {
        std::pair<const uint64_t, Stream>* found = runnable_among(false);
        return found != nullptr ? found : runnable_among(true);
    }

    bool knows(const Event* event) const { return events.count(event) > 0; }
    bool idle() { return !busy && runnable() == nullptr; }

 private:
    std::pair<const uint64_t, Stream>* runnable_among(bool lagging) {
        std::pair<const uint64_t, Stream>* first_copy = nullptr;
        for (auto& entry : streams) {
            const Stream& stream = entry.second;
            if (paused || stream.held || stream.lagging != lagging || stream.items.empty()) continue;
            const Item& head = stream.items.front();
            if (head.kind == Kind::kRecord || (head.kind == Kind::kWait && head.mark->reached)) return &entry;
            if (head.kind == Kind::kRaise || (head.kind == Kind::kAwait && head.reached())) return &entry;
            if (head.kind != Kind::kCopy) continue;
            if (first_copy == nullptr || head.number < first_copy->second.items.front().number) first_copy = &entry;
        }
        return first_copy;
    }

    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            while (!changed.wait_for(lock, kLook, [&] { return runnable() != nullptr; })) {
            }
            auto& [handle, stream] = *runnable();
            const Item item = stream.items.front();
            if (item.kind == Kind::kCopy) {
                busy = true;
                lock.unlock();
                std::memcpy(reinterpret_cast<void*>(item.target), reinterpret_cast<void*>(item.source), item.num_bytes);
                lock.lock();
                busy = false;
                log.push_back({handle, item.target, item.source, item.num_bytes});
            }
            ++clock_ms;
            if (item.kind == Kind::kRecord) *item.mark = {true, clock_ms};
            if (item.kind == Kind::kRaise)
                __atomic_store_n(word_at(item.target), static_cast<uint32_t>(item.source), __ATOMIC_SEQ_CST);
            stream.items.pop_front();
            changed.notify_all();
        }
    }
};

Device& device() {
    static Device* const instance = new Device;  // never destroyed: its thread outlives main
    return *instance;
}

// Counts a call; the code with which it is to fail, or 0.
int enter(const char* name) {
    Device& d = device();
    ++d.calls[name];
    d.changed.notify_all();
    const auto found = d.failures.find(name);
    if (found == d.failures.end() || found->second.calls_before-- > 0) return 0;
    const int code = found->second.code;
    d.failures.erase(found);
    return code;
}

}  // namespace

// -- the driver's functions -------------------------------------------------------------------------------------------

EXPORT int cuGetErrorString(int code, const char** text) {
    thread_local std::string words;
    words = "fake error " + std::to_string(code);
    *text = words.c_str();
    return 0;
}

EXPORT int cuCtxGetCurrent(void** context) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    *context = device().context;
    return enter("cuCtxGetCurrent");
}

EXPORT int cuCtxSetCurrent(void*) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    return enter("cuCtxSetCurrent");
}

EXPORT int cuStreamWaitEvent(uint64_t stream, Event* event, unsigned) {
    Device& d = device();
    const std::lock_guard<std::mutex> lock(d.mutex);
    if (int code = enter("cuStreamWaitEvent")) return code;
    if (!d.knows(event)) return kInvalidHandle;
    if (event->mark != nullptr) d.issue(stream, {Kind::kWait, 0, event->mark});  // never recorded: no wait, as in CUDA
    return 0;
}

EXPORT int cuEventCreate(Event** event, unsigned flags) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    if (int code = enter("cuEventCreate")) return code;
    *event = new Event{flags, nullptr};
    device().events.insert(*event);
    return 0;
}

EXPORT int cuEventDestroy_v2(Event* event) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    if (device().events.erase(event) == 0) return kInvalidHandle;
    delete event;
    return enter("cuEventDestroy_v2");
}

EXPORT int cuEventRecord(Event* event, uint64_t stream) {
    Device& d = device();
    const std::lock_guard<std::mutex> lock(d.mutex);
    if (int code = enter("cuEventRecord")) return code;
    if (!d.knows(event)) return kInvalidHandle;
    event->mark = std::make_shared<Mark>();
    d.issue(stream, {Kind::kRecord, 0, event->mark});
    return 0;
}

EXPORT int cuEventSynchronize(Event* event) {
    Device& d = device();
    std::unique_lock<std::mutex> lock(d.mutex);
    if (int code = enter("cuEventSynchronize")) return code;
    if (!d.knows(event)) return kInvalidHandle;
    if (event->flags & kBlockingSync) ++d.calls["cuEventSynchronize, sleeping"];
    const std::shared_ptr<Mark> mark = event->mark;
    d.changed.wait(lock, [&] { return mark == nullptr || mark->reached; });
    return 0;
}

EXPORT int cuEventElapsedTime(float* milliseconds, Event* from, Event* to) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    if (int code = enter("cuEventElapsedTime")) return code;
    for (const Event* event : {from, to}) {
        if (!device().knows(event) || event->flags & kDisableTiming || event->mark == nullptr || !event->mark->reached)
            return kInvalidHandle;
    }
    *milliseconds = static_cast<float>(to->mark->clock_ms - from->mark->clock_ms);
    return 0;
}

EXPORT int cuMemcpyAsync(uint64_t target, uint64_t source, size_t num_bytes, uint64_t stream) {
    Device& d = device();
    std::unique_lock<std::mutex> lock(d.mutex);
    if (int code = enter("cuMemcpyAsync")) return code;
    if (target == 0 || source == 0) return kInvalidValue;
    ++d.num_blocked;
    d.changed.notify_all();
    d.changed.wait(lock, [&] { return !d.blocking; });
    --d.num_blocked;
    d.issue(stream, {Kind::kCopy, 0, nullptr, target, source, num_bytes});
    return 0;
}

EXPORT int cuStreamWaitValue32_v2(uint64_t stream, uint64_t address, uint32_t value, unsigned flags) {
    Device& d = device();
    const std::lock_guard<std::mutex> lock(d.mutex);
    if (int code = enter("cuStreamWaitValue32_v2")) return code;
    if (address == 0 || flags != 0) return kInvalidValue;
    d.issue(stream, {Kind::kAwait, 0, nullptr, address, value});
    return 0;
}

EXPORT int cuStreamWriteValue32_v2(uint64_t stream, uint64_t address, uint32_t value, unsigned flags) {
    Device& d = device();
    const std::lock_guard<std::mutex> lock(d.mutex);
    if (int code = enter("cuStreamWriteValue32_v2")) return code;
    if (address == 0 || flags != 0) return kInvalidValue;
    d.issue(stream, {Kind::kRaise, 0, nullptr, address, value});
    return 0;
}

EXPORT int cuMemHostGetDevicePointer_v2(uint64_t* device_address, void* host, unsigned) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    if (int code = enter("cuMemHostGetDevicePointer_v2")) return code;
    *device_address = reinterpret_cast<uint64_t>(host);
    return 0;
}

EXPORT int cuCtxGetDevice(int* number) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    *number = 0;
    return enter("cuCtxGetDevice");
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    *value = attribute == kStreamMemoryOperations && device().memory_operations;
    return enter("cuDeviceGetAttribute");
}

// Memory of other processes: every page is an allocation, and a handle has its address.
EXPORT int cuMemGetAddressRange_v2(uint64_t* base, size_t* size, uint64_t address) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    *base = address / kPageBytes * kPageBytes;
    *size = kPageBytes;
    return enter("cuMemGetAddressRange_v2");
}

EXPORT int cuIpcGetMemHandle(IpcHandle* handle, uint64_t base) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    *handle = {};
    std::memcpy(handle->bytes, &base, sizeof base);
    return enter("cuIpcGetMemHandle");
}

EXPORT int cuIpcOpenMemHandle_v2(uint64_t* base, IpcHandle handle, unsigned flags) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    if (int code = enter("cuIpcOpenMemHandle_v2")) return code;
    if (flags != kLazyPeerAccess) return kInvalidValue;
    std::memcpy(base, handle.bytes, sizeof *base);
    return 0;
}

EXPORT int cuIpcCloseMemHandle(uint64_t) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    return enter("cuIpcCloseMemHandle");
}

// -- what tests use ---------------------------------------------------------------------------------------------------

// Makes a stream and returns its handle.
EXPORT uint64_t fake_stream() {
    Device& d = device();
    const std::lock_guard<std::mutex> lock(d.mutex);
    const uint64_t stream = d.next_stream++;
    d.streams[stream];
    return stream;
}

// Forgets log, counts, failures and holds, after everything that was issued has run.
EXPORT void fake_reset() {
    Device& d = device();
    std::unique_lock<std::mutex> lock(d.mutex);
    for (auto& entry : d.streams) entry.second.held = entry.second.lagging = false;
    d.blocking = d.paused = false;
    d.memory_operations = true;
    d.changed.notify_all();
    d.changed.wait(lock, [&] { return d.idle(); });
    d.log.clear();
    d.calls.clear();
    d.failures.clear();
    d.context = reinterpret_cast<void*>(0xC0);
}

// Stops a stream while its queue still fills, or lets it go on.
EXPORT void fake_hold(uint64_t stream, int held) {
    Device& d = device();
    const std::lock_guard<std::mutex> lock(d.mutex);
    d.streams[stream].held = held != 0;
    d.changed.notify_all();
}

// From now on a stream runs only when no other can go on, or takes its turn again.
EXPORT void fake_lag(uint64_t stream, int lagging) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    device().streams[stream].lagging = lagging != 0;
}

// Whether streams can wait for words of memory.
EXPORT void fake_memory_operations(int supported) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    device().memory_operations = supported != 0;
}

// Stops the device while calls still issue work, or lets it go on.
EXPORT void fake_pause(int paused) {
    Device& d = device();
    const std::lock_guard<std::mutex> lock(d.mutex);
    d.paused = paused != 0;
    d.changed.notify_all();
}

// Returns once nothing that was issued can run any further.
EXPORT void fake_settle() {
    Device& d = device();
    std::unique_lock<std::mutex> lock(d.mutex);
    d.changed.wait(lock, [&] { return d.idle(); });
}

// Makes the call of `name` after `calls_before` further ones fail with `code`.
EXPORT void fake_fail(const char* name, int calls_before, int code) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    device().failures[name] = {calls_before, code};
}

// From now on every cuMemcpyAsync blocks inside the call, until it is switched off.
EXPORT void fake_block(int blocking) {
    Device& d = device();
    const std::lock_guard<std::mutex> lock(d.mutex);
    d.blocking = blocking != 0;
    d.changed.notify_all();
}

// Waits until a call is blocked; false after `timeout_s`.
EXPORT int fake_await_blocked(double timeout_s) {
    Device& d = device();
    std::unique_lock<std::mutex> lock(d.mutex);
    return d.changed.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return d.num_blocked > 0; });
}

// Waits until `name` has been called at least `count` times since the last reset.
EXPORT int fake_await_calls(const char* name, int count, double timeout_s) {
    Device& d = device();
    std::unique_lock<std::mutex> lock(d.mutex);
    return d.changed.wait_for(lock, std::chrono::duration<double>(timeout_s), [&] { return d.calls[name] >= count; });
}

EXPORT int fake_calls(const char* name) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    return device().calls[name];
}

EXPORT void fake_set_context(void* context) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    device().context = context;
}

EXPORT uint64_t fake_log_size() {
    const std::lock_guard<std::mutex> lock(device().mutex);
    return device().log.size();
}

// Entry of the log: stream, target, source, bytes.
EXPORT void fake_log_entry(uint64_t index, uint64_t entry[4]) {
    const std::lock_guard<std::mutex> lock(device().mutex);
    const LogEntry& found = device().log.at(index);
    entry[0] = found.stream, entry[1] = found.target, entry[2] = found.source, entry[3] = found.num_bytes;
}
