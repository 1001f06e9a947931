"""What is the largest dense model that two budgets hold with 8-bit optimizer states, and what do its updates move?

    python -m bench.largest_model --json out.json                    # find it by planning alone: no GPU is needed
    python -m bench.largest_model --run --json out.json              # and train a few steps of it
    python -m bench.largest_model --run --update-preset none --json out.json      # without the comparison of updates
    python -m bench.largest_model --run --presets --json out.json                 # the comparison of updates alone

Presets get as many layers as fit in full fine-tuning, more than their own if there is room; the one with the most
parameters is the largest. It is also said how many parameters fit with bfloat16 states. With --run, in a process of its
own: seconds of steps, losses, peaks against budgets, predicted and measured, and one more step in which every command
is timed. Then a smaller model under a small GPU budget, so that the CPU updates most of it, once with int8 and once
with bfloat16 states: bytes that an update reads and writes per parameter, as declared, and its seconds as measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from bench.environment import write_json
from bench.job_flags import add_job_flags, job_from
from bench.plan_accuracy import write_config
from bench.step import GIB, one_batch, timed_steps
from flexengine.api import PlannedRun, build, prepare_job
from flexengine.hardware.devices import choose_device
from flexengine.hardware.presets import named_profile
from flexengine.hardware.probe import probe
from flexengine.hardware.profile import HardwareProfile
from flexengine.models.registry import open_initial
from flexengine.optim import AdamW
from flexengine.options.job import Job
from flexengine.plan import PlanError
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.problem import Problem
from flexengine.request import described, make_request, probe_shape
from flexengine.runtime.engine import Engine
from flexengine.schedule.commands import Command, Stream, UpdateTile
from flexengine.schedule.layout import Layout

OPTIONS = (
    "max_seq_len", "max_global_batch_tokens", "max_gpu_mem_gib", "max_host_mem_gib", "device", "dtype",
    "master_dtype", "max_grad_norm", "recompute",
)  # fmt: skip
"""Options of a job that are flags here."""
MOST_LAYERS = 1024
STATES = ("int8", "bfloat16")
FEWER_LAYERS = 3
"""So many layers fewer are tried where the process that trains finds less memory than the one that searched."""


class Found(NamedTuple):
    """A preset with so many layers, and its parameters."""

    preset: str
    layers: int
    parameters: int


class Train(NamedTuple):
    """What a process of its own trains: a preset with so many layers (None: its own), and a job's options."""

    preset: str
    layers: int | None
    job: dict
    steps: int


# ---- planning --------------------------------------------------------------------------------------------------------


def parameters_that_fit(preset: str, layers: int, job: Job, profile: HardwareProfile) -> int:
    """The parameters of a preset with so many layers; 0 if no plan is within the budgets."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(preset, layers, Path(folder))
        spec = described(open_initial(folder, "random").spec, job)
    fits = Feasibility(Problem(spec, make_request(job, profile, profile.device_type), profile)).fits()
    return spec.num_parameters if fits else 0


def most_layers(preset: str, job: Job, profile: HardwareProfile) -> Found:
    """The most layers of a preset that fit, by doubling and then halving the step; 0 if one is too many."""
    layers, parameters, step = 0, 0, 1
    while step:
        found = parameters_that_fit(preset, layers + step, job, profile) if layers + step <= MOST_LAYERS else 0
        if found:
            layers, parameters = layers + step, found
        grows = found and layers == 2 * step - 1
        step = 2 * step if grows else step // 2
    return Found(preset, layers, parameters)


def largest(args: argparse.Namespace, states: str) -> list[Found]:
    """All presets with the layers that fit, the one with the most parameters first."""
    job = job_from(args, optimizer_state_dtype=states)
    found = [most_layers(preset, job, machine(args, preset, job)) for preset in args.presets]
    return sorted(found, key=lambda one: -one.parameters)


def machine(args: argparse.Namespace, preset: str, job: Job) -> HardwareProfile:
    """The profile that --hardware names, or that of this machine, measured once for a model's shape."""
    if args.hardware:
        return named_profile(args.hardware)
    shape = probe_shape(described(open_initial(f"preset:{preset}", "random").spec, job))
    return probe(choose_device(job.device), getattr(torch, job.dtype), shape)


