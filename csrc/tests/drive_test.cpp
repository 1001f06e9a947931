// Blocks of a drive under sanitizers: pieces cut into requests by many threads, both ways, ends of files, descriptors
// that are closed, and sizes near 2^64.
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

struct DrivePiece {
    uint64_t offset_bytes, num_bytes;
    void* memory;
};
struct DriveFailure {
    uint64_t offset_bytes;
    int32_t error_number;
};

extern "C" int flex_drive_move(int32_t, const DrivePiece*, uint64_t, int32_t, uint64_t, int32_t, DriveFailure*);
extern "C" const char* flex_last_error();

namespace {

int failures = 0;

void expect(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "FAILED: %s; last error: %s\n", what, flex_last_error());
    ++failures;
}

}  // namespace

int main() {
    char name[] = "/tmp/drive_test_XXXXXX";
    const int file = mkstemp(name);
    expect(file >= 0 && unlink(name) == 0, "temporary file");
    std::vector<unsigned char> written(700000), read(700000);
    for (size_t i = 0; i < written.size(); ++i) written[i] = static_cast<unsigned char>(i * 2654435761u >> 13);
    DriveFailure failure{};
    for (int threads : {1, 7}) {
        const DrivePiece out[] = {{500, 60000, written.data()}, {0, 0, nullptr}, {60500, 640000, &written[60000]}};
        expect(flex_drive_move(file, out, 3, threads, 4096, 1, &failure) == 0, "write");
        const DrivePiece in = {500, read.size(), read.data()};
        for (uint64_t block : {999, 8192, 600000}) {  // the last one is larger than a buffer
            std::fill(read.begin(), read.end(), 0);
            expect(flex_drive_move(file, &in, 1, threads, block, 0, &failure) == 0, "read");
            expect(read == written, "contents");
        }
    }
    const DrivePiece beyond = {700000, 1000, read.data()};
    expect(flex_drive_move(file, &beyond, 1, 3, 100, 0, &failure) == -3, "a read beyond the end fails");
    expect(failure.offset_bytes >= 700500 && failure.error_number == 0, "and says where");
    const DrivePiece huge = {~0ULL - 5, 100, read.data()}, nowhere = {0, 1, nullptr};
    expect(flex_drive_move(file, &huge, 1, 1, 100, 0, &failure) == -1, "a piece beyond any file is refused");
    expect(flex_drive_move(file, &nowhere, 1, 1, 100, 0, &failure) == -1, "a piece without memory is refused");
    expect(flex_drive_move(file, &beyond, 1, 0, 100, 0, &failure) == -1, "no threads are refused");
    expect(flex_drive_move(file, &beyond, 1, 1, 0, 0, &failure) == -1, "no request is refused");
    close(file);
    expect(flex_drive_move(file, &beyond, 1, 4, 100, 1, &failure) == -3, "a closed file fails");
    expect(failure.error_number == EBADF, "and says why");
    std::printf("%s\n", failures == 0 ? "ok" : "failed");
    return failures == 0 ? 0 : 1;
}
