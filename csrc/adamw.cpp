// The door of updates on the CPU: checks, choice of the instruction set, cutting into pieces for threads.
#include "adamw.h"

#include <algorithm>
#include <cmath>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "common.h"
#include "parallel.h"

namespace {

using flex::InstructionSet;

// Pieces are multiples of this, so that in page-aligned planes of 16-bit values no two threads share a page.
constexpr int64_t kPieceStep = 2048;
constexpr int64_t kMaxPiece = 1 << 15;  // elements; 0.9 MB of planes, long enough for the hardware's prefetching
constexpr int64_t kMaxElements = int64_t{1} << 60;  // more than any address space holds; products below do not overflow
constexpr int64_t kPiecesPerThread = 4;             // evens out threads that start late or share a core

using Range = void (*)(const flex::Step&, int64_t begin, int64_t end);

InstructionSet best_instruction_set() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw")) return InstructionSet::kAvx512;
    if (__builtin_cpu_supports("avx2")) return InstructionSet::kAvx2;
#endif
    return InstructionSet::kScalar;
}

// The path of an instruction set; null where the processor has not got it.
Range range_for(InstructionSet wanted) {
    const InstructionSet best = best_instruction_set();
    if (wanted == InstructionSet::kBest) wanted = best;
    if (wanted > best) return nullptr;
    switch (wanted) {
#if defined(__x86_64__)
        case InstructionSet::kAvx2: return flex::update_range_avx2;
        case InstructionSet::kAvx512: return flex::update_range_avx512;
#endif
        case InstructionSet::kScalar: return flex::update_range_scalar;
        default: return nullptr;
    }
}

// Denormals kept and rounding to nearest while it lives, whatever the calling thread has set.
class StandardArithmetic {
 public:
#if defined(__x86_64__)
    StandardArithmetic() : before_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
    ~StandardArithmetic() { _mm_setcsr(before_); }

 private:
    unsigned before_;
#else
    StandardArithmetic() {}
#endif
};

// [begin, end), cut where the upper half of the counter changes; a block in which that happens goes by itself.
void update_piece(const flex::Step& call, Range range, int64_t begin, int64_t end) {
    const StandardArithmetic standard;
    const uint64_t first = call.element_offset + static_cast<uint64_t>(begin);
    const uint64_t until_carry = (uint64_t{1} << 32) - (first & 0xFFFFFFFFu);
    if (until_carry < static_cast<uint64_t>(end - begin)) {
        int64_t middle = begin + static_cast<int64_t>(until_carry);
        if (call.states == flex::States::kBlocks) {
            const int64_t block = middle / flex::kBlock * flex::kBlock;
            range(call, begin, block);
            middle = std::min(block + flex::kBlock, end);
            flex::update_range_scalar(call, block, middle);
        } else {
            range(call, begin, middle);
        }
        begin = middle;
    }
    range(call, begin, end);
#if defined(__x86_64__)
    _mm_sfence();  // stores past the caches, before the word that the piece is done
#endif
}

int64_t piece_size(int64_t num_elements, int num_threads) {
    const int64_t even = num_elements / (num_threads * kPiecesPerThread);
    return std::clamp((even + kPieceStep - 1) / kPieceStep * kPieceStep, kPieceStep, kMaxPiece);
}

int check(const flex::Step& call, int num_threads) {
    FLEX_REQUIRE(call.num_elements >= 0 && call.num_elements <= kMaxElements,
                 "num_elements is %lld, expected 0 to 2^60", (long long)call.num_elements);
    FLEX_REQUIRE(num_threads >= 1, "num_threads is %d, expected at least 1", num_threads);
    const int master = static_cast<int>(call.master), states = static_cast<int>(call.states);
    FLEX_REQUIRE(master >= 0 && master <= 2, "master is %d, expected 0, 1 or 2", master);
    FLEX_REQUIRE(states >= 0 && states <= 2, "states is %d, expected 0, 1 or 2", states);
    const int rule = static_cast<int>(call.rule);
    FLEX_REQUIRE(rule >= 0 && rule <= 2, "rule is %d, expected 0, 1 or 2", rule);
    FLEX_REQUIRE(call.states != flex::States::kBlocks || call.rule == flex::Rule::kAdamW,
                 "states in blocks belong to AdamW and to no other rule");
    if (call.num_elements == 0) return flex::kOk;  // pointers may be null
    FLEX_REQUIRE((call.master == flex::Master::kSplit) == (call.remainder != nullptr),
                 "a remainder belongs to a split master and to no other");
    return flex::kOk;
}

flex::Step in_place(const FlexUpdate& call) {
    flex::Step step = {};
    static_cast<FlexUpdate&>(step) = call;
    step.to = {call.weight, call.remainder, call.exp_avg, call.exp_avg_sq};
    return step;
}

int update(const flex::Step& call, int num_threads, int instruction_set) {
    if (const int status = check(call, num_threads); status != flex::kOk) return status;
    if (call.num_elements == 0) return flex::kOk;
    const Range range = range_for(static_cast<InstructionSet>(instruction_set));
    FLEX_REQUIRE(range != nullptr, "instruction set %d is not that of this processor, whose best is %d",
                 instruction_set, static_cast<int>(best_instruction_set()));
    if (!std::isfinite(call.grad_scale)) return flex::kOk;
    const int64_t piece = piece_size(call.num_elements, num_threads);
    const int64_t num_pieces = (call.num_elements + piece - 1) / piece;
    flex::parallel_for(num_pieces, num_threads, [&](int64_t index) {
        update_piece(call, range, index * piece, std::min((index + 1) * piece, call.num_elements));
    });
    return flex::kOk;
}

}  // namespace

// Number of the widest InstructionSet that this processor has.
extern "C" FLEX_API int flex_adamw_instruction_set() { return static_cast<int>(best_instruction_set()); }

// One step in place on num_threads threads; has finished when it returns. num_elements may be 0.
extern "C" FLEX_API int flex_update(const FlexUpdate* call, int num_threads, int instruction_set) {
    FLEX_REQUIRE(call != nullptr, "no arguments");
    return update(in_place(*call), num_threads, instruction_set);
}

// The same with results in other planes, which share no byte with those that are read; these stay as they are. Where
// grad_scale is not finite nothing is written. Not for states in blocks.
extern "C" FLEX_API int flex_update_into(const FlexUpdate* call, const FlexTargets* targets, int num_threads,
                                         int instruction_set) {
    FLEX_REQUIRE(call != nullptr && targets != nullptr, "no arguments");
    FLEX_REQUIRE(call->states != flex::States::kBlocks, "states in blocks are updated in place");
    flex::Step step = in_place(*call);
    step.to = *targets;
    return update(step, num_threads, instruction_set);
}
