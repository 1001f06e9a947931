"""Does training with planes on a drive lose nothing but the step when it is killed at any moment?

    python -m bench.kill_on_drive --kills 30 --folder DIR

A process trains a tiny model whose weights, gradients and optimizer states lie on the drive of DIR, and saves after
every step. It is killed (SIGKILL) after a random time, again and again; the next one goes on from the newest
checkpoint. Each loss must be that of a run which nobody killed, no checkpoint that was whole may be lost, and nothing
of the drive's file may be left in the folder.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from bench.environment import write_json
from bench.interrupts import CONFIG
from flexengine.checkpoint.manifest import verify_manifest
from flexengine.models.freezing import with_frozen
from flexengine.models.registry import ModelSource, build_model
from flexengine.optim import AdamW
from flexengine.plan import GroupPlan, LayerPlan, Numerics, Plan, Request
from flexengine.runtime.engine import Engine, EngineSettings

STEPS = 6
BATCHES = [[[(5 * step + 3 * j + n) % 31 for j in range(n)] for n in (11, 5)] for step in range(STEPS)]


def engine_on(folder: Path) -> Engine:
    """An engine of two blocks, one of them frozen, with all that may lie there on the folder's drive."""
    spec = with_frozen(build_model("tiny", {**CONFIG, "num_hidden_layers": 2}), ("block.0",))
    numerics = Numerics("bfloat16", "split", "bfloat16", "float32")
    frozen, trained = GroupPlan(weights="drive", update="none"), GroupPlan("drive", "drive", "drive", "cpu")
    homes = tuple(frozen if group.frozen else trained for group in spec.groups)
    request = Request(16, 4096, 2**30, 2**30, numerics=numerics)
    layers = (LayerPlan(), *[LayerPlan((), (), "host")] * 2, LayerPlan())
    plan = Plan("tiny", request, 16, 2, layers, homes, drive_tile=1, drive_slots=2)
    source = ModelSource(spec, None, None)
    return Engine(source, plan, torch.device("cpu"), AdamW(lr=1e-2), EngineSettings(offload_dir=str(folder / "drive")))


def saved(folder: Path) -> list[Path]:
    """Checkpoints by step, the newest last."""
    return sorted(folder.glob("step-*"))


def go_on(folder: Path) -> None:
    """Train from the newest checkpoint to the last step; saves after each, and writes its loss beside."""
    torch.set_num_threads(1)
    with engine_on(folder) as engine:
        done = saved(folder)
        if done:
            engine.load_checkpoint(done[-1])
        for step in range(len(done), STEPS):
            loss = engine.train_step(BATCHES[step])[0].loss
            (folder / f"loss-{step + 1}").write_text(repr(loss))
            engine.save_checkpoint(folder / f"step-{step + 1}")


def _killed(folder: Path, after_s: float) -> bool:
    """Let a process of its own go on, and kill it; False where it had ended before."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            go_on(folder)
            status = 0
        finally:
            os._exit(status)
    deadline = time.monotonic() + after_s
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, f"a run that nobody killed ended with {status}"
            return False
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


def _losses(folder: Path) -> list[str]:
    return [(folder / f"loss-{step}").read_text() for step in range(1, len(saved(folder)) + 1)]


def killed_runs(scratch: Path, kills: int, seed: int) -> Counter[int]:
    """Kill runs so often; returns how many kills came by the number of checkpoints that were there."""
    rng, found, number = random.Random(seed), Counter[int](), 0
    (scratch / "whole").mkdir()
    begin = time.monotonic()
    assert not _killed(scratch / "whole", 600.0)
    seconds, expected = time.monotonic() - begin, _losses(scratch / "whole")
    while kills:
        folder = scratch / f"run-{number}"
        folder.mkdir(exist_ok=True)
        before = len(saved(folder))
        if not _killed(folder, rng.uniform(0.0, 0.7) * seconds):
            assert _losses(folder) == expected, "the resumed run differs"
            number += 1
            continue
        kills -= 1
        done = saved(folder)
        for checkpoint in done:
            verify_manifest(checkpoint)
        assert len(done) >= before, "a checkpoint is lost"
        assert _losses(folder) == expected[: len(done)], "the resumed run differs"
        drive = folder / "drive"
        assert not drive.exists() or not list(drive.iterdir()), "the drive's file is left"
        found[len(done)] += 1
    folder = scratch / f"run-{number}"
    folder.mkdir(exist_ok=True)
    assert not _killed(folder, 600.0)
    assert _losses(folder) == expected, "the resumed run differs"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", default=None, help="where runs are written; default: the temporary folder")
    parser.add_argument("--json", default=None, help="write the figures to this file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        found = killed_runs(Path(scratch), args.kills, args.seed)
    by_saves = {f"after {count} saves": found[count] for count in sorted(found)}
    print(f"{args.kills} kills, nothing lost: {by_saves}")
    if args.json:
        write_json(args.json, {"kills": args.kills, "kills_by_saves": by_saves})


if __name__ == "__main__":
    main()
