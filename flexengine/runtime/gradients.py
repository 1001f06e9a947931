"""Ends a layer's backward: rounds the accumulator into the stored gradient, and sums the squares of what it stored."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import use_kernel
from flexengine.schedule.fixed_slots import part_elements

logger = logging.getLogger(__name__)


class Squares(NamedTuple):
    """Where the sum of squares of a run goes, of which a gradient may be a share.

    partial [P]: workspace; total []: the sum. before, whole: elements of the run before the share, and all of it.
    """

    partial: Tensor
    total: Tensor
    before: int
    whole: int


def finish_gradient(
    accumulator: Tensor, stored: Tensor, has_previous: bool, squares: Squares, counts: bool = True
) -> None:
    """stored [n] = round(accumulator [n] (+ stored)); squares: of the rounded values.

    The accumulator is float32 (float64), stored may be narrower. The order of a sum of squares depends on the run's
    length and that of the workspace alone, so the same gradient has the same norm wherever it lives, and in whatever
    shares it comes: one after the other, each of whole parts (`part_elements`). counts: whether the squares are wanted.
    """
    share = part_elements(squares.whole)
    if use_kernel(accumulator) and accumulator.dtype != torch.float64:
        from flexengine.kernels import grad_accumulate  # noqa: PLC0415 (Triton is imported when first used)

        end = squares.before + accumulator.numel()
        last, parts = end == squares.whole, slice(squares.before // share, end // share)
        own = squares.partial[parts.start :] if last else squares.partial[parts]
        grad_accumulate.grad_accumulate(accumulator, stored, has_previous, own, share)
        if last and counts:
            torch.sum(squares.partial.double(), 0, out=squares.total)
        return
    if squares.before == 0 and counts:
        squares.total.zero_()
    for acc, part in zip(accumulator.split(share), stored.split(share), strict=True):
        part.copy_(acc + part.to(acc.dtype) if has_previous else acc)
        if counts:
            squares.total.add_(part.double().square().sum())


class RunSquares(NamedTuple):
    """Where partial sums of squares go that a piece of a run has, whole parts (`part_elements`).

    partial [P]: workspace of the kernel; table []: the entry of each part of the run, float64; before, whole: as of
    Squares.
    """

    partial: Tensor
    table: Tensor
    before: int
    whole: int


def fold_parts(
    arrived: Sequence[Tensor],
    own: tuple[int, Tensor] | None,
    stored: Tensor,
    has_previous: bool,
    squares: RunSquares,
) -> None:
    """stored [n] = round(part [n] (+ stored)), part after part: as `finish_gradient` does, called for each of them.

    arrived: one or two tensors [rounds, n], whose rows are such parts; each round's of the first come before that of
    the second. own: number and values [n] of a row of the first that lies elsewhere. The partial sums of squares are
    those that it has of the last one; `sum_parts` adds them up.
    """
    share = part_elements(squares.whole)
    entries = squares.table[squares.before // share :][: -(-stored.numel() // share)]
    if _by_kernel(stored, arrived[0]):
        from flexengine.kernels import grad_accumulate  # noqa: PLC0415 (Triton is imported when first used)

        partial, second = squares.partial[: len(entries)], arrived[1] if len(arrived) > 1 else None
        grad_accumulate.fold(arrived[0], second, stored, has_previous, partial, share, own)
        entries.copy_(partial)
        return
    first = [own[1] if own is not None and number == own[0] else row for number, row in enumerate(arrived[0])]
    for part in (part for parts in zip(first, *arrived[1:], strict=True) for part in parts):
        stored.copy_(part + stored.to(part.dtype) if has_previous else part)
        has_previous = True
    for entry, values in zip(entries, stored.split(share), strict=True):
        entry.copy_(values.double().square().sum())


def sum_parts(table: Tensor, totals: Tensor, num_elements: Sequence[int], wide: torch.dtype) -> None:
    """totals [R] = sums of the partial sums of squares in table [R, P], each in the order of `finish_gradient`.

    num_elements: of every run. wide: dtype of accumulators.
    """
    if use_kernel(table) and wide != torch.float64:
        for number, parts in enumerate(table):
            totals[number].copy_(parts.sum())
        return
    for number, (row, numel) in enumerate(zip(table.tolist(), num_elements, strict=True)):
        total = 0.0
        for part in row[: -(-numel // part_elements(numel))]:
            total += part
        totals[number] = total


def _by_kernel(stored: Tensor, accumulator: Tensor) -> bool:
    return use_kernel(stored) and accumulator.dtype != torch.float64


def warn_of_rounding(num_rounds: int, grad_dtype: str) -> None:
    """Tell how gradients of many rounds are summed exactly."""
    logger.warning(
        "the gradients of this step have been summed in %s over %d rounds, which may leave them off by more than 1%%;"
        " store them exactly by grad_dtype=float32 (--grad-dtype float32), or give fewer, larger batches",
        grad_dtype,
        num_rounds,
    )
