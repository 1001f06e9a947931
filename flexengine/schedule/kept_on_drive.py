"""What layers keep on a drive from forward to backward, and the slots of the host that it passes through both ways."""

from __future__ import annotations

from collections.abc import Iterator

from flexengine.schedule.drive import BLOCK_BYTES, in_blocks
from flexengine.schedule.planned_sizes import PlannedSizes
from flexengine.schedule.region import Region
from flexengine.schedule.slots import SlotKey

STAGED_KEPT = 4
"""Slots of the host for what is kept, on its way to or from a drive: one on the link, one on the drive, two waiting, as
backward needs inputs at once that the drive reads behind weights."""


def keeps_input(sizes: PlannedSizes, layer: int) -> bool:
    """Whether a layer's input lies on a drive from forward to backward."""
    kept = sizes.plan.layers[layer]
    return kept.on_drive and kept.input_home == "host" and not kept.input_again and _keeps(sizes, layer)


def keeps_saved(sizes: PlannedSizes, layer: int) -> bool:
    """Whether a layer's outputs lie there. What a block keeps as it runs again waits on the host: it is short."""
    kept = sizes.plan.layers[layer]
    found = kept.on_drive and bool(kept.keep_host) and not sizes.segments.runs_again(layer)
    return found and _keeps(sizes, layer)


def _keeps(sizes: PlannedSizes, layer: int) -> bool:
    return sizes.model.layers[layer].keeps and sizes.trains(layer)


def kept_sizes(sizes: PlannedSizes, layer: int) -> list[int]:
    """Bytes of a chunk's input and outputs of a layer, of those that lie on a drive."""
    found = [sizes.hidden_bytes] * keeps_input(sizes, layer)
    return found + [sizes.programs[layer].save_host_bytes] * keeps_saved(sizes, layer)


def kept_slots(sizes: PlannedSizes) -> Iterator[tuple[SlotKey, int]]:
    """Every slot on a drive of what is kept, in whole blocks."""
    for layer in range(len(sizes.plan.layers)):
        for c in range(sizes.kept_chunks):
            if keeps_input(sizes, layer):
                yield sizes.segments.key_of_input(layer, c, "drive"), in_blocks(sizes.hidden_bytes)
            if keeps_saved(sizes, layer):
                num_bytes = sizes.programs[layer].save_host_bytes
                yield sizes.segments.key_of_saved("save", layer, c, "drive", num_bytes), in_blocks(num_bytes)


def add_staged(sizes: PlannedSizes, region: Region) -> None:
    """Append the slots of the host that it passes through, at borders of a drive's blocks."""
    held = [num_bytes for layer in range(len(sizes.plan.layers)) for num_bytes in kept_sizes(sizes, layer)]
    for k in range(STAGED_KEPT if held else 0):
        region.end = in_blocks(region.end)
        region.add("staged_kept", in_blocks(max(held)), "drive slots", index=k)
        region.add_places((0, num_bytes) for num_bytes in held)


def staged_kept_bytes(num_bytes: int) -> int:
    """Host bytes that these slots take at the most, for so many bytes of the largest tensor."""
    return STAGED_KEPT * in_blocks(num_bytes) + BLOCK_BYTES if num_bytes else 0
