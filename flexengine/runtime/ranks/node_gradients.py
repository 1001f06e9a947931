"""Adds the gradients of several nodes before an update: each node has relayed its own rounds' gradients by itself.

This is a call between a step's last round and its update, not a command of either program: only the caller's `step`
tells which round was the last. The wait for each gradient is by the semaphores that rounds raise, so that gradients
which backward finishes early could be sent while it goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from flexengine.native.threads import host_threads
from flexengine.parallel.control import Control
from flexengine.parallel.nodes import NodeLink
from flexengine.parallel.ranks import Ranks
from flexengine.runtime.arena import DTYPES, Arenas, wide_dtype
from flexengine.runtime.weights.weight_store import WeightStore
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.node_exchange import NodePiece, givers_of, node_pieces
from flexengine.schedule.shares import Share


class NodeGradients:
    """The stored gradients of one layout, in the order in which backward leaves them.

    link: to the other nodes. control: calls that all ranks make. await_gradient: waits until the node's last round has
    stored the gradient of a group.
    """

    def __init__(
        self, layout: Layout, arenas: Arenas, ranks: Ranks, link: NodeLink, control: Control,
        await_gradient: Callable[[int], None],
    ) -> None:  # fmt: skip
        self._layout, self._arenas, self._ranks = layout, arenas, ranks
        self._link, self._control, self._await_gradient = link, control, await_gradient
        self._pieces = list(node_pieces(layout))

    def add(self, num_rounds: int) -> Tensor:
        """Add the stored gradients of all nodes, in place; returns the sums of squares by run, float64 on the CPU.

        num_rounds: of the step. All ranks make this call together; when it returns, the node's memory holds the sums.
        """
        givers = givers_of(num_rounds, self._link.nodes)
        own = Share(self._ranks.local_rank, self._ranks.local_size).every(self._pieces)
        with _threads(host_threads()):
            squares = self._link.add(map(self._await, own), givers, wide_dtype(self._layout))
        return self._by_run(self._control.gather(squares))

    def _await(self, piece: NodePiece) -> Tensor:
        """A piece of the stored gradient, when the node's last round has stored it."""
        self._await_gradient(piece.group)
        layout = self._layout
        slot, dtype = layout.slots[layout.plane_slot("grad", piece.group)], DTYPES[layout.plan.request.numerics.grad]
        return self._arenas.view(slot, piece.first * dtype.itemsize, (piece.numel,), dtype)

    def _by_run(self, told: list[list[float]]) -> Tensor:
        """Add squares that all ranks have told: piece after piece, and of a piece node after node."""
        ranks, layout = self._ranks, self._layout
        squares = [0.0] * layout.first_run(len(layout.groups))
        for number, piece in enumerate(self._pieces):
            turn, local_rank = divmod(number, ranks.local_size)
            for node in range(ranks.nodes):
                squares[piece.run] += told[node * ranks.local_size + local_rank][turn]
        return torch.tensor(squares, dtype=torch.float64)


def gradients_of_nodes(weights: WeightStore, ranks: Ranks, control: Control, num_rounds: int) -> dict[str, Tensor]:
    """Add the stored gradients of all nodes by Hugging Face name, float32 (float64), leaving them as they are.

    num_rounds: of the step. All ranks make this call together. Whole gradients of all nodes pass to each rank.
    """
    stored = DTYPES[weights.layout.plan.request.numerics.grad]
    givers = [node * ranks.local_size for node in givers_of(num_rounds, ranks.nodes)]
    found = {}
    for name, run in weights.runs.items():
        if run.frozen:
            continue
        own = weights.read_gradient(name, 1.0)
        told = control.gather(own.numpy() if ranks.rank in givers else None)
        total = torch.from_numpy(told[0]).clone()
        for giver in givers[1:]:
            total += torch.from_numpy(told[giver])
        found[name] = total.to(stored).to(total.dtype)
    return found


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Have torch use so many threads; what is computed here does not depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
