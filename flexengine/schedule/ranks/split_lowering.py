"""A round of one of several ranks that walk the layers together, and their update: fetches in shares, exchanges of
accumulators, tables of squares that ranks add up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Work
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Stream
from flexengine.schedule.group_uses import group_uses
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.context import RoundContext, SlotRing, StagePart
from flexengine.schedule.lowering.cpu_update import OwnRange, lower_speculative_update
from flexengine.schedule.lowering.drive import DriveParts
from flexengine.schedule.lowering.gradients import GradientLowering, InRound, nothing_in_round
from flexengine.schedule.lowering.kinds import RoundKind, Wave
from flexengine.schedule.lowering.round import RoundLowering
from flexengine.schedule.lowering.shape import RoundShape
from flexengine.schedule.lowering.stored_gradient import StoredPiece, stored_pieces
from flexengine.schedule.lowering.weights import WeightLowering
from flexengine.schedule.program_builder import ProgramBuilder, merge_regions
from flexengine.schedule.ranks.relay_lowering import SharedContext, SharedUpdate
from flexengine.schedule.ranks.split_commands import (
    AddTables,
    ExchangeParts,
    FoldParts,
    GatherOwned,
    GatherShares,
    ReceivedParts,
    ShareOfFetch,
    ShareOfRead,
)
from flexengine.schedule.ranks.waves import (
    ALL_SQUARES,
    OWN_SQUARES,
    Section,
    end_of,
    own_regions,
    shared_bytes,
)
from flexengine.schedule.shares import Share
from flexengine.schedule.slots import Role


def fetch_share(
    builder: ProgramBuilder, wave: Wave, name: CommandName, content: str, regions: list[CopyRegion]
) -> None:
    """Append the copy of this rank's share of what `regions` bring to a slot, and gather the others' shares."""
    whole = merge_regions(regions)
    own = merge_regions(own_regions(whole, wave.rank, wave.size))
    _gather_shares(builder, content, whole, own, (name, ShareOfFetch(wave.rank, wave.size, whole)), end_of(whole))


def _gather_shares(
    builder: ProgramBuilder, content: str, sources: Iterable[CopyRegion], own: tuple[CopyRegion, ...],
    copy: tuple[CommandName, ShareOfFetch | ShareOfRead], num_bytes: int,
) -> None:  # fmt: skip
    """Append a rank's copy of its share of so many bytes, which depends on `sources`, and gather all of them."""
    [target], (name, args) = {region.target for region in own}, copy
    share = shared_bytes(num_bytes, args.size)
    held = f"share of {content}" if share else content
    reads = [Access(source, content) for source in dict.fromkeys(region.source for region in sources)]
    builder.add_copy(name, Stream.H2D, reads, [Access(target, held)], own, args=args)
    if share:
        gathered, shares = name._replace(verb="gather"), GatherShares(args.rank, target, share, args.size)
        builder.add("gather", gathered, Stream.COMM, [Access(target, held)], [Access(target, content)], args=shares)


def run_squares(layout: Layout, content: str) -> Access:
    """The table of partial sums of squares of all runs."""
    return Access(layout.slot("run_squares"), content)


class SplitWeights(WeightLowering):
    """Fetches this rank's share of weights, and gathers the others'."""

    def __init__(self, context: RoundContext, wave: Wave) -> None:
        super().__init__(context)
        self._wave, self._drive = wave, DriveParts(context, Share(wave.rank, wave.size))

    def _fetch(self, group: int, at: StagePart, slot: int) -> None:
        """Gather shards from the GPUs; those of a round wait for each other's updates, as they come before it."""
        layout = self._layout
        if not layout.homes[group].sharded:
            super()._fetch(group, at, slot)
            return
        name, content = self._context.part_name(group, at.part), self._content(group, at.part, slot)
        own = Access(layout.plane_slot("weights", group), f"shard of {content}")
        self._builder.holds(*own)
        args = GatherOwned(self._wave.rank, own.slot, slot, layout.shards(group).bytes_of_ranks("weights"))
        label = CommandName("gather", "weights", name)
        self._builder.add("gather_owned", label, Stream.COMM, [own], [Access(slot, content)], args=args)

    def _bring(self, name: CommandName, content: str, regions: list[CopyRegion]) -> None:
        fetch_share(self._builder, self._wave, name, content, regions)

    def _bring_read(self, name: CommandName, content: str, regions: list[CopyRegion], part: int, group: int) -> None:
        """Send this rank's share, of which alone it has read the blocks, and gather the others'."""
        spans = tuple((b.target, b.held) for b, _ in self._layout.staged_part("weights", group, part))
        args, own = ShareOfRead(self._wave.rank, self._wave.size, spans), merge_regions(regions)
        _gather_shares(self._builder, content, regions, own, (name, args), max(map(sum, spans)))


