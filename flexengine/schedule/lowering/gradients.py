"""Gradients of a round: accumulators become stored gradients, which go home; the CPU's updates in a last round."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Work
from flexengine.schedule.commands import Access, CommandName, CopyRegion, FinishGradient, GroupScale, StoredRun, Stream
from flexengine.schedule.fixed_slots import HOST_SCALES, SCALE_BYTES
from flexengine.schedule.group_uses import group_uses
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.context import RoundContext, SlotRing
from flexengine.schedule.lowering.update import cpu_groups, lower_cpu_update
from flexengine.schedule.parts import Run
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
    device, host = layout.place("scales"), layout.place("scalars", memory="host")
    for group in cpu_groups(layout):
        found[group] = ScaleSlots(len(slots), len(slots) + 1)
        for whole, start in ((device, 0), (host, HOST_SCALES)):
            slots.append(whole.subslot((group,), start + SCALE_BYTES * group, SCALE_BYTES, "scalars"))
    return found, tuple(slots)


class _StoredPart(NamedTuple):
    """A group's part of the stored gradient: its runs, and for each the slot and first element of its home."""

    group: int
    name: str
    content: str
    runs: tuple[Run, ...]
    homes: list[tuple[int, int]]
    element_bytes: int

    def regions_home(self, staging: int) -> list[CopyRegion]:
        """Copies from a staging slot to the runs' homes."""
        width = self.element_bytes
        return [
            CopyRegion(staging, run.start * width, home, first * width, run.numel * width)
            for run, (home, first) in zip(self.runs, self.homes, strict=True)
        ]

    def stored_runs(self, staging: int | None, first_run: int) -> tuple[StoredRun, ...]:
        """Where the accumulator's runs go: to a staging slot, or to their homes where there is none."""
        places = self.homes if staging is None else [(staging, run.start) for run in self.runs]
        return tuple(
            StoredRun(run.start, slot, first, run.numel, first_run + run.number)
            for run, (slot, first) in zip(self.runs, places, strict=True)
        )


