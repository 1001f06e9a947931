// The parallel reader under sanitizers: straight and converting jobs in small blocks by many threads, ends of files and
// bad descriptors, every conversion over special values, sizes near 2^64, and a calling thread of little stack.
#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <utility>
#include <vector>

#include "../convert.h"

struct ReadJob {
    uint64_t offset_bytes, count;
    void *target, *remainder;
    int32_t descriptor;
    flex::Type source_type, target_type;
    uint32_t unused;
};
struct ReadFailureError {
    uint64_t job, offset_bytes;
    int32_t error_number;
};

extern "C" int flex_read(const ReadJob*, uint64_t, int32_t, uint64_t, ReadFailureError*);
extern "C" const char* flex_last_error();

namespace {

using flex::Type;
using Bytes = std::vector<unsigned char>;
int failures = 0;

void expect(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "FAILED: %s; last error: %s\n", what, flex_last_error());
    ++failures;
}

// A file that has no name any more, with `count` bytes in it.
int file_of(const Bytes& contents) {
    char name[] = "/tmp/reader_test_XXXXXX";
    const int descriptor = mkstemp(name);
    expect(descriptor >= 0 && unlink(name) == 0, "temporary file");
    expect(write(descriptor, contents.data(), contents.size()) == static_cast<ssize_t>(contents.size()), "write");
    return descriptor;
}

// Bytes in which every pattern of two bytes occurs: all bf16 and float16 values, special ones among the others.
Bytes all_patterns() {
    Bytes bytes(4 * 65536);
    for (size_t i = 0; i < bytes.size() / 4; ++i) {
        const uint16_t halves[2] = {static_cast<uint16_t>(i * 40503u), static_cast<uint16_t>(i)};
        std::memcpy(&bytes[4 * i], halves, 4);
    }
    return bytes;
}

ReadJob job_of(int descriptor, uint64_t offset, uint64_t count, Type source, Type target_type, void* target,
               void* remainder = nullptr) {
    return {offset, count, target, remainder, descriptor, source, target_type, 0};
}

void check_straight(const Bytes& contents, int descriptor) {
    for (int threads : {1, 4}) {
        Bytes target(contents.size()), head(1000);
        const ReadJob jobs[] = {job_of(descriptor, 0, contents.size(), Type::kRaw, Type::kRaw, target.data()),
                                job_of(descriptor, 5, 0, Type::kRaw, Type::kRaw, nullptr),
                                job_of(descriptor, 7, 1000, Type::kRaw, Type::kRaw, head.data())};
        ReadFailureError failure{};
        expect(flex_read(jobs, 3, threads, 4096, &failure) == 0, "read");
        expect(target == contents && std::memcmp(head.data(), &contents[7], 1000) == 0, "contents");
    }
}

void check_conversions(const Bytes& contents, int descriptor) {
    for (Type source : {Type::kBf16, Type::kF16, Type::kF32, Type::kF64}) {
        for (Type target : {Type::kBf16, Type::kF32, Type::kF64}) {
            for (bool split : {false, true}) {
                if (source == target || (split && target != Type::kBf16)) continue;
                const uint64_t count = contents.size() / flex::size_of(source) - 3;
                Bytes to(count * flex::size_of(target)), low(split ? count * 2 : 0), expected(to), expected_low(low);
                void* const remainder = split ? low.data() : nullptr;
                const uint64_t offset = 3 * flex::size_of(source);
                const ReadJob job = job_of(descriptor, offset, count, source, target, to.data(), remainder);
                ReadFailureError failure{};
                expect(flex_read(&job, 1, 3, 10000, &failure) == 0, "converting read");
                flex::find_conversion(source, target, split)(&contents[offset], expected.data(), expected_low.data(),
                                                             count);
                expect(to == expected && low == expected_low, "blocks convert like the whole");
            }
        }
    }
}

