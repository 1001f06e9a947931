"""A round of one of several ranks that take rounds in turn, and their update: gradients and sums of squares are relayed
through the node's memory."""

from __future__ import annotations

from flexengine.schedule.commands import Access, CommandName, CopyRegion, Signal, Stream
from flexengine.schedule.group_uses import group_uses
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.context import RoundContext
from flexengine.schedule.lowering.gradients import GradientLowering, InRound
from flexengine.schedule.lowering.kinds import RoundKind
from flexengine.schedule.lowering.round import EvaluationLowering, RoundLowering
from flexengine.schedule.lowering.shape import RoundShape
from flexengine.schedule.lowering.stored_gradient import StoredPiece, stored_pieces
from flexengine.schedule.lowering.update import UpdateLowering
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.ranks.semaphores import Semaphores


class SharedContext(RoundContext):
    """A round of a rank that shares weights in the node's memory. semaphores: by which ranks wait for each other."""

    def __init__(self, layout: Layout, shape: RoundShape, builder: ProgramBuilder) -> None:
        super().__init__(layout, shape, builder)
        self.semaphores = Semaphores(layout)

    def updated_before(self, group: int) -> tuple[Signal, ...]:
        return () if self.model.groups[group].frozen else self.semaphores.updated_before(group)


class RelayGradients(GradientLowering):
    """Adds to what the rank of the round before has left in the node's memory, and leaves the sum there.

    A gradient is relayed once a round: until the last layer that adds to it, accumulators are spilled, and added just
    before that layer's. So the bits are those of one rank, which adds and rounds layer by layer. If ranks did that
    while other layers are still to come, none could begin its backward before the rank of the round before has ended
    its own.
    """

    def __init__(self, context: SharedContext, kind: RoundKind, updated: InRound) -> None:
        super().__init__(context, kind, updated)
        self._semaphores = context.semaphores
        self._uses = group_uses(context.model)
        self._spilled: set[int] = set()  # groups of which the host holds an accumulator

    def finish(self, group: int, part: int, accumulator: int) -> None:
        """As on one rank; of a group that two layers add to, keep the first one's accumulator until the second's."""
        if group not in self._spilled and self._uses[group].gradients > 1:
            self._spill(group, part, accumulator)
        else:
            super().finish(group, part, accumulator)

    def _store(self, stored: StoredPiece, accumulator: Access, has_previous: bool) -> None:
        staging = self._fetch_stored(stored, has_previous)
        assert staging is not None, "ranks store gradients in the node's memory"
        if stored.group in self._spilled:
            self._add_spilled(stored, staging, has_previous)
        self._round(stored, accumulator, has_previous or stored.group in self._spilled, staging)
        self._send_home(stored, staging)

    def _fetch_home(self, stored: StoredPiece, back: list[CopyRegion]) -> None:
        self._builder.copy(CommandName("fetch", "grad", stored.name), Stream.RELAY_IN, stored.content, back)
        awaits = self._semaphores.relayed_before(stored.group, stored.part, stored.number)
        self._builder.between_ranks(-1, awaits=(awaits,))

    def _send_home(self, stored: StoredPiece, staging: int) -> None:
        name = CommandName("offload", "grad", stored.name)
        self._builder.copy(name, Stream.RELAY_OUT, stored.content, stored.regions_home(staging))
        signal = self._semaphores.relayed(stored.group, stored.part, stored.number)
        self._builder.between_ranks(-1, signals=(signal,))

    def _spill(self, group: int, part: int, accumulator: int) -> None:
        """Keep an accumulator on the host, in full width."""
        assert part == 0, "one slot holds what one layer spills"
        self._spilled.add(group)
        for stored in stored_pieces(self._context, group, part):
            region = self._spilled_region(stored, accumulator, stored.piece.start)
            target = [Access(region.target, self._spilled_content(stored))]
            source = [Access(accumulator, self._accumulated(group, part))]
            name = CommandName("offload", "spilled", stored.name)
            self._builder.add_copy(name, Stream.D2H, source, target, (region,))

    def _add_spilled(self, stored: StoredPiece, staging: int, has_previous: bool) -> None:
        """Add the same piece of what another layer spilled; its squares do not count."""
        slot = self._layout.slot("spilled", self._context.model.groups[stored.group].slot_class)
        name, content = CommandName("fetch", "spilled", stored.name), self._spilled_content(stored)
        back = [self._spilled_region(stored, slot, 0).reversed]
        self._builder.copy(name, Stream.RELAY_IN, content, back)
        self._round(stored, Access(slot, content), has_previous, staging, stored.piece.start)

    def _spilled_region(self, stored: StoredPiece, slot: int, start: int) -> CopyRegion:
        """The copy of a piece to the host, from element `start` of a slot with an accumulator."""
        width, home = self._layout.acc_bytes, self._layout.spilled_slot(stored.group, stored.piece)
        return CopyRegion(slot, start * width, home, 0, stored.piece.numel * width)

    def _spilled_content(self, stored: StoredPiece) -> str:
        return f"spilled accumulator {stored.name}"


class RelayRound(RoundLowering):
    """A round of one of several ranks, each of which runs its own."""

    context: SharedContext

    def make_context(self) -> SharedContext:
        return SharedContext(self.layout, self.shape, self.builder)

    def make_gradients(self, updated: InRound) -> GradientLowering:
        return RelayGradients(self.context, self.kind, updated)


class SharedEvaluation(EvaluationLowering):
    """Forward of a round by one of several ranks, which waits until all have updated what it reads."""

    def make_context(self) -> SharedContext:
        return SharedContext(self.layout, self.shape, self.builder)


class RanksUpdate(UpdateLowering):
    """An update of one of several ranks."""

    def keeps_clip(self, updates: bool) -> bool:
        """As of one rank; signals of ranks need a command before all updates."""
        return False


class SharedUpdate(RanksUpdate):
    """An update of which each rank makes a share."""

    def signal_updates(self) -> None:
        """Have the command that ends each group's update say so; the last before all updates, of groups without one
        here.

        Each rank signals all groups: the norm that it has read may then be written again, too.
        """
        semaphores, before = Semaphores(self.layout), self.before_updates
        told = self.kind.way == "committed" and self.kind.left is None  # the last round has told of speculative groups
        for group, spec in enumerate(self.layout.model.groups):
            if not spec.frozen:
                late = (semaphores.speculated(group),) if semaphores.is_speculative(group) and not told else ()
                self.builder.between_ranks(self.ends.get(group, before), signals=(semaphores.updated(group), *late))


class RelayUpdate(SharedUpdate):
    """An update after which the rank of the last round has the sums of squares of all gradients."""

    def sums_of_squares(self) -> Access:
        """Send the sums to the node's memory, or fetch those of the rank of the last round. Several nodes have added
        them up before."""
        if self.layout.plan.request.nodes > 1:
            return super().sums_of_squares()
        layout, builder, semaphores, content = self.layout, self.builder, Semaphores(self.layout), "norm squares"
        here, there = layout.slot("norm_squares"), layout.slot("norm_squares", memory="node")
        region = CopyRegion(here, 0, there, 0, layout.slots[there].num_bytes)
        if self.kind.last:
            builder.holds(here, content)
            builder.copy(CommandName("offload", "norm"), Stream.D2H, content, [region])
            builder.between_ranks(-1, signals=(semaphores.norm(),))
        else:
            builder.holds(there, content)
            builder.copy(CommandName("fetch", "norm"), Stream.H2D, content, [region.reversed])
            builder.between_ranks(-1, awaits=(semaphores.norm_of_last(),))
        return Access(here, content)
