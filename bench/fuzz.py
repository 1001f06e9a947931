"""Do damaged inputs end in a message? Runs seeded cases and writes what came of them as JSON.

python -m bench.fuzz --cases 10000 --json out.json
"""

from __future__ import annotations

import argparse
import contextlib
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from bench.environment import write_json
from bench.fuzz_cases import Damaged, Originals, damage
from flexengine.checkpoint.reader import CheckpointReader
from flexengine.hardware.presets import preset
from flexengine.models.registry import ModelSource, open_model
from flexengine.plan import Numerics, Request
from flexengine.planner.search import make_plan
from flexengine.runtime.weight_store import check_checkpoint

ALLOWED = (ValueError, OSError)
"""What bad input may raise; PlanError and CheckpointError are ValueErrors."""
CASE_LIMIT_S = 20.0
"""A case that takes longer hangs."""
MOST_GROWTH_BYTES = 256 * 2**20
"""More than this on top of the resident set at the start is an allocation that a file talked us into."""
MAX_LINES, MAX_LINE_CHARACTERS = 24, 1500
PLANNED_SHARE = 0.05
"""Of the configs that are accepted, these are also planned for; planning takes half a second."""
PLANNED_PARAMETERS = 10**9
GIB = 2**30


class Result(NamedTuple):
    """What came of a case: "accepted", or the name of the error; the message; seconds; a complaint, or ""."""

    seed: int
    kind: str
    how: str
    outcome: str
    message: str
    seconds: float
    complaint: str


class Hang(BaseException):
    """Raised by the alarm; no handler of errors catches it."""


@contextlib.contextmanager
def alarm(limit_s: float) -> Iterator[None]:
    """Raise Hang in the block after limit_s seconds."""

    def ring(*_: object) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def use(case: Damaged, seed: int) -> None:
    """What a run does with a model folder before it takes memory: describe, check headers, and for some, plan."""
    source = open_model(case.folder)
    planned = case.kind == "config" and seed % int(1 / PLANNED_SHARE) == 0
    if planned and source.spec.num_parameters < PLANNED_PARAMETERS:
        plan(source)
    check_checkpoint(source.spec, case.folder)
    read_something(case.folder)


def plan(source: ModelSource) -> None:
    numerics = Numerics("float32", "full", "float32", "float32")
    make_plan(source.spec, Request(16, 32, GIB, 2 * GIB, numerics=numerics), preset("cpu-test"))


def read_something(folder: Path) -> None:
    """A checkpoint that was accepted can be read."""
    with CheckpointReader.open(folder) as reader:
        for name, entry in list(reader.tensors.items())[:3]:
            reader.read_into(name, torch.empty(entry.shape, dtype=entry.dtype))


def run_case(seed: int, originals: Originals, folder: Path) -> Result:
    """Damage, use, and judge what came of it. `folder` is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case = damage(seed, originals, folder)
    start = time.perf_counter()
    outcome, message, complaint = "accepted", "", ""
    try:
        with alarm(CASE_LIMIT_S):
            use(case, seed)
    except ALLOWED as error:
        outcome, message = type(error).__name__, str(error)
        complaint = complaint_about(message)
    except Hang:
        outcome, complaint = "hang", f"longer than {CASE_LIMIT_S} s"
    except Exception as error:
        outcome, complaint = type(error).__name__, f"crash without a message for people: {error!r:.200}"
    return Result(seed, case.kind, case.how, outcome, message, time.perf_counter() - start, complaint)


def complaint_about(message: str) -> str:
    """What is wrong with a message, "" when nothing is."""
    lines = message.splitlines()
    if not message.strip():
        return "an empty message"
    if len(lines) >= MAX_LINES or max(map(len, lines)) > MAX_LINE_CHARACTERS:
        return f"a message of {len(lines)} lines, the longest of {max(map(len, lines))} characters"
    return "a traceback in the message" if "Traceback" in message else ""


def run_cases(first_seed: int, num_cases: int) -> tuple[list[Result], int]:
    """Results of consecutive seeds, and by how many bytes the peak of the resident set grew over that at the start."""
    with tempfile.TemporaryDirectory() as name:
        originals = Originals(Path(name) / "originals")
        run_case(first_seed, originals, Path(name) / "case")  # what is imported and cached once
        plan(open_model(originals.single))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        results = [run_case(seed, originals, Path(name) / "case") for seed in range(first_seed, first_seed + num_cases)]
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return results, growth * 1024


def template(message: str) -> str:
    """A message without what differs from file to file: numbers, quotations, paths."""
    text = re.sub(r"'(?:[^'\\]|\\.)*'", "'_'", message)
    text = re.sub(r"/\S+", "PATH", text)
    text = re.sub(r"[=:] ?[-\w.+]+ in ", "=_ in ", text)
    return re.sub(r"-?\d[\d.e+]*", "N", text)


def summary(results: list[Result], growth_bytes: int) -> dict[str, object]:
    """The figures of a run."""
    slowest = max(results, key=lambda r: r.seconds)
    complaints = [
        {"seed": r.seed, "how": r.how, "outcome": r.outcome, "why": r.complaint} for r in results if r.complaint
    ]
    return {
        "cases": len(results),
        "kinds": dict(Counter(r.kind for r in results)),
        "outcomes": dict(Counter(r.outcome for r in results)),
        "distinct_messages": len({template(r.message) for r in results if r.message}),
        "longest_message_lines": max(len(r.message.splitlines()) for r in results),
        "seconds": round(sum(r.seconds for r in results), 1),
        "slowest": {"seed": slowest.seed, "how": slowest.how, "seconds": round(slowest.seconds, 3)},
        "peak_resident_growth_bytes": growth_bytes,
        "complaints": complaints[:50],
        "num_complaints": len(complaints),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000, help="how many (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--json", metavar="OUT.json", help="also write the figures to a file")
    arguments = parser.parse_args()
    found = summary(*run_cases(arguments.seed, arguments.cases))
    for name, value in found.items():
        print(f"{name}: {value}")
    write_json(arguments.json, found)
    growth = int(str(found["peak_resident_growth_bytes"]))
    return 1 if found["num_complaints"] or growth > MOST_GROWTH_BYTES else 0


if __name__ == "__main__":
    sys.exit(main())
