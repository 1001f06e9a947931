"""Ends a layer's backward: rounds the accumulator into the stored gradient, and sums the squares of what it stored."""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import use_kernel

ROUNDED_ELEMENTS = 1 << 20
"""Elements that the plain path works on at once, which bounds its temporaries to 24 MiB."""


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
