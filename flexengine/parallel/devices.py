"""The GPU of a rank: each has one of its own, unless a person wants several to share one, as tests do."""

from __future__ import annotations

import os
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch

from flexengine.parallel.control import Control
from flexengine.parallel.ranks import Ranks

SHARED_GPU_VARIABLE = "FLEXENGINE_SHARED_GPU"
"""With "1" in the environment of all ranks they take the GPUs of a node in turn, also where there are fewer."""


def device_of_rank(name: str, ranks: Ranks) -> str:
    """The device of a rank, by the job's name for the device of all. Raises: ValueError where there are too few."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    if name not in ("auto", "cuda"):
        raise ValueError(
            f"device={name!r}, but each of {ranks.size} ranks has a GPU of its own; give auto, cuda or cpu"
        )
    count = torch.cuda.device_count()
    if count == 1:  # whoever started the ranks shows each its own, or they share one
        return "cuda:0"
    if count < ranks.local_size and not _may_share():
        raise ValueError(
            f"{ranks.local_size} ranks on this machine, which has {count} usable NVIDIA GPUs; start as many ranks"
        )
    return f"cuda:{ranks.local_rank % max(1, count)}"


class GpusOfRanks(NamedTuple):
    """The GPUs of all ranks, by rank: the rank's node, its GPU's uuid (None: a CPU), whether it may share that GPU."""

    nodes: tuple[int, ...]
    gpus: tuple[str | None, ...]
    may_share: tuple[bool, ...]

    def check_own(self) -> None:
        """Raise ValueError where two ranks have the same GPU, unless they may share it."""
        holders: dict[str, int] = {}
        for rank, (gpu, may_share) in enumerate(zip(self.gpus, self.may_share, strict=True)):
            if gpu is not None and holders.setdefault(gpu, rank) != rank and not may_share:
                raise ValueError(
                    f"ranks {holders[gpu]} and {rank} have the same GPU ({gpu}), and each would take the whole GPU"
                    f" budget; start one rank for each GPU, or set {SHARED_GPU_VARIABLE}=1 and give each its share of"
                    " the budget"
                )

    @property
    def all_own(self) -> bool:
        """Whether every rank has a GPU that no other has."""
        return None not in self.gpus and len(set(self.gpus)) == len(self.gpus)

    def shared_on(self, node: int) -> bool:
        """Whether two ranks of a node have the same GPU."""
        here = [gpu for at, gpu in zip(self.nodes, self.gpus, strict=True) if at == node and gpu is not None]
        return len(set(here)) < len(here)


_known: WeakKeyDictionary[Control, tuple[torch.device, GpusOfRanks]] = WeakKeyDictionary()


def gpus_of_ranks(control: Control, device: torch.device) -> GpusOfRanks:
    """What GPUs all ranks have: gathered once among the ranks of a Control, which make the first call together."""
    known = _known.get(control)
    if known is None or known[0] != device:
        gpu = None if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
        nodes, gpus, may_share = zip(*control.gather((control.ranks.node, gpu, _may_share())), strict=True)
        known = _known[control] = device, GpusOfRanks(nodes, gpus, may_share)
    return known[1]


def _may_share() -> bool:
    return os.environ.get(SHARED_GPU_VARIABLE) == "1"
