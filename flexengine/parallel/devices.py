"""The GPU of a rank: each has one of its own, unless a person wants several to share one, as tests do."""

from __future__ import annotations

import os

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


def check_own_gpus(control: Control, device: torch.device) -> None:
    """Raise ValueError on all ranks where two have the same GPU, unless all of them may share it."""
    own = None if device.type == "cpu" else str(torch.cuda.get_device_properties(device).uuid)
    told = control.gather((own, _may_share()))
    holders: dict[str, int] = {}
    for rank, (gpu, may_share) in enumerate(told):
        if gpu is not None and holders.setdefault(gpu, rank) != rank and not may_share:
            raise ValueError(
                f"ranks {holders[gpu]} and {rank} have the same GPU ({gpu}), and each would take the whole GPU budget;"
                f" start one rank for each GPU, or set {SHARED_GPU_VARIABLE}=1 and give each its share of the budget"
            )


def _may_share() -> bool:
    return os.environ.get(SHARED_GPU_VARIABLE) == "1"
