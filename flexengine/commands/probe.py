"""`flexengine probe`: measures this machine, or shows a preset, as a table, a chart and a file for `--gpu`."""

import argparse
import logging
import sys
import time
from collections.abc import Callable, Sequence

import torch

from flexengine.commands.files import check_target, write_whole
from flexengine.commands.parsers import probe_parser
from flexengine.hardware.chart import GIGA, TERA, check_can_plot, copy_size, draw_profile, flops_unit
from flexengine.hardware.curve import Points
from flexengine.hardware.devices import choose_device
from flexengine.hardware.drive import with_drive
from flexengine.hardware.drive_profile import DriveProfile
from flexengine.hardware.drive_wear import wear_text
from flexengine.hardware.presets import preset, preset_source
from flexengine.hardware.probe import DEFAULT_SHAPE, ProbeResult, run_probe
from flexengine.hardware.profile import HardwareProfile, masters_and_states
from flexengine.metrics import format_bytes, format_seconds, format_tflops
from flexengine.models.registry import open_model
from flexengine.options.job import Job
from flexengine.options.option import options_of
from flexengine.request import probe_shape

LABEL_WIDTH = 52
CELL_WIDTH = 9
DEVICE, DTYPE = options_of(Job)["device"], options_of(Job)["dtype"]


