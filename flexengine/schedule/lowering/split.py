"""A round of one of several ranks that walk the layers together: fetches in shares, exchanges of accumulators."""

from __future__ import annotations

from collections import defaultdict

from flexengine.ops.base import Work
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Stream
from flexengine.schedule.group_uses import group_uses
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.context import RoundContext, SlotRing
from flexengine.schedule.lowering.stored_gradient import StoredPiece, stored_pieces
from flexengine.schedule.lowering.update import OwnRange
from flexengine.schedule.program_builder import ProgramBuilder, merge_regions
from flexengine.schedule.ranks.split_commands import ExchangeParts, FoldParts, GatherShares, ReceivedParts, ShareOfFetch
from flexengine.schedule.ranks.waves import OWN_SQUARES, Section, Wave, end_of, own_regions, shared_bytes
from flexengine.schedule.slots import Role


def fetch_share(
    builder: ProgramBuilder, wave: Wave, name: CommandName, content: str, regions: list[CopyRegion]
) -> None:
    """Append the copy of this rank's share of what `regions` bring to a slot, and gather the others' shares."""
    [target] = {region.target for region in regions}
    whole = merge_regions(regions)
    own = merge_regions(own_regions(whole, wave.rank, wave.size))
    share = shared_bytes(end_of(whole), wave.size)
    held = f"share of {content}" if share else content
    reads = [Access(source, content) for source in dict.fromkeys(region.source for region in whole)]
    args = ShareOfFetch(wave.rank, wave.size, whole)
    builder.add("copy", name, Stream.H2D, reads, [Access(target, held)], copies=own, args=args)
    if share:
        gathered, shares = name._replace(verb="gather"), GatherShares(wave.rank, target, share, wave.size)
        builder.add("gather", gathered, Stream.COMM, [Access(target, held)], [Access(target, content)], args=shares)


def run_squares(layout: Layout, content: str) -> Access:
    """The table of partial sums of squares of all runs."""
    return Access(layout.slot("run_squares"), content)


