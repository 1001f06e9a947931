"""What products of experts share: tiles, the expert that a tile of rows belongs to, and how its sums are stored.

Shapes and names as in kernels/grouped.py.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flexengine.kernels.counts import next_power_of_2
from flexengine.kernels.rounding import round_to

MOST_LOW_RANK = 64
"""Terms of an adapter's sums that a program takes at a time."""

LIMIT = tl.constexpr(1 << 30)
"""Rows that a descriptor knows. Times the 2**34 elements of `rows_before`, a multiple of 2**64 bytes."""

SHORT_TERMS = 128
"""Terms of precise sums of FP8 codes that tensor cores sum by themselves, as DeepSeek-AI 2024 does, "DeepSeek-V3
Technical Report", https://arxiv.org/abs/2412.19437, section 3.3.2."""


class LowRank(NamedTuple):
    """What adapters add to a product before it is rounded: low [R, W] times a small matrix of each expert.

    up: [E, F, W], whose rows are sums' factors as those of weights; transposed: [E, W, F].
    """

    low: Tensor
    up: Tensor
    transposed: bool = False


class Scales(NamedTuple):
    """What the sums of FP8 codes are multiplied by: rows [R] and columns [E, F] fp32. fast: tensor cores keep fewer
    bits of a sum. blocks: rows [ceil(D / 128), R] and columns [E, ceil(F / 128), at least ceil(D / 128)]."""

    rows: Tensor
    columns: Tensor
    fast: bool = False
    blocks: bool = False


class Tiling(NamedTuple):
    """A program's tile of rows by columns; it takes `inner` terms of its sums at a time.

    Neighbouring programs share `group` tiles of rows, so that what they read stays in the card's cache.
    """

    rows: int
    columns: int
    inner: int
    group: int
    warps: int
    stages: int

    def launch(self) -> dict[str, int]:
        """Keywords of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def low_block(adapter: LowRank | None) -> int:
    """Terms of an adapter's sums that a program takes at a time; 0 without one."""
    if adapter is None:
        return 0
    return min(MOST_LOW_RANK, max(16, next_power_of_2(adapter.low.shape[1])))


def scaling(scales: Scales | None) -> dict[str, int]:
    """Keywords of a launch: how sums are scaled, and how many terms tensor cores may sum with fewer bits before these
    are added in float32; 0: all."""
    blocks = scales is not None and scales.blocks
    short = 0 if scales is None or scales.fast or blocks else SHORT_TERMS
    return {"SCALED": scales is not None and not blocks, "BLOCKS": blocks, "SHORT": short}


def multiprocessors(x: Tensor) -> int:
    """Count the multiprocessors; without a card a few, so that programs have several tiles."""
    return _multiprocessors_of(x.get_device()) if x.is_cuda else 3


