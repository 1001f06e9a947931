"""A run tells how long its start took, once, and what it did meanwhile."""

import logging
import subprocess
import sys
import time

import pytest

from flexengine.run.start_times import StartTimes, process_age_s


def test_parts_add_up_to_the_whole(caplog, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr("flexengine.run.start_times.process_age_s", lambda: 20.0)
    start = StartTimes()

    def wait(seconds: float) -> float:
        clock[0] += seconds
        if seconds > 5:
            raise ValueError("too long")
        return seconds

    assert start.part("plan")(wait)(3.0) == 3.0
    assert start.part("load")(wait)(4.0) == 4.0
    with pytest.raises(ValueError, match="too long"):
        start.part("plan")(wait)(6.0)
    with caplog.at_level(logging.INFO):
        start.end_of_step(2.0)
        start.end_of_step(1.0)
    [record] = caplog.records
    assert record.message == (
        "from the command to the end of the first step: 20.0 s (plan 9.0, load 4.0, first step 2.0, all else 5.0)"
    )


def test_the_age_of_a_process_counts_from_its_start():
    code = "import time; time.sleep(0.3); from flexengine.run.start_times import process_age_s; print(process_age_s())"
    began_s = time.monotonic()
    age_s = float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
    assert 0.29 <= age_s <= time.monotonic() - began_s + 0.02
    assert process_age_s() > age_s