class SplitGradients(GradientLowering):
    """Sends accumulators to the ranks that own their pieces, and adds up what arrives.

    Two layers add to a tied group. What arrives of the first one waits on the host, so that each round's gradient of
    the first is added before that of the second, and after those of earlier rounds.
    """

    def __init__(self, context: SharedContext, kind: RoundKind, wave: Wave) -> None:
        super().__init__(context, kind, nothing_in_round(context.layout))
        self._semaphores, self._wave = context.semaphores, wave
        self._slots: dict[tuple[Role, str], SlotRing] = {}
        self._uses = group_uses(self._layout.model)
        self._spilled: set[int] = set()  # groups of which the host holds what arrived of one layer's accumulators
        self._at_work: dict[int, int] = {}  # by group, the slot that is added to
        self._own: dict[int, list[StoredPiece]] = defaultdict(list)  # by group, what this rank has stored
        self._last_stored: dict[int, int] = {}  # by group, the last command that stores it, or its first exchange
        self._untold: list[int] = []  # groups of which this rank updates nothing, and has yet to tell so
        self._sums: list[Callable[[Stream], None]] = []  # sums of the layer above, each for a stream
        squares = run_squares(self._layout, OWN_SQUARES)
        if self._first:
            name = CommandName("clear", "squares")
            self._builder.add("clear_squares", name, Stream.COMM, [], [squares], Work(kernels=1))
        else:
            self._builder.holds(*squares)

    def accumulators(self, layer: LayerSpec, begun: bool) -> dict[int, int]:
        """As on one rank: the next slot for every part, or for a layer whose stages have not begun.

        What the slot before holds may still be on its way to the other ranks, which no edge gives time.
        """
        if layer.kind != "block":
            self.add_up(Stream.COMM)
        for group in self._trained(layer):
            if self._context.is_in_parts(group) or not begun:
                self._at_work[group] = self._take("accumulator", group)
        return {group: self._at_work[group] for group in self._trained(layer)}

    def finish(self, group: int, part: int, accumulator: int) -> None:
        """Exchange an accumulator section by section, and store this rank's pieces of the gradient.

        A sum beside products takes multiprocessors from them. So those of shards, which no copy and no update of the
        CPU awaits, are left for the compute stream, until the exchange has had the time of a layer.
        """
        name, added = self._context.part_name(group, part), Access(accumulator, self._accumulated(group, part))
        if self._uses[group].gradients > 1 and group not in self._spilled:
            self._spill(group, name, added)
            return
        stored, sharded = stored_pieces(self._context, group, part), self._layout.homes[group].sharded
        for section in self._layout.sections(group, part):
            args = self._exchanged(group, section, accumulator, self._take("received", group))
            received = self._exchange(name, section, added, args)
            self._last_stored.setdefault(group, len(self._builder.commands) - 1)
            own = stored[section.number * self._wave.size + self._wave.rank]
            arrived = [self._fetch_spilled(group, name, section)] if group in self._spilled else []
            staging = None if sharded else self._take("grad", group)
            if own.piece.runs and sharded:
                self._sums.append(partial(self._fold, own, args, added, [*arrived, received], staging))
            elif own.piece.runs:
                self._fold(own, args, added, [*arrived, received], staging, Stream.COMM)
            elif staging is not None:  # others write there, and all ranks have to gather again what that overwrites
                self._builder.overwritten(staging)

    def add_up(self, stream: Stream) -> None:
        """Append the sums that wait."""
        for append in self._sums:
            append(stream)
        self._sums.clear()

    def end_waiting(self) -> None:
        self.add_up(Stream.COMM)

    def update_complete_groups(self, index: int, layer: LayerSpec) -> None:
        """As on one rank; before, tell the other ranks of groups that no layer below adds to, where several nodes add
        up what all have stored."""
        for group in self._trained(layer):
            signal = self._semaphores.stored(group)
            if signal is not None and not any(group in below.groups for below in self._layout.model.layers[:index]):
                self._builder.between_ranks(self._last_stored[group], signals=(signal,))
        super().update_complete_groups(index, layer)

    def lower_norm(self) -> None:
        """As on one rank; several nodes have the norm when they have added up all gradients, after the round."""
        if self._layout.plan.request.nodes == 1:
            super().lower_norm()
        if self._untold:
            signals = tuple(self._semaphores.speculated(group) for group in self._untold)
            self._builder.between_ranks(-1, signals=signals)

    def _have_squares(self) -> None:
        stored = [access for group in self._own for access in self._stored_at_home(group)]
        add_squares(self._builder, self._layout, list(dict.fromkeys(stored)))

    def _speculate(self, group: int) -> None:
        """Update what this rank has stored of a group into its second planes, of several nodes when the ranks of this
        one have the sums of all."""
        own, first = self._own_ranges(group), len(self._builder.commands)
        last = lower_speculative_update(self._builder, self._layout, group, self._stored_at_home(group), own)
        for index in range(first, last + 1):
            self._builder.between_ranks(index, awaits=self._semaphores.exchanged_by_node(group))
        if last < 0:
            self._untold.append(group)
        else:
            self._builder.between_ranks(last, signals=(self._semaphores.speculated(group),))

    def _exchanged(self, group: int, section: Section, accumulator: int, slot: int) -> ExchangeParts:
        """What is exchanged of an accumulator. Pieces of a tied group lie together, as they are spilled together."""
        tied, width = self._uses[group].gradients > 1, self._layout.acc_bytes
        return ExchangeParts(self._wave.rank, accumulator, section.first, section.counts, slot, width, brings_own=tied)

    def _exchange(self, name: str, section: Section, accumulator: Access, args: ExchangeParts) -> Access:
        received = Access(args.received, f"pieces of {name} section {section.number}")
        label = CommandName("exchange", "grad", f"{name} section {section.number}")
        self._builder.add("exchange", label, Stream.COMM, [accumulator], [received], args=args)
        return received

    def _spill(self, group: int, name: str, accumulator: Access) -> None:
        """Keep what arrives of all ranks' accumulators on the host."""
        self._spilled.add(group)
        for section in self._layout.sections(group, 0):
            args = self._exchanged(group, section, accumulator.slot, self._take("received", group))
            received = self._exchange(name, section, accumulator, args)
            region = self._spilled_region(group, section, received.slot)
            target = [Access(region.target, _spilled(name, section))]
            label = CommandName("offload", "spilled", f"{name} section {section.number}")
            self._builder.add_copy(label, Stream.D2H, [received], target, (region,))

    def _fetch_spilled(self, group: int, name: str, section: Section) -> Access:
        slot = self._layout.slot("spilled", self._context.model.groups[group].slot_class)
        back = [self._spilled_region(group, section, slot).reversed]
        label = CommandName("fetch", "spilled", f"{name} section {section.number}")
        self._builder.copy(label, Stream.RELAY_IN, _spilled(name, section), back)
        return Access(slot, _spilled(name, section))

    def _spilled_region(self, group: int, section: Section, slot: int) -> CopyRegion:
        home = self._layout.spilled_section(group, section.number)
        return CopyRegion(slot, 0, home, 0, self._layout.slots[home].num_bytes)

    def _fold(
        self, own: StoredPiece, sent: ExchangeParts, accumulator: Access, arrived: list[Access], staging: int | None,
        stream: Stream,
    ) -> None:  # fmt: skip
        """Add this rank's piece of all rounds to what earlier rounds stored of it, and send the sum home.

        staging: None of a shard, which is at home on the GPU. stream: of the sum.
        """
        wave, has_previous = self._wave, not self._first
        held = Access(own.homes[0][0] if staging is None else staging, own.content)
        if has_previous:
            for home, _ in own.homes:
                self._builder.holds(home, own.content)
        if has_previous and staging is not None:
            back = [region.reversed for region in own.regions_home(staging)]
            self._builder.copy(CommandName("fetch", "grad", own.name), Stream.RELAY_IN, own.content, back)
        squares = run_squares(self._layout, OWN_SQUARES)
        partial_squares = Access(self._layout.slot("partial_squares"), "partial squares")
        numel, kept = sent.counts[wave.rank], None
        if not sent.brings_own and wave.rank < wave.rounds:
            kept = sent.own
        args = FoldParts(
            own.group,
            tuple(ReceivedParts(access.slot, numel) for access in arrived),
            wave.rounds,
            kept,
            own.stored_runs(own.piece.start, staging, self._layout.first_run(own.group)),
            has_previous,
        )
        read_bytes = wave.rounds * len(arrived) * self._layout.acc_bytes
        moved_bytes = numel * (read_bytes + (1 + has_previous) * own.element_bytes)
        work = Work(memory_bytes=float(moved_bytes), kernels=2 * len(args.runs))
        reads = [*arrived, *([accumulator] if kept else []), squares, *([held] if has_previous else [])]
        writes = [held, squares, partial_squares]
        label = CommandName("fold", "grad", own.name)
        self._builder.add("fold", label, stream, reads, writes, work, args=args)
        if staging is not None:
            home = CommandName("offload", "grad", own.name)
            self._builder.copy(home, Stream.RELAY_OUT, own.content, own.regions_home(staging))
        self._own[own.group].append(own)
        self._last_stored[own.group] = len(self._builder.commands) - 1

    def _own_ranges(self, group: int) -> list[OwnRange]:
        """The elements of a group whose gradients this rank has stored in this round, those that adjoin as one."""
        found = list[OwnRange]()
        for own in self._own[group]:
            for run, (slot, first) in zip(own.piece.runs, own.homes, strict=True):
                here = OwnRange(run.first, run.numel, slot, first)
                last = found[-1] if found else OwnRange(-1, 0, -1, -1)
                ends = (last.first + last.numel, last.slot, last.slot_first + last.numel)
                if ends == (here.first, here.slot, here.slot_first):
                    found[-1] = last._replace(numel=last.numel + here.numel)
                else:
                    found.append(here)
        return found

    def _stored_at_home(self, group: int) -> list[Access]:
        """What this rank has stored in this round of a group's gradient, where it lies."""
        return list(dict.fromkeys(Access(home, own.content) for own in self._own[group] for home, _ in own.homes))

    def _take(self, role: Role, group: int) -> int:
        key = role, self._context.model.groups[group].slot_class
        if key not in self._slots:
            self._slots[key] = SlotRing(self._layout.ring(*key))
        return self._slots[key].take()


