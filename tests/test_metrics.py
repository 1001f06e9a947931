import json
import logging
import resource
from pathlib import Path

import pytest

from flexengine.metrics import (
    GIB,
    JsonlWriter,
    StepMetrics,
    format_bytes,
    format_seconds,
    format_tflops,
    format_tokens_per_s,
)

KEYS = (
    "step loss grad_norm lr num_tokens step_s predicted_step_s tokens_per_s effective_tflops hardware_tflops sol_pct"
    " gpu_peak_bytes host_peak_bytes"
)


def step_metrics(**changes):
    measured = {
        "step": 3,
        "loss": 2.5,
        "grad_norm": 0.75,
        "lr": 1e-4,
        "num_tokens": 1000,
        "step_s": 2.0,
        "model_flops": 6e12,
        "hardware_flops": 8e12,
        "predicted_step_s": 1.9,
        "speed_of_light_s": 1.5,
        "gpu_peak_bytes": 23 * GIB,
        "host_peak_bytes": 100 * GIB,
    }
    return StepMetrics.measured(**{**measured, **changes})


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 bytes"),
        (512, "512 bytes"),
        (int(12.5 * 2**20), "12.5 MiB"),
        (GIB, "1.00 GiB"),
        (23.1 * GIB, "23.10 GiB"),
        (None, "not measured"),
    ],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 us"),
        (1.5e-6, "1.50 us"),
        (0.0123, "12.3 ms"),
        (0.99999, "1.00 s"),
        (7.25, "7.25 s"),
        (99.94, "99.9 s"),
        (200.2, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (float("inf"), "inf"),
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_format_rates():
    assert format_tokens_per_s(12345.6) == "12346 tokens/s"
    assert format_tokens_per_s(12.34) == "12.3 tokens/s"
    assert format_tflops(412.34e12) == "412.3 TFLOP/s"
    assert format_tflops(0.0654e12) == "0.0654 TFLOP/s"


def test_rates_of_a_step_by_hand():
    m = step_metrics()
    assert m.tokens_per_s == 500.0
    assert (m.effective_tflops, m.hardware_tflops) == (3.0, 4.0)
    assert m.sol_pct == 75.0
    assert "step   3/100  loss 2.5000" in m.describe(100)
    assert "500 tokens/s  3.00 TFLOP/s  75% of speed of light" in m.describe(100)


def test_log_has_exactly_the_keys_and_is_readable_while_open(tmp_path):
    path = tmp_path / "train_log.jsonl"
    path.write_text("from an earlier run\n")
    with JsonlWriter(path) as log:
        log.write(step_metrics())
        assert list(json.loads(path.read_text())) == KEYS.split()
        log.write(step_metrics(loss=float("nan"), gpu_peak_bytes=None))
    second = json.loads(path.read_text().splitlines()[1])
    assert second["loss"] is None
    assert second["gpu_peak_bytes"] is None


def test_a_disk_that_takes_no_line_does_not_end_the_run(caplog):
    with caplog.at_level(logging.WARNING), JsonlWriter(Path("/dev/full")) as log:
        for _ in range(3):
            log.write(step_metrics())
    first, last = [record.getMessage() for record in caplog.records]
    assert first.startswith("the log of steps waits, and the run goes on: /dev/full: no space left on the disk")
    assert last.endswith("bytes of /dev/full are missing")


def test_lines_that_waited_for_the_disk_are_whole(tmp_path, caplog):
    """The kernel takes a part of a line, as a full disk does, then nothing, then everything."""
    path = tmp_path / "train_log.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with caplog.at_level(logging.WARNING), JsonlWriter(path) as log:
        log.write(step_metrics(step=1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, hard))
        try:
            for step in (2, 3):
                log.write(step_metrics(step=step))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert len(path.read_text().splitlines()[1]) == 100
        log.write(step_metrics(step=4))
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("step_s", "told"),
    [(4.2, "(predicted 3.00 s: +40%)"), (2.4, "(predicted 3.00 s: -20%)"), (3.2, "(predicted 3.00 s)")],
)
def test_a_step_says_how_far_off_its_prediction_it_is(step_s, told):
    assert told in step_metrics(step_s=step_s, predicted_step_s=3.0).describe(9)


def test_a_step_above_the_bound_is_said_in_words():
    assert "75% of speed of light" in step_metrics().describe(4)
    text = step_metrics(step_s=0.5).describe(4)
    assert "above the predicted speed of light" in text
    assert "300%" not in text
