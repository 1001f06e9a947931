// What every native file shares: how functions are exported and how they report errors.
//
// The C interface: functions named flex_* return 0, or a negative `Status` after writing a message of the calling
// thread that `flex_last_error` returns. They never throw and never print. Python (flexengine/native) turns the status
// into ValueError, MemoryError or OSError with that message.
#pragma once

#include <cstddef>
#include <cstdint>

// Raise it, and ABI_VERSION in flexengine/native/library.py, whenever an exported function changes its arguments or
// what they mean.
#define FLEX_ABI_VERSION 4

#define FLEX_API __attribute__((visibility("default")))

namespace flex {

enum Status : int {
    kOk = 0,
    kInvalid = -1,   // an argument is wrong: ValueError
    kNoMemory = -2,  // memory or address space is exhausted: MemoryError
    kSystem = -3,    // the operating system or a driver refused: OSError
};

// Writes the calling thread's error message ("file:line: statement: text") and returns `status`.
int fail(Status status, const char* file, int line, const char* statement, const char* format, ...)
    __attribute__((format(printf, 5, 6)));

// The same, with the text of `error_number` (an errno) added at the end.
int fail_errno(Status status, int error_number, const char* file, int line, const char* statement);

}  // namespace flex

// return FLEX_FAIL(flex::kSystem, "cuMemcpyAsync", "error %d", code);
#define FLEX_FAIL(status, statement, ...) ::flex::fail((status), __FILE__, __LINE__, (statement), __VA_ARGS__)

// return FLEX_FAIL_ERRNO(flex::kSystem, errno, "pread(fd, ...)");
#define FLEX_FAIL_ERRNO(status, error_number, statement) \
    ::flex::fail_errno((status), (error_number), __FILE__, __LINE__, (statement))

// FLEX_REQUIRE(num_bytes > 0, "num_bytes is %lld, expected at least 1", (long long)num_bytes);
#define FLEX_REQUIRE(condition, ...)                                                   \
    do {                                                                               \
        if (!(condition)) return FLEX_FAIL(::flex::kInvalid, #condition, __VA_ARGS__); \
    } while (0)
