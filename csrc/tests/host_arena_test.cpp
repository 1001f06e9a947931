// The host arena under sanitizers: map, touch by many threads, write everything, discard, unmap; the same for a file
// that is mapped twice; errors with a message.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

extern "C" int flex_host_map(int64_t num_bytes, int numa_node, int dont_fork, int num_threads, void** address,
                             int* numa_bound);
extern "C" int flex_host_map_shared(int fd, int64_t num_bytes, int64_t share_start, int64_t share_bytes,
                                    const int* numa_nodes, int num_nodes, int num_threads, void** address,
                                    int* numa_bound);
extern "C" int flex_host_detach_shared(void* address, int64_t num_bytes);
extern "C" int flex_host_discard(void* address, int64_t num_bytes);
extern "C" int flex_host_unmap(void* address, int64_t num_bytes);
extern "C" const char* flex_last_error();

namespace {

int failures = 0;

void expect(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "FAILED: %s; last error: %s\n", what, flex_last_error());
    ++failures;
}

void check_size(int64_t num_bytes, int numa_node) {
    void* address = nullptr;
    int bound = -1;
    expect(flex_host_map(num_bytes, numa_node, 1, 4, &address, &bound) == 0, "map");
    if (address == nullptr) return;
    expect(bound == 0 || (bound == 1 && numa_node == 0), "only node 0 is there everywhere");
    unsigned char* const bytes = static_cast<unsigned char*>(address);
    expect(bytes[0] == 0 && bytes[num_bytes - 1] == 0, "zeros");
    std::memset(bytes, 7, num_bytes);
    expect(flex_host_discard(address, num_bytes) == 0, "discard");
    expect(bytes[0] == 0 && bytes[num_bytes - 1] == 0, "zeros after discard");
    expect(flex_host_unmap(address, num_bytes) == 0, "unmap");
}

// Two processes' views of one file, in one process: each brings in its share; one that detaches leaves the other alone.
void check_shared(int64_t num_pages) {
    const int64_t page = sysconf(_SC_PAGESIZE), num_bytes = num_pages * page, half = num_pages / 2 * page;
    const int fd = memfd_create("host_arena_test", MFD_CLOEXEC);
    expect(fd >= 0 && ftruncate(fd, num_bytes) == 0, "a file of memory");
    void *first = nullptr, *second = nullptr;
    const int node = 0;
    int bound = -1;
    expect(flex_host_map_shared(fd, num_bytes, 0, half, &node, 1, 3, &first, &bound) == 0, "map shared");
    expect(flex_host_map_shared(fd, num_bytes, half, num_bytes - half, nullptr, 0, 3, &second, &bound) == 0, "again");
    expect(bound == 0, "no nodes were asked for");
    close(fd);
    if (first == nullptr || second == nullptr) return;
    std::memset(first, 7, num_bytes);
    unsigned char* const bytes = static_cast<unsigned char*>(second);
    expect(bytes[0] == 7 && bytes[num_bytes - 1] == 7, "one sees what the other writes");
    expect(flex_host_detach_shared(first, num_bytes) == 0, "detach");
    expect(static_cast<unsigned char*>(first)[num_bytes - 1] == 0, "zeros after detach");
    expect(bytes[num_bytes - 1] == 7, "and the other's bytes stay");
    expect(flex_host_unmap(first, num_bytes) == 0 && flex_host_unmap(second, num_bytes) == 0, "unmap");
}

// Of several nodes, too, whole huge pages and the small ones around them are all in RAM, and zero.
void check_shared_nodes(int num_nodes) {
    const int64_t page = sysconf(_SC_PAGESIZE), num_bytes = 5003 * page, start = 1024 * page;
    const int fd = memfd_create("host_arena_test", MFD_CLOEXEC);
    expect(fd >= 0 && ftruncate(fd, num_bytes) == 0, "a file of memory");
    int nodes[3] = {0, 1, 2}, bound = -1;
    void* address = nullptr;
    const int64_t share = num_bytes - start;
    expect(flex_host_map_shared(fd, num_bytes, start, share, nodes, num_nodes, 2, &address, &bound) == 0, "map");
    if (address == nullptr) return;
    unsigned char resident[5003] = {};
    expect(mincore(address, num_bytes, resident) == 0, "mincore");
    for (int i = 0; i < 5003; ++i) expect((resident[i] & 1) == (i >= 1024), "in RAM is the share, and nothing else");
    for (int64_t i = 0; i < num_bytes; i += page) expect(static_cast<char*>(address)[i] == 0, "zeros");
    expect(flex_host_unmap(address, num_bytes) == 0, "unmap");
    close(fd);
}

void check_shared_errors() {
    const int64_t page = sysconf(_SC_PAGESIZE);
    void* address = nullptr;
    int bound = 0;
    expect(flex_host_map_shared(0, page, 0, page + 1, nullptr, 0, 1, &address, &bound) == -1, "a share beyond the end");
    expect(flex_host_map_shared(-1, page, 0, page, nullptr, 0, 1, &address, &bound) == -1, "no file");
    expect(flex_host_map_shared(1 << 20, page, 0, page, nullptr, 0, 1, &address, &bound) == -2, "a closed file");
    expect(std::strstr(flex_last_error(), "mmap: ") != nullptr, "and said so");
}

}  // namespace

int main() {
    const int64_t page = sysconf(_SC_PAGESIZE);
    for (int64_t num_pages : {1, 3, 513, 5000}) check_shared(num_pages);
    for (int num_nodes : {0, 1, 2, 3}) check_shared_nodes(num_nodes);
    check_shared_errors();
    for (int64_t num_pages : {1, 3, 512, 513, 5000}) check_size(num_pages * page, num_pages % 2 == 0 ? 0 : -1);
    check_size(page, 5000);
    void* address = nullptr;
    int bound = 0;
    expect(flex_host_map(page + 1, -1, 0, 1, &address, &bound) == -1, "part of a page is refused");
    expect(std::strstr(flex_last_error(), "not a positive number of pages") != nullptr, "and said so");
    expect(flex_host_map(int64_t{1} << 62, -1, 0, 1, &address, &bound) == -2, "4 EiB are refused");
    expect(std::strstr(flex_last_error(), "mmap: ") != nullptr, "and said so");
    for (int64_t below : {int64_t{0}, int64_t{512} * page}) {
        const int64_t most = INT64_MAX / page * page - below;
        expect(flex_host_map(most, -1, 0, 3, &address, &bound) == -2, "what overflows beside a huge page is refused");
        expect(std::strstr(flex_last_error(), "mmap: ") != nullptr, "and said so");
    }
    return failures == 0 ? 0 : 1;
}
