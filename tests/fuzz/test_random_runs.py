"""Some of bench/random_runs.py's jobs on every run of the tests, and whether they would notice what they look for."""

from pathlib import Path

import pytest

if not (Path(__file__).resolve().parents[2] / "bench" / "random_runs.py").is_file():
    pytest.skip("bench/ is not beside the package", allow_module_level=True)

from family_configs import CASES as CONFIGS

from bench import random_runs
from bench.random_cases import draw_case

ALONE, RANKS = range(1_000_000, 1_000_005), range(2_000_003, 2_000_004)
MORE_ALONE, MORE_RANKS = range(1_000_005, 1_000_028), range(2_000_004, 2_000_007)
"""Beyond those of the committed result. Processes of ranks take longer than what they train."""

SIZES = ("max_seq_len", "max_global_batch_tokens", "chunk_tokens", "round_tokens")


def check(seeds: range, most_ranks: int) -> list[random_runs.Result]:
    results = random_runs.run_cases(seeds, most_ranks)
    complaints = [result for result in results if result.outcome not in ("same", "refused")]
    assert not complaints, complaints[0]
    assert [result.seed for result in results] == list(seeds)
    return [result for result in results if result.outcome == "same"]


@pytest.mark.long
@pytest.mark.parametrize("seeds", [ALONE, pytest.param(MORE_ALONE, marks=pytest.mark.thorough)], ids=str)
def test_plans_of_random_jobs_change_no_bit(seeds):
    same = check(seeds, 1)
    assert len(same) > 0.6 * len(seeds)  # few draw what the options forbid
    assert len({result.name for result in same}) > 0.6 * len(seeds)


@pytest.mark.long
@pytest.mark.parametrize("seeds", [RANKS, pytest.param(MORE_RANKS, marks=pytest.mark.thorough)], ids=str)
def test_ranks_of_random_jobs_change_no_bit(seeds):
    same = check(seeds, 3)
    assert {text[0] for result in same for text in result.variants} > {"1"}


def test_a_seed_is_a_job_and_seeds_in_a_row_are_all_models():
    drawn = [draw_case(seed) for seed in range(len(CONFIGS))]
    assert drawn == [draw_case(seed) for seed in range(len(CONFIGS))]
    assert {case.name for case in drawn} == set(CONFIGS)
    assert {variant.ranks for case in drawn for variant in case.variants} == {1, 2, 3}


def test_other_bits_a_crash_and_a_broken_promise_are_complaints(monkeypatch, tmp_path):
    case = draw_case(0, 1)
    plain = {name: value for name, value in case.options.items() if name in SIZES} | {"optimizer": "sgd"}
    case = case._replace(options={**plain, "dtype": "float32"})
    train = random_runs.train

    def outcome_of(change) -> str:
        def changed(job, planned, **checkpoints):
            found = train(job, planned, **checkpoints)
            return found if planned.plan.request.max_gpu_bytes == random_runs.MOST_BYTES else change(found)

        monkeypatch.setattr(random_runs, "train", changed)
        return random_runs.run_case(case, tmp_path / "model").outcome

    def crashing(found):
        raise RuntimeError("a bug")

    assert outcome_of(lambda found: found) == "same"
    assert outcome_of(lambda found: found._replace(digest="0")) == "bits differ"
    assert outcome_of(crashing) == "crash"
    monkeypatch.undo()
    budgets = iter((random_runs.MOST_BYTES, 1000))
    monkeypatch.setattr(random_runs, "budget_of", lambda *_: next(budgets))
    assert random_runs.run_case(case, tmp_path / "model").outcome == "refused a budget"
