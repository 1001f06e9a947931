"""Products of experts whose sums go through a gated unit before they are stored, forward and backward: the passes over
memory between the products then carry no sums back and forth.

Shapes and names as in kernels/grouped.py; F width of the unit, gate_up [R, 2F] as in kernels/glu.py. The values are
those of the product and then the unit: gate and up are rounded before the unit reads them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.glu import Activation, _clamped, _gate, _unit_gradients, _unit_of
from flexengine.kernels.grouped import _check_adapter, _tiling, takes_descriptors
from flexengine.kernels.grouped_tiles import LowRank, Tiling, add_product, find_expert, grouped_tile, low_block
from flexengine.kernels.grouped_tma import _matrices
from flexengine.kernels.rounding import round_to
from flexengine.kernels.row_range import is_within

COLUMNS = 128
"""Of the unit, in a program's tile backward; forward it has half as many as a product's, as gate and up are two."""


def tiles_of(width: int) -> int:
    """Into how many parts a row's sum over the unit's columns is divided."""
    return cdiv(width, min(COLUMNS, max(16, next_power_of_2(width))))


def _gradient_tiling(x: Tensor) -> Tiling:
    return Tiling(128, COLUMNS, 128 // x.element_size(), 8, 8, 3)


def gated_product(
    x: Tensor, weight: Tensor, bounds: Tensor, gate_up: Tensor, out: Tensor, row_weight: Tensor, transposed: bool,
    activation: Activation, bias: Tensor | None = None, adapter: LowRank | None = None,
) -> None:  # fmt: skip
    """gate_up[r] = x[r] @ weight[e].T (+ adapter) (+ bias[e]) and out[r] = row_weight[r] * act(gate) * up for the rows
    r of every expert e; transposed: x[r] @ weight[e].

    Shapes: x [R, D], gate_up [R, 2F] and out [R, F] in bf16 or fp32, weight [E, 2F, D] (transposed: [E, D, 2F]), bias
    [E, 2F] of x's dtype, row_weight [R] fp32, bounds [E + 1] int32. Sums in fp32; both results are rounded once.
    Cost: beside the product, writes R*F elements. Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    (count, inner), width, experts = x.shape, out.shape[1], weight.shape[0]
    _check_rows(x, gate_up, out, row_weight)
    shape = (experts, inner, 2 * width) if transposed else (experts, 2 * width, inner)
    check_tensor("weight", weight, shape, (x.dtype,))
    check_tensor("bounds", bounds, (experts + 1,), (torch.int32,))
    if bias is not None:
        check_tensor("bias", bias, (experts, 2 * width), (x.dtype,))
    if adapter is not None:
        _check_adapter(adapter, gate_up, experts)
    if out.numel() == 0:
        return
    unit, t = _unit_of(activation), _tiling(x)
    t = _cut(t._replace(columns=t.columns // 2), count, width)
    loaded = 2 * t.columns if unit["CLAMPED"] else t.columns
    tiles = takes_descriptors(x, gate_up, adapter)
    operands = _operands(x, weight, transposed, adapter, t, loaded, tiles)
    row_tiles = cdiv(count, t.rows) + experts
    _gated_kernel[(row_tiles * cdiv(width, t.columns),)](
        *operands, bounds, gate_up, out, row_weight, gate_up if bias is None else bias, inner, width,
        0 if adapter is None else adapter.low.shape[1], experts, row_tiles, TILES=tiles, WIDE=not x.is_cuda,
        EXPERTS=next_power_of_2(experts), ROWS=t.rows, COLUMNS=t.columns, INNER=t.inner, LOW=low_block(adapter),
        GROUP=t.group, TRANSPOSED=transposed, UP_TRANSPOSED=adapter is not None and adapter.transposed,
        BIAS=bias is not None, **unit, **t.launch(),
    )  # fmt: skip


def gated_gradient(
    grad_y: Tensor, weight: Tensor, bounds: Tensor, gate_up: Tensor, grad_gate_up: Tensor, row_weight: Tensor,
    partials: Tensor, transposed: bool, activation: Activation, adapter: LowRank | None = None,
) -> None:  # fmt: skip
    """The gradients of gate and up from grad_a[r] = grad_y[r] @ weight[e] (+ adapter), which is written nowhere, as of
    `glu.glu_backward`; partials: grad_a * act(gate) * up summed over the columns of each tile, for `sum_tiles`.

    Shapes: grad_y [R, D], gate_up and grad_gate_up [R, 2F] in bf16 or fp32, weight [E, D, F] (transposed: [E, F, D]),
    row_weight [R] and partials [R, tiles_of(F)] fp32. grad_gate_up may be gate_up.
    Cost: beside the product, reads and writes 2*R*F elements.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    (count, inner), width, experts = grad_y.shape, gate_up.shape[1] // 2, weight.shape[0]
    check_tensor("grad_y", grad_y, (count, inner), FLOATS)
    for name, tensor in (("gate_up", gate_up), ("grad_gate_up", grad_gate_up)):
        check_tensor(name, tensor, (count, 2 * width), (grad_y.dtype,))
    check_tensor("row_weight", row_weight, (count,), (torch.float32,))
    check_tensor("partials", partials, (count, tiles_of(width)), (torch.float32,))
    check_tensor("weight", weight, (experts, width, inner) if transposed else (experts, inner, width), (grad_y.dtype,))
    check_tensor("bounds", bounds, (experts + 1,), (torch.int32,))
    if adapter is not None:
        _check_adapter(adapter, gate_up[:, :width], experts)
    if gate_up.numel() == 0:
        return
    t = _cut(_gradient_tiling(grad_y), count, width)
    tiles = takes_descriptors(grad_y, gate_up, adapter) and width >= t.columns and width % 8 == 0
    operands = _operands(grad_y, weight, not transposed, adapter, t, t.columns, tiles)
    row_tiles, column_tiles = cdiv(count, t.rows) + experts, cdiv(width, t.columns)
    _gradient_kernel[(row_tiles * column_tiles,)](
        *operands, bounds, gate_up, grad_gate_up, row_weight, partials, inner, width,
        0 if adapter is None else adapter.low.shape[1], experts, row_tiles, TILES=tiles, WIDE=not grad_y.is_cuda,
        EXPERTS=next_power_of_2(experts), ROWS=t.rows, COLUMNS=t.columns, INNER=t.inner, LOW=low_block(adapter),
        GROUP=t.group, TRANSPOSED=not transposed, UP_TRANSPOSED=adapter is not None and adapter.transposed,
        **_unit_of(activation), **t.launch(),
    )  # fmt: skip


def sum_tiles(partials: Tensor, bounds: Tensor, out: Tensor, accumulate: bool) -> None:
    """out [R] = (or +=) the sum of partials [R, tiles] over tiles, in their order, for the rows of these experts."""
    count, tiles = partials.shape
    check_tensor("out", out, (count,), (torch.float32,))
    if count:
        _sum_tiles_kernel[(cdiv(count, 256),)](
            partials, bounds, out, count, len(bounds) - 1, TILES=tiles, ACCUMULATE=accumulate, ROWS=256, num_warps=4
        )


def _check_rows(x: Tensor, gate_up: Tensor, out: Tensor, row_weight: Tensor) -> None:
    (count, inner), width = x.shape, out.shape[1]
    check_tensor("x", x, (count, inner), FLOATS)
    check_tensor("gate_up", gate_up, (count, 2 * width), (x.dtype,))
    check_tensor("out", out, (count, width), (x.dtype,))
    check_tensor("row_weight", row_weight, (count,), (torch.float32,))


def _cut(t: Tiling, count: int, width: int) -> Tiling:
    """The tiling with fewer rows and columns where there are no more."""
    rows, columns = (max(16, next_power_of_2(n)) for n in (count, width))
    return t._replace(rows=min(t.rows, rows), columns=min(t.columns, columns))


def _operands(
    x: Tensor, weight: Tensor, transposed: bool, adapter: LowRank | None, t: Tiling, columns: int, tiles: bool
) -> tuple[Tensor | TensorDescriptor, ...]:
    """Rows, matrices, and an adapter's: as they are, or described to the engine for tiles."""
    low, up = (x, weight) if adapter is None else adapter[:2]
    if not tiles:
        return x, weight, low, up
    rows, matrices = TensorDescriptor.from_tensor(x, [t.rows, t.inner]), _matrices(weight, transposed, t.inner, columns)
    if adapter is None:
        return rows, matrices, rows, matrices
    block = low_block(adapter)
    lows = TensorDescriptor.from_tensor(low, [t.rows, block])
    return rows, matrices, lows, _matrices(up, adapter.transposed, block, columns)


@triton.jit
def _rows(x, first_row, end, first, terms, TILES: tl.constexpr, ROWS: tl.constexpr, INNER: tl.constexpr):
    """A tile [ROWS, INNER] of rows with so many terms."""
    if TILES:
        return x.load([first_row, first])
    else:
        rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        inners = first + tl.arange(0, INNER)
        mask = (rows < end)[:, None] & (inners < terms)[None, :]
        return tl.load(x + rows[:, None] * terms + inners[None, :], mask=mask, other=0.0)


@triton.jit
def _matrix(
    matrices, expert, first, terms, column, columns, TILES: tl.constexpr, TRANSPOSED: tl.constexpr,
    INNER: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile [INNER, COLUMNS] of an expert's matrix of so many terms and columns."""
    if TILES:
        if TRANSPOSED:
            return matrices.load([expert * terms + first, column])
        else:
            return matrices.load([expert * columns + column, first]).T
    else:
        inners, outs = first + tl.arange(0, INNER), column + tl.arange(0, COLUMNS)
        mask = (inners < terms)[:, None] & (outs < columns)[None, :]
        own = matrices + expert.to(tl.int64) * terms * columns
        if TRANSPOSED:
            return tl.load(own + inners[:, None].to(tl.int64) * columns + outs[None, :], mask=mask, other=0.0)
        else:
            return tl.load(own + outs[None, :].to(tl.int64) * terms + inners[:, None], mask=mask, other=0.0)


@triton.jit(do_not_specialize=["row_tiles"])
def _gated_kernel(
    x, weights, lows, ups, bounds_ptr, gate_up_ptr, out_ptr, row_weight_ptr, bias_ptr, inner, width, low_terms, experts,
    row_tiles, limit, alpha,
    TILES: tl.constexpr, WIDE: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, LOW: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr,
    UP_TRANSPOSED: tl.constexpr, BIAS: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """A tile of the unit's columns, for which gate and up are one product each; of a clamped unit, whose gate and up
    lie in turns, they are one."""
    tile, column_tile = grouped_tile(tl.program_id(0), row_tiles, tl.cdiv(width, COLUMNS), GROUP)
    expert, first_row, end = find_expert(bounds_ptr, tile, experts, EXPERTS, ROWS)
    if expert < experts:  # else there are fewer tiles than programs
        dtype: tl.constexpr = out_ptr.dtype.element_ty
        column = column_tile * COLUMNS
        rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        outs, row_mask = column + tl.arange(0, COLUMNS), rows < end
        biases = bias_ptr + expert.to(tl.int64) * 2 * width
        targets = gate_up_ptr + rows[:, None] * 2 * width
        if CLAMPED:
            total = tl.zeros((ROWS, 2 * COLUMNS), tl.float32)
            for first in range(0, inner, INNER):
                a = _rows(x, first_row, end, first, inner, TILES, ROWS, INNER)
                b = _matrix(weights, expert, first, inner, 2 * column, 2 * width, TILES, TRANSPOSED, INNER, 2 * COLUMNS)
                total = add_product(total, a, b, WIDE)
            if LOW > 0:
                for first in range(0, low_terms, LOW):
                    a = _rows(lows, first_row, end, first, low_terms, TILES, ROWS, LOW)
                    b = _matrix(
                        ups, expert, first, low_terms, 2 * column, 2 * width, TILES, UP_TRANSPOSED, LOW, 2 * COLUMNS
                    )
                    total = add_product(total, a, b, WIDE)
            both = 2 * column + tl.arange(0, 2 * COLUMNS)
            if BIAS:
                total += tl.load(biases + both, mask=both < 2 * width, other=0.0).to(tl.float32)[None, :]
            pairs = round_to(total, dtype)
            tl.store(targets + both[None, :], pairs, mask=row_mask[:, None] & (both < 2 * width)[None, :])
            gate, up = tl.split(tl.reshape(pairs, (ROWS, COLUMNS, 2)))
        else:
            gates, ups_total = tl.zeros((ROWS, COLUMNS), tl.float32), tl.zeros((ROWS, COLUMNS), tl.float32)
            for first in range(0, inner, INNER):
                a = _rows(x, first_row, end, first, inner, TILES, ROWS, INNER)
                b = _matrix(weights, expert, first, inner, column, 2 * width, TILES, TRANSPOSED, INNER, COLUMNS)
                c = _matrix(weights, expert, first, inner, width + column, 2 * width, TILES, TRANSPOSED, INNER, COLUMNS)
                gates = add_product(gates, a, b, WIDE)
                ups_total = add_product(ups_total, a, c, WIDE)
            if LOW > 0:
                for first in range(0, low_terms, LOW):
                    a = _rows(lows, first_row, end, first, low_terms, TILES, ROWS, LOW)
                    b = _matrix(ups, expert, first, low_terms, column, 2 * width, TILES, UP_TRANSPOSED, LOW, COLUMNS)
                    c = _matrix(
                        ups, expert, first, low_terms, width + column, 2 * width, TILES, UP_TRANSPOSED, LOW, COLUMNS
                    )
                    gates = add_product(gates, a, b, WIDE)
                    ups_total = add_product(ups_total, a, c, WIDE)
            if BIAS:
                gates += tl.load(biases + outs, mask=outs < width, other=0.0).to(tl.float32)[None, :]
                ups_total += tl.load(biases + width + outs, mask=outs < width, other=0.0).to(tl.float32)[None, :]
            gate, up = round_to(gates, dtype), round_to(ups_total, dtype)
            mask = row_mask[:, None] & (outs < width)[None, :]
            tl.store(targets + outs[None, :], gate, mask=mask)
            tl.store(targets + width + outs[None, :], up, mask=mask)
        z, factor = _clamped(gate.to(tl.float32), up.to(tl.float32), limit, CLAMPED)
        s, _ = _gate(z, alpha, GELU, CLAMPED)
        unit = z * s * factor * tl.load(row_weight_ptr + rows, mask=row_mask, other=0.0)[:, None]
        target = out_ptr + rows[:, None] * width + outs[None, :]
        tl.store(target, round_to(unit, dtype), mask=row_mask[:, None] & (outs < width)[None, :])


@triton.jit(do_not_specialize=["row_tiles"])
def _gradient_kernel(
    x, weights, lows, ups, bounds_ptr, gate_up_ptr, grad_ptr, row_weight_ptr, partials_ptr, inner, width, low_terms,
    experts, row_tiles, limit, alpha,
    TILES: tl.constexpr, WIDE: tl.constexpr, EXPERTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INNER: tl.constexpr, LOW: tl.constexpr, GROUP: tl.constexpr, TRANSPOSED: tl.constexpr,
    UP_TRANSPOSED: tl.constexpr, GELU: tl.constexpr, CLAMPED: tl.constexpr,
):  # fmt: skip
    """A tile of the unit's columns: its gradient stays in registers, and those of gate and up are stored."""
    column_tiles = tl.cdiv(width, COLUMNS)
    tile, column_tile = grouped_tile(tl.program_id(0), row_tiles, column_tiles, GROUP)
    expert, first_row, end = find_expert(bounds_ptr, tile, experts, EXPERTS, ROWS)
    if expert < experts:  # else there are fewer tiles than programs
        dtype: tl.constexpr = grad_ptr.dtype.element_ty
        column = column_tile * COLUMNS
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, inner, INNER):
            a = _rows(x, first_row, end, first, inner, TILES, ROWS, INNER)
            b = _matrix(weights, expert, first, inner, column, width, TILES, TRANSPOSED, INNER, COLUMNS)
            total = add_product(total, a, b, WIDE)
        if LOW > 0:
            for first in range(0, low_terms, LOW):
                a = _rows(lows, first_row, end, first, low_terms, TILES, ROWS, LOW)
                b = _matrix(ups, expert, first, low_terms, column, width, TILES, UP_TRANSPOSED, LOW, COLUMNS)
                total = add_product(total, a, b, WIDE)
        rows = (first_row + tl.arange(0, ROWS)).to(tl.int64)
        outs, row_mask = column + tl.arange(0, COLUMNS), rows < end
        mask = row_mask[:, None] & (outs < width)[None, :]
        begin = rows[:, None] * 2 * width
        weight = tl.load(row_weight_ptr + rows, mask=row_mask, other=0.0)[:, None]
        if CLAMPED:
            both = 2 * column + tl.arange(0, 2 * COLUMNS)
            pair_mask = row_mask[:, None] & (both < 2 * width)[None, :]
            pairs = tl.load(gate_up_ptr + begin + both[None, :], mask=pair_mask, other=0.0).to(tl.float32)
            gate, up = tl.split(tl.reshape(pairs, (ROWS, COLUMNS, 2)))
        else:
            gate = tl.load(gate_up_ptr + begin + outs[None, :], mask=mask, other=0.0).to(tl.float32)
            up = tl.load(gate_up_ptr + begin + width + outs[None, :], mask=mask, other=0.0).to(tl.float32)
        unit, grad_gate, grad_up = _unit_gradients(total * weight, gate, up, limit, alpha, GELU, CLAMPED)
        part = tl.sum(tl.where(mask, total * unit, 0.0), 1)
        tl.store(partials_ptr + rows * column_tiles + column_tile, part, mask=row_mask)
        if CLAMPED:
            tl.store(
                grad_ptr + begin + both[None, :], round_to(tl.interleave(grad_gate, grad_up), dtype), mask=pair_mask
            )
        else:
            tl.store(grad_ptr + begin + outs[None, :], round_to(grad_gate, dtype), mask=mask)
            tl.store(grad_ptr + begin + width + outs[None, :], round_to(grad_up, dtype), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _sum_tiles_kernel(
    partials_ptr, bounds_ptr, out_ptr, count, experts,
    TILES: tl.constexpr, ACCUMULATE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    mask = (rows < count) & is_within(rows, bounds_ptr, experts)
    total = tl.zeros((ROWS,), tl.float32)
    for tile in range(TILES):
        total += tl.load(partials_ptr + rows * TILES + tile, mask=mask, other=0.0)
    if ACCUMULATE:
        total += tl.load(out_ptr + rows, mask=mask, other=0.0)
    tl.store(out_ptr + rows, total, mask=mask)
