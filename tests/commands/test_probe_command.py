"""`flexengine probe`: the table, the files it writes, and mistakes that are named before anything is measured."""

import importlib.util
import os
import stat
import time
from pathlib import Path

import pytest
import torch

from flexengine import cli
from flexengine.commands import probe as command
from flexengine.hardware import drive
from flexengine.hardware.curve import Curve
from flexengine.hardware.presets import preset
from flexengine.hardware.probe import DEFAULT_SHAPE, ProbeResult
from flexengine.hardware.profile import HardwareProfile, ProbeShape, read_profile
from flexengine.ops.attention.choice import AttentionChoice
from flexengine.ops.attention.style import AttentionShape

MEASURED = preset("h200").changed(
    source="measured",
    issue_s=21.5e-6,
    gpu_context_bytes=3 * 2**28,
    attention_choices=(
        AttentionChoice(AttentionShape(8, 64, 64, 128), ((512, ("triton", "flash")), (2048, ("flash", "triton")))),
        AttentionChoice(AttentionShape(1, 192, 128, capped=True), ((512, ("triton",)),)),
    ),
    grouped_shares=((1024, 0.7), (4096, 0.85)),
    head_shares=((512, 0.95), (1024, 1.18)),
    curves=(
        Curve("down_proj forward", "tokens", "FLOP/s", ((256, 401e12), (8192, 655.5e12))),
        Curve("host to device", "bytes", "bytes/s", ((2**16, 9.87e9), (2**28, 55.5e9))),
        Curve("host memory copy", "threads", "bytes/s", ((1, 14e9), (16, 121e9))),
    ),
)


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple]:
    """Replaces measuring; the list grows by (device, dtype, shape, force) of each call."""
    calls: list[tuple] = []

    def run(device: torch.device, dtype: torch.dtype, shape: ProbeShape, force: bool) -> ProbeResult:
        calls.append((device.type, dtype, shape, force))
        return ProbeResult(MEASURED, tmp_path / "cached.json", not force, 7200.0 if not force else 0.0)

    monkeypatch.setattr(command, "run_probe", run)
    return calls


