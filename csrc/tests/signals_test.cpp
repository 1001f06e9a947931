// Signals under sanitizers: what was written before a signal is there after the wait; aborts and deadlines end a wait.
#include <cstdint>
#include <cstdio>
#include <thread>

extern "C" int flex_signal_store(uint32_t* word, uint32_t value);
extern "C" int flex_signal_load(const uint32_t* word, uint32_t* value);
extern "C" int flex_signal_wait(const uint32_t* words, int64_t stride, int64_t count, uint32_t value,
                                const uint32_t* aborts, int64_t abort_stride, int64_t num_aborts, double seconds,
                                int* result);

namespace {

constexpr int kColumns = 4, kRounds = 2000;
constexpr double kLong = 60;
int failures = 0;

void expect(bool condition, const char* what) {
    if (condition) return;
    std::fprintf(stderr, "FAILED: %s\n", what);
    ++failures;
}

// Column 0: the semaphore; column 3: the abort word.
int wait(const uint32_t* table, int rows, uint32_t value, double seconds) {
    int result = -1;
    const int status = flex_signal_wait(table, kColumns, rows, value, table + 3, kColumns, rows, seconds, &result);
    return status == 0 ? result : status;
}

void check_order() {
    uint32_t table[2 * kColumns] = {};
    int64_t written = 0, seen = 0;  // not atomic: ordered by the signals alone
    std::thread reader([&] {
        for (int round = 1; round <= kRounds; ++round) {
            if (wait(table, 1, round, kLong) != 0) return;
            seen += written;
            flex_signal_store(table + kColumns, round);
        }
    });
    for (int round = 1; round <= kRounds; ++round) {
        written = round;
        flex_signal_store(table, round);
        if (wait(table + kColumns, 1, round, kLong) != 0) break;
    }
    reader.join();
    expect(seen == int64_t{kRounds} * (kRounds + 1) / 2, "every value is seen once");
}

void check_ends() {
    uint32_t table[2 * kColumns] = {}, value = 0;
    expect(wait(table, 2, 1, 0.001) == 2, "a deadline");
    flex_signal_store(table, 5);
    expect(wait(table, 1, 5, 0) == 0 && wait(table, 2, 5, 0) == 2, "one row of two");
    flex_signal_store(table + kColumns, 0x7fffffff);
    expect(wait(table, 2, 5, 0) == 0, "both rows");
    flex_signal_load(table + kColumns, &value);
    expect(value == 0x7fffffff, "load");
    std::thread aborter([&] { flex_signal_store(table + kColumns + 3, 1); });
    expect(wait(table, 2, 6, kLong) == 1, "an abort");
    aborter.join();
    expect(flex_signal_store(reinterpret_cast<uint32_t*>(2), 1) == -1, "a word that is not aligned");
}

}  // namespace

int main() {
    check_order();
    check_ends();
    return failures == 0 ? 0 : 1;
}
