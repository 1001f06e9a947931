"""Which rows, sorted by expert, a call of an op in parts works on.

`bounds` [E + 1]: rows bounds[e] to bounds[e + 1] are those of expert e.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from flexengine.ops.base import OpEnv


class RunsInParts(Protocol):
    """An op that runs on the rows of all experts, or part by part."""

    bounds: str
    num_parts: int


def experts_of_rows(bounds: Tensor, count: int) -> Tensor:
    """The expert [count] of each row, where the first of them is row 0."""
    rows = torch.arange(count, device=bounds.device, dtype=bounds.dtype)
    return torch.searchsorted(bounds[1:], rows, right=True)


def rows_within(bounds: Tensor | None) -> slice:
    """Rows from the first bound to the last, for plain paths, which ask for them; all without bounds."""
    return slice(None) if bounds is None else slice(int(bounds[0]), int(bounds[-1]))


def experts_of_part(num_experts: int, part: int, parts: int) -> slice:
    """The experts of one part, of all."""
    count = num_experts // parts
    return slice(part * count, (part + 1) * count)


def part_of(bounds: Tensor, part: int, parts: int) -> Tensor:
    """The bounds [E / parts + 1] of one part's experts."""
    own = experts_of_part(len(bounds) - 1, part, parts)
    return bounds[own.start : own.stop + 1]


def own_bounds(op: RunsInParts, env: OpEnv) -> Tensor | None:
    """Bounds of the experts that a call works on; None where it works on all, as an op without parts does."""
    return None if op.num_parts == 1 else part_of(env.t[op.bounds], env.part, op.num_parts)