@lru_cache
def _multiprocessors_of(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def rows_before(matrix: Tensor, tile: list[int]) -> TensorDescriptor:
    """Describe tiles [rows, columns] of which only the rows before an `end` of their own are loaded, others as zeros,
    or stored.

    The engine compares the third of a tile's indices, `row`, with LIMIT, and goes this many elements behind the
    matrix's begin: LIMIT * (2**34 - width) + end * width + row * width. Addresses have 64 bits, so LIMIT * 2**34
    elements are none, and this is row end - (LIMIT - row) of the matrix.
    Source: `create_ragged_descriptor` in triton/tools/ragged_tma.py.
    """
    width, limit = matrix.shape[1], LIMIT.value
    return TensorDescriptor(
        matrix, [limit + 1, limit + 1, limit, width], [2**34 - width, width, width, 1], [1, 1, *tile]
    )


def block_strides(scales: Scales | None) -> tuple[int, int]:
    """Scales of a block of terms of all rows, and of a block of 128 outputs; 0 where blocks have none."""
    return (scales.rows.shape[1], scales.columns.shape[2]) if scales is not None and scales.blocks else (0, 0)


def matrices(matrices: Tensor, transposed: bool, inner: int, columns: int) -> TensorDescriptor:
    """Describe tiles of all experts' matrices, one below the other."""
    tile = [inner, columns] if transposed else [columns, inner]
    return TensorDescriptor.from_tensor(matrices.view(-1, matrices.shape[2]), tile)


class Operands(NamedTuple):
    """Descriptors of what a product multiplies, and the terms of an adapter's sums: all, and those taken at a time.

    Without an adapter there are 0 terms, and the descriptors of low and up stand for none.
    """

    rows: TensorDescriptor
    weights: TensorDescriptor
    low: TensorDescriptor
    up: TensorDescriptor
    terms: int
    block: int


def described(x: Tensor, weight: Tensor, transposed: bool, adapter: LowRank | None, t: Tiling) -> Operands:
    """Describe the operands of a product in tiles of t."""
    rows = TensorDescriptor.from_tensor(x, [t.rows, t.inner])
    weights = matrices(weight, transposed, t.inner, t.columns)
    if adapter is None:
        return Operands(rows, weights, rows, weights, 0, 0)
    block = low_block(adapter)
    low = TensorDescriptor.from_tensor(adapter.low, [t.rows, block])
    up = matrices(adapter.up, adapter.transposed, block, t.columns)
    return Operands(rows, weights, low, up, adapter.low.shape[1], block)


@triton.jit
def load_matrix(matrices, expert, first, columns, column, terms, TRANSPOSED: tl.constexpr):
    """A tile [terms of the sum, columns] of an expert's matrix, of `terms` terms and `columns` columns."""
    if TRANSPOSED:
        return matrices.load([expert * terms + first, column])
    else:
        return matrices.load([expert * columns + column, first]).T


@triton.jit
def add_product(total, a, b, WIDE: tl.constexpr, SHORT: tl.constexpr = 0):
    """WIDE: in fp32, for Triton's interpreter, which takes the bits of bf16 operands for whole numbers. SHORT: terms of
    FP8 operands that tensor cores may sum with fewer bits; 0: as many as there are."""
    if WIDE:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    elif SHORT > 0:
        return tl.dot(a, b, total, max_num_imprecise_acc=SHORT)
    else:
        return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def scaled(total, row_scales_ptr, column_scales_ptr, expert, rows, outs, end, columns):
    """Sums of codes times the scales of both operands."""
    row_scales = tl.load(row_scales_ptr + rows, mask=rows < end, other=0.0)
    column_scales = tl.load(column_scales_ptr + expert.to(tl.int64) * columns + outs, mask=outs < columns, other=0.0)
    return total * row_scales[:, None] * column_scales[None, :]


@triton.jit
def add_scaled(
    total, part, block, row_scales_ptr, column_scales_ptr, expert, rows, outs, end, columns, count, stride
):  # fmt: skip
    """total + sums of a block of 128 terms of codes, times the scales of the block."""
    row_scales = tl.load(row_scales_ptr + block * count + rows, mask=rows < end, other=0.0)
    squares = expert.to(tl.int64) * tl.cdiv(columns, 128) + outs // 128
    column_scales = tl.load(column_scales_ptr + squares * stride + block, mask=outs < columns, other=0.0)
    return total + part * row_scales[:, None] * column_scales[None, :]


@triton.jit
def grouped_tile(program, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) of a program: GROUP tiles of rows go through all columns together."""
    first = program // (GROUP * column_tiles) * GROUP
    size = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    return first + within % size, within // size


@triton.jit
def find_expert(bounds_ptr, tile, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """(expert of a tile of rows, its first row, the end of the expert's rows); `experts` beyond the last tile."""
    index = tl.arange(0, EXPERTS)
    starts = tl.load(bounds_ptr + index, mask=index < experts, other=0)
    ends = tl.load(bounds_ptr + index + 1, mask=index < experts, other=0)
    tiles = tl.where(index < experts, (ends - starts + ROWS - 1) // ROWS, 0)
    tile_ends = tl.cumsum(tiles, 0)
    expert = tl.sum((tile_ends <= tile).to(tl.int32), 0)
    mine = index == expert
    start = tl.sum(tl.where(mine, starts, 0), 0)
    end = tl.sum(tl.where(mine, ends, 0), 0)
    before = tl.sum(tl.where(mine, tile_ends - tiles, 0), 0)
    return expert, start + (tile - before) * ROWS, end


@triton.jit
def finished(
    total, bias_ptr, row_weight_ptr, gains_ptr, expert, rows, outs, end, columns,
    BIAS: tl.constexpr, WEIGHTED: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """The sums of an expert's rows before `end`, plus its bias or times its gains."""
    row_mask, out_mask = rows < end, outs < columns
    if BIAS:
        added = tl.load(bias_ptr + expert.to(tl.int64) * columns + outs, mask=out_mask, other=0.0).to(tl.float32)
        if WEIGHTED:
            total += added[None, :] * tl.load(row_weight_ptr + rows, mask=row_mask, other=0.0)[:, None]
        else:
            total += added[None, :]
    if GAINS:
        total *= tl.load(gains_ptr + expert.to(tl.int64) * columns + outs, mask=out_mask, other=0.0)[None, :]
    return total


@triton.jit
def store_tile(
    total, out_ptr, bias_ptr, row_weight_ptr, gains_ptr, expert, rows, outs, end, columns,
    BIAS: tl.constexpr, WEIGHTED: tl.constexpr, GAINS: tl.constexpr,
):  # fmt: skip
    """Store the finished sums of an expert's rows before `end`."""
    total = finished(
        total, bias_ptr, row_weight_ptr, gains_ptr, expert, rows, outs, end, columns, BIAS, WEIGHTED, GAINS
    )
    target = out_ptr + rows[:, None] * columns + outs[None, :]
    tl.store(target, round_to(total, out_ptr.dtype.element_ty), mask=(rows < end)[:, None] & (outs < columns))
