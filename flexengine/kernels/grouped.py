"""Multiplies each expert with its rows, and sums the gradients of its weight.

R rows sorted by expert, E experts; `bounds` [E + 1]: rows bounds[e] to bounds[e + 1] are those of expert e, as in
kernels/experts.py. Nothing is read back: any routing takes the same grid. E may be some consecutive experts of more:
then other rows are neither read nor written.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels import grouped_gradient_tma, grouped_walk
from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.grouped_tiles import (
    LowRank,
    Scales,
    Tiling,
    add_product,
    add_scaled,
    block_strides,
    find_expert,
    grouped_tile,
    low_block,
    scaled,
    scaling,
    store_tile,
)
from flexengine.kernels.grouped_tma import launch

_BLOCK_TILING = Tiling(128, 128, 128, 8, 8, 3)
"""Tiles of products with scales for blocks: a block of terms at a time, whose sums need as many registers again."""


WALKS = True
"""Whether programs walk through tiles of products in 16 bits that the card's engine loads (kernels/grouped_walk.py)."""
NARROWEST_GRADIENT = 128
"""Fewest outputs or inputs of a tile of a gradient. Adapters have 16 or 32; 16 here would spare them products of zeros,
which has not been timed (`python -m bench.experts_products`)."""


def _tiling(x: Tensor) -> Tiling:
    """Choose the tiles of a product.

    The stages of both operands fit the 99 KiB of shared memory of smaller cards. Tiles are twice as wide if 144 KiB
    fit.
    """
    inner = 128 // x.element_size()
    if x.element_size() == 4:
        return Tiling(128, 128, inner, 8, 8, 3)
    wide = x.is_cuda and _shared_memory_bytes(x.get_device()) >= 160 * 1024
    return Tiling(128, 256 if wide else 128, inner, 8, 8, 3)


def _gradient_tiling(x: Tensor) -> Tiling:
    """Choose the tiles of a weight's gradient.

    Two programs share a multiprocessor: one reads and writes its accumulator while the other computes its sums.
    """
    return Tiling(128, 128, 32, 8, 8, 3) if x.element_size() == 4 else Tiling(128, 128, 64, 8, 4, 3)


@lru_cache
def _shared_memory_bytes(device: int) -> int:
    """Read how much shared memory one program may use."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def grouped_product(
    x: Tensor, weight: Tensor, bounds: Tensor, out: Tensor, transposed: bool, bias: Tensor | None = None,
    row_weight: Tensor | None = None, adapter: LowRank | None = None, gains: Tensor | None = None,
    scales: Scales | None = None,
) -> None:  # fmt: skip
    """out[r] = x[r] @ weight[e].T (+ adapter) (+ (row_weight[r] *) bias[e]) for the rows r of every expert e;
    transposed: x[r] @ weight[e]; gains [E, F] fp32: what the sum is multiplied by, without bias. scales: x and weight
    are e4m3 codes, and their product is multiplied by the scales of both before anything is added.

    Shapes: x [R, D] and out [R, F] in bf16 or fp32, weight [E, F, D] (transposed: [E, D, F]), bounds [E + 1] int32,
    bias [E, F] of x's dtype, row_weight [R] fp32. Sums in fp32, one rounding. Deterministic: the order of a sum depends
    on shapes alone.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    (count, inner), columns, experts = x.shape, out.shape[1], weight.shape[0]
    check_tensor("x", x, (count, inner), FLOATS if scales is None else (torch.float8_e4m3fn,))
    check_tensor("out", out, (count, columns), FLOATS if scales is not None else (x.dtype,))
    if scales is not None:
        _check_scales(scales, count, inner, experts, columns, transposed)
    shape = (experts, inner, columns) if transposed else (experts, columns, inner)
    check_tensor("weight", weight, shape, (x.dtype,))
    check_tensor("bounds", bounds, (experts + 1,), (torch.int32,))
    if bias is not None:
        check_tensor("bias", bias, (experts, columns), (out.dtype,))
    if row_weight is not None:
        check_tensor("row_weight", row_weight, (count,), (torch.float32,))
    if gains is not None:
        check_tensor("gains", gains, (experts, columns), (torch.float32,))
        if bias is not None:
            raise ValueError("a product has gains or a bias, not both")
    if adapter is not None:
        _check_adapter(adapter, out, experts)
    if out.numel() == 0:
        return
    t = _tiling(x) if scales is None or not scales.blocks else _BLOCK_TILING
    if takes_descriptors(x, out, adapter):
        operands = (x, weight, bounds, out, transposed, bias, row_weight, adapter, gains)
        walk = grouped_walk.walk_beside(adapter) if WALKS and scales is None else None
        return launch(*operands, t, scales) if walk is None else grouped_walk.launch(*operands, walk)
    low, up = (out, out) if adapter is None else adapter[:2]
    row_scales, column_scales = (out, out) if scales is None else scales[:2]
    width = 0 if adapter is None else low.shape[1]
    up_strides = (0, 0, 0) if adapter is None else _strides(up, adapter.transposed)
    block_rows = min(t.rows, max(16, next_power_of_2(count)))
    row_tiles = cdiv(count, block_rows) + experts
    block_columns = min(t.columns, max(16, next_power_of_2(columns)))
    _product_kernel[(row_tiles * cdiv(columns, block_columns),)](
        x, weight, bounds, out, out if bias is None else bias, out if row_weight is None else row_weight,
        out if gains is None else gains, low, up, row_scales, column_scales,
        inner, columns, width, experts, row_tiles, *block_strides(scales),
        *_strides(weight, transposed), *up_strides,
        WIDE=not x.is_cuda, EXPERTS=next_power_of_2(experts), ROWS=block_rows, COLUMNS=block_columns,
        INNER=t.inner, LOW=low_block(adapter), GROUP=t.group, BIAS=bias is not None, WEIGHTED=row_weight is not None,
        GAINS=gains is not None, **scaling(scales), **t.launch(),
    )  # fmt: skip


