"""How fast do other engines train the same model? One process per run, or one per GPU; best of the settings that fit.

    python -m bench.peers --engines hf-liger peft-liger --preset llama-3.2-3b --json out.json
    python -m bench.peers --engines fsdp2-offload deepspeed-zero3 --ranks 2 --cap-gib 24 --json out.json
    python -m bench.peers --work lora-8b-16k --json out.json
    python -m bench.peers --device cpu --preset tiny-llama3-50m --layers 2 --seq-len 32 --tokens-per-step 128

The work is that of `bench/step.py`: random weights, one batch of random sequences of full length repeated every step,
AdamW without clipping. Per run: tokens/s of all GPUs (median of the steps after the warm-up), the most GPU memory that
NVML shows for a process, host memory (of the whole machine, above what was in use before, and as the sum of resident
sets, which leave out what the driver page-locks), settings and versions. `bench/peer_engines.py` says what the engines
are. A run that fails is recorded with its error, and the others go on. Resident engines try micro-batches from large to
small, without and with recomputation; those of several GPUs and those that fetch weights run once per micro-batch,
and smaller ones where memory ran out, until --tries succeeded. Offloaded ones recompute, and run once more without
Liger's fused loss if memory ran out in all of these. `--cap-gib` limits torch's allocator; the CUDA context and NCCL
come on top, except for ours, whose cap holds all that NVML shows. `--host-gib` is our budget; others are stopped where
the machine uses 5% more. --limit-s bounds an engine's runs together, --total-s the call. Rows are written as they come.

Others start with what ours does: weights are drawn once and copied by all cores, host memory comes in huge pages, and
torch page-locks it by several threads (`PYTORCH_CUDA_ALLOC_CONF` of the caller wins). Engines that load a checkpoint
share one in --files.

`--work` names a model, its tokens, its caps and the engines that know it, ours first; other flags change what it says.
The table at the end has every engine's best run, also of those that failed. An engine that needs other versions of its
packages than the rest finds them in a folder of its own: `--packages torchtune=FOLDER`.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from bench.environment import write_json
from bench.peer_engines import (
    ATTENTION,
    FILES,
    GIB,
    OF_RANKS,
    OFFLOADED,
    OURS,
    RESIDENT,
    STREAMED,
    WITHOUT_LIGER,
    Setting,
    measure,
)
from flexengine.reports.text_format import align_columns

ENGINES = (OURS, *RESIDENT, *OF_RANKS, *STREAMED)
MICRO_BATCHES = {"resident": (32, 16, 8, 4, 2, 1), "offloaded": (16, 8, 4), "streamed": (8, 4, 2, 1)}
PACKAGES = (
    "torch", "triton", "transformers", "liger-kernel", "peft", "accelerate", "deepspeed", "unsloth", "bitsandbytes",
    "torchtune", "torchao", "trainstream", "roundpipe", "block-streamer", "soup-cli",
)  # fmt: skip
LEAST_S, NOT_STARTED = 20.0, "not started"
"""In less no engine starts and steps; what its row says then."""
ROOMY_BYTES = 64 * GIB
"""Free space of a folder in memory from which checkpoints go there: one of 8B, and what Soup makes of it."""
MOST_LOCKING_THREADS = 16
ALLOCATOR, HUGE_PAGES = "PYTORCH_CUDA_ALLOC_CONF", {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
HOST_SLACK = 1.05
"""Of a limit of host memory, how much of the machine's may be in use before a run is stopped."""
ONE_GPU = {"ranks": 1, "tries": 1, "warmup": 3, "steps": 3, "limit_s": 60.0, "host_gib": 110.0, "seq_len": 2048}
WORKS: dict[str, dict[str, Any]] = {
    "lora-8b-16k": {
        "preset": "llama-3.1-8b", "mode": "lora", "tokens_per_step": 16384, "cap_gib": 24.0, "recompute": ["on"],
        "micro_batches": [8, 4, 2, 1],
        "engines": [OURS, "peft-liger", "unsloth", "torchtune", "trainstream", "roundpipe", "block-streamer"],
    },
    "nf4-8b-6gib": {
        "preset": "llama-3.1-8b", "mode": "lora", "base_dtype": "nf4", "tokens_per_step": 16384, "cap_gib": 6.0,
        "recompute": ["on"], "micro_batches": [4, 2, 1],
        "engines": [OURS, "peft-liger", "unsloth", "torchtune", "trainstream", "soup"],
    },
    "full-8b-24gib": {
        "preset": "llama-3.1-8b", "tokens_per_step": 65536, "cap_gib": 24.0, "state_dtype": "bfloat16",
        "micro_batches": [16, 8, 4, 2], "recompute": ["on"], "warmup": 1, "steps": 1, "limit_s": 100.0,
        "engines": [OURS, "deepspeed-zero3", "fsdp2-offload", "trainstream", "roundpipe", "block-streamer"],
    },
    "lora-30b-a3b": {
        "preset": "qwen3-30b-a3b", "mode": "lora", "tokens_per_step": 16384, "cap_gib": 24.0, "recompute": ["on"],
        "micro_batches": [8, 4, 2, 1],
        "engines": [OURS, "peft-liger", "trainstream", "roundpipe", "block-streamer", "deepspeed-zero3"],
    },
}  # fmt: skip
"""Named requests: flags of this script, which those of the command line change."""
SAMPLE_S = 0.2
ERROR_CHARACTERS = 3000
OUT_OF_MEMORY = re.compile(r"MemoryError|out of memory", re.IGNORECASE)


