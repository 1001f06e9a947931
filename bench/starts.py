r"""How long does `train` take from its command to the end of its first step, on a machine that it never saw, and then?

    python -m bench.starts --preset llama-3.1-8b --json out.json
    python -m bench.starts --model flexengine/assets/demo \
        --flags "--init=random --device=cpu --max-seq-len=512 --max-global-batch-tokens=2048"

Writes a checkpoint of a preset's shape with random values, unless --model names one, and trains one step of it so many
times, each in a process of its own. What is measured, planned and compiled is remembered in folders that are new, so
that only the first start finds nothing. Prints, and writes with --json, the seconds of every start and of its parts as
`train` tells them, and what it says of measurements, plans and kernels. What a start reads from the disk is in memory,
as the checkpoint was just written; so is Python's bytecode, which installing a package makes, of all that a start
imports: a first process, which is not counted, imports it, and bytecode is written whatever the environment says.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.environment import write_json
from bench.plan_accuracy import write_config
from flexengine.run.first_start import COMPILING

TOTAL = re.compile(r"from the command to the end of the first step: ([\d.]+) s \((.*)\)")
PART = re.compile(r"([a-z ]+) ([\d.]+)(?:, |$)")
TOLD = ("measured the ", "the plan ", "kernels were compiled")
IMPORTED = "import flexengine.run.trainer, flexengine.hardware.measure.gpu, torch._dynamo"
STARTS = 3


def write_model(preset: str, folder: Path) -> None:
    """Write a checkpoint of a preset's shape."""
    from transformers import AutoConfig  # noqa: PLC0415 (takes seconds, and nothing else needs them)

    from bench.peer_packages import write_checkpoint  # noqa: PLC0415

    folder.mkdir()
    write_config(preset, None, folder)
    config = AutoConfig.from_pretrained(folder)
    (folder / "config.json").unlink()
    write_checkpoint(config, folder)


def environment(caches: Path) -> dict[str, str]:
    """Of a start: folders of its own, and Python's bytecode in one where the environment names none."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    folders = {"FLEXENGINE_CACHE": "flexengine", "TRITON_CACHE_DIR": "triton"}
    bytecode = {"PYTHONPYCACHEPREFIX": str(caches / "bytecode")} if len(kept) < len(os.environ) else {}
    return {**bytecode, **kept, **{name: str(caches / folder) for name, folder in folders.items()}}


def start(model: Path | str, flags: list[str], caches: Path, number: int) -> dict:
    """Train one step; gives the seconds of the start and of its parts, and what was told. Raises: RuntimeError."""
    command = [
        *(sys.executable, "-m", "flexengine", "train", f"--model={model}", "--data-source=synthetic", "--steps=1"),
        *(f"--output-dir={caches / f'run{number}'}", *flags),
    ]
    run = subprocess.run(command, check=False, capture_output=True, text=True, env=environment(caches))
    said = (run.stdout + run.stderr).splitlines()
    found = [match for line in said if (match := TOTAL.search(line))]
    if run.returncode or not found:
        raise RuntimeError(f"{shlex.join(command)} ended with {run.returncode}:\n" + "\n".join(said[-20:]))
    parts = {name.strip(): float(seconds) for name, seconds in PART.findall(found[0][2])}
    return {"total_s": float(found[0][1]), "parts_s": parts, "told": [x for x in said if x.startswith(TOLD)]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--preset", default="llama-3.1-8b", help="whose shape the checkpoint has, of models with a head of its own"
    )
    parser.add_argument("--model", help="a checkpoint that is there, in place of a written one")
    parser.add_argument(
        "--flags",
        default="--mode=lora --max-seq-len=2048 --max-global-batch-tokens=16384 --max-gpu-mem-gib=24",
        help="of train, in one text",
    )
    parser.add_argument("--starts", type=int, default=STARTS)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or Path(folder) / "model"
        if args.model is None:
            write_model(args.preset, Path(model))
        for program in (["-c", IMPORTED], ["-m", "flexengine.kernels.ahead", *COMPILING]):
            subprocess.run(
                [sys.executable, *program], check=True, stdin=subprocess.DEVNULL, env=environment(Path(folder))
            )
        starts = []
        for number in range(1, args.starts + 1):
            starts.append(start(model, shlex.split(args.flags), Path(folder), number))
            parts = ", ".join(f"{name} {seconds:g}" for name, seconds in starts[-1]["parts_s"].items())
            print(
                f"start {number}: {starts[-1]['total_s']:.1f} s ({parts})", *starts[-1]["told"], sep="\n  ", flush=True
            )
    if args.json:
        write_json(args.json, {"model": args.model or args.preset, "flags": args.flags, "starts": starts})
    return 0


if __name__ == "__main__":
    sys.exit(main())
