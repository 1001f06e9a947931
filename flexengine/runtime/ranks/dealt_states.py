"""Optimizer states that several ranks or nodes divide, as whole tensors of a checkpoint.

A rank has those of the elements that it updates, in its GPU's memory or in its node's. To be saved, they are gathered
in a file beside the checkpoint, since the host has no room for all of them: that is why ranks divide them.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.checkpoint.shards import check_disk, in_words
from flexengine.parallel.nodes import NodeLink
from flexengine.runtime.arena import DTYPES
from flexengine.runtime.ranks.context import RankContext, SeveralRanks
from flexengine.runtime.weights.weight_store import SourceRun, WeightStore
from flexengine.schedule.group_storage import Plane
from flexengine.schedule.layout import Layout
from flexengine.schedule.shares import Share

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

    def own(self, weights: WeightStore) -> Iterator[tuple[int, Tensor]]:
        """This rank's parts of the tensor: the number of the first entry of each, and a flat view of its entries."""
        slot = weights.layout.slots[weights.layout.plane_slot(self.plane.kind, self.run.group)]
        for first, count, offset in self.parts(weights.layout, weights.share):
            yield first, weights.arenas.view(slot, offset, (count,), self.dtype)

    def parts(self, layout: Layout, share: Share) -> Iterator[tuple[int, int, int]]:
        """A rank's parts of the tensor: first entry, entries, and the first byte in its plane's slot."""
        run, plane, width = self.run, self.plane, self.dtype.itemsize
        for begin, first, count in layout.parts_of_states(run.group, run.segment, plane, share):
            start, end = max(first, self.start), min(first + count, self.start + self.count)
            if start < end:
                entries = plane.num_bytes(start - self.start) // width, plane.num_bytes(end - start) // width
                yield *entries, begin + plane.num_bytes(start - first)


def gather_states(
    weights: WeightStore, context: RankContext, tensors: Sequence[DealtTensor], folder: Path
) -> dict[str, Tensor]:
    """Gather tensors that ranks divide, by name, where the rank that writes files can read them; none on the others.

    All ranks make this call, when nothing of them runs. Raises: CheckpointError where the disk is too small; OSError.
    """
    if not tensors or not isinstance(context, SeveralRanks):
        return {}

    begins, link = dict(_places(tensors)), context.link

    def write(file: RanksFile) -> None:
        for begin, tensor in begins.items() if file.is_here else ():
            for first, data in tensor.own(weights):
                file.write(begin + first * data.element_size(), data)
        if link is not None and weights.layout.node_states:
            _write_of_nodes(file, weights, tensors, link)

    raw = file_of_ranks(context, folder, max(begin + tensor.num_bytes for begin, tensor in begins.items()), write)
    if raw is None:
        return {}
    return {t.name: raw[begin : begin + t.num_bytes].view(t.dtype) for begin, t in begins.items()}


class RanksFile:
    """A file that the ranks of the first node write. A disk that takes nothing more is told when all have ended, as
    ranks wait for each other meanwhile.

    descriptor: -1 on the other nodes.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._failure: OSError | None = None

    @property
    def is_here(self) -> bool:
        """Whether this node has the file."""
        return self._descriptor >= 0

    def write(self, offset: int, data: Tensor) -> None:
        """Write entries, unless the disk took none before."""
        try:
            if self._failure is None:
                write_at(self._descriptor, offset, data)
        except OSError as error:
            self._failure = error

    def check(self) -> None:
        """Raise what the first write that failed did, in words: OSError."""
        if self._failure is not None:
            raise in_words(self._failure) from self._failure


def file_of_ranks(
    context: SeveralRanks, folder: Path, num_bytes: int, write: Callable[[RanksFile], None]
) -> Tensor | None:
    """The bytes of a file beside a checkpoint, as the rank that writes files reads them; None on the others.

    Their pages are the system's, which may drop and read them again. write: called by all ranks together. The file has
    no name once it is open, and goes with the last tensor.
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
            file = RanksFile(descriptor)
            write(file)
            file.check()
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


def _write_of_nodes(file: RanksFile, weights: WeightStore, tensors: Sequence[DealtTensor], link: NodeLink) -> None:
    """Give what this rank's node keeps to the first node, whose rank in the same place writes it; all nodes at once."""
    layout, share = weights.layout, weights.share
    for begin, tensor in _places(tensors):
        if tensor.run.group not in layout.node_states:
            continue
        width, own = tensor.dtype.itemsize, tensor.own(weights)
        of_nodes = [list(tensor.parts(layout, share._replace(node=node))) for node in range(link.nodes)]
        for parts in zip_longest(*of_nodes):
            mine = parts[link.node]
            data = torch.empty(0, dtype=torch.uint8) if mine is None else next(own)[1].view(torch.uint8)
            sizes = [0 if part is None else part[1] * width for part in parts]
            given = link.collect(data, sizes)
            for part, found in list(zip(parts, given, strict=True))[1:] if given else ():
                if part is not None:
                    file.write(begin + part[0] * width, found)


def write_at(descriptor: int, offset: int, data: Tensor) -> None:
    """Write entries; a full disk raises here, where one behind mapped memory would kill the process."""
    for values in data.split(WRITTEN_BYTES // data.element_size()):
        piece = values.cpu().view(torch.uint8).numpy().data
        while piece:
            written = os.pwrite(descriptor, piece, offset)
            piece, offset = piece[written:], offset + written
