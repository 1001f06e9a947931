"""Does what a plan promises happen? Predicted against measured memory and step time, one process per plan.

    python -m bench.plan_accuracy --json out.json                     # 24 plans of Llama
    python -m bench.plan_accuracy --families --json out.json          # 24 of other families, FP8, frozen, ragged
    python -m bench.plan_accuracy --speeds --json out.json            # whole models, by their tokens per second
    python -m bench.plan_accuracy --part 1/2 --json first.json        # half of them
    python -m bench.plan_accuracy --families --compile 5 --json out.json      # five at a time compile kernels first
    python -m bench.plan_accuracy --gpus 4 --json out.json            # four cases at a time, on a GPU each
    python -m bench.plan_accuracy --merge first.json second.json --json all.json
    python -m bench.plan_accuracy --show all.json                     # the table as Markdown

Per plan: the GPU bytes that NVML shows for the process and its resident set, each at its peak since the process began,
beside the prediction, which must not be less and at most 5% or 0.15 GiB more; and the median step after two to warm
up: kernels are compiled in the first, and while they are, the CPU goes on with updates that later steps have to wait
for. Steps are `train_step`'s, which plans predict: fwd_bwd and step by themselves update nothing before the norm is
known. Random weights and random tokens in sequences of full length, AdamW with bf16 states, clipping on and never
reached: a step that was clipped makes a plan that speculates wait, and random weights are clipped in some steps and not
in others. Batches of ragged cases have sequences of log-normal lengths, one for each sequence of the plan, and are held
against the prediction of just that batch. The model's FLOPs per second are told as a share of what the probe measured
for 8192^3. `--compile` fills Triton's cache with few layers of every model, several at a time, which changes no figure
but those of first steps and saves most of the time on a new machine. With `--gpus` every case at work has a GPU and a
share of the cores of its own, near that GPU; it is probed while the others work, as a rented part of a machine is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.environment import require_native_code, write_json

if TYPE_CHECKING:
    from flexengine.api import PlannedRun
    from flexengine.hardware.profile import HardwareProfile
    from flexengine.optim import Optimizer

GIB = 2**30
HOST_GIB = 110.0
WARMUP_STEPS, LEAST_STEPS, MOST_STEPS = 2, 3, 20
LEAST_TIMED_S = 3.0
"""What updates beside the next step's forward leave over grows for a few steps before it stays the same."""
MOST_MEMORY_RATIO, MOST_MEMORY_MORE = 1.05, 0.15 * GIB
NEVER_CLIPPED = 1e6
"""A norm that no gradient reaches; the plan is that of any other."""


class Case(NamedTuple):
    """A model under a GPU cap in GiB (None: all of the card), sequence length and tokens per step.

    layers: so many of the model's (None: all). options: of the job.
    """

    model: str
    cap_gib: float | None
    seq_len: int
    tokens: int
    layers: int | None = None
    ragged: bool = False
    options: dict[str, Any] | None = None


