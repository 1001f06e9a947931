"""out = start + low @ B.T: what adapters add to a residual or a bias, in one pass over memory.

T tokens, F columns, R rank. Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv
from flexengine.kernels.lora_glu import _added, _ranks, _tile
from flexengine.kernels.rounding import round_to

_ROWS, _COLUMNS = 64, 128  # of a program's tile


def add_product(start: Tensor, low: Tensor, up: Tensor, out: Tensor, also: Tensor | None = None) -> None:
    """out = start + low @ B.T (+ also).

    Shapes: start [T, F] (may be out) or [F], low [T, R], up = B [F, R], also and out [T, F], all of one dtype, bf16 or
    fp32. Rows may be strided.
    Rounding: fp32 arithmetic, one rounding at the store.
    Cost: reads T*F (or F), with `also` T*F more, and writes T*F elements; 2*T*F*R FLOPs.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    tokens, width = out.shape
    rank = up.shape[-1]
    check_tensor("out", out, (tokens, width), FLOATS, strided_rows=True)
    for_all = start.dim() == 1
    if for_all:
        check_tensor("start", start, (width,), (out.dtype,))
    else:
        check_tensor("start", start, (tokens, width), (out.dtype,), strided_rows=True)
    check_tensor("low", low, (tokens, rank), (out.dtype,), strided_rows=True)
    check_tensor("up", up, (width, rank), (out.dtype,), strided_rows=True)
    added = out if also is None else also
    check_tensor("also", added, (tokens, width), (out.dtype,), strided_rows=True)
    if out.numel() == 0:
        return
    grid = (cdiv(tokens, _ROWS) * cdiv(width, _COLUMNS),)
    strides = (0 if for_all else start.stride(0), low.stride(0), up.stride(0), out.stride(0), added.stride(0))
    _sum_kernel[grid](
        start, low, up, out, added, tokens, width, *strides, rank, ALSO=also is not None,
        WIDE=not out.is_cuda, RANKS=_ranks(rank), ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["tokens"])
def _sum_kernel(
    start_ptr, low_ptr, up_ptr, out_ptr, also_ptr, tokens, width, start_stride, low_stride, up_stride, out_stride,
    also_stride, rank,
    ALSO: tl.constexpr, WIDE: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    rows, columns = _tile(width, ROWS, COLUMNS)
    inside = (rows < tokens)[:, None] & (columns < width)[None, :]
    start_at = start_ptr + rows[:, None] * start_stride + columns[None, :]
    total = tl.load(start_at, mask=inside, other=0.0).to(tl.float32)
    if ALSO:
        also_at = also_ptr + rows[:, None] * also_stride + columns[None, :]
        total += tl.load(also_at, mask=inside, other=0.0).to(tl.float32)
    total += _added(
        low_ptr, up_ptr, rows, columns, tokens, width, rank, low_stride, up_stride, 1, 0, 0,
        WIDE, RANKS, ROWS, COLUMNS,
    )  # fmt: skip
    tl.store(out_ptr + rows[:, None] * out_stride + columns[None, :], round_to(total, out_ptr.dtype.element_ty), inside)