# ---- training --------------------------------------------------------------------------------------------------------


def train(order: Train) -> dict:
    """Train a few steps in this process; returns the row."""
    with tempfile.TemporaryDirectory() as folder:
        planned, layers = planned_run(order, Path(folder))
        print(planned.describe(), flush=True)
        began_s = time.perf_counter()
        engine = build(planned, AdamW(lr=1e-4))
        build_s = time.perf_counter() - began_s
    batch = one_batch(engine)
    timed = timed_steps(engine, batch, 0, order.steps)
    engine.measure_next_step(keep_runs=True)
    engine.train_step(batch)
    update = update_traffic(engine)
    peaks, predicted, job = engine.memory_peaks(), engine.plan.predicted, planned.job
    engine.close()
    return {
        "preset": order.preset,
        "layers": layers,
        "parameters": planned.source.spec.num_parameters,
        "states": job.optimizer_state_dtype,
        "seq_len": job.max_seq_len,
        "tokens_per_step": job.max_global_batch_tokens,
        "steps_s": timed.seconds,
        "losses": timed.losses,
        "predicted_step_s": predicted.step_s,
        "build_s": build_s,
        "gpu_cap_gib": job.max_gpu_mem_gib,
        "gpu_peak_gib": peaks.gpu_bytes / GIB if peaks.gpu_bytes else None,
        "gpu_predicted_gib": predicted.gpu_bytes / GIB,
        "host_cap_gib": job.max_host_mem_gib,
        "host_peak_gib": peaks.host_bytes / GIB,
        "host_predicted_gib": predicted.host_bytes / GIB,
        "update": update,
    }


def planned_run(order: Train, folder: Path) -> tuple[PlannedRun, int | None]:
    """Plan for this machine as it is now, with a few layers fewer if it has to be. Raises: PlanError if that fails."""
    job = replace(Job(), **{name: tuple(v) if isinstance(v, list) else v for name, v in order.job.items()})
    for fewer in range(FEWER_LAYERS + 1):
        layers = None if order.layers is None else order.layers - fewer
        write_config(order.preset, layers, folder)
        try:
            return prepare_job(folder, replace(job, init="random")), layers
        except PlanError:
            if layers is None or fewer == FEWER_LAYERS:
                raise
    raise AssertionError("the last attempt returns or raises")


def update_traffic(engine: Engine) -> dict[str, dict]:
    """Who updated how many parameters in the step that was measured, what that moves, and how long it took.

    cpu: bytes of host memory read and written. gpu: bytes over the link, to the GPU and back, of what is streamed.
    """
    layout = Layout(engine.model, engine.plan)
    cpu = {"parameters": 0, "seconds": 0.0, "bytes": 0}
    gpu = {"parameters": 0, "seconds": 0.0, "link_bytes": 0}
    for run in engine.take_timed_runs():
        for command, (start_s, end_s) in zip(run.program.commands, run.spans_s, strict=True):
            if command.name.subject == "tile":
                gpu["link_bytes"] += command.copy_bytes
            if not isinstance(command.args, UpdateTile):
                continue
            side = cpu if command.stream is Stream.CPU else gpu
            side["parameters"] += command.args.count
            side["seconds"] += end_s - start_s
            if side is cpu:
                cpu["bytes"] += moved_bytes(layout, command)
    for side in (cpu, gpu):
        moved = side.get("bytes", side.get("link_bytes", 0))
        side["bytes_per_parameter"] = moved / side["parameters"] if side["parameters"] else 0.0
    return {"cpu": cpu, "gpu": gpu}


def moved_bytes(layout: Layout, command: Command) -> int:
    """Bytes that an update by the CPU touches: it reads every plane, and writes all but the gradient."""
    tile: UpdateTile = command.args
    segments = {segment.name: segment for segment in layout.groups[tile.group].segments}
    planes = segments[tile.segment].planes
    return sum(plane.num_bytes(tile.count) * (1 if plane.kind == "grad" else 2) for plane in planes)


