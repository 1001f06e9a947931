"""Tensors that are written while training goes on: each is read in pieces, before the training changes it.

The writer takes pieces in order. Before the next update the training calls `release`: pieces that were not written by
then are copied as far as a window of memory allows, and the writer is waited for where it does not.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

PIECE_BYTES = 32 << 20
"""Bytes read at once. Larger pieces keep the training waiting for the one that is being written; much smaller ones
cost more calls than a disk of several GB/s allows."""
COPY_THREADS = 8
"""Pieces copied at once: one thread spends most of its time on the page faults of the new memory."""


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint: its name and shape, and its elements, flat and contiguous, on any device."""

    name: str
    shape: tuple[int, ...]
    data: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.data.numel() * self.data.element_size()


class SaveAbandonedError(RuntimeError):
    """The writer was told to stop; what it wrote is removed."""


class _State(enum.Enum):
    WAITING = enum.auto()
    READING = enum.auto()
    COPYING = enum.auto()
    FREE = enum.auto()  # the training may change the source


class Piece:
    """Some bytes of a tensor. `data` is the tensor's own memory until the piece is copied."""

    __slots__ = ("data", "state")

    def __init__(self, data: Tensor) -> None:
        self.data, self.state = data, _State.WAITING


def pieces_of(tensor: StoredTensor) -> list[Piece]:
    """Cut a tensor into pieces of PIECE_BYTES; a tensor without elements has none."""
    data = tensor.data.view(torch.uint8)
    return [Piece(data[start : start + PIECE_BYTES]) for start in range(0, data.numel(), PIECE_BYTES)]


class _Window:
    """Pieces that several threads may copy, each once, and the bytes that are left for copies."""

    def __init__(self, pieces: Iterator[Piece], bytes_left: int) -> None:
        self.pieces, self.bytes_left = pieces, bytes_left


class Snapshot:
    """Pieces in the order in which they are written, and who may touch what they lie in."""

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces, self._num_in_use = pieces, len(pieces)
        self._changed = threading.Condition()
        self._stopped = False
        devices = {piece.data.device for piece in pieces if piece.data.is_cuda}
        self._streams = {device: torch.cuda.Stream(device) for device in devices}

    def stop(self) -> None:
        """Have readers raise SaveAbandonedError, and nobody wait for them any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    @contextmanager
    def reading(self, piece: Piece) -> Iterator[memoryview]:
        """Give the bytes of a piece, which is dropped afterwards. Raises SaveAbandonedError after `stop`."""
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or piece.state is not _State.COPYING)
            if self._stopped:
                raise SaveAbandonedError("the checkpoint was given up before it was whole")
            if piece.state is _State.WAITING:
                piece.state = _State.READING
        try:
            data = piece.data
            if data.is_cuda:
                data = self._on_host(data)
                self._free(piece)
            yield data.numpy().data
        finally:
            self._free(piece)
            piece.data = torch.empty(0, dtype=torch.uint8)  # a copy goes back to the system

    def release(self, window_bytes: int) -> None:
        """Block until the memory that pieces lie in may be changed. Copies up to window_bytes instead of waiting."""
        copied = _Window(reversed(self._pieces), window_bytes)  # first those that the writer would come to last
        with ThreadPoolExecutor(COPY_THREADS, "flexengine-snapshot") as pool:
            threads = [pool.submit(self._copy_pieces, copied) for _ in range(COPY_THREADS)]
        for thread in threads:
            thread.result()
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or not self._num_in_use)

    def _copy_pieces(self, window: _Window) -> None:
        while (piece := self._take(window)) is not None:
            self._copy(piece)

    def _take(self, window: _Window) -> Piece | None:
        """The next piece to copy; None when nobody needs a copy any more or none fits."""
        with self._changed:
            for piece in window.pieces:
                if self._stopped or not self._num_in_use:
                    return None
                if piece.state is _State.WAITING and piece.data.numel() <= window.bytes_left:
                    piece.state = _State.COPYING
                    window.bytes_left -= piece.data.numel()
                    return piece
        return None

    def _copy(self, piece: Piece) -> None:
        try:
            piece.data = self._on_host(piece.data)
        except BaseException:
            with self._changed:
                piece.state = _State.WAITING
                self._changed.notify_all()
            raise
        self._free(piece)

    def _on_host(self, data: Tensor) -> Tensor:
        """Copy bytes to memory of their own, on a stream of their own where they come from a GPU."""
        stream = self._streams.get(data.device)
        if stream is None:
            return torch.from_numpy(data.numpy().copy())  # in the calling thread; torch's copy would start a team each
        with torch.cuda.stream(stream):
            return data.to("cpu", copy=True)

    def _free(self, piece: Piece) -> None:
        with self._changed:
            if piece.state is not _State.FREE:
                piece.state = _State.FREE
                self._num_in_use -= 1
                self._changed.notify_all()
