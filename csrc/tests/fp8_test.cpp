// Codes of FP8 under sanitizers: buffers of exactly the elements, of odd lengths, by one thread and several. What
// codes stand for and what rounding has lost add up to the value; blocks that are not finite come back as NaN.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <memory>

#include "../common.h"

extern "C" int flex_fp8_encode(float* values, uint8_t* codes, uint8_t* scales, int64_t count, int threads);
extern "C" int flex_fp8_decode(const uint8_t* codes, const uint8_t* scales, float* out, int64_t count, int add,
                               int threads);

namespace {

int failures = 0;

void expect(bool condition, const char* what, int64_t count, int threads) {
    if (condition) return;
    std::fprintf(stderr, "FAILED: %s, %lld elements, %d threads\n", what, static_cast<long long>(count), threads);
    ++failures;
}

void check(int64_t count, int threads, bool finite) {
    const int64_t blocks = (count + 127) / 128;
    std::unique_ptr<float[]> values(new float[count]), left(new float[count]), out(new float[count]);
    std::unique_ptr<uint8_t[]> codes(new uint8_t[count]), scales(new uint8_t[blocks]);
    for (int64_t i = 0; i < count; ++i) {
        const float size = std::ldexp(1.0f, static_cast<int>(i / 128 % 200) - 100);  // all blocks of one magnitude
        values[i] = left[i] = size * (static_cast<float>((i * 2654435761u) % 2001) / 1000.0f - 1.0f);
    }
    if (!finite) values[count - 1] = left[count - 1] = std::numeric_limits<float>::infinity();
    expect(flex_fp8_encode(left.get(), codes.get(), scales.get(), count, threads) == 0, "encode", count, threads);
    for (int64_t i = 0; i < count; ++i) out[i] = 1.0f;
    for (int add : {0, 1})
        expect(flex_fp8_decode(codes.get(), scales.get(), out.get(), count, add, threads) == 0, "decode", count,
               threads);
    const int64_t whole = finite ? count : (blocks - 1) * 128;
    for (int64_t i = 0; i < whole; ++i)
        expect(out[i] / 2 + left[i] == values[i], "codes and what is lost add up", count, threads);
    for (int64_t i = whole; i < count; ++i) expect(std::isnan(out[i]) && left[i] == 0.0f, "NaN", count, threads);
}

}  // namespace

int main() {
    for (int threads : {1, 4})
        for (int64_t count : {1, 7, 127, 128, 129, 1000, 128 * 128 + 5})
            for (bool finite : {true, false}) check(count, threads, finite);
    std::puts(failures == 0 ? "ok" : "failed");
    return failures == 0 ? 0 : 1;
}
