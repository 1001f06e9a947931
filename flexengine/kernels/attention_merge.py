"""Adds attention over further keys to attention over earlier ones, by their statistics."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2

_ROWS = 8  # rows of a program: 4 KiB of float32 at a head width of 128, 8 elements per thread


def attention_merge_(total: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """total, lse <- attention over the keys of both, in place.

    That is total * exp(lse - new) + part * exp(part_lse - new) with new = log(exp(lse) + exp(part_lse)).

    Shapes: total [T, N, H] float32, part [T, N, H] bf16 or float32, lse and part_lse [N, T] float32, all contiguous.
    Cost: reads and writes total once, reads part once.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    tokens, num_heads, width = total.shape
    check_tensor("total", total, (tokens, num_heads, width), (torch.float32,))
    check_tensor("part", part, (tokens, num_heads, width), FLOATS)
    check_tensor("lse", lse, (num_heads, tokens), (torch.float32,))
    check_tensor("part_lse", part_lse, (num_heads, tokens), (torch.float32,))
    if total.numel() == 0:
        return
    _merge_kernel[(cdiv(tokens, _ROWS), num_heads)](
        total, lse, part, part_lse, tokens, num_heads, width,
        ROWS=_ROWS, BLOCK=next_power_of_2(width), num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _merge_kernel(
    total_ptr, lse_ptr, part_ptr, part_lse_ptr, tokens, num_heads, width,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    head = tl.program_id(1)
    here = token < tokens
    stats = head.to(tl.int64) * tokens + token
    before = tl.load(lse_ptr + stats, mask=here, other=0.0)
    added = tl.load(part_lse_ptr + stats, mask=here, other=0.0)
    most = tl.maximum(before, added)
    both = most + tl.log(tl.exp(before - most) + tl.exp(added - most))
    columns = tl.arange(0, BLOCK)
    offsets = (token.to(tl.int64)[:, None] * num_heads + head) * width + columns[None, :]
    mask = here[:, None] & (columns < width)[None, :]
    total = tl.load(total_ptr + offsets, mask=mask, other=0.0) * tl.exp(before - both)[:, None]
    part = tl.load(part_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * tl.exp(added - both)[:, None]
    tl.store(total_ptr + offsets, total + part, mask=mask)
    tl.store(lse_ptr + stats, both, mask=here)
