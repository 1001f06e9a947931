"""Gradients of a round: accumulators become stored gradients, which go home; the CPU's updates in a last round."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Work
from flexengine.schedule.commands import Access, CommandName, CopyRegion, FinishGradient, GroupScale, Stream
from flexengine.schedule.fixed_slots import HOST_SCALES
from flexengine.schedule.group_uses import group_uses
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.context import RoundContext, SlotRing
from flexengine.schedule.lowering.split import ExchangeLowering
from flexengine.schedule.lowering.stored_gradient import StoredPiece, stored_pieces
from flexengine.schedule.lowering.update import cpu_groups, lower_cpu_update, lower_norm, lower_speculative_update
from flexengine.schedule.slots import Slot


class ScaleSlots(NamedTuple):
    """Where the factor on one group's gradient lies on both sides."""

    device: int
    host: int


def scale_slots(layout: Layout) -> tuple[dict[int, ScaleSlots], tuple[Slot, ...]]:
    """A slot on either side for each factor that the CPU needs, and the layout's slots with these behind them.

    They lie within the slots of all factors. With slots of their own, no group's update waits for another's factor.
    """
    slots, found = list(layout.slots), {}
    device, host, width = layout.place("scales"), layout.place("scalars", memory="host"), layout.acc_bytes
    for group in cpu_groups(layout):
        found[group] = ScaleSlots(len(slots), len(slots) + 1)
        for whole, start in ((device, 0), (host, HOST_SCALES)):
            slots.append(whole.subslot((group,), start + width * group, width, "scalars"))
    return found, tuple(slots)


