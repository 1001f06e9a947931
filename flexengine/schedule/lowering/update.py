"""The optimizer step as a program: updates of all groups in forward order, on the GPU tile by tile.

What the CPU updates may also be updated inside a round: `lower_cpu_update`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from flexengine.ops.base import Work
from flexengine.schedule.commands import (
    Access,
    CommandName,
    CopyRegion,
    Program,
    SlotOffset,
    Stream,
    UpdateTile,
)
from flexengine.schedule.fixed_slots import (
    HOST_GRAD_NORM,
    HOST_SCALES,
    SCALAR_BYTES,
    norm_square_bytes,
)
from flexengine.schedule.group_storage import Segment, matrix_flops
from flexengine.schedule.layout import Layout
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.ranks.cells import Cells
from flexengine.schedule.ranks.shares import ALONE, Share
from flexengine.schedule.ranks.split_commands import AddTables
from flexengine.schedule.ranks.stage_layout import StageLayout
from flexengine.schedule.ranks.waves import ALL_SQUARES, OWN_SQUARES
from flexengine.schedule.second_planes import second_kinds
from flexengine.schedule.slots import HOST_SIDE, PlaneKind, Slot, overlapping_slots

KERNELS_PER_MATRIX = 20
"""Kernels of an update by matrix products: five iterations of three, the norm, what comes before and after."""

CLIP_KERNELS = 16
"""Of `UpdateRunner.clip`, each of some microseconds."""

MOST_IN_PLACE = 1 << 26
"""Elements of a tile of what lies on the GPU altogether: an update of so many takes 0.2 ms, longer than the host needs
to issue it."""


class OwnRange(NamedTuple):
    """Elements [first, first + numel) of a group whose gradients a rank has stored, from an element of a slot on."""

    first: int
    numel: int
    slot: int
    slot_first: int


class _Tile(NamedTuple):
    """Elements [start, start + count) of a group's segment; `planes` are their slots, one within each plane."""

    group: int
    segment: str
    start: int
    count: int
    planes: Mapping[PlaneKind, int]


def lower_update(
    layout: Layout, by_cpu: Mapping[int, float] | None = None, share: Share = ALONE, last: bool = True,
    urgent: Collection[int] = (), told: bool = False, holds: bool = False,
) -> Program:  # fmt: skip
    """Clip factor, unless the round before left it, then updates of all groups in forward order, first the CPU's.

    The GPU updates tile by tile, host planes streaming through tile slots; the CPU updates in place.

    by_cpu: the groups that the CPU updates here, each with the share of its work that is left, for its price (what runs
    is whole); None = all that it updates. The slot table is the layout's plus one slot per tile of every plane, so that
    tiles of one plane do not wait for each other.
    share: what this one of several ranks updates. last: it ran the last round of the step, so that its sums of squares
    are those of all gradients; the others take them from the node's memory. With several nodes all are told them
    before. urgent: groups that the CPU ends first, for prices, as an earlier program began them. told: the last round
    speculated, so that all have the sums of squares, and the factors on gradients, since then. holds: what that updated
    counts.
    """
    left = dict.fromkeys(cpu_groups(layout), 1.0) if by_cpu is None else by_cpu
    pieces: list[Slot] = []
    tiles = {
        group: _tiles(layout, group, pieces, layout.share_of(group, share))
        for group, home in enumerate(layout.homes)
        if home.update == "gpu"
    }  # fmt: skip
    slots = (*layout.slots, *pieces)
    builder = ProgramBuilder("update", slots, overlapping_slots(slots))
    norms = _sums_of_squares(builder, layout, last, told)
    # signals of ranks need a command before all updates, and every program one
    if told and not layout.plan.shares_node and (left or any(tiles.values())):
        builder.holds(layout.slot("scales"), "scales")
        builder.holds(layout.slot("grad_norm"), "grad norm")
    else:
        _clip(builder, layout, norms)
    if left:
        _send_scalars(builder, layout)  # what the CPU waits for, so that the GPU has ended what came before
    ends: dict[int, int] = {}
    for group in sorted(left):  # first, so that the CPU need not wait until the host has issued the GPU's updates
        scales = Access(layout.slot("scalars", memory="host"), "scalars")
        own = layout.share_of(group, share)
        lower_cpu_update(builder, layout, group, scales, left[group], share=own, urgent=group in urgent)
        ends[group] = len(builder.commands) - 1
    number = 0
    for group in range(len(layout.groups)):
        for tile in tiles.get(group, []):
            _lower_tile(builder, layout, tile, number % layout.plan.optimizer_slots)
            ends[group] = len(builder.commands) - 1
            number += 1
    if isinstance(layout, StageLayout):
        _signal_edges(builder, layout, ends)
    elif layout.plan.shares_node:
        _signal_updates(builder, layout, ends, holds)
    return builder.build()


