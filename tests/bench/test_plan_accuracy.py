"""What the plan accuracy benchmark makes of recorded steps."""

import json

from bench.plan_accuracy import CASES, merged, summary


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
