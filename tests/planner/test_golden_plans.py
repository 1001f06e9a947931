"""Stored requests on real models are planned as well as before. `python -m bench.golden_plans --compare` takes all."""

import pytest
from thorough import cases

from bench.golden_cases import CASES, Case
from bench.golden_plans import broken_bounds, compared, stored

SUBSET = (
    "llama-3.2-1b a100-40 6+60GiB 4096x2048 fp32-states",
    "llama-3.2-3b rtx-4090 16+110GiB 131072x65536 stochastic",
    "llama-3.2-3b h200 28+110GiB 32768x2048 no-clipping",
    "llama-3.1-8b h200 24+110GiB 131072x2048 fp8",
    "llama-3.1-70b rtx-4090 24+400GiB 65536x2048 freeze=embed+block.0-59",
    "qwen3.5-9b h200 32+126GiB 131072x2048",
)
"""An eighth of the requests: each feature once, sizes from 1B to 70B. Steps that touch few experts take a minute to
plan: the script has them, and test_touched_experts.py holds what decides."""
WITH_ALL_TESTS = (SUBSET[4],)


def test_stored_requests_are_those_that_the_script_plans():
    assert [Case.from_json(row) for row in stored()] == list(CASES)
    assert [row["id"] for row in stored()] == [case.id for case in CASES]
    assert len({case.id for case in CASES}) == len(CASES)


@pytest.mark.long
@pytest.mark.parametrize("name", cases(SUBSET, WITH_ALL_TESTS))
def test_plans_are_as_fast_as_stored_and_within_budgets(name):
    """Each plan alone, so that processes share them: where none breaks the bound of the mean, all together do not."""
    (row,) = (row for row in stored() if row["id"] == name)
    assert broken_bounds([compared(row)]) == []


def test_broken_bounds_are_told():
    rows = [{**row, "ratio": 1.0, "excess_bytes": 0, "stored_step_s": row["step_s"]} for row in stored()[:3]]
    assert broken_bounds(rows) == []
    slower = [{**row, "ratio": 1.004} for row in rows]
    assert broken_bounds(slower) == ["mean of new over stored seconds is 1.0040, at most 1.003"]
    far = [{**rows[0], "ratio": 1.021}, *rows[1:], *rows, *rows]
    assert len(broken_bounds(far)) == 1
    assert rows[0]["id"] in broken_bounds(far)[0]
    above = [*rows[1:], {**rows[0], "excess_bytes": 1}]
    assert broken_bounds(above) == [f"{rows[0]['id']}: 1 bytes above a budget"]
