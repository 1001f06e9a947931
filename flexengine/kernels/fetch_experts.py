"""Weights of experts that have rows, from page-locked host memory to the GPU: the GPU reads the host's memory itself.

Only it knows the routing, so that no copy engine could be told in time which experts to fetch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import check_tensor
from flexengine.kernels.counts import cdiv

_WORDS = (torch.int32, torch.int16)
_BLOCK = 1024  # words that a program of four warps has in flight at once: 4 KiB
_PROGRAMS = 32  # of an expert: 128 KiB in flight are more than a link's bandwidth times its latency


def fetch_experts(source: Tensor, target: Tensor, bounds: Tensor) -> None:
    """target[e] = source[e] where some chunk has rows for expert e; the others stay as they are.

    Shapes: source and target [E, W] in words of int32 or int16, bounds [C, E + 1] int32 with rows of any stride: chunk
    c has bounds[c, e + 1] - bounds[c, e] rows for expert e. The source may be page-locked host memory.
    Cost: reads W words of every expert that is touched over the link. A few programs for each expert leave the other
    multiprocessors to kernels that run beside it.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    chunks, (experts, words) = len(bounds), target.shape
    check_tensor("target", target, (experts, words), _WORDS)
    check_tensor("source", source, (experts, words), (target.dtype,))
    check_tensor("bounds", bounds, (chunks, experts + 1), (torch.int32,), strided_rows=True)
    if target.numel() == 0:
        return
    programs = min(_PROGRAMS, cdiv(words, _BLOCK))
    _fetch_kernel[(experts, programs)](
        source, target, bounds, words, chunks, bounds.stride(0), BLOCK=_BLOCK, num_warps=4
    )  # fmt: skip


@triton.jit
def _fetch_kernel(source_ptr, target_ptr, bounds_ptr, words, chunks, chunk_stride, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    rows = 0
    for chunk in range(chunks):
        own = bounds_ptr + chunk * chunk_stride + expert
        rows += tl.load(own + 1) - tl.load(own)
    if rows > 0:
        start = expert.to(tl.int64) * words
        for first in range(tl.program_id(1) * BLOCK, words, tl.num_programs(1) * BLOCK):
            index = first + tl.arange(0, BLOCK)
            mask = index < words
            tl.store(target_ptr + start + index, tl.load(source_ptr + start + index, mask=mask), mask=mask)
