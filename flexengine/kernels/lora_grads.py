"""Both gradients that adapters read grad_y for, in one pass over it: that of low (to multiply with A) and that of B.

T tokens, F columns of a module's output, R rank. For y = ... + low @ B.T: grad_low = scale * grad_y @ B and
grad_B = grad_y.T @ low. Each is a sum over the other's rows, so that programs write partial sums, which the functions
here add up in a fixed order. Source: Hu et al. 2021, https://arxiv.org/abs/2106.09685.
"""

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.rounding import round_to

MOST_MODULES = 3  # of one call: queries, keys and values
_ROWS = 64  # tokens at a time: as many rows as a tensor core product takes
_LEAST_RANKS = 16  # of a tensor core product
_SUMMED = 4096  # partial sums that a program adds up at a time


def runs(spans: Sequence[range], columns: int) -> Iterator[range]:
    """Numbers of modules, by their columns of grad_y, that one call of `write_gradients` takes together.

    Their columns lie side by side, and no partial sum for low, of so many columns, has those of two of them.
    """
    first = 0
    for number, span in enumerate(spans, 1):
        together = number < len(spans) and spans[number].start == span.stop and number - first < MOST_MODULES
        if not together or len(span) % columns:
            yield range(first, number)
            first = number


def write_gradients(
    grad_y: Tensor, low: Tensor, up: Tensor, scale: float, grad_low: Tensor, low_parts: Tensor, up_parts: Tensor,
    widths: Sequence[int], columns: int,
) -> None:  # fmt: skip
    """grad_low = scale * grad_y @ B by module; up_parts = partial sums of grad_y.T @ low, which `add_parts` adds up.

    widths: columns of J <= 3 modules, of which each has R columns of low; all but the last one's are multiples of
    `columns`. columns: of a partial sum for low, a power of two. Shapes: grad_y [T, F], low and grad_low [T, J * R],
    up = B [F, R], all of one dtype, bf16 or fp32, rows may be strided; low_parts [T, ceil(F / columns) * R], a buffer,
    and up_parts [spans of tokens, F * R] in fp32, rows may be strided.
    Rounding: sums in fp32, grad_low rounded once.
    Cost: reads T*F elements, writes and reads T*F*R/columns elements of low_parts; 4*T*F*R FLOPs.
    Order: launches on the current stream, never synchronises. Sums do not depend on the card.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    (tokens, width), (spans, _), rank = grad_y.shape, up_parts.shape, up.shape[-1]
    tiles = [cdiv(own, columns) for own in widths]
    wrong = sum(widths) != width or any(own % columns for own in widths[:-1])
    if wrong or not 0 < len(widths) <= MOST_MODULES:
        raise ValueError(f"widths are {list(widths)}, expected 1 to {MOST_MODULES} that add up to {width}, multiples of"
                         f" {columns} but for the last one")  # fmt: skip
    check_tensor("grad_y", grad_y, (tokens, width), FLOATS, strided_rows=True)
    check_tensor("low", low, (tokens, len(widths) * rank), (grad_y.dtype,), strided_rows=True)
    check_tensor("up", up, (width, rank), (grad_y.dtype,), strided_rows=True)
    check_tensor("grad_low", grad_low, (tokens, len(widths) * rank), (grad_y.dtype,), strided_rows=True)
    check_tensor("low_parts", low_parts, (tokens, sum(tiles) * rank), (torch.float32,), strided_rows=True)
    check_tensor("up_parts", up_parts, (spans, width * rank), (torch.float32,), strided_rows=True)
    span_rows = cdiv(cdiv(tokens, _ROWS), spans) * _ROWS
    tensors = (grad_y, low, up, low_parts, up_parts)
    strides = (tensor.stride(0) for tensor in tensors)
    ranks = max(_LEAST_RANKS, next_power_of_2(rank))
    ends = tiles[0], sum(tiles[:2])  # of the tiles of the first and of the second module
    _gradients_kernel[(sum(tiles), spans)](
        *tensors, tokens, span_rows, width, *strides, rank, *ends,
        WIDE=not grad_y.is_cuda, RANKS=ranks, ROWS=_ROWS, COLUMNS=columns, num_warps=4, num_stages=2,
    )  # fmt: skip
    sum_low(low_parts, grad_low, tiles, scale)


def sum_low(parts: Tensor, out: Tensor, tiles: Sequence[int], scale: float) -> None:
    """out = scale * the sums of partial sums, by module.

    Shapes: parts [T, sum(tiles) * R] in fp32 and out [T, J * R]; rows may be strided. tiles: partial sums of J <= 3
    modules.
    Order: launches on the current stream, never synchronises.
    """
    tokens, rank = len(out), out.shape[1] // len(tiles)
    check_tensor("out", out, (tokens, len(tiles) * rank), FLOATS, strided_rows=True)
    check_tensor("parts", parts, (tokens, sum(tiles) * rank), (torch.float32,), strided_rows=True)
    if tokens == 0:
        return
    held, ranks = next_power_of_2(max(tiles)), max(_LEAST_RANKS, next_power_of_2(rank))
    rows = max(1, _SUMMED // (held * ranks))
    _sum_low_kernel[(cdiv(tokens, rows), len(tiles))](
        parts, out, tokens, parts.stride(0), out.stride(0), float(scale), rank, tiles[0], sum(tiles[:2]), sum(tiles),
        RANKS=ranks, TILES=held, ROWS=rows, num_warps=4,
    )  # fmt: skip


def add_parts(up_parts: Tensor, grad_up: Tensor, first: bool) -> None:
    """grad_up [F, R] (+)= the sums of up_parts [spans, F * R]; all fp32, grad_up contiguous; first: it holds nothing.

    Order: launches on the current stream, never synchronises.
    """
    count = grad_up.numel()
    check_tensor("grad_up", grad_up, tuple(grad_up.shape), (up_parts.dtype,))
    check_tensor("up_parts", up_parts, (len(up_parts), count), (torch.float32,), strided_rows=True)
    block = 1024
    _sum_up_kernel[(cdiv(count, block),)](
        up_parts, grad_up, count, up_parts.stride(0), FIRST=first, SPANS=len(up_parts), BLOCK=block, num_warps=4
    )


@triton.jit(do_not_specialize=["tokens", "span_rows"])
def _gradients_kernel(
    grad_ptr, low_ptr, up_ptr, low_parts_ptr, up_parts_ptr, tokens, span_rows, width, grad_stride, low_stride,
    up_stride, low_parts_stride, up_parts_stride, rank, end_0, end_1,
    WIDE: tl.constexpr, RANKS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    tile, span = tl.program_id(0), tl.program_id(1)
    module = (tile >= end_0).to(tl.int32) + (tile >= end_1).to(tl.int32)
    columns, ranks = tile * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, RANKS)
    within, held = columns < width, ranks < rank
    up_at = columns[:, None].to(tl.int64) * up_stride + ranks[None, :]
    up = tl.load(up_ptr + up_at, mask=within[:, None] & held[None, :], other=0.0)
    if WIDE:
        up = up.to(tl.float32)
    total = tl.zeros((COLUMNS, RANKS), tl.float32)
    begin = span * span_rows
    for start in range(begin, min(begin + span_rows, tokens), ROWS):
        rows = start + tl.arange(0, ROWS)
        there, rows = rows < tokens, rows.to(tl.int64)
        grad_at = grad_ptr + rows[:, None] * grad_stride + columns[None, :]
        grad = tl.load(grad_at, mask=there[:, None] & within[None, :], other=0.0)
        low_at = low_ptr + rows[:, None] * low_stride + module * rank + ranks[None, :]
        low = tl.load(low_at, mask=there[:, None] & held[None, :], other=0.0)
        if WIDE:
            grad, low = grad.to(tl.float32), low.to(tl.float32)
        part = tl.dot(grad, up, input_precision="ieee")
        part_at = low_parts_ptr + rows[:, None] * low_parts_stride + tile * rank + ranks[None, :]
        tl.store(part_at, part, mask=there[:, None] & held[None, :])
        total = tl.dot(tl.trans(grad), low, total, input_precision="ieee")
    total_at = span.to(tl.int64) * up_parts_stride + columns[:, None] * rank + ranks[None, :]
    tl.store(up_parts_ptr + total_at, total, mask=within[:, None] & held[None, :])


@triton.jit(do_not_specialize=["tokens"])
def _sum_low_kernel(
    parts_ptr, out_ptr, tokens, parts_stride, out_stride, scale, rank, end_0, end_1, tiles,
    RANKS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    module, ranks = tl.program_id(1), tl.arange(0, RANKS)
    begin = tl.where(module == 0, 0, tl.where(module == 1, end_0, end_1))
    end = tl.where(module == 0, end_0, tl.where(module == 1, end_1, tiles))
    number = begin + tl.arange(0, TILES)
    at = rows[:, None, None] * parts_stride + number[None, :, None] * rank + ranks[None, None, :]
    there, held = rows < tokens, ranks < rank
    mask = there[:, None, None] & (number < end)[None, :, None] & held[None, None, :]
    total = tl.sum(tl.load(parts_ptr + at, mask=mask, other=0.0), axis=1) * scale
    out_at = out_ptr + rows[:, None] * out_stride + module * rank + ranks[None, :]
    tl.store(out_at, round_to(total, out_ptr.dtype.element_ty), mask=there[:, None] & held[None, :])


@triton.jit(do_not_specialize=["count"])
def _sum_up_kernel(
    parts_ptr, out_ptr, count, parts_stride, FIRST: tl.constexpr, SPANS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    total = tl.zeros((BLOCK,), tl.float32)
    for span in tl.static_range(SPANS):
        total += tl.load(parts_ptr + span * parts_stride + at, mask=mask, other=0.0)
    if not FIRST:
        total += tl.load(out_ptr + at, mask=mask, other=0.0)
    tl.store(out_ptr + at, total, mask=mask)
