"""A person's whole flow on a GPU: train with validation, be killed, be stopped, go on in other budgets, export, ask.

    python -m bench.end_to_end --model FOLDER --dataset gsm8k_train.jsonl --budgets 8 4 6 --json OUT.json

FOLDER needs a config and a tokenizer; weights are random (`--init random`). A first run of all steps is left alone. A
second one is killed (SIGKILL) a third of the way, goes on within the second budget until SIGTERM stops it at two
thirds, and ends within the third. Both must log the same losses and write the same weights. The second is then
exported, and the exported model answers a prompt. The curves of loss and validation are written beside the figures, and
the run page where --page says.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.environment import write_json
from flexengine.run.saver import STOPPED

FLEXENGINE = [sys.executable, "-m", "flexengine"]
PROMPT = "Tom has 3 apples and buys 5 more. How many apples has he?"


def lines(folder: Path) -> list[dict]:
    """The lines of a run's log so far."""
    path = folder / "train_log.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def train(args: argparse.Namespace, folder: Path, budget: float, extra: list[str]) -> subprocess.Popen[bytes]:
    """Start the run of this folder within a GPU budget in GiB."""
    flags = {
        "model": args.model, "init": "random", "dataset": args.dataset, "max-seq-len": 1024, "lr": args.lr, "seed": 3,
        "max-global-batch-tokens": args.tokens, "val-fraction": 0.05, "eval-steps": args.eval_steps,
        "steps": args.steps, "max-host-mem-gib": args.host_gib, "output-dir": folder, "max-gpu-mem-gib": budget,
    }  # fmt: skip
    command = [*FLEXENGINE, "train", "--deterministic", "--save", *(f"--{k}={v}" for k, v in flags.items()), *extra]
    return subprocess.Popen(command, stdout=sys.stderr)


def until(process: subprocess.Popen[bytes], folder: Path, step: int, how: signal.Signals) -> int:
    """Send a signal to the run when it has logged this step, and return its exit status."""
    while process.poll() is None and (not lines(folder) or lines(folder)[-1]["step"] < step):
        time.sleep(0.1)
    process.send_signal(how)
    return process.wait()


def weights(folder: Path) -> list[str]:
    """The digests of the shards of a run's final model."""
    return [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted((folder / "final").glob("*.safetensors"))]


def finished(command: list[str]) -> str:
    """What a command printed that must end well."""
    return subprocess.run([*FLEXENGINE, *command], check=True, stdout=subprocess.PIPE, text=True).stdout


def flow(args: argparse.Namespace, scratch: Path) -> dict:
    """Run all of it and return what was found."""
    whole, cut, exported = scratch / "whole", scratch / "cut", scratch / "exported"
    begin = time.perf_counter()
    assert train(args, whole, args.budgets[0], ["--trace"]).wait() == 0
    seconds = time.perf_counter() - begin
    saving = [f"--save-steps={args.steps // 4}", "--resume=auto"]
    third = args.steps // 3
    killed = until(train(args, cut, args.budgets[0], saving), cut, third, signal.SIGKILL)
    stopped = until(train(args, cut, args.budgets[1], saving), cut, 2 * third, signal.SIGTERM)
    assert (killed, stopped) == (-signal.SIGKILL, STOPPED), (killed, stopped)
    assert train(args, cut, args.budgets[2], saving).wait() == 0
    finished(["report", str(whole), "--html", str(scratch / "page.html")])
    finished(["export", "--run", str(cut), "--out", str(exported)])
    answer = finished(["generate", "--model", str(exported), "--prompt", PROMPT, "--max-new-tokens", "40"])
    losses = [line["loss"] for line in lines(whole)]
    evaluations = [json.loads(line) for line in (whole / "eval_log.jsonl").read_text().splitlines()]
    return {
        "seconds_of_the_whole_run": seconds,
        "equal_losses": losses == [line["loss"] for line in lines(cut)],
        "equal_weights": weights(whole) == weights(cut),
        "losses": losses,
        "validation": evaluations,
        "last_line": lines(whole)[-1],
        "answer": answer,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of a config and a tokenizer")
    parser.add_argument("--dataset", required=True)
    parser.add_argument("--budgets", type=float, nargs=3, default=[8, 4, 6], help="of the GPU, in GiB")
    parser.add_argument("--host-gib", type=float, default=24)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eval-steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--page", default=None, help="copy the run page to this file")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        found = flow(args, Path(scratch))
        if args.page:
            shutil.copy(Path(scratch) / "page.html", args.page)
    print(json.dumps({name: found[name] for name in ("equal_losses", "equal_weights", "answer")}))
    write_json(args.json, found)
    if not (found["equal_losses"] and found["equal_weights"]):
        sys.exit("the run that was killed and stopped differs from the one left alone")


if __name__ == "__main__":
    main()
