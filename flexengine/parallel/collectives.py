"""Collectives of the ranks of a node: torch.distributed moves bytes between them, by NCCL between GPUs, by gloo else.

All ranks make the same calls in the same order. On CUDA a call is work of the current stream and returns at once; gloo
blocks until it has ended. The path over NCCL has not run on several GPUs yet.
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
        name = f"split{ranks.node}"
        if self._on_cuda:
            self._group = control.nccl_link(name, ranks.local_rank, ranks.local_size)
        else:
            self._group = control.link(name, ranks.local_rank, ranks.local_size)

    def gather(self, shares: Tensor, own: Tensor) -> None:
        """Fill `shares`, equal parts of each rank one after the other; `own` is this rank's, which lies in there."""
        own = own if self._on_cuda else own.clone()  # gloo copies it to where it is already
        self._end(self._group._allgather_base(shares, own))

    def exchange(self, received: Tensor, sent: Tensor, counts: Sequence[int], own: int) -> None:
        """Send `counts[r]` elements of `sent` to each rank r; fill `received` with the `own` elements of every rank."""
        self._end(self._group.alltoall_base(received, sent, [own] * len(counts), list(counts)))

    def add(self, table: Tensor) -> None:
        """Replace a table by the sum of those of all ranks."""
        self._end(self._group.allreduce([table]))

    def _end(self, work: Any) -> None:
        """Have what follows come after a call: on CUDA on the current stream, else in this thread."""
        if self._on_cuda:
            work.wait()
        else:
            self._control.wait(work)

    def close(self) -> None:
        """Give up calls that others may never join. Order: nothing of this rank runs any more, or a rank is lost."""
        if self._on_cuda:
            self._group.abort()
