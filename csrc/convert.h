// Conversion between stored number formats, bit by bit as torch does it (NaN excepted: every NaN that is rounded to
// bf16 becomes the quiet one, 0x7fc0, while torch gives different patterns for vectors and tails).
#pragma once

#include <cstdint>
#include <cstring>

namespace flex {

// How elements are stored, in a file or in memory. Raw bytes are copied as they are.
enum class Type : uint32_t { kRaw = 0, kBf16 = 1, kF16 = 2, kF32 = 3, kF64 = 4 };

inline uint64_t size_of(Type type) {
    switch (type) {
        case Type::kRaw: return 1;
        case Type::kBf16: return 2;
        case Type::kF16: return 2;
        case Type::kF32: return 4;
        case Type::kF64: return 8;
    }
    return 0;
}

// Converts `count` elements; `remainder` takes the 16 bits that a bf16 target lacks of a float32, and only exists for
// the functions that split.
using Convert = void (*)(const void* source, void* target, void* remainder, uint64_t count);

// The function for a pair of types on this processor; null when there is none: equal types, raw bytes, a target that is
// float16, a split of anything but bf16.
Convert find_conversion(Type source, Type target, bool split);

}  // namespace flex
