"""Reads masters and states as they are stored, and writes new values back, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.optim.blockwise import BLOCK
from flexengine.optim.rounding import join_fp32, split_fp32, stochastic_round_bf16
from flexengine.optim.rule import Update

# Streams of random bits of one update: tensors rounded in the same step must not share their bits.
WEIGHT_STREAM, MOMENTUM_STREAM, SECOND_STREAM = 0, 1, 2


def math_dtype(update: Update) -> torch.dtype:
    """The dtype of the arithmetic: float64 for float64 weights, else float32."""
    return torch.float64 if update.planes["weights"].dtype == torch.float64 else torch.float32


def read_master(update: Update) -> Tensor:
    """The master of every weight."""
    weight, remainder = update.planes["weights"], update.planes.get("remainder")
    return weight.to(math_dtype(update)) if remainder is None else join_fp32(weight, remainder)


def scaled_grad(update: Update) -> Tensor:
    """The gradient times its factor."""
    dtype = math_dtype(update)
    return update.planes["grad"].to(dtype) * update.grad_scale.to(dtype)


def _applies(update: Update) -> Tensor:
    """Whether the gradient's factor is finite in the dtype of the arithmetic."""
    return torch.isfinite(update.grad_scale.to(math_dtype(update)))


def write_master(update: Update, value: Tensor) -> None:
    """Store new masters; where the gradient's factor is not finite the old ones stay."""
    remainder = update.planes.get("remainder")
    if remainder is None:
        write_state(update, "weights", value, WEIGHT_STREAM)
    else:
        split_fp32(torch.where(_applies(update), value, read_master(update)), update.planes["weights"], remainder)


def write_state(update: Update, name: str, value: Tensor, stream: int) -> None:
    """Store new values of a plane, in bf16 rounded at random; where the factor is not finite the old ones stay."""
    target = update.planes[name]
    if target.dtype == torch.bfloat16:
        value = stochastic_round_bf16(value, update.seed, update.step, update.element_offset, stream)
    target.copy_(torch.where(_applies(update), value, target))


def pieces(update: Update, size: int) -> list[Update]:
    """Cut an update into updates of at most `size` elements, a multiple of all blocks, with the same bits."""
    count = len(update.planes["grad"])
    return [part_of(update, start, min(size, count - start)) for start in range(0, count, size)]


def part_of(update: Update, start: int, count: int) -> Update:
    """The update of `count` elements from `start` on, which is a multiple of all blocks."""
    numel = len(update.planes["grad"])
    planes = {}
    for name, plane in update.planes.items():
        block = 1 if len(plane) == numel else BLOCK  # elements that share an entry
        planes[name] = plane[start // block : -(-(start + count) // block)]
    return update._replace(planes=planes, element_offset=update.element_offset + start)
