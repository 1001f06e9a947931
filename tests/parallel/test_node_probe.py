"""What several ranks reach at once, with what needs GPUs replaced: the slowest counts, remembered, planned with."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from ranks_helper import run_ranks, values_of

from flexengine import api
from flexengine.hardware import node_probe
from flexengine.hardware.measure.node import MeasuredRank
from flexengine.hardware.node_rates import LINK_FIELDS, NodeRates, RankRates, slowest_of, with_node_rates
from flexengine.hardware.nodes import rank_profile, with_gpus
from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.options.job import Job
from flexengine.parallel.devices import GpusOfRanks
from flexengine.parallel.team import join, leave
from flexengine.plan import Request
from flexengine.planner.ranks.plan import plan_for_ranks

CARD = replace(preset("h100"), source="measured")
PEAK = CARD.matmul.peak_flops_per_s
RATES = [
    RankRates(50e9, 51e9, 40e9, 41e9, 20e9, 31e9, 90e9, 5e9, 0.9 * PEAK, 300e9),
    RankRates(49e9, 52e9, 39e9, 42e9, 21e9, 30e9, 95e9, 4e9, 0.95 * PEAK, 301e9),
]
SLOWEST = RankRates(49e9, 51e9, 39e9, 41e9, 20e9, 30e9, 90e9, 4e9, 0.9 * PEAK, 300e9)


class Fake:
    """Stands for what needs GPUs; counts measurements."""

    def __init__(self, rank: int, fails: bool = False) -> None:
        self.rank, self.fails, self.measured = rank, fails, 0

    def host_and_links(self, device: Any, dtype: Any, adamw: Any, free_bytes: int, at_once: Any) -> MeasuredRank:
        return at_once(self._found)

    def _found(self) -> MeasuredRank:
        self.measured += 1
        if self.fails:
            raise MemoryError("no memory can be locked")
        rates = RATES[self.rank]._asdict()
        del rates["peer_bytes_per_s"]
        return MeasuredRank(rates, "bfloat16")

    def patched(self, cache: Path) -> Any:
        peer = RATES[self.rank].peer_bytes_per_s
        return mock.patch.multiple(
            node_probe,
            gpus_of_ranks=lambda control, device: GpusOfRanks((0, 0), ("a", "b"), (False, False)),
            measure_at_work=self.host_and_links,
            _peer_buffers=lambda ranks, device: node_probe._PeerBuffers(*[torch.zeros(0)] * 4),
            _peer_rate=lambda ranks, collectives, buffers: peer,
            _used=lambda device: (100 * self.measured, 1000 * self.measured),
            node_path=lambda device, dtype, ranks, nodes: cache / f"{ranks}-{nodes}.json",
        )


def profiles(rank: int, cache: Path) -> tuple[HardwareProfile, HardwareProfile, int]:
    """The profile at the first and at the second call, and how often was measured."""
    fake, team = Fake(rank), join()
    assert team is not None
    with fake.patched(cache):
        first, second = (
            node_probe.with_ranks_at_work(CARD, team, torch.device("cpu"), torch.bfloat16) for _ in range(2)
        )
    leave()
    return first, second, fake.measured


def test_the_slowest_rank_counts_and_is_remembered(tmp_path):
    outcomes = values_of(run_ranks(profiles, 2, tmp_path))
    assert [measured for _, _, measured in outcomes] == [1, 1]
    expected = with_node_rates(CARD, NodeRates(2, "bfloat16", SLOWEST, "nccl"))
    for first, second, _ in outcomes:
        assert second == expected
        grown = (
            first.memory.gpu_context_bytes - CARD.memory.gpu_context_bytes,
            first.memory.host_base_bytes - CARD.memory.host_base_bytes,
        )
        assert grown == (100, 1000)  # what the measurement has left in this process
        assert first.memory.host_available_bytes == CARD.memory.host_available_bytes - 2 * 1000
        assert first.changed(**_memory(second)) == second
    assert {name: getattr(expected.link, name) for name in LINK_FIELDS} == {n: getattr(SLOWEST, n) for n in LINK_FIELDS}
    assert expected.host.bytes_per_s == 2 * 90e9
    assert expected.host.adamw_rate("bfloat16") == pytest.approx(2 * 4e9)
    for rate in ("matmul.rate", "matmul.fp8_rate", "attention.forward_rate", "attention.backward_rate"):
        assert attrgetter(rate)(expected)(3000) == pytest.approx(0.9 * attrgetter(rate)(CARD)(3000))
    assert expected.matmul.peak_flops_per_s == pytest.approx(0.9 * PEAK)
    assert HardwareProfile.from_json(expected.to_json()) == expected


def _memory(profile: HardwareProfile) -> dict[str, int]:
    names = ("gpu_free_bytes", "gpu_context_bytes", "host_available_bytes", "host_base_bytes")
    return {name: getattr(profile.memory, name) for name in names}


def without(rank: int) -> bool:
    team = join()
    assert team is not None
    found = node_probe.with_ranks_at_work(CARD, team, torch.device("cpu"), torch.bfloat16)
    leave()
    return found is CARD


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_on_cpus_and_one_on_each_node_keep_the_profile(nodes):
    assert values_of(run_ranks(without, 2, nodes=nodes)) == [True, True]


def failing(rank: int, cache: Path) -> str:
    fake, team = Fake(rank, fails=rank == 1), join()
    assert team is not None
    with fake.patched(cache), pytest.raises(MemoryError) as caught:
        node_probe.with_ranks_at_work(CARD, team, torch.device("cpu"), torch.bfloat16)
    assert not list(cache.iterdir())
    leave()
    return str(caught.value)


def test_what_one_rank_raises_all_raise(tmp_path):
    words = "no memory can be locked"
    assert values_of(run_ranks(failing, 2, tmp_path)) == [f"rank 1: {words}", words]


def planned(rank: int, cache: Path) -> tuple[HardwareProfile, bool]:
    job = Job(
        max_seq_len=64, max_global_batch_tokens=512, dtype="float32", device="cpu", chunk_tokens=64, round_tokens=64,
        max_gpu_mem_gib=1.5, max_host_mem_gib=8.0,
    )  # fmt: skip
    with Fake(rank).patched(cache), mock.patch.object(api, "probe", return_value=CARD):
        found = api.prepare_job("preset:demo", job)
    leave()
    return found.profile, found.plan.transport


def test_runs_are_planned_with_what_was_measured(tmp_path):
    (first, first_split), second = values_of(run_ranks(planned, 2, tmp_path))
    assert second == (first, first_split)
    assert (first.link.peer_bytes_per_s, first.measured_ranks) == (300e9, 2)


@pytest.mark.usefixtures("quick_search")
def test_the_transport_follows_the_rates():
    spec = open_model("preset:qwen3-0.6b").spec
    spec = spec.with_layers([*range(7), len(spec.layers) - 1])
    request = Request(1024, 4 * 4096, 6 * GIB, 64 * GIB, ranks=4)
    fast, slow = (
        with_node_rates(CARD, NodeRates(4, "bfloat16", SLOWEST._replace(peer_bytes_per_s=rate))) for rate in (3e11, 3e9)
    )
    assert plan_for_ranks(spec, request, fast).transport == "split"
    assert plan_for_ranks(spec, request, slow).transport == "relay"


def test_links_of_measured_ranks_are_as_measured():
    found = with_node_rates(CARD, NodeRates(4, "bfloat16", SLOWEST))
    assert replace(rank_profile(found, 4), drive=found.drive) == found  # of the drive each has a quarter
    assert with_gpus(found, 4) == found  # as `plan --gpus 4` has it
    assert rank_profile(found, 8).link.h2d_duplex_bytes_per_s == found.host.bytes_per_s / 16
    assert rank_profile(found, 1).link.h2d_bytes_per_s == found.link.h2d_bytes_per_s


@pytest.mark.parametrize("change", ['"ranks": 1', '"h2d_bytes_per_s": -1', '"other": 3'])
def test_rates_on_disk_are_checked(change):
    rates = NodeRates(2, "bfloat16", slowest_of(RATES))
    assert NodeRates.from_json(rates.to_json()) == rates == NodeRates(2, "bfloat16", SLOWEST)
    name = change.partition(":")[0]
    lines = [line for line in rates.to_json().splitlines() if name not in line]
    with pytest.raises(ValueError, match="expected"):
        NodeRates.from_json("\n".join([lines[0], f"{change},", *lines[1:]]))
