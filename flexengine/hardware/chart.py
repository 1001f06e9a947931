"""Draws the curves of a profile. Needs matplotlib (`pip install matplotlib`); never opens a window."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexengine.hardware.curve import Curve, Points
from flexengine.hardware.profile import HardwareProfile, masters_and_states

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
SIZE_INCHES, DOTS_PER_INCH = (13.0, 9.0), 120
PASS_STYLES = {"forward": "-", "input gradient": "--", "weight gradient": ":"}
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")  # Okabe and Ito: told apart by colour-blind readers too
LINE_COLOUR, NOTE_COLOUR = "#222222", "#777777"
MARKERS = (("o", 4.0), ("s", 6.5))  # of different size, so that curves that lie on each other are both seen
HEADROOM = 1.07  # of the largest value, so that the highest curve does not touch the frame
TERA, GIGA = 1e12, 1e9


def check_can_plot(path: Path) -> None:
    """Raise ValueError, before anything is measured, if `path` has no suffix of a picture or matplotlib is missing."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"--plot {path}: pictures end in {', '.join(FORMATS)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib, which is not installed: pip install matplotlib")


def draw_profile(profile: HardwareProfile, path: Path, note: str = "") -> None:
    """Write the chart of `profile` to `path` in the format of its suffix; `note` stands below the title."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # noqa: PLC0415, an optional package
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)  # a canvas of its own: pyplot would choose one that may need a display
    _draw(figure, profile, note)
    figure.savefig(path, dpi=DOTS_PER_INCH, format=path.suffix.lower().removeprefix("."))


def _draw(figure: Figure, profile: HardwareProfile, note: str) -> None:
    state = "measured" if profile.source == "measured" else f"{profile.source}, not measured"
    blank = "\n" * (note.count("\n") + 1) if note else ""  # keeps the panels below the note
    figure.suptitle(f"{profile.name}: attained rates ({state}){blank}", fontsize=15, fontweight="bold")
    figure.text(0.5, 0.963, note, ha="center", va="top", fontsize=9.5, linespacing=1.6, color=NOTE_COLOUR)
    (matmul, attention), (link, host) = figure.subplots(2, 2)
    _draw_matmul(matmul, profile)
    _draw_attention(attention, profile)
    _draw_link(link, profile)
    _draw_host(host, profile)


# ---- panels ---------------------------------------------------------------------------------------------------


def _draw_matmul(axes: Axes, profile: HardwareProfile) -> None:
    unit, scale = flops_unit(profile.matmul.peak_flops_per_s)
    curves = [curve for curve in profile.curves if curve.x_unit == "tokens"]
    products = list(dict.fromkeys(_product_and_pass(curve)[0] for curve in curves))
    for curve in curves:
        product, name = _product_and_pass(curve)
        colour = COLOURS[products.index(product) % len(COLOURS)]
        _line(axes, curve.points, scale, color=colour, linestyle=PASS_STYLES.get(name, "-"), linewidth=1.0, alpha=0.8)
    _line(axes, profile.matmul.flops_per_s, scale, color=LINE_COLOUR, linewidth=2.6, marker="o", markersize=4)
    axes.axhline(profile.matmul.peak_flops_per_s / scale, color=NOTE_COLOUR, linewidth=1.0, linestyle=(0, (6, 3)))
    hidden_size, intermediate_size = profile.matmul.shape
    _finish(axes, f"Linear layers of a block, {hidden_size} x {intermediate_size}", "tokens", unit)
    _count_ticks(axes, [tokens for tokens, _ in profile.matmul.flops_per_s])
    keys = [("all, weighted by time", LINE_COLOUR, "-", 2.6), ("large cube", NOTE_COLOUR, (0, (6, 3)), 1.0)]
    keys += [(product, COLOURS[i % len(COLOURS)], "-", 1.6) for i, product in enumerate(products)]
    keys += [(name, LINE_COLOUR, style, 1.0) for name, style in PASS_STYLES.items()] if curves else []
    _legend(axes, keys)


def _draw_attention(axes: Axes, profile: HardwareProfile) -> None:
    rates = (profile.attention.forward_flops_per_s, profile.attention.backward_flops_per_s)
    unit, scale = flops_unit(max(rate for points in rates for _, rate in points))
    for points, colour in zip(rates, COLOURS, strict=False):
        _line(axes, points, scale, color=colour, linewidth=2.0, marker="o", markersize=4)
    _finish(axes, "Causal attention", "tokens of a sequence", unit)
    _count_ticks(axes, sorted({length for points in rates for length, _ in points}))
    _legend(axes, [("forward", COLOURS[0], "-", 2.0), ("backward", COLOURS[1], "-", 2.0)])


def _draw_link(axes: Axes, profile: HardwareProfile) -> None:
    """Draw measured copies by size; without them, copies as the planner prices them: latency plus size over rate."""
    curves = [curve for curve in profile.curves if curve.x_unit == "bytes"] or _planned_copies(profile)
    keys = []
    for i, curve in enumerate(curves):
        style = "--" if "both" in curve.name else "-"
        colour, (marker, size) = COLOURS[i % 2], MARKERS[i % 2]
        look = {"marker": marker, "markersize": size, "markerfacecolor": "none" if i % 2 else colour}
        _line(axes, curve.points, GIGA, color=colour, linestyle=style, linewidth=1.6, zorder=3 - i % 2, **look)
        keys.append((curve.name, colour, style, 1.8))
    title = "Copies between GPU and page-locked host memory" if profile.device_type == "cuda" else "Copies"
    _finish(axes, title, "size of a copy", "GB/s")
    sizes = [size for size, _ in curves[0].points]
    _ticks(axes, sizes, [copy_size(size) for size in sizes])
    _legend(axes, keys)


def _draw_host(axes: Axes, profile: HardwareProfile) -> None:
    curve = next((curve for curve in profile.curves if curve.x_unit == "threads"), None)
    if curve is not None:
        _line(axes, curve.points, GIGA, color=COLOURS[2], linewidth=2.0, marker="o", markersize=4)
        _count_ticks(axes, [threads for threads, _ in curve.points])
    else:
        axes.axhline(profile.host.bytes_per_s / GIGA, color=COLOURS[2], linewidth=2.0)
        axes.set_xticks([])
    _finish(axes, "Host memory, copy (read + written)", "threads" if curve else "all threads", "GB/s")
    rates = profile.host.adamw_parameters_per_s
    adamw = "\n".join(f"{rate / 1e9:.2f} G/s with {masters_and_states(update)}" for update, rate in rates)
    text = f"AdamW on the CPU, parameters:\n{adamw}"
    box = {"boxstyle": "round,pad=0.4", "facecolor": "white", "edgecolor": "#cccccc"}
    axes.text(0.97, 0.05, text, transform=axes.transAxes, ha="right", va="bottom", fontsize=9, bbox=box)


def _planned_copies(profile: HardwareProfile) -> list[Curve]:
    sizes = [2**power for power in range(16, 29, 2)]
    rates = {
        "host to device": profile.link.h2d_bytes_per_s,
        "device to host": profile.link.d2h_bytes_per_s,
        "host to device, both busy": profile.link.h2d_duplex_bytes_per_s,
        "device to host, both busy": profile.link.d2h_duplex_bytes_per_s,
    }
    return [
        Curve(name, "bytes", "bytes/s", tuple((n, n / (profile.link.copy_latency_s + n / rate)) for n in sizes))
        for name, rate in rates.items()
    ]


# ---- strokes --------------------------------------------------------------------------------------------------


def _line(axes: Axes, points: Points, scale: float, **style: Any) -> None:
    axes.plot([x for x, _ in points], [y / scale for _, y in points], **style)


def _finish(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, fontsize=11.5, loc="left")
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    axes.set_ylim(0, HEADROOM * axes.dataLim.y1)
    axes.grid(True, color="#e5e5e5", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _count_ticks(axes: Axes, counts: Sequence[int]) -> None:
    _ticks(axes, counts, [str(count) for count in counts])


def _ticks(axes: Axes, places: Sequence[int], labels: Sequence[str]) -> None:
    """Set a logarithmic x axis with ticks where something was measured."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(list(places), labels=list(labels), fontsize=9)
    axes.minorticks_off()


def _legend(axes: Axes, keys: Sequence[tuple[str, str, Any, float]]) -> None:
    from matplotlib.lines import Line2D  # noqa: PLC0415

    lines = [Line2D([], [], color=colour, linestyle=style, linewidth=width) for _, colour, style, width in keys]
    columns = 2 if len(keys) > 4 else 1
    axes.legend(lines, [name for name, *_ in keys], fontsize=9, loc="lower right", ncols=columns, framealpha=0.9)


def _product_and_pass(curve: Curve) -> tuple[str, str]:
    product, _, name = curve.name.partition(" ")
    return product, name


def flops_unit(largest: float) -> tuple[str, float]:
    """The unit of rates up to the largest, and what it counts."""
    return ("TFLOP/s", TERA) if largest >= TERA else ("GFLOP/s", GIGA)


def copy_size(num_bytes: int) -> str:
    """The size of a copy, a power of two."""
    return f"{num_bytes // 2**20} MiB" if num_bytes >= 2**20 else f"{num_bytes // 2**10} KiB"
