"""from_pretrained under torchrun's environment: ranks plan together, train to the bits of one, and hold the budgets."""

import os
import re
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from engine_helpers import random_batch
from ranks_helper import run_ranks, values_of
from thorough import cases

from flexengine import from_pretrained
from flexengine.api import build, prepare
from flexengine.hardware.presets import named_profile
from flexengine.hardware.profile import HardwareProfile
from flexengine.models.registry import open_model
from flexengine.native.threads import host_threads
from flexengine.parallel.control import Control
from flexengine.parallel.devices import SHARED_GPU_VARIABLE, device_of_rank, gpus_of_ranks
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.team import Team, leave
from flexengine.plan import PlanError, Request
from flexengine.planner.cost.memory import host_required_bytes
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.schedule.layout import Layout

JOB = {
    "max_seq_len": 64, "max_global_batch_tokens": 512, "dtype": "float32", "device": "cpu", "chunk_tokens": 64,
    "round_tokens": 64, "round_multiple": 2, "max_gpu_mem_gib": 0.3, "max_host_mem_gib": 8.0,
}  # fmt: skip
LENGTHS = [64, 50, 64, 33, 12, 64, 20, 48]
GIB = 2**30


@cache
def profile() -> HardwareProfile:
    return prepare("preset:demo", **JOB).profile


def train(rank: int) -> tuple[list[tuple[float, float]], str, int]:
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none"}
    before = host_threads()
    engine = from_pretrained("preset:demo", hardware=profile(), **JOB)
    found = []
    for step in range(2):
        batch = random_batch(step, LENGTHS, 500)
        out, update = engine.train_step(input_ids=batch, labels=batch)
        found.append((float(out.loss), float(update.grad_norm)))
    plan = replace(engine.plan).to_json()
    engine.close()
    leave()
    request, local_size = engine.plan.request, int(os.environ["LOCAL_WORLD_SIZE"])
    assert (request.ranks, request.nodes) == (local_size, int(os.environ["WORLD_SIZE"]) // local_size)
    assert torch.get_num_threads() == 1
    return found, plan, host_threads() - before


def test_ranks_train_to_the_bits_of_one():
    profile()
    [(alone, _, _)] = values_of(run_ranks(train, 1))
    values = values_of(run_ranks(train, 2))
    assert [found for found, _, _ in values] == [alone] * 2
    assert len({plan for _, plan, _ in values}) == 1
    if len(os.sched_getaffinity(0)) >= 4:
        assert all(more > 0 for _, _, more in values)


def other_batch(rank: int) -> str:
    engine = from_pretrained("preset:demo", hardware=profile(), **JOB)
    with pytest.raises(ValueError, match="another batch") as caught:
        engine.fwd_bwd(random_batch(rank, LENGTHS, 500))
    engine.close()
    leave()
    return str(caught.value)


def test_another_batch_is_an_error_on_all():
    profile()
    assert len(set(values_of(run_ranks(other_batch, 2)))) == 1


def test_parts_that_ranks_give_have_no_images():
    planned = prepare("preset:demo", hardware=profile(), **JOB)
    planned = replace(planned, team=cast(Team, object()), job=replace(planned.job, max_image_tokens=9))
    with pytest.raises(ValueError, match="images take whole batches; give every rank all of it by batches"):
        build(planned, batches="local")


def no_plan(rank: int) -> str:
    with pytest.raises(ValueError, match="PlanError") as caught:
        from_pretrained("preset:demo", hardware=profile(), **{**JOB, "max_host_mem_gib": 0.1})
    leave()
    return str(caught.value)


def test_without_a_plan_all_ranks_say_so():
    profile()
    first, second = values_of(run_ranks(no_plan, 2))
    assert second == f"rank 0: {first}"


@pytest.mark.usefixtures("quick_search")
@pytest.mark.parametrize(("ranks", "host_gib"), cases([(2, 130), (8, 260)], [(8, 260)]))
def test_a_plan_of_ranks_holds_the_budget_of_the_node(ranks, host_gib):
    spec, card = open_model("preset:llama-3.1-8b").spec, named_profile("rtx4090")
    request = Request(2048, 131072 * ranks, 22 * GIB, host_gib * GIB, ranks=ranks, transport="relay")
    plan = plan_for_ranks(spec, request, card)
    layout = Layout(spec, plan)
    assert plan.request == request
    assert plan.predicted.host_bytes == ranks * host_required_bytes(layout, card) <= request.max_host_bytes
    assert layout.node_bytes > 2 * spec.num_trained_parameters
    assert sum(plan.predicted.host_categories.values()) == pytest.approx(plan.predicted.host_bytes, rel=1e-3)
    assert plan.predicted.gpu_bytes <= request.max_gpu_bytes
    assert {home.weights for home in plan.groups} == {"host"}


def test_too_little_host_memory_for_ranks_is_said():
    spec, card = open_model("preset:llama-3.1-8b").spec, named_profile("rtx4090")
    sizes = {"chunk_tokens": 8192, "round_tokens": 32768}
    with pytest.raises(PlanError):
        plan_for_ranks(spec, Request(2048, 131072, 22 * GIB, 50 * GIB, ranks=4, **sizes), card)


def test_each_rank_has_a_gpu_of_its_own(monkeypatch):
    second = Ranks(1, 2, 1, 2, 0, 1)
    assert device_of_rank("cpu", second) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for count, device in ((1, "cuda:0"), (2, "cuda:1"), (8, "cuda:1")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert device_of_rank("auto", second) == device
    with pytest.raises(ValueError, match="a GPU of its own"):
        device_of_rank("cuda:1", second)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ValueError, match="4 ranks on this machine, which has 2"):
        device_of_rank("auto", Ranks(3, 4, 3, 4, 0, 1))
    monkeypatch.setenv(SHARED_GPU_VARIABLE, "1")
    assert device_of_rank("auto", Ranks(3, 4, 3, 4, 0, 1)) == "cuda:1"


@pytest.mark.parametrize(("gpus", "may_share", "said", "own", "shared"), [
    ("abcd", False, None, True, [False, False]),
    ("abcc", False, "ranks 2 and 3 have the same GPU (c)", False, [False, True]),
    ("aabb", True, None, False, [True, True]),
])  # fmt: skip
def test_the_gpus_of_ranks_are_gathered_once(gpus, may_share, said, own, shared, monkeypatch):
    calls = []

    class Gathered:
        ranks = Ranks(0, 4, 0, 2, 0, 2)

        def gather(self, told):
            calls.append(told)
            return [(rank // 2, gpu, may_share) for rank, gpu in enumerate(gpus)]

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid=gpus[0]))
    control = cast(Control, Gathered())
    found, again = (gpus_of_ranks(control, torch.device("cuda:0")) for _ in range(2))
    assert found is again
    assert calls == [(0, gpus[0], False)]
    assert found.all_own == own
    assert [found.shared_on(node) for node in (0, 1)] == shared
    with nullcontext() if said is None else pytest.raises(ValueError, match=re.escape(said)):
        found.check_own()
