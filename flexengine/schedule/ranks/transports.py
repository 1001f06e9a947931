"""How ranks of a node share weights and gradients, a class for each way: who runs which rounds, by what programs.

Rounds of a step are numbered over all its calls. Nobody outside asks which transport a plan has: whoever lowers,
checks, prices or runs it asks the plan's transport.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan
from flexengine.schedule.commands import Program, UpdateTile
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.kinds import RoundKind, UpdateKind, Wave
from flexengine.schedule.lowering.round import EvaluationLowering, RoundLowering
from flexengine.schedule.lowering.shape import RoundShape
from flexengine.schedule.lowering.update import UpdateLowering
from flexengine.schedule.ranks.chunk_shares import shares_of, why_no_context
from flexengine.schedule.ranks.context_checker import check_context, held_in_context, reads_what_head_stored
from flexengine.schedule.ranks.context_lowering import ContextRound, ContextUpdate
from flexengine.schedule.ranks.context_semaphores import ContextSemaphores
from flexengine.schedule.ranks.order import Event
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.relay_lowering import RelayRound, RelayUpdate, SharedEvaluation
from flexengine.schedule.ranks.semaphores import Semaphores
from flexengine.schedule.ranks.split_checker import check_folds
from flexengine.schedule.ranks.split_lowering import SplitRound, SplitUpdate
from flexengine.schedule.ranks.stage_layout import StageLayout
from flexengine.schedule.ranks.stage_lowering import StageRound, StageUpdate
from flexengine.schedule.ranks.stages import StageSemaphores
from flexengine.schedule.ranks.stages_checker import check_stages, held_in_stages


class Seat(NamedTuple):
    """The place of a rank: the `rank`-th of `size` on the `node`-th of `nodes` nodes."""

    rank: int = 0
    size: int = 1
    node: int = 0
    nodes: int = 1


class Turn(NamedTuple):
    """A round of a node's, or rounds that its ranks run together. Rounds are numbered within their batch.

    rounds: whose chunks this rank's program runs; none where another rank has the turn. together: all of the node's in
    it. own: the place in `rounds` of the one whose loss this rank tells; None where another tells it. wave: as of a
    kind of round. last: the rank that runs the last of them. ends_batch: it is the node's last turn in the batch.
    """

    rounds: tuple[int, ...]
    together: tuple[int, ...]
    own: int | None
    wave: Wave | None
    last: int
    ends_batch: bool


class Alone:
    """One rank, which runs all rounds. What it says of several holds of ranks that take rounds in turn."""

    round: type[RoundLowering] = RoundLowering
    update: type[UpdateLowering] = UpdateLowering
    evaluation: type[EvaluationLowering] = EvaluationLowering
    ranks_alike = False
    """Whether all ranks do the same at the same time."""

    def layout(self, model: ModelSpec, plan: Plan, rank: int = 0) -> Layout:
        """Where everything lies of one of a node's ranks."""
        return Layout(model, plan)

    def layouts(self, layout: Layout, count: int) -> list[Layout]:
        """Those of the first ranks, of one of which a layout is given."""
        return [layout] * count

    def semaphores(self, layout: Layout) -> Semaphores | StageSemaphores:
        """By which ranks wait for each other."""
        return Semaphores(layout)

    def shape(self, rounds: Sequence[RoundShape]) -> RoundShape:
        """What a program is lowered for that runs these rounds."""
        [found] = rounds
        return found

    def full_wave(self, shape: RoundShape, size: int) -> RoundShape:
        """The same where each of `size` ranks has a round of a shape."""
        return shape

    def lower_round(self, layout: Layout, shape: RoundShape, kind: RoundKind) -> Program:
        """Forward, loss and backward of one round; or forward and loss, which keeps nothing."""
        return (self.round(layout, shape, kind) if kind.train else self.evaluation(layout, shape)).lower()

    def lower_update(self, layout: Layout, kind: UpdateKind) -> Program:
        """The optimizer step's own program."""
        return self.update(layout, kind).lower()

    def rank_of(self, seat: Seat, number: int, first: int = 0) -> int:
        """The rank, of all nodes, that runs a round of a batch whose first round is the `first`-th of its step.

        Nodes take turns, and within each node its ranks. So the number of nodes decides which rounds a node adds up,
        and the number of its ranks does not.
        """
        turn, node = divmod(first + number, seat.nodes)
        return node * seat.size + turn % seat.size

    def tellers(self, seat: Seat, first: int, num_rounds: int, trained: bool) -> Iterator[int]:
        """The ranks, of all nodes, that tell the losses of a batch, in the order of its rounds and of their chunks.

        trained: with backward, or forward alone.
        """
        return (self.rank_of(seat, number, first) for number in range(num_rounds))

    def told(self, layout: Layout, shape: RoundShape, wave: Wave | None) -> range:
        """The chunks of a round of training whose losses its rank tells, or of several, each of them."""
        return range(len(shape.chunks))

    def turns(self, seat: Seat, first: int, num_rounds: int, last_before: int = 0) -> Iterator[Turn]:
        """The turns of a rank's node in a batch. last_before: the rank that ran the node's last round so far."""
        for number in range(num_rounds):
            node, rank = divmod(self.rank_of(seat, number, first), seat.size)
            if node == seat.node:
                own, ends = (number,) if rank == seat.rank else (), number + seat.nodes >= num_rounds
                yield Turn(own, (number,), 0, None, rank, ends)

    def check(self, layout: Layout, runs: Sequence[Sequence[RankRun]]) -> None:
        """Raise ProgramError unless what ranks do together is right, beside what is checked of all."""

    def held(self, layout: Layout, event: Event, role: str, owner: str, writes: bool) -> tuple[int, ...]:
        """What bytes of a stored gradient hold where an event reads them, or has written them: the sum up to this round
        of this step.

        What all nodes have added up counts as one round more. A speculative update reads that, or of one node what its
        own round has left.
        """
        run = event.run
        if run.exchanges:
            return run.step, run.number + writes
        if run.updates or isinstance(event.command.args, UpdateTile):
            return run.step, run.number + (layout.plan.request.nodes > 1)
        return run.step, run.number - (not writes)


