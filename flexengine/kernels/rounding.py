"""Device functions that turn float32 into 16 bits; the Triton twins of `flexengine.optim.rounding`, bit for bit."""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_GOLDEN32, _MIX_A, _MIX_B = tl.constexpr(0x9E37_79B1), tl.constexpr(0x7FEB_352D), tl.constexpr(0x846C_A68B)
_EXPONENT, _QUIET_NAN = tl.constexpr(0x7F80_0000), tl.constexpr(0x7FC0_0000)


@triton.jit
def _is_nan(bits):
    return (bits & 0x7FFF_FFFF) > _EXPONENT


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """x in float32, rounded to nearest even when dtype is bf16. Triton's interpreter truncates instead, so there the
    bits are rounded first."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536  # -65536: the upper 16 bits
        x = tl.where(_is_nan(bits), _QUIET_NAN, rounded).to(tl.float32, bitcast=True)
    return x.to(dtype)


@triton.jit
def canonical_bits(x):
    """Bit pattern of float32 x as int32, every NaN replaced by the quiet one."""
    return tl.where(x == x, x.to(tl.int32, bitcast=True), _QUIET_NAN)  # noqa: PLR0124 - false for a NaN


@triton.jit
def upper_half(bits):
    """int16 with the pattern of the bf16 that truncating int32 `bits` gives."""
    return (bits >> 16).to(tl.int16)


@triton.jit
def low_half(bits):
    """int16 with the pattern of the lower 16 bits."""
    return (((bits & 0xFFFF) ^ 0x8000) - 0x8000).to(tl.int16)


@triton.jit
def widen(pattern):
    """float32 of the bf16 whose bit pattern is int16 `pattern`."""
    return (pattern.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def join(weight_pattern, remainder):
    """float32 master from int16 weight pattern and int16 remainder, as `join_fp32`."""
    low = remainder.to(tl.int32) & 0xFFFF
    upper = weight_pattern.to(tl.int32) - (low >> 15)
    return ((upper << 16) | low).to(tl.float32, bitcast=True)


@triton.jit
def random_bits16(counter, key_low, key_high):
    """int32 in [0, 65536) for int64 counters, as `flexengine.optim.rounding.random_bits16`; keys are int32 patterns."""
    x = (counter & 0xFFFF_FFFF).to(tl.uint32) ^ key_low.to(tl.uint32)
    x = x * _GOLDEN32
    x = x ^ (x >> 16)
    x = x + ((counter >> 32) & 0xFFFF_FFFF).to(tl.uint32) * _GOLDEN32 + key_high.to(tl.uint32)
    x = (x ^ (x >> 16)) * _MIX_A
    x = (x ^ (x >> 15)) * _MIX_B
    return (x >> 16).to(tl.int32)


@triton.jit
def stochastic_pattern(x, counter, key_low, key_high):
    """int16 pattern of the bf16 that float32 x is rounded to at random.

    Infinities and the quiet NaN have 16 zeros below, which no random bits carry out of: they pass as they are.
    """
    return upper_half(canonical_bits(x) + random_bits16(counter, key_low, key_high))
