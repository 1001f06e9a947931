"""One rank of several that train on one host copy: whose turn a round is, cells that order ranks, sums of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.native.transfer_operations import WordValue
from flexengine.parallel.collectives import Collectives
from flexengine.parallel.control import Control
from flexengine.parallel.node_memory import NodeMemory
from flexengine.parallel.nodes import NodeLink
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.signals import RankLost, Signals
from flexengine.parallel.watch import Watch
from flexengine.runtime.execution.executor import CommandHooks
from flexengine.runtime.step_state import StepState
from flexengine.schedule.commands import Command, Signal
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.cells import Cells, executor_of
from flexengine.schedule.ranks.shares import Share
from flexengine.schedule.ranks.stage_layout import cells_of
from flexengine.schedule.slots import borders_of_slots

ABORTED = "a rank failed, so that gradients or weights are not whole"


def nothing_newer() -> None:
    """The node's memory holds all that ranks share."""


class RankGroup(NamedTuple):
    """The ranks that train together, their calls to each other, and who notices when one is lost."""

    ranks: Ranks
    control: Control
    watch: Watch | None = None


class Turns:
    """A rank's turns in a run, and the memory that it shares with the other ranks of its node.

    rounds: of training that all ranks have begun since the run began. updates: that have been issued. last: the rank
    of its node that ran the node's last round of the step at work. link: to the other nodes, where there are some.
    collectives: with the other ranks of the node, under a split plan. write_back: has the node's memory hold what ranks
    keep on their GPUs in stages.
    """

    def __init__(self, group: RankGroup, layout: Layout, device: torch.device) -> None:
        self.ranks, self.control, self._watch = group
        self._cells = cells_of(layout)
        self.rounds = self.updates = self.last = 0
        size, num_cells = self.ranks.local_size, self._cells.count
        num_bytes = layout.node_bytes + Signals.num_bytes(size, num_cells)
        borders, on_gpu = borders_of_slots(layout.slots, "node"), device.type == "cuda"
        self._memory = NodeMemory.open(self.ranks, self.control, num_bytes, on_gpu, borders=borders)
        self.arena = self._memory.tensor[: layout.node_bytes]
        table = self._memory.tensor[layout.node_bytes :]
        self._signals = Signals.over(table, size, num_cells, self.ranks.local_rank)
        self._check_others, self.control.check_lost = self.control.check_lost, self._check
        self.link = NodeLink(self.control) if self.ranks.nodes > 1 else None
        self._device, self.split, self.stages = device, layout.plan.split, layout.plan.stages
        self.write_back: Callable[[], None] = nothing_newer
        self._gpu: Tensor | None = None
        self.collectives = Collectives(self.control, device, self._watch) if self.split else None
        if self._watch is not None:
            self._watch.follow(self._signals)

    def use_gpu(self, arena: Tensor) -> None:
        """Let the other ranks' GPUs copy to this one's arena, under a split plan; all ranks make this call together."""
        self._gpu = arena
        if self.collectives is not None:
            self.collectives.share(arena)

    @property
    def share(self) -> Share:
        """What this rank updates, loads and fills of its node's memory."""
        return Share(self.ranks.local_rank, self.ranks.local_size)

    def takes(self, number: int) -> bool:
        """Whether this rank runs a round forward, counted from 0 within its batch."""
        return rank_of_round(number, self.ranks) == self.ranks.rank

    def waves(self, first: int, num_rounds: int) -> list[list[int]]:
        """The rounds of a batch that the ranks of this node run together, under a split plan or in stages.

        first: the number of the batch's first round within its step.
        """
        ranks = self.ranks
        own = [i for i in range(num_rounds) if (first + i) % ranks.nodes == ranks.node]
        return [own[start : start + ranks.local_size] for start in range(0, len(own), ranks.local_size)]

    def _rank_of(self, number: int, first: int) -> int:
        """The rank that runs the `number`-th round of a batch, which is the `first + number`-th of its step."""
        if not (self.split or self.stages):
            return rank_of_round(first + number, self.ranks)
        place, node = number // self.ranks.nodes, (first + number) % self.ranks.nodes
        return node * self.ranks.local_size + place % self.ranks.local_size

    def begin_wave(self) -> None:
        """Count rounds that all ranks run together."""
        self.rounds += 1

    def end_wave(self, num_rounds: int) -> None:
        """Note the rank that ran the last of so many rounds."""
        self.last = num_rounds - 1

    def begin_round(self, number: int) -> bool:
        """Count a round of training, the `number`-th of its step; returns whether this rank runs it."""
        rank = rank_of_round(number, self.ranks)
        if rank in self.ranks.of_node:
            self.rounds += 1
            self.last = rank - self.ranks.of_node[0]
        return rank == self.ranks.rank

    @property
    def is_last(self) -> bool:
        """Whether this rank ran the last round of its node so far."""
        return self.last == self.ranks.local_rank

    def await_gradient(self, group: int) -> None:
        """Wait until the node's last round so far has stored the gradient of a group. Raises: RankLost."""
        assert isinstance(self._cells, Cells), "ranks of several nodes do not train in stages"
        for cell in self._cells.of_gradient(group) if self.rounds else ():
            self._signals.wait(cell, self.last, self.rounds)

    # -- another plan ------------------------------------------------------------------------------------------------

    def check_takes(self, layout: Layout) -> None:
        """Raise ValueError where the ranks have too few cells for another layout."""
        needed, has = cells_of(layout).count, self._signals.num_cells
        if needed > has:
            raise ValueError(f"the new plan needs {needed} cells of each rank, which has {has}")
        if not set(self.cuts) <= set(borders_of_slots(layout.slots, "node")):
            raise ValueError(
                "the new plan has planes across borders of page-locked memory, over which CUDA copies none"
            )

    @property
    def cuts(self) -> list[int]:
        """Offsets in the node's memory that no copy of CUDA may cross."""
        return self._memory.cuts

    def start_again(self, layout: Layout) -> None:
        """Count rounds and updates from 0 again, with the cells of another layout. Order: no rank runs anything."""
        self._cells = cells_of(layout)
        self.rounds = self.updates = self.last = 0
        self.split, self.stages = layout.plan.split, layout.plan.stages
        if self.split and self.collectives is None:
            self.collectives = Collectives(self.control, self._device, self._watch)
            if self._gpu is not None:
                self.collectives.share(self._gpu)
        self._signals.lower_own()
        self.control.barrier()

    # -- cells -------------------------------------------------------------------------------------------------------

    def hooks(self) -> CommandHooks:
        """For the run of a program that is issued now. The CPU's commands may call them when later ones are."""
        clocks, last = {"round": self.rounds, "update": self.updates + 1}, self.last
        ours, size, signals = self.ranks.local_rank, self.ranks.local_size, self._signals
        rows = {"own": ours, "previous": (ours - 1) % size, "last": last, "all": None}

        def value(signal: Signal) -> int:
            return clocks[signal.clock] - signal.lag

        def row(signal: Signal) -> int | None:
            return signal.of if isinstance(signal.of, int) else rows[signal.of]

        def before(command: Command) -> None:
            for signal in command.awaits:
                if value(signal) > 0:  # cells begin at 0
                    signals.wait(signal.cell, row(signal), value(signal))

        def after(command: Command) -> None:
            for signal in command.signals:
                signals.signal(signal.cell, value(signal))

        def words(signal: Signal) -> list[WordValue]:
            reached = max(0, value(signal))  # cells begin at 0
            return [WordValue(address, reached) for address in signals.addresses(signal.cell, row(signal))]

        signals.check()  # streams do not notice that a rank has given up
        return CommandHooks(before, after, words)

    def _check(self) -> None:
        """Raise RankLost when a rank has given up, here or elsewhere."""
        if self._check_others is not None:
            self._check_others()
        self._signals.check()

    def abort(self, error: BaseException) -> None:
        """Tell all ranks that this one cannot go on, so that none waits for it.

        What another rank has told is passed on as it is: a third may see this rank's message first.
        """
        own = f"rank {self.ranks.rank}: {type(error).__name__}: {error}"
        message = str(error) if isinstance(error, RankLost) else own
        if self.collectives is not None:
            self.collectives.abort(message)
        end = self._signals if self._watch is None else self._watch
        end.abort(message)

    # -- calls that all ranks make -----------------------------------------------------------------------------------

    def sum_in_order(self, own: list[Tensor], first: int, num_rounds: int) -> float:
        """Add numbers of all ranks in the order of rounds. own: those [chunks] of each round of this rank.

        first: the number of the first round within its step.
        """
        told = [iter(rounds) for rounds in self.control.gather([row.tolist() for row in own])]
        total = 0.0
        for number in range(num_rounds):
            for term in next(told[self._rank_of(number, first)]):
                total += term
        return total

    def agree(self, value: object, what: str) -> None:
        """Raise ValueError on all ranks unless all give the same value."""
        self.control.agree(repr(value).encode(), what)

    @property
    def writes_files(self) -> bool:
        """Whether this rank is the one that writes files."""
        return self.ranks.rank == 0

    def close(self) -> None:
        """Let go of the node's memory. Order: nothing of this rank runs any more."""
        self.control.check_lost = self._check_others
        if self.collectives is not None:
            self.collectives.close()
        if self._watch is not None:
            self._watch.unfollow(self._signals)
        self._memory.close()


