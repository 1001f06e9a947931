"""What the blocks of many candidates take together: sums and maxima over blocks of what their choices take."""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np

from flexengine.native.rounds import reduce_blocks
from flexengine.planner.size_tables import NUM_RESIDENCIES, STREAMS_WEIGHTS, SizeTables


class BlockTotals(NamedTuple):
    """Of candidates [P]; bytes but for the parts of blocks that need weight and gradient slots.

    shared_gpu, shared_host: a round's kept outputs in slots that segments share, less what `kept` and `host` count of
    them. tiled, by_cpu: whether the update of a block passes through tiles, and whether the CPU does one.
    """

    kept: np.ndarray
    resident: np.ndarray
    host: np.ndarray
    weight_parts: np.ndarray
    grad_parts: np.ndarray
    weight_slot: np.ndarray
    grad_slot: np.ndarray
    staged: np.ndarray
    scratch: np.ndarray
    tiled: np.ndarray
    by_cpu: np.ndarray
    shared_gpu: np.ndarray
    shared_host: np.ndarray

    def repeated(self, times: int) -> BlockTotals:
        """Every candidate's so many times in a row."""
        return BlockTotals(*(np.repeat(column, times) for column in self))


class BlockSums:
    """Tables of one size by kind of block and choice, to be added up over blocks."""

    NUM_SUMS, NUM_MAXIMA = 7, 6

    def __init__(self, tables: SizeTables) -> None:
        self.tables, self.buffers = tables, tables.buffers
        places = self.buffers.again.places
        pairs = np.column_stack((self.buffers.kind_of, places))
        (self.kinds, self.places), numbers = _distinct(pairs)
        self.numbers = np.ascontiguousarray(numbers, dtype=np.int64)
        self.num_places = int(places.max(initial=-1)) + 1

    def of(self, choices: np.ndarray) -> BlockTotals:
        """The totals of choices [P, L]."""
        sums, count = self.NUM_SUMS, self.num_places
        found = reduce_blocks(self._columns, sums, self.numbers, choices)
        kept, resident, host, weight_parts, grad_parts, *counted = found[:sums]
        weight_slot, grad_slot, staged, scratch, tiled, by_cpu = found[sums : sums + self.NUM_MAXIMA]
        of_places = found[sums + self.NUM_MAXIMA :].reshape(2, count, len(choices)).sum(axis=1)
        chunks = self.tables.chunks_per_round
        turns = self.buffers.again.chunks(chunks) if count else 0
        shared = [turns * largest - chunks * own * bool(count) for largest, own in zip(of_places, counted, strict=True)]
        return BlockTotals(
            kept, resident, host, weight_parts, grad_parts, weight_slot, grad_slot, staged, scratch, tiled > 0,
            by_cpu > 0, *shared,
        )  # fmt: skip

    @cached_property
    def _columns(self) -> np.ndarray:
        """What blocks take [F, kinds, K]: sums, maxima, and maxima of the blocks of every place, GPU and host."""
        tables, option, residency = self.tables, self.tables.choice_option, self.tables.choice_residency
        streams, stages = STREAMS_WEIGHTS[residency], tables.stages_grads.by_kind[:, residency]
        parts, sizes = self.buffers.parts_of_kinds[:, None], self.buffers.slot_bytes[:, :, None]
        counted = [tables.of_blocks(lambda kind, side=side: kind.again_share[side]).by_kind for side in (0, 1)]
        columns = [
            tables.option_gpu.by_kind[:, option], tables.residency_gpu.by_kind[:, residency],
            tables.choice_host.by_kind, parts * streams, parts * stages, *(own[:, option] for own in counted),
            sizes[0] * streams, sizes[1] * stages, tables.option_staged.by_kind[:, option],
            tables.option_scratch.by_kind[:, option], tables.needs_tiles.by_kind[:, residency],
            tables.by_cpu.by_kind[:, residency],
        ]  # fmt: skip
        by_place = [
            again.by_kind[:, option][self.kinds] * (self.places == place)[:, None]
            for again in tables.again_bytes
            for place in range(self.num_places)
        ]
        return np.stack([*(column[self.kinds] for column in columns), *by_place]).astype(np.int64)

    def streamed_parts(self, choices: np.ndarray) -> tuple[int, int]:
        """Parts of blocks that need weight slots, and gradient slots, of one candidate [L]."""
        residencies, parts = choices % NUM_RESIDENCIES, self.buffers.parts_of_kinds[self.buffers.kind_of]
        return int(parts @ STREAMS_WEIGHTS[residencies]), int(parts @ self.tables.stages_grads.at(residencies))


def _distinct(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of pairs [L, 2] as columns, and which of them every row is."""
    rows, numbers = np.unique(pairs, axis=0, return_inverse=True)
    return rows.T, numbers.ravel()
