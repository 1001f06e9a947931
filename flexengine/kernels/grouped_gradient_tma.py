"""The weight gradients of kernels/grouped.py where the card's engine for tiles (TMA) moves all operands: Hopper cards.

One program per multiprocessor goes through its tiles of all experts in a single loop over tiles of rows, so that loads
of the next gradient's rows run while the sums of the last one are stored. The engine adds these to the accumulator in
the card's cache (`cp.reduce.async.bulk`), where a program would wait for the old sums to arrive. Each element is added
to once per launch: results have the same bits every time. Those are the bits of a load, an addition and a store, but
for sums below 2**-126, which the engine takes as zero.

Rows of the next expert, and those behind the last, are loaded as zeros, without a mask: see `rows_before`.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.grouped_tiles import LIMIT, Tiling, add_product, grouped_tile, multiprocessors, rows_before


class GradientTiling(NamedTuple):
    """How programs share the work.

    tiles: `rows` of an accumulator by its `columns`, and `inner` rows of the operands at a time. parts: pieces that a
    tile of sums is stored in; more take less shared memory, and wait more often. programs: on a multiprocessor; 0: one
    for each tile. adds: the engine adds to the accumulator, else programs load and store it, as they do in
    Triton's interpreter.
    """

    tiles: Tiling
    parts: int = 2
    programs: int = 1
    adds: bool = True


WRITTEN = GradientTiling(Tiling(128, 256, 64, 8, 8, 3))
"""Of sums that are written. Two thirds of the reads of square tiles of 128, whose operands come at 10 TB/s from the
card's cache at 650 TFLOP/s; 208 KiB of shared memory (bench/results/h100_grouped_tilings.json)."""
ADDED = GradientTiling(Tiling(128, 256, 64, 8, 8, 4), parts=8)
"""Of sums that are added to what is there: smaller parts leave room for a fourth stage. The bits are those of WRITTEN,
whose products are the same."""


def launch(
    grad_y: Tensor, x: Tensor, bounds: Tensor, acc: Tensor, accumulate: bool, t: GradientTiling | None = None
) -> None:
    """`grouped.grouped_weight_gradient` of operands that it has checked; rows of all are multiples of 16 bytes."""
    experts, columns, inner = acc.shape
    t = t or (ADDED if accumulate else WRITTEN)
    tiles = t.tiles
    count = experts * cdiv(columns, tiles.rows) * cdiv(inner, tiles.columns)
    programs = min(count, t.programs * multiprocessors(x)) if t.programs else count
    _descriptor_gradient_kernel[(programs,)](
        rows_before(grad_y, [tiles.inner, tiles.rows]), rows_before(x, [tiles.inner, tiles.columns]),
        TensorDescriptor.from_tensor(acc, [1, tiles.rows, tiles.columns // t.parts]), bounds, columns, inner, experts,
        WIDE=not x.is_cuda, EXPERTS=next_power_of_2(experts), OUTS=tiles.rows, INS=tiles.columns, ROWS=tiles.inner,
        GROUP=tiles.group, PARTS=t.parts, ACCUMULATE=accumulate, ADDS=t.adds, **tiles.launch(),
    )  # fmt: skip


@triton.jit
def _load(matrix, row, end, column):
    """A tile [rows, columns] of a matrix of `rows_before`."""
    tile = matrix.load([LIMIT, end, row, column])
    return tl.reshape(tile, tile.shape[2:])


@triton.jit
def _count_steps(bounds_ptr, tiles, experts, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Tiles of rows in a program's share: every num_programs-th of the tiles of all experts, at least one in each."""
    index = tl.arange(0, EXPERTS)
    starts = tl.load(bounds_ptr + index, mask=index < experts, other=0)
    ends = tl.load(bounds_ptr + index + 1, mask=index < experts, other=0)
    steps = tl.maximum(tl.cdiv(ends - starts, ROWS), 1)
    programs = tl.num_programs(0)
    behind = programs - 1 - tl.program_id(0)
    own = ((index + 1) * tiles + behind) // programs - (index * tiles + behind) // programs
    return tl.sum(tl.where(index < experts, own * steps, 0), 0)


@triton.jit
def _put(
    acc_tiles, total, expert, first_out, first_in, ACCUMULATE: tl.constexpr, ADDS: tl.constexpr, PARTS: tl.constexpr
):
    """Store sums, or add them to what is there, a part of their columns at a time."""
    OUTS: tl.constexpr = total.shape[0]
    INS: tl.constexpr = total.shape[1]
    if PARTS > 1:
        low, high = tl.split(total.reshape(OUTS, 2, INS // 2).permute(0, 2, 1))
        _put(acc_tiles, low, expert, first_out, first_in, ACCUMULATE, ADDS, PARTS // 2)
        _put(acc_tiles, high, expert, first_out, first_in + INS // 2, ACCUMULATE, ADDS, PARTS // 2)
    else:
        part = total.reshape(1, OUTS, INS)
        if ACCUMULATE and ADDS:
            acc_tiles.atomic_add([expert, first_out, first_in], part)
        elif ACCUMULATE:
            acc_tiles.store([expert, first_out, first_in], acc_tiles.load([expert, first_out, first_in]) + part)
        else:
            acc_tiles.store([expert, first_out, first_in], part)


@triton.jit
def _descriptor_gradient_kernel(
    grad_tiles, x_tiles, acc_tiles, bounds_ptr, columns, inner, experts,
    WIDE: tl.constexpr, EXPERTS: tl.constexpr, OUTS: tl.constexpr, INS: tl.constexpr, ROWS: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, ACCUMULATE: tl.constexpr, ADDS: tl.constexpr,
):  # fmt: skip
    """A share of the tiles of all experts. One loop instead of two: only then loads run ahead from tile to tile."""
    out_tiles, in_tiles = tl.cdiv(columns, OUTS), tl.cdiv(inner, INS)
    tiles = out_tiles * in_tiles
    tile = tl.program_id(0) - tl.num_programs(0)
    expert, first_out, first_in, end, row = 0, 0, 0, 0, LIMIT
    total = tl.zeros((OUTS, INS), tl.float32)
    for _ in range(_count_steps(bounds_ptr, tiles, experts, EXPERTS, ROWS)):
        row += ROWS
        if row >= LIMIT:  # no rows are left of this tile: the next one's
            tile += tl.num_programs(0)
            expert = tile // tiles
            out_tile, in_tile = grouped_tile(tile % tiles, out_tiles, in_tiles, GROUP)
            first_out, first_in = out_tile * OUTS, in_tile * INS
            end = tl.load(bounds_ptr + expert + 1)
            row = LIMIT - (end - tl.load(bounds_ptr + expert))
        grad = _load(grad_tiles, row, end, first_out)
        x = _load(x_tiles, row, end, first_in)
        total = add_product(total, grad.T, x, WIDE)
        done = row + ROWS >= LIMIT
        if ACCUMULATE:
            done = done & (row < LIMIT)  # an expert without rows adds nothing, and leaves the sums at zero
        if done:
            _put(acc_tiles, total, expert, first_out, first_in, ACCUMULATE, ADDS and not WIDE, PARTS)
            total = tl.zeros((OUTS, INS), tl.float32)