class GradientLowering:
    """Finishes gradients. first: no gradients are stored yet in this step. scales: groups that the CPU updates here."""

    def __init__(self, context: RoundContext, first: bool, scales: dict[int, ScaleSlots]) -> None:
        self._context, self._builder, self._layout = context, context.builder, context.layout
        self._first, self._scales = first, scales
        self._stored: set[tuple[int, int]] = set()  # parts of groups that this round has stored
        self._uses = group_uses(context.layout.model)
        self._spilled: set[tuple[int, int]] = set()  # parts of groups of which the host holds an accumulator
        self._staged: dict[tuple[int, int], int] = {}  # staging slots that spilled accumulators were added to
        self._rings: dict[str, SlotRing] = {}

    def accumulators(self, layer: LayerSpec) -> dict[int, int]:
        """Slots of the accumulators of a layer's trained groups."""
        classes = {group: self._context.model.groups[group].slot_class for group in self._trained(layer)}
        return {group: self._layout.slot("accumulator", name) for group, name in classes.items()}

    def add_spilled(self, part: int, accumulators: dict[int, int]) -> None:
        """Before the last layer that adds to a gradient, add what the others spilled, in an accumulator slot.

        So the bits are those of one rank, which adds and rounds layer by layer. If ranks did that while other layers
        are still to come, none could begin its backward before the rank of the round before has ended its own.
        """
        for group, accumulator in accumulators.items():
            if (group, part) not in self._spilled:
                continue
            stored, spilled = self._stored_part(group, part), self._spill_regions(group, part, accumulator)
            back, content = [region.reversed for region in spilled], f"accumulator {stored.name}"
            self._builder.copy(CommandName("fetch", "spilled", stored.name), Stream.H2D, content, back)
            staging = self._fetch_stored(stored, part, not self._first)
            self._round(stored, accumulator, not self._first, staging)
            self._stored.add((group, part))
            assert staging is not None, "ranks store gradients in the node's memory"
            self._staged[group, part] = staging

    def finish(self, group: int, part: int, accumulator: int) -> None:
        """Round the accumulator into the stored gradient, adding what earlier rounds stored, and send it home.

        Several ranks relay a gradient once a round: until the last layer that adds to it, accumulators are spilled.
        """
        stored = self._stored_part(group, part)
        cells = self._context.cells
        if cells is not None and (group, part) not in self._spilled and self._uses[group].gradients > 1:
            self._spill(stored, part, accumulator)
            return
        has_previous = not self._first or (group, part) in self._stored
        self._stored.add((group, part))
        staging = self._staged.pop((group, part), None)
        if staging is None:
            staging = self._fetch_stored(stored, part, has_previous)
        self._round(stored, accumulator, has_previous, staging)
        if staging is not None:
            self._builder.copy(
                CommandName("offload", "grad", stored.name), Stream.D2H, stored.content, stored.regions_home(staging)
            )
            if cells is not None:
                self._builder.between_ranks(-1, signals=(cells.relayed(group, part),))

    def update_complete_groups(self, index: int, layer: LayerSpec) -> None:
        """Update on the CPU those of a layer's groups that no layer below adds to."""
        for group in self._trained(layer):
            if group in self._scales and not any(group in below.groups for below in self._context.model.layers[:index]):
                self._update_by_cpu(group)

    def _trained(self, layer: LayerSpec) -> list[int]:
        return [group for group in layer.groups if not self._context.model.groups[group].frozen]

    def _fetch_stored(self, stored: _StoredPart, part: int, has_previous: bool) -> int | None:
        """The staging slot to add to, with what earlier rounds stored; None where that stays on the GPU."""
        if has_previous:
            for home, _ in stored.homes:
                self._builder.holds(home, stored.content)
        if self._context.plan.groups[stored.group].grads == "gpu":
            return None
        staging = self._staging_slot(stored.group)
        if has_previous:
            back = [region.reversed for region in stored.regions_home(staging)]
            self._builder.copy(CommandName("fetch", "grad", stored.name), Stream.H2D, stored.content, back)
            if self._context.cells is not None:
                awaits = self._context.cells.relayed_before(stored.group, part)
                self._builder.between_ranks(-1, awaits=(awaits,))
        return staging

    def _spill(self, stored: _StoredPart, part: int, accumulator: int) -> None:
        """Keep an accumulator on the host, in full width."""
        assert (stored.group, part) not in self._spilled, "one slot holds what one layer spills"
        self._spilled.add((stored.group, part))
        regions = self._spill_regions(stored.group, part, accumulator)
        name = CommandName("offload", "spilled", stored.name)
        self._builder.copy(name, Stream.D2H, f"accumulator {stored.name}", regions)

    def _spill_regions(self, group: int, part: int, accumulator: int) -> list[CopyRegion]:
        """The copy from an accumulator to the host."""
        num_bytes = self._layout.groups[group].parts[part].numel * self._layout.acc_bytes
        home = self._layout.slot("spilled", self._context.model.groups[group].name, memory="host")
        return [CopyRegion(accumulator, 0, home, 0, num_bytes)]

    def _stored_part(self, group: int, part: int) -> _StoredPart:
        stored, name = self._layout.groups[group], self._context.part_name(group, part)
        runs = stored.parts[part].runs
        homes = [self._layout.run_place("grad", group, run) for run in runs]
        return _StoredPart(group, name, f"grad of {name}", runs, homes, stored.element_bytes("grad"))

    def _staging_slot(self, group: int) -> int:
        name = self._context.model.groups[group].slot_class
        if name not in self._rings:
            self._rings[name] = SlotRing(self._layout.ring("grad", name))
        return self._rings[name].take()

    def _round(self, stored: _StoredPart, accumulator: int, has_previous: bool, staging: int | None) -> None:
        """Append the command that rounds; it writes the staging slot, or the homes where there is none."""
        runs = stored.stored_runs(staging, self._layout.first_run(stored.group))
        targets = [Access(slot, stored.content) for slot in dict.fromkeys(run.slot for run in runs)]
        reads = [Access(accumulator, f"accumulator {stored.name}"), *(targets if has_previous else [])]
        partials = Access(self._layout.slot("partial_squares"), "partial squares")
        writes = [*targets, partials, Access(self._layout.slot("norm_squares"), "norm squares")]
        element_bytes = self._layout.acc_bytes + stored.element_bytes * (1 + has_previous)
        moved_bytes = float(sum(run.numel for run in runs) * element_bytes)
        work, name = Work(memory_bytes=moved_bytes, kernels=2 * len(runs)), CommandName("finish", "grad", stored.name)
        args = FinishGradient(stored.group, accumulator, runs, has_previous)
        self._builder.add("finish_gradient", name, Stream.COMPUTE, reads, writes, work, args=args)

    def _update_by_cpu(self, group: int) -> None:
        """Tell the host the factor on a gradient that is complete, and run AdamW there."""
        name, (device, host) = self._context.model.groups[group].name, self._scales[group]
        norms, content = Access(self._layout.slot("norm_squares"), "norm squares"), f"scale of {name}"
        args, work = GroupScale(group), Work(kernels=6)
        label = CommandName("scale", owner=name)
        self._builder.add("scale", label, Stream.COMPUTE, [norms], [Access(device, content)], work, args=args)
        region = CopyRegion(device, 0, host, 0, SCALE_BYTES)
        self._builder.copy(CommandName("offload", "scale", name), Stream.D2H, content, [region])
        grads = [
            Access(home, stored.content)
            for part in range(len(self._layout.groups[group].parts))
            for stored in [self._stored_part(group, part)]
            for home, _ in stored.homes
        ]
        lower_cpu_update(self._builder, self._layout, group, Access(host, content), grads=list(dict.fromkeys(grads)))
