"""Does training with FP8 learn what training without learns? The same small model on the same batches.

    python -m bench.fp8_loss --json out.json                      # the bundled model and data
    python -m bench.fp8_loss --dataset records.jsonl --max-global-batch-tokens 16384 --json out.json
    python -m bench.fp8_loss --device cpu --runs float32_kept_fp8 # on a CPU, where bf16 is slow

Runs `train` in float32, in bf16, with FP8 linear layers (--matmul-dtype fp8) and with gate and up kept in FP8
(--keep-dtype fp8), one after the other, and compares the loss curves: the mean of every WINDOW steps, relative to bf16,
or to float32 where gate and up are kept so beside float32. The float32 run is the yardstick: what difference rounding
makes anyway. --runs chooses some of them, and brings along what they are compared with. Those with adapters
(lora_kept_fp8, float32_lora_kept_fp8) want a trained --model and run when they are named.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.environment import write_json
from flexengine.options.train_config import LOG_FILE

WINDOW = 20
MOST_DIFFERENCE = 0.005
RUNS = {
    "bf16": ["--dtype", "bfloat16"],
    "fp8": ["--dtype", "bfloat16", "--matmul-dtype", "fp8"],
    "kept_fp8": ["--dtype", "bfloat16", "--keep-dtype", "fp8"],
    "float32": ["--dtype", "float32"],
    "float32_kept_fp8": ["--dtype", "float32", "--keep-dtype", "fp8"],
    "lora": ["--dtype", "bfloat16", "--mode", "lora"],
    "lora_kept_fp8": ["--dtype", "bfloat16", "--mode", "lora", "--keep-dtype", "fp8"],
    "float32_lora": ["--dtype", "float32", "--mode", "lora"],
    "float32_lora_kept_fp8": ["--dtype", "float32", "--mode", "lora", "--keep-dtype", "fp8"],
}
COMPARED = {"fp8": "bf16", "kept_fp8": "bf16", "float32": "bf16", "float32_kept_fp8": "float32"}
OF_ADAPTERS = {"lora_kept_fp8": "lora", "float32_lora_kept_fp8": "float32_lora"}
"""What each run is compared with; those of adapters when they are named."""
DEMO_DATA = Path(__file__).resolve().parent.parent / "flexengine" / "assets" / "demo" / "demo_instructions.jsonl"


def losses_of(args: argparse.Namespace, numerics: list[str]) -> list[float]:
    """The loss of every step of one run. Raises: CalledProcessError when it fails."""
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "model": args.model,
            "dataset": args.dataset,
            "max-seq-len": args.max_seq_len,
            "max-global-batch-tokens": args.max_global_batch_tokens,
            "steps": args.steps,
            "lr": args.lr,
            "seed": args.seed,
            "device": args.device,
            "output-dir": folder,
            "max-gpu-mem-gib": args.max_gpu_mem_gib,
            "max-host-mem-gib": args.max_host_mem_gib,
        }
        flags = [part for name, value in options.items() for part in (f"--{name}", str(value))]
        subprocess.run([sys.executable, "-m", "flexengine", "train", *flags, *numerics], check=True)
        lines = (Path(folder) / LOG_FILE).read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["loss"] for line in lines]


def differences(losses: list[float], others: list[float]) -> list[float]:
    """Relative difference of the mean losses of every WINDOW steps."""
    starts = range(0, len(others) - WINDOW + 1, WINDOW)
    means = [(statistics.mean(losses[i : i + WINDOW]), statistics.mean(others[i : i + WINDOW])) for i in starts]
    return [mean / other - 1.0 for mean, other in means]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:demo")
    parser.add_argument("--dataset", default=str(DEMO_DATA))
    parser.add_argument("--max-seq-len", type=int, default=256)
    parser.add_argument("--max-global-batch-tokens", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-gpu-mem-gib", type=float, default=2.0)
    parser.add_argument("--max-host-mem-gib", type=float, default=8.0)
    compared = COMPARED | OF_ADAPTERS
    parser.add_argument("--runs", nargs="+", choices=compared, default=list(COMPARED), help="what is compared")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    needed = {compared[name] for name in args.runs} | set(args.runs)
    losses = {name: losses_of(args, numerics) for name, numerics in RUNS.items() if name in needed}
    last = {name: statistics.mean(found[-WINDOW:]) for name, found in losses.items()}
    summary = {}
    for name in args.runs:
        other = compared[name]
        found = differences(losses[name], losses[other])
        summary[name] = {"worst_difference": max(found, key=abs), "mean_difference": statistics.mean(found)}
        print(f"{name} against {other}, by {WINDOW} steps: " + " ".join(f"{100 * d:+.2f}%" for d in found))
        print(f"  mean loss of the last {WINDOW} steps: {last[name]:.4f}, of {other} {last[other]:.4f}")
    within = all(abs(row["worst_difference"]) <= MOST_DIFFERENCE for name, row in summary.items() if "fp8" in name)
    if args.json:
        options = {name: value for name, value in vars(args).items() if name not in ("json", "dataset")}
        dataset = Path(args.dataset).name
        write_json(args.json, {"options": options, "dataset": dataset, "summary": summary, "losses": losses})
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
