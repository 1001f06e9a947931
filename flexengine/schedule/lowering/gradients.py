"""Gradients of a round: accumulators become stored gradients, which go home; updates in a last round.

The CPU updates what has come home. The GPU updates from the gradient as it left the accumulator, which then need not go
home: its tiles follow among the commands of the next layer's backward, while theirs are on their way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Work
from flexengine.schedule.commands import Access, CommandName, CopyRegion, FinishGradient, GroupScale, Stream
from flexengine.schedule.fixed_slots import HOST_SCALES
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.context import RoundContext, SlotRing
from flexengine.schedule.lowering.cpu_update import cpu_groups, lower_cpu_update, lower_speculative_update
from flexengine.schedule.lowering.drive import DriveParts
from flexengine.schedule.lowering.kinds import RoundKind
from flexengine.schedule.lowering.stored_gradient import StoredPiece, stored_pieces
from flexengine.schedule.lowering.tiles import GroupTiles, Tile, TileLowering, gpu_groups_in_round
from flexengine.schedule.lowering.update import clip, send_scalars
from flexengine.schedule.slots import Slot


class ScaleSlots(NamedTuple):
    """Where the factor on one group's gradient lies on both sides; -1 where the host does not need it."""

    device: int
    host: int


class InRound(NamedTuple):
    """What a round updates without waiting for the norm: where the factors lie, and the tiles of the GPU's groups.

    slots: the layout's, with those of factors and tiles behind them.
    """

    scales: Mapping[int, ScaleSlots]
    tiles: GroupTiles
    slots: tuple[Slot, ...]


def in_round(layout: Layout) -> InRound:
    """The groups that a layout's plan updates inside a last round, with a slot on either side for each factor.

    Factors lie within the slots of all of them. With slots of their own, no group's update waits for another's.
    """
    slots, scales = list(layout.slots), dict[int, ScaleSlots]()
    device, width = layout.place("scales"), layout.acc_bytes
    by_cpu, by_gpu = cpu_groups(layout), gpu_groups_in_round(layout)
    for group in (*by_cpu, *by_gpu):
        scales[group] = ScaleSlots(len(slots), len(slots) + 1 if group in by_cpu else -1)
        slots.append(device.subslot((group,), width * group, width, "scalars"))
        if group in by_cpu:
            whole = layout.place("scalars", memory="host")
            slots.append(whole.subslot((group,), HOST_SCALES + width * group, width, "scalars"))
    tiles = GroupTiles(layout, by_gpu, slots=tuple(slots), with_gradients=False)
    return InRound(scales, tiles, tiles.slots)


def nothing_in_round(layout: Layout) -> InRound:
    """A round that updates nothing."""
    return InRound({}, GroupTiles(layout, ()), layout.slots)


