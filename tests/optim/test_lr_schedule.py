import math

import pytest
import torch
import transformers

from flexengine.optim.lr_schedule import LrSchedule


def test_by_hand():
    schedule = LrSchedule(lr=1.0, num_steps=20)
    rates = [schedule.at(i) for i in range(20)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[15] == 1.0
    expected = [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3, 4)]
    assert rates[16:] == pytest.approx(expected)
    assert rates[19] == pytest.approx(0.1)


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7, 10, 1000])
def test_rates_stay_in_range_and_fall_to_the_last_step(num_steps):
    schedule = LrSchedule(3e-4, num_steps)
    rates = [schedule.at(i) for i in range(num_steps)]
    assert all(0 < rate <= 3e-4 for rate in rates)
    start = schedule.cooldown_start_step
    assert rates[start:] == sorted(rates[start:], reverse=True)
    if start < num_steps:
        assert rates[-1] == pytest.approx(3e-5)


def test_constant():
    schedule = LrSchedule(1.0, 5, warmup_pct=0.0, cooldown_start_pct=1.0)
    assert [schedule.at(i) for i in range(5)] == [1.0] * 5


@pytest.mark.parametrize("values", [(0.5, 0.4, 0.1), (-0.1, 0.8, 0.1), (0.1, 1.1, 0.1), (0.1, 0.8, 2.0)])
def test_fractions_out_of_range(values):
    with pytest.raises(ValueError, match="final_pct"):
        LrSchedule(1.0, 10, *values)


def test_steps_out_of_range():
    with pytest.raises(ValueError, match="at least 1 step"):
        LrSchedule(1.0, 0)
    with pytest.raises(ValueError, match=r"outside the schedule's 0\.\.9"):
        LrSchedule(1.0, 10).at(10)


NAMES = {"wsd": "warmup_stable_decay"}
CASES = [
    (name, num_steps, warmup, final)
    for name in ("linear", "cosine", "constant", "constant_with_warmup", "wsd", "inverse_sqrt")
    for num_steps, warmup in ((1, 0), (7, 0), (20, 3), (20, 20), (100, 10))
    for final in ((0.0, 0.25) if name == "wsd" else (0.0,))
]


@pytest.mark.parametrize(("name", "num_steps", "warmup", "final"), CASES)
def test_schedules_of_transformers(name, num_steps, warmup, final):
    schedule = LrSchedule(3e-4, num_steps, final_pct=final, name=name, warmup_steps=warmup)
    special = None
    if name == "wsd":
        special = {"num_decay_steps": num_steps - schedule.cooldown_start_step, "min_lr_ratio": final}
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=3e-4)
    theirs = transformers.get_scheduler(
        NAMES.get(name, name), optimizer, num_warmup_steps=warmup, num_training_steps=num_steps,
        scheduler_specific_kwargs=special,
    )  # fmt: skip
    for step in range(num_steps):
        assert schedule.at(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-12, abs=1e-20), step
        optimizer.step()
        theirs.step()


@pytest.mark.parametrize("name", ["linear", "cosine"])
def test_last_rate_of_lines_and_cosines(name):
    schedule = LrSchedule(1.0, 10, final_pct=0.5, name=name, warmup_steps=0)
    assert schedule.at(0) == 1.0
    assert schedule.at(5) == pytest.approx(0.75)


def test_shares_of_warm_up_round_up_as_in_transformers():
    assert LrSchedule(1.0, 25, 0.1, name="linear").num_warmup_steps == 3
    assert LrSchedule(1.0, 25, 0.1).num_warmup_steps == 2


def test_unknown_name():
    with pytest.raises(ValueError, match="'polynomial' is not known; choose warmup_cooldown, linear"):
        LrSchedule(1.0, 10, name="polynomial")
