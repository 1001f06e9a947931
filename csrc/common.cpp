// The version of the interface and the error message of each thread.
#include "common.h"

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace {

constexpr size_t kMessageBytes = 1024;
thread_local char last_error[kMessageBytes] = "";

const char* base_name(const char* path) {
    const char* slash = std::strrchr(path, '/');
    return slash == nullptr ? path : slash + 1;
}

}  // namespace

namespace flex {

int fail(Status status, const char* file, int line, const char* statement, const char* format, ...) {
    const int used = std::snprintf(last_error, kMessageBytes, "%s:%d: %s: ", base_name(file), line, statement);
    if (used >= 0 && static_cast<size_t>(used) < kMessageBytes) {
        va_list arguments;
        va_start(arguments, format);
        std::vsnprintf(last_error + used, kMessageBytes - used, format, arguments);
        va_end(arguments);
    }
    return status;
}

int fail_errno(Status status, int error_number, const char* file, int line, const char* statement) {
    return fail(status, file, line, statement, "%s (errno %d)", std::strerror(error_number), error_number);
}

}  // namespace flex

extern "C" FLEX_API int flex_abi_version() { return FLEX_ABI_VERSION; }

// Message of the last function that failed on this thread; valid until the next failure on it.
extern "C" FLEX_API const char* flex_last_error() { return last_error; }
