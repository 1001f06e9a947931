"""Collectives of the ranks of a node: torch.distributed moves bytes between them, by NCCL between GPUs, by gloo else.

All ranks make the same calls in the same order. Over NCCL a call is work of the current stream and returns at once;
over gloo it blocks until it has ended. Ranks that share a GPU, as tests have them, use gloo through the host, as NCCL
refuses them.

Calls over NCCL cannot wait for each other in a circle, also where a rank's host blocks meanwhile, as it may when CUDA
loads a kernel or allocates memory: commands are issued in the order of the program, and whatever one waits for, on this
rank or on another, comes before it in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from flexengine.parallel.control import Control, RankError
from flexengine.parallel.devices import gpus_of_ranks

CONNECT_BYTES = 2**22
"""Of the first calls over NCCL: enough for every way of moving bytes that a larger call takes."""


class Collectives:
    """The ranks of this one's node. See the module for the order of calls."""

    def __init__(self, control: Control, device: torch.device) -> None:
        """Join the others of the node; all ranks make this call together."""
        ranks = control.ranks
        self._control, self._on_cuda = control, device.type == "cuda"
        self._by_nccl = self._on_cuda and not gpus_of_ranks(control, device).shared_on(ranks.node)
        self._rank, self._size = ranks.local_rank, ranks.local_size
        self._leaving = control.unique(f"leaving{ranks.node}")
        link = control.nccl_link if self._by_nccl else control.link
        self._group: Any = link(f"split{ranks.node}", self._rank, self._size)
        self._connect(device)
        if self._on_cuda:
            torch.cuda.empty_cache()  # budgets know nothing of what the first calls moved

    @property
    def by_nccl(self) -> bool:
        """Whether NCCL moves bytes from GPU to GPU."""
        return self._by_nccl

    def gather(self, shares: Tensor, own: Tensor) -> None:
        """Fill `shares`, equal parts of each rank one after the other; `own` is this rank's, which lies in there."""
        target = self._target(shares)
        own = own if self._by_nccl else own.clone()  # gloo copies it to where it is already
        self._do(self._group._allgather_base, "AllgatherOptions", target, self._source(own))
        self._deliver(target, shares)

    def exchange(self, received: Tensor, sent: Tensor, counts: Sequence[int], own: int) -> None:
        """Send `counts[r]` elements of `sent` to each rank r; fill `received` with the `own` elements of every rank."""
        target, owns = self._target(received), [own] * len(counts)
        self._do(self._group.alltoall_base, "AllToAllOptions", target, self._source(sent), owns, list(counts))
        self._deliver(target, received)

    def add(self, table: Tensor) -> None:
        """Replace a table by the sum of those of all ranks."""
        target = self._source(table)
        self._do(self._group.allreduce, "AllreduceOptions", [target])
        self._deliver(target, table)

    def _connect(self, device: torch.device) -> None:
        """Use every kind of call once, so that NCCL connects GPUs and takes its memory now and not in a step.

        Raises: RankError where they cannot reach each other.
        """
        count = CONNECT_BYTES if self._by_nccl else 64
        one, table = torch.ones(1, device=device), torch.ones(count // 8, dtype=torch.float64, device=device)
        self.add(one)
        self.add(table)
        shares = torch.full((self._size, count), self._rank, dtype=torch.uint8, device=device)
        self.gather(shares.view(-1), shares[self._rank])
        received = torch.empty(self._size, count // 4, device=device)
        sent = torch.full_like(received, float(self._rank))
        self.exchange(received.view(-1), sent.view(-1), [count // 4] * self._size, count // 4)
        expected = list(range(self._size))
        if (
            one.item() != self._size
            or not bool((table == self._size).all())
            or shares[:, -1].tolist() != expected
            or received[:, -1].tolist() != expected
        ):
            raise RankError(f"rank {self._control.ranks.rank} gets wrong bytes from the others of its machine")

    def _do(self, call: Callable[..., Any], options: str, *arguments: Any) -> None:
        """Make a call, and have what follows come after it: over NCCL on the current stream, else in this thread."""
        with self._control.telling_of_lost_ranks():
            if self._by_nccl:
                call(*arguments, _in_place(options))
                return
            work = call(*arguments)
        self._control.wait(work)

    def _source(self, tensor: Tensor) -> Tensor:
        """What gloo reads, which is on the host."""
        return tensor if self._by_nccl else tensor.cpu()

    def _target(self, tensor: Tensor) -> Tensor:
        """What a call fills, to be delivered."""
        return tensor if self._by_nccl or not self._on_cuda else torch.empty_like(tensor, device="cpu")

    def _deliver(self, target: Tensor, tensor: Tensor) -> None:
        if target is not tensor:
            tensor.copy_(target)

    def close(self) -> None:
        """Leave the others, unless calls were given up. Order: nothing of this rank runs any more.

        The last call may have ended here and not yet on another GPU, which reads this one's memory. So this waits a
        little until all ranks are here.
        """
        if self._by_nccl and self._group is not None:
            self._control.leave_link(self._leaving, self._rank, self._size)
            self.abort()

    def abort(self) -> None:
        """Give up calls that others may never join; what is called from now on fails."""
        if self._by_nccl and self._group is not None:
            with suppress(RuntimeError):  # of a GPU that is lost itself
                self._group.abort()
            self._group = None


def _in_place(options: str) -> Any:
    """Options of a call that is work of the current stream."""
    found = getattr(torch.distributed.distributed_c10d, options)()
    found.asyncOp = False
    return found
