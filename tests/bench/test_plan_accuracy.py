"""What the plan accuracy benchmark makes of recorded steps."""

import json

import pytest

from bench.plan_accuracy import CASES, FAMILIES, SPEEDS, lengths_of, merged, named, small, summary, write_config
from flexengine.job import Job
from flexengine.models.registry import open_initial
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
