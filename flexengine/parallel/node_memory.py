"""One piece of host memory that all ranks of a node have in their address space.

It has no name and takes nothing of /dev/shm. It is gone with the last process that maps it, however that ends.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from torch import Tensor

from flexengine.native.host_memory import PAGE_BYTES
from flexengine.native.page_lock import check_pin_limit, lock_pages, unlock_pages
from flexengine.native.shared_memory import SharedMapping, map_shared
from flexengine.parallel.control import Control
from flexengine.parallel.hub import connect_to_first, user_of
from flexengine.parallel.ranks import Ranks

HUGE_PAGE_BYTES = 2 << 20
LOCKED_PIECE_BYTES = 256 << 30  # some drivers refuse to register 512 GiB of small pages in one call
_TIMEOUT_S = 60.0  # for a rank to come to a call that all make at once


class NodeMemory:
    """`num_bytes` that every rank of a node reads and writes, zeroed and in RAM; see `open`.

    `tensor` is uint8 [num_bytes], on a huge page's border where native code maps it. Who reads what another rank wrote
    needs a signal or a call of Control in between.
    """

    def __init__(self, mapping: SharedMapping, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.cuts: list[int] = []
        """Offsets at which it was registered in two calls."""
        self._mapping: SharedMapping | None = mapping
        self._held = ExitStack()
        self._held.callback(mapping.detach)

    @staticmethod
    def open(
        ranks: Ranks,
        control: Control,
        num_bytes: int,
        page_locked: bool = False,
        numa_node: int | None = None,
        num_threads: int | None = None,
        borders: Sequence[int] = (),
    ) -> NodeMemory:
        """Make the memory with the other ranks of the node; all ranks of the run make this call together.

        Each rank brings 1/N into RAM. page_locked: each registers all of it with CUDA. numa_node: this rank's; pages
        are interleaved over those of all ranks. num_threads: that bring pages in; default all of this rank.
        borders: offsets at which it may be registered in two calls, in order: CUDA refuses copies that cross there.
        Raises: on all ranks, what fails on one: ValueError if num_bytes < 1; MemoryError where the system refuses.
        """
        with ExitStack() as stack:
            with control.all_or_none():
                if num_bytes < 1:
                    raise ValueError(f"num_bytes is {num_bytes}, expected at least 1")
                if page_locked:
                    check_pin_limit(num_bytes)
            fd = open_on_node(ranks, control, lambda: _new_memory(num_bytes))
            stack.callback(os.close, fd)
            gathered = control.gather(numa_node)
            nodes = sorted({gathered[rank] for rank in ranks.of_node} - {None})
            with control.all_or_none():
                mapping = map_shared(fd, _pages(num_bytes), _share(ranks, num_bytes), nodes, num_threads)
                memory = NodeMemory(mapping, num_bytes)
                stack.push(partial(_close_after_error, memory))
            if page_locked:
                with control.all_or_none():
                    memory._lock(borders)
        return memory

    @property
    def tensor(self) -> Tensor:
        """The bytes, uint8 [num_bytes]. Raises: ValueError after `close`."""
        if self._mapping is None:
            raise ValueError("this node memory is closed")
        return self._mapping.pages[: self.num_bytes]

    def close(self) -> None:
        """Let go of the memory on this rank; it is freed when all have. A second call does nothing.

        Order: every copy from or to it must have finished. A view that is still held reads zeros from now on.
        """
        self._mapping = None
        self._held.close()

    def _lock(self, borders: Sequence[int]) -> None:
        assert self._mapping is not None
        pages = self._mapping.pages
        pieces = locked_pieces(pages.numel(), borders)
        self.cuts = [start for start, _ in pieces[1:]]
        for start, end in pieces:
            address = pages.data_ptr() + start
            lock_pages(address, end - start)
            self._held.callback(unlock_pages, address)

    def __enter__(self) -> NodeMemory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def locked_pieces(num_bytes: int, borders: Sequence[int]) -> list[tuple[int, int]]:
    """Cut memory into pieces to lock, as long as LOCKED_PIECE_BYTES allows; longer where no border is on a page's."""
    found, start = list[tuple[int, int]](), 0
    whole = [border for border in borders if border % PAGE_BYTES == 0]
    while num_bytes - start > LOCKED_PIECE_BYTES:
        later = [border for border in whole if start < border < num_bytes]
        within = [border for border in later if border <= start + LOCKED_PIECE_BYTES]
        end = max(within, default=min(later, default=num_bytes))
        found.append((start, end))
        start = end
    return [*found, (start, num_bytes)] if start < num_bytes else found


def _close_after_error(memory: NodeMemory, kind: type[BaseException] | None, *_: object) -> None:
    if kind is not None:
        memory.close()


def _pages(num_bytes: int) -> int:
    return -(-num_bytes // PAGE_BYTES) * PAGE_BYTES


def _share(ranks: Ranks, num_bytes: int) -> range:
    """The bytes that a rank brings into RAM: whole huge pages, as equal as they allow."""
    end, pages = _pages(num_bytes), -(-num_bytes // HUGE_PAGE_BYTES)
    first, last = (pages * index // ranks.local_size for index in (ranks.local_rank, ranks.local_rank + 1))
    return range(min(first * HUGE_PAGE_BYTES, end), min(last * HUGE_PAGE_BYTES, end))


def open_on_node(ranks: Ranks, control: Control, make: Callable[[], int]) -> int:
    """A descriptor, of its own on every rank of a node, of the file whose descriptor `make` gives on the first.

    All ranks of the run make this call together; each closes what it gets, and that of `make` is closed here.
    Raises: on all ranks, what fails on one.
    """
    with ExitStack() as stack:
        fd, offer = -1, None
        with control.all_or_none():
            if ranks.local_rank == 0:
                fd = make()
                stack.callback(os.close, fd)
                offer = stack.enter_context(_Offer(fd))
        names = control.gather(None if offer is None else offer.name)
        with control.all_or_none():
            if offer is not None:
                offer.give(ranks.local_size - 1)
            else:
                fd = _take(names[ranks.of_node[0]])
                stack.callback(os.close, fd)
        return os.dup(fd)


def _new_memory(num_bytes: int) -> int:
    """A file of memory without a name."""
    fd = os.memfd_create("flexengine")
    try:
        os.truncate(fd, _pages(num_bytes))
    except OSError:
        os.close(fd)
        raise
    return fd


class _Offer:
    """A socket at which processes of the same user get a file."""

    def __init__(self, fd: int) -> None:
        self.name = f"flexengine-{secrets.token_hex(16)}"
        self._fd, self._held = fd, ExitStack()
        with ExitStack() as stack:
            self._socket = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            self._socket.bind(f"\0{self.name}")  # an abstract name: no file, and gone with the socket
            self._socket.listen()
            self._socket.settimeout(_TIMEOUT_S)
            self._held = stack.pop_all()

    def give(self, num_takers: int) -> None:
        """Send the file to so many processes."""
        given = 0
        while given < num_takers:
            connection, _ = self._socket.accept()
            with connection:
                if user_of(connection) == os.geteuid():
                    socket.send_fds(connection, [b"0"], [self._fd])
                    given += 1

    def __enter__(self) -> _Offer:
        return self

    def __exit__(self, *_: object) -> None:
        self._held.close()


def _take(name: str) -> int:
    """The file that is offered under `name`. Raises: ValueError where nobody on this machine offers it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_TIMEOUT_S)
        connect_to_first(connection, f"\0{name}")
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if not fds:
        raise OSError("the first rank of this node sent no descriptor; is the limit of open files (ulimit -n) reached?")
    os.set_inheritable(fds[0], False)
    return fds[0]
