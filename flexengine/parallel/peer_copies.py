"""Gathers and exchanges of the ranks of a node by their GPUs' engines for copies, which need no multiprocessor.

Every rank maps the memory of the others and copies its bytes to where each of them needs these. Two words of the host's
memory for each rank, which streams await and write, order that: READY, its buffer may be filled; DONE, its copies have
ended. A call is work of the current stream and returns at once. All ranks make the same calls in the same order, on
buffers at the same places of memory that they share.

A collective of NCCL is a kernel, which waits until products beside it leave it multiprocessors and then keeps these
from the next product. Copies take nothing from products but bytes of memory.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flexengine.native.peer_memory import MappedMemory, OfferedMemory, PeerDriver
from flexengine.native.transfer import NativeTransfers, open_transfers
from flexengine.native.transfer_operations import (
    Await,
    Copy,
    Operation,
    PreparedOperations,
    Raise,
    RawMemory,
    StreamHandle,
    Transfers,
    WordValue,
)
from flexengine.parallel.control import Control
from flexengine.parallel.node_memory import NodeMemory
from flexengine.parallel.signals import Signals
from flexengine.parallel.watch import Watch

PEER_COPIES_VARIABLE = "FLEXENGINE_PEER_COPIES"
"""With "0" in the environment of all ranks NCCL moves bytes between GPUs, also where they could copy."""
SCRATCH_BYTES = 2**20
"""Of each rank's part of a table, when tables are added up."""
READY, DONE = range(2)
_NUM_CELLS = 2

logger = logging.getLogger(__name__)


class Region(NamedTuple):
    """Memory of this rank's GPU, and the same of every rank of the node, by row."""

    own: Tensor
    of_ranks: tuple[RawMemory, ...]

    def offset(self, tensor: Tensor) -> int | None:
        """Where a tensor begins in there; None where it lies elsewhere."""
        start = _address(tensor) - _address(self.own)
        return start if start >= 0 and start + tensor.nbytes <= self.own.numel() else None


class Part(NamedTuple):
    """`num_bytes` bytes that begin at `source`, for the place at `offset` of a region of the rank of `row`."""

    row: int
    offset: int
    source: int
    num_bytes: int


class Sharing(Protocol):
    """What the ranks of a node share for copies: two semaphores for each, and memory of their GPUs."""

    @property
    def signals(self) -> Signals: ...

    def region(self, own: Tensor) -> Region:
        """Share memory of the same bytes on all ranks, uint8; they make this call together."""
        ...

    def close(self) -> None:
        """Let go of the memory of others. Order: nothing of this rank runs any more."""
        ...


