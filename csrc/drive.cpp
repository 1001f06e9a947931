// Moves whole blocks between a file on a drive and memory, past the page cache where the file was opened with O_DIRECT.
//
// Pieces are cut into blocks, which threads take one after the other: a drive wants many large requests at once. The
// threads wait for it, so they are others than those that compute. What is read may begin and end anywhere; where that
// is no border of blocks, a thread reads the blocks around it into a buffer.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <mutex>

#include "common.h"
#include "parallel.h"

namespace {

// Bytes [offset_bytes, offset_bytes + num_bytes) of the file, and where they lie in memory. Matches `_Piece` of
// flexengine/native/drive.py.
struct DrivePiece {
    uint64_t offset_bytes, num_bytes;
    void* memory;
};

// Where a transfer failed, and why: an errno, or 0 where the file ended. Matches `_Failure` of the same file.
struct DriveFailure {
    uint64_t offset_bytes;
    int32_t error_number;
};

// What files opened with O_DIRECT ask of places, sizes and memory at the most.
constexpr uint64_t kAligned = 4096;

// Buffers for blocks on their way to where no file may be read to. They lie in huge pages: of scattered small ones a
// request has a segment for each page, and some drives take no more than 256 segments at a time, of all requests
// together: a virtual disk then gave 1.5 instead of 2.3 GB/s.
constexpr uint64_t kBufferBytes = 256 << 10, kHugePageBytes = 2 << 20;
constexpr uint32_t kNumBuffers = 16, kAllBuffers = (1U << kNumBuffers) - 1;

std::atomic<uint32_t> buffers_taken{0};  // a bit for each

// The memory of all of them, which the process keeps; null where there is none.
char* all_buffers() {
    static std::atomic<char*> made{nullptr};
    if (char* const found = made.load(std::memory_order_acquire)) return found;
    constexpr uint64_t kBytes = kNumBuffers * kBufferBytes;
    char* const mine = static_cast<char*>(std::aligned_alloc(kHugePageBytes, kBytes));
    if (mine == nullptr) return nullptr;
    madvise(mine, kBytes, MADV_HUGEPAGE);  // memory is the same without it
    char* others = nullptr;
    if (made.compare_exchange_strong(others, mine, std::memory_order_acq_rel)) return mine;
    std::free(mine);
    return others;
}

// One of the buffers for as long as it lives; memory of its own where none is free.
class Buffer {
 public:
    Buffer() {
        char* const all = all_buffers();
        while (all != nullptr) {
            const uint32_t free = kAllBuffers & ~buffers_taken.load(std::memory_order_relaxed);
            if (free == 0) break;
            const uint32_t first = free & -free;
            if ((buffers_taken.fetch_or(first, std::memory_order_acquire) & first) != 0) continue;
            taken_ = first;
            memory_ = all + static_cast<uint64_t>(__builtin_ctz(first)) * kBufferBytes;
            return;
        }
        memory_ = static_cast<char*>(std::aligned_alloc(kAligned, kBufferBytes));
    }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (taken_ != 0)
            buffers_taken.fetch_and(~taken_, std::memory_order_release);
        else
            std::free(memory_);
    }

    // kBufferBytes at a border of blocks; null where there is no memory.
    char* memory() const { return memory_; }

 private:
    char* memory_ = nullptr;
    uint32_t taken_ = 0;
};

class Moving {
 public:
    Moving(int descriptor, const DrivePiece* pieces, uint64_t block_bytes, bool writes, DriveFailure* failure)
        : descriptor_(descriptor), pieces_(pieces), block_bytes_(block_bytes), writes_(writes), failure_(failure) {}

    // Moves the blocks of one piece after the other. Returns false when some block failed.
    bool run(uint64_t num_pieces, int num_threads) {
        for (uint64_t i = 0; i < num_pieces && !failed_.load(); ++i) {
            const DrivePiece& piece = pieces_[i];
            const uint64_t whole = piece.num_bytes + lead(piece);
            const int64_t blocks = static_cast<int64_t>((whole + block_bytes_ - 1) / block_bytes_);
            flex::parallel_for(
                blocks, num_threads, [&](int64_t block) { move_block(piece, static_cast<uint64_t>(block)); },
                flex::Threads::kWaiting);
        }
        return !failed_.load();
    }

 private:
    // Bytes that the first block of a piece is shorter by, so that later ones begin at borders.
    uint64_t lead(const DrivePiece& piece) const {
        return block_bytes_ % kAligned == 0 ? piece.offset_bytes % kAligned : 0;
    }

