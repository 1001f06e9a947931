"""The chart of a profile: every curve is drawn in its panel, with units; nothing needs a display."""

from dataclasses import replace
from pathlib import Path

import pytest

from flexengine.hardware import chart
from flexengine.hardware.curve import Curve
from flexengine.hardware.presets import PRESETS, preset

matplotlib = pytest.importorskip("matplotlib")

LINEAR = tuple(
    Curve(f"{product} {name}", "tokens", "FLOP/s", ((256, 4e14), (32768, 6e14)))
    for product in ("qkv_proj", "o_proj")
    for name in ("forward", "input gradient", "weight gradient")
)
COPIES = (
    Curve("host to device", "bytes", "bytes/s", ((2**16, 9e9), (2**28, 55e9))),
    Curve("host to device, both busy", "bytes", "bytes/s", ((2**16, 8e9), (2**28, 50e9))),
)
THREADS = (Curve("host memory copy", "threads", "bytes/s", ((1, 14e9), (16, 120e9))),)


def panels(profile, note=""):
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure()
    chart._draw(figure, profile, note)
    return figure, figure.axes


def legend_words(axes) -> list[str]:
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_every_measured_curve_is_drawn_in_its_panel():
    profile = replace(preset("h200"), source="measured", curves=(*LINEAR, *COPIES, *THREADS))
    figure, (matmul, attention, link, host) = panels(profile, "a note")
    assert "NVIDIA H200" in figure.get_suptitle()
    assert "(measured)" in figure.get_suptitle()
    assert [text.get_text() for text in figure.texts if text.get_text() == "a note"] == ["a note"]
    assert len(matmul.lines) == len(LINEAR) + 2  # and the planner's curve, and the cube
    assert matmul.lines[-2].get_ydata()[-1] == pytest.approx(671)  # TFLOP/s at 32768 tokens
    assert {"qkv_proj", "o_proj", "forward", "weight gradient", "large cube"} <= set(legend_words(matmul))
    assert [len(line.get_xdata()) for line in attention.lines] == [3, 3]
    assert [line.get_ydata()[-1] for line in link.lines] == [55.0, 50.0]
    assert legend_words(link) == ["host to device", "host to device, both busy"]
    assert list(host.lines[0].get_xdata()) == [1, 16]
    assert [axes.get_ylabel() for axes in (matmul, attention, link, host)] == ["TFLOP/s", "TFLOP/s", "GB/s", "GB/s"]
    assert [label.get_text() for label in link.get_xticklabels()] == ["64 KiB", "256 MiB"]
    assert all(axes.get_xscale() == "log" and axes.get_ylim()[0] == 0 for axes in figure.axes)


def test_preset_is_marked_and_its_copies_are_what_the_planner_takes_them_to_be():
    profile = preset("rtx-4090")
    figure, (_, _, link, host) = panels(profile)
    assert "(preset, not measured)" in figure.get_suptitle()
    assert len(link.lines) == 4
    size, rate = link.lines[0].get_xdata()[0], link.lines[0].get_ydata()[0]
    assert rate == pytest.approx(size / (profile.link.copy_latency_s + size / profile.link.h2d_bytes_per_s) / 1e9)
    assert host.get_xlabel() == "all threads"
    assert any("float32 states" in text.get_text() for text in host.texts)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_has_four_panels(name: str):
    _, axes = panels(PRESETS[name], "note")
    assert [len(panel.lines) > 0 for panel in axes] == [True] * 4


@pytest.mark.parametrize("name", ["rtx-3090", "h200"])
def test_a_preset_is_a_picture(name: str, tmp_path: Path):
    path = tmp_path / "chart.png"
    chart.draw_profile(PRESETS[name], path, "note")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_slow_machines_are_drawn_in_gflops():
    _, (matmul, *_) = panels(preset("cpu-test"))
    assert matmul.get_ylabel() == "GFLOP/s"


def test_drawing_touches_no_global_backend(tmp_path: Path):
    before = matplotlib.rcParams._get("backend")
    chart.draw_profile(preset("h200"), tmp_path / "chart.png")
    assert matplotlib.rcParams._get("backend") is before
