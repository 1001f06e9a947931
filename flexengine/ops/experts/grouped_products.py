"""Products of experts with their rows, and the gradients that they bring: the kernels, and the plain path beside them.

Shapes: R rows sorted by expert, E experts; `bounds` [E + 1]: rows bounds[e] to bounds[e + 1] are those of expert e.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import use_kernel, wide
from flexengine.ops.fp8_blocks import block_product
from flexengine.ops.fp8_scaling import Operand
from flexengine.ops.products import use_product_kernel
from flexengine.ops.row_range import rows_within


class LowRank(NamedTuple):
    """What adapters add to a product: low [R, W] times up [E, F, W][e].T; transposed: up [E, W, F][e]."""

    low: Tensor
    up: Tensor
    transposed: bool = False


class Scales(NamedTuple):
    """What codes are multiplied by: rows [R] those of x, columns [E, F] those of the weights, both float32. fast: sums
    may keep the fewer bits that tensor cores keep by themselves. blocks: rows [ceil(D / 128), R], columns [E,
    ceil(F / 128), at least ceil(D / 128)], as ops/fp8_blocks.py has them."""

    rows: Tensor
    columns: Tensor
    fast: bool = False
    blocks: bool = False


class Added(NamedTuple):
    """What a product's sums get before they are rounded: adapters add, a bias [E, F] is added, times row_weight [R]
    where that is given; gains [E, F], wide, multiply the sum, where there is no bias."""

    bias: Tensor | None = None
    row_weight: Tensor | None = None
    adapter: LowRank | None = None
    gains: Tensor | None = None


NOTHING = Added()


def _slices(bounds: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert with its rows, for the plain path, which reads the counts: on the CPU, and on CUDA in float64."""
    for expert, (start, end) in enumerate(pairwise(bounds.tolist())):
        if end > start:
            yield expert, slice(start, end)


def grouped_product(
    x: Tensor, weight: Tensor, bounds: Tensor, out: Tensor, transposed: bool, added: Added = NOTHING,
    scales: Scales | None = None,
) -> None:  # fmt: skip
    """out [R, F] = x [R, D] @ weight [E, F, D][e].T (+ low @ up) (+ (row_weight [R] *) bias [E, F][e]) for the rows of
    every expert; transposed: @ weight [E, D, F][e]. scales: of x and weight in FP8, by which the sum of their product
    is multiplied."""
    bias, row_weight, adapter, gains = added
    if use_product_kernel(out) and out.dtype != torch.float64:
        from flexengine.kernels import grouped  # noqa: PLC0415

        low_rank = None if adapter is None else grouped.LowRank(*adapter)
        factors = None if scales is None else grouped.Scales(*scales)
        return grouped.grouped_product(x, weight, bounds, out, transposed, bias, row_weight, low_rank, gains, factors)
    for expert, rows in _slices(bounds):
        matrix = weight[expert] if transposed else weight[expert].t()
        if scales is not None:
            _scaled_rows(x, matrix, rows, expert, out, added, scales)
            continue
        start = None
        if adapter is not None:
            up = adapter.up[expert] if adapter.transposed else adapter.up[expert].t()
            start = adapter.low[rows] @ up
        if gains is not None:
            total = wide(x[rows]) @ wide(matrix)
            out[rows] = (total if start is None else total.add_(start)).mul_(gains[expert])
            continue
        if bias is not None:
            own = bias[expert] if row_weight is None else (row_weight[rows, None] * bias[expert]).to(out.dtype)
            start = own if start is None else start + own
        if start is None:
            torch.mm(x[rows], matrix, out=out[rows])
        else:
            torch.addmm(start, x[rows], matrix, out=out[rows])


def _scaled_rows(
    x: Tensor, matrix: Tensor, rows: slice, expert: int, out: Tensor, added: Added, scales: Scales
) -> None:
    """`grouped_product` of one expert's rows with FP8 operands, by their values."""
    bias, row_weight, adapter, gains = added
    if scales.blocks:
        total = out.new_empty((rows.stop - rows.start, matrix.shape[1]), dtype=torch.float32)
        of_x = Operand(x[rows], scales.rows[:, rows], "terms")
        block_product(of_x, Operand(matrix.t(), scales.columns[expert], "squares"), total)
    else:
        total = (x[rows].float() @ matrix.float()) * scales.rows[rows, None] * scales.columns[expert]
    if adapter is not None:
        up = adapter.up[expert] if adapter.transposed else adapter.up[expert].t()
        total += adapter.low[rows].float() @ up.float()
    if bias is not None:
        total += bias[expert].float() * (1.0 if row_weight is None else row_weight[rows, None])
    out[rows] = total if gains is None else total.mul_(gains[expert])


def grouped_weight_gradient(grad_y: Tensor, x: Tensor, bounds: Tensor, acc: Tensor, accumulate: bool) -> None:
    """acc [E, F, D] (+)= grad_y [R, F][rows of e].T @ x [R, D][rows of e], summed in the accumulator's precision."""
    if use_product_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import grouped  # noqa: PLC0415

        return grouped.grouped_weight_gradient(grad_y, x, bounds, acc, accumulate)
    if not accumulate:
        acc.zero_()
    for expert, rows in _slices(bounds):
        acc[expert] += grad_y[rows].t().to(acc.dtype) @ x[rows].to(acc.dtype)


def bias_gradient(grad_y: Tensor, bounds: Tensor, row_weight: Tensor | None, acc: Tensor, accumulate: bool) -> None:
    """acc [E, F] (+)= the sum over the rows of e of (row_weight [R] *) grad_y [R, F], in acc's precision."""
    if use_kernel(grad_y) and grad_y.dtype != torch.float64:
        from flexengine.kernels import expert_biases  # noqa: PLC0415

        return expert_biases.bias_gradient(grad_y, bounds, row_weight, acc, accumulate)
    if not accumulate:
        acc.zero_()
    for expert, rows in _slices(bounds):
        weights = acc.new_ones(rows.stop - rows.start) if row_weight is None else row_weight[rows].to(acc.dtype)
        acc[expert] += weights @ grad_y[rows].to(acc.dtype)


def row_weight_gradient(grad_y: Tensor, bias: Tensor, bounds: Tensor, out: Tensor, accumulate: bool) -> None:
    """out [R] (+)= grad_y [R, F] . bias [E, F][e] for the rows of every expert."""
    if use_kernel(grad_y) and grad_y.dtype != torch.float64:
        from flexengine.kernels import expert_biases  # noqa: PLC0415

        return expert_biases.row_weight_gradient(grad_y, bias, bounds, out, accumulate)
    if not accumulate:
        out[rows_within(bounds)] = 0.0
    for expert, rows in _slices(bounds):
        out[rows] += wide(grad_y[rows]) @ wide(bias[expert])
