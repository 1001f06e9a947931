"""What calls of a tower cost. They are traced without computing them, each once in a process."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from flexengine.models.towers.tower import TransformersTower
from flexengine.ops.base import Work
from flexengine.ops.given_rows import Columns, TowerCost
from flexengine.ops.opaque_cost import traced

TYPICAL_ROWS = 1024
"""Rows of the image that the work of a row is told by: as many as a photograph of 1024 by 1024 pixels has."""


class TracedCall(NamedTuple):
    """A call that was traced. shape [depth, n, D]: of its rows. column_bytes: of what it reads, as processors give it.
    peak_bytes: most that was alive at once beside weights and columns."""

    shape: tuple[int, ...]
    column_bytes: int
    work: Work
    peak_bytes: int


_TRACED: dict[tuple[object, ...], TracedCall] = {}
"""By what decides them: a job may be described again, with other options, and a trace takes tenths of a second."""


def traced_forward(tower: TransformersTower, rows: int) -> TracedCall:
    """The forward of a call that gives at least so many rows."""

    def trace() -> TracedCall:
        columns, found = tower.example(rows), list[torch.Tensor]()
        weights, call = _empty(tower, columns)
        work, peak_bytes = traced(lambda: found.append(tower(weights, call)))
        return TracedCall(tuple(found[0].shape), _num_bytes(columns), work, peak_bytes)

    return _once((tower.__qualname__, rows), trace)


def _traced_backward(tower: TransformersTower, rows: int, trained: tuple[str, ...]) -> TracedCall:
    """The backward of such a call, which runs it again."""
    forward = traced_forward(tower, rows)

    def trace() -> TracedCall:
        weights, call = _empty(tower, tower.example(rows))

        def run() -> None:  # gradients of rows count, as they come to the device for the call
            tower.backward(weights, trained, call, torch.zeros(forward.shape, dtype=tower.dtype), _drop)

        work, peak_bytes = traced(run)
        return forward._replace(work=work, peak_bytes=peak_bytes)

    return _once((tower.__qualname__, rows, trained), trace)


def cost_of(tower: TransformersTower, trained: Collection[str]) -> TowerCost:
    """What the largest call takes, and a row of one with a typical image, where these parameters are trained."""
    most, typical, names = tower.most, min(TYPICAL_ROWS, tower.most), tuple(trained)
    forward = traced_forward(tower, typical)
    gradients = _traced_backward(tower, typical, names).work if names else Work()
    largest = [traced_forward(tower, most), *([_traced_backward(tower, most, names)] if names else [])]
    # pixels as they come and in the compute dtype
    peak_bytes = max(call.peak_bytes for call in largest) + 2 * largest[0].column_bytes
    count = forward.shape[1]
    return TowerCost(peak_bytes, forward.work.times(1 / count), gradients.times(1 / count))


def _once(key: tuple[object, ...], trace: Callable[[], TracedCall]) -> TracedCall:
    if key not in _TRACED:
        _TRACED[key] = trace()
    return _TRACED[key]


def _empty(tower: TransformersTower, columns: Columns) -> tuple[dict[str, torch.Tensor], Columns]:
    """Weights that are zeros and take no memory, and columns in the dtype to compute in."""
    zero = torch.zeros((), dtype=tower.dtype)
    call = {name: c.to(tower.dtype) if c.is_floating_point() else c for name, c in columns.items()}
    return {name: zero.expand(shape) for name, shape in tower.shapes.items()}, call


def _num_bytes(columns: Columns) -> int:
    return sum(c.numel() * c.element_size() for c in columns.values())


def _drop(name: str, grad: torch.Tensor) -> None:
    """Take a gradient that nobody wants."""
