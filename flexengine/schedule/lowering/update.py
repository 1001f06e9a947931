"""The optimizer step as a program: updates of all groups in forward order, on the GPU tile by tile.

What the CPU updates may also be updated inside a round: `cpu_update`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flexengine.ops.base import Work
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Program, SlotOffset, Stream, UpdateTile
from flexengine.schedule.fixed_slots import HOST_GRAD_NORM, HOST_SCALES, SCALAR_BYTES
from flexengine.schedule.group_storage import matrix_flops
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.cpu_update import cpu_groups, late_groups, lower_cpu_update
from flexengine.schedule.lowering.kinds import UpdateKind
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.shares import Share
from flexengine.schedule.slots import HOST_SIDE, PlaneKind, Slot, overlapping_slots

KERNELS_PER_MATRIX = 20
"""Kernels of an update by matrix products: five iterations of three, the norm, what comes before and after."""

CLIP_KERNELS = 16
"""Of `UpdateRunner.clip`, each of some microseconds."""

MOST_IN_PLACE = 1 << 26
"""Elements of a tile of what lies on the GPU altogether: an update of so many takes 0.2 ms, longer than the host needs
to issue it."""


class _Tile(NamedTuple):
    """Elements [start, start + count) of a group's segment; `planes` are their slots, one within each plane."""

    group: int
    segment: str
    start: int
    count: int
    planes: Mapping[PlaneKind, int]


class UpdateLowering:
    """Clip factor, unless the round before left it, then updates of all groups in forward order, first the CPU's.

    The GPU updates tile by tile, host planes streaming through tile slots; the CPU updates in place. The slot table is
    the layout's plus one slot per tile of every plane, so that tiles of one plane do not wait for each other.
    """

    def __init__(self, layout: Layout, kind: UpdateKind) -> None:
        self.layout, self.kind = layout, kind
        pieces: list[Slot] = []
        self._tiles = {
            group: _tiles(layout, group, pieces, layout.share_of(group, kind.share))
            for group, home in enumerate(layout.homes)
            if home.update == "gpu"
        }  # fmt: skip
        slots = (*layout.slots, *pieces)
        self.builder = ProgramBuilder("update", slots, overlapping_slots(slots))
        self.ends: dict[int, int] = {}  # by group, the command that ends its update

    def lower(self) -> Program:
        """The program."""
        layout, builder, left = self.layout, self.builder, self._left_to_cpu()
        norms = self.sums_of_squares()
        if self.keeps_clip(bool(left or any(self._tiles.values()))):
            builder.holds(layout.slot("scales"), "scales")
            builder.holds(layout.slot("grad_norm"), "grad norm")
        else:
            clip(builder, layout, norms)
        if left:
            send_scalars(builder, layout)  # what the CPU waits for, so that the GPU has ended what came before
        for group in sorted(left):  # first, so that the CPU need not wait until the host has issued the GPU's updates
            self._update_by_cpu(group, left[group])
        number = 0
        for group in range(len(layout.groups)):
            for tile in self._tiles.get(group, []):
                self._lower_tile(tile, number % layout.plan.optimizer_slots)
                self.ends[group] = len(builder.commands) - 1
                number += 1
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
        return next((c.index for c in commands if c.kind == "update"), len(commands)) - 1

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
        lower_cpu_update(self.builder, self.layout, group, scales, left, share=own, urgent=urgent)
        self.ends[group] = len(self.builder.commands) - 1

    # -- on the GPU --------------------------------------------------------------------------------------------------

    def _lower_tile(self, tile: _Tile, number: int) -> None:
        """Fetch what lives on the host into tile slot `number`, update, send back all but the gradient."""
        builder, layout = self.builder, self.layout
        name = f"{layout.model.groups[tile.group].name} {tile.segment}+{tile.start}"
        contents = {kind: Access(slot, f"{kind} of {name}") for kind, slot in tile.planes.items()}
        streamed = {kind: access for kind, access in contents.items() if builder.slots[access.slot].memory in HOST_SIDE}
        resident = {kind: access for kind, access in contents.items() if kind not in streamed}
        for access in contents.values():
            builder.holds(*access)
        planes = {kind: SlotOffset(access.slot, 0) for kind, access in resident.items()}
        reads = list(resident.values())
        writes = [access for kind, access in resident.items() if kind != "grad"]
        staging = layout.slot("tile", index=number) if streamed else -1
        fetched = {
            kind: CopyRegion(slot, 0, staging, layout.tile_offsets[kind], builder.slots[slot].num_bytes)
            for kind, (slot, _) in streamed.items()
        }
        if streamed:
            planes.update({kind: SlotOffset(staging, layout.tile_offsets[kind]) for kind in streamed})
            sources, targets = list(streamed.values()), [Access(staging, f"tile {name}")]
            fetch = CommandName("fetch", "tile", name)
            sources += self.tile_sources()
            builder.add("copy", fetch, Stream.H2D, sources, targets, copies=tuple(fetched.values()))
            reads += targets
            writes.append(Access(staging, f"updated tile {name}"))
        reads.append(Access(layout.slot("scales"), "scales"))
        segment = next(s for s in layout.groups[tile.group].segments if s.name == tile.segment)
        matrices = segment.matrices_in(tile.start, tile.count)
        if matrices:
            scratch = layout.slot("update_scratch")
            writes.append(Access(scratch, "scratch of an update"))
            planes["scratch"] = SlotOffset(scratch, 0)
        args = UpdateTile(tile.group, tile.segment, tile.start, tile.count, planes)
        flops, kernels = matrix_flops(segment.rule, matrices), max(1, KERNELS_PER_MATRIX * len(matrices))
        work = Work(flops, memory_bytes=_moved_bytes(builder, tile), kernels=kernels)
        builder.add("update", CommandName("update", owner=name), Stream.COMPUTE, reads, writes, work, args=args)
        changed = [kind for kind in streamed if kind != "grad"]
        if changed:
            returned = tuple(fetched[kind].reversed for kind in changed)
            sources, targets = [Access(staging, f"updated tile {name}")], [streamed[kind] for kind in changed]
            builder.add("copy", CommandName("return", "tile", name), Stream.D2H, sources, targets, copies=returned)


