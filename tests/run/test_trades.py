"""What a job might give up for speed: which changes are tried, which are told, and that each was planned."""

from dataclasses import replace

import pytest

from flexengine.hardware.presets import preset, with_memory
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.options.job import Job
from flexengine.plan import Plan, Prediction, Request
from flexengine.planner.bound.speed_of_light import speed_of_light_s
from flexengine.request import described, make_request
from flexengine.run.trades import Trade, Trades, changes_of, trades_report

GIB = 2**30
CARD = with_memory(preset("rtx-4090"), host_total_bytes=64 * GIB)
SOURCE = open_model("preset:qwen2.5-0.5b", needs_weights=False)
JOB = Job(max_seq_len=1024, max_global_batch_tokens=8192, max_gpu_mem_gib=6, max_host_mem_gib=40)


def case(job: Job) -> tuple[ModelSpec, Request]:
    return described(SOURCE.spec, job), make_request(job, CARD, "cuda", whole_steps=True)


def plan_of(model: ModelSpec, request: Request, slower: float = 1.01) -> Plan:
    """A plan that is so much slower than its bound: what is tested here is what is asked for, and what is said."""
    light_s = speed_of_light_s(model, request, CARD)
    plan = object.__new__(Plan)
    object.__setattr__(plan, "predicted", Prediction(step_s=slower * light_s, speed_of_light_s=light_s))
    return plan


def flags_of(job: Job) -> list[str]:
    without = replace(job, max_gpu_mem_gib=None, max_host_mem_gib=None)
    return [change.flags for change in changes_of(job, CARD, case(without)[1])]


def test_only_what_was_not_given_up_is_offered():
    types = ["--keep-dtype fp8", "--keep-dtype fp8-inputs", "--delta-dtype bfloat16", "--matmul-dtype fp8"]
    types += [
        "--optimizer-state-dtype bfloat16",
        "--optimizer-state-dtype int8",
        "--master-dtype bfloat16",
        "--max-grad-norm 0",
    ]
    assert flags_of(JOB) == [*types, "--max-gpu-mem-gib 9", "--max-host-mem-gib 60"]
    for keep in ("fp8", "fp8-inputs"):
        assert flags_of(replace(JOB, keep_dtype=keep))[0] == "--keep-dtype fp8-all"
    narrow = {"matmul_dtype": "fp8", "optimizer_state_dtype": "int8", "master_dtype": "bfloat16"}
    given = replace(JOB, keep_dtype="fp8-all", **narrow)
    left = flags_of(replace(given, max_grad_norm=None, max_gpu_mem_gib=None, max_host_mem_gib=None))
    assert left == ["--delta-dtype bfloat16"]  # which is refused where it is tried, as the model has no delta rules


def test_a_larger_budget_is_within_the_machine():
    assert flags_of(replace(JOB, max_gpu_mem_gib=20))[8] == "--max-gpu-mem-gib 22.8"
    assert not any("gpu-mem" in flags for flags in flags_of(replace(JOB, max_gpu_mem_gib=22.5)))


def test_each_trade_is_planned_with_its_change_alone():
    asked: list[Request] = []

    def make(model: ModelSpec, request: Request) -> Plan:
        asked.append(request)
        return plan_of(model, request)

    found = Trades(JOB, plan_of(*case(JOB)), CARD, case).planned(make)
    assert [trade.flags for trade in found] == ["--matmul-dtype fp8"]
    assert found[0].gain == pytest.approx(speed_of_light_s(*case(JOB), CARD) / speed_of_light_s(*fp8(), CARD) - 1)
    assert replace(JOB, matmul_dtype="fp8").numerics in [request.numerics for request in asked]
    assert all(request.numerics == JOB.numerics or request.max_gpu_bytes == 6 * GIB for request in asked)


def fp8() -> tuple[ModelSpec, Request]:
    return case(replace(JOB, matmul_dtype="fp8"))


def test_a_plan_that_gains_nothing_is_not_told():
    trades = Trades(JOB, plan_of(*case(JOB)), CARD, case)
    assert trades.planned(lambda model, request: plan_of(model, request, 10.0)) == []
    assert trades_report([]) == "trades: no option of this job makes a step 2% faster"
    assert trades_report([Trade("--keep-dtype fp8", 0.071, "rounds what backward reads of gate and up")]) == (
        "trades, each planned by itself:\n  `--keep-dtype fp8`: 7% faster, rounds what backward reads of gate and up"
    )


def test_a_change_that_the_card_refuses_is_no_trade():
    ampere = with_memory(preset("rtx-3090"), host_total_bytes=64 * GIB)
    assert not any("matmul" in change.flags for change in changes_of(JOB, ampere, case(JOB)[1]))


def test_a_run_hears_of_what_raises_its_bound_without_waiting_for_plans():
    found = Trades(JOB, plan_of(*case(JOB)), CARD, case).bounded()
    assert [trade.flags for trade in found] == []  # 0.5B is not bound by products enough for 10%
    assert Trades(JOB, replace_light(plan_of(*case(JOB)), 1.2), CARD, case).bounded()[0].flags == "--matmul-dtype fp8"


def replace_light(plan: Plan, factor: float) -> Plan:
    predicted = plan.predicted
    object.__setattr__(plan, "predicted", replace(predicted, speed_of_light_s=factor * predicted.speed_of_light_s))
    return plan