class Relay(Alone):
    """Ranks take rounds in turn, and relay gradients through the host."""

    round, update, evaluation = RelayRound, RelayUpdate, SharedEvaluation


class _Together(Alone, ABC):
    """As many rounds at a time as there are ranks."""

    def rank_of(self, seat: Seat, number: int, first: int = 0) -> int:
        """As of `Alone`, but each batch begins with the node's first rank."""
        place, node = number // seat.nodes, (first + number) % seat.nodes
        return node * seat.size + place % seat.size

    def turns(self, seat: Seat, first: int, num_rounds: int, last_before: int = 0) -> Iterator[Turn]:
        own = [number for number in range(num_rounds) if (first + number) % seat.nodes == seat.node]
        for start in range(0, len(own), seat.size):
            together = tuple(own[start : start + seat.size])
            wave = Wave(seat.rank, seat.size, len(together), last_before)
            last_before = len(together) - 1
            yield self.turn(together, wave, ends_batch=together[-1] == own[-1])

    @abstractmethod
    def turn(self, together: tuple[int, ...], wave: Wave, ends_batch: bool) -> Turn:
        """A rank's part of rounds that run together."""


class Split(_Together):
    """Ranks walk the layers together, one round on each, and each moves a share of what all need."""

    round, update, evaluation = SplitRound, SplitUpdate, SharedEvaluation
    ranks_alike = True

    def turn(self, together: tuple[int, ...], wave: Wave, ends_batch: bool) -> Turn:
        """Where fewer rounds are left than ranks, those without one run the first, and nobody adds what they send."""
        takes, last = wave.rank < len(together), len(together) - 1
        rounds = (together[wave.rank if takes else 0],)
        return Turn(rounds, together, 0 if takes else None, wave, last, ends_batch)

    def check(self, layout: Layout, runs: Sequence[Sequence[RankRun]]) -> None:
        check_folds(layout, runs)


