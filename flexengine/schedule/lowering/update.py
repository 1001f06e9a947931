"""The optimizer step as a program: updates of all groups in forward order, on the GPU tile by tile.

What the CPU updates may also be updated inside a round: `cpu_update`.
"""

from __future__ import annotations

from flexengine.ops.base import Work
from flexengine.schedule.commands import DRIVE_STREAMS, Access, CommandName, CopyRegion, Program, Stream
from flexengine.schedule.fixed_slots import HOST_GRAD_NORM, HOST_SCALES, SCALAR_BYTES
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.cpu_update import cpu_groups, cpu_lanes, late_groups, lower_cpu_update
from flexengine.schedule.lowering.kinds import UpdateKind
from flexengine.schedule.lowering.tiles import GroupTiles, TileLowering, gpu_groups_in_round
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.slots import overlapping_slots

CLIP_KERNELS = 16
"""Of `UpdateRunner.clip`, each of some microseconds."""


class UpdateLowering:
    """Clip factor, unless the round before left it, then updates of all groups in forward order, first the CPU's.

    The GPU updates tile by tile, host planes streaming through tile slots; the CPU updates in place. The slot table is
    the layout's plus one slot per tile of every plane, so that tiles of one plane do not wait for each other.
    """

    def __init__(self, layout: Layout, kind: UpdateKind) -> None:
        self.layout, self.kind = layout, kind
        self._tiles = GroupTiles(layout, self._left_to_gpu(), kind.share)
        self.builder = ProgramBuilder(
            "update", self._tiles.slots, overlapping_slots(self._tiles.slots), cpu_lanes(layout)
        )
        self.ends: dict[int, int] = {}  # by group, the command that ends its update

    def lower(self) -> Program:
        """The program."""
        layout, builder, left = self.layout, self.builder, self._left_to_cpu()
        norms = self.sums_of_squares()
        if self.keeps_clip(bool(left or self._tiles)):
            builder.holds(layout.slot("scales"), "scales")
            builder.holds(layout.slot("grad_norm"), "grad norm")
        else:
            clip(builder, layout, norms)
        if left:
            send_scalars(builder, layout)  # what the CPU waits for, so that the GPU has ended what came before
        for group in sorted(left):  # first, so that the CPU need not wait until the host has issued the GPU's updates
            self._update_by_cpu(group, left[group])
        tiles = TileLowering(layout, builder)
        for group in range(len(layout.groups)):
            for tile in self._tiles.of(group):
                tiles.update(tile, sources=self.tile_sources())
                self.ends[group] = len(builder.commands) - 1
        self.signal_updates()
        return builder.build()

    # -- what ranks do otherwise -------------------------------------------------------------------------------------

    def sums_of_squares(self) -> Access:
        """Have the sums of squares of all gradients here."""
        norms = Access(self.layout.slot("norm_squares"), "norm squares")
        self.builder.holds(*norms)
        return norms

    def keeps_clip(self, updates: bool) -> bool:
        """Whether the factors on gradients are those that the round before left. updates: whether any group is left.

        Every program needs a command.
        """
        return self.kind.norm_known and updates

    def tile_sources(self) -> list[Access]:
        """What a tile is fetched after, beside what it consists of."""
        return []

    def signal_updates(self) -> None:
        """Tell other ranks of the updates."""

    @property
    def before_updates(self) -> int:
        """The last command before all updates."""
        commands = self.builder.commands
        updates = (c.index for c in commands if c.kind == "update" or c.stream in DRIVE_STREAMS)
        return next(updates, len(commands)) - 1

    def _left_to_gpu(self) -> list[int]:
        """The groups that the GPU updates here."""
        done = gpu_groups_in_round(self.layout) if self.kind.way == "in_round" else []
        return [group for group, home in enumerate(self.layout.homes) if home.update == "gpu" and group not in done]

    # -- on the CPU --------------------------------------------------------------------------------------------------

    def _left_to_cpu(self) -> dict[int, float]:
        """The groups that the CPU updates here, each with the share of its work that is left, for its price: what runs
        is whole."""
        if self.kind.way == "in_round":
            return dict(self.kind.left or {})
        if self.kind.way == "committed":
            return {**(self.kind.left or {}), **late_groups(self.layout)}
        return dict.fromkeys(cpu_groups(self.layout), 1.0)

    def _update_by_cpu(self, group: int, left: float) -> None:
        scales = Access(self.layout.slot("scalars", memory="host"), "scalars")
        own = self.layout.share_of(group, self.kind.share)
        urgent = self.kind.way == "committed" and group in (self.kind.left or ())
        self.ends[group] = lower_cpu_update(self.builder, self.layout, group, scales, left, share=own, urgent=urgent)


def lower_norm(layout: Layout) -> Program:
    """The factors on all gradients and their norm, which the host is told, from sums of squares that are here."""
    builder = ProgramBuilder("norm", layout.slots, layout.overlaps)
    norms = Access(layout.slot("norm_squares"), "norm squares")
    builder.holds(*norms)
    clip(builder, layout, norms)
    send_scalars(builder, layout)
    return builder.build()


def clip(builder: ProgramBuilder, layout: Layout, norms: Access) -> None:
    """Compute the factors on all gradients and their norm."""
    writes = [Access(layout.slot("scales"), "scales"), Access(layout.slot("grad_norm"), "grad norm")]
    builder.add(
        "clip", CommandName("clip", owner="factor"), Stream.COMPUTE, [norms], writes, Work(kernels=CLIP_KERNELS)
    )


def send_scalars(builder: ProgramBuilder, layout: Layout) -> None:
    """Tell the host the factors on the gradients and their norm."""
    target, scales, norm = layout.slot("scalars", memory="host"), layout.slot("scales"), layout.slot("grad_norm")
    regions = (
        CopyRegion(norm, 0, target, HOST_GRAD_NORM, SCALAR_BYTES),
        CopyRegion(scales, 0, target, HOST_SCALES, layout.acc_bytes * len(layout.groups)),
    )
    sources, writes = [Access(scales, "scales"), Access(norm, "grad norm")], [Access(target, "scalars")]
    builder.add_copy(CommandName("offload", "scalars"), Stream.D2H, sources, writes, regions)
