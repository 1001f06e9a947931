"""Does a run of several ranks that lose one at any moment go on bit by bit?

    python -m bench.kill_ranks --gpus 2 --kills 3 --json out.json
    python -m bench.kill_ranks --device cpu --gpus 2 --kills 3 --transport stages --json out.json

A run of `flexengine train --gpus N --deterministic` that is left alone, and one of a single rank with the same sizes
of chunks and rounds, give the losses and weights to compare with. Then the same run saves every few steps, and a random
one of its ranks is killed (SIGKILL) a random time after it logged a step. All ranks and their launcher must end within
10 seconds, with a status that is not 0. `--resume auto` goes on from the last checkpoint that is whole. At most as many
steps as lie between two checkpoints are run again. Weights are random, and of a small vocabulary on a GPU, so that a
checkpoint takes seconds.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from bench.end_to_end import lines
from bench.environment import write_json
from bench.kill_runs import outcome
from bench.plan_accuracy import write_config
from flexengine.checkpoint.run_checkpoints import whole_checkpoints

LIMIT_S = 10.0
CHANGES = {"vocab_size": 32000, "tie_word_embeddings": False}
SIZES = {
    "cpu": {"max-seq-len": 32, "max-global-batch-tokens": 256, "chunk-tokens": 64, "round-tokens": 64,
            "max-gpu-mem-gib": 0.5},
    "cuda": {"max-seq-len": 1024, "max-global-batch-tokens": 16384, "chunk-tokens": 4096, "round-tokens": 4096,
             "max-gpu-mem-gib": 6},
}  # fmt: skip
"""Flags of the runs; four rounds a step."""


def write_model(device: str, folder: Path) -> Path:
    """Write the config of the runs' model."""
    folder.mkdir()
    if device == "cpu":
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "head_dim": 16}  # fmt: skip
        write_config("llama-3.2-1b", 3, folder, {**CHANGES, **sizes, "vocab_size": 256})
    else:
        write_config("llama-3.2-1b", 6, folder, CHANGES)
    return folder


def command(args: argparse.Namespace, model: Path, folder: Path, gpus: int, saving: bool = False) -> list[str]:
    """The command line of a run."""
    flags = {
        "model": model, "output-dir": folder, "steps": args.steps, "gpus": gpus, "round-multiple": args.gpus,
        "max-host-mem-gib": args.host_gib, "lr": 1e-4, "optimizer-state-dtype": "bfloat16", **SIZES[args.device],
    }  # fmt: skip
    if args.device == "cpu":
        flags["device"] = "cpu"
    if gpus > 1:
        flags["transport"] = args.transport
    if saving:
        flags |= {"save-steps": args.save_steps, "save-total-limit": 2, "resume": "auto"}
    given = ["--init", "random", "--data-source", "synthetic", "--deterministic", "--save"]
    return [sys.executable, "-m", "flexengine", "train", *given, *(f"--{k}={v}" for k, v in flags.items())]


def logged(folder: Path) -> int:
    """The last step in a run's log."""
    return max((line["step"] for line in lines(folder)), default=0)


def ranks_of(launcher: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that train."""
    found = psutil.Process(launcher.pid).children(recursive=True)
    return [process for process in found if process.is_running() and "RANK" in process.environ()]


def kill_one(
    launcher: subprocess.Popen[str], folder: Path, rng: random.Random, last_step: int, step_s: float
) -> dict[str, object] | None:
    """Kill a random rank at a random moment and wait for all to end; None where the run was over before."""
    began = logged(folder)
    at = rng.randint(began + 1, max(began + 1, last_step - 1))
    while launcher.poll() is None and logged(folder) < at:
        time.sleep(0.02)
    time.sleep(rng.uniform(0.0, 2.0) * step_s)
    if launcher.poll() is not None:
        return None
    ranks = ranks_of(launcher)
    victim = rng.choice(ranks)
    number = victim.environ()["RANK"]
    step = logged(folder)
    victim.kill()
    start, ends_s = time.perf_counter(), list[float]()
    with ThreadPoolExecutor(1) as reader:
        ending = reader.submit(launcher.communicate)
        psutil.wait_procs(ranks, timeout=LIMIT_S, callback=lambda _: ends_s.append(time.perf_counter() - start))
        _, said = ending.result()
    left = psutil.wait_procs(ranks, timeout=LIMIT_S)[1]
    return {
        "rank": int(number),
        "after_step": step,
        "ranks_ended_after_s": ends_s,
        "ended_after_s": time.perf_counter() - start,
        "status": launcher.returncode,
        "left": len(left),
        "said": [line for line in said.splitlines() if line.startswith("flexengine")][-3:],
        "checkpoint": max((found.step for found in whole_checkpoints(folder)), default=0),
    }


def flow(args: argparse.Namespace, scratch: Path) -> dict[str, object]:
    """Run all of it and return what was found."""
    model = write_model(args.device, scratch / "model")
    seconds, wanted = {}, {}
    for name, gpus in (("one", 1), ("several", args.gpus)):
        begin = time.perf_counter()
        subprocess.run(command(args, model, scratch / name, gpus), check=True, stdout=sys.stderr)
        seconds[name], wanted[name] = time.perf_counter() - begin, outcome(scratch / name)
    step_s = statistics.median(line["step_s"] for line in lines(scratch / "several"))
    rng, kills, killed = random.Random(args.seed), [], scratch / "killed"
    while True:
        launcher = subprocess.Popen(
            command(args, model, killed, args.gpus, saving=True),
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        found = kill_one(launcher, killed, rng, args.steps, step_s) if len(kills) < args.kills else None
        if found is None:
            _, said = launcher.communicate()
            if launcher.returncode:
                raise SystemExit(f"the run ended with {launcher.returncode}: {said[-2000:]}")
            break
        kills.append(found)
        print(found, file=sys.stderr, flush=True)
    return {
        "gpus": args.gpus,
        "transport": args.transport,
        "steps": args.steps,
        "save_steps": args.save_steps,
        "seconds": seconds,
        "kills": kills,
        "one_equals_several": wanted["one"] == wanted["several"],
        "killed_equals_whole": outcome(killed) == wanted["several"],
        "losses": [line[1] for line in wanted["several"]["log"]],
    }


def wrong(found: dict, limit_s: float = LIMIT_S) -> list[str]:
    """What does not keep its promise."""
    said = [name for name in ("one_equals_several", "killed_equals_whole") if not found[name]]
    for number, kill in enumerate(found["kills"], 1):
        if kill["ended_after_s"] > limit_s or kill["left"] or kill["status"] == 0:
            said.append(
                f"kill {number} left {kill['left']} ranks, status {kill['status']}, {kill['ended_after_s']:.1f} s"
            )
        if kill["after_step"] - kill["checkpoint"] > found["save_steps"]:
            said.append(f"kill {number} lost {kill['after_step'] - kill['checkpoint']} steps")
    return said


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--save-steps", type=int, default=2)
    parser.add_argument("--transport", choices=["relay", "split", "stages"], default="relay")
    parser.add_argument("--host-gib", type=float, default=24, help="of all ranks")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", default=None, help="where runs are written; default: the temporary folder")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    return parser.parse_args(argv)


def main() -> None:
    args = parse()
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        found = flow(args, Path(scratch))
    print(json.dumps({name: found[name] for name in ("one_equals_several", "killed_equals_whole", "seconds")}))
    write_json(args.json, found)
    if said := wrong(found):
        sys.exit("; ".join(said))


if __name__ == "__main__":
    main()