def _sums_of_squares(builder: ProgramBuilder, layout: Layout, last: bool, told: bool) -> Access:
    """Have the sums of squares of all gradients here; last, told: as of `lower_update`."""
    norms = Access(layout.slot("norm_squares"), "norm squares")
    if layout.plan.split and told:
        builder.holds(*norms)
        builder.holds(layout.slot("run_squares"), ALL_SQUARES)
    elif layout.plan.split and layout.plan.request.nodes == 1:
        _add_squares(builder, layout, norms)
    elif isinstance(layout, StageLayout) and told:
        builder.holds(*norms)
    elif isinstance(layout, StageLayout):
        _exchange_squares(builder, layout, last)
    elif layout.plan.shares_node and layout.plan.request.nodes == 1:
        _exchange_norm(builder, layout, last)
    else:
        builder.holds(*norms)
    return norms


def _exchange_norm(builder: ProgramBuilder, layout: Layout, last: bool) -> None:
    """Send the sums of squares of all gradients to the node's memory, or fetch those of the rank of the last round."""
    here, there, cells = layout.slot("norm_squares"), layout.slot("norm_squares", memory="node"), Cells(layout)
    region, content = CopyRegion(here, 0, there, 0, layout.slots[there].num_bytes), "norm squares"
    if last:
        builder.holds(here, content)
        builder.copy(CommandName("offload", "norm"), Stream.D2H, content, [region])
        builder.between_ranks(-1, signals=(cells.norm(),))
    else:
        builder.holds(there, content)
        builder.copy(CommandName("fetch", "norm"), Stream.H2D, content, [region.reversed])
        builder.between_ranks(-1, awaits=(cells.norm_of_last(),))


def _exchange_squares(builder: ProgramBuilder, layout: StageLayout, last: bool) -> None:
    """Leave the sums of squares of this rank's gradients in the node's memory, and fetch those of all ranks.

    last: it ran the step's last round, so that it has the sum of the head's gradient. What the others have fetched in
    the step before, they have told by ending their updates.
    """
    here, whole, content = layout.slot("norm_squares"), layout.place("norm_squares", memory="node"), "norm squares"
    found: dict[int, CopyRegion] = {}
    start = 0
    for group, stored in enumerate(layout.groups):
        num_bytes = norm_square_bytes([stored])
        place = layout.slot_of(whole.key._replace(within=("group", group)))
        found[group] = CopyRegion(here, start, place, 0, num_bytes)
        builder.holds(place, content)
        start += num_bytes
    own = [g for g in found if (last if g == layout.head_group else layout.stage.owns(g))]
    if builder.last_writer(here) < 0:
        builder.holds(here, content)
    reads, writes = [Access(here, content)], [Access(found[group].target, content) for group in own]
    regions = tuple(found[group] for group in own)
    builder.add("copy", CommandName("offload", "norm"), Stream.D2H, reads, writes, copies=regions)
    awaits = layout.cells.updated_before(head=True)
    builder.between_ranks(-1, awaits=(awaits,), signals=(layout.cells.norm(),))
    back = tuple(region.reversed for region in found.values())
    places = [Access(region.source, content) for region in back]
    builder.add("copy", CommandName("fetch", "norm"), Stream.H2D, places, [Access(here, content)], copies=back)
    builder.between_ranks(-1, awaits=(layout.cells.all_norms(),))


def _add_squares(builder: ProgramBuilder, layout: Layout, norms: Access, stored: Sequence[Access] = ()) -> None:
    """Add up what all ranks have in their tables, which is zero where a rank owns no piece; so no sum is rounded.

    No rank has the result before all have stored all their pieces, so what reads gradients waits for it. stored: those
    that the same program has stored.
    """
    table = layout.slot("run_squares")
    own, whole = Access(table, OWN_SQUARES), Access(table, ALL_SQUARES)
    if builder.last_writer(table) < 0:
        builder.holds(*own)
    args = AddTables(table, layout.slots[table].num_bytes, layout.plan.request.ranks)
    builder.add("add_squares", CommandName("add", "squares"), Stream.COMM, [own, *stored], [whole], args=args)
    work = Work(kernels=2 * len(layout.groups))
    builder.add("sum_squares", CommandName("sum", "squares"), Stream.COMPUTE, [whole], [norms], work)