def kind_of(engine: str) -> str:
    """How an engine's micro-batches are tried."""
    return "offloaded" if engine in OFFLOADED else "streamed" if engine in STREAMED else "resident"


def settings_of(args: argparse.Namespace, engine: str) -> list[Setting]:
    """The runs of an engine, in order."""
    count = args.tokens_per_step // args.seq_len
    usual = MICRO_BATCHES[kind_of(engine)]
    sizes = tuple(n for n in args.micro_batches or usual if n <= count and count % n == 0)
    if not sizes:
        raise SystemExit(f"no micro-batch of {args.micro_batches or usual} divides {count} sequences per step")
    liger = args.liger if args.device == "cuda" or args.liger == "loss" else "none"
    setting = Setting(
        engine=engine,
        preset=args.preset,
        layers=args.layers,
        seq_len=args.seq_len,
        tokens=args.tokens_per_step,
        micro_batches=sizes,
        tries=args.tries,
        recompute=True,
        liger="none" if engine in WITHOUT_LIGER else liger,
        attention=args.attention,
        adapter_dtype=args.adapter_dtype,
        cap_gib=None if args.cap_gib == math.inf else args.cap_gib,
        device=args.device,
        ranks=args.ranks if engine in OF_RANKS else 1,
        warmup=args.warmup,
        steps=args.steps,
        lr=args.lr,
        mode=args.mode or ("lora" if engine == "peft-liger" else "full"),
        base_dtype=args.base_dtype,
        state_dtype=args.state_dtype,
        host_gib=args.host_gib,
        compiled=args.compiled and engine == "torchtune",
    )
    if engine == OURS:
        return [setting]
    once = engine in (*OFFLOADED, *STREAMED) and engine != "trainstream"  # which may recompute or offload
    settings = [setting] if once else [setting._replace(recompute=recompute) for recompute in args.recompute]
    if engine == "roundpipe":  # overlaps micro-batches of a step
        sizes = tuple(n for n in sizes if n < count) or sizes
    if setting.one_micro_batch:
        settings = [one._replace(micro_batches=(size,)) for one in settings for size in sizes]
    if engine in OFFLOADED and setting.liger == "all":
        settings.append(settings[-1]._replace(liger="no-loss"))
    return settings


class HostMemory:
    """Samples host memory while processes run: of the machine above what it had in use, and their resident sets.

    alone: whether nothing else uses much; if not, only resident sets can be told apart.
    """

    def __init__(self, alone: bool) -> None:
        self._alone, self._before_bytes = alone, _used_bytes()
        self.system_bytes = self.resident_bytes = 0

    def sample(self, pids: list[int]) -> None:
        """Raise both peaks by what is in use now."""
        resident_bytes = 0
        for pid in pids:
            try:
                process = psutil.Process(pid)
                resident_bytes += sum(p.memory_info().rss for p in (process, *process.children(recursive=True)))
            except psutil.Error:
                continue  # it has ended
        self.resident_bytes = max(self.resident_bytes, resident_bytes)
        used_bytes = _used_bytes() - self._before_bytes if self._alone else resident_bytes
        self.system_bytes = max(self.system_bytes, used_bytes)


def _used_bytes() -> int:
    memory = psutil.virtual_memory()
    return memory.total - memory.available