def rank_of_round(number: int, ranks: Ranks) -> int:
    """The rank that runs a round of a step, counted from 0: nodes take turns, and within each node its ranks.

    So the number of nodes decides which rounds a node adds up, and the number of its ranks does not.
    """
    turn, node = divmod(number, ranks.nodes)
    return node * ranks.local_size + executor_of(turn, ranks.local_size)


def open_turns(group: RankGroup | None, layout: Layout, device: torch.device) -> Turns | None:
    """Join the ranks that a plan was made for; None for one. Raises: ValueError where there are others."""
    ranks, planned = Ranks.alone() if group is None else group.ranks, layout.plan.request
    if (planned.ranks, planned.nodes) != (ranks.local_size, ranks.nodes):
        raise ValueError(
            f"the plan was made for {planned.ranks} ranks on each of {planned.nodes} nodes, but {ranks.local_size} on"
            f" each of {ranks.nodes} train together; plan again"
        )
    return None if group is None or ranks.size == 1 else Turns(group, layout, device)


def give_up(state: StepState, turns: Turns, error: BaseException) -> None:
    """After an error the other ranks may hold this rank's work or not, so none of them can go on."""
    turns.abort(error)
    state.unusable = ABORTED


def together(turns: Turns | None) -> AbstractContextManager[None]:
    """What one of several ranks raises in the block, all raise; no rank leaves it before all have reached its end."""
    return nullcontext() if turns is None else turns.control.all_or_none()


@contextmanager
def while_nobody_writes(turns: Turns | None) -> Iterator[None]:
    """Let a rank read what others have written, before any goes on. Order: nothing of this rank runs any more.

    What one rank raises in the block, all raise.
    """
    if turns is not None:
        turns.write_back()
        turns.control.barrier()
    with together(turns):
        yield
