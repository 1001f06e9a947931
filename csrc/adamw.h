// One optimizer step over flat segments in host memory: what Python passes, and the paths that carry it out.
//
// Formulas, dtypes and random bits are those of flexengine/optim: adamw.py, adamw_blocks.py, lion.py and sgd.py. One
// rounding per operator, in that order, no fused multiply-add: so every path, any cut into pieces and any number of
// threads give the same bits. One addition: any NaN is stored as the quiet one, since which payload survives an
// operation on two of them is up to the compiler.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flex {

enum class Master : int32_t {
    kFloat32 = 0,
    kSplit = 1,  // bf16 weight and the int16 remainder of its float32
    kBf16 = 2,   // bf16, rounded stochastically
};

// What is computed. Of Lion and SGD the momentum is `exp_avg`, and there is no `exp_avg_sq`.
enum class Rule : int32_t { kAdamW = 0, kLion = 1, kSgd = 2 };

// How states are stored: as floats of 32 or 16 bits, or as codes of 8 bits with a float32 scale for every kBlock.
enum class States : int32_t { kFloat32 = 0, kBf16 = 1, kBlocks = 2 };

constexpr int64_t kBlock = 256;  // BLOCK of flexengine/optim/blockwise.py

enum class InstructionSet : int32_t { kBest = 0, kScalar = 1, kAvx2 = 2, kAvx512 = 3 };

// Two 32-bit keys of one stream of random bits (`stream_keys` of flexengine/optim/rounding.py).
struct StreamKeys {
    uint32_t low, high;
};

}  // namespace flex

// Mirrored field by field by flexengine/native/adamw.py.
struct FlexAdamW {
    void* weight;        // [num_elements] float32 or bf16
    int16_t* remainder;  // [num_elements] with Master::kSplit, else null
    void* exp_avg;       // [num_elements] float32 or bf16
    void* exp_avg_sq;    // as exp_avg
    const void* grad;    // [num_elements] float32 or bf16
    int64_t num_elements;
    uint64_t element_offset;  // counter of element 0 for the random bits
    flex::Master master;
    flex::States states;
    int32_t bf16_grad;
    float grad_scale;  // multiplies the gradient; if it is not finite nothing changes
    float decay, one_minus_beta1, beta2, one_minus_beta2, inverse_root_correction2, eps, step_size;
    flex::StreamKeys weight_keys, exp_avg_keys, exp_avg_sq_keys;
};

// Values and steps of a `Codebook` of flexengine/optim/blockwise.py.
struct FlexCodebook {
    const float* values;
    const int32_t* steps;
};

// Mirrored field by field by flexengine/native/update.py. With States::kBlocks the states are codes.
struct FlexUpdate : FlexAdamW {
    flex::Rule rule;
    float* exp_avg_scales;       // [ceil(num_elements / kBlock)] with States::kBlocks, else null
    float* exp_avg_sq_scales;    // as exp_avg_scales
    FlexCodebook signed_book;    // of exp_avg
    FlexCodebook unsigned_book;  // of exp_avg_sq
};

// Where new values go; mirrored field by field by flexengine/native/update.py. Null where a call has no such plane.
struct FlexTargets {
    void* weight;
    int16_t* remainder;
    void* exp_avg;
    void* exp_avg_sq;
};

namespace flex {

// A call with the places of its results: those that it reads, or others, which share no byte with them.
struct Step : FlexUpdate {
    FlexTargets to;
};

// Elements [begin, end) by one path. The counters of a range must share their upper 32 bits. With States::kBlocks a
// range begins with a block; the scalar path then takes any counters.
void update_range_scalar(const Step& call, int64_t begin, int64_t end);
#if defined(__x86_64__)
void update_range_avx2(const Step& call, int64_t begin, int64_t end);
void update_range_avx512(const Step& call, int64_t begin, int64_t end);
#endif

}  // namespace flex
