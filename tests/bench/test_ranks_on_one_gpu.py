"""Two ranks on one card, and what their signals and pages cost; bench/ranks_on_one_gpu.py measures larger ones."""

from __future__ import annotations

import argparse

import pytest
import torch

from bench.ranks_on_one_gpu import adamw, compare, pages, run_ranks


def arguments(device: str) -> argparse.Namespace:
    return argparse.Namespace(device=device, small=True)


@pytest.mark.thorough
def test_signals_and_pages_are_measured():
    [first, second] = run_ranks("hops", 2, arguments("cpu"))
    assert first["host_s"] > 0
    assert second["host_s"] > 0
    found = pages(torch.device("cpu"), 4 << 20)
    assert found["shared"]["map_bytes_per_s"] > 0
    assert found["shared, small pages"]["huge_bytes"] == 0
    assert adamw(1 << 12, repeats=1)["shared_over_private_time"] > 0


@pytest.mark.gpu
def test_two_ranks_on_one_gpu_train_to_the_bits_of_one():
    """Also where streams wait for each other, where the hosts do, and where ranks walk the layers together."""
    found = compare(arguments("cuda"))
    assert found["two"]["equal_bits"]
    assert found["two, split"]["equal_bits"]
    assert found["two, hosts wait"]["equal_bits"]
    assert found["two, stages"]["equal_bits"]
    assert found["two, stages, hosts wait"]["equal_bits"]
    assert not any(rank["streams_signal"] for rank in found["two, hosts wait"]["ranks"])


@pytest.mark.gpu
def test_streams_of_two_processes_signal_to_each_other():
    hops = run_ranks("hops", 2, arguments("cuda"))
    assert all(rank["stream_s"] is not None for rank in hops), "this driver has no stream memory operations"
