"""Threads and cores of ranks: what torchrun sets does not make updates single-threaded."""

import os
from pathlib import Path

import pytest
import torch
from ranks_helper import run_ranks, values_of

from flexengine.native.adamw import update_threads
from flexengine.native.threads import few_threads, host_threads, set_host_threads
from flexengine.parallel.control import Control
from flexengine.parallel.cores import chosen_threads, cores_of_node, share_of, take_cores
from flexengine.parallel.ranks import Ranks


@pytest.mark.parametrize(
    ("own", "of_ranks", "threads"),
    [
        (range(32), [range(32)] * 4, 8),
        (range(8), [range(8), range(8, 16)], 8),
        (range(16), [range(16), range(8)], 12),  # 8 alone and 8 shared by two
        (range(2), [range(2)] * 4, 1),
        (range(9), [range(9)] * 3, 3),
    ],
    ids=["shared", "bound", "overlapping", "few", "thirds"],
)
def test_cores_are_shared_evenly(own, of_ranks, threads):
    assert share_of(set(own), [set(cores) for cores in of_ranks]) == threads


def test_a_chosen_number_of_threads_counts():
    assert chosen_threads({"OMP_NUM_THREADS": "6"}) == 6
    assert chosen_threads({"OMP_NUM_THREADS": "6", "TORCHELASTIC_RUN_ID": "none"}) == 6
    assert chosen_threads({"OMP_NUM_THREADS": "1"}) == 1
    assert chosen_threads({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}) is None
    assert chosen_threads({}) is None
    assert chosen_threads({"OMP_NUM_THREADS": "many"}) is None


def test_few_threads_of_many_cores_are_told(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert few_threads() == ""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert "OMP_NUM_THREADS=2 leaves updates on the CPU 2 of 16 cores" in few_threads()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    assert few_threads() == ""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert few_threads() == ""


def test_cores_of_a_node_are_read(tmp_path):
    (tmp_path / "node1").mkdir()
    (tmp_path / "node1" / "cpulist").write_text("0-2,8\n")
    assert cores_of_node(1, tmp_path) == {0, 1, 2, 8}
    assert cores_of_node(0, tmp_path) == cores_of_node(None, tmp_path) == frozenset()


def of_torchrun(rank: int, folder: str, bound: bool) -> tuple[int, int, int, set[int]]:
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
    cores = sorted(os.sched_getaffinity(0))
    if bound:
        os.sched_setaffinity(0, [cores[rank % len(cores)]])
    ranks = Ranks.of_environment()
    threads = take_cores(ranks, Control.open(ranks, 60.0), 0 if rank == 0 else None, Path(folder))
    assert threads == host_threads()
    return threads, update_threads(), torch.get_num_threads(), os.sched_getaffinity(0)


def test_torchrun_leaves_updates_their_cores(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text(f"{cores[0]}")
    first, second = values_of(run_ranks(of_torchrun, 2, str(tmp_path), False))
    assert first[3] == {cores[0]}  # that of its GPU
    assert second[3] == set(cores)
    assert second[0] == len(cores) - 1  # one of them is shared with the first rank
    assert second[1] == max(1, second[0] - 1)
    assert first[2] == second[2] == 1  # the order of torch's sums stays


def test_bound_ranks_stay_bound(tmp_path):
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs two cores")
    (tmp_path / "node0").mkdir()
    (tmp_path / "node0" / "cpulist").write_text(f"{cores[1]}")
    values = values_of(run_ranks(of_torchrun, 2, str(tmp_path), True))
    assert [(threads, bound) for threads, _, _, bound in values] == [(1, {cores[0]}), (1, {cores[1]})]


def test_updates_have_the_threads_they_are_told():
    try:
        set_host_threads(5)
        assert (host_threads(), update_threads()) == (5, 4)
        with pytest.raises(ValueError, match="0 threads"):
            set_host_threads(0)
    finally:
        set_host_threads(None)
    assert host_threads() == torch.get_num_threads()
