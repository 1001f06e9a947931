"""What the plan accuracy benchmark makes of recorded steps."""

import json
import os

import pytest

from bench.plan_accuracy import (
    CASES,
    FAMILIES,
    SPEEDS,
    compile_kernels,
    in_order,
    lengths_of,
    merged,
    named,
    rows_by_gpus,
    shared_cores,
    small,
    summary,
    write_config,
)
from flexengine.models.registry import open_initial
from flexengine.options.job import Job
from flexengine.request import described


def row(case, steps_s: list[float], predicted_s: float) -> dict:
    memory = {"gpu_bytes": 100, "predicted_gpu_bytes": 104, "host_bytes": 100, "predicted_host_bytes": 99}
    return {**case._asdict(), **memory, "step_s": 99.0, "steps_s": steps_s, "predicted_step_s": predicted_s}


def test_two_steps_warm_up(tmp_path):
    paths = []
    for case, steps_s, predicted_s in ((CASES[1], [9.0, 1.0, 2.0, 4.0, 3.0], 3.2), (CASES[0], [5.0, 0.5, 1.0], 1.5)):
        path = tmp_path / f"{case.tokens}.json"
        result = {"environment": {"command": str(path)}, "rows": [row(case, steps_s, predicted_s)]}
        path.write_text(json.dumps(result))
        paths.append(str(path))
    found = merged(paths)
    assert [r["step_s"] for r in found["rows"]] == [1.0, 3.0]
    assert [r["tokens"] for r in found["rows"]] == [case.tokens for case in CASES[:2]]
    assert found["summary"] == summary(found["rows"])
    assert found["summary"]["step_time_within_10_percent"] == 1
    assert (found["summary"]["gpu_memory_within_promise"], found["summary"]["host_memory_within_promise"]) == (2, 0)


@pytest.mark.parametrize("case", [*FAMILIES, *SPEEDS], ids=lambda case: named(case._asdict()))
def test_models_and_options_are_known(case, tmp_path):
    write_config(case.model, case.layers, tmp_path)
    job = Job(max_seq_len=case.seq_len, max_global_batch_tokens=case.tokens, **(case.options or {}))
    described(open_initial(tmp_path, "random").spec, job)


def test_kernels_are_compiled_with_all_kinds_of_layers():
    case = next(case for case in FAMILIES if case.model == "gemma-3-4b")
    assert small(case) == case._replace(layers=6, cap_gib=7.0, tokens=8192, options={})
    assert (small(FAMILIES[-1]).layers, small(FAMILIES[-1]).options) == (2, {})


def test_ragged_lengths_fit_the_plan():
    lengths = lengths_of(16384, 2048, ragged=True)
    assert len(lengths) == 8
    assert max(lengths) <= 2048
    assert sum(lengths) < 16384
    assert lengths == lengths_of(16384, 2048, ragged=True)


def test_cores_are_shared_by_gpus_of_a_node():
    node = frozenset(range(8)), frozenset(range(8, 16))
    two_and_one = shared_cores([node[0], node[0], node[1]], frozenset(range(12)))
    assert two_and_one == [frozenset(range(4)), frozenset(range(4, 8)), frozenset(range(8, 12))]
    unknown = shared_cores([frozenset(), frozenset()], frozenset(range(3)))
    assert unknown == [frozenset({0}), frozenset({1, 2})]


def test_cases_run_on_a_gpu_and_with_cores_of_their_own(monkeypatch):
    allowed, found = os.sched_getaffinity(0), []
    cores = [frozenset({core}) for core in sorted(allowed)][:2] * 2

    def run(case, environment):
        found.append((environment["CUDA_VISIBLE_DEVICES"], environment["FLEXENGINE_CACHE"], os.sched_getaffinity(0)))
        return {**case._asdict(), "failed": "tried"}

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("bench.plan_accuracy.run_in_own_process", run)
    rows = list(rows_by_gpus(FAMILIES, cores, lambda: True))
    assert in_order(rows) == [{**case._asdict(), "failed": "tried"} for case in FAMILIES]
    assert all(held == cores[int(gpu)] for gpu, _, held in found)
    assert len({folder for _, folder, _ in found}) == len({gpu for gpu, _, _ in found})
    assert os.sched_getaffinity(0) == allowed
    assert list(rows_by_gpus(FAMILIES, cores, lambda: False)) == []


def test_kernels_are_compiled_on_all_gpus(monkeypatch):
    found = []

    def run(case, module, flag, environment):
        found.append((case.model, environment["CUDA_VISIBLE_DEVICES"]))
        return {}

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    monkeypatch.setattr("bench.plan_accuracy.run_in_own_process", run)
    compile_kernels(list(FAMILIES), at_once=1, gpus=2)
    assert [gpu for _, gpu in found[:4]] == ["4", "5", "4", "5"]
    assert {model for model, _ in found} == {case.model for case in FAMILIES}