class PeerCopies:
    """The copies of one rank. See the module for the order of calls; all ranks make one together.

    scratch: uint8 [ranks of the node * SCRATCH_BYTES] on the GPU.
    """

    def __init__(self, transfers: Transfers, sharing: Sharing, scratch: Tensor) -> None:
        self._transfers, self._sharing, self._signals = transfers, sharing, sharing.signals
        self._scratch = sharing.region(scratch)
        self._regions = [self._scratch]
        self._row, self._size = self._signals.row, self._signals.num_rows
        self._calls = 0
        self._words = [[self._word(semaphore, row) for row in range(self._size)] for semaphore in (READY, DONE)]
        self._known: dict[tuple[object, ...], tuple[PreparedOperations, tuple[tuple[int, int], ...]]] = {}

    def share(self, memory: Tensor) -> None:
        """Take buffers of calls from this uint8 memory, too; all ranks make this call together, with the same bytes."""
        self._regions.append(self._sharing.region(memory))

    def abort(self) -> None:
        """End the waits of all ranks' streams; what they copy from now on is worth nothing."""
        self._signals.raise_all()

    @property
    def scratch(self) -> Tensor:
        """Memory that all share, which a caller may use between its own calls: see the constructor."""
        return self._scratch.own

    def close(self) -> None:
        """Let go of the memory of others. Order: nothing of this rank runs any more."""
        self._regions.clear()
        self._known.clear()
        self._sharing.close()

    def gather(self, shares: Tensor, own: Tensor, stream: StreamHandle) -> None:
        """Fill `shares` as `Collectives.gather` does."""
        region, first = self._find(shares)
        offset = first + _address(own) - _address(shares)
        parts = [Part(row, offset, _address(own), own.nbytes) for row in self._others()]
        self._move(stream, region, parts)

    def gather_owned(self, whole: Tensor, own: Tensor, counts: Sequence[int], stream: StreamHandle) -> None:
        """Fill `whole` as `Collectives.gather_owned` does."""
        region, first = self._find(whole)
        offset = first + sum(counts[: self._row])
        parts = [Part(row, offset, _address(own), own.nbytes) for row in (self._row, *self._others())]
        self._move(stream, region, parts)

    def exchange(
        self, received: Tensor, sent: Tensor, counts: Sequence[int], stream: StreamHandle, brings_own: bool
    ) -> None:
        """Send and fill as `Collectives.exchange` does."""
        region, first = self._find(received)
        width, starts = sent.element_size(), [0, *accumulate(counts)]
        rows = (self._row, *self._others()) if brings_own else self._others()
        parts = [  # a rank has as many elements of each rank as are its own
            Part(
                row,
                first + width * self._row * counts[row],
                _address(sent) + width * starts[row],
                width * counts[row],
            )
            for row in rows
        ]
        self._move(stream, region, parts)

    def add(self, table: Tensor, stream: StreamHandle) -> None:
        """Add up as `Collectives.add` does, in the order of rows."""
        flat, most = table.view(-1), SCRATCH_BYTES // table.element_size()
        for start in range(0, flat.numel(), most):
            piece = flat[start : start + most]
            offset = SCRATCH_BYTES * self._row
            rows = (self._row, *self._others())
            self._move(stream, self._scratch, [Part(row, offset, _address(piece), piece.nbytes) for row in rows])
            found = self._scratch.own.view(table.dtype).view(self._size, most)
            piece.copy_(found[0, : piece.numel()])
            for row in range(1, self._size):
                piece.add_(found[row, : piece.numel()])

    def _others(self) -> Iterator[int]:
        """The rows of the other ranks; each rank begins with another one."""
        return ((self._row + step) % self._size for step in range(1, self._size))

    def _find(self, buffer: Tensor) -> tuple[Region, int]:
        """The region that a buffer lies in, and where it begins there."""
        for region in self._regions:
            offset = region.offset(buffer)
            if offset is not None:
                return region, offset
        raise ValueError(f"a buffer of {buffer.nbytes} bytes lies in no memory that the ranks share")

    def _move(self, stream: StreamHandle, region: Region, parts: Sequence[Part]) -> None:
        """Copy every part to where it belongs when its rank is ready; the stream goes on when all ranks have."""
        key = (stream.cuda_stream, id(region), *parts)
        if key not in self._known:
            operations, words = self._operations(stream, region, parts)
            self._known[key] = self._transfers.prepare(operations), words
        prepared, words = self._known[key]
        self._calls += 1
        self._transfers.set_words(prepared, ((place, WordValue(word, self._calls)) for place, word in words))
        self._transfers.submit(prepared)

    def _operations(
        self, stream: StreamHandle, region: Region, parts: Sequence[Part]
    ) -> tuple[list[Operation], tuple[tuple[int, int], ...]]:
        """The operations of a call, and which of them are of which word."""
        operations, words = list[Operation](), list[tuple[int, int]]()

        def of_word(operation: Operation, semaphore: int, row: int) -> None:
            words.append((len(operations), self._words[semaphore][row]))
            operations.append(operation)

        def copy(part: Part) -> None:
            source, target = RawMemory(part.source, part.num_bytes), region.of_ranks[part.row]
            if part.num_bytes:
                operations.append(Copy(stream, target, part.offset, source, 0, part.num_bytes))

        of_word(Raise(stream), READY, self._row)
        for part in (part for part in parts if part.row != self._row):
            of_word(Await(stream), READY, part.row)
            copy(part)
        of_word(Raise(stream), DONE, self._row)
        for part in (part for part in parts if part.row == self._row):
            copy(part)  # a kernel, which waits for products beside it, and no other rank for it
        for row in self._others():
            of_word(Await(stream), DONE, row)
        return operations, tuple(words)

    def _word(self, semaphore: int, row: int) -> int:
        """The device's address of a semaphore."""
        [address] = self._signals.addresses(semaphore, row)
        found = self._transfers.word_address(address)
        assert found is not None, "open_peer_copies has asked for it"
        return found


