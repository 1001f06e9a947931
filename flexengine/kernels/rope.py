"""Rotary position embedding, in place on the leading heads of a row (queries, then keys, of a fused QKV row).

T tokens, heads of width H, rotary width R <= H. Rotate-half layout of Hugging Face: element i pairs with i + R/2;
interleaved: 2i with 2i + 1. Source: Su et al. 2021, RoFormer, https://arxiv.org/abs/2104.09864.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import next_power_of_2
from flexengine.kernels.rounding import round_to

_TILE_PAIRS = 512
"""Pairs (two elements each) that a program rotates at a time. By one warp, 16 pairs per thread: each of its 32 threads
then takes cos and sin of 8 angles for all heads of the token; more warps would compute the same ones once more each.
"""


def rope_(
    x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, num_rotated_heads: int, inverse: bool,
    interleaved: bool = False,
) -> None:  # fmt: skip
    """Rotate the first num_rotated_heads heads of x in place.

    Pair (a, b) of position p and frequency f becomes scaling * (a cos(p f) - b sin(p f), b cos(p f) + a sin(p f));
    inverse applies the transpose (the sign of sin turned, same scaling), which is the backward.

    Shapes: x [T, heads, H] in bf16 or fp32, last dimension contiguous, the others may be strided; positions [T] int32;
    inv_freq [R/2] fp32. Columns R.. of a head and the heads after the rotated ones stay as they are.
    Rounding: the angle p * f, cos, sin and the rotation in fp32, one rounding at the store (Hugging Face also rounds
    cos and sin to bf16). cos and sin are the accurate ones, reduced exactly for angles beyond 1e6.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes or dtypes, R > H, or more rotated heads than there are.
    """
    tokens, num_heads, head_dim = x.shape
    half = inv_freq.numel()
    check_tensor("x", x, (tokens, num_heads, head_dim), FLOATS, strided_rows=True)
    check_tensor("positions", positions, (tokens,), (torch.int32,))
    check_tensor("inv_freq", inv_freq, (half,), (torch.float32,))
    if 2 * half > head_dim:
        raise ValueError(f"rotary width 2 * {half} (twice the length of inv_freq) exceeds the head width {head_dim}")
    if not 0 <= num_rotated_heads <= num_heads:
        raise ValueError(f"num_rotated_heads must lie in 0..{num_heads} (heads of x), got {num_rotated_heads}")
    if tokens == 0 or half == 0 or num_rotated_heads == 0:
        return
    pairs = next_power_of_2(half)
    heads = max(1, min(_TILE_PAIRS // pairs, next_power_of_2(num_rotated_heads)))
    _rope_kernel[(tokens,)](
        x, positions, inv_freq, x.stride(0), x.stride(1), half, num_rotated_heads, float(scaling),
        INVERSE=inverse, INTERLEAVED=interleaved, HEADS=heads, PAIRS=pairs, num_warps=1,
    )  # fmt: skip


@triton.jit
def _rope_kernel(
    x_ptr, positions_ptr, inv_freq_ptr, token_stride, head_stride, half, num_rotated_heads, scaling,
    INVERSE: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One token per program: its cos and sin serve all heads."""
    token = tl.program_id(0).to(tl.int64)
    pairs = tl.arange(0, PAIRS)
    inv_freq = tl.load(inv_freq_ptr + pairs, mask=pairs < half, other=0.0)
    angle = tl.load(positions_ptr + token).to(tl.float32) * inv_freq
    cos = (tl.cos(angle) * scaling)[None, :]
    sin = (tl.sin(angle) * scaling)[None, :]
    if INVERSE:
        sin = -sin
    for first in range(0, num_rotated_heads, HEADS):
        heads = (first + tl.arange(0, HEADS)).to(tl.int64)
        mask = (heads < num_rotated_heads)[:, None] & (pairs < half)[None, :]
        columns = 2 * pairs if INTERLEAVED else pairs
        a_ptrs = x_ptr + token * token_stride + heads[:, None] * head_stride + columns[None, :]
        b_ptrs = a_ptrs + 1 if INTERLEAVED else a_ptrs + half
        a = tl.load(a_ptrs, mask=mask, other=0.0).to(tl.float32)
        b = tl.load(b_ptrs, mask=mask, other=0.0).to(tl.float32)
        dtype: tl.constexpr = x_ptr.dtype.element_ty
        tl.store(a_ptrs, round_to(a * cos - b * sin, dtype), mask=mask)
        tl.store(b_ptrs, round_to(b * cos + a * sin, dtype), mask=mask)
