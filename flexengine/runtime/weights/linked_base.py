"""Finds frozen weights on a drive that a checkpoint's files hold as they are, so that they are read there."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from flexengine.checkpoint.safetensors_format import TensorEntry
from flexengine.models.checkpoints import open_checkpoint
from flexengine.native.linked_files import Link, Region
from flexengine.runtime.arena import DTYPES
from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.layout import Layout
from flexengine.schedule.relocation import Move
from flexengine.schedule.shares import ALONE
from flexengine.schedule.slots import Slot


def linked_regions(layout: Layout, folder: Path | None, offload_dir: str | None) -> list[Region]:
    """The planes of frozen groups on the drive all of whose bytes lie in a checkpoint's files.

    None where these are not on the drive of `offload_dir`, whose rates the plan counts on, or a group's weights are
    decoded, rounded, stored in fewer bytes, or lack a tensor or rows of one; nor where adapters take parts of the
    weights out of them, nor without a checkpoint. Raises: CheckpointError, ValueError as `open_checkpoint`.
    """
    lora = layout.model.lora
    if folder is None or offload_dir is None or (lora is not None and lora.changes_base):
        return []
    with open_checkpoint(layout.model, folder) as reader:
        files = {entry.file for entry in reader.tensors.values()}
        if any(_drive_of(folder / file) != _drive_of(Path(offload_dir)) for file in files):
            return []
        return list(_regions(layout, folder, reader.tensors))


def _drive_of(path: Path) -> int:
    """The number of the device that a path lies on, or will."""
    there = path.absolute()
    while not there.exists():
        there = there.parent
    return there.stat().st_dev


def _regions(layout: Layout, folder: Path, tensors: dict[str, TensorEntry]) -> Iterator[Region]:
    for index, (group, stored) in enumerate(zip(layout.model.groups, layout.groups, strict=True)):
        slot = layout.slots[layout.stored_slot("weights", index)]
        if slot.memory != "drive" or not group.frozen or stored.stored is not None:
            continue
        links = list(_links(layout, index, stored, slot, folder, tensors))
        if all(links):
            yield Region(slot.offset, slot.num_bytes, tuple(sorted(link for link in links if link is not None)))


def _links(
    layout: Layout, index: int, stored: GroupStorage, slot: Slot, folder: Path, tensors: dict[str, TensorEntry]
) -> Iterator[Link | None]:
    """Where each tensor of a group lies; None for one that no file holds as it is."""
    for param in layout.model.groups[index].params:
        segment = stored.segment_of(param.name)
        plane = next(plane for plane in segment.planes if plane.kind == "weights")
        dtype = DTYPES[plane.dtype]
        start = layout.plane_start(index, segment, plane, ALONE)[0]
        start += (stored.offsets[param.name] - segment.first_element) * dtype.itemsize
        for source in param.sources:
            entry = tensors.get(source.name)
            same = entry is not None and (entry.dtype, entry.num_elements) == (dtype, math.prod(source.shape))
            if entry is None or not same or param.absent or source.decode is not None or source.rows_in_file:
                yield None
                return
            if entry.offset_bytes % dtype.itemsize:  # the format asks for no border
                yield None
                return
            yield Link(slot.offset + start, entry.num_bytes, folder / entry.file, entry.offset_bytes)
            start += entry.num_bytes


def moved_regions(regions: Sequence[Region], moves: Sequence[Move]) -> tuple[list[Region], list[Move]]:
    """Where planes that lie in a checkpoint's files are when planes have moved, and the moves of all others."""
    first, last = {move.name: move for move in reversed(moves)}, {move.name: move for move in moves}
    names = {move.source.offset: name for name, move in first.items() if move.source.memory == "drive"}
    linked = {region: names.get(region.offset_bytes) for region in regions}
    found = [region.at(last[name].target.offset) if name else region for region, name in linked.items()]
    return found, [move for move in moves if move.name not in linked.values()]
