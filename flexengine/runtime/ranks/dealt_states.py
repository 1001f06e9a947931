"""Optimizer states that several ranks divide, as whole tensors of a checkpoint.

A rank has those of the elements that it updates. To be saved, they are gathered in a file beside the checkpoint, since
the host has no room for all of them: that is why ranks divide them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
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

    The file has no name once all ranks of its node have opened it, and goes with the last tensor. All ranks make this
    call, when nothing of them runs. Raises: CheckpointError where the disk is too small; OSError.
    """
    if not tensors or not isinstance(context, SeveralRanks):
        return {}
    writes, found = context.writes_files, dict[str, Tensor]()
    with context.together():
        new = _new_file(folder, sum(tensor.num_bytes for tensor in tensors)) if writes else ""
    path, descriptor = context.control.broadcast(new), -1
    try:
        try:
            with context.together():
                descriptor = os.open(path, os.O_RDWR) if context.ranks.node == 0 else -1
        finally:
            if writes:
                os.unlink(path)
        with context.together():
            if descriptor >= 0:
                _write_own(descriptor, weights, tensors)
        with context.together():
            found = _mapped(descriptor, tensors) if writes else found
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
            piece = data[start : start + count].cpu().view(torch.uint8).numpy().data
            offset = begin + (first + start) * data.element_size()
            while piece:
                written = os.pwrite(descriptor, piece, offset)
                piece, offset = piece[written:], offset + written


def _mapped(descriptor: int, tensors: Sequence[DealtTensor]) -> dict[str, Tensor]:
    """View the file's tensors by name; their pages are the system's, which may drop and read them again."""
    raw = torch.frombuffer(mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
    return {tensor.name: raw[begin : begin + tensor.num_bytes].view(tensor.dtype) for begin, tensor in _places(tensors)}