class Stages(_Together):
    """Ranks walk the layers together, and each runs blocks of its own for all rounds at hand."""

    round, update = StageRound, StageUpdate

    def layout(self, model: ModelSpec, plan: Plan, rank: int = 0) -> Layout:
        """Raises: ValueError where ranks cannot train the model so."""
        return StageLayout(model, plan, rank)

    def layouts(self, layout: Layout, count: int) -> list[Layout]:
        return [StageLayout(layout.given, layout.plan, rank) for rank in range(count)]

    def semaphores(self, layout: Layout) -> Semaphores | StageSemaphores:
        assert isinstance(layout, StageLayout), "a rank that trains in stages has a layout of its own"
        return layout.semaphores

    def shape(self, rounds: Sequence[RoundShape]) -> RoundShape:
        return RoundShape.of_wave(rounds)

    def full_wave(self, shape: RoundShape, size: int) -> RoundShape:
        return RoundShape.of_wave([shape] * size)

    def turn(self, together: tuple[int, ...], wave: Wave, ends_batch: bool) -> Turn:
        own = wave.rank if wave.rank < len(together) else None
        return Turn(together, together, own, wave, len(together) - 1, ends_batch)

    def check(self, layout: Layout, runs: Sequence[Sequence[RankRun]]) -> None:
        check_stages(layout, runs)

    def held(self, layout: Layout, event: Event, role: str, owner: str, writes: bool) -> tuple[int, ...]:
        return held_in_stages(layout, event, role, owner, writes)


class Context(Alone):
    """Ranks cut every round, each runs some of its chunks, and layers pass from the first rank to the last and back."""

    round, update, evaluation = ContextRound, ContextUpdate, SharedEvaluation

    def layout(self, model: ModelSpec, plan: Plan, rank: int = 0) -> Layout:
        """Raises: ValueError where ranks cannot cut rounds of the model."""
        reason = why_no_context(model, plan.in_parts)
        if reason:
            raise ValueError(f"{model.name} cannot be trained with transport=context: {reason}")
        return Layout(model, plan)

    def semaphores(self, layout: Layout) -> ContextSemaphores:
        return ContextSemaphores(layout)

    def tellers(self, seat: Seat, first: int, num_rounds: int, trained: bool) -> Iterator[int]:
        if not trained:
            return super().tellers(seat, first, num_rounds, trained)
        return (rank for _ in range(num_rounds) for rank in range(seat.size))

    def told(self, layout: Layout, shape: RoundShape, wave: Wave | None) -> range:
        assert wave is not None, "all ranks have the turn"
        return shares_of(layout, shape.chunks)[wave.rank]

    def turns(self, seat: Seat, first: int, num_rounds: int, last_before: int = 0) -> Iterator[Turn]:
        """All ranks have all turns; the first rank ends each."""
        wave = Wave(seat.rank, seat.size, 1)
        for number in range(num_rounds):
            yield Turn((number,), (number,), 0, wave, 0, number + 1 == num_rounds)

    def check(self, layout: Layout, runs: Sequence[Sequence[RankRun]]) -> None:
        check_context(layout, runs)

    def held(self, layout: Layout, event: Event, role: str, owner: str, writes: bool) -> tuple[int, ...]:
        if role == "handed":
            return held_in_context(event)
        if not writes and reads_what_head_stored(event):
            return event.run.step, event.run.number
        return super().held(layout, event, role, owner, writes)


ALONE = Alone()
TRANSPORTS = {"relay": Relay(), "split": Split(), "stages": Stages(), "context": Context()}


def transport_of(plan: Plan) -> Alone:
    """How ranks share weights and gradients under a plan."""
    return TRANSPORTS[plan.transport] if plan.shares_node else ALONE


def layout_of(model: ModelSpec, plan: Plan, rank: int = 0) -> Layout:
    """The layout of one of a node's ranks."""
    return transport_of(plan).layout(model, plan, rank)


def layouts_of(model: ModelSpec, plan: Plan) -> list[Layout]:
    """Those of all ranks of a node."""
    return [layout_of(model, plan, rank) for rank in range(plan.request.ranks)]
