"""The two arenas: one region per memory, allocated once at its exact size; slots are views of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress

import torch
from torch import Tensor

from flexengine.hardware.memory_usage import hold_cublas_workspace
from flexengine.native import HostBuffer, allocate_host
from flexengine.native.drive import DriveFile
from flexengine.native.host_memory import return_large_blocks
from flexengine.native.linked_files import Holes, LinkedFiles, Region, holes_of
from flexengine.schedule.layout import Layout
from flexengine.schedule.relocation import ByteRange, Copy
from flexengine.schedule.slots import Memory, Slot

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}


def wide_dtype(layout: Layout) -> torch.dtype:
    """The dtype of accumulators and losses: float64 where a run computes in it, else float32."""
    return torch.float64 if layout.acc_bytes == 8 else torch.float32


RELOCATION_PIECE_BYTES = 32 * 2**20
"""Bytes that move at a time when a plane shifts by less than its size."""


class Arenas:
    """GPU and host memory of an engine.

    On CUDA the host arena is page-locked, by `page_locking`, and the GPU arena is one device allocation; on the CPU
    both are ordinary host memory, so that the same program runs, copies and all. `close` gives everything back.
    """

    def __init__(self, device: torch.device, gpu_bytes: int, host_bytes: int) -> None:
        self.device = device
        on_cuda = device.type == "cuda"
        self._buffers: list[HostBuffer] = []
        self.drive: DriveFile | None = None
        self.linked: LinkedFiles | None = None
        host = self._allocate_host(max(1, host_bytes), page_locked=on_cuda)
        if on_cuda:
            gpu = torch.empty(gpu_bytes, dtype=torch.uint8, device=device)
        else:
            return_large_blocks()
            gpu = self._allocate_host(max(1, gpu_bytes), page_locked=False)
        self.capacity: dict[Memory, int] = {"gpu": gpu_bytes, "host": host_bytes}
        self._typed: dict[str, dict[torch.dtype, Tensor]] = {
            "gpu": {t: _whole(gpu, t) for t in DTYPES.values()},
            "host": {t: _whole(host, t) for t in DTYPES.values()},
        }

    def reserve_workspace(self, num_bytes: int) -> None:
        """Have torch's allocator keep one block of so many bytes for what calls of libraries take on this stream.

        A call's buffers of many sizes, each from the driver, would leave gaps that no later one fits into.
        """
        if self.device.type != "cuda":
            return
        torch.cuda.empty_cache()  # a step's budget has no room for what torch keeps of loading's temporaries
        hold_cublas_workspace(self.device)  # or it would lie in the block
        with suppress(torch.OutOfMemoryError):  # after a change of plan the arena may be larger than its layout
            torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def add_node(self, shared: Tensor) -> None:
        """Add memory that this rank shares with the others of its node; whoever made it releases it."""
        self.capacity["node"] = shared.numel()
        self._typed["node"] = {t: _whole(shared, t) for t in DTYPES.values()}

    def add_drive(self, opened: Callable[[Holes], DriveFile], regions: Sequence[Region] = ()) -> None:
        """Add memory on a drive, with holes where other files hold what lies there. What `opened` raises, this does,
        too; then all memory is given back."""
        try:
            self.linked = LinkedFiles(regions) if regions else None
            self.drive = opened(holes_of(regions))
        except BaseException:
            self.close()
            raise
        self.capacity["drive"] = self.drive.num_bytes
        self._typed["drive"] = {t: _whole(self.drive.tensor, t) for t in DTYPES.values()}

    def _allocate_host(self, num_bytes: int, page_locked: bool) -> Tensor:
        buffer = allocate_host(num_bytes, page_locked, lock_now=False)
        self._buffers.append(buffer)
        return buffer.tensor

    @contextmanager
    def page_locking(self) -> Iterator[None]:
        """Page-lock the host arena beside the body, which may read and write it. Raises: MemoryError where the driver
        refuses, at the body's end."""
        with ExitStack() as beside:
            for buffer in self._buffers:
                beside.enter_context(buffer.locking())
            yield

    def bytes_view(self, memory: Memory, offset: int, num_bytes: int) -> Tensor:
        """View `num_bytes` bytes of an arena as uint8."""
        self._note_use(memory)
        return self._typed[memory][torch.uint8].narrow(0, offset, num_bytes)

    def _note_use(self, memory: Memory) -> None:
        """Have the drive know that somebody may change its bytes through a view."""
        if memory == "drive" and self.drive is not None:
            self.drive.touched()

    def view(self, slot: Slot, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """View a slot from `offset` bytes on as a contiguous tensor; the offset is aligned to the element."""
        stride, count = [], 1
        for size in reversed(shape):
            stride.append(count)
            count *= size
        assert offset + count * dtype.itemsize <= slot.num_bytes, (
            f"slot {slot.name} has {slot.num_bytes} bytes; a {shape} {dtype} tensor at {offset} does not fit"
        )
        if slot.memory == "drive" and self.linked is not None:
            found = self.linked.view(slot.offset + offset, count * dtype.itemsize)
            if found is not None:
                return found.view(dtype).view(shape)
        self._note_use(slot.memory)
        start = (slot.offset + offset) // dtype.itemsize
        return self._typed[slot.memory][dtype].as_strided(shape, stride[::-1], start)

    def fill(self, memory: Memory, byte: int) -> None:
        """Set every byte of an arena.

        255 makes every float a NaN, which tests use to find reads of unwritten memory.
        """
        self._note_use(memory)
        self._typed[memory][torch.uint8].fill_(byte)

    def clear(self, slot: Slot) -> None:
        """Set the bytes of a slot to zero; those of a drive without writing them, where it can."""
        if slot.memory == "drive" and self.drive is not None:
            self.drive.zero(slot.offset, slot.num_bytes)
        else:
            self.bytes_view(slot.memory, slot.offset, slot.num_bytes).zero_()

    def settle_drive(self) -> None:
        """Have memory hold nothing of what lies on the drive; views stay."""
        for files in (self.drive, self.linked):
            if files is not None:
                files.settle()

    @property
    def regions(self) -> list[Region]:
        """Planes on the drive that lie in other files."""
        return [] if self.linked is None else self.linked.regions

    def relink(self, regions: Sequence[Region]) -> None:
        """Have the same bytes of other files lie elsewhere on the drive. Raises: DriveError where it lacks room for
        what was a hole."""
        if self.linked is not None and self.drive is not None:
            self.drive.allocate(holes_of(regions))
            self.linked.place(regions)

    def relocate(self, copies: Iterable[Copy]) -> None:
        """Copy one after the other; blocks until the last has ended. Takes RELOCATION_PIECE_BYTES more."""
        for source, target in copies:
            if source.overlaps(target):
                self._shift(source, target)
            else:
                self._bytes(target).copy_(self._bytes(source))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _shift(self, source: ByteRange, target: ByteRange) -> None:
        """Move bytes onto a range that overlaps theirs: piece by piece, from the side that they move towards."""
        piece = min(RELOCATION_PIECE_BYTES, source.num_bytes)
        spare = torch.empty(piece, dtype=torch.uint8, device=self._typed[source.memory][torch.uint8].device)
        starts = range(0, source.num_bytes, piece)
        for start in starts if target.offset < source.offset else reversed(starts):
            count = min(piece, source.num_bytes - start)
            spare[:count].copy_(self.bytes_view(source.memory, source.offset + start, count))
            self.bytes_view(target.memory, target.offset + start, count).copy_(spare[:count])

    def _bytes(self, span: ByteRange) -> Tensor:
        return self.bytes_view(span.memory, span.offset, span.num_bytes)

    def close(self) -> None:
        """Release the GPU's and the host's arena; no view may be used afterwards.

        GPU memory goes back even while views of it are still referred to: the next engine of the process may need it.
        """
        if self._typed and self.device.type == "cuda":
            self._typed["gpu"][torch.uint8].untyped_storage().resize_(0)
        self._typed.clear()
        for files in (self.drive, self.linked):
            if files is not None:
                files.close()
        for buffer in self._buffers:
            buffer.close()
        self._buffers.clear()


def _whole(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """View a byte buffer in another dtype, without a tail shorter than one element."""
    return raw[: raw.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