class NodeSharing:
    """`Sharing` between processes, by handles of the CUDA driver; all ranks make its calls together, but for close."""

    def __init__(self, control: Control, driver: PeerDriver, memory: NodeMemory, watch: Watch | None) -> None:
        ranks = control.ranks
        self._control, self._driver, self._memory, self._watch = control, driver, memory, watch
        self.signals = Signals.over(memory.tensor, ranks.local_size, _NUM_CELLS, ranks.local_rank)
        self._mapped: list[MappedMemory] = []
        if watch is not None:
            watch.follow(self.signals)

    def region(self, own: Tensor) -> Region:
        """Share memory. Raises: on all ranks, OSError where one cannot share it or does not reach another's."""
        with self._control.all_or_none():
            offered = self._driver.offer(own)
        places = self._control.gather(offered, OfferedMemory)
        with self._control.all_or_none():
            return Region(own, tuple(self._memory_of(rank, own, places[rank]) for rank in self._control.ranks.of_node))

    def _memory_of(self, rank: int, own: Tensor, offered: OfferedMemory) -> RawMemory:
        if rank == self._control.ranks.rank:
            return RawMemory(own.data_ptr(), own.numel())
        self._mapped.append(self._driver.map(offered))
        return self._mapped[-1].memory

    def close(self) -> None:
        for mapped in self._mapped:
            with suppress(OSError):  # of a GPU that is lost itself
                mapped.close()
        self._mapped.clear()
        if self._watch is not None:
            self._watch.unfollow(self.signals)
        self._memory.close()


def open_peer_copies(control: Control, device: torch.device, watch: Watch | None) -> PeerCopies | None:
    """Join the ranks of the node; None on all ranks where streams of one cannot wait, or GPUs do not reach each other.

    All ranks make this call together.
    """
    size = control.ranks.local_size
    wanted = os.environ.get(PEER_COPIES_VARIABLE, "1") != "0"
    transfers = open_transfers(device) if wanted else None
    driver = _driver() if isinstance(transfers, NativeTransfers) else None
    if not all(control.gather(driver is not None)):
        return None
    assert transfers is not None, "they are native"
    assert driver is not None, "it was found"
    memory = NodeMemory.open(control.ranks, control, Signals.num_bytes(size, _NUM_CELLS), page_locked=True)
    sharing = NodeSharing(control, driver, memory, watch)
    try:
        with control.all_or_none():
            if transfers.word_address(memory.tensor.data_ptr()) is None:
                raise OSError("streams cannot wait for words of memory")
        return PeerCopies(transfers, sharing, torch.empty(size * SCRATCH_BYTES, dtype=torch.uint8, device=device))
    except OSError as error:
        sharing.close()
        logger.info("GPUs do not copy to each other (%s); NCCL moves what they share", error)
        return None


def _address(tensor: Tensor) -> int:
    """Where a tensor begins, also one without elements, of which `data_ptr` tells nothing."""
    return tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()


def _driver() -> PeerDriver | None:
    with suppress(OSError):
        return PeerDriver()
    return None
