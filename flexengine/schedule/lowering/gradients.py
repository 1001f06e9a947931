"""Gradients of a round: accumulators become stored gradients, which go home; the CPU's updates in a last round."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Work
from flexengine.schedule.commands import Access, CommandName, CopyRegion, FinishGradient, GroupScale, Stream
from flexengine.schedule.fixed_slots import HOST_SCALES
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.context import RoundContext, SlotRing
from flexengine.schedule.lowering.cpu_update import cpu_groups, lower_cpu_update, lower_speculative_update
from flexengine.schedule.lowering.kinds import RoundKind
from flexengine.schedule.lowering.stored_gradient import StoredPiece, stored_pieces
from flexengine.schedule.lowering.update import clip, send_scalars
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
    """Finishes gradients of a round of this kind. scales: groups that the CPU updates in it."""

    def __init__(self, context: RoundContext, kind: RoundKind, scales: dict[int, ScaleSlots]) -> None:
        self._context, self._builder, self._layout = context, context.builder, context.layout
        self._first, self._scales, self._kind = kind.first, scales, kind
        self._stored: set[tuple[int, int]] = set()  # parts of groups that this round has stored
        self._rings: dict[str, SlotRing] = {}

    def accumulators(self, layer: LayerSpec, begun: bool) -> dict[int, int]:
        """Slots of the accumulators of a layer's trained groups. begun: an earlier stage of the layer had some."""
        classes = {group: self._context.model.groups[group].slot_class for group in self._trained(layer)}
        return {group: self._layout.slot("accumulator", name) for group, name in classes.items()}

    def finish(self, group: int, part: int, accumulator: int) -> None:
        """Round the accumulator into the stored gradient, adding what earlier rounds stored, and send it home."""
        has_previous = not self._first or (group, part) in self._stored
        self._stored.add((group, part))
        for stored in stored_pieces(self._context, group, part):
            self._store(stored, Access(accumulator, self._accumulated(group, part)), has_previous)

    def _store(self, stored: StoredPiece, accumulator: Access, has_previous: bool) -> None:
        """Round a piece of an accumulator into the stored gradient."""
        staging = self._fetch_stored(stored, has_previous)
        self._round(stored, accumulator, has_previous, staging)
        if staging is not None:
            self._send_home(stored, staging)

    def update_complete_groups(self, index: int, layer: LayerSpec) -> None:
        """Update on the CPU those of a layer's groups that no layer below adds to."""
        for group in self._trained(layer):
            if any(group in below.groups for below in self._context.model.layers[:index]):
                continue
            if group in self._scales:
                self._update_by_cpu(group)
            elif self._kind.updates == "speculative" and self._context.plan.groups[group].speculative:
                self._speculate(group)

    def lower_norm(self) -> None:
        """Tell the host the factors on all gradients and their norm, with which a round ends that speculates."""
        self._have_squares()
        clip(self._builder, self._layout, Access(self._layout.slot("norm_squares"), "norm squares"))
        send_scalars(self._builder, self._layout)

    def _have_squares(self) -> None:
        """Have the sums of squares of all gradients here."""

    def _speculate(self, group: int) -> None:
        """Update a group into its second planes."""
        lower_speculative_update(self._builder, self._layout, group, self._stored_at_home(group))

    def _trained(self, layer: LayerSpec) -> list[int]:
        return [group for group in layer.groups if not self._context.model.groups[group].frozen]

    def _fetch_stored(self, stored: StoredPiece, has_previous: bool) -> int | None:
        """The staging slot to add to, with what earlier rounds stored; None where that stays on the GPU."""
        if has_previous:
            for home, _ in stored.homes:
                self._builder.holds(home, stored.content)
        if self._layout.homes[stored.group].grads == "gpu":
            return None
        staging = self._staging_slot(stored.group)
        if has_previous:
            self._fetch_home(stored, [region.reversed for region in stored.regions_home(staging)])
        return staging

    def _fetch_home(self, stored: StoredPiece, back: list[CopyRegion]) -> None:
        self._builder.copy(CommandName("fetch", "grad", stored.name), Stream.H2D, stored.content, back)

    def _send_home(self, stored: StoredPiece, staging: int) -> None:
        name = CommandName("offload", "grad", stored.name)
        self._builder.copy(name, Stream.D2H, stored.content, stored.regions_home(staging))

    def _accumulated(self, group: int, part: int) -> str:
        return f"accumulator {self._context.part_name(group, part)}"

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