CASES = (
    Case("llama-3.2-1b", 6, 2048, 32768),
    Case("llama-3.2-1b", 6, 512, 4096),
    Case("llama-3.2-1b", 8, 16384, 131072),
    Case("llama-3.2-1b", 8, 1024, 8192),
    Case("llama-3.2-1b", 12, 4096, 65536),
    Case("llama-3.2-1b", 16, 512, 16384),
    Case("llama-3.2-1b", 24, 8192, 32768),
    Case("llama-3.2-1b", 48, 2048, 65536),
    Case("llama-3.2-1b", None, 16384, 32768),
    Case("llama-3.2-1b", None, 512, 4096),
    Case("llama-3.2-3b", 6, 2048, 32768),
    Case("llama-3.2-3b", 8, 512, 8192),
    Case("llama-3.2-3b", 12, 512, 4096),
    Case("llama-3.2-3b", 16, 16384, 32768),
    Case("llama-3.2-3b", 24, 1024, 16384),
    Case("llama-3.2-3b", 48, 2048, 16384),
    Case("llama-3.1-8b", 6, 1024, 8192),
    Case("llama-3.1-8b", 8, 2048, 32768),
    Case("llama-3.1-8b", 12, 4096, 32768),
    Case("llama-3.1-8b", 16, 16384, 32768),
    Case("llama-3.1-8b", 16, 1024, 16384),
    Case("llama-3.1-8b", 24, 512, 4096),
    Case("llama-3.1-8b", 48, 512, 8192),
    Case("llama-3.1-8b", None, 2048, 32768),
)
FP8 = {"matmul_dtype": "fp8"}
NO_BLOCKS = {"freeze": ["blocks"]}
LOW_BLOCKS = {"freeze": ["embed", "block.0-7"]}
FAMILIES = (
    Case("gpt2", 2, 1024, 16384),
    Case("tiny-llama3-150m", 2, 512, 4096),
    Case("qwen2.5-0.5b", 4, 2048, 32768),
    Case("qwen3-0.6b", 3, 1024, 16384),
    Case("qwen3-0.6b", None, 1024, 8192),
    Case("qwen2.5-1.5b", 8, 2048, 32768, ragged=True),
    Case("qwen3-1.7b", 6, 4096, 32768),
    Case("qwen3-4b", 12, 2048, 16384, layers=18),
    Case("qwen3-8b", 16, 2048, 32768, layers=16, options=FP8),
    Case("qwen2.5-14b", 16, 2048, 32768, layers=12),
    Case("gemma-2-2b", 12, 2048, 32768),
    Case("gemma-3-1b", 4, 2048, 16384),
    Case("gemma-3-4b", 16, 4096, 32768, layers=17, ragged=True),
    Case("olmo-3-7b", 16, 8192, 32768, layers=12),
    Case("phi-4", 16, 2048, 16384, layers=8, options=FP8),
    Case("mistral-7b", 12, 4096, 32768, layers=16, ragged=True),
    Case("olmoe-1b-7b", 12, 2048, 32768, layers=8),
    Case("olmoe-1b-7b", 16, 2048, 16384, layers=8, ragged=True),
    Case("qwen3-30b-a3b", 16, 2048, 32768, layers=8),
    Case("qwen3-30b-a3b", 24, 2048, 65536, layers=16, options=NO_BLOCKS),
    Case("gpt-oss-20b", 16, 2048, 32768, layers=6, options=NO_BLOCKS),
    Case("deepseek-v2-lite", 16, 2048, 16384, layers=8),
    Case("qwen3.5-9b", 16, 2048, 32768, layers=12),
    Case("llama-3.1-8b", 24, 2048, 32768, layers=16, options=LOW_BLOCKS),
)
IN_FLOAT32_UNCLIPPED = {"optimizer_state_dtype": "float32", "max_grad_norm": None}
SPEEDS = (
    Case("llama-3.1-8b", 24, 2048, 131072),
    Case("llama-3.1-8b", 24, 2048, 131072, options={"keep_dtype": "fp8"}),
    Case("llama-3.1-8b", 24, 2048, 32768),
    Case("llama-3.1-8b", 24, 2048, 32768, ragged=True),
    Case("llama-3.1-8b", 24, 2048, 16384),
    Case("llama-3.1-8b", 24, 2048, 8192),
    Case("llama-3.2-3b-untied", 24, 2048, 131072),
    Case("llama-3.2-3b-untied", 24, 2048, 32768, options=IN_FLOAT32_UNCLIPPED),
    Case("gemma-2-2b", 24, 2048, 65536),
    Case("gemma-2-9b", 24, 2048, 65536),
    Case("qwen3.5-9b", 24, 2048, 65536),
    Case("olmoe-1b-7b", 24, 2048, 65536),
    Case("olmoe-1b-7b", 24, 2048, 65536, ragged=True),
    Case("olmoe-1b-7b", 24, 2048, 131072),
    Case("qwen3-30b-a3b", 24, 2048, 65536, options=NO_BLOCKS),
    Case("gpt-oss-20b", 24, 2048, 65536, options=NO_BLOCKS),
    Case("qwen3-0.6b", None, 2048, 65536),
    Case("qwen2.5-1.5b", None, 2048, 65536),
    Case("llama-3.2-3b", None, 2048, 65536),
    Case("llama-3.1-8b", None, 2048, 65536),
)
"""Whole models whose speed is held against bounds or other engines: without a cap, those of bench.peers."""