def _check_adapter(adapter: LowRank, out: Tensor, experts: int) -> None:
    """Raise ValueError unless an adapter's operands are those of a product into out."""
    (count, columns), width = out.shape, adapter.low.shape[1]
    check_tensor("low", adapter.low, (count, width), (out.dtype,))
    shape = (experts, width, columns) if adapter.transposed else (experts, columns, width)
    check_tensor("up", adapter.up, shape, (out.dtype,))


def _check_scales(scales: Scales, count: int, inner: int, experts: int, columns: int, transposed: bool) -> None:
    """Raise ValueError unless scales are those of a product that tensor cores take."""
    shapes = ((count,), (experts, columns))
    if scales.blocks:
        blocks = cdiv(inner, 128)
        shapes = ((blocks, count), (experts, cdiv(columns, 128), max(blocks, scales.columns.shape[-1])))
    check_tensor("scales of rows", scales.rows, shapes[0], (torch.float32,))
    check_tensor("scales of columns", scales.columns, shapes[1], (torch.float32,))
    if transposed:
        raise ValueError("FP8 products sum along the last dimension of the weight; round it transposed")


def _strides(matrices: Tensor, transposed: bool) -> tuple[int, int, int]:
    """Elements between experts, between outputs and between terms of a sum."""
    return matrices.stride(0), matrices.stride(2 if transposed else 1), matrices.stride(1 if transposed else 2)


def _has_tile_engine(x: Tensor) -> bool:
    """Whether a tensor lies on a card with an engine for tiles, and with shared memory for them: Hopper's."""
    return x.is_cuda and _shared_memory_bytes(x.get_device()) >= 227 * 1024


def takes_descriptors(x: Tensor, out: Tensor, adapter: LowRank | None) -> bool:
    """Whether the card's engine for tiles (TMA, since Hopper) loads the operands; by their shapes alone.

    A tile must not cross the end of a sum: what is loaded beyond belongs to the next expert. An adapter is as a tile.
    """
    if out.dtype != torch.bfloat16 or len(x) < 128 or not _has_tile_engine(x):
        return False
    whole = adapter is None or adapter.low.shape[1] % low_block(adapter) == 0
    return (
        whole and len(x) >= 128 and x.shape[1] % _tiling(x).inner == 0 and out.shape[1] >= 128 and out.shape[1] % 8 == 0
    )


def gradient_takes_descriptors(grad_y: Tensor, x: Tensor) -> bool:
    """Whether the card's engine for tiles (TMA, since Hopper) moves the operands; by their widths alone, not by rows.

    Narrower gradients, as of adapters, would leave most of a tile empty.
    """
    if x.dtype != torch.bfloat16 or x.numel() == 0 or not _has_tile_engine(x):  # of no elements there is no address
        return False
    return all(width >= 128 and width % 8 == 0 for width in (grad_y.shape[1], x.shape[1]))


