"""The benchmark of plans with adapters runs on the CPU, and its cases are requests that a card can plan."""

from bench.adapter_plans import CASES, line, run_case, smoke
from bench.plan_accuracy import WARMUP_STEPS, summary


def test_a_small_case_trains_as_planned():
    row = run_case(smoke(CASES[3]))
    assert row["options"]["base_dtype"] == "nf4"
    assert len(row["steps_s"]) == WARMUP_STEPS + 3
    assert row["predicted_step_s"] > 0
    assert row["predicted_gpu_bytes"] > 0
    assert line(row).startswith("| LoRA, nf4 | llama-3.2-1b, 2 layers | 1 | 128 |")


def test_a_case_that_failed_is_counted_and_shown():
    row = {**CASES[0]._asdict(), "failed": "Traceback\nPlanError: too small"}
    assert summary([row])["failed"] == 1
    assert line(row).endswith("failed: PlanError: too small |")
