"""Collectives over gloo, one group after the other; and how a group of NCCL is made, with NCCL's class replaced."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from ranks_helper import run_ranks, values_of
from torch.distributed import HashStore, distributed_c10d

from flexengine.parallel.collectives import Collectives
from flexengine.parallel.control import Control, RankError, _Meeting
from flexengine.parallel.hub import Hub
from flexengine.parallel.ranks import Ranks

CPU = torch.device("cpu")


def use_two(rank: int, seed: int) -> list[Any]:
    """What a rank gets of two groups of the same ranks, each with calls of every kind."""
    control, found = Control.open(Ranks.of_environment()), []
    counts = [3, 5]
    for group in range(2):
        collectives = Collectives(control, CPU)
        generator = torch.Generator().manual_seed(seed + 10 * group)
        sent = torch.randn(2, sum(counts), generator=generator)
        shares = torch.zeros(2, 7, dtype=torch.uint8)
        shares[rank] = 2 * group + rank
        collectives.gather(shares.view(-1), shares[rank])
        received = torch.empty(2 * counts[rank])
        collectives.exchange(received, sent[rank], counts, counts[rank])
        table = sent[rank].double()
        collectives.add(table)
        pieces = [row.split(counts)[rank] for row in sent]
        found += [
            shares.tolist() == [[2 * group] * 7, [2 * group + 1] * 7],
            torch.equal(received, torch.cat(pieces)),
            torch.equal(table, sent[0].double() + sent[1].double()),
        ]
        collectives.close()
    control.close()
    return found


def test_a_second_group_of_the_same_ranks_meets_anew():
    assert values_of(run_ranks(use_two, 2, 5)) == [[True] * 6] * 2


class FakeNccl:
    """Stands for torch's class, which is not in every build."""

    made: list[Any] = []  # noqa: RUF012

    class Options:
        _timeout: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        if rank == 1:
            raise RuntimeError("NCCL error")
        FakeNccl.made.append((os.environ.get("TORCH_NCCL_BLOCKING_WAIT"), rank, size, options._timeout.total_seconds()))
        store.set("id", str(len(FakeNccl.made)))


def test_a_group_of_nccl_is_made_without_threads_that_could_end_the_process(monkeypatch):
    monkeypatch.setattr(distributed_c10d, "ProcessGroupNCCL", FakeNccl, raising=False)
    monkeypatch.setattr(FakeNccl, "made", [])
    monkeypatch.delenv("TORCH_NCCL_BLOCKING_WAIT", raising=False)
    store = HashStore()
    control = Control(Ranks(0, 2, 0, 2, 0, 1), timeout_s=7.0)
    control._meeting = _Meeting(Hub(0, {}), store)
    control.nccl_link("split0", 0, 2)
    control.nccl_link("split0", 0, 2)
    assert FakeNccl.made == [("1", 0, 2, 7.0)] * 2
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
    assert store.get("split0/0/id") == b"1"  # what the first group left is not what the second one finds
    assert store.get("split0/1/id") == b"2"
    with pytest.raises(RankError, match="NCCL error"):
        control.nccl_link("split0", 1, 2)
    assert "TORCH_NCCL_BLOCKING_WAIT" not in os.environ