class GradientLowering:
    """Finishes gradients. first: no gradients are stored yet in this step. scales: groups that the CPU updates here.

    speculates: the CPU updates here what the plan says, into second planes.
    """

    def __init__(
        self, context: RoundContext, first: bool, scales: dict[int, ScaleSlots], speculates: bool = False
    ) -> None:
        self._context, self._builder, self._layout = context, context.builder, context.layout
        self._first, self._scales, self._speculates = first, scales, speculates
        self._stored: set[tuple[int, int]] = set()  # parts of groups that this round has stored
        self._uses = group_uses(context.layout.model)
        self._spilled: set[tuple[int, int]] = set()  # parts of groups of which the host holds an accumulator
        self._rings: dict[str, SlotRing] = {}
        self._untold: list[int] = []  # groups of which this rank updates nothing, and has yet to tell so
        self._exchange = None if context.wave is None else ExchangeLowering(context, context.wave, first)

    def accumulators(self, layer: LayerSpec, begun: bool) -> dict[int, int]:
        """Slots of the accumulators of a layer's trained groups. begun: an earlier stage of the layer had some."""
        if self._exchange is not None:
            return {group: self._exchange.accumulator(group, begun) for group in self._trained(layer)}
        classes = {group: self._context.model.groups[group].slot_class for group in self._trained(layer)}
        return {group: self._layout.slot("accumulator", name) for group, name in classes.items()}

    def finish(self, group: int, part: int, accumulator: int) -> None:
        """Round the accumulator into the stored gradient, adding what earlier rounds stored, and send it home.

        Several ranks relay a gradient once a round: until the last layer that adds to it, accumulators are spilled, and
        added just before that layer's. So the bits are those of one rank, which adds and rounds layer by layer. If
        ranks did that while other layers are still to come, none could begin its backward before the rank of the round
        before has ended its own.
        """
        if self._exchange is not None:
            self._exchange.finish(group, part, Access(accumulator, self._accumulated(group, part)))
            return
        key, relayed = (group, part), self._context.cells is not None
        if relayed and key not in self._spilled and self._uses[group].gradients > 1:
            self._spill(group, part, accumulator)
            return
        has_previous = not self._first or key in self._stored
        self._stored.add(key)
        for stored in stored_pieces(self._context, group, part):
            staging, previous = self._fetch_stored(stored, has_previous), has_previous
            if key in self._spilled:
                self._add_spilled(stored, staging, previous)
                previous = True
            self._round(stored, Access(accumulator, self._accumulated(group, part)), previous, staging)
            if staging is not None:
                self._send_home(stored, staging)

    def update_complete_groups(self, index: int, layer: LayerSpec) -> None:
        """Update on the CPU those of a layer's groups that no layer below adds to."""
        for group in self._trained(layer):
            if any(group in below.groups for below in self._context.model.layers[:index]):
                continue
            if group in self._scales:
                self._update_by_cpu(group)
            elif self._speculates and self._context.plan.groups[group].speculative:
                self._speculate(group)

    def lower_norm(self) -> None:
        """Tell the host the norm of all gradients, with which a round ends that speculates."""
        stored = [] if self._exchange is None else self._exchange.stored_at_home()
        lower_norm(self._builder, self._layout, stored)
        if self._untold:
            assert self._context.cells is not None, "one rank tells nobody"
            signals = tuple(self._context.cells.speculated(group) for group in self._untold)
            self._builder.between_ranks(-1, signals=signals)

    def _speculate(self, group: int) -> None:
        """Update a group, or what this rank has stored of it, into its second planes."""
        if self._exchange is None:
            lower_speculative_update(self._builder, self._layout, group, self._stored_at_home(group))
            return
        own = self._exchange.own_ranges(group)
        last = lower_speculative_update(self._builder, self._layout, group, self._exchange.stored_at_home(group), own)
        if last < 0:
            self._untold.append(group)
            return
        assert self._context.cells is not None, "ranks of a split plan have cells"
        self._builder.between_ranks(last, signals=(self._context.cells.speculated(group),))

    def _trained(self, layer: LayerSpec) -> list[int]:
        return [group for group in layer.groups if not self._context.model.groups[group].frozen]

    def _fetch_stored(self, stored: StoredPiece, has_previous: bool) -> int | None:
        """The staging slot to add to, with what earlier rounds stored; None where that stays on the GPU."""
        if has_previous:
            for home, _ in stored.homes:
                self._builder.holds(home, stored.content)
        if self._layout.homes[stored.group].grads == "gpu":
            return None
        staging, cells = self._staging_slot(stored.group), self._context.cells
        if has_previous:
            back = [region.reversed for region in stored.regions_home(staging)]
            stream = Stream.H2D if cells is None else Stream.RELAY_IN
            self._builder.copy(CommandName("fetch", "grad", stored.name), stream, stored.content, back)
            if cells is not None:
                awaits = cells.relayed_before(stored.group, stored.part, stored.number)
                self._builder.between_ranks(-1, awaits=(awaits,))
        return staging

    def _send_home(self, stored: StoredPiece, staging: int) -> None:
        cells = self._context.cells
        stream = Stream.D2H if cells is None else Stream.RELAY_OUT
        name = CommandName("offload", "grad", stored.name)
        self._builder.copy(name, stream, stored.content, stored.regions_home(staging))
        if cells is not None:
            signal = cells.relayed(stored.group, stored.part, stored.number)
            self._builder.between_ranks(-1, signals=(signal,))

    def _accumulated(self, group: int, part: int) -> str:
        return f"accumulator {self._context.part_name(group, part)}"

    def _spill(self, group: int, part: int, accumulator: int) -> None:
        """Keep an accumulator on the host, in full width."""
        assert part == 0, "one slot holds what one layer spills"
        self._spilled.add((group, part))
        for stored in stored_pieces(self._context, group, part):
            region = self._spilled_region(stored, accumulator, stored.piece.start)
            target = [Access(region.target, self._spilled_content(stored))]
            source = [Access(accumulator, self._accumulated(group, part))]
            name = CommandName("offload", "spilled", stored.name)
            self._builder.add("copy", name, Stream.D2H, source, target, copies=(region,))

    def _add_spilled(self, stored: StoredPiece, staging: int | None, has_previous: bool) -> None:
        """Add the same piece of what another layer spilled; its squares do not count."""
        assert staging is not None, "ranks store gradients in the node's memory"
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

    def _staging_slot(self, group: int) -> int:
        name = self._context.model.groups[group].slot_class
        if name not in self._rings:
            self._rings[name] = SlotRing(self._layout.ring("grad", name))
        return self._rings[name].take()

    def _round(
        self, stored: StoredPiece, accumulator: Access, has_previous: bool, staging: int | None,
        spilled: int | None = None,
    ) -> None:  # fmt: skip
        """Append the command that rounds; it writes the staging slot, or the homes where there is none.

        spilled: the element of the part that the slot of a spilled accumulator begins with; another is still to come.
        """
        runs = stored.stored_runs(spilled or 0, staging, self._layout.first_run(stored.group))
        targets = [Access(slot, stored.content) for slot in dict.fromkeys(run.slot for run in runs)]
        squares = [
            Access(self._layout.slot("partial_squares"), "partial squares"),
            Access(self._layout.slot("norm_squares"), "norm squares"),
        ]
        reads = [accumulator, *(targets if has_previous else []), *(squares if runs[0].before else [])]
        element_bytes = self._layout.acc_bytes + stored.element_bytes * (1 + has_previous)
        moved_bytes = float(sum(run.numel for run in runs) * element_bytes)
        work, name = Work(memory_bytes=moved_bytes, kernels=2 * len(runs)), CommandName("finish", "grad", stored.name)
        args = FinishGradient(stored.group, accumulator.slot, runs, has_previous, squares=spilled is None)
        writes = [*targets, *squares]
        self._builder.add("finish_gradient", name, Stream.COMPUTE, reads, writes, work, args=args)

    def _update_by_cpu(self, group: int) -> None:
        """Tell the host the factor on a gradient that is complete, and run AdamW there."""
        name, (device, host) = self._context.model.groups[group].name, self._scales[group]
        norms, content = Access(self._layout.slot("norm_squares"), "norm squares"), f"scale of {name}"
        args, work = GroupScale(group), Work(kernels=6)
        label = CommandName("scale", owner=name)
        self._builder.add("scale", label, Stream.COMPUTE, [norms], [Access(device, content)], work, args=args)
        region = CopyRegion(device, 0, host, 0, self._layout.acc_bytes)
        self._builder.copy(CommandName("offload", "scale", name), Stream.D2H, content, [region])
        grads = self._stored_at_home(group)
        lower_cpu_update(self._builder, self._layout, group, Access(host, content), grads=grads)

    def _stored_at_home(self, group: int) -> list[Access]:
        """What the round has left of a group's gradient, where it lies from step to step."""
        grads = [
            Access(home, stored.content)
            for part in range(len(self._layout.groups[group].parts))
            for stored in stored_pieces(self._context, group, part)
            for home, _ in stored.homes
        ]
        return list(dict.fromkeys(grads))