def _spilled(name: str, section: Section) -> str:
    """What a slot holds with pieces of a tied group that wait for those of its other layer."""
    return f"spilled pieces of {name} section {section.number}"


class SplitRound(RoundLowering):
    """A round of one of several ranks that walk the layers together."""

    context: SharedContext
    gradients: SplitGradients

    def __init__(self, layout: Layout, shape: RoundShape, kind: RoundKind) -> None:
        ranks = layout.plan.request.ranks
        self._wave = kind.wave or Wave(0, ranks, ranks)
        super().__init__(layout, shape, kind)

    def make_context(self) -> SharedContext:
        return SharedContext(self.layout, self.shape, self.builder)

    def make_weights(self) -> WeightLowering:
        return SplitWeights(self.context, self._wave)

    def make_gradients(self, updated: InRound) -> SplitGradients:
        return SplitGradients(self.context, self.kind, self._wave)

    def _before_gradients_leave(self, index: int, layer: LayerSpec, at: StagePart) -> None:
        """Bring the weights of the stage that follows in backward, if one does.

        Ranks run collectives in program order, and an exchange waits for the stage that is at work. Slots of edges
        that lie over the blocks' would take the place of what is sent.
        """
        self.gradients.add_up(Stream.COMPUTE)
        if layer.kind != "block" and self.layout.plan.share_edge_slots:
            return
        later = [(index, stage) for stage in self._stages_of(index)]
        later = later[later.index((index, at)) + 1 :]
        if not later and index > 0 and self.model.layers[index - 1].has_backward:
            later = [(index - 1, stage) for stage in self._stages_of(index - 1)]
        if later:
            below = self.model.layers[later[0][0]]
            self.weights.acquire(below, later[0][1], below.backward_groups)


