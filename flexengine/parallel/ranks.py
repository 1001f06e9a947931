"""Which of the run's processes this one is: one process, a rank, for each GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import NamedTuple

from torch import distributed

_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
_REMEDY = "start the processes with torchrun, or `flexengine train --gpus N`, which set all four"


class Ranks(NamedTuple):
    """A rank among `size`, which count node after node, `local_size` on each of `nodes`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    nodes: int

    @staticmethod
    def alone() -> Ranks:
        """The one process of a run on one GPU."""
        return Ranks(0, 1, 0, 1, 0, 1)

    @staticmethod
    def of_environment(environment: Mapping[str, str] | None = None) -> Ranks:
        """The rank that RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE name, or an initialised process group.

        Without the variables of a node, all ranks are taken to be on one. Raises ValueError where the numbers
        contradict each other, or where nodes have unlike numbers of ranks.
        """
        environment = os.environ if environment is None else environment
        given = {name: _number(name, environment[name]) for name in _NAMES if name in environment}
        if distributed.is_available() and distributed.is_initialized():
            _refuse_contradiction(given)
            given |= {"RANK": distributed.get_rank(), "WORLD_SIZE": distributed.get_world_size()}
        if not given.keys() & {"RANK", "WORLD_SIZE"}:
            return Ranks.alone()
        for name in ("RANK", "WORLD_SIZE"):
            if name not in given:
                raise ValueError(f"the environment has {', '.join(sorted(given))} but no {name}; {_REMEDY}")
        rank, size = given["RANK"], given["WORLD_SIZE"]
        local_size = given.get("LOCAL_WORLD_SIZE", size)
        _check(rank, size, local_size)
        local_rank = given.get("LOCAL_RANK", rank % local_size)
        if local_rank != rank % local_size:
            raise ValueError(
                f"RANK {rank} with LOCAL_WORLD_SIZE {local_size} should have LOCAL_RANK {rank % local_size}, but has"
                f" {local_rank}; ranks count node after node; {_REMEDY}"
            )
        return Ranks(rank, size, local_rank, local_size, rank // local_size, size // local_size)

    @property
    def of_node(self) -> range:
        """The ranks of this rank's node."""
        return range(self.node * self.local_size, (self.node + 1) * self.local_size)


def _number(name: str, text: str) -> int:
    if not text.strip().isdecimal():
        raise ValueError(f"{name}={text!r} is not a number of ranks; {_REMEDY}")
    return int(text)


def _refuse_contradiction(given: Mapping[str, int]) -> None:
    """Raise ValueError where the environment names another rank than the initialised process group."""
    for name, number in (("RANK", distributed.get_rank()), ("WORLD_SIZE", distributed.get_world_size())):
        if given.get(name, number) != number:
            raise ValueError(f"{name}={given[name]}, but the initialised process group says {number}; unset {name}")


def _check(rank: int, size: int, local_size: int) -> None:
    if not 0 <= rank < size:
        raise ValueError(f"RANK {rank} is not below WORLD_SIZE {size}; {_REMEDY}")
    if local_size < 1 or size % local_size:
        raise ValueError(
            f"WORLD_SIZE {size} is not a multiple of LOCAL_WORLD_SIZE {local_size}; give every node as many processes"
        )
