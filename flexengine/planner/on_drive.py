"""Which groups keep planes on a drive: as few as the host's budget allows.

Optimizer states and frozen weights first; only where that is not enough weights and gradients of trained blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from flexengine.models.spec import BLOCK_CLASSES, GroupSpec, ModelSpec
from flexengine.plan import GroupPlan, LayerPlan, Numerics, Plan
from flexengine.planner.cost.stream_loads import (
    FROZEN_ON_DRIVE,
    FROZEN_RESIDENCIES,
    ON_DRIVE,
    STREAMED,
    UPDATED_BY_CPU,
)
from flexengine.planner.problem import Problem
from flexengine.planner.sizes import chunk_sizes
from flexengine.schedule.arena_slots import STAGED_GRADS, STAGED_WEIGHTS
from flexengine.schedule.drive import (
    BLOCK_BYTES,
    drive_bytes,
    drive_kinds,
    in_blocks,
    staged_offsets,
    staged_part_bytes,
)
from flexengine.schedule.group_storage import DTYPE_BYTES, GroupStorage, group_storage
from flexengine.schedule.kept_on_drive import kept_sizes
from flexengine.schedule.layer_program import align
from flexengine.schedule.layout import Layout
from flexengine.schedule.segments import may_go_by_chunk
from flexengine.schedule.slots import PlaneKind

TILES_ON_DRIVE, LEAST_DRIVE_TILE = 256, 1 << 18
"""Tiles of all states on a drive, of which some are on the host at once, and the least elements of one: a drive wants
requests of MiBs."""


def numbers_on_drive(group: GroupSpec, on_drive: bool) -> tuple[int, ...]:
    """The numbers of homes that mean a drive: of edges the one of what streams, as they have none by the CPU. Of what
    is frozen, all blocks that stream."""
    if group.adapter or not on_drive:
        return ()
    if group.frozen:
        streams = tuple(n for n, home in enumerate(FROZEN_RESIDENCIES) if home.weights == "host")
        return streams if group.slot_class in BLOCK_CLASSES else ()
    return (UPDATED_BY_CPU,) if group.slot_class in BLOCK_CLASSES else (STREAMED, UPDATED_BY_CPU)


def home_on_drive(group: GroupSpec, everything: bool, ranks: int) -> GroupPlan:
    """What the numbers of homes that mean a drive mean for a group that is trained. everything: of blocks weights and
    gradients lie there, too, but gradients that cross the link in parts or that several ranks add up."""
    if not everything or group.slot_class not in BLOCK_CLASSES:
        return ON_DRIVE
    return GroupPlan("drive", "drive" if group.num_parts == ranks == 1 else "host", "drive", "cpu")


def homes_on_drive(group: GroupSpec, on_drive: bool, everything: bool, ranks: int) -> dict[int, GroupPlan]:
    """What numbers of homes that mean a drive mean for a group."""
    home = FROZEN_ON_DRIVE if group.frozen else home_on_drive(group, everything, ranks)
    return dict.fromkeys(numbers_on_drive(group, on_drive), home)


def drive_tile(num_parameters: int) -> int:
    """Elements of a tile from a drive: of large models as many as are useful, of small ones a small part of all."""
    return min(Plan.drive_tile, max(LEAST_DRIVE_TILE, num_parameters // TILES_ON_DRIVE))


def staged_bytes(
    model: ModelSpec, numbers: Iterable[int], layouts: Iterable[GroupStorage], on_drive: bool, everything: bool,
    ranks: int,
) -> tuple[int, int]:  # fmt: skip
    """Host bytes that tiles of some groups take on their way from and to a drive, and blocks' weights and gradients on
    theirs between a drive and the GPU, at the most."""
    if not on_drive:
        return 0, 0
    groups, tile = (model.groups[number] for number in numbers), drive_tile(model.num_trained_parameters)
    rows = [
        (group, stored, FROZEN_ON_DRIVE if group.frozen else home_on_drive(group, everything, ranks))
        for group, stored in zip(groups, layouts, strict=True)
    ]
    tiles = ((stored, kinds) for _, stored, home in rows if (kinds := drive_kinds(stored, home)))
    rings = (("weights", STAGED_WEIGHTS), ("grad", STAGED_GRADS))
    parts = (count * max((_part_bytes(*row, kind) for row in rows), default=0) for kind, count in rings)
    return Plan.drive_slots * (staged_offsets(tiles, tile)["end"] + BLOCK_BYTES), sum(parts)


def _part_bytes(group: GroupSpec, stored: GroupStorage, home: GroupPlan, kind: PlaneKind) -> int:
    if home.home_of(kind) != "drive" or group.slot_class not in BLOCK_CLASSES:
        return 0
    return staged_part_bytes(stored, kind, trained=home.trained) + BLOCK_BYTES


def bytes_for_drive(problem: Problem) -> tuple[int, int]:
    """Bytes of all planes that may lie on a drive, and with the inputs that layers keep of a whole step."""
    planes, tokens = _bytes_of_planes(problem), problem.request.max_global_batch_tokens
    blocks = sum(layer.keeps for layer in problem.model.blocks)
    inputs = problem.model.hidden.num_bytes(tokens, DTYPE_BYTES[problem.request.numerics.compute])
    return planes, planes + in_blocks(inputs) * blocks


def _bytes_of_planes(problem: Problem) -> int:
    """Of optimizer states but of adapters and of what the GPU alone updates, and of weights and gradients of blocks."""
    model, numerics = problem.model, problem.request.numerics
    trained = [(group, group_storage(group, numerics)) for group in model.groups if not (group.frozen or group.adapter)]
    if any(stored.on_gpu_only for _, stored in trained):
        return 0
    homes = ((stored, home_on_drive(group, True, problem.request.ranks)) for group, stored in trained)
    return sum(drive_bytes(stored, drive_kinds(stored, home)) for stored, home in homes) + frozen_bytes(model, numerics)


def frozen_bytes(model: ModelSpec, numerics: Numerics) -> int:
    """Bytes of weights that may lie on a drive, as they are frozen."""
    frozen = (group for group in model.groups if group.frozen and numbers_on_drive(group, on_drive=True))
    return sum(in_blocks(group_storage(group, numerics).plane_bytes["weights"]) for group in frozen)


def memory_may_hold(problem: Problem) -> bool:
    """Whether GPU and host may hold what a kind of plans keeps on no drive, where there is one: searching for what
    cannot fit takes longer."""
    request = problem.request
    if not request.max_drive_bytes or request.shares_node:
        return True
    num_bytes = _least_of_planes(problem) + (0 if problem.kept_on_drive else _least_of_inputs(problem))
    return num_bytes <= request.max_gpu_bytes + request.max_host_bytes


def _least_of_planes(problem: Problem) -> int:
    """Bytes of weights and optimizer states that plans keep on no drive."""
    found = 0
    for group in problem.model.groups:
        planes, there = group_storage(group, problem.request.numerics).plane_bytes, problem.on_drive
        weights_there = there and group.slot_class in BLOCK_CLASSES and (group.frozen or problem.all_on_drive)
        found += 0 if weights_there and not group.adapter else planes["weights"]
        states = sum(num_bytes for kind, num_bytes in planes.items() if kind not in ("weights", "grad"))
        found += 0 if there and not group.adapter else states
    return found


def _least_of_inputs(problem: Problem) -> int:
    """Bytes of the longest sequence's hidden states, and of the first input of each of the best segments with one
    segment's others; nothing where segments may run chunk by chunk, which keeps less."""
    model, request = problem.model, problem.request
    longest = request.max_seq_len
    if may_go_by_chunk(model) and any(chunk >= longest for chunk, _ in chunk_sizes(request)):
        return 0
    blocks = sum(layer.keeps for layer in model.blocks)
    inputs = min((-(-blocks // length) + length - 1 for length in range(1, blocks + 1)), default=0)
    return (1 + inputs) * model.hidden.num_bytes(longest, DTYPE_BYTES[request.numerics.compute])


KINDS = ("weights", "grads", "kept", "states")
"""Those that cross a drive most often in a step first: weights twice in every round, gradients nearly as often."""


def orders_of_kinds(plan: Plan) -> list[tuple[str, ...]]:
    """Orders in which kinds of planes may come to the host: weights first, or what backward leaves, or needs."""
    found: list[tuple[str, ...]] = [KINDS]
    if any(home.grads == "drive" for home in plan.groups):
        found.append(("grads", "weights", "kept", "states"))
    if any(kept.on_drive for kept in plan.layers):
        found.append(("kept", "weights", "grads", "states"))
    return found


def planes_on_host(problem: Problem, plan: Plan, kinds: Iterable[str] = KINDS, *, last_first: bool = False) -> Plan:
    """The plan with planes of some kinds, in this order, on the host instead of a drive, as far as it has room; of a
    kind those of the first layers first, or of the last ones. `kept`: what layers keep from forward to backward."""
    if not plan.uses_drive:
        return plan
    layout, homes, layers = problem.layout(plan), list(plan.groups), list(plan.layers)
    step = -1 if last_first else 1
    room = problem.room(layout).host_bytes
    for kind in kinds:
        if kind == "kept":
            room = _kept_on_host(layout, layers, room, step)
            continue
        for group in range(len(homes))[::step]:
            home, planes = homes[group], layout.groups[group].plane_bytes
            waits = kind == "states" and "drive" in (home.weights, home.grads)
            if waits or getattr(home, kind) != "drive":
                continue
            moved = home.off_the_drive((kind,))
            num_bytes = sum(align(planes[k]) for k in planes if home.home_of(k) != moved.home_of(k))
            num_bytes //= plan.request.ranks  # each counts its part of what all have there
            if num_bytes <= room:
                homes[group], room = moved, room - num_bytes
    fewer = replace(plan, groups=tuple(homes), layers=tuple(layers))
    return fewer if fewer != plan and problem.fits(problem.layout(fewer)) else plan


def _kept_on_host(layout: Layout, layers: list[LayerPlan], room: int, step: int) -> int:
    """Have layers keep on the host what they keep on a drive, as far as it has room; returns what is left of that."""
    for layer in range(len(layers))[::step]:
        num_bytes = layout.kept_chunks * sum(align(size) for size in kept_sizes(layout, layer))
        if num_bytes and num_bytes <= room:
            layers[layer], room = replace(layers[layer], on_drive=False), room - num_bytes
    return room
