import math

import pytest

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