void check_failures(const Bytes& contents, int descriptor) {
    Bytes target(contents.size() + 100);
    ReadFailureError failure{};
    ReadJob jobs[] = {job_of(descriptor, 0, 100, Type::kRaw, Type::kRaw, target.data()),
                      job_of(descriptor, 50, contents.size(), Type::kRaw, Type::kRaw, target.data() + 100)};
    expect(flex_read(jobs, 2, 4, 4096, &failure) == -3, "a file that ends");
    expect(failure.job == 1 && failure.offset_bytes == contents.size() && failure.error_number == 0, "where it ended");
    jobs[0].descriptor = -1;
    expect(flex_read(jobs, 1, 4, 4096, &failure) == -3 && failure.error_number == EBADF, "a bad descriptor");
    jobs[0].source_type = Type::kF64;
    expect(flex_read(jobs, 1, 4, 4096, &failure) == -1, "no conversion to raw bytes");
    jobs[0].source_type = static_cast<Type>(77);
    expect(flex_read(jobs, 1, 4, 4096, &failure) == -1, "an unknown type");
    jobs[0].target_type = jobs[0].source_type;
    expect(flex_read(jobs, 1, 4, 4096, &failure) == -1, "an unknown type that is equal on both sides");
}

// Blocks of any size give the same bytes; what cannot be counted or lie in a file is refused.
void check_extremes(const Bytes& contents, int descriptor) {
    ReadFailureError failure{};
    for (uint64_t block_bytes : {uint64_t{1} << 63, ~uint64_t{0} - 1, ~uint64_t{0}}) {
        Bytes target(contents.size());
        const ReadJob job = job_of(descriptor, 0, contents.size(), Type::kRaw, Type::kRaw, target.data());
        expect(flex_read(&job, 1, 3, block_bytes, &failure) == 0 && target == contents, "one huge block");
    }
    unsigned char byte = 0;
    const uint64_t most = INT64_MAX;
    for (const auto& [offset, count] : std::initializer_list<std::pair<uint64_t, uint64_t>>{
             {0, ~uint64_t{0}}, {~uint64_t{0}, 1}, {most, 1}, {1, most}, {most + 1, 0}}) {
        const ReadJob job = job_of(descriptor, offset, count, Type::kRaw, Type::kRaw, &byte);
        expect(flex_read(&job, 1, 3, 4096, &failure) == -1, "an end beyond any file");
    }
    const ReadJob half = job_of(descriptor, 0, most / 2 + 2, Type::kRaw, Type::kRaw, &byte);
    const ReadJob jobs[] = {half, half};
    expect(flex_read(jobs, 2, 3, 1, &failure) == -1, "more blocks than can be counted");
    const ReadJob wide = job_of(descriptor, 0, most / 8 + 1, Type::kF64, Type::kF32, &byte);
    expect(flex_read(&wide, 1, 3, 4096, &failure) == -1, "wide elements beyond any file");
}

struct Call {
    ReadJob job;
    int status;
};

// The calling thread converts too: its buffer must not lie on a stack of 160 KiB.
void check_little_stack(const Bytes& contents, int descriptor) {
    const uint64_t count = contents.size() / 4;
    Bytes target(count * 2);
    Call call{job_of(descriptor, 0, count, Type::kF32, Type::kBf16, target.data()), 1};
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    expect(pthread_attr_setstacksize(&attributes, 160 << 10) == 0, "stack size");
    pthread_t thread;
    const auto run = [](void* argument) -> void* {
        Call& made = *static_cast<Call*>(argument);
        ReadFailureError failure{};
        made.status = flex_read(&made.job, 1, 1, 1 << 20, &failure);
        return nullptr;
    };
    expect(pthread_create(&thread, &attributes, run, &call) == 0, "thread");
    pthread_join(thread, nullptr);
    pthread_attr_destroy(&attributes);
    expect(call.status == 0, "read on a small stack");
}

}  // namespace

int main() {
    const Bytes contents = all_patterns();
    const int descriptor = file_of(contents);
    check_straight(contents, descriptor);
    check_conversions(contents, descriptor);
    check_failures(contents, descriptor);
    check_extremes(contents, descriptor);
    check_little_stack(contents, descriptor);
    close(descriptor);
    return failures == 0 ? 0 : 1;
}
