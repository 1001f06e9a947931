"""Does a run on a billion tokens stay within the memory that its plan states?

    python -m bench.shard_training --tokens 1000000000 --json out.json

A shard of random tokens (int32, 4 bytes each, in a folder of --folder's) is trained on for a few steps by
`flexengine train` in a process of its own, under --max-gpu-mem-gib and --max-host-mem-gib, on the CPU by default. The
most that the process has resident during its steps (pages of mapped files included) is held against the plan, the most
that it ever had (VmHWM: tokenizing and planning too) against the budget; on the CPU the GPU's budget is host memory
too. The same run on synthetic data shows what the data adds.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from bench.environment import write_json
from flexengine.data import ChatTokenizer
from flexengine.metrics import GIB
from flexengine.models.registry import ASSETS, open_model
from flexengine.plan import Plan

PIECE_TOKENS = 10**7
POLL_S = 0.05


def main() -> int:
    """Measure, print and write; returns the exit status: 1 where a run took more than its plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=10**9, help="tokens of the shard")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--max-seq-len", type=int, default=256)
    parser.add_argument("--max-global-batch-tokens", type=int, default=1024)
    parser.add_argument("--max-gpu-mem-gib", type=float, default=0.25)
    parser.add_argument("--max-host-mem-gib", type=float, default=1.0)
    parser.add_argument("--folder", help="where the shard is written (default: the system's folder of scratch files)")
    parser.add_argument("--json", help="write the figures to this file")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        tokenizer = ChatTokenizer.from_folder(open_model(arguments.model).support_folder or ASSETS / "demo")
        shard = write_shard(Path(folder) / "shard.npy", arguments.tokens, tokenizer.max_id)
        results = {
            "shard": {"tokens": arguments.tokens, "bytes": shard.stat().st_size},
            "trained": train(arguments, Path(folder) / "run", ["--dataset", str(shard)]),
            "synthetic": train(arguments, Path(folder) / "synthetic", ["--data-source", "synthetic"]),
        }
    print(json.dumps(results, indent=1))
    write_json(arguments.json, results)
    return 0 if results["trained"]["within_the_plan"] else 1


def write_shard(path: Path, num_tokens: int, max_id: int) -> Path:
    """Write random tokens as an array of int32, piece by piece."""
    shard = np.lib.format.open_memmap(path, "w+", np.int32, (num_tokens,))
    rng = np.random.default_rng(0)
    for start in range(0, num_tokens, PIECE_TOKENS):
        part = shard[start : start + PIECE_TOKENS]
        part[:] = rng.integers(0, max_id, len(part), dtype=np.int32)
    shard.flush()
    return path


def train(arguments: argparse.Namespace, folder: Path, data: list[str]) -> dict[str, object]:
    """What a run of `flexengine train` took, and what its plan and budgets allow. Raises when the run fails."""
    names = ("model", "device", "steps", "max_seq_len", "max_global_batch_tokens", "max_gpu_mem_gib")
    names += ("max_host_mem_gib",)
    flags = [text for name in names for text in (f"--{name.replace('_', '-')}", str(getattr(arguments, name)))]
    command = [sys.executable, "-m", "flexengine", "train", *flags, *data, "--output-dir", str(folder)]
    start_s = time.perf_counter()
    process = subprocess.Popen([*command, "--dtype", "float32"], stdout=subprocess.DEVNULL)
    peak = in_steps = 0
    while process.poll() is None:
        peak = max(peak, status_bytes(process.pid, "VmHWM"))
        if (folder / "train_log.jsonl").exists():
            in_steps = max(in_steps, status_bytes(process.pid, "VmRSS"))
        time.sleep(POLL_S)
    if process.returncode:
        raise SystemExit(f"the run ended with status {process.returncode}")
    plan = Plan.from_json((folder / "plan.json").read_text())
    steps = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    on_cpu = arguments.device == "cpu"
    planned = plan.predicted.host_bytes + on_cpu * plan.predicted.gpu_bytes
    budget = int(GIB * (arguments.max_host_mem_gib + on_cpu * arguments.max_gpu_mem_gib))
    return {
        "seconds": time.perf_counter() - start_s,
        "steps": len(steps),
        "tokens": sum(step["num_tokens"] for step in steps),
        "budget_bytes": budget,
        "planned_bytes": planned,
        "peak_resident_bytes": peak,
        "peak_in_steps_bytes": in_steps,
        "within_the_plan": in_steps <= planned,
        "within_the_budget": peak <= budget,
    }


def status_bytes(pid: int, name: str) -> int:
    """What the system tells of a process's memory; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    line = next((line for line in lines if line.startswith(name)), f"{name}: 0")
    return 1024 * int(line.split()[1])


if __name__ == "__main__":
    sys.exit(main())
