"""Planes that a rank keeps on its GPU, whole or a shard of them, and their places in the node's memory.

Training uses the GPU's. Whatever reads or writes planes otherwise (evaluation by any rank, exports, checkpoints, a
change of plan) uses the node's, so one is copied to the other when the wrong one is newer.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from flexengine.runtime.arena import Arenas
from flexengine.runtime.execution.executor import Executor
from flexengine.schedule.layout import Layout, OwnPlane
from flexengine.schedule.ranks.stage_layout import StageLayout
from flexengine.schedule.slots import Slot


class StagePlanes:
    """The planes of one layout that lie on a rank's GPU; none but in stages, and of shards.

    barrier: returns when all ranks of the node have come to it.
    """

    def __init__(
        self, layout: Layout, arenas: Arenas, executor: Executor, barrier: Callable[[], None], rank: int
    ) -> None:
        self._arenas, self._executor, self._barrier = arenas, executor, barrier
        self._on_gpus = isinstance(layout, StageLayout) or layout.plan.shards
        self._planes = layout.own_planes(rank)
        self._stale = set[str]()  # kinds of which the node's memory has an older copy
        self._kinds = {"grad", *(kind for group in layout.groups for kind in group.plane_bytes)}

    def changed(self, *, gradients: bool) -> None:
        """Note that the GPU has new gradients, or new weights and states."""
        if self._on_gpus:
            self._stale |= {"grad"} if gradients else self._kinds - {"grad"}

    def write_back(self, *kinds: str) -> None:
        """Have the node's memory hold what all ranks keep on their GPUs, of these kinds or of all but gradients.

        All ranks make this call. Waits until nothing runs any more on any of them, if a copy is older.
        """
        wanted = self._stale & ({*kinds} or self._kinds - {"grad"})
        if not wanted:
            return
        self._executor.synchronize()
        for plane in (plane for plane in self._planes if plane.kind in wanted and not plane.frozen):
            self._in_node(plane).copy_(self._on_gpu(plane))
        self._executor.synchronize_device()
        self._barrier()
        self._stale -= wanted

    def fetch(self) -> None:
        """Take over what the node's memory holds. Order: it is whole on all ranks, and nothing runs."""
        for plane in (plane for plane in self._planes if plane.kind != "grad"):
            self._on_gpu(plane).copy_(self._in_node(plane))
        self._executor.synchronize_device()
        self._stale.clear()

    def _on_gpu(self, plane: OwnPlane) -> Tensor:
        return self._bytes(plane.on_gpu, plane.start, plane.num_bytes)

    def _in_node(self, plane: OwnPlane) -> Tensor:
        return self._bytes(plane.in_node, plane.node_start, plane.num_bytes)

    def _bytes(self, slot: Slot, start: int, num_bytes: int) -> Tensor:
        return self._arenas.bytes_view(slot.memory, slot.offset + start, num_bytes)
