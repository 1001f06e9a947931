"""Ends a layer's backward: rounds the accumulator into the stored gradient, and sums the squares of what it stored."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from flexengine.ops.base import use_kernel

logger = logging.getLogger(__name__)

ROUNDED_ELEMENTS = 1 << 20
"""Elements that the plain path works on at once, which bounds its temporaries to 24 MiB."""
MOST_ROUNDED = 64
"""Rounds of a step whose sum in 16 bits is within 1% of the exact one: each rounds it again. Random gradients are off
by 0.95% after 64 rounds, 1.7% after 256 and 6.5% after 1024; gradients of one sign lose more."""


def finish_gradient(
    accumulator: Tensor, stored: Tensor, has_previous: bool, partial_squares: Tensor, norm_square: Tensor
) -> None:
    """stored [n] = round(accumulator [n] (+ stored)); norm_square [] = sum of squares of the rounded values.

    The accumulator is float32 (float64), stored may be narrower. partial_squares is workspace; the order of the sum
    depends on n and the workspace's length alone, so the same gradient has the same norm wherever it lives.
    """
    if use_kernel(accumulator) and accumulator.dtype != torch.float64:
        from flexengine.kernels import grad_accumulate  # noqa: PLC0415 (Triton is imported when first used)

        grad_accumulate.grad_accumulate(accumulator, stored, has_previous, partial_squares)
        norm_square.copy_(partial_squares.double().sum())
        return
    norm_square.zero_()
    for acc, part in zip(accumulator.split(ROUNDED_ELEMENTS), stored.split(ROUNDED_ELEMENTS), strict=True):
        part.copy_(acc + part.to(acc.dtype) if has_previous else acc)
        norm_square += part.double().square().sum()


def warn_of_rounding(num_rounds: int, grad_dtype: str) -> None:
    """Tell how gradients of many rounds are summed exactly."""
    logger.warning(
        "the gradients of this step have been summed in %s over %d rounds, which may leave them off by more than 1%%;"
        " store them exactly by grad_dtype=float32 (--grad-dtype float32), or give fewer, larger batches",
        grad_dtype,
        num_rounds,
    )
