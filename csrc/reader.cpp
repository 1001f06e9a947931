// Parallel reader: byte ranges of files into memory, converted on the way where the formats differ.
//
// Jobs are cut into blocks, which threads take one after the other. A block of equal types goes from the file into its
// place; others pass through a buffer, small enough to stay in the processor's second-level cache. It is not on the
// stack, since the calling thread's may be as small as 32 KiB (Python's threading.stack_size).
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "common.h"
#include "convert.h"
#include "parallel.h"

namespace {

using flex::Type;

// Mirrored by `_Job` in flexengine/native/reader.py.
struct ReadJob {
    uint64_t offset_bytes;  // of the first element in the file
    uint64_t count;         // elements
    void* target;
    void* remainder;  // with a bf16 target: the float32 bits that it lacks, int16; else null
    int32_t descriptor;
    Type source_type;
    Type target_type;
    uint32_t unused;
};

// Mirrored by `_Failure` in flexengine/native/reader.py.
struct ReadFailureError {
    uint64_t job;
    uint64_t offset_bytes;  // in the file
    int32_t error_number;   // 0: the file ended
};

constexpr uint64_t kBufferBytes = 256 << 10;
constexpr uint64_t kMaxBytes =
    std::numeric_limits<int64_t>::max();  // of an offset in a file, and of a number of blocks

struct Block {
    const ReadJob* job;
    uint64_t first, count;  // elements
};

// All jobs as one row of blocks.
class Blocks {
 public:
    Blocks(const ReadJob* jobs, uint64_t num_jobs, uint64_t block_bytes) : jobs_(jobs), block_bytes_(block_bytes) {
        starts_.reserve(num_jobs + 1);
        starts_.push_back(0);
        for (uint64_t i = 0; i < num_jobs; ++i) {
            starts_.push_back(starts_.back() + blocks_of(jobs[i]));
        }
    }

    uint64_t size() const { return starts_.back(); }

    Block at(uint64_t index) const {
        const uint64_t i = std::upper_bound(starts_.begin(), starts_.end(), index) - starts_.begin() - 1;
        const uint64_t per_block = elements_per_block(jobs_[i]);
        const uint64_t first = (index - starts_[i]) * per_block;
        return {jobs_ + i, first, std::min(per_block, jobs_[i].count - first)};
    }

 private:
    uint64_t elements_per_block(const ReadJob& job) const {
        return std::max<uint64_t>(1, block_bytes_ / flex::size_of(job.source_type));
    }

    uint64_t blocks_of(const ReadJob& job) const {
        const uint64_t per_block = elements_per_block(job);
        return job.count / per_block + (job.count % per_block != 0);
    }

    const ReadJob* jobs_;
    uint64_t block_bytes_;
    std::vector<uint64_t> starts_;  // first block of every job, and the number of blocks
};

// The first failure; later ones are dropped, and no thread takes up new work.
class Outcome {
 public:
    bool failed() const { return failed_.load(std::memory_order_relaxed); }

    void fail(uint64_t job, uint64_t offset_bytes, int error_number) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (failed_.load()) return;
        failure_ = {job, offset_bytes, error_number};
        failed_.store(true);
    }

    const ReadFailureError& failure() const { return failure_; }

 private:
    std::atomic<bool> failed_{false};
    std::mutex mutex_;
    ReadFailureError failure_{};
};

struct alignas(64) Buffer {
    unsigned char bytes[kBufferBytes];
};

// One buffer for every thread that may convert at the same time.
class Buffers {
 public:
    // Returns the buffer when it goes.
    class Lease {
     public:
        explicit Lease(Buffers& owner) : owner_(owner), buffer_(owner.take()) {}
        ~Lease() { owner_.give_back(buffer_); }
        Lease(const Lease&) = delete;
        Lease& operator=(const Lease&) = delete;
        unsigned char* bytes() { return buffer_->bytes; }

     private:
        Buffers& owner_;
        Buffer* buffer_;
    };

    void reserve(uint64_t count) {
        free_.reserve(count);
        while (all_.size() < count) {
            all_.emplace_back(new Buffer);
            free_.push_back(all_.back().get());
        }
    }

 private:
    Buffer* take() {
        const std::lock_guard<std::mutex> lock(mutex_);
        Buffer* const buffer = free_.back();
        free_.pop_back();
        return buffer;
    }
    void give_back(Buffer* buffer) {
        const std::lock_guard<std::mutex> lock(mutex_);
        free_.push_back(buffer);
    }

    std::mutex mutex_;
    std::vector<std::unique_ptr<Buffer>> all_;
    std::vector<Buffer*> free_;
};

class Reading {
 public:
    Reading(const ReadJob* jobs, uint64_t num_jobs, uint64_t block_bytes)
        : jobs_(jobs), blocks_(jobs, num_jobs, block_bytes) {
        for (uint64_t i = 0; i < num_jobs; ++i) converts_ |= jobs[i].source_type != jobs[i].target_type;
    }

    const Outcome& run(int num_threads) {
        const int64_t num_blocks = static_cast<int64_t>(blocks_.size());
        if (converts_) buffers_.reserve(std::min<uint64_t>(num_threads, blocks_.size()));
        flex::parallel_for(num_blocks, num_threads, [this](int64_t i) {
            if (!outcome_.failed()) read_block(blocks_.at(static_cast<uint64_t>(i)));
        });
        return outcome_;
    }

