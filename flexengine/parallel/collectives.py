"""Collectives of the ranks of a node: GPUs copy to each other; where they cannot, NCCL moves bytes between them, and
else the host does, through memory that all ranks have.

All ranks make the same calls in the same order. Between GPUs a call is work of the current stream and returns at once;
through the host it blocks until it has ended. Ranks that share a GPU and cannot copy use the host, as NCCL refuses
them.

Calls over NCCL cannot wait for each other in a circle, also where a rank's host blocks meanwhile, as it may when CUDA
loads a kernel or allocates memory: commands are issued in the order of the program, and whatever one waits for, on this
rank or on another, comes before it in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from torch import Tensor

from flexengine.parallel.control import Control, RankError
from flexengine.parallel.devices import gpus_of_ranks
from flexengine.parallel.host_copies import HostCopies
from flexengine.parallel.peer_copies import SCRATCH_BYTES, open_peer_copies
from flexengine.parallel.watch import Watch

Way = Literal["copies", "nccl", "host"]

CONNECT_BYTES = 2**22
"""Of the first calls between GPUs: enough for every way of moving bytes that a larger call of NCCL takes."""


class Collectives:
    """The ranks of this one's node. See the module for the order of calls."""

    def __init__(self, control: Control, device: torch.device, watch: Watch | None = None) -> None:
        """Join the others of the node; all ranks make this call together. watch: ends waits for a rank that is lost."""
        ranks = control.ranks
        self._control = control
        self._rank, self._size = ranks.local_rank, ranks.local_size
        self._leaving = control.unique(f"leaving{ranks.node}")
        on_cuda = device.type == "cuda"
        self._copies = open_peer_copies(control, device, watch) if on_cuda else None
        self._host: HostCopies | None = None
        self._group: Any = None
        if self._copies is None and on_cuda and not gpus_of_ranks(control, device).shared_on(ranks.node):
            self._group = control.nccl_link(f"split{ranks.node}", self._rank, self._size)
        elif self._copies is None:
            self._host = HostCopies(control, watch)
        self._connect(device)
        if on_cuda:
            torch.cuda.empty_cache()  # budgets know nothing of what the first calls moved

    @property
    def way(self) -> Way:
        """What moves bytes from rank to rank."""
        return "copies" if self._copies is not None else "host" if self._host is not None else "nccl"

    def share(self, memory: Tensor) -> None:
        """Take `shares` and `received` of calls from this memory, uint8; of several, from any.

        All ranks make this call together, with the same bytes, and their buffers lie at the same places of it.
        """
        if self._copies is not None:
            self._copies.share(memory)

    def gather(self, shares: Tensor, own: Tensor) -> None:
        """Fill `shares`, equal parts of each rank one after the other; `own` is this rank's, which lies in there."""
        if self._copies is not None:
            return self._copies.gather(shares, own, _stream(shares))
        if self._host is not None:
            parts = shares.view(self._size, own.numel())
            return self._host.exchange([*parts], [own] * self._size, own.numel())
        self._do(self._group._allgather_base, "AllgatherOptions", shares, own)

    def gather_owned(self, whole: Tensor, own: Tensor, counts: Sequence[int]) -> None:
        """Fill `whole` with `counts[r]` bytes of each rank r, one after the other; `own` are this rank's, elsewhere."""
        if self._copies is not None:
            return self._copies.gather_owned(whole, own, counts, _stream(whole))
        rows = whole.split(list(counts))
        if self._host is not None:
            return self._host.exchange(rows, [own] * self._size, max(counts))
        rows[self._rank].copy_(own)
        for rank, row in enumerate(rows):  # NCCL gathers equal shares alone
            if row.numel():
                self._do(self._group.broadcast, "BroadcastOptions", [row], root=rank)

    def exchange(
        self, received: Tensor, sent: Tensor, counts: Sequence[int], own: int, brings_own: bool = True
    ) -> None:
        """Send `counts[r]` elements of `sent` to each rank r; fill `received` with the `own` elements of every rank.

        brings_own: False where nobody reads those of this rank there, so that they need not be copied.
        """
        if self._copies is not None:
            return self._copies.exchange(received, sent, counts, _stream(received), brings_own)
        if self._host is not None:
            width = sent.element_size()
            rows = received.view(torch.uint8).view(self._size, own * width)
            parts = sent.view(torch.uint8).split([count * width for count in counts])
            return self._host.exchange([*rows], parts, max(counts) * width)
        self._do(self._group.alltoall_base, "AllToAllOptions", received, sent, [own] * len(counts), list(counts))

    def add(self, table: Tensor) -> None:
        """Replace a table by the sum of those of all ranks."""
        if self._copies is not None:
            return self._copies.add(table, _stream(table))
        if self._host is not None:
            return self._host.add(table)
        self._do(self._group.allreduce, "AllreduceOptions", [table])

    def _connect(self, device: torch.device) -> None:
        """Use every kind of call once, so that GPUs are connected and NCCL takes its memory now and not in a step.

        Raises: RankError where they cannot reach each other.
        """
        count = SCRATCH_BYTES if self._copies is not None else CONNECT_BYTES if device.type == "cuda" else 64
        one, table = torch.ones(1, device=device), torch.ones(count // 8, dtype=torch.float64, device=device)
        self.add(one)
        self.add(table)
        expected = list(range(self._size))
        shares = self._buffer(count, device)
        shares.fill_(self._rank)
        self.gather(shares.view(-1), shares[self._rank])
        right = one.item() == self._size and bool((table == self._size).all()) and shares[:, -1].tolist() == expected
        received = self._buffer(count, device).view(torch.float32)
        sent = torch.full_like(received, float(self._rank))
        self.exchange(received.view(-1), sent.view(-1), [count // 4] * self._size, count // 4)
        if not right or received[:, -1].tolist() != expected:
            raise RankError(f"rank {self._control.ranks.rank} gets wrong bytes from the others of its machine")

    def _buffer(self, count: int, device: torch.device) -> Tensor:
        """Uint8 [ranks, count] that calls may fill; one such buffer at a time."""
        found = torch.empty(self._size * count, dtype=torch.uint8, device=device)
        return (found if self._copies is None else self._copies.scratch).view(self._size, count)

    def _do(self, call: Callable[..., Any], options: str, *arguments: Any, root: int = -1) -> None:
        """Make a call of NCCL, as work of the current stream. root: the rank that broadcasts."""
        found = _in_place(options)
        if root >= 0:
            found.rootRank, found.rootTensor = root, 0
        with self._control.telling_of_lost_ranks():
            call(*arguments, found)

    def close(self) -> None:
        """Leave the others, unless calls were given up. Order: nothing of this rank runs any more.

        The last call may have ended here and not yet on another GPU, which reads or writes this one's memory. So this
        waits a little until all ranks are here.
        """
        if self._copies is not None:
            self._copies.close()
            self._copies = None
            self._control.leave_link(self._leaving, self._rank, self._size)
        elif self._group is not None:
            self._control.leave_link(self._leaving, self._rank, self._size)
            self._abort_group()
        elif self._host is not None:
            self._host.close()
            self._host = None

    def abort(self, message: str) -> None:
        """Give up calls that others may never join; what is called from now on fails, or is worth nothing.

        message: what RankLost says to ranks that wait on the host.
        """
        if self._copies is not None:
            self._copies.abort()
        if self._host is not None:
            self._host.abort(message)
        self._abort_group()

    def _abort_group(self) -> None:
        if self._group is not None:
            with suppress(RuntimeError):  # of a GPU that is lost itself
                self._group.abort()
            self._group = None


def _stream(tensor: Tensor) -> torch.cuda.Stream:
    return torch.cuda.current_stream(tensor.device)


def _in_place(options: str) -> Any:
    """Options of a call that is work of the current stream."""
    found = getattr(torch.distributed.distributed_c10d, options)()
    found.asyncOp = False
    return found