LAYERS_OF_ALL_KINDS = {"gemma-3": 6, "olmo-3": 4, "qwen3.5": 4}
"""By the beginning of a model's name, so many layers that each kind is among them; 2 of all others."""
COMPILING_GPU_GIB, COMPILING_HOST_GIB = 7.0, 32.0


def small(case: Case) -> Case:
    """Give a case that compiles the kernels of another one, or more, in little memory."""
    layers = next((n for start, n in LAYERS_OF_ALL_KINDS.items() if case.model.startswith(start)), 2)
    options = {name: value for name, value in (case.options or {}).items() if name != "freeze"}
    tokens = min(case.tokens, 2 * case.seq_len)
    return case._replace(layers=layers, cap_gib=COMPILING_GPU_GIB, tokens=tokens, options=options)


def gpu_names(count: int) -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the first GPUs of this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    return visible[:count] if len(visible) >= count and visible[0] else list(map(str, range(count)))


def compile_kernels(cases: list[Case], at_once: int, gpus: int = 1) -> None:
    """Have every model, with few layers, probed and trained for three steps, so many at a time; a failure is only told.

    What the probes measure side by side is thrown away.
    """
    different = {(case.model, str(case.options)): case for case in map(small, cases)}.values()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(at_once) as pool:
        names = gpu_names(gpus)

        def train(number: int, case: Case) -> dict:
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": names[number % gpus], "FLEXENGINE_CACHE": folder}
            return run_in_own_process(case, "bench.plan_accuracy", "--compile-one", environment)

        for row in pool.map(train, range(len(different)), different):
            if "failed" in row:
                print(f"kernels of {row['model']}: {row['failed'].splitlines()[-1]}", file=sys.stderr, flush=True)


def run_case(case: Case, host_gib: float = HOST_GIB, timed_steps: int | None = None) -> dict:
    """Plan, load and train a few steps in this process; returns the row."""
    from flexengine.api import prepare  # noqa: PLC0415 (the parent process stays small)
    from flexengine.optim import AdamW  # noqa: PLC0415

    began_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        write_config(case.model, case.layers, Path(folder))
        usual = {"optimizer_state_dtype": "bfloat16", "max_grad_norm": NEVER_CLIPPED}
        prepared = prepare(
            folder,
            init="random",
            max_seq_len=case.seq_len,
            max_global_batch_tokens=case.tokens,
            max_gpu_mem_gib=case.cap_gib,
            max_host_mem_gib=host_gib,
            **usual | (case.options or {}),
        )
        planned_s = time.perf_counter() - began_s
        row = measured_row(prepared, AdamW(lr=1e-4), timed_steps, case.ragged)
    assert row["gpu_bytes"] is not None, "this benchmark needs an NVIDIA GPU"
    return {**case._asdict(), **row, "planned_after_s": planned_s, "wall_s": time.perf_counter() - began_s}


def write_config(model: str, layers: int | None, folder: Path, changes: dict[str, Any] | None = None) -> None:
    """Write the config of a preset's model with so many layers (None: its own), whose weights are random."""
    from flexengine.models.preset_files import ASSETS  # noqa: PLC0415 (the parent process stays small)

    config = json.loads((ASSETS / "presets" / f"{model}.json").read_text()) | (changes or {})
    if layers is not None:
        name = "n_layer" if "n_layer" in config else "num_hidden_layers"
        config[name] = layers
        if "layer_types" in config:
            config["layer_types"] = config["layer_types"][:layers]
    (folder / "config.json").write_text(json.dumps(config))


def lengths_of(case_tokens: int, seq_len: int, ragged: bool) -> list[int]:
    """Lengths of a batch's sequences: full ones, or log-normal ones, of which half are shorter than half of them."""
    count = case_tokens // seq_len
    if not ragged:
        return [seq_len] * count
    draw = random.Random(0)
    return [max(8, min(seq_len, int(draw.lognormvariate(math.log(seq_len / 2), 0.7)))) for _ in range(count)]