def grouped_weight_gradient(grad_y: Tensor, x: Tensor, bounds: Tensor, acc: Tensor, accumulate: bool) -> None:
    """acc[e] = (or +=) grad_y[rows of e].T @ x[rows of e]; an expert without rows has zero.

    Shapes: grad_y [R, F] and x [R, D] in bf16 or fp32, bounds [E + 1] int32, acc [E, F, D] fp32. Sums in fp32, rows in
    order.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    (count, columns), inner, experts = grad_y.shape, x.shape[1], acc.shape[0]
    check_tensor("grad_y", grad_y, (count, columns), FLOATS)
    check_tensor("x", x, (count, inner), (grad_y.dtype,))
    check_tensor("bounds", bounds, (experts + 1,), (torch.int32,))
    check_tensor("acc", acc, (experts, columns, inner), (torch.float32,))
    if gradient_takes_descriptors(grad_y, x):
        return grouped_gradient_tma.launch(grad_y, x, bounds, acc, accumulate)
    t = _gradient_tiling(x)
    outs = min(t.rows, max(NARROWEST_GRADIENT, next_power_of_2(columns)))
    ins = min(t.columns, max(NARROWEST_GRADIENT, next_power_of_2(inner)))
    grid = (experts * cdiv(columns, outs) * cdiv(inner, ins),)
    _weight_gradient_kernel[grid](
        grad_y, x, bounds, acc, columns, inner, ACCUMULATE=accumulate, WIDE=not x.is_cuda, OUTS=outs, INS=ins,
        ROWS=t.inner, GROUP=t.group, **t.launch(),
    )  # fmt: skip


@triton.jit(do_not_specialize=["row_tiles", "block_rows"])
def _product_kernel(
    x_ptr, weight_ptr, bounds_ptr, out_ptr, bias_ptr, row_weight_ptr, gains_ptr, low_ptr, up_ptr, row_scales_ptr,
    column_scales_ptr, inner, columns, width, experts, row_tiles, block_rows, square_stride, expert_stride,
    column_stride, inner_stride, up_expert_stride, up_column_stride, up_inner_stride,
    WIDE: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
    LOW: tl.constexpr, GROUP: tl.constexpr, BIAS: tl.constexpr, WEIGHTED: tl.constexpr, GAINS: tl.constexpr,
    SCALED: tl.constexpr, BLOCKS: tl.constexpr, SHORT: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one expert. The last tile of each may be part filled, so there are as many more as experts."""
    tile, column_tile = grouped_tile(tl.program_id(0), row_tiles, tl.cdiv(columns, COLUMNS), GROUP)
    expert, first_row, end = find_expert(bounds_ptr, tile, experts, EXPERTS, ROWS)
    if expert < experts:  # else there are fewer tiles than programs
        rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        outs = column_tile * COLUMNS + tl.arange(0, COLUMNS)
        row_mask, out_mask = rows < end, outs < columns
        weights = weight_ptr + expert.to(tl.int64) * expert_stride + outs.to(tl.int64)[None, :] * column_stride
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, inner, INNER):
            inners = first + tl.arange(0, INNER)
            inner_mask = inners < inner
            x = tl.load(x_ptr + rows[:, None] * inner + inners[None, :], mask=row_mask[:, None] & inner_mask, other=0.0)
            w = tl.load(weights + inners[:, None] * inner_stride, mask=inner_mask[:, None] & out_mask, other=0.0)
            if BLOCKS:
                part = add_product(tl.zeros((ROWS, COLUMNS), tl.float32), x, w, WIDE)
                total = add_scaled(
                    total, part, first // INNER, row_scales_ptr, column_scales_ptr, expert, rows, outs, end, columns,
                    block_rows, square_stride,
                )  # fmt: skip
            else:
                total = add_product(total, x, w, WIDE, SHORT)
        if SCALED:
            total = scaled(total, row_scales_ptr, column_scales_ptr, expert, rows, outs, end, columns)
        if LOW > 0:
            ups = up_ptr + expert.to(tl.int64) * up_expert_stride + outs.to(tl.int64)[None, :] * up_column_stride
            for first in range(0, width, LOW):
                inners = first + tl.arange(0, LOW)
                low_mask = inners < width
                low_tile = low_ptr + rows[:, None] * width + inners[None, :]
                low = tl.load(low_tile, mask=row_mask[:, None] & low_mask, other=0.0)
                up = tl.load(ups + inners[:, None] * up_inner_stride, mask=low_mask[:, None] & out_mask, other=0.0)
                total = add_product(total, low, up, WIDE)
        store_tile(
            total, out_ptr, bias_ptr, row_weight_ptr, gains_ptr, expert, rows, outs, end, columns, BIAS, WEIGHTED, GAINS
        )


@triton.jit
def _weight_gradient_kernel(
    grad_y_ptr, x_ptr, bounds_ptr, acc_ptr, columns, inner,
    ACCUMULATE: tl.constexpr, WIDE: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    out_tiles, in_tiles = tl.cdiv(columns, OUTS), tl.cdiv(inner, INS)
    expert = tl.program_id(0) // (out_tiles * in_tiles)
    out_tile, in_tile = grouped_tile(tl.program_id(0) % (out_tiles * in_tiles), out_tiles, in_tiles, GROUP)
    start, end = tl.load(bounds_ptr + expert), tl.load(bounds_ptr + expert + 1)
    outs, ins = out_tile * OUTS + tl.arange(0, OUTS), in_tile * INS + tl.arange(0, INS)
    total = tl.zeros((OUTS, INS), tl.float32)
    for first in range(start, end, ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = rows < end
        grads = grad_y_ptr + rows[None, :] * columns + outs[:, None]
        grad = tl.load(grads, mask=mask[None, :] & (outs < columns)[:, None], other=0.0)
        x = tl.load(x_ptr + rows[:, None] * inner + ins[None, :], mask=mask[:, None] & (ins < inner), other=0.0)
        total = add_product(total, grad, x, WIDE)
    target = acc_ptr + expert.to(tl.int64) * columns * inner + outs.to(tl.int64)[:, None] * inner + ins[None, :]
    mask = (outs < columns)[:, None] & (ins < inner)[None, :]
    if ACCUMULATE:
        total += tl.load(target, mask=mask, other=0.0)
    tl.store(target, total, mask=mask)
