"""Kinds of blocks, and what blocks of several kinds keep side by side.

The search says of every block which option and level it takes, by number. What an option means depends on the block's
kind: the same numbers are, for every kind, save sets at about the same price of a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import Op
from flexengine.planner.save_set_frontier import SaveSet
from flexengine.schedule.save_sets import savable_ops

MAX_SETS = 12
"""Save sets of blocks of several kinds that are considered together."""

SaveSets = tuple[tuple[tuple[str, ...], ...], ...]
"""Save sets by kind [C][S]; those of one number go together."""


class BlockKind(NamedTuple):
    """Blocks with the same ops, which frozen and trained ones have not: one of them, and its parameter group."""

    layer: LayerSpec
    group: int


def block_kinds(model: ModelSpec) -> tuple[tuple[BlockKind, ...], np.ndarray]:
    """The kinds of a model's blocks in order of their first, and the kind [L] of every block."""
    kinds: dict[tuple[Op, ...], BlockKind] = {}
    for layer in model.blocks:
        kinds.setdefault(layer.ops, BlockKind(layer, layer.groups[0]))
    number = {ops: i for i, ops in enumerate(kinds)}
    return tuple(kinds.values()), np.array([number[layer.ops] for layer in model.blocks])


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
    def mean(self) -> np.ndarray:
        """About what a block takes of a member [N, ...]: bytes are rounded up."""
        if len(self.by_kind) == 1:
            return self.by_kind[0]
        blocks = len(self.kind_of)
        return -(-self.total // blocks) if self.by_kind.dtype.kind == "i" else self.total / blocks

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


def side_by_side(
    kinds: Sequence[BlockKind], counts: np.ndarray, frontier_of: Callable[[LayerSpec], tuple[SaveSet, ...]]
) -> SaveSets:
    """Save sets of every kind that together no others beat in bytes and recompute seconds of all blocks.

    Kinds whose ops have the same names, such as those with and without a window, keep the same ones.
    """
    if len({savable_ops(kind.layer.ops) for kind in kinds}) == 1:
        return (tuple(s.ops for s in frontier_of(kinds[0].layer)),) * len(kinds)
    keeping = [number for number, kind in enumerate(kinds) if savable_ops(kind.layer.ops)]
    if len(keeping) < len(kinds):  # those without a backward go along with any
        found = side_by_side([kinds[i] for i in keeping], counts[keeping], frontier_of)
        beside = iter(found)
        return tuple(next(beside) if i in keeping else ((),) * len(found[0]) for i in range(len(kinds)))
    frontiers = [frontier_of(kind.layer) for kind in kinds]
    chosen = np.arange(len(frontiers[0]))[:, None]
    num_bytes, seconds = (counts[0] * column for column in _columns(frontiers[0]))
    for frontier, count in zip(frontiers[1:], counts[1:], strict=True):
        more_bytes, more_s = (count * column for column in _columns(frontier))
        num_bytes = (num_bytes[:, None] + more_bytes).ravel()
        seconds = (seconds[:, None] + more_s).ravel()
        pairs = np.indices((len(chosen), len(frontier))).reshape(2, -1)
        chosen = np.column_stack((chosen[pairs[0]], pairs[1]))
        best = _undominated(num_bytes, seconds)
        chosen, num_bytes, seconds = chosen[best], num_bytes[best], seconds[best]
    return tuple(
        tuple(frontier[i].ops for i in column) for frontier, column in zip(frontiers, chosen.T.tolist(), strict=True)
    )


def _columns(frontier: tuple[SaveSet, ...]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([s.num_bytes for s in frontier]), np.array([s.recompute_s for s in frontier])


def _undominated(num_bytes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Positions that no other beats, fewest bytes first; of many those evenly apart in bytes, and both ends."""
    order = np.lexsort((seconds, num_bytes))
    before = np.concatenate(([np.inf], np.minimum.accumulate(seconds[order])))[: len(order)]
    kept = order[seconds[order] < before - 1e-12]
    if len(kept) <= MAX_SETS:
        return kept
    wanted = np.linspace(num_bytes[kept[0]], num_bytes[kept[-1]], MAX_SETS)
    return kept[np.unique(np.searchsorted(num_bytes[kept], wanted))]


def ever_smaller_sets(kinds: Sequence[BlockKind]) -> SaveSets:
    """For every kind from nothing kept to all: the last ops first."""
    names = [savable_ops(kind.layer.ops) for kind in kinds]
    most = max(map(len, names))
    return tuple(tuple(own[max(0, len(own) - kept) :] for kept in range(most + 1)) for own in names)
