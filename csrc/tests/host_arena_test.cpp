// The host arena under sanitizers: map, touch by many threads, write everything, discard, unmap; errors with a message.
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <initializer_list>

extern "C" int flex_host_map(int64_t num_bytes, int numa_node, int dont_fork, int num_threads, void** address,
                             int* numa_bound);
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

}  // namespace

int main() {
    const int64_t page = sysconf(_SC_PAGESIZE);
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
