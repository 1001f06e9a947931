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
using CuDevice = int;        // CUdevice

constexpr unsigned kEventBlockingSync = 1;      // CU_EVENT_BLOCKING_SYNC
constexpr unsigned kEventDisableTiming = 2;     // CU_EVENT_DISABLE_TIMING
constexpr unsigned kWaitValueGreaterEqual = 0;  // CU_STREAM_WAIT_VALUE_GEQ: by the sign of the difference
constexpr unsigned kWriteValueDefault = 0;      // CU_STREAM_WRITE_VALUE_DEFAULT: after all before it on the stream
// CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS; those of 32 bits have no attribute of their own in this interface
constexpr int kStreamMemoryOperations = 122;

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
    // Null where the driver is too old for them:
    CuResult (*stream_wait_value)(CuStream, CuAddress, uint32_t value, unsigned flags) = nullptr;
    CuResult (*stream_write_value)(CuStream, CuAddress, uint32_t value, unsigned flags) = nullptr;
    CuResult (*host_get_device_pointer)(CuAddress*, void* host, unsigned flags) = nullptr;
    CuResult (*ctx_get_device)(CuDevice*) = nullptr;
    CuResult (*device_get_attribute)(int*, int attribute, CuDevice) = nullptr;

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
        const auto want = [&](const char* name, auto& function) {
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, name));
        };
        want("cuStreamWaitValue32_v2", stream_wait_value);
        want("cuStreamWriteValue32_v2", stream_write_value);
        want("cuMemHostGetDevicePointer_v2", host_get_device_pointer);
        want("cuCtxGetDevice", ctx_get_device);
        want("cuDeviceGetAttribute", device_get_attribute);
        return status;
    }

    // Whether streams of the current context's device can wait for words of memory, and write them.
    bool has_stream_memory_operations() const {
        const bool found = stream_wait_value != nullptr && stream_write_value != nullptr &&
                           host_get_device_pointer != nullptr && ctx_get_device != nullptr &&
                           device_get_attribute != nullptr;
        CuDevice device = 0;
        int supported = 0;
        return found && ctx_get_device(&device) == 0 &&
               device_get_attribute(&supported, kStreamMemoryOperations, device) == 0 && supported != 0;
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