class Finished(NamedTuple):
    """How the processes of a run ended: their exit statuses (None: stopped), the end of what they wrote, and why they
    were stopped, if they were."""

    statuses: list[int | None]
    errors: list[str]
    stopped: str


def run(setting: Setting, limit_s: float, packages: str | None = None, alone: bool = True) -> dict:
    """Start the processes of a setting, wait for them and return the row: the figures, or `failed` with the reason.

    packages: a folder that they import from before others. alone: no other run uses the machine.
    """
    if limit_s < LEAST_S:
        return {**setting._asdict(), "failed": f"{NOT_STARTED}: {max(0.0, limit_s):.0f} s were left"}
    began_s, host = time.perf_counter(), HostMemory(alone)
    with tempfile.TemporaryDirectory() as folder:
        ended = _run_ranks(setting, Path(folder), limit_s, host, packages)
        found = [_read(Path(folder) / f"{rank}.json") for rank in range(setting.ranks)]
    row = {
        **setting._asdict(),
        "wall_s": time.perf_counter() - began_s,
        "host_system_gib": host.system_bytes / GIB,
        "host_resident_gib": host.resident_bytes / GIB,
    }
    if ended.stopped:
        return {**row, "failed": f"{ended.errors[0]}\n{ended.stopped}"}
    results = [result for result in found if result is not None]
    if any(ended.statuses) or len(results) < setting.ranks:
        first = next((i for i, status in enumerate(ended.statuses) if status not in (0, None)), 0)
        return {**row, "failed": ended.errors[first]}
    peaks = [result["gpu_peak_gib"] for result in results if result["gpu_peak_gib"] is not None]
    return {**row, **results[0], "gpu_peak_gib": max(peaks, default=None)}


def _run_ranks(setting: Setting, folder: Path, limit_s: float, host: HostMemory, packages: str | None) -> Finished:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes, logs = [], []
    for rank in range(setting.ranks):
        command = [sys.executable, "-m", "bench.peers", "--one", json.dumps(setting), "--out", f"{folder}/{rank}.json"]
        logs.append((folder / f"{rank}.log").open("w+", encoding="utf-8", errors="replace"))
        output = None if rank == 0 else logs[-1]
        environment = _environment(setting, rank, port)
        if packages:
            environment["PYTHONPATH"] = os.pathsep.join([packages, os.environ.get("PYTHONPATH", "")])
        processes.append(
            subprocess.Popen(command, env=environment, stdout=output, stderr=logs[-1], start_new_session=True)
        )
    deadline_s, stopped = time.perf_counter() + limit_s, ""
    while any(p.poll() is None for p in processes):
        if time.perf_counter() > deadline_s:
            stopped = f"stopped after {limit_s:.0f} s"
        if setting.host_gib is not None and host.system_bytes > HOST_SLACK * setting.host_gib * GIB:
            stopped = f"stopped at {host.system_bytes / GIB:.1f} GiB of host memory, {setting.host_gib:g} were allowed"
        if stopped or any(p.poll() for p in processes):
            break  # the others would wait for a rank that failed
        host.sample([p.pid for p in processes])
        time.sleep(SAMPLE_S)
    if not stopped:
        _let_end(processes)
    statuses = [p.poll() for p in processes]
    for process in processes:
        _stop(process)
    return Finished(statuses, [_tail(log) for log in logs], stopped)


def _let_end(processes: list[subprocess.Popen], wait_s: float = 3.0) -> None:
    """Give the other ranks a moment to say what went wrong with them."""
    deadline_s = time.perf_counter() + wait_s
    while any(p.poll() is None for p in processes) and time.perf_counter() < deadline_s:
        time.sleep(0.05)


