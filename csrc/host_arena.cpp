// Host memory of an exact size: one mapping, private or of a file that several processes share, huge pages where the
// kernel has them, near one NUMA node or interleaved over several, brought into RAM by many threads. Page-locking is up
// to flexengine/native/page_lock.py.
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
#ifndef MADV_COLLAPSE
#define MADV_COLLAPSE 25  // Linux 6.1
#endif

namespace {

constexpr int64_t kHugePageBytes = int64_t{2} << 20;
constexpr int64_t kMaxPieceBytes = int64_t{64} << 20;  // a call into the kernel of about 10 ms
constexpr int kMaxNumaNodes = 1024;                    // CONFIG_NODES_SHIFT is at most 10
constexpr int kPreferred = 1;                          // MPOL_PREFERRED of <linux/mempolicy.h>
constexpr int kInterleave = 3;                         // MPOL_INTERLEAVE

int64_t page_bytes() { return sysconf(_SC_PAGESIZE); }

int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Maps num_bytes (whole pages) on a huge page's border if one fits: only whole ones become huge. fd: a file whose bytes
// other processes see too, or -1. Null with errno set where the kernel refuses.
char* map_aligned(int64_t num_bytes, int fd) {
    const int64_t slack = num_bytes >= kHugePageBytes ? kHugePageBytes : 0;
    if (num_bytes > INT64_MAX - slack) {
        errno = ENOMEM;
        return nullptr;
    }
    const int access = PROT_READ | PROT_WRITE;
    void* mapped = mmap(nullptr, num_bytes + slack, fd < 0 ? access : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) return nullptr;
    char* const start = static_cast<char*>(mapped);
    const int64_t before = slack == 0 ? 0 : -reinterpret_cast<intptr_t>(start) & (kHugePageBytes - 1);
    if (before > 0) munmap(start, before);
    if (slack > before) munmap(start + before + num_bytes, slack - before);
    if (fd >= 0 && mmap(start + before, num_bytes, access, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        const int error = errno;
        munmap(start + before, num_bytes);
        errno = error;
        return nullptr;
    }
    return start + before;
}

// Sets where pages come from; false where the kernel or the container refuses, or a node cannot be.
bool bind(char* address, int64_t num_bytes, int policy, const int* numa_nodes, int num_nodes) {
    constexpr int kWordBits = 8 * sizeof(unsigned long);
    unsigned long nodes[kMaxNumaNodes / kWordBits] = {};
    for (int i = 0; i < num_nodes; ++i) {
        if (numa_nodes[i] < 0 || numa_nodes[i] >= kMaxNumaNodes) return false;
        nodes[numa_nodes[i] / kWordBits] |= 1ul << (numa_nodes[i] % kWordBits);
    }
    return syscall(SYS_mbind, address, num_bytes, policy, nodes, kMaxNumaNodes + 1, 0) == 0;
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

// Calls work(begin, end) for pieces of whole huge pages of the range, on many threads; returns 0 or an errno.
template <class Work>
int for_pieces(char* address, int64_t num_bytes, int num_threads, Work&& work) {
    const int64_t even = round_up(num_bytes / num_threads + 1, kHugePageBytes);
    const int64_t piece = std::min(even, kMaxPieceBytes);
    std::atomic<int> failure{0};
    flex::parallel_for(round_up(num_bytes, piece) / piece, num_threads, [&](int64_t index) {
        char* const begin = address + index * piece;
        const int error = work(begin, std::min(begin + piece, address + num_bytes));
        if (error != 0) failure.store(error, std::memory_order_relaxed);
    });
    return failure.load(std::memory_order_relaxed);
}

// Brings the whole huge pages of [begin, end), a part of what is mapped of a file at `start`, into RAM as such: a fault
// in a file of memory gives small pages unless the system is set otherwise, and MADV_COLLAPSE (Linux 6.1) does not ask.
// What it leaves is left to populate. The file must hold a small page where a huge one is to be, which then comes from
// the same node. One that no process has mapped spares the kernel to tell all cores that it goes. Interleaving goes by
// a page's number in the file, so that the small one is taken whose number has the remainder of the huge page's.
void collapse(int fd, char* start, char* begin, char* end, int num_nodes) {
    const int64_t page = page_bytes(), per_huge = kHugePageBytes / page, nodes = std::max(num_nodes, 1);
    for (char* at = begin; end - at >= kHugePageBytes; at += kHugePageBytes) {
        const int64_t huge = (at - start) / kHugePageBytes;
        const int64_t within = (huge % nodes + nodes - huge * per_huge % nodes) % nodes;
        if (pwrite(fd, "", 1, at - start + within % per_huge * page) != 1) return;
    }
    madvise(begin, (end - begin) / kHugePageBytes * kHugePageBytes, MADV_COLLAPSE);
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
    char* const address = map_aligned(num_bytes, -1);
    if (address == nullptr) return FLEX_FAIL_ERRNO(flex::kNoMemory, errno, "mmap");
    madvise(address, num_bytes, MADV_HUGEPAGE);  // memory is the same without it
    if (dont_fork) madvise(address, num_bytes, MADV_DONTFORK);
    *numa_bound_out = bind(address, num_bytes, kPreferred, &numa_node, 1);  // others where it is full
    if (const int error = for_pieces(address, num_bytes, num_threads, populate)) {
        munmap(address, num_bytes);
        return FLEX_FAIL_ERRNO(flex::kNoMemory, error, "madvise(MADV_POPULATE_WRITE)");
    }
    *address_out = address;
    return flex::kOk;
}

// Maps num_bytes of the file `fd`, of which each process that maps it brings its share into RAM: share_bytes from
// share_start on, both multiples of the page size. numa_nodes: pages are interleaved over these, none for anywhere. A
// forked child does not see the range. Writes the address, and to numa_bound 1 if the nodes were accepted.
extern "C" FLEX_API int flex_host_map_shared(int fd, int64_t num_bytes, int64_t share_start, int64_t share_bytes,
                                             const int* numa_nodes, int num_nodes, int num_threads, void** address_out,
                                             int* numa_bound_out) {
    FLEX_REQUIRE(num_bytes > 0 && num_bytes % page_bytes() == 0, "%lld bytes are not a positive number of pages",
                 (long long)num_bytes);
    FLEX_REQUIRE(share_start >= 0 && share_bytes >= 0 && share_start <= num_bytes - share_bytes &&
                     share_start % page_bytes() == 0 && share_bytes % page_bytes() == 0,
                 "%lld bytes at %lld are no whole pages of %lld bytes", (long long)share_bytes, (long long)share_start,
                 (long long)num_bytes);
    FLEX_REQUIRE(fd >= 0 && num_threads >= 1 && num_nodes >= 0, "fd %d, %d threads, %d nodes", fd, num_threads,
                 num_nodes);
    FLEX_REQUIRE(address_out != nullptr && numa_bound_out != nullptr, "no place for the results");
    char* const address = map_aligned(num_bytes, fd);
    if (address == nullptr) return FLEX_FAIL_ERRNO(flex::kNoMemory, errno, "mmap");
    madvise(address, num_bytes, MADV_HUGEPAGE);
    madvise(address, num_bytes, MADV_DONTFORK);
    *numa_bound_out = num_nodes > 0 && bind(address, num_bytes, kInterleave, numa_nodes, num_nodes);
    const int error = for_pieces(address + share_start, share_bytes, num_threads, [&](char* begin, char* end) {
        collapse(fd, address, begin, end, num_nodes);
        return populate(begin, end);
    });
    if (error != 0) {
        munmap(address, num_bytes);
        return FLEX_FAIL_ERRNO(flex::kNoMemory, error, "madvise(MADV_POPULATE_WRITE)");
    }
    *address_out = address;
    return flex::kOk;
}

// Lets go of a file's pages and keeps the addresses, which read zero from now on; the file's other users notice
// nothing.
extern "C" FLEX_API int flex_host_detach_shared(void* address, int64_t num_bytes) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE;
    if (mmap(address, num_bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0) == MAP_FAILED)
        return FLEX_FAIL_ERRNO(flex::kSystem, errno, "mmap");
    madvise(address, num_bytes, MADV_DONTFORK);
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
