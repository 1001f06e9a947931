"""Does training with 8-bit optimizer states end where float32 states end? One model, one seed, three dtypes of states.

    python -m bench.state_losses --dataset gsm8k_train.jsonl --json out.json
    python -m bench.state_losses --model preset:demo --steps 40 --device cpu      # the bundled model and data

Runs `train` with float32, bfloat16 and int8 states on the same batches and compares the mean of the last WINDOW losses
with that of float32 states, and of every WINDOW steps before. Exit status 0: int8 ends within MOST_DIFFERENCE. States
are those of docs/optimizers.md: with int8, embedding and head keep bfloat16 ones. The model is a preset's with so many
layers, random weights and the bundled tokenizer, or any that `train` takes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

from bench.environment import write_json
from bench.fp8_loss import DEMO_DATA, WINDOW, differences, losses_of
from bench.plan_accuracy import write_config

STATES = ("float32", "bfloat16", "int8")
MOST_DIFFERENCE = 0.01
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")
OF_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")


def write_model(preset: str, layers: int | None, folder: Path) -> None:
    """A folder with a preset's shape and the bundled tokenizer, whose vocabulary is that of the embedding."""
    bundled = json.loads((DEMO_DATA.parent / "config.json").read_text(encoding="utf-8"))
    write_config(preset, layers, folder, {name: bundled[name] for name in OF_TOKENIZER if name in bundled})
    for name in TOKENIZER:
        shutil.copy(DEMO_DATA.parent / name, folder / name)


def losses_by_states(args: argparse.Namespace) -> dict[str, list[float]]:
    """The loss of every step for each dtype of states. Raises: CalledProcessError when a run fails."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--dtype", args.dtype]
        if args.preset is not None:
            write_model(args.preset, args.layers, Path(folder))
            args, flags = argparse.Namespace(**{**vars(args), "model": folder}), [*flags, "--init", "random"]
        return {dtype: losses_of(args, [*flags, "--optimizer-state-dtype", dtype]) for dtype in STATES}


def compare(losses: dict[str, list[float]]) -> dict[str, dict]:
    """How each dtype of states stands against float32: at the end, and of every WINDOW steps."""
    ends = {dtype: statistics.mean(values[-WINDOW:]) for dtype, values in losses.items()}
    return {
        dtype: {
            "first_loss": values[0],
            "end_loss": ends[dtype],
            "end_difference": ends[dtype] / ends["float32"] - 1.0,
            "differences": differences(values, losses["float32"]),
        }
        for dtype, values in losses.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--preset", default="qwen3-0.6b", help="whose shape is trained")
    model.add_argument("--model", default=None, help="a folder or preset:NAME that `train` takes, instead of --preset")
    parser.add_argument("--layers", type=int, default=8, help="so many layers of --preset")
    parser.add_argument("--dataset", default=str(DEMO_DATA))
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--max-global-batch-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-gpu-mem-gib", type=float, default=16.0)
    parser.add_argument("--max-host-mem-gib", type=float, default=16.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    args.preset = None if args.model is not None else args.preset
    losses = losses_by_states(args)
    summary = compare(losses)
    for dtype, found in summary.items():
        ends = f"loss {found['first_loss']:.3f} -> {found['end_loss']:.4f}, {100 * found['end_difference']:+.2f}%"
        print(f"{dtype}: {ends}; by {WINDOW} steps: " + " ".join(f"{100 * d:+.2f}%" for d in found["differences"]))
    if args.json:
        options = {name: value for name, value in vars(args).items() if name not in ("json", "dataset")}
        dataset = Path(args.dataset).name
        write_json(args.json, {"options": options, "dataset": dataset, "summary": summary, "losses": losses})
    return 0 if abs(summary["int8"]["end_difference"]) <= MOST_DIFFERENCE else 1


if __name__ == "__main__":
    sys.exit(main())
