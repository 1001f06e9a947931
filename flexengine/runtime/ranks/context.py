"""What a rank knows of the others: whose turn a round is, semaphores that order ranks, calls that all of them make.

`RankContext` is that of one rank alone, which asks nobody; `SeveralRanks` train on one host copy per node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from flexengine.models.spec import ModelSpec
from flexengine.parallel.collectives import Collectives
from flexengine.parallel.control import Control
from flexengine.parallel.node_memory import NodeMemory
from flexengine.parallel.nodes import NodeLink
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.signals import RankLost, Signals
from flexengine.parallel.watch import Watch
from flexengine.plan import Request
from flexengine.runtime.arena import Arenas
from flexengine.runtime.batch_input import Sequences, read_call
from flexengine.runtime.execution.executor import CommandHooks
from flexengine.runtime.ranks.batches import Batches, read_on_ranks
from flexengine.runtime.ranks.kept_errors import KeptErrors, kept_errors
from flexengine.runtime.ranks.losses import added, added_of_ranks
from flexengine.runtime.ranks.node_gradients import NodeGradients, gradients_of_nodes
from flexengine.runtime.ranks.semaphore_hooks import semaphore_hooks
from flexengine.runtime.step_state import StepState
from flexengine.runtime.weights.weight_store import WeightStore
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.transports import Seat, Turn, transport_of
from flexengine.schedule.shares import ALONE, Share
from flexengine.schedule.slots import borders_of_slots

T = TypeVar("T")

ABORTED = "a rank failed, so that gradients or weights are not whole"


def nothing_newer() -> None:
    """The node's memory holds all that ranks share."""


class RankGroup(NamedTuple):
    """The ranks that train together, their calls to each other, and who notices when one is lost."""

    ranks: Ranks
    control: Control
    watch: Watch | None = None