def _signal_updates(builder: ProgramBuilder, layout: Layout, ends: dict[int, int], holds: bool) -> None:
    """Have the command that ends each group's update say so; the last before all updates, of groups without one here.

    Each rank signals all groups: the norm that it has read may then be written again, too. holds: speculative groups
    were updated in the last round, which tells of that itself.
    """
    cells, before = Cells(layout), _before_updates(builder)
    for group, spec in enumerate(layout.model.groups):
        if not spec.frozen:
            late = (cells.speculated(group),) if cells.is_speculative(group) and not holds else ()
            builder.between_ranks(ends.get(group, before), signals=(cells.updated(group), *late))


def _signal_edges(builder: ProgramBuilder, layout: StageLayout, ends: dict[int, int]) -> None:
    """Tell of the updates that all ranks make together: their shares of embedding and head."""
    for group in (0, layout.head_group):
        builder.between_ranks(ends.get(group, _before_updates(builder)), signals=(layout.cells.updated(group > 0),))


def _before_updates(builder: ProgramBuilder) -> int:
    """The last command before all updates."""
    return next((c.index for c in builder.commands if c.kind == "update"), len(builder.commands)) - 1


def cpu_groups(layout: Layout) -> list[int]:
    """Groups that the CPU updates."""
    return [g for g, home in enumerate(layout.homes) if home.update == "cpu"]


def late_groups(layout: Layout) -> dict[int, float]:
    """Groups that the CPU updates once the norm is known, whole, also where a speculation holds."""
    return {g: 1.0 for g in cpu_groups(layout) if not layout.plan.groups[g].speculative}


def lower_norm(builder: ProgramBuilder, layout: Layout, stored: Sequence[Access] = (), last: bool = True) -> None:
    """Tell the host the factors on all gradients and their norm, once all are stored. stored: pieces by this rank.

    last: in stages, this rank ran the step's last round.
    """
    norms = Access(layout.slot("norm_squares"), "norm squares")
    if layout.plan.split:
        _add_squares(builder, layout, norms, stored)
    elif isinstance(layout, StageLayout):
        _exchange_squares(builder, layout, last)
    _clip(builder, layout, norms)
    _send_scalars(builder, layout)


def _clip(builder: ProgramBuilder, layout: Layout, norms: Access) -> None:
    """Compute the factors on all gradients and their norm."""
    writes = [Access(layout.slot("scales"), "scales"), Access(layout.slot("grad_norm"), "grad norm")]
    builder.add(
        "clip", CommandName("clip", owner="factor"), Stream.COMPUTE, [norms], writes, Work(kernels=CLIP_KERNELS)
    )


def _send_scalars(builder: ProgramBuilder, layout: Layout) -> None:
    """Tell the host the factors on the gradients and their norm."""
    target, scales, norm = layout.slot("scalars", memory="host"), layout.slot("scales"), layout.slot("grad_norm")
    regions = (
        CopyRegion(norm, 0, target, HOST_GRAD_NORM, SCALAR_BYTES),
        CopyRegion(scales, 0, target, HOST_SCALES, layout.acc_bytes * len(layout.groups)),
    )
    sources, writes = [Access(scales, "scales"), Access(norm, "grad norm")], [Access(target, "scalars")]
    builder.add("copy", CommandName("offload", "scalars"), Stream.D2H, sources, writes, copies=regions)


# -- on the CPU ------------------------------------------------------------------------------------------------------


def lower_cpu_update(
    builder: ProgramBuilder, layout: Layout, group: int, scale: Access, left: float = 1.0,
    grads: Sequence[Access] | None = None, share: Share = ALONE, urgent: bool = False,
) -> None:  # fmt: skip
    """Update a group's planes by the CPU where they are, each segment in one call.

    scale: where the host finds the factor on the gradient. left: the share of the work that remains, for its price.
    grads: what an earlier command left of the gradient, where that is not the whole plane. share: what this one of
    several ranks updates. urgent: as of `UpdateTile`.
    """
    name, planes = layout.model.groups[group].name, layout.groups[group].plane_bytes
    contents = {kind: "weights" if kind == "weights" else f"{kind} of" for kind in planes}
    held = {k: Access(layout.plane_slot(k, group), f"{contents[k]} {name}") for k in planes if planes[k]}
    grads = [held["grad"]] if grads is None else grads
    for access in (*grads, *(access for kind, access in held.items() if kind != "grad")):
        if builder.last_writer(access.slot) < 0:
            builder.holds(*access)
    writes = [Access(slot, f"updated {content}") for kind, (slot, content) in held.items() if kind != "grad"]
    for segment in layout.groups[group].segments:
        start, count = share.of(segment)
        if not count:
            continue
        tile = {p.kind: SlotOffset(held[p.kind].slot, p.start + p.num_bytes(start)) for p in segment.planes}
        args = UpdateTile(group, segment.name, start, count, tile, urgent=urgent)
        work, label = Work(memory_bytes=_touched_bytes(segment, count) * left), f"{name} {segment.name}"
        reads = [*(access for kind, access in held.items() if kind != "grad"), *grads, scale]
        builder.add("update", CommandName("update", owner=label), Stream.CPU, reads, writes, work, args=args)
        held.update({kind: Access(slot, f"updated {text}") for kind, (slot, text) in held.items() if kind != "grad"})


