"""A scratch file on a drive: made whole at once, read and written in blocks past the page cache.

csrc/drive.cpp moves the blocks with a thread for each request; without the library, os.preadv and os.pwritev do, one
after the other. Where a file system refuses O_DIRECT, as tmpfs may, the page cache is told to forget what was moved.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import tempfile
import threading
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.native import library
from flexengine.native.mapping_trim import MappingTrim
from flexengine.native.page_lock import size_text

THREADS = 16
"""Requests at once: NVMe drives reach their rates with 8 to 32 of MiBs each."""
REQUEST_BYTES = 4 << 20
BLOCK_BYTES = 4096
_ZERO_RANGE = 0x10  # FALLOC_FL_ZERO_RANGE of <linux/falloc.h>


class DriveError(OSError):
    """A drive refuses or loses data; the message says what was asked, what it answered and what to do.

    again: whether a call has raised it before.
    """

    again = False


class DrivePiece(NamedTuple):
    """Bytes of a file from `offset_bytes` on, and the flat uint8 tensor on the CPU that they go to or come from."""

    offset_bytes: int
    memory: Tensor


class BlockFile(ABC):
    """A file that is open, `num_bytes` of it, until `close`.

    direct: whether blocks are moved past the page cache. `tensor` maps it for whoever touches it between steps;
    `settle` comes before blocks are moved again.
    """

    request_bytes: int | None = None
    """Bytes of a request; None: REQUEST_BYTES."""

    def __init__(self, descriptor: int, num_bytes: int, direct: bool, access: int = mmap.ACCESS_DEFAULT) -> None:
        self._descriptor, self.num_bytes, self.direct = descriptor, num_bytes, direct
        self._mapping = mmap.mmap(descriptor, max(1, num_bytes), access=access)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")
            self._tensor: Tensor | None = torch.frombuffer(self._mapping, dtype=torch.uint8)[:num_bytes]
        self._mapped_is_touched, self._settling = False, threading.Lock()
        self._trim = MappingTrim(self._tensor, descriptor, self)

    @property
    def tensor(self) -> Tensor:
        """The bytes, uint8 [num_bytes], through the page cache. Raises: ValueError after `close`."""
        if self._tensor is None:
            raise ValueError("this file on a drive is closed")
        return self._tensor

    def touched(self) -> None:
        """Note that somebody uses the mapping, of which memory holds little meanwhile."""
        with self._settling:
            self._mapped_is_touched = True
            self._trim.start()

    def settle(self) -> None:
        """Have the drive hold what was written through the mapping, and memory nothing of it."""
        with self._settling:  # whoever moves blocks beside waits for it
            if self._mapped_is_touched:
                try:
                    self._trim.settle()
                except OSError as error:
                    raise self._failure(0, error.errno or 0, writes=True) from error
                self._mapped_is_touched = False

    def read(self, pieces: Sequence[DrivePiece]) -> None:
        """Read pieces into memory, blocks or any others. Blocks until they are there; other Python threads run
        meanwhile.

        Raises: DriveError where the drive fails.
        """
        self._move(pieces, writes=False)

    def close(self) -> None:
        """Give the bytes back; a second call does nothing. No view may be used afterwards."""
        self._trim.close()
        self._tensor = None
        with contextlib.suppress(BufferError):  # somebody holds a view: the mapping goes with it
            self._mapping.close()
        self._close_descriptor()

    def _close_descriptor(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    # -- blocks ------------------------------------------------------------------------------------------------------

    def _move(self, pieces: Sequence[DrivePiece], *, writes: bool) -> None:
        self.settle()
        native = library.bind(
            "flex_drive_move", ctypes.c_int32, ctypes.POINTER(_Piece), ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64,
            ctypes.c_int32, ctypes.POINTER(_Failure),
        )  # fmt: skip
        if native is None:
            library.fallback_notice("a drive", "one request at a time is far from its rates")
            self._move_by_python(pieces, writes=writes)
        else:
            self._move_natively(native, pieces, writes=writes)
        if not self.direct:
            if writes:
                os.fdatasync(self._descriptor)  # the cache forgets only what the drive has
            for piece in pieces:
                self._forget(piece.offset_bytes, piece.memory.numel())

    def _move_natively(self, native: Callable[..., int], pieces: Sequence[DrivePiece], *, writes: bool) -> None:
        rows = (_Piece * len(pieces))(*[(p.offset_bytes, p.memory.numel(), p.memory.data_ptr()) for p in pieces])
        failure, size = _Failure(offset_bytes=1 << 63), self.request_bytes or REQUEST_BYTES
        status = native(self._descriptor, rows, len(pieces), THREADS, size, int(writes), ctypes.byref(failure))
        if status != 0 and failure.offset_bytes < 1 << 63:
            raise self._failure(failure.offset_bytes, failure.error_number, writes=writes)
        library.check(status, "drive")

    def _move_by_python(self, pieces: Sequence[DrivePiece], *, writes: bool) -> None:
        for piece in pieces:
            if not writes and _is_between_borders(piece):
                self._read_around(piece)
            else:
                self._move_piece(piece.memory.numpy().data, piece.offset_bytes, writes=writes)

    def _move_piece(self, memory: memoryview, offset_bytes: int, *, writes: bool, needed: int | None = None) -> None:
        """needed: the bytes of it that have to be there; None: all."""
        move, least = os.pwritev if writes else os.preadv, memory.nbytes if needed is None else needed
        while least > 0:
            try:
                count = move(self._descriptor, [memory[:REQUEST_BYTES]], offset_bytes)
            except OSError as error:
                raise self._failure(offset_bytes, error.errno or 0, writes=writes) from error
            if count < least:  # a short last block is read once more, from its border on
                count -= count % BLOCK_BYTES if needed is not None else 0
            if count == 0:
                raise self._failure(offset_bytes, 0, writes=writes)
            memory, offset_bytes, least = memory[count:], offset_bytes + count, least - count

    def _read_around(self, piece: DrivePiece) -> None:
        """Read what begins or ends at no border of blocks, some blocks at a time."""
        around, end = mmap.mmap(-1, REQUEST_BYTES), piece.offset_bytes + piece.memory.numel()
        position = piece.offset_bytes
        while position < end:
            skipped = position % BLOCK_BYTES
            needed = min(REQUEST_BYTES, end - position + skipped)
            with memoryview(around) as whole, whole[: -(-needed // BLOCK_BYTES) * BLOCK_BYTES] as blocks:
                self._move_piece(blocks, position - skipped, writes=False, needed=needed)
            begin, count = position - piece.offset_bytes, needed - skipped
            piece.memory[begin : begin + count].numpy().data[:] = around[skipped:needed]
            position += count

    @abstractmethod
    def _failure(self, offset_bytes: int, error_number: int, *, writes: bool) -> DriveError:
        """The error that tells of bytes which could not be moved."""

    def _forget(self, offset_bytes: int, num_bytes: int) -> None:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, offset_bytes, num_bytes, os.POSIX_FADV_DONTNEED)


def _is_between_borders(piece: DrivePiece) -> bool:
    return any(number % BLOCK_BYTES for number in (piece.offset_bytes, piece.memory.numel(), piece.memory.data_ptr()))


class DriveFile(BlockFile):
    """`num_bytes` zeroed bytes of a folder's drive, for as long as a process lives that has the file open; `close`
    lets go of it.

    The file has no name from the start, so that nothing is left of it however the process ends. direct: whether it is
    read and written past the page cache; then pieces begin and end at multiples of BLOCK_BYTES, in memory, too.
    opened: a descriptor of such a file that another process has made, which is closed with this one. holes: ranges,
    (first byte, bytes) in order, that nobody writes, and that take nothing of the drive.
    Raises: DriveError where the folder has not so many bytes, or refuses the file.
    """

    def __init__(
        self, folder: str | Path, num_bytes: int, opened: int | None = None, holes: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.folder, self.num_bytes, self._holes = Path(folder), num_bytes, holes
        self._descriptor = -1 if opened is None else opened
        try:
            if opened is None:
                self.folder.mkdir(parents=True, exist_ok=True)
                self._descriptor = _unnamed(self.folder)
                os.ftruncate(self._descriptor, max(1, num_bytes))
                self._allocate(holes)
                direct = self._make_direct()
            else:
                direct = bool(fcntl.fcntl(opened, fcntl.F_GETFL) & getattr(os, "O_DIRECT", 0))
            super().__init__(self._descriptor, num_bytes, direct)
        except OSError as error:
            self._close_descriptor()
            raise DriveError(error.errno, self._refusal(error)) from error

    @property
    def descriptor(self) -> int:
        """What other processes may open it by."""
        return self._descriptor

    def allocate(self, holes: Sequence[tuple[int, int]]) -> None:
        """Have the drive hold all but other holes. Raises: DriveError where it has not so many bytes."""
        if holes == self._holes:
            return
        try:
            self._allocate(holes)
        except OSError as error:
            raise DriveError(error.errno, self._refusal(error)) from error
        self._holes = holes

    def _allocate(self, holes: Sequence[tuple[int, int]]) -> None:
        start = 0
        for first, num_bytes in (*holes, (max(1, self.num_bytes), 0)):
            if first > start:
                os.posix_fallocate(self._descriptor, start, first - start)
            start = first + num_bytes

    def _refusal(self, error: OSError) -> str:
        free = ""
        with contextlib.suppress(OSError):
            place = os.statvfs(self.folder)
            free = f", of which {size_text(place.f_bavail * place.f_frsize)} are free"
        why, needed = os.strerror(error.errno or 0), self.num_bytes - sum(size for _, size in self._holes)
        return (
            f"{self.folder} has no {size_text(needed)} for what --offload-dir is to hold{free}: {why}. Free"
            " some, name another folder with --offload-dir, or give more host memory"
        )

    def _make_direct(self) -> bool:
        """Try a block past the page cache; False where the file system wants none of that."""
        flags = os.O_RDWR | os.O_CLOEXEC | getattr(os, "O_DIRECT", 0)
        try:
            descriptor = os.open(f"/proc/self/fd/{self._descriptor}", flags)
        except OSError:
            return False
        buffer = mmap.mmap(-1, BLOCK_BYTES)
        try:
            os.preadv(descriptor, [buffer], 0)
            os.pwritev(descriptor, [buffer], 0)
        except OSError:
            os.close(descriptor)
            return False
        os.close(self._descriptor)
        self._descriptor = descriptor
        return bool(getattr(os, "O_DIRECT", 0))

    def zero(self, offset_bytes: int, num_bytes: int) -> None:
        """Have bytes read as zero, without writing them where the file system can do that."""
        self.settle()
        call = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None)
        if call is not None:
            call.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
            if call(self._descriptor, _ZERO_RANGE, offset_bytes, num_bytes) == 0:
                return
        self.tensor[offset_bytes : offset_bytes + num_bytes].zero_()
        self.touched()

    def write(self, pieces: Sequence[DrivePiece]) -> None:
        """Write pieces. Blocks until the drive has taken them. Raises: DriveError where it fails."""
        self._move(pieces, writes=True)

    def _failure(self, offset_bytes: int, error_number: int, *, writes: bool) -> DriveError:
        why = os.strerror(error_number) if error_number else "the file ends there"
        what = "written" if writes else "read"
        place = f"the drive of {self.folder}"
        return DriveError(
            error_number,
            f"what lies on {place} could not be {what} at byte {offset_bytes}: {why}. The"
            " step is lost; resume from the last checkpoint, with another folder if the drive fails again",
        )


class _Piece(ctypes.Structure):
    """`DrivePiece` of csrc/drive.cpp."""

    _fields_ = (("offset_bytes", ctypes.c_uint64), ("num_bytes", ctypes.c_uint64), ("memory", ctypes.c_void_p))


class _Failure(ctypes.Structure):
    """`DriveFailure` of csrc/drive.cpp."""

    _fields_ = (("offset_bytes", ctypes.c_uint64), ("error_number", ctypes.c_int32))


def _unnamed(folder: Path) -> int:
    """Open a file of a folder that has no name."""
    temporary = getattr(os, "O_TMPFILE", 0)
    if temporary:
        with contextlib.suppress(OSError):
            return os.open(folder, os.O_RDWR | os.O_CLOEXEC | temporary, 0o600)
    descriptor, name = tempfile.mkstemp(prefix="flexengine-", suffix=".states", dir=folder)
    os.unlink(name)
    return descriptor