class ExchangeLowering:
    """Sends accumulators to the ranks that own their pieces, and adds up what arrives. first: nothing is stored yet.

    Two layers add to a tied group. What arrives of the first one waits on the host, so that each round's gradient of
    the first is added before that of the second, and after those of earlier rounds.
    """

    def __init__(self, context: RoundContext, wave: Wave, first: bool) -> None:
        self._context, self._builder, self._layout = context, context.builder, context.layout
        self._wave, self._first = wave, first
        self._rings: dict[tuple[Role, str], SlotRing] = {}
        self._uses = group_uses(self._layout.model)
        self._spilled: set[int] = set()  # groups of which the host holds what arrived of one layer's accumulators
        self._accumulators: dict[int, int] = {}  # by group, the slot that is added to
        self._own: dict[int, list[StoredPiece]] = defaultdict(list)  # by group, what this rank has stored
        squares = run_squares(self._layout, OWN_SQUARES)
        if first:
            name = CommandName("clear", "squares")
            self._builder.add("clear_squares", name, Stream.COMM, [], [squares], Work(kernels=1))
        else:
            self._builder.holds(*squares)

    def accumulator(self, group: int, begun: bool) -> int:
        """The slot of a group's accumulator: the next one for every part, or for a layer whose stages have not begun.

        What the slot before holds may still be on its way to the other ranks.
        """
        if self._context.is_in_parts(group) or not begun:
            self._accumulators[group] = self._take("accumulator", group)
        return self._accumulators[group]

    def finish(self, group: int, part: int, accumulator: Access) -> None:
        """Exchange an accumulator section by section, and store this rank's pieces of the gradient."""
        name = self._context.part_name(group, part)
        if self._uses[group].gradients > 1 and group not in self._spilled:
            self._spill(group, name, accumulator)
            return
        stored = stored_pieces(self._context, group, part)
        for section in self._layout.sections(group, part):
            received = self._exchange(name, section, accumulator, self._take("received", group))
            own = stored[section.number * self._wave.size + self._wave.rank]
            arrived = [self._fetch_spilled(group, name, section)] if group in self._spilled else []
            staging = self._take("grad", group)
            if own.piece.runs:
                self._fold(own, section, [*arrived, received], staging)
            else:  # others write there, and all ranks have to gather again what that overwrites
                self._builder.overwritten(staging)

    def _exchange(self, name: str, section: Section, accumulator: Access, slot: int) -> Access:
        wave, element_bytes = self._wave, self._layout.acc_bytes
        received = Access(slot, f"pieces of {name} section {section.number}")
        args = ExchangeParts(wave.rank, accumulator.slot, section.first, section.counts, slot, element_bytes)
        label = CommandName("exchange", "grad", f"{name} section {section.number}")
        self._builder.add("exchange", label, Stream.COMM, [accumulator], [received], args=args)
        return received

    def _spill(self, group: int, name: str, accumulator: Access) -> None:
        """Keep what arrives of all ranks' accumulators on the host."""
        self._spilled.add(group)
        for section in self._layout.sections(group, 0):
            received = self._exchange(name, section, accumulator, self._take("received", group))
            region = self._spilled_region(group, section, received.slot)
            target = [Access(region.target, _spilled(name, section))]
            label = CommandName("offload", "spilled", f"{name} section {section.number}")
            self._builder.add("copy", label, Stream.D2H, [received], target, copies=(region,))

    def _fetch_spilled(self, group: int, name: str, section: Section) -> Access:
        slot = self._layout.slot("spilled", self._context.model.groups[group].slot_class)
        back = [self._spilled_region(group, section, slot).reversed]
        label = CommandName("fetch", "spilled", f"{name} section {section.number}")
        self._builder.copy(label, Stream.RELAY_IN, _spilled(name, section), back)
        return Access(slot, _spilled(name, section))

    def _spilled_region(self, group: int, section: Section, slot: int) -> CopyRegion:
        home = self._layout.spilled_section(group, section.number)
        return CopyRegion(slot, 0, home, 0, self._layout.slots[home].num_bytes)

    def _fold(self, own: StoredPiece, section: Section, arrived: list[Access], staging: int) -> None:
        """Add this rank's piece of all rounds to what earlier rounds stored of it, and send the sum home."""
        wave, has_previous = self._wave, not self._first
        held = Access(staging, own.content)
        if has_previous:
            for home, _ in own.homes:
                self._builder.holds(home, own.content)
            back = [region.reversed for region in own.regions_home(staging)]
            self._builder.copy(CommandName("fetch", "grad", own.name), Stream.RELAY_IN, own.content, back)
        squares = run_squares(self._layout, OWN_SQUARES)
        partial = Access(self._layout.slot("partial_squares"), "partial squares")
        numel = section.counts[wave.rank]
        args = FoldParts(
            own.group,
            tuple(ReceivedParts(access.slot, numel) for access in arrived),
            wave.rounds,
            own.stored_runs(own.piece.start, staging, self._layout.first_run(own.group)),
            has_previous,
        )
        added = wave.rounds * len(arrived)
        moved_bytes = numel * (added * (self._layout.acc_bytes + 2 * own.element_bytes))
        work = Work(memory_bytes=float(moved_bytes), kernels=added * len(args.runs))
        reads, writes = [*arrived, squares, *([held] if has_previous else [])], [held, squares, partial]
        label = CommandName("fold", "grad", own.name)
        self._builder.add("fold", label, Stream.COMM, reads, writes, work, args=args)
        home = CommandName("offload", "grad", own.name)
        self._builder.copy(home, Stream.RELAY_OUT, own.content, own.regions_home(staging))
        self._own[own.group].append(own)

    def own_ranges(self, group: int) -> list[OwnRange]:
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

    def stored_at_home(self, group: int | None = None) -> list[Access]:
        """What this rank has stored in this round of one group's gradient, or of all, where it lies."""
        groups = list(self._own) if group is None else [group]
        homes = [Access(home, own.content) for g in groups for own in self._own[g] for home, _ in own.homes]
        return list(dict.fromkeys(homes))

    def _take(self, role: Role, group: int) -> int:
        key = role, self._context.model.groups[group].slot_class
        if key not in self._rings:
            self._rings[key] = SlotRing(self._layout.ring(*key))
        return self._rings[key].take()


def _spilled(name: str, section: Section) -> str:
    """What a slot holds with pieces of a tied group that wait for those of its other layer."""
    return f"spilled pieces of {name} section {section.number}"