def _tiles(layout: Layout, group: int, pieces: list[Slot], share: Share) -> list[_Tile]:
    """Cut a share of a group into tiles; every plane of a tile gets a slot inside the plane, appended to `pieces`.

    What lies on the GPU altogether passes through no slot, so one tile may be as large as its segment."""
    found = []
    for segment in layout.groups[group].segments:
        planes = [
            (p, layout.slots[layout.plane_slot(p.kind, group)], *layout.plane_start(group, segment, p, share))
            for p in segment.planes
        ]
        in_place = not segment.matrices and all(whole.memory not in HOST_SIDE for _, whole, _, _ in planes)
        for start, count in share.tiles(segment, MOST_IN_PLACE if in_place else layout.plan.optimizer_tile):
            slots, within = {}, (segment.name, start)
            for plane, whole, begin, skipped in planes:
                slots[plane.kind] = len(layout.slots) + len(pieces)
                first = begin + plane.num_bytes(start - skipped)
                pieces.append(whole.subslot(within, first, plane.num_bytes(count), "tile"))
            found.append(_Tile(group, segment.name, start, count, slots))
    return found


def _moved_bytes(builder: ProgramBuilder, tile: _Tile) -> float:
    """Bytes of memory that an update reads and writes: all planes, the gradient only read."""
    planes = tile.planes.items()
    return float(sum(builder.slots[slot].num_bytes * (1 if kind == "grad" else 2) for kind, slot in planes))


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
    builder.add("copy", CommandName("offload", "scalars"), Stream.D2H, sources, writes, copies=regions)