def main(argv: Sequence[str]) -> int:
    """Print the profile that `argv` asks for and write the files it names; returns the exit status.

    Raises: ValueError for what a person can correct, before anything is measured.
    """
    arguments = probe_parser().parse_args(argv)
    _check(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr, force=True)
    profile, origin = _preset(arguments.preset) if arguments.preset else _probed(arguments)
    print("\n".join([*origin, "", *describe(profile)]))
    if arguments.json is not None:
        write_whole("--json", arguments.json, lambda path: path.write_text(profile.to_json(), encoding="utf-8"))
        print(f"\nwrote {arguments.json}; use it with --gpu {arguments.json} or hardware={str(arguments.json)!r}")
    if arguments.plot is not None:
        write_whole("--plot", arguments.plot, lambda path: draw_profile(profile, path, _chart_note(profile, origin)))
        print(f"wrote {arguments.plot}")
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Raise ValueError for everything that can be known to be wrong before the machine is measured."""
    if arguments.preset is not None:
        preset(arguments.preset)
        given = [
            f"--{name.replace('_', '-')}"
            for name in ("device", "model", "dtype", "force", "offload_dir")
            if getattr(arguments, name)
        ]
        if given:
            raise ValueError(f"--preset shows a shipped profile and measures nothing; leave {', '.join(given)} out")
    if arguments.json is not None and arguments.json.suffix != ".json":
        raise ValueError(f"--json {arguments.json}: profiles end in .json, or --gpu takes the name for a preset's")
    if arguments.plot is not None:
        check_can_plot(arguments.plot)
    check_target("--json", arguments.json)
    check_target("--plot", arguments.plot)


def _preset(name: str) -> tuple[HardwareProfile, list[str]]:
    profile = preset(name)
    head = f"{profile.name}: preset, not measured; a measured profile replaces it on the machine itself"
    return profile, [head, f"  source: {preset_source(name)}"]


def _probed(arguments: argparse.Namespace) -> tuple[HardwareProfile, list[str]]:
    """Give the profile of this machine, and tell where it comes from."""
    shape = (
        DEFAULT_SHAPE if arguments.model is None else probe_shape(open_model(arguments.model, needs_weights=False).spec)
    )
    dtype = arguments.dtype or DTYPE.default
    device = choose_device(arguments.device or DEVICE.default)
    # Timed here because a remembered profile answers at once, and the difference is worth telling.
    start_s = time.perf_counter()
    result = run_probe(device, getattr(torch, dtype), shape, force=arguments.force)
    age = _age(result, time.perf_counter() - start_s)
    profile = with_drive(result.profile, arguments.offload_dir)
    worn = [] if arguments.offload_dir is None else [f"  wear of the drive: {wear_text(arguments.offload_dir)}"]
    return profile, [f"{result.profile.name}, {device}, {dtype}: {age}", f"  {_place(result)}", *worn]


def _age(result: ProbeResult, probe_s: float) -> str:
    if result.from_cache and result.age_s is not None:
        return f"measured {format_seconds(max(result.age_s, 1.0))} ago; free memory as of now"
    return f"measured now, in {format_seconds(probe_s)}"


def _place(result: ProbeResult) -> str:
    if result.path is None:
        return "not remembered: no cache folder can be written; FLEXENGINE_CACHE names another"
    return f"{'from' if result.from_cache else 'remembered in'} {result.path}" + (
        "; --force measures again" if result.from_cache else ""
    )


def _chart_note(profile: HardwareProfile, origin: Sequence[str]) -> str:
    """Write the note below the chart's title: costs that are no curves, and the source of a preset's figures."""
    costs = (
        f"kernel launch {format_seconds(profile.host.launch_s)}",
        f"host time per command {format_seconds(profile.host.issue_s)}" if profile.host.issue_s else "",
        f"fixed part of a copy {format_seconds(profile.link.copy_latency_s)}",
        f"CUDA context and libraries {format_bytes(profile.memory.gpu_context_bytes)}"
        if profile.memory.gpu_context_bytes
        else "",
    )
    source = "\n" + origin[1].strip() if profile.source == "preset" else ""
    return "; ".join(text for text in costs if text) + source


# ---- the profile as text ----------------------------------------------------------------------------------------


def describe(profile: HardwareProfile) -> list[str]:
    """Tabulate everything in a profile, with units."""
    sections = [_compute_lines(profile), _copy_lines(profile), _host_lines(profile), _memory_lines(profile)]
    if profile.drive.read_bytes_per_s:
        sections.append(_drive_lines(profile.drive))
    return [line for lines in sections for line in ("", *lines)][1:]


def _compute_lines(profile: HardwareProfile) -> list[str]:
    hidden_size, intermediate_size = profile.matmul.shape
    unit, scale = flops_unit(profile.matmul.peak_flops_per_s)
    linear = [curve for curve in profile.curves if curve.x_unit == "tokens"]
    attention = (profile.attention.forward_flops_per_s, profile.attention.backward_flops_per_s)
    # Forward and backward may have been measured at different lengths; the header has all of them.
    lengths = sorted({length for points in attention for length, _ in points})
    cube = profile.matmul.peak_flops_per_s
    return [
        "compute",
        _row("large cube, sustained", format_tflops(cube) if scale == TERA else f"{cube / GIGA:.1f} GFLOP/s"),
        _header(f"linear layers {hidden_size} x {intermediate_size}, {unit} by tokens", profile.matmul.flops_per_s),
        _cells("all, weighted by time", profile.matmul.flops_per_s, scale),
        *(_cells(curve.name, curve.points, scale) for curve in linear),
        *_fp8_lines(profile, unit, scale),
        *_share_lines("experts' products", profile.matmul.grouped_shares),
        *_share_lines("the head's products", profile.matmul.head_shares),
        _header(_attention_title(profile, unit), [(length, 0.0) for length in lengths]),
        *(_cells(name, points, scale) for name, points in zip(("forward", "backward"), attention, strict=True)),
        *_share_lines("slices of long sequences", profile.attention.slice_shares),
        *_choice_lines(profile),
        _row("kernel launch", format_seconds(profile.host.launch_s)),
        _row(
            "host time per command", format_seconds(profile.host.issue_s) if profile.host.issue_s else "runs in place"
        ),
    ]


def _fp8_lines(profile: HardwareProfile, unit: str, scale: float) -> list[str]:
    points = profile.matmul.fp8_flops_per_s
    if not points:
        return [_row("the same with FP8 operands", "not on this card")]
    return [
        _header(f"the same with FP8 operands, {unit} by tokens", points),
        _cells("all", points, scale),
        *_share_lines("products scaled by rows", profile.matmul.fp8_row_shares),
        *_share_lines("products scaled by blocks", profile.matmul.fp8_block_shares),
        *_share_lines("by blocks, by weights alone", profile.matmul.fp8_block_weight_shares),
        *_share_lines("by blocks, squares in gradients of weights", profile.matmul.fp8_square_shares),
        *(line for name, own in profile.matmul.blackwell_shares.items() for line in _share_lines(name, own)),
    ]


def _share_lines(name: str, shares: Points) -> list[str]:
    """Tell how fast other products are than linear layers, where that was measured."""
    if not shares:
        return []
    return [_header(f"{name}, % of that rate by tokens", shares), _cells("all", shares, 0.01)]


def _choice_lines(profile: HardwareProfile) -> list[str]:
    """Tell the fastest attention kernels by tokens of a sequence, a line for each shape that was measured."""
    lines = []
    for shape, orders in profile.attention.choices:
        width = f"{shape.head_dim}" if shape.head_dim == shape.value_dim else f"{shape.head_dim}/{shape.value_dim}"
        style = f", window {shape.window}" * bool(shape.window) + ", soft cap" * shape.capped
        fastest = ", ".join(f"{length}: {order[0]}" for length, order in orders)
        lines.append(_row(f"fastest, {shape.members} x {width}{style}", fastest))
    return lines


def _attention_title(profile: HardwareProfile, unit: str) -> str:
    kernels = f"{profile.attention.kernels}, " if profile.device_type == "cuda" else ""
    return f"attention ({kernels}head_dim {profile.attention.head_dim}), {unit} by length"


def _copy_lines(profile: HardwareProfile) -> list[str]:
    curves = [curve for curve in profile.curves if curve.x_unit == "bytes"]
    lines = [
        "copies" if profile.device_type == "cpu" else "copies between GPU and page-locked host memory",
        _row(
            "host to device, alone / both busy",
            _pair(profile.link.h2d_bytes_per_s, profile.link.h2d_duplex_bytes_per_s),
        ),
        _row(
            "device to host, alone / both busy",
            _pair(profile.link.d2h_bytes_per_s, profile.link.d2h_duplex_bytes_per_s),
        ),
        *_beside_lines(profile),
        _row("fixed part of a copy", format_seconds(profile.link.copy_latency_s)),
    ]
    if curves:
        lines.append(_header("GB/s by size", curves[0].points, copy_size))
        lines += [_cells(curve.name, curve.points, GIGA) for curve in curves]
    return lines


def _beside_lines(profile: HardwareProfile) -> list[str]:
    if profile.device_type == "cpu":
        return []
    rates = profile.link.h2d_beside_cpu_bytes_per_s, profile.link.d2h_beside_cpu_bytes_per_s
    lines = [_row("to device / to host beside AdamW on the CPU", _pair(*rates))]
    if profile.link.cpu_share_beside_link:
        lines += [
            _row("the same, other direction idle", _pair(*profile.link.only_beside_cpu_bytes_per_s)),
            _row("speed that AdamW keeps, both busy", f"{100 * profile.link.cpu_share_beside_link:.0f}%"),
        ]
    return lines


def _host_lines(profile: HardwareProfile) -> list[str]:
    curve = next((curve for curve in profile.curves if curve.x_unit == "threads"), None)
    lines = ["memory traffic, read + written"]
    if profile.device_type == "cuda":
        lines.append(_row("copy within the GPU", _gb_per_s(profile.memory.bytes_per_s)))
    lines.append(_row("copy within host memory, all threads", _gb_per_s(profile.host.bytes_per_s)))
    if curve is not None:
        lines += [_header("GB/s by threads", curve.points), _cells("copy within host memory", curve.points, GIGA)]
    lines += [
        _row(f"AdamW on the CPU, {masters_and_states(update)}", f"{rate / GIGA:.2f} G parameters/s")
        for update, rate in profile.host.adamw_parameters_per_s
    ]
    return lines


def _memory_lines(profile: HardwareProfile) -> list[str]:
    lines = ["memory"]
    if profile.device_type == "cuda":
        lines += [
            _row("GPU, total / free", _sizes(profile.memory.gpu_total_bytes, profile.memory.gpu_free_bytes)),
            _row("CUDA context, libraries and kernels", format_bytes(profile.memory.gpu_context_bytes)),
        ]
    return [
        *lines,
        _row("host, limit / available", _sizes(profile.memory.host_total_bytes, profile.memory.host_available_bytes)),
        _row("process before any training state", format_bytes(profile.memory.host_base_bytes)),
    ]


def _drive_lines(drive: DriveProfile) -> list[str]:
    return [
        "drive, in requests like those of --offload-dir",
        _row("read, alone / beside writing", _pair(drive.read_bytes_per_s, drive.read_beside_bytes_per_s)),
        _row("written, alone / beside reading", _pair(drive.write_bytes_per_s, drive.write_beside_bytes_per_s)),
    ]


def _row(label: str, value: str) -> str:
    return f"  {label:<{LABEL_WIDTH}}{value}"


def _header(label: str, points: Sequence[tuple[int, float]], text: Callable[[int], str] = str) -> str:
    return f"  {label:<{LABEL_WIDTH}}" + "".join(f"{text(x):>{CELL_WIDTH}}" for x, _ in points)


def _cells(label: str, points: Points, scale: float) -> str:
    values = [y / scale for _, y in points]
    # 9.995 is the first value that two decimals would round to five characters.
    cells = (f"{value:.2f}" if value < 9.995 else f"{value:.1f}" for value in values)
    return f"    {label:<{LABEL_WIDTH - 2}}" + "".join(f"{cell:>{CELL_WIDTH}}" for cell in cells)


def _gb_per_s(bytes_per_s: float) -> str:
    return f"{bytes_per_s / GIGA:.1f} GB/s"


def _pair(alone: float, both: float) -> str:
    return f"{alone / GIGA:.1f} / {both / GIGA:.1f} GB/s"


def _sizes(total_bytes: int, free_bytes: int) -> str:
    return f"{format_bytes(total_bytes)} / {format_bytes(free_bytes)}"
