"""Do damaged inputs end in a message? Runs seeded cases and writes what came of them as JSON.

python -m bench.fuzz --cases 10000 --json out.json

Every case runs in a worker process under a limit of address space, and is watched from outside: a case that kills its
worker, hangs, or takes memory that no model of this size needs is a complaint, as is an error without a message that
names the file and says what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import multiprocessing
import re
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import torch

from bench.environment import write_json
from bench.fuzz_cases import Damaged, Originals, damage
from flexengine import from_pretrained
from flexengine.hardware.presets import preset
from flexengine.models.registry import open_model
from flexengine.options.job import Job
from flexengine.plan import PlanError
from flexengine.planner.planner import make_plan
from flexengine.request import make_request
from flexengine.runtime.weights.weight_store import check_checkpoint

MIB, GIB = 2**20, 2**30
ALLOWED = (ValueError, OSError)
"""What bad input may raise; PlanError and CheckpointError are ValueErrors."""
CASE_LIMIT_S = 120.0
"""A case that takes longer hangs: the longest plans for 1024 layers, some seconds."""
MOST_GROWTH_BYTES = 64 * MIB
"""More than this on top of the resident set before the case is an allocation that a file talked us into: headers here
have up to 2 MB, and the model and all that is trained of it less than 1 MB."""
ADDRESS_SPACE_BYTES = 2 * GIB
"""A worker may map so much more than after its start (a thread's stack and heap alone are 72 MiB)."""
MAX_LINES, MAX_LINE_CHARACTERS = 24, 1500
REMEDY = re.compile(r"fetch|give|correct|convert|finish|export|fits with|no single change|supported", re.IGNORECASE)
TRAINED_SHARE, PLANNED_SHARE = 4, 8
"""Of the inputs that are accepted one in 4 is trained for a step, and of the configs one in 8 planned for without its
weights: planning takes half a second."""
SHAPE = {"max_seq_len": 16, "max_global_batch_tokens": 32, "dtype": "float32"}
BUDGETS = {"max_gpu_mem_gib": 1.0, "max_host_mem_gib": 2.0}


class Result(NamedTuple):
    """What came of a case: what was damaged and how, "accepted" or the name of the error, the message, seconds, growth
    of the resident set at its peak, and a complaint, or ""."""

    seed: int
    kind: str
    how: str
    outcome: str
    message: str = ""
    seconds: float = 0.0
    growth_bytes: int = 0
    complaint: str = ""


# ---- one case, in the worker ------------------------------------------------------------------------------------


def use(case: Damaged, seed: int) -> None:
    """What `plan` and `train` do with a model folder: describe, check headers; for some, plan, load and take a step."""
    spec = open_model(case.folder).spec
    if case.kind == "config" and seed % PLANNED_SHARE == 0:
        profile = preset("cpu-test")
        make_plan(spec, make_request(Job(**SHAPE, **BUDGETS), profile, "cpu"), profile)
    check_checkpoint(spec, case.folder)  # what `prepare` does next
    if seed % TRAINED_SHARE == 0:
        with contextlib.closing(
            from_pretrained(case.folder, device="cpu", hardware="cpu-test", **SHAPE, **BUDGETS)
        ) as e:
            e.fwd_bwd([[1, 2, 3]])
            e.step()


def run_case(seed: int, originals: Originals, folder: Path) -> Result:
    """Damage, use, and judge what came of it. `folder` is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    case = damage(seed, originals, folder)
    before, start, start_bytes = files_of(folder), time.perf_counter(), resident_from_here()
    outcome, message, complaint = "accepted", "", ""
    try:
        use(case, seed)
    except ALLOWED as error:
        outcome, message = type(error).__name__, str(error)
        complaint = complaint_about(message, case.folder, isinstance(error, PlanError))
    except (Exception, MemoryError) as error:
        outcome, complaint = type(error).__name__, f"crash without a message for people: {error!r:.200}"
    seconds, growth = time.perf_counter() - start, max(0, peak_resident_bytes() - start_bytes)
    if not complaint and growth > MOST_GROWTH_BYTES:
        complaint = f"took {growth} bytes of memory"
    if not complaint and files_of(folder) != before:
        complaint = "files of the model have changed"
    return Result(seed, case.kind, case.how, outcome, message, seconds, growth, complaint)


def files_of(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and time of the last change of every file."""
    return {path.name: (path.stat().st_size, path.stat().st_mtime_ns) for path in folder.iterdir()}


def complaint_about(message: str, folder: Path, is_plan: bool) -> str:
    """What is wrong with a message, "" when nothing is."""
    lines = message.splitlines()
    if not message.strip():
        return "an empty message"
    if len(lines) >= MAX_LINES or max(map(len, lines)) > MAX_LINE_CHARACTERS:
        return f"a message of {len(lines)} lines, the longest of {max(map(len, lines))} characters"
    if not is_plan and not message.startswith((str(folder), f"{folder.name}:")):
        return f"a message that names no file: {message:.200}"
    if not REMEDY.search(message):
        return f"a message without a remedy: {message:.200}"
    return "a traceback in the message" if "Traceback" in message else ""


def status_bytes(name: str) -> int:
    """A line of /proc/self/status, such as VmRSS."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) * 1024


def resident_from_here() -> int:
    """The resident set in bytes; where Linux allows it, its peak is counted from here on."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak_resident_bytes() -> int:
    """Largest resident set since `resident_from_here`, or since the start of the process."""
    return status_bytes("VmHWM")


def work(results: Connection, seeds: Sequence[int]) -> None:
    """A worker: says that it is ready, then sends one Result a seed."""
    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as name:
        originals = Originals(Path(name) / "originals")
        use(Damaged(originals.single, "config", "not at all"), 0)  # what is imported, started and cached once
        limit = status_bytes("VmSize") + ADDRESS_SPACE_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        results.send("ready")
        for seed in seeds:
            results.send(run_case(seed, originals, Path(name) / "case"))


# ---- many cases, from outside -----------------------------------------------------------------------------------


def run_cases(seeds: Sequence[int], num_workers: int = 1, limit_s: float = CASE_LIMIT_S) -> list[Result]:
    """Results of all seeds, in order of seeds."""
    shares = [seeds[i::num_workers] for i in range(num_workers)]
    with ThreadPoolExecutor(num_workers) as pool:
        found = pool.map(lambda share: list(watched(share, limit_s)), shares)
        return sorted((result for share in found for result in share), key=lambda result: result.seed)


def watched(seeds: Sequence[int], limit_s: float) -> Iterator[Result]:
    """Results of workers one after another: where one hangs or dies, the next begins with the case after."""
    done = 0
    while done < len(seeds):
        for result in of_one_worker(seeds[done:], limit_s):
            done += 1
            yield result


def of_one_worker(seeds: Sequence[int], limit_s: float) -> Iterator[Result]:
    """Results of one process; the last one tells of its end where that came early."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(sender, seeds), daemon=True)
    process.start()
    sender.close()
    try:
        if not receiver.poll(limit_s) or receiver.recv() != "ready":
            raise RuntimeError("a worker began without being ready")
        for seed in seeds:
            result = received(receiver, seed, limit_s)
            yield result
            if result.kind == "?":
                return
    finally:
        process.kill()
        process.join()
        receiver.close()


def received(receiver: Connection, seed: int, limit_s: float) -> Result:
    """The next result of a worker, or one of kind "?" when none comes."""
    if not receiver.poll(limit_s):
        return Result(seed, "?", "?", "hang", complaint=f"longer than {limit_s} s")
    try:
        return receiver.recv()
    except (EOFError, ConnectionError):
        return Result(seed, "?", "?", "death of the process", complaint="the process died")


# ---- figures ----------------------------------------------------------------------------------------------------


def template(message: str) -> str:
    """A message without what differs from file to file: numbers, quotations, paths."""
    text = re.sub(r"'(?:[^'\\]|\\.)*'", "'_'", message)
    text = re.sub(r"/\S+", "PATH", text)
    text = re.sub(r"(found|[=:]) ?[\[{(].*?[\]})]+(?=[;, ]|$)", "_", text)
    text = re.sub(r"[=:] ?[-\w.+]+ in ", "=_ in ", text)
    return re.sub(r"-?\d[\d.e+]*", "N", text)


def summary(results: list[Result]) -> dict[str, object]:
    """The figures of a run."""
    slowest, largest = max(results, key=lambda r: r.seconds), max(results, key=lambda r: r.growth_bytes)
    complaints = [r for r in results if r.complaint]
    return {
        "cases": len(results),
        "kinds": dict(Counter(r.kind for r in results)),
        "outcomes": dict(Counter(r.outcome for r in results)),
        "crashes": sum(r.complaint.startswith(("crash", "the process")) for r in results),
        "hangs": sum(r.outcome == "hang" for r in results),
        "distinct_messages": len({template(r.message) for r in results if r.message}),
        "longest_message_lines": max(len(r.message.splitlines()) for r in results),
        "case_limit_s": CASE_LIMIT_S,
        "seconds": round(sum(r.seconds for r in results), 1),
        "slowest": {"seed": slowest.seed, "how": slowest.how, "seconds": round(slowest.seconds, 3)},
        "growth_limit_bytes": MOST_GROWTH_BYTES,
        "largest_growth": {"seed": largest.seed, "how": largest.how, "bytes": largest.growth_bytes},
        "num_complaints": len(complaints),
        "complaints": [
            {"seed": r.seed, "how": r.how, "outcome": r.outcome, "why": ascii(r.complaint)} for r in complaints[:50]
        ],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="how many (default: 10000)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: 0)")
    parser.add_argument("--workers", type=int, default=2, help="processes (default: 2)")
    parser.add_argument("--json", metavar="OUT.json", help="also write the figures to a file")
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.cases)
    found = summary(run_cases(seeds, arguments.workers))
    for name, value in found.items():
        print(f"{name}: {value}")
    write_json(arguments.json, found)
    return 1 if found["num_complaints"] else 0


if __name__ == "__main__":
    sys.exit(main())