    void move_block(const DrivePiece& piece, uint64_t block) {
        const uint64_t first = block == 0 ? 0 : block * block_bytes_ - lead(piece);
        const uint64_t end = std::min((block + 1) * block_bytes_ - lead(piece), piece.num_bytes);
        uint64_t left = end - first, position = piece.offset_bytes + first;
        char* memory = static_cast<char*>(piece.memory) + first;
        if (!writes_ && (position | left | reinterpret_cast<uintptr_t>(memory)) % kAligned != 0)
            return read_around(position, left, memory);
        while (left > 0 && !failed_.load(std::memory_order_relaxed)) {
            const off_t at = static_cast<off_t>(position);
            const ssize_t moved =
                writes_ ? pwrite(descriptor_, memory, left, at) : pread(descriptor_, memory, left, at);
            if (moved < 0 && errno == EINTR) continue;
            if (moved <= 0) return fail(position, moved < 0 ? errno : 0);
            memory += moved, position += static_cast<uint64_t>(moved), left -= static_cast<uint64_t>(moved);
        }
    }

    // Reads bytes that begin or end, in the file or in memory, at no border of blocks.
    void read_around(uint64_t position, uint64_t num_bytes, char* memory) {
        const Buffer buffer;
        if (buffer.memory() == nullptr) return fail(position, ENOMEM);
        while (num_bytes > 0 && !failed_.load(std::memory_order_relaxed)) {
            const uint64_t count = std::min(num_bytes, kBufferBytes - position % kAligned);
            read_through(buffer.memory(), position, count, memory);
            position += count, memory += count, num_bytes -= count;
        }
    }

    // Reads what fits into the buffer with the blocks around it.
    void read_through(char* around, uint64_t position, uint64_t num_bytes, char* memory) {
        const uint64_t start = position - position % kAligned, needed = position + num_bytes - start;
        const uint64_t size = (needed + kAligned - 1) / kAligned * kAligned;
        for (uint64_t held = 0; held < needed && !failed_.load(std::memory_order_relaxed);) {
            const ssize_t moved = pread(descriptor_, around + held, size - held, static_cast<off_t>(start + held));
            if (moved < 0 && errno == EINTR) continue;
            if (moved < 0) return fail(std::max(position, start + held), errno);
            const uint64_t count = static_cast<uint64_t>(moved);
            // The last block of a file may be short; elsewhere the rest of one is read again, from its border on.
            const uint64_t kept = held + count >= needed ? count : count - count % kAligned;
            if (kept == 0) return fail(start + held + count, 0);
            held += kept;
        }
        if (!failed_.load(std::memory_order_relaxed)) std::memcpy(memory, around + (position - start), num_bytes);
    }

    void fail(uint64_t position, int error_number) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (!failed_.exchange(true)) *failure_ = {position, error_number};
    }

    const int descriptor_;
    const DrivePiece* const pieces_;
    const uint64_t block_bytes_;
    const bool writes_;
    DriveFailure* const failure_;
    std::atomic<bool> failed_{false};
    std::mutex mutex_;
};

constexpr uint64_t kMaxBytes = static_cast<uint64_t>(std::numeric_limits<int64_t>::max());

}  // namespace

// Reads pieces of a file into memory, or writes them, on up to num_threads threads in blocks of block_bytes. When one
// fails, the others stop and `failure` says where; what was read or written is undefined then.
extern "C" FLEX_API int flex_drive_move(int32_t descriptor, const DrivePiece* pieces, uint64_t num_pieces,
                                        int32_t num_threads, uint64_t block_bytes, int32_t writes,
                                        DriveFailure* failure) {
    FLEX_REQUIRE(num_threads > 0, "num_threads is %d, expected at least 1", num_threads);
    FLEX_REQUIRE(block_bytes > 0, "block_bytes is 0, expected at least 1");
    for (uint64_t i = 0; i < num_pieces; ++i) {
        const DrivePiece& piece = pieces[i];
        FLEX_REQUIRE(piece.num_bytes == 0 || piece.memory != nullptr, "piece %llu has no memory", 0ULL + i);
        const bool fits = piece.offset_bytes <= kMaxBytes && piece.num_bytes <= kMaxBytes - piece.offset_bytes;
        FLEX_REQUIRE(fits, "piece %llu: %llu bytes from byte %llu end beyond any file", 0ULL + i,
                     0ULL + piece.num_bytes, 0ULL + piece.offset_bytes);
    }
    Moving moving(descriptor, pieces, block_bytes, writes != 0, failure);
    if (moving.run(num_pieces, num_threads)) return flex::kOk;
    const char* const call = writes != 0 ? "pwrite" : "pread";
    if (failure->error_number != 0) return FLEX_FAIL_ERRNO(flex::kSystem, failure->error_number, call);
    return FLEX_FAIL(flex::kSystem, call, "the file ends at byte %llu", 0ULL + failure->offset_bytes);
}
