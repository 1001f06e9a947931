"""Random bits by counter: the same on every device and in any tiling, because nothing but numbers decides them.

`kernels/rounding.py` holds the same hash for Triton; tests/kernels compares both bit by bit.
"""

import torch
from torch import Tensor

_MASK32 = 0xFFFF_FFFF
_MASK64 = 0xFFFF_FFFF_FFFF_FFFF
# Multipliers of the counter hash: 2**32 / golden ratio, and the two of `lowbias32`
# (https://nullprogram.com/blog/2018/07/31/). kernels/rounding.py uses the same ones.
_GOLDEN32, _MIX_A, _MIX_B = 0x9E37_79B1, 0x7FEB_352D, 0x846C_A68B


def random_bits16(n: int, device: torch.device, seed: int, step: int, element_offset: int, stream: int) -> Tensor:
    """The int32 tensor [n] of random values in [0, 65536) for counters element_offset .. element_offset + n - 1.

    A hash of (seed, step, stream, 64-bit counter) in 32-bit arithmetic, here carried in int64 and masked, because torch
    has no unsigned 32-bit multiplication; the Triton twin is `kernels.rounding.random_bits16`.
    """
    key_low, key_high = stream_keys(seed, step, stream)
    counter = torch.arange(n, dtype=torch.int64, device=device) + element_offset
    x = (((counter & _MASK32) ^ key_low) * _GOLDEN32) & _MASK32
    x = x ^ (x >> 16)
    x = (x + ((counter >> 32) & _MASK32) * _GOLDEN32 + key_high) & _MASK32
    x = ((x ^ (x >> 16)) * _MIX_A) & _MASK32
    x = ((x ^ (x >> 15)) * _MIX_B) & _MASK32
    return (x >> 16).to(torch.int32)  # the upper bits of a product are its best mixed ones


def stream_keys(seed: int, step: int, stream: int) -> tuple[int, int]:
    """Two unsigned 32-bit keys of one stream of random bits: what a kernel needs to know of (seed, step, stream).

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood 2014, https://doi.org/10.1145/2714064.2660195), one round
    for each of the three numbers. Seeds and steps are taken modulo 2**64.
    """
    state = 0
    for word in (seed, step, stream):
        state = (state + word + 0x9E37_79B9_7F4A_7C15) & _MASK64
        state = ((state ^ (state >> 30)) * 0xBF58_476D_1CE4_E5B9) & _MASK64
        state = ((state ^ (state >> 27)) * 0x94D0_49BB_1331_11EB) & _MASK64
        state ^= state >> 31
    return state & _MASK32, state >> 32