class RankContext:
    """One rank alone. Several override what they do otherwise.

    rank: its number among those of all nodes. share: what it updates, loads and fills of its node's memory.
    collectives: with the other ranks of the node, where their GPUs reach each other. cuts: offsets in the node's memory
    that no copy of CUDA may cross. over_nodes: what nodes add and share. writes_files: this rank is the
    one that does. errors: kept of exchanges of nodes.
    """

    seat = Seat()
    errors: KeptErrors | None = None
    rank = 0
    share: Share = ALONE
    collectives: Collectives | None = None
    cuts: Sequence[int] = ()
    over_nodes: NodeGradients | None = None
    writes_files = True

    def __init__(self, layout: Layout) -> None:
        self._transport = transport_of(layout.plan)

    def join(self, arenas: Arenas, gpu_bytes: int) -> None:
        """Map what ranks share. gpu_bytes: of the GPU's arena. All ranks make this call together."""

    def use(self, layout: Layout, arenas: Arenas, write_back: Callable[[], None]) -> None:
        """Run a layout from here on. write_back: has the node's memory hold what ranks keep on their GPUs."""

    # -- a step ------------------------------------------------------------------------------------------------------

    def turns(self, first: int, num_rounds: int) -> Iterator[Turn]:
        """The turns of this rank's node in a batch, whose first round is the `first`-th of its step."""
        yield from self._transport.turns(self.seat, first, num_rounds)

    def evaluates(self, number: int) -> bool:
        """Whether this rank runs a round forward, counted from 0 within its batch."""
        return True

    @property
    def is_last(self) -> bool:
        """Whether this rank ran the last round of its node so far."""
        return True

    def hooks(self) -> CommandHooks | None:
        """For the run of a program that is issued now. The CPU's commands may call them when later ones are."""
        return None

    def count_update(self) -> None:
        """Count an update that has been issued."""

    def begin_nodes(self, num_rounds: int, loss_weight: float) -> None:
        """Start to add the stored gradients of nodes, in place, in a step whose update divides them by a weight. Order:
        this rank has come to its node's last turn of the step, or past it."""

    def add_nodes(self, num_rounds: int, loss_weight: float) -> Tensor | None:
        """End that, having started it if need be; returns the sums of squares by run, float64 on the CPU, or None for
        one node. All ranks make this call together."""
        return None

    def end_nodes(self, alone: bool = False) -> None:
        """Wait until the node's memory holds the weights that other nodes have updated. All ranks make this call, or
        with `alone` this one, for what it moves itself."""

    def gradients(self, weights: WeightStore, num_rounds: int, scale: float) -> dict[str, Tensor]:
        """The gradients that a step of so many rounds has stored, times `scale`, by Hugging Face name, on the CPU.

        Order: nothing runs any more. All ranks make this call together.
        """
        with self.while_nobody_writes():
            return weights.read_gradients(scale)

    def sum_losses(
        self, own: list[Tensor], first: int, num_rounds: int, device: torch.device, trained: bool = False
    ) -> Tensor:
        """Add the losses [chunks] of all rounds of a batch, in their order, to one float64 [] on the device.

        own: those of this rank's rounds. first: the number of the first round within its step. The order decides the
        bits of the sum. trained: they are of a pass with backward, where several ranks may tell of a round.
        """
        return added(own, device)

    def join_rows(self, rows: list[Tensor]) -> None:
        """Give every rank the numbers of all, in place: a number is 0 where another rank has it."""

    def read(
        self, batches: Batches, call: tuple[Request, ModelSpec, object, Mapping[str, object]], own_loss: bool
    ) -> Sequences:
        """Read the batch of a call, as `read_on_ranks` does."""
        return read_call(*call)

    # -- calls that all ranks make -----------------------------------------------------------------------------------

    def agree(self, value: object, what: str) -> None:
        """Raise ValueError on all ranks unless all give the same value."""

    def barrier(self) -> None:
        """Wait until all ranks have come to this call."""

    def gather(self, value: T) -> list[T]:
        """What each rank gives, in their order."""
        return [value]

    def together(self) -> AbstractContextManager[None]:
        """What one rank raises in the block, all raise; no rank leaves it before all have reached its end."""
        return nullcontext()

    def while_nobody_writes(self) -> AbstractContextManager[None]:
        """Let a rank read what others have written, before any goes on. Order: nothing of this rank runs any more.

        What one rank raises in the block, all raise.
        """
        return nullcontext()

    # -- another plan, and the end -----------------------------------------------------------------------------------

    def check_takes(self, layout: Layout) -> None:
        """Raise ValueError where the ranks cannot go on with another layout."""

    def start_again(self, layout: Layout) -> None:
        """Count rounds and updates from 0 again, under another layout. Order: no rank runs anything."""

    def give_up(self, state: StepState, error: BaseException) -> None:
        """After an error, tell the other ranks that this one cannot go on."""

    def close(self) -> None:
        """Let go of what ranks share. Order: nothing of this rank runs any more."""


