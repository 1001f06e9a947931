"""Does a run that is killed at any moment go on bit by bit?

    python -m bench.kill_runs --kills 50

A run with `--save --save-steps 2` is killed (SIGKILL) after a random time and started again with `--resume auto`, as
often as --kills says; kills therefore fall into steps, into saves and into the export. A run that reaches its end is
compared with one that was never killed (log and files of the model), and a new one begins. After every kill each
checkpoint must be whole or under a hidden name, and none that was durable may be lost. Every fourth start has another
GPU budget, every fifth another host budget.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.environment import write_json
from flexengine.checkpoint.manifest import verify_manifest
from flexengine.checkpoint.run_checkpoints import checkpoints_of, whole_checkpoints

KNOWN_MACHINE = """
import sys
import flexengine.api
from flexengine.hardware.presets import preset
flexengine.api.probe = lambda *_, **__: preset("cpu-test")
from flexengine.cli import main
sys.exit(main(sys.argv[1:]))
"""
KEPT = ("step", "loss", "grad_norm", "lr", "num_tokens")


def command(folder: Path, steps: int, start: int) -> list[str]:
    """The command line of the start with this number."""
    gpu = 0.0625 if start % 4 == 3 else 0.5
    host = 1.5 if start % 5 == 4 else 4
    flags = {
        "model": "preset:demo", "data-source": "synthetic", "output-dir": folder, "steps": steps, "dtype": "bfloat16",
        "max-seq-len": 32, "max-global-batch-tokens": 64, "device": "cpu", "max-gpu-mem-gib": gpu,
        "max-host-mem-gib": host, "save-steps": 2, "resume": "auto",
    }  # fmt: skip
    return [sys.executable, "-c", KNOWN_MACHINE, "train", "--save", *(f"--{k}={v}" for k, v in flags.items())]


def outcome(folder: Path) -> dict[str, object]:
    """What must not depend on kills: the log without times, and the files of the model."""
    lines = [json.loads(line) for line in (folder / "train_log.jsonl").read_text().splitlines()]
    shards = sorted((folder / "final").glob("*.safetensors"))
    return {
        "log": [[line[name] for name in KEPT] for line in lines],
        "model": [hashlib.sha256(path.read_bytes()).hexdigest() for path in shards],
    }


def where(folder: Path, steps: int) -> str:
    """In which part of the run it was killed, as its files tell."""
    if (folder / "checkpoints").is_dir() and any(
        p.name.startswith(".step-") for p in (folder / "checkpoints").iterdir()
    ):
        return "in a save"
    newest = max((found.step for found in whole_checkpoints(folder)), default=0)
    if newest == steps and any(path.name.startswith(".final") for path in folder.iterdir()):
        return "in the export"
    return "in a step" if (folder / "train_log.jsonl").exists() else "before the first step"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--scratch", default=None, help="where runs are written; default: the temporary folder")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    rng, found, whole_runs, start = random.Random(args.seed), {}, 0, 0
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        first, killed = Path(scratch) / "first", Path(scratch) / "killed"
        begin = time.perf_counter()
        subprocess.run(command(first, args.steps, 0), check=True, env=environment, capture_output=True)
        seconds, wanted = time.perf_counter() - begin, outcome(first)
        num_kills, durable = 0, -1
        while num_kills < args.kills:
            process = subprocess.Popen(
                command(killed, args.steps, start), env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
            )
            start += 1
            try:
                _, err = process.communicate(timeout=rng.uniform(0.35, 1.05) * seconds)
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                num_kills += 1
                place = where(killed, args.steps)
                found[place] = found.get(place, 0) + 1
                whole = whole_checkpoints(killed)
                assert whole == checkpoints_of(killed), "a checkpoint that is not whole has its name"
                for checkpoint in whole:
                    verify_manifest(checkpoint.folder)
                newest = whole[0].step if whole else -1
                assert newest >= durable, f"the checkpoint of step {durable} is lost"
                durable = newest
                print(f"kill {num_kills}: {place}, last checkpoint {newest}", flush=True)
                continue
            assert process.returncode == 0, err.decode()
            assert outcome(killed) == wanted, "the resumed run differs"
            whole_runs, durable = whole_runs + 1, -1
            shutil.rmtree(killed)
        if killed.exists():
            subprocess.run(command(killed, args.steps, start), check=True, env=environment, capture_output=True)
            assert outcome(killed) == wanted, "the resumed run differs"
            whole_runs += 1
    print(f"{num_kills} kills ({found}), {whole_runs} runs reached their end, all bit-identical")
    write_json(args.json, {"kills": num_kills, "where": found, "runs_compared": whole_runs, "seed": args.seed})


if __name__ == "__main__":
    main()