 private:
    void read_block(const Block& block) {
        const ReadJob& job = *block.job;
        if (job.source_type == job.target_type) {
            const uint64_t width = flex::size_of(job.source_type);
            if (!read_fully(job, block.first * width, target_of(job, block.first), block.count * width)) return;
            if (job.remainder != nullptr) std::memset(remainder_of(job, block.first), 0, block.count * 2);
        } else {
            read_converting(job, block);
        }
    }

    void read_converting(const ReadJob& job, const Block& block) {
        Buffers::Lease buffer(buffers_);
        const flex::Convert convert = flex::find_conversion(job.source_type, job.target_type, job.remainder != nullptr);
        const uint64_t width = flex::size_of(job.source_type), step = kBufferBytes / width;
        for (uint64_t first = block.first; first < block.first + block.count; first += step) {
            const uint64_t count = std::min(step, block.first + block.count - first);
            if (!read_fully(job, first * width, buffer.bytes(), count * width)) return;
            convert(buffer.bytes(), target_of(job, first), remainder_of(job, first), count);
        }
    }

    // Reads the job's bytes from `skip_bytes` on; a read may give less than was asked for.
    bool read_fully(const ReadJob& job, uint64_t skip_bytes, void* target, uint64_t num_bytes) {
        uint64_t position = job.offset_bytes + skip_bytes;
        char* to = static_cast<char*>(target);
        while (num_bytes > 0) {
            const ssize_t got = pread(job.descriptor, to, num_bytes, static_cast<off_t>(position));
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) {
                outcome_.fail(static_cast<uint64_t>(&job - jobs_), position, got < 0 ? errno : 0);
                return false;
            }
            to += got, position += got, num_bytes -= got;
        }
        return true;
    }

    static void* target_of(const ReadJob& job, uint64_t element) {
        return static_cast<char*>(job.target) + element * flex::size_of(job.target_type);
    }
    static void* remainder_of(const ReadJob& job, uint64_t element) {
        return job.remainder == nullptr ? nullptr : static_cast<char*>(job.remainder) + element * 2;
    }

    const ReadJob* jobs_;
    Blocks blocks_;
    bool converts_ = false;
    Buffers buffers_;
    Outcome outcome_;
};

int check_job(const ReadJob& job, uint64_t index) {
    using Number = unsigned long long;
    const bool split = job.remainder != nullptr;
    const bool known = flex::size_of(job.source_type) > 0 && flex::size_of(job.target_type) > 0;
    FLEX_REQUIRE(known, "job %llu: of types %u and %u at least one is unknown", Number(index),
                 unsigned(job.source_type), unsigned(job.target_type));
    const bool straight = job.source_type == job.target_type && (!split || job.target_type == Type::kBf16);
    FLEX_REQUIRE(straight || flex::find_conversion(job.source_type, job.target_type, split) != nullptr,
                 "job %llu: no conversion from type %u to type %u%s", Number(index), unsigned(job.source_type),
                 unsigned(job.target_type), split ? " with a remainder" : "");
    FLEX_REQUIRE(job.count == 0 || job.target != nullptr, "job %llu has no target", Number(index));
    const bool fits =
        job.offset_bytes <= kMaxBytes && job.count <= (kMaxBytes - job.offset_bytes) / flex::size_of(job.source_type);
    FLEX_REQUIRE(fits, "job %llu: %llu elements from byte %llu end beyond any file", Number(index), Number(job.count),
                 Number(job.offset_bytes));
    return flex::kOk;
}

int report(const ReadFailureError& failure) {
    using Number = unsigned long long;
    if (failure.error_number != 0) return FLEX_FAIL_ERRNO(flex::kSystem, failure.error_number, "pread");
    return FLEX_FAIL(flex::kSystem, "pread", "job %llu: the file ends at byte %llu, before the data does",
                     Number(failure.job), Number(failure.offset_bytes));
}

}  // namespace

// Carries out all jobs on up to num_threads threads, in blocks of block_bytes of the file. When one fails, the others
// stop, `failure` says which and where, and the contents of all targets are undefined.
extern "C" FLEX_API int flex_read(const ReadJob* jobs, uint64_t num_jobs, int32_t num_threads, uint64_t block_bytes,
                                  ReadFailureError* failure) {
    FLEX_REQUIRE(num_threads > 0, "num_threads is %d, expected at least 1", num_threads);
    FLEX_REQUIRE(block_bytes > 0, "block_bytes is 0, expected at least 1");
    uint64_t num_elements = 0;  // of all jobs: as many as there may be blocks
    for (uint64_t i = 0; i < num_jobs; ++i) {
        if (int status = check_job(jobs[i], i)) return status;
        FLEX_REQUIRE(jobs[i].count <= kMaxBytes - num_elements, "the jobs have more elements than can be counted");
        num_elements += jobs[i].count;
    }
    try {
        Reading reading(jobs, num_jobs, block_bytes);
        const Outcome& outcome = reading.run(num_threads);
        if (!outcome.failed()) return flex::kOk;
        *failure = outcome.failure();
        return report(*failure);
    } catch (const std::bad_alloc&) {
        return FLEX_FAIL(flex::kNoMemory, "list of blocks", "out of host memory");
    }
}
