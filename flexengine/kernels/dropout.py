"""Dropout by counted draws in one pass over memory; the fused twin of `flexengine.ops.dropout.drop`."""

import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor, signed_words
from flexengine.kernels.counts import cdiv
from flexengine.kernels.rounding import random_bits16, round_to

_BLOCK = 2048  # elements per program; 4 warps hold 16 per thread


def drop_(x: Tensor, out: Tensor, threshold: int, scale: float, keys: tuple[int, int], first: int) -> None:
    """out = x * scale where the draw of an element's counter is at least threshold, else 0.

    Shapes: x and out [T, D] fp32 or bf16, contiguous, maybe the same tensor. keys: unsigned 32-bit numbers of the
    stream of random bits; first: counter of element 0.
    Order: launches on the current stream, never synchronises, never allocates. Raises: ValueError on other shapes.
    """
    check_tensor("x", x, out.shape, FLOATS)
    check_tensor("out", out, x.shape, (x.dtype,))
    if x.numel() == 0:
        return
    signed = signed_words(keys)
    _drop_kernel[(cdiv(x.numel(), _BLOCK),)](
        x, out, x.numel(), threshold, scale, *signed, first, BLOCK=_BLOCK, num_warps=4
    )


# Keys and offset differ at every call: specialising on their values would compile the kernel again and again.
@triton.jit(do_not_specialize=("key_low", "key_high", "first"))
def _drop_kernel(x_ptr, out_ptr, num_elements, threshold, scale, key_low, key_high, first, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    kept = random_bits16(offsets + first, key_low, key_high) >= threshold
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tl.store(out_ptr + offsets, round_to(tl.where(kept, x * scale, 0.0), dtype), mask=mask)