def measured_row(
    prepared: PlannedRun, optimizer: Optimizer | None, timed_steps: int | None = None, ragged: bool = False
) -> dict:
    """Train a few steps as planned; returns what was measured beside what was predicted. No GPU bytes on a CPU.

    timed_steps: so many after those to warm up, instead of as many as LEAST_TIMED_S takes.
    """
    import torch  # noqa: PLC0415

    from flexengine.api import build  # noqa: PLC0415
    from flexengine.run.card_health import StepCard  # noqa: PLC0415
    from flexengine.run.step_prediction import StepPredictor  # noqa: PLC0415

    engine, job = build(prepared, optimizer), prepared.job
    generator = torch.Generator().manual_seed(0)
    lengths = lengths_of(job.max_global_batch_tokens, job.max_seq_len, ragged)
    batch = [torch.randint(0, engine.model.vocab_size, (n,), generator=generator) for n in lengths]
    least, most = (LEAST_STEPS, MOST_STEPS) if timed_steps is None else (WARMUP_STEPS + timed_steps,) * 2
    seconds: list[float] = []
    card = StepCard(engine.device, prepared.profile.matmul.sm_clock_mhz)
    while len(seconds) < least or (sum(seconds[WARMUP_STEPS:]) < LEAST_TIMED_S and len(seconds) < most):
        start_s = time.perf_counter()
        out, _ = engine.train_step(batch)
        seconds.append(time.perf_counter() - start_s)
    peaks, plan, health = engine.memory_peaks(), engine.plan, card.health()
    card.close()
    engine.close()
    step_s = steady_step_s(seconds)
    return {
        **(health.record() if health is not None else {}),
        **({"slow_card": health.describe()} if health is not None and health.is_slow else {}),
        "rounds": plan.num_rounds,
        "chunks_per_round": plan.chunks_per_round,
        "chunk_tokens": plan.chunk_tokens,
        "tokens_per_s": out.num_tokens / step_s,
        "share_of_matmul_rate": out.model_flops / step_s / prepared.profile.matmul.peak_flops_per_s,
        "step_s": step_s,
        "steps_s": seconds,
        "predicted_step_s": StepPredictor(plan, engine.model, prepared.profile).step_s(lengths),
        "speed_of_light_s": plan.predicted.speed_of_light_s,
        "limiter": plan.predicted.limiter,
        "gpu_bytes": peaks.gpu_bytes,
        "predicted_gpu_bytes": plan.predicted.gpu_bytes,
        "gpu_categories": plan.predicted.gpu_categories,
        "host_bytes": peaks.host_bytes,
        "predicted_host_bytes": plan.predicted.host_bytes,
        "host_categories": plan.predicted.host_categories,
        "rates": rates_of(prepared.profile),
    }


def rates_of(profile: HardwareProfile) -> dict[str, Any]:
    """What a plan was made with and may have been mispriced: single figures, and rates of products, attention and
    updates by the CPU."""
    scalars = {name: value for name, value in profile.values().items() if isinstance(value, int | float)}
    curves = ("matmul_flops_per_s", "attention_forward_flops_per_s", "attention_backward_flops_per_s")
    return {
        **scalars,
        **{name: profile.values()[name] for name in curves},
        "cpu_adamw_parameters_per_s": dict(profile.host.adamw_parameters_per_s),
    }


def steady_step_s(steps_s: list[float]) -> float:
    """Median of the steps after the warm-up."""
    return statistics.median(steps_s[WARMUP_STEPS:])


