"""Blocks of one kind as arrays: what keep options and residencies take and cost one of them, and tables by kind.

The search says of every block which option and residency it takes, by number. What a number means depends on the
block's kind: the same numbers are, for every kind, save sets at about the same price of a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import Op
from flexengine.plan import Request


class BlockKind(NamedTuple):
    """Blocks with the same ops, which frozen and trained ones have not, at like places of segments: one of them, and
    its parameter group.

    again: their input is made again in backward. runs_again: they run again for the next one's input. by_chunk: what
    they keep when they run again is of one chunk.
    """

    layer: LayerSpec
    group: int
    again: bool = False
    runs_again: bool = False
    by_chunk: bool = False


def block_kinds(model: ModelSpec, request: Request | None = None) -> tuple[tuple[BlockKind, ...], np.ndarray]:
    """The kinds of a model's blocks in order of their first, and the kind [L] of every block, in the
    segments of a request."""
    blocks, kinds, found = model.blocks, dict[tuple[tuple[Op, ...], bool, bool], BlockKind](), []
    first = next((i for i, layer in enumerate(blocks) if layer.keeps), len(blocks))
    length = 1 if request is None else request.segment_blocks or 1
    most = len(blocks) if request is None or request.segments is None else request.segments
    by_chunk = request is not None and request.segments_by_chunk
    again = [i > first and (i - first) % length > 0 and (i - first) // length < most for i in range(len(blocks))]
    for layer, *places in zip(blocks, again, [*again[1:], False], strict=True):
        found.append((layer.ops, *places))
        kinds.setdefault(found[-1], BlockKind(layer, layer.groups[0], *places, by_chunk=by_chunk))
    number = {key: i for i, key in enumerate(kinds)}
    return tuple(kinds.values()), np.array([number[key] for key in found])


@dataclass(frozen=True, eq=False)
class PerKind:
    """Numbers [C, N, ...] of N members (options, levels or rows) by kind, and the kind [L] of every block."""

    by_kind: np.ndarray
    kind_of: np.ndarray

    @cached_property
    def counts(self) -> np.ndarray:
        """Blocks [C] of every kind."""
        return np.bincount(self.kind_of, minlength=len(self.by_kind))

    @cached_property
    def total(self) -> np.ndarray:
        """The sum [N, ...] over all blocks, when all take the same member."""
        return np.tensordot(self.counts, self.by_kind, axes=1)

    @cached_property
    def largest(self) -> np.ndarray:
        """The largest [N, ...] of all kinds."""
        return self.by_kind.max(axis=0)

    def at(self, members: np.ndarray) -> np.ndarray:
        """What the blocks take [..., L] of the members [..., L] that they have."""
        if len(self.by_kind) == 1:
            return self.by_kind[0].take(members, axis=0)
        return self.by_kind[self.kind_of, members]

    def each(self) -> np.ndarray:
        """By block: [L, N, ...]."""
        return self.by_kind[self.kind_of]
