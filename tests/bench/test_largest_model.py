"""bench/largest_model.py: the layers that it finds fit and one more does not; bytes of updates are those declared."""

from types import SimpleNamespace

import pytest
from thorough import cases

from bench.largest_model import most_layers, parameters_that_fit, update_traffic
from flexengine.hardware.parts import ADAMW_BYTES
from flexengine.hardware.presets import preset
from flexengine.models.registry import open_model
from flexengine.options.job import Job
from flexengine.plan import Numerics, Request
from flexengine.planner.planner import find_plan
from flexengine.planner.problem import Problem
from flexengine.schedule.layout import Layout
from flexengine.schedule.programs import lower_update
from flexengine.schedule.timeline import TimedRun

GIB = 2**30


@pytest.mark.parametrize("host_gib", [5.0, 6.5])
def test_one_layer_more_does_not_fit(host_gib):
    profile = preset("h100-80")
    job = Job(
        max_seq_len=128, max_global_batch_tokens=128, max_gpu_mem_gib=2.0, max_host_mem_gib=host_gib,
        optimizer_state_dtype="int8",
    )  # fmt: skip
    found = most_layers("tiny-llama3-150m", job, profile)
    assert found.layers > 1
    assert found.parameters == parameters_that_fit("tiny-llama3-150m", found.layers, job, profile)
    assert not parameters_that_fit("tiny-llama3-150m", found.layers + 1, job, profile)


@pytest.mark.parametrize("states", cases(["int8", "bfloat16"], ["int8"]))
def test_bytes_of_updates_by_the_cpu(states):
    model, profile = open_model("preset:llama-3.2-1b").spec, preset("h100-80")
    request = Request(512, 1024, 5 * GIB // 2, 64 * GIB, numerics=Numerics(state=states), segment_blocks=1)
    plan = find_plan(Problem(model, request, profile))
    assert plan is not None
    program = lower_update(Layout(model, plan))
    run = TimedRun(program, 0.0, [(0.0, 1.0)] * len(program.commands))
    found = update_traffic(SimpleNamespace(model=model, plan=plan, take_timed_runs=lambda: [run]))
    cpu, gpu = found["cpu"], found["gpu"]
    assert cpu["parameters"] + gpu["parameters"] == model.num_parameters
    assert cpu["parameters"] > model.num_parameters / 3  # else this case shows nothing
    assert cpu["bytes_per_parameter"] == pytest.approx(ADAMW_BYTES[states], rel=1e-3)  # norms have float32 states
    assert cpu["seconds"] > 0
