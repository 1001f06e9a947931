"""Optimizer states that several ranks divide, as whole tensors of a checkpoint.

A rank has those of the elements that it updates. To be saved, they are gathered in a file beside the checkpoint, since
the host has no room for all of them: that is why ranks divide them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.checkpoint.shards import check_disk
from flexengine.runtime.arena import DTYPES
from flexengine.runtime.ranks.context import RankContext, SeveralRanks
from flexengine.runtime.weights.weight_store import SourceRun, WeightStore
from flexengine.schedule.group_storage import Plane

WRITTEN_BYTES = 32 << 20
"""Bytes that pass through the host's memory at once. More would hardly be faster, and the budget has no room for it."""


class DealtTensor(NamedTuple):
    """A tensor of a checkpoint that ranks divide: `start` and `count` are its elements in the segment of `run`."""

    name: str
    run: SourceRun
    plane: Plane
    start: int
    count: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.plane.num_bytes(self.count)

    @property
    def dtype(self) -> torch.dtype:
        """Type of its entries."""
        return DTYPES[self.plane.dtype]

    def own(self, weights: WeightStore) -> tuple[int, Tensor]:
        """This rank's part of the tensor: the number of its first entry, and a flat view of its entries."""
        layout, (run, plane) = weights.layout, (self.run, self.plane)
        dealt = layout.dealt_states(layout.groups[run.group])
        begin, first, count = dealt.place(run.segment, plane, weights.share)
        start, end = max(first, self.start), min(first + count, self.start + self.count)
        if start >= end:
            return 0, torch.empty(0, dtype=self.dtype)
        slot, width = layout.slots[layout.plane_slot(plane.kind, run.group)], self.dtype.itemsize
        offset, num_bytes = begin + plane.num_bytes(start - first), plane.num_bytes(end - start)
        data = weights.arenas.view(slot, offset, (num_bytes // width,), self.dtype)
        return plane.num_bytes(start - self.start) // width, data


def gather_states(
    weights: WeightStore, context: RankContext, tensors: Sequence[DealtTensor], folder: Path
) -> dict[str, Tensor]:
    """Gather tensors that ranks divide, by name, where the rank that writes files can read them; none on the others.

    All ranks make this call, when nothing of them runs. Raises: CheckpointError where the disk is too small; OSError.
    """
    if not tensors or not isinstance(context, SeveralRanks):
        return {}

    def write(descriptor: int) -> None:
        if descriptor >= 0:
            _write_own(descriptor, weights, tensors)

    begins = dict(_places(tensors))
    raw = file_of_ranks(context, folder, max(begin + tensor.num_bytes for begin, tensor in begins.items()), write)
    if raw is None:
        return {}
    return {t.name: raw[begin : begin + t.num_bytes].view(t.dtype) for begin, t in begins.items()}


def file_of_ranks(context: SeveralRanks, folder: Path, num_bytes: int, write: Callable[[int], None]) -> Tensor | None:
    """The bytes of a file beside a checkpoint, as the rank that writes files reads them; None on the others.

    Their pages are the system's, which may drop and read them again. write: called by all ranks together with the
    file's descriptor, -1 on the other nodes. The file has no name once it is open, and goes with the last tensor.
    Raises: CheckpointError where the disk is too small; OSError; what `write` raises.
    """
    writes, found = context.writes_files, None
    with context.together():
        new = _new_file(folder, num_bytes) if writes else ""
    path, descriptor = context.control.broadcast(new), -1
    try:
        try:
            with context.together():
                descriptor = os.open(path, os.O_RDWR) if context.ranks.node == 0 else -1
        finally:
            if writes:
                os.unlink(path)
        with context.together():
            write(descriptor)
        with context.together():
            if writes:
                os.truncate(descriptor, num_bytes)
                raw = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
                found = torch.frombuffer(raw, dtype=torch.uint8)
    finally:
        if descriptor >= 0:
            os.close(descriptor)
    return found


def _new_file(folder: Path, num_bytes: int) -> str:
    """Make a file in the nearest folder above `folder` that exists, as `folder` itself may be exchanged."""
    above = next(path for path in folder.resolve().parents if path.exists())
    check_disk(above, num_bytes)
    descriptor, path = tempfile.mkstemp(dir=above, prefix=f".{folder.name}.", suffix=".states.flexengine.tmp")
    os.close(descriptor)
    return path


def _places(tensors: Sequence[DealtTensor]) -> Iterator[tuple[int, DealtTensor]]:
    """Where each tensor begins in the file, at a whole number of widest entries."""
    end = 0
    for tensor in tensors:
        yield end, tensor
        end += -(-tensor.num_bytes // 8) * 8


def _write_own(descriptor: int, weights: WeightStore, tensors: Sequence[DealtTensor]) -> None:
    """Write this rank's entries; a full disk raises here, where one behind mapped memory would kill the process."""
    for begin, tensor in _places(tensors):
        first, data = tensor.own(weights)
        count = WRITTEN_BYTES // data.element_size()
        for start in range(0, data.numel(), count):
            write_at(descriptor, data[start : start + count].cpu(), begin + (first + start) * data.element_size())


def write_at(descriptor: int, data: Tensor, offset: int) -> None:
    """Write a flat tensor of the CPU to a file from an offset on."""
    left = data.view(torch.uint8).numpy().data
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written