def test_table_has_every_figure_with_its_unit(probes: list[tuple], capsys: pytest.CaptureFixture[str], tmp_path: Path):
    assert cli.main(["probe", "--device", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        "NVIDIA H200, cpu, bfloat16: measured 2 h 00 min ago",
        f"from {tmp_path / 'cached.json'}; --force measures again",
        "large cube, sustained 670.0 TFLOP/s",
        "linear layers 4096 x 14336, TFLOP/s by tokens 256 512",
        "down_proj forward 401.0 655.5",
        "experts' products, % of that rate by tokens 1024 4096",
        "the head's products, % of that rate by tokens 512 1024 all 95.0 118.0",
        "attention (cudnn, head_dim 128), TFLOP/s by length 2048 8192 32768",
        "backward 387.0 487.0 530.0",
        "fastest, 8 x 64, window 128 512: triton, 2048: flash",
        "fastest, 1 x 192/128, soft cap 512: triton",
        "kernel launch 4.00 us",
        "host time per command 21.5 us",
        "host to device, alone / both busy 55.5 / 50.8 GB/s",
        "GB/s by size 64 KiB 256 MiB",
        "host to device 9.87 55.5",
        "copy within the GPU 4240.0 GB/s",
        "GB/s by threads 1 16",
        "AdamW on the CPU, float32 states 4.62 G parameters/s",
        "CUDA context, libraries and kernels 0.75 GiB",
        "host, limit / available 126.00 GiB / 123.00 GiB",
    ):
        assert part in text, part
    assert probes == [("cpu", torch.bfloat16, DEFAULT_SHAPE, False)]


def test_model_sets_the_shape_and_force_measures(probes: list[tuple], capsys: pytest.CaptureFixture[str]):
    arguments = ["probe", "--device=cpu", "--model", "preset:llama-3.2-1b", "--dtype", "float32", "--force"]
    assert cli.main(arguments) == 0
    heads = 16 * 32
    linears = (
        ("qkv_proj", 2048, 3072, False, False, 1), ("o_proj", 2048, 2048, True, False, 1),
        ("gate_up_proj", 2048, 16384, False, False, 1), ("down_proj", 8192, 2048, True, False, 1),
    )  # fmt: skip
    shape = (2048, 8192, 64, (((4, 64, 64, 0, False), heads),), (), linears, (2048, 128256, 0.0), False)
    assert probes == [("cpu", torch.float32, shape, True)]
    assert "measured now" in capsys.readouterr().out


def test_json_file_is_a_profile_for_others(probes: list[tuple], tmp_path: Path):
    path = tmp_path / "here.json"
    path.write_text("an older file")
    assert cli.main(["probe", "--device", "cpu", "--json", str(path)]) == 0
    assert read_profile(path) == MEASURED
    assert stat.S_IMODE(path.stat().st_mode) == 0o644
    assert [file.name for file in tmp_path.iterdir()] == ["here.json"]


def test_failed_write_keeps_the_older_file(probes: list[tuple], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def no_space(profile: HardwareProfile) -> str:
        raise OSError(28, "No space left on device")

    path = tmp_path / "here.json"
    path.write_text("an older file")
    monkeypatch.setattr(HardwareProfile, "to_json", no_space)
    assert cli.main(["probe", "--device", "cpu", "--json", str(path)]) == cli.BAD_INPUT
    assert path.read_text() == "an older file"
    assert [file.name for file in tmp_path.iterdir()] == ["here.json"]


def test_preset_is_shown_with_its_source(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    path = tmp_path / "card.json"
    assert cli.main(["probe", "--preset", "RTX 4090", "--json", str(path)]) == 0
    text = capsys.readouterr().out
    assert "NVIDIA GeForce RTX 4090: preset, not measured" in text
    assert "https://images.nvidia.com/" in text
    assert read_profile(path) == preset("rtx-4090")


@pytest.mark.parametrize("name", ["png", "svg"])
def test_plot_is_a_picture(name: str, tmp_path: Path):
    pytest.importorskip("matplotlib")
    path = tmp_path / f"curves.{name}"
    assert cli.main(["probe", "--preset", "h200", "--plot", str(path)]) == 0
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if name == "png" else b"<svg" in start or b"<?xml" in start
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--preset", "voodoo2"], "no hardware preset is called 'voodoo2'"),
        (["--preset", "A100"], "a100-80 or a100-40"),
        (["--preset", "h200", "--force"], "leave --force out"),
        (["--preset", "h200", "--device", "cpu", "--model", "preset:demo"], "leave --device, --model out"),
        (["--plot", "curves.jpg"], "--plot curves.jpg: pictures end in .png"),
        (["--json", "profile.txt"], "--json profile.txt: profiles end in .json"),
        (["--json", "/no/such/folder/x.json"], "there is no folder /no/such/folder"),
        (["--device", "tpu"], "device='tpu'"),
        (["--device", "cpu", "--model", "/no/such/model"], "/no/such/model"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_mistakes_are_named_before_anything_is_measured(
    arguments: list[str], words: str, probes: list[tuple], capsys: pytest.CaptureFixture[str]
):
    assert cli.main(["probe", *arguments]) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert words in captured.err
    assert captured.out == ""
    assert probes == []


def test_missing_matplotlib_is_one_message_before_anything_is_measured(
    probes: list[tuple], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main(["probe", "--device", "cpu", "--plot", str(tmp_path / "curves.png")]) == cli.BAD_INPUT
    assert "pip install matplotlib" in capsys.readouterr().err
    assert probes == []
    assert list(tmp_path.iterdir()) == []


def test_real_probe_of_the_cpu_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path))
    arguments = ["probe", "--device", "cpu", "--dtype", "float32", "--model", "preset:demo"]
    assert cli.main(arguments) == 0
    first = capsys.readouterr().out
    (file,) = (tmp_path / "profiles").iterdir()
    assert f"remembered in {file}" in first
    then_s = time.time() - 600
    os.utime(file, (then_s, then_s))
    assert cli.main(arguments) == 0
    second = capsys.readouterr().out
    assert "measured 10 min 00 s ago" in second
    assert f"from {file}" in second
    assert "GFLOP/s by tokens" in second
    assert "runs in place" in second


def test_a_drive_is_measured_where_its_folder_is_named(probes, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(drive, "MEASURED_BYTES", 1 << 20)
    monkeypatch.setattr(drive, "MOVED_AT_ONCE", 1 << 19)
    assert cli.main(["probe", "--device", "cpu", "--offload-dir", str(tmp_path), f"--json={tmp_path / 'x.json'}"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    measured = read_profile(tmp_path / "x.json").drive
    rates = measured.read_bytes_per_s / 1e9, measured.read_beside_bytes_per_s / 1e9
    assert f"read, alone / beside writing {rates[0]:.1f} / {rates[1]:.1f} GB/s" in text
    assert "written, alone / beside reading" in text
    assert "wear of the drive: " in text