def in_own_process(order: Train) -> dict:
    """The row of what a process of its own trained, or what went wrong there."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.json"
        command = [sys.executable, "-m", "bench.largest_model", "--one", json.dumps(order), "--out", str(out)]
        done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            return {"preset": order.preset, "layers": order.layers, "failed": done.stderr.strip()[-3000:]}
        return json.loads(out.read_text())


# ---- words -----------------------------------------------------------------------------------------------------------


def trained_text(row: dict) -> str:
    """What a process trained, in words."""
    if "failed" in row:
        return f"{row['preset']}, {row['layers']} layers: FAILED: {row['failed'].splitlines()[-1]}"
    gpu = "-" if row["gpu_peak_gib"] is None else f"{row['gpu_peak_gib']:.2f}"
    return (
        f"{row['preset']}, {row['layers'] or 'all'} layers, {row['parameters'] / 1e9:.2f}B parameters, {row['states']} "
        f"states: steps {', '.join(f'{s:.2f}' for s in row['steps_s'])} s (predicted {row['predicted_step_s']:.2f}), "
        f"loss {row['losses'][0]:.3f} -> {row['losses'][-1]:.3f}, GPU {gpu} of {row['gpu_cap_gib']:g} GiB, "
        f"host {row['host_peak_gib']:.2f} of {row['host_cap_gib']:g} GiB, built in {row['build_s']:.0f} s\n"
        f"  {update_text(row['update'])}"
    )


def update_text(update: dict[str, dict]) -> str:
    """What an update moves, in words."""
    cpu, gpu = update["cpu"], update["gpu"]
    rate = cpu["bytes"] / cpu["seconds"] / 1e9 if cpu["seconds"] else 0.0
    return (
        f"update: CPU {cpu['parameters'] / 1e9:.2f}B parameters, {cpu['bytes_per_parameter']:.2f} bytes each, "
        f"{cpu['seconds']:.3f} s, {rate:.0f} GB/s; GPU {gpu['parameters'] / 1e9:.2f}B parameters, "
        f"{gpu['bytes_per_parameter']:.2f} bytes each over the link, {gpu['seconds']:.3f} s of kernels"
    )


def main() -> None:
    args = parse()
    if args.one:
        row = train(Train(*json.loads(args.one)))
        Path(args.out).write_text(json.dumps(row))
        return
    results: dict = {"found": {}}
    for states in STATES if args.presets else ():
        results["found"][states] = [one._asdict() for one in largest(args, states)]
        texts = [f"{f['preset']} {f['layers']} layers {f['parameters'] / 1e9:.2f}B" for f in results["found"][states]]
        print(f"with {states} states fit: {', '.join(texts)}", flush=True)
        write_json(args.json, results)
    if not args.run:
        return
    options = job_options(args)
    orders = [
        Train(best["preset"], best["layers"], {**options, "optimizer_state_dtype": "int8"}, args.steps)
        for best in results["found"].get("int8", [])[:1]
    ]
    if args.update_preset != "none":
        smaller = {**options, "max_gpu_mem_gib": args.update_gpu_gib}
        orders += [Train(args.update_preset, None, {**smaller, "optimizer_state_dtype": s}, 2) for s in STATES]
    results["trained"] = []
    for order in orders:
        results["trained"].append(in_own_process(order))
        print(trained_text(results["trained"][-1]), flush=True)
        write_json(args.json, results)


def job_options(args: argparse.Namespace) -> dict:
    """The options of the job that are flags here, as JSON has them."""
    job = job_from(args)
    return {name: getattr(job, name) for name in OPTIONS}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", nargs="*", default=["qwen2.5-14b", "qwen3-14b", "qwen3-32b"])
    parser.add_argument("--hardware", default=None, help="plan for this preset or profile (not with --run)")
    parser.add_argument("--run", action="store_true", help="train what was found")
    parser.add_argument("--steps", type=int, default=3, help="steps of the largest model, before the measured one")
    parser.add_argument("--update-preset", default="llama-3.2-3b", help="a model whose updates are compared, or none")
    parser.add_argument("--update-gpu-gib", type=float, default=8.0, help="the GPU budget of that model")
    defaults = {
        "max_seq_len": 1024,
        "max_global_batch_tokens": 8192,
        "max_gpu_mem_gib": 24.0,
        "max_host_mem_gib": 110.0,
    }
    add_job_flags(parser, *OPTIONS, **defaults)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    if args.run and args.hardware:
        parser.error("--run measures this machine; leave --hardware out")
    return args


if __name__ == "__main__":
    main()