def lower_speculative_update(
    builder: ProgramBuilder, layout: Layout, group: int, grads: Sequence[Access], own: Sequence[OwnRange] | None = None
) -> int:
    """Update a group by the CPU into its second planes, with the factor that holds where nothing is clipped.

    grads: what earlier commands of the program left of the gradient. own: the elements of the group whose gradients
    this one of several ranks has stored, which it updates; None = all. Returns the index of the last command, -1 where
    there is none.
    """
    name, kinds = layout.model.groups[group].name, second_kinds(layout.groups[group])
    first = {kind: layout.plane_slot(kind, group) for kind in kinds}
    second = {kind: layout.second_slot(kind, group) for kind in kinds}
    contents = {kind: "weights" if kind == "weights" else f"{kind} of" for kind in kinds}
    held = {kind: Access(slot, f"{contents[kind]} {name}") for kind, slot in first.items()}
    for access in held.values():
        if builder.last_writer(access.slot) < 0:
            builder.holds(*access)
    grad, last = layout.plane_slot("grad", group), -1
    for segment in layout.groups[group].segments:
        for start, count, stored in _within(segment, own):
            planes = {p.kind: SlotOffset(first.get(p.kind, grad), p.start + p.num_bytes(start)) for p in segment.planes}
            if stored is not None:
                planes["grad"] = stored
            targets = {kind: SlotOffset(second[kind], place.offset) for kind, place in planes.items() if kind != "grad"}
            args = UpdateTile(group, segment.name, start, count, planes, targets)
            work, label = Work(memory_bytes=_touched_bytes(segment, count)), f"{name} {segment.name}"
            writes = [Access(slot, f"speculated {kind} of {name}") for kind, slot in second.items()]
            reads = [*held.values(), *grads]
            builder.add("update", CommandName("speculate", owner=label), Stream.CPU, reads, writes, work, args=args)
            last = len(builder.commands) - 1
    return last


def _within(segment: Segment, own: Sequence[OwnRange] | None) -> Iterator[tuple[int, int, SlotOffset | None]]:
    """(start, elements) of a segment that are among those of its group, and where their gradients lie by themselves."""
    if own is None:
        yield 0, segment.numel, None
        return
    [plane] = [plane for plane in segment.planes if plane.kind == "grad"]
    first, last = segment.first_element, segment.first_element + segment.numel
    for each in own:
        start, end = max(first, each.first), min(last, each.first + each.numel)
        if start < end:
            offset = plane.num_bytes(each.slot_first + start - each.first)
            yield start - first, end - start, SlotOffset(each.slot, offset)


def _touched_bytes(segment: Segment, count: int) -> int:
    """Bytes of memory that an update of so many elements touches: it writes all planes but the gradient."""
    return sum(p.num_bytes(count) * (1 if p.kind == "grad" else 2) for p in segment.planes)


# -- on the GPU ------------------------------------------------------------------------------------------------------


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


def _lower_tile(builder: ProgramBuilder, layout: Layout, tile: _Tile, number: int) -> None:
    """Fetch what lives on the host into tile slot `number`, update, send back what changed (all but the gradient)."""
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
        if layout.plan.split and layout.plan.request.nodes == 1:  # not before all ranks have stored their pieces
            sources.append(Access(layout.slot("run_squares"), ALL_SQUARES))
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


def _moved_bytes(builder: ProgramBuilder, tile: _Tile) -> float:
    """Bytes of memory that an update reads and writes: all planes, the gradient only read."""
    planes = tile.planes.items()
    return float(sum(builder.slots[slot].num_bytes * (1 if kind == "grad" else 2) for kind, slot in planes))