def run_in_own_process(
    case: Any, module: str = "bench.plan_accuracy", flag: str = "--one", environment: dict[str, str] | None = None
) -> dict:
    """The row of a case of a benchmark, which prints it last when it is called with flag and case; or what went wrong.

    environment: of the process; None: this one's.
    """
    command = [sys.executable, "-m", module, flag, json.dumps(case)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        return {**case._asdict(), "failed": done.stderr.strip()[-2000:] or f"exit status {done.returncode}"}
    return json.loads(done.stdout.strip().splitlines()[-1])


def cores_of_gpus(gpus: int) -> list[frozenset[int]]:
    """Share the cores that this process may use among so many GPUs, near each one where the kernel tells."""
    import pynvml  # noqa: PLC0415 (machines without GPUs need none)

    from flexengine.native.host_memory import numa_node_of_pci  # noqa: PLC0415 (the parent process stays small)
    from flexengine.parallel.cores import cores_of_node  # noqa: PLC0415

    pynvml.nvmlInit()
    places = [pynvml.nvmlDeviceGetPciInfo(pynvml.nvmlDeviceGetHandleByIndex(gpu)) for gpu in range(gpus)]
    near = [cores_of_node(numa_node_of_pci(place.domain, place.bus, place.device)) for place in places]
    return shared_cores(near, frozenset(os.sched_getaffinity(0)))


def shared_cores(near: Sequence[Set[int]], allowed: frozenset[int]) -> list[frozenset[int]]:
    """Divide the allowed cores near each GPU, or all where there are none, by the GPUs that they are near to."""
    pools = [allowed & cores or allowed for cores in near]
    found = []
    for gpu, pool in enumerate(pools):
        place, count, cores = pools[:gpu].count(pool), pools.count(pool), sorted(pool)
        found.append(frozenset(cores[place * len(cores) // count : (place + 1) * len(cores) // count]) or pool)
    return found


def rows_by_gpus(cases: Sequence[Case], cores: Sequence[Set[int]], begins: Callable[[], bool]) -> Iterator[dict]:
    """The rows of cases as they end, as many at a time as there are sets of cores, on a GPU and with these cores each.

    begins: whether one more case may begin.
    """
    names, free = gpu_names(len(cores)), queue.SimpleQueue[int]()
    for gpu in range(len(cores)):
        free.put(gpu)

    def run(case: Case, folder: str) -> dict | None:
        gpu = free.get()
        try:
            os.sched_setaffinity(0, cores[gpu])  # of this thread, and of the process that it starts
            environment = {**os.environ, "CUDA_VISIBLE_DEVICES": names[gpu], "FLEXENGINE_CACHE": f"{folder}/{gpu}"}
            return run_in_own_process(case, environment=environment) if begins() else None
        finally:
            free.put(gpu)

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(cores)) as pool:
        for ended in as_completed([pool.submit(run, case, folder) for case in cases]):
            if (row := ended.result()) is not None:
                yield row


def summary(rows: list[dict]) -> dict:
    """How the rows stand against the promises."""
    ran = [row for row in rows if "failed" not in row]
    errors = [abs(row["predicted_step_s"] / row["step_s"] - 1) for row in ran]

    def kept(memory: str) -> int:
        pairs = [(row[f"{memory}_bytes"], row[f"predicted_{memory}_bytes"]) for row in ran if row[f"{memory}_bytes"]]
        return sum(took <= said <= max(MOST_MEMORY_RATIO * took, took + MOST_MEMORY_MORE) for took, said in pairs)

    return {
        "plans": len(rows),
        "failed": len(rows) - len(ran),
        "gpu_memory_within_promise": kept("gpu"),
        "host_memory_within_promise": kept("host"),
        "step_time_within_5_percent": sum(error <= 0.05 for error in errors),
        "step_time_within_10_percent": sum(error <= 0.10 for error in errors),
        "step_time_within_20_percent": sum(error <= 0.20 for error in errors),
        "mean_step_time_error": statistics.mean(errors) if errors else None,
        "largest_step_time_error": max(errors, default=None),
    }


def markdown(rows: list[dict]) -> str:
    """One line per plan; memory in GiB as measured / predicted."""
    head = "model | GPU cap | seq | tokens/step | GPU GiB | host GiB | step s | predicted s | error"
    lines = [f"| {head} |", "|" + "---|" * (head.count("|") + 1)]
    for row in rows:
        cap = "none" if row["cap_gib"] is None else f"{row['cap_gib']:g}"
        case = f"{named(row)} | {cap} | {row['seq_len']} | {row['tokens']}"
        if "failed" in row:
            lines.append(f"| {case} | failed: {row['failed'].splitlines()[-1]} |")
            continue
        memory = " | ".join(
            f"{row[f'{m}_bytes'] / GIB:.2f} / {row[f'predicted_{m}_bytes'] / GIB:.2f}" for m in ("gpu", "host")
        )
        error = 100 * (row["predicted_step_s"] / row["step_s"] - 1)
        slow = f"; {row['slow_card']}" if "slow_card" in row else ""
        lines.append(
            f"| {case} | {memory} | {row['step_s']:.3f} | {row['predicted_step_s']:.3f} | {error:+.1f}%{slow} |"
        )
    return "\n".join(lines)


def named(row: dict) -> str:
    """The model of a row, with what is not as published or as usual."""
    options = row.get("options") or {}
    parts = [
        row["model"],
        f"{row['layers']} layers" if row.get("layers") else "",
        "ragged" if row.get("ragged") else "",
        *(f"{name} {' '.join(value) if isinstance(value, list) else value}" for name, value in options.items()),
    ]
    return ", ".join(filter(None, parts))


def rows_of(paths: list[str]) -> list[dict]:
    """All rows, with their GPU and the step time that follows from the steps on record."""
    rows = []
    for path in paths:
        found = json.loads(Path(path).read_text())
        rows += [{"gpu": found.get("environment", {}).get("gpu"), **row} for row in found["rows"]]
    return [row if "failed" in row else {**row, "step_s": steady_step_s(row["steps_s"])} for row in rows]


def in_order(rows: Sequence[dict]) -> list[dict]:
    """Rows in the order of the cases."""
    cases = (*CASES, *FAMILIES, *SPEEDS)
    return sorted(rows, key=lambda r: cases.index(Case(**{f: r[f] for f in Case._fields if f in r})))


def merged(paths: list[str]) -> dict:
    """The result of several parts: the machine of the first, all commands, all rows in the order of the cases, each
    with its GPU."""
    environments = [json.loads(Path(path).read_text())["environment"] for path in paths]
    commands = [environment["command"] for environment in environments]
    rows = in_order(rows_of(paths))
    return {"environment": {**environments[0], "command": commands}, "summary": summary(rows), "rows": rows}


def chosen_cases(cases: Sequence[Case], part: str, only: list[int] | None = None) -> list[Case]:
    """Every n-th case, so that parts take about equally long, or those of these numbers, in their order."""
    if only is not None:
        return [cases[number] for number in only]
    index, _, count = part.partition("/")
    return list(cases[int(index) - 1 :: int(count)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", default="1/1", help="run part I of N")
    parser.add_argument("--only", nargs="+", type=int, default=None, metavar="N", help="just these, counted from 0")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--families", action="store_true", help="plans of all other families instead of Llama's")
    chosen.add_argument("--speeds", action="store_true", help="whole models, held against other engines or bounds")
    chosen.add_argument("--all", action="store_true", help="all of these")
    parser.add_argument("--limit-s", type=float, default=None, help="begin no case after so many seconds")
    parser.add_argument("--gpus", type=int, default=1, metavar="N", help="run N cases at a time, on a GPU each")
    parser.add_argument("--compile", type=int, default=0, metavar="N", help="compile kernels first, N models at a time")
    parser.add_argument("--merge", nargs="+", help="join the rows of these result files instead of running")
    parser.add_argument("--show", help="print the table of a result file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--compile-one", help=argparse.SUPPRESS)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(run_case(Case(*json.loads(args.one)))))
        return
    if args.compile_one:
        print(json.dumps(run_case(Case(*json.loads(args.compile_one)), COMPILING_HOST_GIB, timed_steps=1)))
        return
    if args.show:
        rows = rows_of([args.show])
        print(f"{markdown(rows)}\n\n{json.dumps(summary(rows), indent=1)}")
        return
    if args.merge:
        if args.json is None:
            parser.error("--merge needs --json, the file to write")
        Path(args.json).write_text(json.dumps(merged(args.merge), indent=1) + "\n")
        return
    require_native_code("bench.plan_accuracy")
    every = (
        (*CASES, *FAMILIES, *SPEEDS) if args.all else FAMILIES if args.families else SPEEDS if args.speeds else CASES
    )
    cases, rows, began_s = chosen_cases(every, args.part, args.only), [], time.perf_counter()
    if args.compile:
        compile_kernels(cases, args.compile, args.gpus)
        print(f"kernels compiled in {time.perf_counter() - began_s:.0f} s", flush=True)

    def begins() -> bool:
        return args.limit_s is None or time.perf_counter() - began_s <= args.limit_s

    found = (run_in_own_process(case) for case in takewhile(lambda _: begins(), cases))
    for row in found if args.gpus == 1 else rows_by_gpus(cases, cores_of_gpus(args.gpus), begins):
        rows = in_order([*rows, row])
        print(markdown([row]).splitlines()[-1], flush=True)
        write_json(args.json, {"summary": summary(rows), "rows": rows})
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
