"""Collectives of the ranks of a node: torch.distributed moves bytes between them, by NCCL between GPUs, by gloo else.

All ranks make the same calls in the same order. Over NCCL a call is work of the current stream and returns at once;
over gloo it blocks until it has ended. Ranks that share a GPU, as tests have them, use gloo through the host, as NCCL
refuses them. The path over NCCL has not run on several GPUs yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flexengine.parallel.control import Control


class Collectives:
    """The ranks of this one's node. See the module for the order of calls."""

    def __init__(self, control: Control, device: torch.device) -> None:
        """Join the others of the node; all ranks make this call together."""
        ranks = control.ranks
        self._control, self._on_cuda = control, device.type == "cuda"
        self._by_nccl = self._on_cuda and not _share_a_gpu(control, device)
        link = control.nccl_link if self._by_nccl else control.link
        self._group = link(f"split{ranks.node}", ranks.local_rank, ranks.local_size)
        self.add(torch.zeros(1, device=device))  # ranks that cannot reach each other are told now, not in a step

    def gather(self, shares: Tensor, own: Tensor) -> None:
        """Fill `shares`, equal parts of each rank one after the other; `own` is this rank's, which lies in there."""
        target = self._target(shares)
        own = own if self._by_nccl else own.clone()  # gloo copies it to where it is already
        self._end(self._group._allgather_base(target, self._source(own)))
        self._deliver(target, shares)

    def exchange(self, received: Tensor, sent: Tensor, counts: Sequence[int], own: int) -> None:
        """Send `counts[r]` elements of `sent` to each rank r; fill `received` with the `own` elements of every rank."""
        target = self._target(received)
        self._end(self._group.alltoall_base(target, self._source(sent), [own] * len(counts), list(counts)))
        self._deliver(target, received)

    def add(self, table: Tensor) -> None:
        """Replace a table by the sum of those of all ranks."""
        target = self._source(table)
        self._end(self._group.allreduce([target]))
        self._deliver(target, table)

    def _source(self, tensor: Tensor) -> Tensor:
        """What gloo reads, which is on the host."""
        return tensor if self._by_nccl else tensor.cpu()

    def _target(self, tensor: Tensor) -> Tensor:
        """What a call fills, to be delivered."""
        return tensor if self._by_nccl or not self._on_cuda else torch.empty_like(tensor, device="cpu")

    def _deliver(self, target: Tensor, tensor: Tensor) -> None:
        if target is not tensor:
            tensor.copy_(target)

    def _end(self, work: Any) -> None:
        """Have what follows come after a call: over NCCL on the current stream, else in this thread."""
        if self._by_nccl:
            work.wait()
        else:
            self._control.wait(work)

    def close(self) -> None:
        """Give up calls that others may never join. Order: nothing of this rank runs any more, or a rank is lost."""
        if self._by_nccl:
            self._group.abort()


def _share_a_gpu(control: Control, device: torch.device) -> bool:
    """Whether two ranks of this one's node have the same GPU."""
    told = control.gather((control.ranks.node, str(torch.cuda.get_device_properties(device).uuid)))
    here = [gpu for node, gpu in told if node == control.ranks.node]
    return len(set(here)) < len(here)