class SplitUpdate(SharedUpdate):
    """An update before which ranks have added up their tables of squares; several nodes have done so before."""

    def sums_of_squares(self) -> Access:
        layout, norms = self.layout, Access(self.layout.slot("norm_squares"), "norm squares")
        if self.kind.norm_known or layout.plan.request.nodes > 1:
            self.builder.holds(*norms)
        if layout.plan.request.nodes == 1:
            if self.kind.norm_known:
                self.builder.holds(layout.slot("run_squares"), ALL_SQUARES)
            else:
                add_squares(self.builder, layout)
        return norms

    def tile_sources(self) -> list[Access]:
        """The sum of the tables, which none has before all have stored their pieces."""
        one_node = self.layout.plan.request.nodes == 1
        return [Access(self.layout.slot("run_squares"), ALL_SQUARES)] if one_node else []


def add_squares(builder: ProgramBuilder, layout: Layout, stored: Sequence[Access] = ()) -> None:
    """Add up what all ranks have in their tables, which is zero where a rank owns no piece; so no sum is rounded.

    No rank has the result before all have stored all their pieces, so what reads gradients waits for it. stored: those
    that the same program has stored.
    """
    table, norms = layout.slot("run_squares"), Access(layout.slot("norm_squares"), "norm squares")
    own, whole = Access(table, OWN_SQUARES), Access(table, ALL_SQUARES)
    if builder.last_writer(table) < 0:
        builder.holds(*own)
    args = AddTables(table, layout.slots[table].num_bytes, layout.plan.request.ranks)
    builder.add("add_squares", CommandName("add", "squares"), Stream.COMM, [own, *stored], [whole], args=args)
    work = Work(kernels=2 * len(layout.groups))
    builder.add("sum_squares", CommandName("sum", "squares"), Stream.COMPUTE, [whole], [norms], work)
