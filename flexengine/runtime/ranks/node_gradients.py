"""Adds the gradients of several nodes before an update: each node has added up its own rounds' gradients by itself.

A thread does so while the last round goes on backward: it waits for each gradient by the semaphores that rounds raise.
Where the caller makes two calls of a step, nobody knows which round is the last before the second one, the update.
Where nodes divide optimizer states, the thread also gives the others what this node has updated, once it is updated.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from flexengine.native.threads import host_threads
from flexengine.parallel.control import Control
from flexengine.parallel.nodes import NodeLink, Piece
from flexengine.parallel.ranks import Ranks
from flexengine.runtime.arena import DTYPES, Arenas, wide_dtype
from flexengine.runtime.execution.executor import CommandHooks
from flexengine.runtime.ranks.kept_errors import KeptErrors
from flexengine.runtime.ranks.sent_gradients import sent_gradients
from flexengine.runtime.weights.weight_store import WeightStore
from flexengine.schedule.layout import Layout
from flexengine.schedule.node_states import GroupPiece
from flexengine.schedule.ranks.node_exchange import (
    divided_pieces,
    givers_of,
    lower_exchange,
    lower_gather,
    node_pieces,
    own_pieces,
    sent_as,
)
from flexengine.schedule.shares import Share
from flexengine.schedule.slots import PlaneKind

_INTERRUPTIBLE_S = 0.05  # how long Python waits for a thread before it looks for Ctrl-C


class NodeGradients:
    """The stored gradients of one layout, in the order in which backward leaves them.

    link: to the other nodes, by calls that all ranks make. failed: ends the run on all ranks. errors: what rounding
    loses, where that is kept.
    """

    def __init__(
        self, layout: Layout, arenas: Arenas, ranks: Ranks, link: NodeLink,
        failed: Callable[[BaseException], None], errors: KeptErrors | None = None,
    ) -> None:  # fmt: skip
        self._layout, self._arenas, self._ranks, self._failed = layout, arenas, ranks, failed
        self._link, self._control, self._errors = link, link.control, errors
        self._pieces = list(node_pieces(layout))
        self._share = share = Share(ranks.local_rank, ranks.local_size, node=ranks.node)
        self._own, self._gather = lower_exchange(layout, share), lower_gather(layout, share)
        self._divided = divided_pieces(layout, share)
        self._kept = [piece.group in self._divided for piece in share.every(self._pieces)]
        self._thread: threading.Thread | None = None
        self._adds = False  # whether the last thread that has begun adds gradients
        self._squares: list[float] = []  # of the pieces that this rank has added
        self._failure: BaseException | None = None

    def begin(self, num_rounds: int, loss_weight: float, hooks: CommandHooks) -> None:
        """Start to add the stored gradients of all nodes, in place, on a thread, unless that has begun.

        num_rounds: of the step; loss_weight: by which its update divides them. hooks: as of the node's last round. All
        ranks of all nodes make this call in a step, each when it comes to it.
        """
        if not self._adds:
            self._squares, self._failure, self._adds = [], None, True
            factor = 1.0 if self._errors is None else self._errors.factor(loss_weight)
            self._start(partial(self._add, givers_of(num_rounds, self._link.nodes), factor, hooks))

    def give_weights(self, hooks: CommandHooks) -> None:
        """Start to give all nodes the weights that each has updated, where they divide states.

        hooks: as of the update, which is issued. All ranks of all nodes make this call.
        """
        if self._divided:
            self._start(partial(self._give, hooks))

    def _start(self, work: Callable[[], None]) -> None:
        """Have a thread do some work when the one before has ended."""
        earlier = self._thread

        def run() -> None:
            if earlier is not None:
                earlier.join()
            with _threads(max(1, host_threads() // 2)):  # the others issue the round at work
                work()

        # no daemon: at the end of the process Python waits for it, before the arenas go
        self._thread = threading.Thread(target=run, name="flexengine-nodes")
        self._thread.start()

    @property
    def divides_masters(self) -> bool:
        """Whether nodes divide lower halves of masters."""
        return any("remainder" in self._layout.groups[group].plane_bytes for group in self._divided)

    def show_masters(self) -> None:
        """Have every node hold the lower halves of all masters, in the place of gradients, until it stores some.

        All ranks of all nodes make this call, when nothing runs and there are no gradients.
        """
        self.join()
        for own, whole in self._halves():
            whole.copy_(own)
        self._control.barrier()
        for group, pieces in self._divided.items():
            if "remainder" in self._layout.groups[group].plane_bytes:
                self._link.give(self._views("grad", group, pieces, torch.int16))
        self._control.barrier()

    def keep_masters(self) -> None:
        """Take this rank's lower halves of masters from there, where they have been loaded. Order: gradients come when
        all ranks have done so."""
        for own, whole in self._halves():
            own.copy_(whole)

    def end(self) -> Tensor:
        """Wait until the node's memory holds the sums; returns the sums of squares by run, float64 on the CPU.

        All ranks make this call together. Raises what went wrong on the thread.
        """
        self.join()
        self._adds = False
        if self._failure is not None:
            raise self._failure
        return self._by_run(self._control.gather(self._squares))

    def join(self) -> None:
        """Wait until the thread has ended, if there is one. After an abort of the ranks it ends by itself."""
        while self._thread is not None:
            self._thread.join(_INTERRUPTIBLE_S)
            if not self._thread.is_alive():
                self._thread = None

    def _add(self, givers: range, error_factor: float, hooks: CommandHooks) -> None:
        try:
            sent = sent_gradients(sent_as(self._layout), error_factor)
            self._squares = self._link.add(self._stored(hooks), givers, wide_dtype(self._layout), sent, self._kept)
        except BaseException as failure:
            self._failure = failure

    def _give(self, hooks: CommandHooks) -> None:
        """Give weights, group by group as the node's ranks have updated them; streams wait for what this signals."""
        dtype = DTYPES[self._layout.plan.request.numerics.compute]
        try:
            for command in self._gather.commands:
                hooks.before(command)
                group = command.args.group
                self._link.give(self._views("weights", group, self._divided[group], dtype))
                hooks.after(command)
        except BaseException as failure:
            self._failed(failure)

    def _views(
        self, kind: PlaneKind, group: int, pieces: Sequence[GroupPiece], dtype: torch.dtype
    ) -> Iterator[tuple[Tensor, list[int]]]:
        """Pieces of a plane with an entry for each element of a group, and where in each the nodes' shares begin."""
        slot, width = self._layout.slots[self._layout.plane_slot(kind, group)], dtype.itemsize
        for piece in pieces:
            cuts = [cut - piece.first for cut in piece.cuts(self._link.nodes)]
            yield self._arenas.view(slot, piece.first * width, (piece.numel,), dtype), cuts

    def _halves(self) -> Iterator[tuple[Tensor, Tensor]]:
        """This rank's lower halves of masters, and their places where all lie in the place of the gradient."""
        layout, arenas = self._layout, self._arenas
        for group, states in layout.node_states.items():
            segments = layout.groups[group].segments
            for segment, plane in ((s, p) for s in segments for p in s.planes if p.kind == "remainder"):
                slots = [layout.slots[layout.plane_slot(kind, group)] for kind in ("remainder", "grad")]
                for span in states.spans(segment, self._share):
                    places = (
                        states.offset(segment, plane, span.place),
                        plane.num_bytes(segment.first_element + span.start),
                    )
                    own, whole = (
                        arenas.view(slot, place, (span.count,), torch.int16)
                        for slot, place in zip(slots, places, strict=True)
                    )
                    yield own, whole

    def _stored(self, hooks: CommandHooks) -> Iterator[Piece]:
        """This rank's pieces in the node's memory, each when the node's last round has stored it."""
        dtype, ranks = DTYPES[self._layout.plan.request.numerics.grad], self._ranks
        own = iter(own_pieces(self._layout, Share(ranks.local_rank, ranks.local_size)))
        for command in self._own.commands:
            hooks.before(command)
            places = command.args.pieces
            if not places:
                hooks.after(command)
            for number, (offset, num_bytes), piece in zip(range(1, 1 + len(places)), places, own, strict=False):
                slot = self._layout.slots[command.args.slot]
                values = self._arenas.view(slot, offset, (num_bytes // dtype.itemsize,), dtype)
                ended = partial(hooks.after, command) if number == len(places) else None
                yield Piece(values, None if self._errors is None else self._errors.of(piece), ended)

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

    Where an exchange would add what earlier steps have lost, they are added as they are stored. num_rounds: of the
    step. All ranks make this call together. Whole gradients of all nodes pass to each rank.
    """
    crosses = sent_as(weights.layout)
    sent = DTYPES[crosses.stored if crosses.keeps_errors else crosses.name]
    givers = [node * ranks.local_size for node in givers_of(num_rounds, ranks.nodes)]
    found = {}
    for name, run in weights.runs.items():
        if run.frozen:
            continue
        stored = weights.read_gradient(name, 1.0)
        own = stored.to(sent).to(stored.dtype)
        told = control.gather(own.numpy() if ranks.rank in givers else None)
        total = torch.from_numpy(told[0]).clone()
        for giver in givers[1:]:
            total += torch.from_numpy(told[giver])
        found[name] = total.to(sent).to(total.dtype)
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
