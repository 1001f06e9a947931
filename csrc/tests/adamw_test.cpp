// The AdamW paths under sanitizers: buffers of exactly the size they need, odd sizes, several threads and callers.
// Prints nothing and returns 0 when all paths agree; sanitizers report what they find themselves.
#include "../adamw.h"

#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <thread>
#include <vector>

extern "C" int flex_update(const FlexUpdate* call, int num_threads, int instruction_set);
extern "C" int flex_adamw_instruction_set();

namespace {

// Planes of one segment, each in an allocation of its own that begins one element in: any overrun is seen.
class Segment {
 public:
    Segment(int64_t size, flex::Master master, bool bf16_states, bool bf16_grad)
        : weight_(bytes(size, master != flex::Master::kFloat32)),
          remainder_(master == flex::Master::kSplit ? size + 1 : 0),
          exp_avg_(bytes(size, bf16_states)),
          exp_avg_sq_(bytes(size, bf16_states)),
          grad_(bytes(size, bf16_grad)) {
        fill(weight_, master != flex::Master::kFloat32, 1);
        fill(exp_avg_, bf16_states, 2);
        fill(exp_avg_sq_, bf16_states, 3);
        fill(grad_, bf16_grad, 4);
        call_ = {};
        call_.weight = second(weight_, master != flex::Master::kFloat32);
        call_.remainder = remainder_.empty() ? nullptr : remainder_.data() + 1;
        call_.exp_avg = second(exp_avg_, bf16_states);
        call_.exp_avg_sq = second(exp_avg_sq_, bf16_states);
        call_.grad = second(grad_, bf16_grad);
        call_.num_elements = size;
        call_.element_offset = (uint64_t{1} << 32) - static_cast<uint64_t>(size / 2);
        call_.master = master;
        call_.states = bf16_states ? flex::States::kBf16 : flex::States::kFloat32;
        call_.bf16_grad = bf16_grad;
        call_.grad_scale = 0.5f;
        call_.decay = 0.999f;
        call_.one_minus_beta1 = 0.1f;
        call_.beta2 = 0.95f;
        call_.one_minus_beta2 = 0.05f;
        call_.inverse_root_correction2 = 4.5f;
        call_.eps = 1e-8f;
        call_.step_size = 1e-2f;
        call_.weight_keys = {1, 2};
        call_.exp_avg_keys = {3, 4};
        call_.exp_avg_sq_keys = {5, 6};
    }

    int update(int num_threads, int instruction_set) { return flex_update(&call_, num_threads, instruction_set); }

    bool operator==(const Segment& other) const {
        return weight_ == other.weight_ && remainder_ == other.remainder_ && exp_avg_ == other.exp_avg_ &&
               exp_avg_sq_ == other.exp_avg_sq_;
    }

 private:
    using Bytes = std::vector<unsigned char>;

    static Bytes bytes(int64_t size, bool bf16) { return Bytes((size + 1) * (bf16 ? 2 : 4)); }
    static void* second(Bytes& plane, bool bf16) { return plane.data() + (bf16 ? 2 : 4); }

    // Positive numbers around 1: the pattern of a float differs from that of a bf16 only in its lower half.
    static void fill(Bytes& plane, bool bf16, unsigned salt) {
        const size_t width = bf16 ? 2 : 4;
        for (size_t at = 0; at < plane.size(); at += width) {
            const uint32_t pattern = 0x3F000000u + (static_cast<uint32_t>(at) * 2654435761u + salt) % 0x01000000u;
            const uint32_t stored = bf16 ? pattern >> 16 : pattern;
            std::memcpy(plane.data() + at, &stored, width);
        }
    }

    Bytes weight_;
    std::vector<int16_t> remainder_;
    Bytes exp_avg_, exp_avg_sq_, grad_;
    FlexUpdate call_;
};

int failures = 0;

void expect(bool condition, const char* what, int64_t size, int master, int set) {
    if (condition) return;
    std::fprintf(stderr, "FAILED: %s (size %lld, master %d, instruction set %d)\n", what, (long long)size, master, set);
    ++failures;
}

void check_mode(int64_t size, int master, bool bf16_states, bool bf16_grad) {
    Segment expected(size, flex::Master{master}, bf16_states, bf16_grad);
    expect(expected.update(1, 1) == 0, "the scalar path", size, master, 1);
    for (int set = 0; set <= flex_adamw_instruction_set(); ++set) {
        Segment actual(size, flex::Master{master}, bf16_states, bf16_grad);
        expect(actual.update(4, set) == 0, "the update", size, master, set);
        expect(actual == expected, "the bits of the scalar path", size, master, set);
    }
}

void check_callers_at_once() {
    constexpr int64_t kSize = 20011;
    std::vector<std::thread> callers;
    for (int caller = 0; caller < 3; ++caller) {
        callers.emplace_back([caller] { check_mode(kSize, caller, true, false); });
    }
    for (std::thread& caller : callers) caller.join();
}

}  // namespace

int main() {
    for (int64_t size : {1, 7, 33, 4111, 10007}) {
        for (int mode = 0; mode < 12; ++mode) check_mode(size, mode / 4, mode & 1, mode & 2);
    }
    check_callers_at_once();
    return failures == 0 ? 0 : 1;
}
