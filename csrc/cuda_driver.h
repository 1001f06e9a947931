// The few functions of the CUDA driver that transfers need, looked up at run time: building needs no CUDA toolkit, and
// a machine without a driver can load the library. Reference: CUDA Driver API, modules "Stream", "Event" and "Memory".
#pragma once

#include <dlfcn.h>

#include <cstdint>

#include "common.h"

namespace flex {

using CuResult = int;        // CUresult; 0 is success
using CuContext = void*;     // CUcontext
using CuStream = void*;      // CUstream; null is the default stream
using CuEvent = void*;       // CUevent
using CuAddress = uint64_t;  // CUdeviceptr; with unified addressing also the address of host memory

constexpr unsigned kEventDisableTiming = 2;  // CU_EVENT_DISABLE_TIMING

struct CudaDriver {
    CuResult (*get_error_string)(CuResult, const char**) = nullptr;
    CuResult (*ctx_get_current)(CuContext*) = nullptr;
    CuResult (*ctx_set_current)(CuContext) = nullptr;
    CuResult (*stream_wait_event)(CuStream, CuEvent, unsigned flags) = nullptr;
    CuResult (*event_create)(CuEvent*, unsigned flags) = nullptr;
    CuResult (*event_destroy)(CuEvent) = nullptr;
    CuResult (*event_record)(CuEvent, CuStream) = nullptr;
    CuResult (*event_synchronize)(CuEvent) = nullptr;
    CuResult (*event_elapsed_time)(float* milliseconds, CuEvent from, CuEvent to) = nullptr;
    CuResult (*memcpy_async)(CuAddress target, CuAddress source, size_t num_bytes, CuStream) = nullptr;

    // Fills the table from the library at `path`, which stays loaded for the life of the process.
    int load(const char* path) {
        void* library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) return FLEX_FAIL(kSystem, "dlopen", "%s", dlerror());
        const auto find = [&](const char* name, auto& function) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
            if (function != nullptr) return static_cast<int>(kOk);
            return FLEX_FAIL(kSystem, "dlsym", "%s has no function %s; the CUDA driver is too old", path, name);
        };
        int status = kOk;
        const auto need = [&](const char* name, auto& function) {
            if (status == kOk) status = find(name, function);
        };
        need("cuGetErrorString", get_error_string);
        need("cuCtxGetCurrent", ctx_get_current);
        need("cuCtxSetCurrent", ctx_set_current);
        need("cuStreamWaitEvent", stream_wait_event);
        need("cuEventCreate", event_create);
        need("cuEventDestroy_v2", event_destroy);
        need("cuEventRecord", event_record);
        need("cuEventSynchronize", event_synchronize);
        need("cuEventElapsedTime", event_elapsed_time);
        need("cuMemcpyAsync", memcpy_async);
        return status;
    }

    // The driver's own words for a result.
    const char* text(CuResult result) const {
        const char* found = nullptr;
        if (get_error_string(result, &found) != 0 || found == nullptr) return "unknown error";
        return found;
    }
};

}  // namespace flex

// FLEX_CUDA(driver, event_record, (event, stream)): return with the driver's text unless the call succeeds.
#define FLEX_CUDA(driver, function, arguments)                                                               \
    do {                                                                                                     \
        const ::flex::CuResult flex_result = (driver).function arguments;                                    \
        if (flex_result != 0)                                                                                \
            return FLEX_FAIL(::flex::kSystem, #function #arguments, "CUDA driver error %d: %s", flex_result, \
                             (driver).text(flex_result));                                                    \
    } while (0)
