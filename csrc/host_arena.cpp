// Host memory of an exact size: one private mapping, huge pages where the kernel has them, near one NUMA node, brought
// into RAM by many threads. Page-locking is up to flexengine/native/page_lock.py.
#include <errno.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "common.h"
#include "parallel.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23  // Linux 5.14; headers may be older than the kernel
#endif

namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
constexpr int64_t kMaxPieceBytes = int64_t{64} << 20;  // a call into the kernel of about 10 ms
constexpr int kMaxNumaNodes = 1024;                    // CONFIG_NODES_SHIFT is at most 10
constexpr int kPreferred = 1;                          // MPOL_PREFERRED of <linux/mempolicy.h>

int64_t page_bytes() { return sysconf(_SC_PAGESIZE); }

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Addresses for num_bytes (whole pages), on a huge page's border if one fits: only whole ones become huge. Null with
// errno set where the kernel refuses.
char* map_aligned(int64_t num_bytes) {
    const int64_t slack = num_bytes >= kHugePageBytes ? kHugePageBytes : 0;
    if (num_bytes > INT64_MAX - slack) {
        errno = ENOMEM;
        return nullptr;
    }
    void* mapped = mmap(nullptr, num_bytes + slack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* const start = static_cast<char*>(mapped);
    const int64_t before = slack == 0 ? 0 : -reinterpret_cast<intptr_t>(start) & (kHugePageBytes - 1);
    if (before > 0) munmap(start, before);
    if (slack > before) munmap(start + before + num_bytes, slack - before);
    return start + before;
}

// Asks for pages on `node`, others when it is full; false where the kernel or the container refuses.
bool prefer_node(char* address, int64_t num_bytes, int node) {
    if (node < 0 || node >= kMaxNumaNodes) return false;
    constexpr int kWordBits = 8 * sizeof(unsigned long);
    unsigned long nodes[kMaxNumaNodes / kWordBits] = {};
    nodes[node / kWordBits] = 1ul << (node % kWordBits);
    return syscall(SYS_mbind, address, num_bytes, kPreferred, nodes, kMaxNumaNodes + 1, 0) == 0;
}

// Writes one byte of every page: half the memory traffic of writing all, since the kernel clears a page it hands out.
void touch_pages(char* begin, char* end) {
    const int64_t page = page_bytes();
    for (volatile char* at = begin; at < end; at += page) *at = 0;
}

// Brings [begin, end) into RAM; returns 0 or an errno. madvise tells of exhausted memory; touching is killed by it.
int populate(char* begin, char* end) {
    if (madvise(begin, end - begin, MADV_POPULATE_WRITE) == 0) return 0;
    if (errno == ENOMEM || errno == EHWPOISON) return errno;
    touch_pages(begin, end);  // a kernel without it, or a signal in between
    return 0;
}

int populate_in_parallel(char* address, int64_t num_bytes, int num_threads) {
    const int64_t even = round_up(num_bytes / num_threads + 1, kHugePageBytes);
    const int64_t piece = std::min(even, kMaxPieceBytes);
    std::atomic<int> failure{0};
    flex::parallel_for(round_up(num_bytes, piece) / piece, num_threads, [&](int64_t index) {
        char* const begin = address + index * piece;
        const int error = populate(begin, std::min(begin + piece, address + num_bytes));
        if (error != 0) failure.store(error, std::memory_order_relaxed);
    });
    return failure.load(std::memory_order_relaxed);
}

}  // namespace

// Maps num_bytes (a multiple of the page size), zeroed, every page in RAM. numa_node: preferred node, or -1.
// dont_fork: a forked child does not see the range, so the pages never become copy-on-write under a device.
// Writes the address, and to numa_bound 1 if the node was accepted.
extern "C" FLEX_API int flex_host_map(int64_t num_bytes, int numa_node, int dont_fork, int num_threads,
                                      void** address_out, int* numa_bound_out) {
    FLEX_REQUIRE(num_bytes > 0 && num_bytes % page_bytes() == 0, "%lld bytes are not a positive number of pages",
                 (long long)num_bytes);
    FLEX_REQUIRE(num_threads >= 1, "num_threads is %d, expected at least 1", num_threads);
    FLEX_REQUIRE(address_out != nullptr && numa_bound_out != nullptr, "no place for the results");
    char* const address = map_aligned(num_bytes);
    if (address == nullptr) return FLEX_FAIL_ERRNO(flex::kNoMemory, errno, "mmap");
    madvise(address, num_bytes, MADV_HUGEPAGE);  // memory is the same without it
    if (dont_fork) madvise(address, num_bytes, MADV_DONTFORK);
    *numa_bound_out = prefer_node(address, num_bytes, numa_node);
    if (const int error = populate_in_parallel(address, num_bytes, num_threads)) {
        munmap(address, num_bytes);
        return FLEX_FAIL_ERRNO(flex::kNoMemory, error, "madvise(MADV_POPULATE_WRITE)");
    }
    *address_out = address;
    return flex::kOk;
}

// Gives the pages back and keeps the addresses, which read zero from now on.
extern "C" FLEX_API int flex_host_discard(void* address, int64_t num_bytes) {
    if (madvise(address, num_bytes, MADV_DONTNEED) != 0) return FLEX_FAIL_ERRNO(flex::kSystem, errno, "madvise");
    return flex::kOk;
}

// Gives the addresses back as well: nothing may use them any more.
extern "C" FLEX_API int flex_host_unmap(void* address, int64_t num_bytes) {
    if (munmap(address, num_bytes) != 0) return FLEX_FAIL_ERRNO(flex::kSystem, errno, "munmap");
    return flex::kOk;
}