def _stop(process: subprocess.Popen) -> None:
    """End a process and those that it started, which are a session of their own."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environment(setting: Setting, rank: int, port: int) -> dict[str, str]:
    """What torchrun sets, the cores of a rank, and allocators of the GPU that fragments less and of the host that is
    quick: in huge pages, locked by several threads. Ours has its own."""
    threads = max(1, len(os.sched_getaffinity(0)) // setting.ranks)
    locking = min(MOST_LOCKING_THREADS, 1 << threads.bit_length() - 1)  # a power of two
    named = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": setting.ranks, "LOCAL_WORLD_SIZE": setting.ranks,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
        "OMP_NUM_THREADS": threads, "HF_HUB_OFFLINE": 1, "TOKENIZERS_PARALLELISM": "false",
        ALLOCATOR: os.environ.get(ALLOCATOR, "expandable_segments:True"),
        "DS_ACCELERATOR": setting.device, "DS_SKIP_CUDA_CHECK": 1, "UNSLOTH_DISABLE_STATISTICS": 1,
        "UNSLOTH_COMPILE_LOCATION": f"{tempfile.gettempdir()}/peers-unsloth",
        "TORCH_EXTENSIONS_DIR": os.environ.get("TORCH_EXTENSIONS_DIR", f"{tempfile.gettempdir()}/peers-extensions"),
    }  # fmt: skip
    if setting.engine != OURS:
        locked = f",pinned_use_cuda_host_register:True,pinned_num_register_threads:{locking}"
        named |= {ALLOCATOR: os.environ.get(ALLOCATOR, named[ALLOCATOR] + locked), **HUGE_PAGES}
    return {**os.environ, **{name: str(value) for name, value in named.items()}}


def _tail(log) -> str:
    log.seek(0)
    text = log.read().strip()
    log.close()
    return without_folders(text[-ERROR_CHARACTERS:]) or "it ended without a word"


def without_folders(text: str) -> str:
    """Text whose absolute paths are file names alone: where packages lie says nothing of an engine."""
    return re.sub(r'(?:[^\s"]*/)+(?=[\w.-]+\.py\b)', "", text)


def _read(path: Path) -> dict | None:
    return json.loads(path.read_text()) if path.exists() else None


def runs_of(args: argparse.Namespace, engine: str, left_s: float = math.inf) -> Iterator[dict]:
    """The rows of an engine within `left_s` and --limit-s, printed and given as they come.

    Where a run is one micro-batch, they end when --tries succeeded. Any other failure than of memory ends them, too.
    """
    ends_s = time.perf_counter() + min(left_s, args.limit_s)
    succeeded = 0
    for number, setting in enumerate(settings_of(args, engine)):
        limit_s = ends_s - time.perf_counter()
        if succeeded == args.tries or (number and limit_s < LEAST_S) or (succeeded and setting.liger == "no-loss"):
            return
        row = run(setting, limit_s, args.packages.get(engine), not args.beside_others)
        print(line(row), flush=True)
        yield row
        if "failed" in row and not OUT_OF_MEMORY.search(row["failed"]):
            return
        succeeded += setting.one_micro_batch and "failed" not in row


def line(row: dict) -> str:
    """One run in words."""
    recompute = "recomputing" if row["recompute"] else "without recomputing"
    cap = "" if row["cap_gib"] is None else f", cap {row['cap_gib']:g} GiB"
    start = f"{row['engine']} {row['preset']}, {row['ranks']} GPU(s){cap}, {recompute}, liger {row['liger']}"
    if "failed" in row:
        return f"{start}, micro-batches {list(row['micro_batches'])}: FAILED: {row['failed'].splitlines()[-1][:200]}"
    memory = f"host {row['host_system_gib']:.1f} GiB (resident sets {row['host_resident_gib']:.1f})"
    gpu = "-" if row["gpu_peak_gib"] is None else f"{row['gpu_peak_gib']:.2f}"
    return (
        f"{start}, micro-batch {row['micro_batch']:g}: {row['tokens_per_s']:.0f} tokens/s, step {row['step_s']:.2f} s, "
        f"GPU {gpu} GiB, {memory}"
    )


def versions(folders: Sequence[str] = ()) -> dict[str, str | None]:
    """Versions of the packages that engines are made of, first those in `folders`; None for those that are missing."""
    found: dict[str, str | None] = {}
    for package in PACKAGES:
        first = next(iter(metadata.distributions(name=package, path=[*folders, *sys.path])), None)
        found[package] = first.version if first else None
    return found


HEAD = ("engine", "tokens/s", "step s", "GPU GiB", "host GiB", "sequences at once", "what happened")


def table(rows: list[dict]) -> list[str]:
    """Every engine's best run, the fastest first; then those that failed, with the last line of what they said."""
    best: dict[str, dict] = {}
    for row in rows:
        if row["engine"] not in best or row.get("tokens_per_s", 0) > best[row["engine"]].get("tokens_per_s", 0):
            best[row["engine"]] = row
    ranked = sorted(best.values(), key=lambda row: -row.get("tokens_per_s", 0))
    return align_columns([HEAD, *map(_cells, ranked)])


