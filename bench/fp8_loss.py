"""Does training with FP8 products, or kept in FP8, learn what training without learns? The same model and batches.

    python -m bench.fp8_loss --dataset gsm8k_train.jsonl --lr 3e-4 1e-3 --json out.json
    python -m bench.fp8_loss --layers 1 --device cpu --steps 20 --modes fp8-blockwise    # the bundled data
    python -m bench.fp8_loss --preset demo --dataset docs --modes keep-fp8-inputs        # the text of docs/

Runs `train` for values of --matmul-dtype and of --keep-dtype, bfloat16 first, which measures the machine, then the
others at once, as all of a second learning rate, and compares each with bfloat16:
the loss of a held-out part of the data after the last step, and the mean training loss of every WINDOW steps; float32
says how far rounding moves a run anyway. The model has a preset's shape with so many layers, random weights and the
bundled tokenizer. Exit status 0: with fp8-blockwise the held-out loss is within MOST_DIFFERENCE of bfloat16's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import get_args

from bench.environment import rounded, write_json
from bench.plan_accuracy import write_config
from flexengine.ops.fp8 import SCALINGS
from flexengine.options.train_config import EVAL_LOG_FILE, LOG_FILE
from flexengine.plan import KeepDtype

FP8 = [name for name in SCALINGS if name.startswith("fp8")]  # the others take Blackwell cards, or the CPU
WINDOW = 20
MOST_DIFFERENCE = 0.003
ROOT = Path(__file__).resolve().parent.parent
DEMO, DOCS = ROOT / "flexengine" / "assets" / "demo", ROOT / "docs"
PAGES = "{}/pages.jsonl"
OF_TOKENIZER = ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")
MODES = {
    "bfloat16": ["--dtype=bfloat16"],
    "float32": ["--dtype=float32"],
    **{name: ["--dtype=bfloat16", f"--matmul-dtype={name}"] for name in SCALINGS},
    **{f"keep-{name}": ["--dtype=bfloat16", f"--keep-dtype={name}"] for name in get_args(KeepDtype)[1:]},
}


def write_model(preset: str, layers: int | None, folder: Path) -> None:
    """Write a folder with a preset's shape and the bundled tokenizer, whose vocabulary is that of the embedding."""
    bundled = json.loads((DEMO / "config.json").read_text(encoding="utf-8"))
    if preset != "demo":
        write_config(preset, layers, folder, {name: bundled[name] for name in OF_TOKENIZER if name in bundled})
    for name in ("tokenizer.json", "tokenizer_config.json", *(["config.json"] if preset == "demo" else [])):
        shutil.copy(DEMO / name, folder / name)


def write_pages(file: Path) -> None:
    """Write the sections of the pages of docs/ as records of text."""
    pages = (page.read_text(encoding="utf-8") for page in sorted(DOCS.glob("*.md")))
    sections = [section for page in pages for section in page.split("\n## ")]
    file.write_text("".join(json.dumps({"text": section}) + "\n" for section in sections), encoding="utf-8")


def start(args: argparse.Namespace, model: Path, folder: Path, mode: str, lr: float) -> subprocess.Popen[bytes]:
    """Start one run."""
    dataset = PAGES.format(folder.parent) if args.dataset == "docs" else args.dataset
    flags = {
        "model": model, "init": "random", "dataset": dataset,
        "val-fraction": 0.05, "eval-steps": args.steps,
        "max-seq-len": args.max_seq_len, "max-global-batch-tokens": args.max_global_batch_tokens, "steps": args.steps,
        "lr": lr, "seed": args.seed, "device": args.device, "output-dir": folder,
        "chunk-tokens": args.max_global_batch_tokens // 2, "round-tokens": args.max_global_batch_tokens,
        "max-gpu-mem-gib": args.max_gpu_mem_gib, "max-host-mem-gib": args.max_host_mem_gib,
    }  # fmt: skip
    command = [sys.executable, "-m", "flexengine", "train", *(f"--{k}={v}" for k, v in flags.items()), *MODES[mode]]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def read(folder: Path) -> tuple[list[float], float]:
    """Give the training loss of every step of a run, and the held-out loss after the last one."""
    logs = [(folder / name).read_text(encoding="utf-8").splitlines() for name in (LOG_FILE, EVAL_LOG_FILE)]
    return [json.loads(line)["loss"] for line in logs[0]], json.loads(logs[1][-1])["loss"]


def compare(found: dict[str, tuple[list[float], float]]) -> dict[str, dict]:
    """How each mode stands against bfloat16."""
    others, held_out = found["bfloat16"]
    summary = {}
    for mode, (losses, own) in found.items():
        starts = range(0, len(others) - WINDOW + 1, WINDOW)
        apart = [statistics.mean(losses[i : i + WINDOW]) / statistics.mean(others[i : i + WINDOW]) - 1 for i in starts]
        summary[mode] = {"held_out_loss": own, "held_out_difference": own / held_out - 1, "differences": apart}
    return summary


def run_all(args: argparse.Namespace, lr: float, at_once: bool) -> dict[str, tuple[list[float], float]]:
    """Train in all modes: at once, or all but bfloat16, which goes first. Raises: RuntimeError naming what failed."""
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        model.mkdir()
        write_model(args.preset, args.layers, model)
        if args.dataset == "docs":
            write_pages(Path(PAGES.format(name)))
        modes = ["bfloat16", *(mode for mode in args.modes if mode != "bfloat16")]
        failed = []
        for some in (modes,) if at_once else (modes[:1], modes[1:]):
            runs = {mode: start(args, model, Path(name) / mode, mode, lr) for mode in some}
            failed += [mode for mode, run in runs.items() if run.wait()]
        if failed:
            raise RuntimeError(f"runs failed: {', '.join(failed)}")
        return {mode: read(Path(name) / mode) for mode in modes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-0.6b", help="whose shape is trained")
    parser.add_argument("--layers", type=int, help="so many layers of it")
    parser.add_argument("--dataset", default=str(DEMO / "demo_instructions.jsonl"), help="a file, or docs")
    parser.add_argument("--max-seq-len", type=int, default=512)
    parser.add_argument("--max-global-batch-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--lr", type=float, nargs="+", default=[3e-4])
    parser.add_argument("--modes", nargs="+", choices=MODES, default=["bfloat16", *FP8])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--max-gpu-mem-gib", type=float, default=8.0)
    parser.add_argument("--max-host-mem-gib", type=float, default=10.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results, within = {}, True
    for lr in args.lr:
        # those at once find the rates that the first run measured, which on a CPU decide nothing
        found = run_all(args, lr, at_once=bool(results) or args.device == "cpu")
        summary = compare(found)
        for mode, row in summary.items():
            apart = " ".join(f"{100 * d:+.2f}%" for d in row["differences"])
            print(f"lr {lr:g} {mode}: held-out {row['held_out_loss']:.4f} ({100 * row['held_out_difference']:+.2f}%);"
                  f" by {WINDOW} steps {apart}")  # fmt: skip
        blocks = summary.get("fp8-blockwise")
        within = within and (blocks is None or abs(blocks["held_out_difference"]) <= MOST_DIFFERENCE)
        losses = {mode: [each[0][0], *each[0][9::10]] for mode, each in found.items()}
        results[f"{lr:g}"] = rounded({"summary": summary, "losses_of_the_first_and_every_tenth_step": losses}, 5)
        if args.json:
            options = {name: value for name, value in vars(args).items() if name not in ("json", "dataset")}
            write_json(args.json, {"options": options, "dataset": Path(args.dataset).name, "by_lr": results})
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
