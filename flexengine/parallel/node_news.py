"""What nodes hear of each other while ranks train: that they go on, that they have ended in order, or what was lost.

It goes through the store that the ranks met at, over connections of their own, so that it needs no other port.
"""

from __future__ import annotations

from flexengine.parallel.control import Control

SILENT_LOOKS = 26  # of a node, counted by those who look: a job that is stopped and continued as a whole goes on
_LOST = "lost"
_CLOSED = b"closed"


class NodeNews:
    """This node's news and those of the others. One thread of the node's first rank looks; any rank may tell."""

    def __init__(self, control: Control) -> None:
        """Join the others; all ranks make this call together."""
        self._node, self._nodes = control.ranks.node, control.ranks.nodes
        self._store = control.store_for_another_thread()
        self._looks = 0
        self._heard = [b"0"] * self._nodes
        self._silent = [0] * self._nodes
        if control.ranks.local_rank == 0:
            self._store.set(_key(self._node), "0")
        if control.ranks.rank == 0:
            self._store.set(_LOST, "")
        control.barrier()

    def look(self) -> str | None:
        """Say that this node goes on; returns what was lost elsewhere, if anything."""
        if self._heard[0] == _CLOSED:  # the store may be gone
            return None
        self._looks += 1
        try:
            self._store.set(_key(self._node), str(self._looks))
            lost, *heard = self._store.multi_get([_LOST, *map(_key, range(self._nodes))])
        except RuntimeError as error:
            return f"node 0, where the ranks met, cannot be reached any more: {error}"
        return lost.decode() or self._hear(heard)

    def _hear(self, heard: list[bytes]) -> str | None:
        for node, word in enumerate(heard):
            alive = word != self._heard[node] or word == _CLOSED
            self._heard[node], self._silent[node] = word, 0 if alive else self._silent[node] + 1
        silent = [str(node) for node in range(self._nodes) if self._silent[node] >= SILENT_LOOKS]
        if not silent:
            return None
        return f"nothing is heard any more of node {', '.join(silent)}: it, or its first rank, has ended or is stopped"

    def tell(self, message: str) -> None:
        """Tell all nodes what was lost; the first message counts."""
        try:
            self._store.compare_set(_LOST, "", message)
        except RuntimeError:  # the others notice by themselves that the store is gone
            return

    def close(self) -> None:
        """Say that this node makes no more calls. Only its first rank may say so."""
        try:
            self._store.set(_key(self._node), _CLOSED.decode())
        except RuntimeError:  # the first node has ended, which it does last or in error
            return


def _key(node: int) -> str:
    return f"node{node}"
