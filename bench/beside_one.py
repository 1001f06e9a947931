"""What do all GPUs of a machine attain beside one of them? Its measurements in one call, one file each.

    python -m bench.beside_one --gpus 4 --only speed bits kill --total-s 560 --out results
    python -m bench.beside_one --gpus 4 --list

speed: llama-3.1-8b in full at 24 GiB a GPU, with 131072 to 8192 tokens a GPU; how many times one GPU's tokens a
second they train, and how far off its prediction each step is. bits: five deterministic steps of the same batch, whose
losses and weights have to be the same on 1, 2 and all GPUs. shards: the same model without a budget, with 4096 and
16384 tokens a GPU, beside FSDP2 with Liger's kernels. context: one sequence of 131072 tokens, cut over all GPUs, beside
one. kill: a rank that is killed at a random moment (`bench.kill_ranks`). experts: qwen3-30b-a3b in full, 70b:
llama-3.1-70b in full, where the host has room for them.

Each measurement is one or more commands, in processes of their own, that are told before they run. Every command has
a limit of its own, and --total-s ends the call; what a command wrote before is kept. One that failed is a row with its
last lines, and the others go on. The host's memory is shared evenly: --host-gib is that of a GPU. OMP_NUM_THREADS is
left out, which would bind the updates of one GPU and not those of ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import psutil

from bench.environment import rounded, write_json
from flexengine.native.threads import VARIABLE
from flexengine.reports.text_format import align_columns

DIGITS, LEAST_S, SAMPLE_S, LAST_LINES = 6, 15.0, 0.2, 12
FULL_8B = "--no-streams --preset llama-3.1-8b --seq-len 2048 --max-grad-norm 1000000"
SAME_ROUNDS = "--chunk-tokens 2048 --round-tokens 2048 --round-multiple {gpus} --deterministic --digest"
ONE_SEQUENCE = (
    "--no-streams --preset llama-3.1-8b --caps 24 --seq-len 131072 --tokens-per-step 131072 --chunk-tokens 4096 "
    "--round-tokens 131072 --round-multiple 1 --optimizer-state-dtype bfloat16 --deterministic --digest --warmup 1 "
    "--steps 1"
)
LEFT_OUT = ("busy_s", "predicted_busy_s", "freeze", "opaque", "limiter")


class Command(NamedTuple):
    """One command of a measurement.

    flags: of its module, in which {gpus} stands for the number of all GPUs, and {host} for their share of the host's
    memory in GiB. tokens: of a step and GPU, the first by --tokens-per-step, others by --also-tokens. ranks: "one",
    "two" or "all"; those of several are begun by torchrun, unless the module begins ranks itself.
    """

    ranks: str
    flags: str
    tokens: tuple[int, ...] = ()
    module: str = "bench.step"
    limit_s: float = 240.0

    def count(self, gpus: int) -> int:
        """How many GPUs it uses."""
        return {"one": 1, "two": 2, "all": gpus}[self.ranks]

    def line(self, gpus: int, host_gib: float, out: Path) -> list[str]:
        """What is run, with figures of a machine of so many GPUs and so many GiB of host memory a GPU."""
        count = self.count(gpus)
        text = self.flags.format(gpus=gpus, host=f"{count * host_gib:g}")
        if self.tokens:
            first, *others = (count * tokens for tokens in self.tokens)
            also = f" --also-tokens {' '.join(map(str, others))}" if others else ""
            text += f" --tokens-per-step {first}{also}"
        begun = ["-m", self.module, *shlex.split(text), "--json", str(out)]
        if count == 1 or self.module != "bench.step":
            return [sys.executable, *begun]
        launched = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
        return [sys.executable, "-m", *launched, *begun]


MEASUREMENTS: dict[str, tuple[Command, ...]] = {
    "speed": tuple(
        Command(
            ranks,
            f"{FULL_8B} --caps 24 --warmup 1 --steps 2 --host-gib {{host}}{transport}",
            (131072, 65536, 8192),
            limit_s=330.0,
        )
        for ranks, transport in (("one", ""), ("all", " --transport split"))
    ),
    "bits": tuple(
        Command(
            ranks,
            f"--no-streams --preset llama-3.2-1b --seq-len 1024 --caps 6 --max-grad-norm 1000000 --warmup 2 --steps 3 "
            f"--tokens-per-step 16384 {SAME_ROUNDS} --host-gib 40{transport}",
            limit_s=90.0,
        )
        for ranks, transport in (("one", ""), ("two", " --transport split"), ("all", " --transport split"))
    ),
    "shards": (
        Command("one", f"{FULL_8B} --caps none --warmup 2 --steps 5 --host-gib {{host}}", (4096, 16384)),
        Command("all", f"{FULL_8B} --caps none --warmup 2 --steps 5 --host-gib {{host}}", (4096, 16384)),
        *(
            Command(
                "all",
                f"--engines fsdp2 --ranks {{gpus}} --preset llama-3.1-8b --seq-len 2048 --tokens-per-step {tokens} "
                "--cap-gib inf --recompute off on --warmup 2 --steps 3 --limit-s 100",
                module="bench.peers",
                limit_s=110.0,
            )
            for tokens in (4096, 16384)
        ),
    ),
    "context": (
        Command("one", f"{ONE_SEQUENCE} --host-gib {{host}}", limit_s=300.0),
        Command("all", f"{ONE_SEQUENCE} --host-gib {{host}} --transport context"),
    ),
    "kill": (Command("all", "--gpus {gpus} --kills 1 --transport split", module="bench.kill_ranks"),),
    "experts": (
        Command(
            "all",
            "--no-streams --preset qwen3-30b-a3b --seq-len 2048 --caps 76 --warmup 1 --steps 2 --host-gib {host}",
            (16384,),
            limit_s=400.0,
        ),
    ),
    "70b": (
        Command(
            "all",
            "--no-streams --preset llama-3.1-70b --seq-len 2048 --caps 78 --warmup 1 --steps 2 --host-gib {host}",
            (16384,),
            limit_s=560.0,
        ),
    ),
}
"""By name, the commands of a measurement: what it is compared with first."""


def measure(
    commands: Iterable[Command], gpus: int, host_gib: float, ends_s: float,
    keep: Callable[[list[dict]], None] = lambda rows: None,
) -> list[dict]:  # fmt: skip
    """The rows of all commands, each with its command line; one that failed has its last lines. keep: is given the rows
    so far after every command, as the call may be ended from outside."""
    rows: list[dict] = []
    for command in commands:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "out.json"
            line = command.line(gpus, host_gib, out)
            asked = {"command": shlex.join(["python", *line[1:-1], "OUT.json"]), "gpus": command.count(gpus)}
            print(f"\n$ {asked['command']}", flush=True)
            failed = run(line, Path(folder) / "log", min(command.limit_s, ends_s - time.monotonic()))
            found = json.loads(out.read_text()) if out.exists() else {}
        new = [{k: v for k, v in row.items() if k not in LEFT_OUT} for row in rows_of(found)]
        rows += [{**asked, **row} for row in new]
        if failed:
            rows.append({**asked, "failed": failed})
        keep(rows)
    return rows


def write(path: Path, gpus: int, rows: list[dict]) -> None:
    """Write the rows of a measurement."""
    write_json(str(path), rounded({"gpus": gpus, "rows": rows}, DIGITS))


def rows_of(found: dict) -> list[dict]:
    """The rows of a file of results; of one without a list of them, its figures as one row."""
    if not found:
        return []
    return found.get("rows") or [{name: value for name, value in found.items() if name != "environment"}]


def run(line: list[str], log: Path, limit_s: float) -> str:
    """Run a command and print what it says; gives what went wrong: its last lines, or that it was stopped."""
    if limit_s < LEAST_S:
        return f"not started: {max(0.0, limit_s):.0f} s were left"
    ends_s = time.monotonic() + limit_s
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    with log.open("w") as written, log.open(encoding="utf-8", errors="replace") as read:
        process = subprocess.Popen(line, stdout=written, stderr=subprocess.STDOUT, env=environment)
        while process.poll() is None and time.monotonic() < ends_s:
            print(read.read(), end="", flush=True)
            time.sleep(SAMPLE_S)
        stopped = process.poll() is None
        if stopped:
            begun = psutil.Process(process.pid).children(recursive=True)  # ranks are sessions of their own
            process.kill()
            for each in begun:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        status = process.wait()
        print(read.read(), end="", flush=True)
    last = [f"stopped after {limit_s:.0f} s"] if stopped else []
    last += log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    return "\n".join(last) if status else ""


def told(rows: Sequence[dict]) -> list[str]:
    """A table: of every row its tokens a second, what they are of so many times one GPU's, and its prediction's error;
    rows that have a digest are equal to the first that has one, or not."""
    head = ("GPUs", "tokens/GPU", "tokens/s", "of one", "step s", "predicted", "GPU GiB", "host GiB", "weights", "")
    first = next((row for row in rows if row.get("weights_digest")), None)
    ones = {row["tokens_per_step"]: row for row in rows if row["gpus"] == 1 and "tokens_per_step" in row}
    lines: list[tuple[str, ...]] = [head]
    for row in rows:
        gpus, tokens = row["gpus"], row.get("tokens_per_step") or row.get("tokens")
        if "failed" in row or not tokens:
            lines.append((str(gpus), *["-"] * 8, row.get("failed", "done").splitlines()[-1][:80]))
            continue
        each = tokens // gpus if "tokens_per_step" in row else tokens
        alone = next((ones[n] for n in (each, tokens) if n in ones), None)  # of one sequence, all tokens are shared
        same = _same(row, first) if first and row.get("weights_digest") else "-"
        lines.append(
            (
                str(gpus),
                str(each),
                f"{row['tokens_per_s']:.0f}",
                f"{row['tokens_per_s'] / alone['tokens_per_s']:.2f}x" if alone else "-",
                f"{row['step_s']:.3f}",
                f"{row['predicted_step_s']:.3f}" if "predicted_step_s" in row else "-",
                f"{row.get('gpu_peak_gib') or 0:.2f}",
                f"{row.get('host_peak_gib') or row.get('host_system_gib') or 0:.1f}",
                same,
                row.get("engine", ""),
            )
        )
    return align_columns(lines)


def _same(row: dict, first: dict) -> str:
    same = (row["weights_digest"], row["losses"]) == (first["weights_digest"], first["losses"])
    return "the same" if same else "OTHERS"


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, required=True, help="all GPUs of the machine")
    parser.add_argument("--only", nargs="+", choices=tuple(MEASUREMENTS), default=list(MEASUREMENTS))
    parser.add_argument("--host-gib", type=float, default=110.0, help="host memory of a GPU")
    parser.add_argument("--total-s", type=float, default=math.inf, help="end the call after so many seconds")
    parser.add_argument("--list", action="store_true", help="tell the commands and run none")
    parser.add_argument("--out", type=Path, default=Path(), help="folder of the files, one for each measurement")
    return parser.parse_args(argv)


def main() -> int:
    args = parse()
    ends_s = time.monotonic() + args.total_s
    failed = False
    for name in args.only:
        if args.list:
            lines = (c.line(args.gpus, args.host_gib, Path("OUT.json")) for c in MEASUREMENTS[name])
            print(f"{name}:", *(f"  {shlex.join(['python', *line[1:]])}" for line in lines), sep="\n")
            continue
        path = args.out / f"{name}.json"
        rows = measure(MEASUREMENTS[name], args.gpus, args.host_gib, ends_s, partial(write, path, args.gpus))
        print(f"\n{name}:", *told(rows), sep="\n", flush=True)
        failed = failed or any("failed" in row for row in rows)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
