"""bench/step.py on a small model on the CPU, whose figures all come from a run; bench/gaps.py on one told by hand."""

import json
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from bench import step
from bench.environment import require_native_code
from bench.gaps import by_stream, idle_seconds, issue_rows, kind_of, noted_calls
from flexengine.hardware.presets import preset
from flexengine.models.freezing import with_frozen
from flexengine.models.registry import open_model
from flexengine.schedule.commands import CommandName, Stream


def rows_of(tmp_path, monkeypatch, flags, steps):
    """The rows of a run of bench/step.py on the demo."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    out = tmp_path / "out.json"
    sizes = f"--seq-len 16 --tokens-per-step 32 --warmup 0 --steps {steps} --host-gib 6 --device cpu --dtype float32"
    monkeypatch.setattr(sys, "argv", ["step", "--preset", "demo", *flags.split(), *sizes.split(), "--json", str(out)])
    step.main()
    return json.loads(out.read_text())["rows"]


def test_a_row_per_cap(tmp_path, monkeypatch, capsys):
    rows = rows_of(tmp_path, monkeypatch, "--caps 0.5 none --also-tokens 16", steps=2)
    sizes = [(row["gpu_cap_gib"], row["tokens_per_step"]) for row in rows]
    assert sizes == [(0.5, 32), (0.5, 16), (None, 32), (None, 16)]
    for row in rows:
        assert len(row["steps_s"]) == len(row["losses"]) == 2
        assert row["tokens_per_s"] == pytest.approx(row["tokens_per_step"] / row["step_s"])
        assert set(row["busy_s"]) == set(row["predicted_busy_s"]) == {"compute", "h2d", "d2h", "cpu"}
        assert row["busy_s"]["compute"] > 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[-5].split()[:2] == ["GPU", "cap"]
    assert "100.0%" in printed[-2]


def test_frozen_layers_are_told(tmp_path, monkeypatch):
    """Effective FLOPs are those that are left; the row says what was frozen."""
    (row,) = rows_of(tmp_path, monkeypatch, "--caps 0.5 --freeze embed blocks", steps=1)
    spec = with_frozen(open_model("preset:demo").spec, ["embed", "blocks"])
    assert (row["freeze"], row["trained_parameters"]) == (["embed", "blocks"], spec.num_trained_parameters)
    assert row["effective_tflops"] == pytest.approx(spec.model_flops([16, 16]) / row["step_s"] / 1e12)


def test_a_table_without_an_uncapped_run():
    row = {
        "gpu_cap_gib": 24.0, "tokens_per_step": 4096, "tokens_per_s": 1000.0,
        "effective_tflops": 10.0, "hardware_tflops": 12.0,
        "share_of_matmul_rate": 0.5, "step_s": 2.0, "predicted_step_s": 1.0, "busy_s": {"compute": 1.5},
        "predicted_busy_s": {"compute": 0.9, "cpu": 0.1}, "gpu_peak_gib": None, "host_peak_gib": 3.0,
    }  # fmt: skip
    line = step.summary([row])[1]
    assert line.split() == ["24", "4096", "1000", "10.0", "12.0", "50.0%", "-", "2.00", "1.00", "75", "/", "90%",
                            "0", "/", "0%", "0", "/", "0%", "0", "/", "10%", "0.00", "3.00"]  # fmt: skip


def test_gaps_of_compute_are_told_by_what_ended_them():
    def command(index, kind, stream, waits=()):
        return SimpleNamespace(index=index, kind=kind, stream=stream, waits=waits)

    commands = [
        command(0, "copy", Stream.H2D),
        command(1, "forward", Stream.COMPUTE, (0,)),
        command(2, "copy", Stream.H2D),
        command(3, "forward", Stream.COMPUTE, (2,)),
        command(4, "backward", Stream.COMPUTE, (0,)),
        command(5, "backward", Stream.COMPUTE, (0,)),
    ]
    spans = [(0.0, 1.0), (1.0, 2.0), (1.0, 2.5), (2.50001, 3.0), (3.5, 4.0), (4.0, 5.0)]
    gaps = idle_seconds([SimpleNamespace(program=SimpleNamespace(commands=commands), spans_s=spans)])
    assert gaps == {("h2d: copy", "forward"): [pytest.approx(0.5, abs=1e-4)], ("issue", "backward"): [0.5]}


def test_commands_are_told_by_kind_of_layer():
    names = CommandName("fetch", "weights", "block.3"), CommandName("backward", "", "head", chunk=1)
    assert [kind_of(SimpleNamespace(name=name)) for name in names] == ["fetch weights block", "backward head"]


def test_idle_seconds_are_summed_by_the_stream_that_compute_waited_for():
    gaps = {
        ("relay_in: copy", "finish_gradient"): [0.5, 0.25], ("relay_in: copy", "update"): [1.0],
        ("issue", "forward"): [2.0], ("issue after h2d: copy", "forward"): [4.0],
    }  # fmt: skip
    assert by_stream(gaps) == {"relay_in": 1.75, "issue": 6.0}


def test_what_the_issuing_thread_takes_is_told_by_kind_beside_its_price():
    handlers = {"forward": lambda command: None, "update": lambda command: time.sleep(0.01)}
    engine, kinds = SimpleNamespace(handlers=SimpleNamespace(by_kind=dict(handlers))), list(handlers)
    with noted_calls(engine) as found:
        for kind in ("forward", "update", "update", "forward"):
            engine.handlers.by_kind[kind]("a command")
        on_the_cpu = threading.Thread(target=engine.handlers.by_kind["update"], args=("a command",))
        on_the_cpu.start()
        on_the_cpu.join()
    assert engine.handlers.by_kind == handlers
    commands = [SimpleNamespace(kind=kind, copies=(), stream=Stream.COMPUTE) for kind in kinds]
    commands += [SimpleNamespace(kind="update", copies=(), stream=Stream.CPU)]
    commands += [SimpleNamespace(kind="fetch", copies=("a copy",), stream=Stream.H2D)]
    runs = [SimpleNamespace(program=SimpleNamespace(commands=commands))] * 3
    rows = issue_rows(found, 2, runs, SimpleNamespace(issue_s=lambda command: 0.25))
    assert [(row["kind"], row["count"], row["priced_s"]) for row in rows] == [("forward", 1, 0.75), ("update", 1, 0.75)]
    assert 0.01 <= rows[1]["median_s"] <= rows[1]["seconds"]


def test_training_on_a_gpu_is_not_measured_without_native_code(monkeypatch):
    monkeypatch.setattr("flexengine.native.library.load", lambda: None)
    require_native_code("bench.step")  # a CPU's figures say nothing anyway
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SystemExit, match="native code, and the library is not built here"):
        require_native_code("bench.step")
    monkeypatch.setenv("FLEXENGINE_NATIVE", "0")
    require_native_code("bench.step")