class GradientLowering:
    """Finishes gradients of a round of this kind. updated: the groups that it updates without waiting for the norm."""

    def __init__(self, context: RoundContext, kind: RoundKind, updated: InRound) -> None:
        self._context, self._builder, self._layout = context, context.builder, context.layout
        self._first, self._updated, self._kind, self._drive = kind.first, updated, kind, DriveParts(context)
        self._tiles, self._waiting = TileLowering(context.layout, context.builder), list[tuple[Tile, Access]]()
        self._left: dict[int, Access] = {}  # by group that the GPU updates, where the round has left its gradient
        self._stored: set[tuple[int, int]] = set()  # parts of groups that this round has stored
        self._rings: dict[str, SlotRing] = {}

    def accumulators(self, layer: LayerSpec, begun: bool) -> dict[int, int]:
        """Slots of the accumulators of a layer's trained groups. begun: an earlier stage of the layer had some."""
        classes = {group: self._context.model.groups[group].slot_class for group in self._trained(layer)}
        place = self._layout.segments.accumulator_of(layer)
        return {group: self._layout.slot("accumulator", name, place) for group, name in classes.items()}

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
        if stored.group in self._updated.tiles:
            slot = stored.homes[0][0] if staging is None else staging
            self._left[stored.group] = Access(slot, stored.content)
        if staging is not None and not self._stays(stored.group):
            self._send_home(stored, staging)

    def _stays(self, group: int) -> bool:
        """Whether a gradient need not go home: it is updated from where it was rounded, or only its norm is asked for.

        Not one that two layers add to: the lower one finds it there.
        """
        stays = group in self._updated.tiles or self._kind.updates == "norm"
        return stays and sum(group in layer.groups for layer in self._context.model.layers) == 1

    def update_complete_groups(self, index: int, layer: LayerSpec) -> None:
        """Update those of a layer's groups that no layer below adds to: by the CPU at once, by the GPU with
        `update_waiting`."""
        for group in self._trained(layer):
            if any(group in below.groups for below in self._context.model.layers[:index]):
                continue
            if group in self._updated.tiles:
                self._scale(group)
                self._waiting += [(tile, self._left[group]) for tile in self._updated.tiles.of(group)]
            elif group in self._updated.scales:
                self._update_by_cpu(group)
            elif self._kind.updates == "speculative" and self._context.plan.groups[group].speculative:
                self._speculate(group)

    def update_waiting(self, turns: int = 1) -> None:
        """Update tiles by the GPU that wait, the first of equal shares of them for so many turns."""
        count = -(-len(self._waiting) // turns)
        for tile, grad in self._waiting[:count]:
            device = self._updated.scales[tile.group].device
            self._tiles.update(tile, Access(device, self._scale_content(tile.group)), grad)
        del self._waiting[:count]

    def end_waiting(self) -> None:
        """Do all that waits: no layer that uses the same slots comes next."""
        self.update_waiting()

    def has_room(self, layer: LayerSpec, left: int) -> bool:
        """Whether the gradients of a layer's groups have slots where those of so many layers wait to be updated."""
        classes = {self._context.model.groups[group].slot_class for group in self._trained(layer)}
        return all(left < len(self._layout.ring("grad", name)) for name in classes)

    def lower_norm(self) -> None:
        """Have the factors on all gradients and their norm, and tell the host where the round speculates."""
        self._have_squares()
        clip(self._builder, self._layout, Access(self._layout.slot("norm_squares"), "norm squares"))
        if self._kind.updates == "speculative":
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
        if has_previous and self._on_drive(stored.group):
            self._fetch_home(stored, self._drive.read_grad(stored.group, stored.content, staging))
        elif has_previous:
            self._fetch_home(stored, [region.reversed for region in stored.regions_home(staging)])
        return staging

    def _on_drive(self, group: int) -> bool:
        return self._layout.homes[group].grads == "drive"

    def _fetch_home(self, stored: StoredPiece, back: list[CopyRegion]) -> None:
        self._builder.copy(CommandName("fetch", "grad", stored.name), Stream.H2D, stored.content, back)

    def _send_home(self, stored: StoredPiece, staging: int) -> None:
        if self._on_drive(stored.group):
            self._drive.write_grad(stored.group, stored.content, staging)
            return
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

    def _scale_content(self, group: int) -> str:
        return f"scale of {self._context.model.groups[group].name}"

    def _scale(self, group: int) -> None:
        """Have the factor on a gradient that is complete: compute it, unless a run for the norm has left it."""
        norms, factor = Access(self._layout.slot("norm_squares"), "norm squares"), self._updated.scales[group].device
        if self._kind.updates == "clipped":
            self._builder.holds(factor, self._scale_content(group))
            return
        label, args = CommandName("scale", owner=self._context.model.groups[group].name), GroupScale(group)
        writes = [Access(factor, self._scale_content(group))]
        self._builder.add("scale", label, Stream.COMPUTE, [norms], writes, Work(kernels=6), args=args)

    def _update_by_cpu(self, group: int) -> None:
        """Tell the host the factor on a gradient that is complete, and run AdamW there."""
        self._scale(group)
        (device, host), content = self._updated.scales[group], self._scale_content(group)
        region = CopyRegion(device, 0, host, 0, self._layout.acc_bytes)
        name = CommandName("offload", "scale", self._context.model.groups[group].name)
        self._builder.copy(name, Stream.D2H, content, [region])
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