class SeveralRanks(RankContext):
    """A rank's turns in a run, and the memory that it shares with the other ranks of its node.

    rounds: turns of training that the node has begun since the run began. updates: that have been issued. last: the
    rank of its node that ran the node's last round of the step at work. link: to the other nodes, where there are some.
    """

    def __init__(self, group: RankGroup, layout: Layout, device: torch.device) -> None:
        super().__init__(layout)
        self.ranks, self.control, self._watch = group
        self.seat = Seat(self.ranks.local_rank, self.ranks.local_size, self.ranks.node, self.ranks.nodes)
        self.share = Share(self.ranks.local_rank, self.ranks.local_size, node=self.ranks.node)
        self.rank, self.writes_files = self.ranks.rank, self.ranks.rank == 0
        self._semaphores = self._transport.semaphores(layout)
        self.rounds = self.updates = self.last = 0
        size, num_semaphores = self.ranks.local_size, self._semaphores.count
        num_bytes = layout.node_bytes + Signals.num_bytes(size, num_semaphores)
        borders, on_gpu = borders_of_slots(layout.slots, "node"), device.type == "cuda"
        self._memory = NodeMemory.open(self.ranks, self.control, num_bytes, on_gpu, borders=borders)
        self.cuts = self._memory.cuts
        self._arena = self._memory.tensor[: layout.node_bytes]
        table = self._memory.tensor[layout.node_bytes :]
        self._signals = Signals.over(table, size, num_semaphores, self.ranks.local_rank)
        self._check_others, self.control.check_lost = self.control.check_lost, self._check
        self.link = NodeLink(self.control) if self.ranks.nodes > 1 else None
        self.errors = kept_errors(layout, self.share)
        self._device, self._write_back, self._settle = device, nothing_newer, nothing_newer
        self._gpu: Tensor | None = None
        self._connect_gpus(layout)
        if self._watch is not None:
            self._watch.follow(self._signals)

    def _connect_gpus(self, layout: Layout) -> None:
        if layout.places.uses_peers and self.collectives is None:
            self.collectives = Collectives(self.control, self._device, self._watch)
            if self._gpu is not None:
                self.collectives.share(self._gpu)

    def join(self, arenas: Arenas, gpu_bytes: int) -> None:
        """As alone; the other ranks' GPUs may copy to this one's arena where a transport has them do so."""
        arenas.add_node(self._arena)
        self._settle = arenas.settle_drive
        self._gpu = arenas.bytes_view("gpu", 0, gpu_bytes)
        if self.collectives is not None:
            self.collectives.share(self._gpu)

    def use(self, layout: Layout, arenas: Arenas, write_back: Callable[[], None]) -> None:
        self._write_back = write_back
        if self.link is not None:
            self.over_nodes = NodeGradients(layout, arenas, self.ranks, self.link, self._abort, self.errors)

    # -- a step ------------------------------------------------------------------------------------------------------

    def turns(self, first: int, num_rounds: int) -> Iterator[Turn]:
        """As alone, and count those of the node."""
        before = self.last if first else 0
        for turn in self._transport.turns(self.seat, first, num_rounds, before):
            self.rounds += 1
            self.last = turn.last
            yield turn

    def evaluates(self, number: int) -> bool:
        return self._transport.rank_of(self.seat, number) == self.ranks.rank

    @property
    def is_last(self) -> bool:
        return self.last == self.ranks.local_rank

    def count_update(self) -> None:
        if self.over_nodes is not None:
            self.over_nodes.give_weights(self.hooks())
        self.updates += 1

    def begin_nodes(self, num_rounds: int, loss_weight: float) -> None:
        if self.over_nodes is not None:
            self.over_nodes.begin(num_rounds, loss_weight, self.hooks())

    def add_nodes(self, num_rounds: int, loss_weight: float) -> Tensor | None:
        if self.over_nodes is None:
            return None
        self.begin_nodes(num_rounds, loss_weight)
        return self.over_nodes.end()

    def end_nodes(self, alone: bool = False) -> None:
        if self.over_nodes is not None:
            self.over_nodes.join()
            if not alone:
                self.barrier()

    def gradients(self, weights: WeightStore, num_rounds: int, scale: float) -> dict[str, Tensor]:
        if self.link is None:
            return super().gradients(weights, num_rounds, scale)
        with self.while_nobody_writes():
            pass
        sums = gradients_of_nodes(weights, self.ranks, self.control, num_rounds)
        return {name: total * scale for name, total in sums.items()}

    def sum_losses(
        self, own: list[Tensor], first: int, num_rounds: int, device: torch.device, trained: bool = False
    ) -> Tensor:
        told = self.control.gather([row.tolist() for row in own])
        tellers = self._transport.tellers(self.seat, first, num_rounds, trained)
        return torch.tensor(added_of_ranks(told, tellers), dtype=torch.float64, device=device)

    def join_rows(self, rows: list[Tensor]) -> None:
        whole = torch.from_numpy(np.sum(self.control.gather(torch.cat(rows).numpy()), axis=0))
        for row, joined in zip(rows, whole.split([len(row) for row in rows]), strict=True):
            row.copy_(joined)

    def read(
        self, batches: Batches, call: tuple[Request, ModelSpec, object, Mapping[str, object]], own_loss: bool
    ) -> Sequences:
        return read_on_ranks(self.control, batches, call, own_loss)

    # -- calls that all ranks make -----------------------------------------------------------------------------------

    def agree(self, value: object, what: str) -> None:
        self.control.agree(value if isinstance(value, bytes) else repr(value).encode(), what)

    def barrier(self) -> None:
        self.control.barrier()

    def gather(self, value: Any) -> list[Any]:
        return self.control.gather(value)

    @contextmanager
    def together(self) -> Iterator[None]:
        with self.control.all_or_none():
            yield
            self._settle()

    @contextmanager
    def while_nobody_writes(self) -> Iterator[None]:
        self._write_back()
        self.end_nodes(alone=True)
        self.barrier()
        with self.together():
            yield

    # -- another plan ------------------------------------------------------------------------------------------------

    def check_takes(self, layout: Layout) -> None:
        """Raise ValueError where the ranks have too few semaphores for another layout."""
        needed, has = transport_of(layout.plan).semaphores(layout).count, self._signals.num_semaphores
        if needed > has:
            raise ValueError(f"the new plan needs {needed} semaphores of each rank, which has {has}")
        if self.errors is not None:
            self.errors.check_takes(layout, self.share)
        if not set(self.cuts) <= set(borders_of_slots(layout.slots, "node")):
            raise ValueError("the new plan has planes across borders of page-locked memory, where CUDA copies none")

    def start_again(self, layout: Layout) -> None:
        self._transport = transport_of(layout.plan)
        self._semaphores = self._transport.semaphores(layout)
        self.rounds = self.updates = self.last = 0
        self._connect_gpus(layout)
        self._signals.lower_own()
        self.barrier()

    # -- semaphores --------------------------------------------------------------------------------------------------

    def hooks(self) -> CommandHooks:
        """For the run of a program that is issued now. The CPU's commands may call them when later ones are."""
        clocks, last = {"round": self.rounds, "update": self.updates + 1}, self.last
        ours, size = self.ranks.local_rank, self.ranks.local_size
        rows = {"own": ours, "previous": (ours - 1) % size, "last": last, "all": None}
        self._signals.check()  # streams do not notice that a rank has given up
        return semaphore_hooks(self._signals, clocks, rows)

    def _check(self) -> None:
        """Raise RankLost when a rank has given up, here or elsewhere."""
        if self._check_others is not None:
            self._check_others()
        self._signals.check()

    def give_up(self, state: StepState, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on, so that none waits for it: others may hold its work or not.

        What another rank has told is passed on as it is: a third may see this rank's message first.
        """
        self._abort(error)
        state.unusable = ABORTED

    def _abort(self, error: BaseException) -> None:
        own = f"rank {self.ranks.rank}: {type(error).__name__}: {error}"
        message = str(error) if isinstance(error, RankLost) else own
        if self.collectives is not None:
            self.collectives.abort(message)
        end = self._signals if self._watch is None else self._watch
        end.abort(message)

    # -- the end -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        if self.over_nodes is not None:
            self.over_nodes.join()  # while it still notices that a rank is lost
        self.control.check_lost = self._check_others
        if self.collectives is not None:
            self.collectives.close()
        if self._watch is not None:
            self._watch.unfollow(self._signals)
        self._memory.close()


def open_context(group: RankGroup | None, layout: Layout, device: torch.device) -> RankContext:
    """Join the ranks that a plan was made for. Raises: ValueError where there are others."""
    ranks, planned = Ranks.alone() if group is None else group.ranks, layout.plan.request
    if (planned.ranks, planned.nodes) != (ranks.local_size, ranks.nodes):
        raise ValueError(
            f"the plan was made for {planned.ranks} ranks on each of {planned.nodes} nodes, but {ranks.local_size} on"
            f" each of {ranks.nodes} train together; plan again"
        )
    return RankContext(layout) if group is None or ranks.size == 1 else SeveralRanks(group, layout, device)
