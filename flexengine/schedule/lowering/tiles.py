"""Updates by the GPU, tile by tile: what lives on the host passes through tile slots, the rest is updated in place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from flexengine.ops.base import Work
from flexengine.schedule.commands import Access, CommandName, CopyRegion, SlotOffset, Stream, UpdateTile
from flexengine.schedule.group_storage import matrix_flops
from flexengine.schedule.layout import Layout
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.shares import ALONE, Share
from flexengine.schedule.slots import HOST_SIDE, PlaneKind, Slot

KERNELS_PER_MATRIX = 20
"""Kernels of an update by matrix products: five iterations of three, the norm, what comes before and after."""

MOST_IN_PLACE = 1 << 26
"""Elements of a tile of what lies on the GPU altogether: an update of so many takes 0.2 ms, longer than the host needs
to issue it."""


class Tile(NamedTuple):
    """Elements [start, start + count) of a group's segment; `planes` are their slots, one within each plane.

    grad_bytes: where its gradient begins in that of the group, and how many bytes it has.
    """

    group: int
    segment: str
    start: int
    count: int
    planes: Mapping[PlaneKind, int]
    grad_bytes: tuple[int, int]


class GroupTiles:
    """Tiles of some groups, and the layout's slots with one for every tile of every plane behind them.

    With slots of their own, tiles of one plane do not wait for each other. slots: those to begin with, where they are
    not the layout's. with_gradients: gradients lie in their planes; else whoever updates says where.
    """

    def __init__(
        self, layout: Layout, groups: Iterable[int], share: Share = ALONE, slots: tuple[Slot, ...] | None = None,
        with_gradients: bool = True,
    ) -> None:  # fmt: skip
        self._layout, self._with_gradients = layout, with_gradients
        self._slots = list(layout.slots if slots is None else slots)
        self._tiles = {group: self._cut(group, layout.share_of(group, share)) for group in groups}

    def __bool__(self) -> bool:
        return any(self._tiles.values())

    def __contains__(self, group: int) -> bool:
        return group in self._tiles

    @property
    def slots(self) -> tuple[Slot, ...]:
        """All slots."""
        return tuple(self._slots)

    def of(self, group: int) -> list[Tile]:
        """The tiles of a group, in order; none of a group that is not among them."""
        return self._tiles.get(group, [])

    def _cut(self, group: int, share: Share) -> list[Tile]:
        """Cut a share of a group into tiles.

        What lies on the GPU altogether passes through no slot, so one tile may be as large as its segment.
        """
        layout, found = self._layout, list[Tile]()
        for segment in layout.groups[group].segments:
            planes = [
                (p, layout.slots[layout.plane_slot(p.kind, group)], *layout.plane_start(group, segment, p, share))
                for p in segment.planes
                if self._with_gradients or p.kind != "grad"
            ]
            [grad] = [p for p in segment.planes if p.kind == "grad"]
            in_place = not segment.matrices and all(whole.memory not in HOST_SIDE for _, whole, _, _ in planes)
            for start, count in share.tiles(segment, MOST_IN_PLACE if in_place else layout.plan.optimizer_tile):
                slots, within = {}, (segment.name, start)
                for plane, whole, begin, skipped in planes:
                    slots[plane.kind] = len(self._slots)
                    first = begin + plane.num_bytes(start - skipped)
                    self._slots.append(whole.subslot(within, first, plane.num_bytes(count), "tile"))
                grad_bytes = (grad.start + grad.num_bytes(start), grad.num_bytes(count))
                found.append(Tile(group, segment.name, start, count, slots, grad_bytes))
        return found


def gpu_groups_in_round(layout: Layout) -> list[int]:
    """Groups that the GPU updates inside a last round: those whose gradient is whole at one time.

    A group in several parts waits for the update's own program, as its gradient does at home.
    """
    if not layout.plan.gpu_updates_in_round:
        return []
    whole = (g for g, home in enumerate(layout.homes) if home.update == "gpu")
    return [group for group in whole if len(layout.groups[group].parts) == 1]


class TileLowering:
    """Appends updates of tiles, which take the tile slots in turn."""

    def __init__(self, layout: Layout, builder: ProgramBuilder) -> None:
        self._layout, self._builder, self._number = layout, builder, 0

    def update(
        self, tile: Tile, scale: Access | None = None, grad: Access | None = None, sources: Sequence[Access] = ()
    ) -> None:
        """Fetch what lives on the host into the next tile slot, update, send back all but the gradient.

        scale: where the factor on the gradient is; None = with those on all. grad: where the group's gradient lies, if
        not in its plane. sources: what the tile is fetched after, beside what it consists of.
        """
        builder, layout = self._builder, self._layout
        name = f"{layout.model.groups[tile.group].name} {tile.segment}+{tile.start}"
        contents = {kind: Access(slot, f"{kind} of {name}") for kind, slot in tile.planes.items()}
        streamed = {kind: access for kind, access in contents.items() if builder.slots[access.slot].memory in HOST_SIDE}
        resident = {kind: access for kind, access in contents.items() if kind not in streamed}
        for access in contents.values():
            builder.holds(*access)
        planes = {kind: SlotOffset(access.slot, 0) for kind, access in resident.items()}
        reads = list(resident.values())
        writes = [access for kind, access in resident.items() if kind != "grad"]
        if grad is not None:
            planes["grad"] = SlotOffset(grad.slot, tile.grad_bytes[0])
            reads.append(grad)
        staging = layout.slot("tile", index=self._number % layout.plan.optimizer_slots) if streamed else -1
        self._number += 1
        fetched = {
            kind: CopyRegion(slot, 0, staging, layout.tile_offsets[kind], builder.slots[slot].num_bytes)
            for kind, (slot, _) in streamed.items()
        }
        if streamed:
            planes.update({kind: SlotOffset(staging, layout.tile_offsets[kind]) for kind in streamed})
            targets = [Access(staging, f"tile {name}")]
            fetch = CommandName("fetch", "tile", name)
            builder.add_copy(fetch, Stream.H2D, [*streamed.values(), *sources], targets, tuple(fetched.values()))
            reads += targets
            writes.append(Access(staging, f"updated tile {name}"))
        reads.append(Access(layout.slot("scales"), "scales") if scale is None else scale)
        self._compute(tile, name, reads, writes, planes)
        changed = [kind for kind in streamed if kind != "grad"]
        if changed:
            returned = tuple(fetched[kind].reversed for kind in changed)
            done, homes = [Access(staging, f"updated tile {name}")], [streamed[kind] for kind in changed]
            builder.add_copy(CommandName("return", "tile", name), Stream.D2H, done, homes, returned)

    def _compute(
        self, tile: Tile, name: str, reads: list[Access], writes: list[Access], planes: dict[str, SlotOffset]
    ) -> None:
        layout = self._layout
        segment = next(s for s in layout.groups[tile.group].segments if s.name == tile.segment)
        matrices = segment.matrices_in(tile.start, tile.count)
        if matrices:
            scratch = layout.slot("update_scratch")
            writes = [*writes, Access(scratch, "scratch of an update")]
            planes = {**planes, "scratch": SlotOffset(scratch, 0)}
        args = UpdateTile(tile.group, tile.segment, tile.start, tile.count, planes)
        flops, kernels = matrix_flops(segment.rule, matrices), max(1, KERNELS_PER_MATRIX * len(matrices))
        work = Work(flops, memory_bytes=self._moved_bytes(tile), kernels=kernels)
        label = CommandName("update", owner=name)
        self._builder.add("update", label, Stream.COMPUTE, reads, writes, work, args=args)

    def _moved_bytes(self, tile: Tile) -> float:
        """Bytes of memory that an update reads and writes: all planes, the gradient only read."""
        written = sum(self._builder.slots[slot].num_bytes for kind, slot in tile.planes.items() if kind != "grad")
        return float(2 * written + tile.grad_bytes[1])
