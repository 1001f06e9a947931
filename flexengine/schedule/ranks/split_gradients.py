"""Gradients of one of several ranks that walk the layers together: exchanges of accumulators, and sums of what arrives.

A sum is a kernel that takes multiprocessors from the product beside it, or waits for them until that one ends. So sums
are commands of the compute stream, between chunks of the layer below, by when the pieces have arrived.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Work
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Stream
from flexengine.schedule.group_uses import group_uses
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.context import SlotRing
from flexengine.schedule.lowering.cpu_update import OwnRange, lower_speculative_update
from flexengine.schedule.lowering.gradients import GradientLowering, nothing_in_round
from flexengine.schedule.lowering.kinds import RoundKind, Wave
from flexengine.schedule.lowering.stored_gradient import StoredPiece, stored_pieces
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.ranks.relay_lowering import SharedContext
from flexengine.schedule.ranks.split_commands import AddTables, ExchangeParts, FoldParts, ReceivedParts
from flexengine.schedule.ranks.waves import ALL_SQUARES, OWN_SQUARES, Section
from flexengine.schedule.slots import Role


def run_squares(layout: Layout, content: str) -> Access:
    """The table of partial sums of squares of all runs."""
    return Access(layout.slot("run_squares"), content)


@dataclass
class _Arriving:
    """A section of an accumulator that ranks exchange, and of which this one stores a piece.

    received: where pieces of all ranks arrive, from when it is sent. staging: the slot for their sum; None of a shard.
    """

    own: StoredPiece
    section: Section
    name: str
    accumulator: Access
    received: Access | None = None
    staging: int | None = None


class _Complete(NamedTuple):
    """A layer whose gradients are stored when those before it in the queue are."""

    index: int
    layer: LayerSpec


class SplitGradients(GradientLowering):
    """Sends accumulators to the ranks that own their pieces, and adds up what arrives while the next layer runs.

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
        self._queue = deque[_Arriving | _Complete]()
        self._queued = 0  # sections that the layer above has left
        self._over_blocks = False  # whether the layer at work has slots that lie over the blocks'
        self._own: dict[int, list[StoredPiece]] = defaultdict(list)  # by group, what this rank has stored
        self._last_stored: dict[int, int] = {}  # by group, the last command that stores it, or its first exchange
        self._untold: list[int] = []  # groups of which this rank updates nothing, and has yet to tell so
        squares = run_squares(self._layout, OWN_SQUARES)
        if self._first:
            name = CommandName("clear", "squares")
            self._builder.add("clear_squares", name, Stream.COMM, [], [squares], Work(kernels=1))
        else:
            self._builder.holds(*squares)

    def accumulators(self, layer: LayerSpec, begun: bool) -> dict[int, int]:
        """As on one rank: the next slot for every part, or for a layer whose stages have not begun.

        What the slot before holds may still be on its way to the other ranks. Edges may lie over slots of blocks, and
        no chunk of the embedding is long enough to hide an exchange.
        """
        if layer.kind != "block":
            self._add_up_all()
        self._over_blocks = layer.kind != "block" and self._context.plan.share_edge_slots
        for group in self._trained(layer):
            if self._context.is_in_parts(group) or not begun:
                self._at_work[group] = self._take("accumulator", group)
        return {group: self._at_work[group] for group in self._trained(layer)}

    def finish(self, group: int, part: int, accumulator: int) -> None:
        """Exchange an accumulator section by section; this rank's pieces of the gradient are stored when they are here.

        Sections for which slots would not be free in time are added up at once.
        """
        name, added = self._context.part_name(group, part), Access(accumulator, self._accumulated(group, part))
        if self._uses[group].gradients > 1 and group not in self._spilled:
            self._add_up_all()
            self._spill(group, name, added)
            return
        stored, sections = stored_pieces(self._context, group, part), self._layout.sections(group, part)
        for section in sections:
            own = stored[section.number * self._wave.size + self._wave.rank]
            self._queue.append(_Arriving(own, section, name, added))
        self._send()
        slots = len(self._layout.ring("received", self._context.model.groups[group].slot_class))
        while self._sections_left() > slots * len(self._context.chunks):
            self._add_up(Stream.COMM)
        if self._over_blocks:
            self._add_up_all()
        self._queued = self._sections_left()

    def update_waiting(self, turns: int = 1) -> None:
        """Add up sections that have been sent, all that wait in equal shares for the chunks of the layer at work."""
        sent = sum(isinstance(entry, _Arriving) and entry.received is not None for entry in self._queue)
        chunks = len(self._context.chunks)
        while sent and turns * self._queued <= (self._sections_left() - 1) * chunks:
            self._add_up(Stream.COMPUTE)
            sent -= 1

    def before_gradients_leave(self) -> None:
        """Add up what the layer above has left, before the next one takes its accumulator's slot."""
        self.update_waiting(turns=0)
        self._add_up_all()

    def end_round(self) -> None:
        self._add_up_all()

    def update_complete_groups(self, index: int, layer: LayerSpec) -> None:
        """As on one rank, when all are stored."""
        if self._queue:
            self._queue.append(_Complete(index, layer))
        else:
            self._complete(index, layer)

    def _complete(self, index: int, layer: LayerSpec) -> None:
        """Tell the other ranks of groups that no layer below adds to, where several nodes add up what all have stored;
        then go on as one rank does."""
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

    def _sections_left(self) -> int:
        return sum(isinstance(entry, _Arriving) for entry in self._queue)

    def _send(self) -> None:
        """Exchange the sections of the queue for which a slot is free: one whose pieces have been added up."""
        at_work: dict[str, int] = defaultdict(int)
        for entry in self._queue:
            if isinstance(entry, _Complete):
                continue
            name = self._context.model.groups[entry.own.group].slot_class
            if entry.received is None and at_work[name] == len(self._layout.ring("received", name)):
                return
            at_work[name] += 1
            if entry.received is None:
                self._send_section(entry)

    def _send_section(self, entry: _Arriving) -> None:
        """Exchange a section, and bring what earlier rounds have stored of this rank's piece."""
        own, group = entry.own, entry.own.group
        slot = self._take("received", group)
        entry.received = self._exchange(entry.name, entry.section, entry.accumulator, slot, group)
        self._last_stored.setdefault(group, len(self._builder.commands) - 1)
        entry.staging = None if self._layout.homes[group].sharded else self._take("grad", group)
        if not own.piece.runs:
            if entry.staging is not None:  # others write there, and all ranks gather again what that overwrites
                self._builder.overwritten(entry.staging)
            return
        if not self._first:
            for home, _ in own.homes:
                self._builder.holds(home, own.content)
            if entry.staging is not None:
                back = [region.reversed for region in own.regions_home(entry.staging)]
                self._builder.copy(CommandName("fetch", "grad", own.name), Stream.RELAY_IN, own.content, back)

    def _add_up_all(self) -> None:
        """Add up all that waits beside what the compute stream does."""
        while self._queue:
            self._add_up(Stream.COMM)

    def _add_up(self, stream: Stream) -> None:
        """Add up the first section of the queue, end the layers of which it was the last, and send what now has a slot.

        stream: of the sum.
        """
        first = self._queue.popleft()
        assert isinstance(first, _Arriving), "layers end with their last section"
        if first.own.piece.runs:
            self._fold(first, stream)
        while self._queue and isinstance(self._queue[0], _Complete):
            ended = self._queue.popleft()
            self._complete(*ended)
        self._send()

    def _exchange(self, name: str, section: Section, accumulator: Access, slot: int, group: int) -> Access:
        received = Access(slot, f"pieces of {name} section {section.number}")
        args = self._exchanged(section, accumulator.slot, slot, group)
        label = CommandName("exchange", "grad", f"{name} section {section.number}")
        self._builder.add("exchange", label, Stream.COMM, [accumulator], [received], args=args)
        return received

    def _exchanged(self, section: Section, accumulator: int, slot: int, group: int) -> ExchangeParts:
        """A tied group's pieces lie together, also this rank's, as they do where they are spilled."""
        wave, tied = self._wave, self._uses[group].gradients > 1
        return ExchangeParts(
            wave.rank, accumulator, section.first, section.counts, slot, self._layout.acc_bytes, brings_own=tied
        )

    def _spill(self, group: int, name: str, accumulator: Access) -> None:
        """Keep what arrives of all ranks' accumulators on the host."""
        self._spilled.add(group)
        for section in self._layout.sections(group, 0):
            received = self._exchange(name, section, accumulator, self._take("received", group), group)
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

    def _fold(self, entry: _Arriving, stream: Stream) -> None:
        """Add this rank's piece of all rounds to what earlier rounds stored of it, and send the sum home."""
        own, section, staging = entry.own, entry.section, entry.staging
        wave, has_previous = self._wave, not self._first
        assert entry.received is not None, "it has been sent"
        spilled = [self._fetch_spilled(own.group, entry.name, section)] if own.group in self._spilled else []
        arrived = [*spilled, entry.received]
        held = Access(own.homes[0][0] if staging is None else staging, own.content)
        squares = run_squares(self._layout, OWN_SQUARES)
        partial = Access(self._layout.slot("partial_squares"), "partial squares")
        numel = section.counts[wave.rank]
        sent = self._exchanged(section, entry.accumulator.slot, entry.received.slot, own.group)
        own_piece = None if sent.brings_own or wave.rank >= wave.rounds else sent.own
        args = FoldParts(
            own.group,
            tuple(ReceivedParts(access.slot, numel) for access in arrived),
            wave.rounds,
            own_piece,
            own.stored_runs(own.piece.start, staging, self._layout.first_run(own.group)),
            has_previous,
        )
        read_bytes = wave.rounds * len(arrived) * self._layout.acc_bytes
        moved_bytes = numel * (read_bytes + (1 + has_previous) * own.element_bytes)
        work = Work(memory_bytes=float(moved_bytes), kernels=2 * len(args.runs))
        reads = [*arrived, squares, *([held] if has_previous else []), *([entry.accumulator] if own_piece else [])]
        writes = [held, squares, partial]
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
