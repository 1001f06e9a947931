"""Ranks of a node move bytes through a piece of the node's memory, where GPUs have no way of their own or there are
none. Calls block; all ranks make the same ones in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexengine.parallel.control import Control
from flexengine.parallel.node_memory import NodeMemory
from flexengine.parallel.signals import Signals
from flexengine.parallel.watch import Watch

SECTION_BYTES = 1 << 18
"""What a rank passes to another at once: memory for all pairs of ranks is in use, and each section is awaited twice."""
_WRITTEN, _READ = 0, 1  # semaphores: so many sections were written, and read, by this rank


class HostCopies:
    """The places of a node's memory that each rank leaves bytes in for each other one."""

    def __init__(self, control: Control, watch: Watch | None = None) -> None:
        """Join the others of the node; all ranks make this call together. watch: ends waits for a rank that is lost."""
        size = control.ranks.local_size
        self._own, self._watch, self._sections = control.ranks.local_rank, watch, 0
        table_bytes = Signals.num_bytes(size, 2)
        self._memory = NodeMemory.open(control.ranks, control, table_bytes + size * size * SECTION_BYTES)
        self._signals = Signals.over(self._memory.tensor, size, 2, self._own)
        self._places = self._memory.tensor[table_bytes:].view(size, size, SECTION_BYTES)
        if watch is not None:
            watch.follow(self._signals)

    def exchange(self, received: Sequence[Tensor], sent: Sequence[Tensor], longest: int) -> None:
        """Give `sent[r]` to each rank r, and take what it gives this one into `received[r]`; uint8.

        longest: bytes of the longest that any rank gives another.
        """
        for start in range(0, longest, SECTION_BYTES):
            section = slice(start, start + SECTION_BYTES)
            self._sections += 1
            if self._sections > 1:
                self._signals.wait(_READ, None, self._sections - 1)
            for place, row in zip(self._places[self._own], sent, strict=True):
                part = row[section]
                place[: part.numel()].copy_(part)
            self._signals.signal(_WRITTEN, self._sections)
            self._signals.wait(_WRITTEN, None, self._sections)
            for place, row in zip(self._places[:, self._own], received, strict=True):
                part = row[section]
                part.copy_(place[: part.numel()])
            self._signals.signal(_READ, self._sections)

    def add(self, table: Tensor) -> None:
        """Replace a table by the sum of those of all ranks, in their order."""
        flat = table.view(-1).view(torch.uint8)
        tables = torch.empty(len(self._places), flat.numel(), dtype=torch.uint8)
        self.exchange([*tables], [flat] * len(tables), flat.numel())
        total, *others = tables.view(table.dtype).view(-1, *table.shape)
        for other in others:
            total += other
        table.copy_(total)

    def abort(self, message: str) -> None:
        """End the waits of all ranks, which raise RankLost(message); what is copied from now on is worth nothing."""
        self._signals.abort(message)

    def close(self) -> None:
        """Let go of the memory."""
        if self._watch is not None:
            self._watch.unfollow(self._signals)
        self._memory.close()