def _cells(row: dict) -> tuple[str, ...]:
    if "failed" in row:
        return (row["engine"], *"-----", row["failed"].splitlines()[-1][:120])
    gpu = "-" if row["gpu_peak_gib"] is None else f"{row['gpu_peak_gib']:.2f}"
    host = f"{row['host_system_gib']:.1f}"
    return (
        row["engine"],
        f"{row['tokens_per_s']:.0f}",
        f"{row['step_s']:.3f}",
        gpu,
        host,
        f"{row['micro_batch']:g}",
        "",
    )


def roomy_folder(memory: str = "/dev/shm") -> str:
    """Where large files go: to memory where it has room for them, else where temporary ones go."""
    if Path(memory).is_dir() and shutil.disk_usage(memory).free >= ROOMY_BYTES:
        return memory
    return tempfile.gettempdir()


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags of a command line, or of `argv`, over those of the work that they name."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=list(WORKS), help="a request by its name")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["hf-liger", "peft-liger"])
    parser.add_argument("--preset", default="llama-3.1-8b", help="name of a preset of transformers' architectures")
    parser.add_argument("--layers", type=int, default=None, help="so many of the model's layers")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--tokens-per-step", type=int, default=65536, help="per GPU")
    parser.add_argument("--micro-batches", nargs="+", type=int, default=None, help="sequences at once, large to small")
    parser.add_argument("--tries", type=int, default=2, help="time so many micro-batches that fit, and take the best")
    parser.add_argument("--recompute", nargs="+", choices=["off", "on"], default=["off", "on"], help="resident engines")
    parser.add_argument("--liger", choices=["all", "no-loss", "loss", "none"], default="all", help="Liger's kernels")
    parser.add_argument("--attention", choices=list(ATTENTION), default="cudnn", help="torch's kernel tried first")
    parser.add_argument("--adapter-dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--cap-gib", type=float, default=None, help="of each GPU; inf: none")
    parser.add_argument("--ranks", type=int, default=2, help="GPUs of fsdp2 and of engines that offload")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--warmup", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--limit-s", type=float, default=300.0, help="stop an engine after so many seconds, all runs")
    parser.add_argument("--total-s", type=float, default=math.inf, help="stop the call after so many seconds")
    parser.add_argument("--files", default=None, help="folder of checkpoints; default: in memory where 64 GiB are free")
    parser.add_argument("--mode", choices=["full", "lora"], default=None, help="full but for peft-liger")
    parser.add_argument("--base-dtype", choices=["bfloat16", "nf4"], default="bfloat16", help="of frozen weights")
    parser.add_argument(
        "--state-dtype", choices=["float32", "bfloat16"], default="float32", help="of masters and states of offloaders"
    )
    parser.add_argument("--host-gib", type=float, default=None, help="limit of host memory")
    parser.add_argument(
        "--beside-others", action="store_true", help="other runs use the machine: host memory is of resident sets"
    )
    parser.add_argument("--compiled", action="store_true", help="by torch.compile (torchtune)")
    parser.add_argument("--packages", nargs="+", default=[], metavar="ENGINE=FOLDER", help="what it imports first")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args(argv)
    if args.work:
        parser.set_defaults(**{**ONE_GPU, **WORKS[args.work]})
        args = parser.parse_args(argv)
    args.recompute = [choice == "on" for choice in args.recompute]
    args.packages = dict(pair.split("=", 1) for pair in args.packages)
    return args


def main() -> None:
    args = parse()
    if args.one:
        values = json.loads(args.one)
        setting = Setting(*values)
        Path(args.out).write_text(json.dumps(measure(setting._replace(micro_batches=tuple(setting.micro_batches)))))
        return
    began_s, rows = time.perf_counter(), list[dict]()
    with tempfile.TemporaryDirectory(prefix="peers-", dir=args.files or roomy_folder()) as files:
        os.environ[FILES] = files
        for engine in args.engines:
            for row in runs_of(args, engine, args.total_s - (time.perf_counter() - began_s)):
                rows.append(row)
                write_json(args.json, {"versions": versions(list(args.packages.values())), "rows": rows})
            ran = [row for row in rows if row["engine"] == engine and "failed" not in row]
            best = max(ran, key=lambda row: row["tokens_per_s"], default=None)
            print(f"best of {engine}: {line(best) if best else 'none ran'}", flush=True)
    print("\n".join(["", *table(rows)]))


if __name__ == "__main__":
    main()
