"""Does each input that was made to do harm end soon, in one message? Runs them all and writes JSON.

    python -m bench.malicious_inputs --json out.json

Every case is a command line of its own, watched from outside: wall seconds, the largest resident set of it and its
children together, its exit status and what it wrote. It is run once more and interrupted (SIGINT) halfway, and must be
gone 2 s later. Code out of an input must not have run. A case that is accepted ends with status 0.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.environment import write_json
from bench.malicious_cases import CASES, MARKER, original

MOST_SECONDS, MOST_BYTES, MOST_AFTER_INTERRUPT_S = 20.0, 2**31, 2.0
GIVEN_UP_S = 120.0
MOST_LINES, MOST_CHARACTERS = 24, 6000
LOOK_S = 0.02


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    seconds: float
    peak_bytes: int
    errors: str
    after_interrupt_s: float | None


class Result(NamedTuple):
    """What came of a case; complaint is empty where nothing is wrong."""

    name: str
    status: int
    seconds: float
    peak_bytes: int
    message: str
    after_interrupt_s: float | None
    complaint: str


def family_of(pid: int) -> Iterator[int]:
    """The process and those below it."""
    yield pid
    with contextlib.suppress(OSError):
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in children.read_text(encoding="ascii").split():
                yield from family_of(int(child))


def resident_bytes(pid: int) -> int:
    """Resident memory of a process that it does not share with the one it was forked from, and of its children."""
    pages = 0
    for member in family_of(pid):
        with contextlib.suppress(OSError, ValueError):
            _, resident, shared, *_ = Path(f"/proc/{member}/statm").read_text(encoding="ascii").split()
            pages += int(resident) - (int(shared) if member != pid else 0)
    return pages * os.sysconf("SC_PAGE_SIZE")


def run(arguments: list[str], folder: Path, interrupt_after_s: float | None = None) -> Ended:
    """Run a command to its end, or kill it after GIVEN_UP_S."""
    environment = {**os.environ, "FLEXENGINE_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    with (folder / "errors").open("w+b") as errors:
        start_s = time.monotonic()
        command = [sys.executable, "-m", "flexengine", *arguments]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=environment, cwd=folder,
            start_new_session=True,
        )  # fmt: skip
        peak_bytes, interrupted_s = 0, None
        while process.poll() is None:
            peak_bytes, now_s = max(peak_bytes, resident_bytes(process.pid)), time.monotonic()
            if interrupt_after_s is not None and interrupted_s is None and now_s - start_s > interrupt_after_s:
                process.send_signal(signal.SIGINT)
                interrupted_s = now_s
            if now_s - start_s > GIVEN_UP_S:
                os.killpg(process.pid, signal.SIGKILL)
            time.sleep(LOOK_S)
        end_s = time.monotonic()
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    after_s = None if interrupted_s is None else end_s - interrupted_s
    return Ended(process.returncode, end_s - start_s, peak_bytes, text, after_s)


def complaint_about(ended: Ended, folder: Path) -> str:
    """What is wrong with how a command ended, the worst first; empty where nothing is."""
    size = f"{len(ended.errors.splitlines())} lines, {len(ended.errors)} characters"
    faults = {
        "ran code out of the input": (folder / MARKER).exists(),
        f"took {ended.seconds:.0f} s": ended.seconds > MOST_SECONDS,
        f"took {ended.peak_bytes / 2**30:.2f} GiB": ended.peak_bytes > MOST_BYTES,
        f"status {ended.status}: {ended.errors[-300:]}": ended.status < 0 or "Traceback" in ended.errors,
        "no message": ended.status != 0 and not ended.errors.strip(),
        f"a message of {size}": len(ended.errors) > MOST_CHARACTERS or len(ended.errors.splitlines()) > MOST_LINES,
    }
    return next((fault for fault, is_so in faults.items() if is_so), "")


def run_case(name: str, base: Path, with_interrupt: bool) -> Result:
    """Run one case in a folder of its own, which is removed."""
    with tempfile.TemporaryDirectory(prefix="malicious-") as text:
        folder = Path(text)
        shutil.copytree(base, folder / "model")
        arguments = CASES[name](folder)
        ended = run(arguments, folder)
        complaint, after_s = complaint_about(ended, folder), None
        if with_interrupt:
            shutil.rmtree(folder / "cache", ignore_errors=True)
            after_s = run(arguments, folder, ended.seconds / 2).after_interrupt_s
            if not complaint and after_s is not None and after_s > MOST_AFTER_INTERRUPT_S:
                complaint = f"went on for {after_s:.1f} s after an interrupt"
    message = ended.errors.replace(str(folder), "DIR").strip()
    return Result(name, ended.status, round(ended.seconds, 2), ended.peak_bytes, message[:600], after_s, complaint)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", help="cases whose names contain one of these")
    parser.add_argument("--no-interrupts", action="store_true", help="run every case once")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    names = [name for name in CASES if not arguments.only or any(part in name for part in arguments.only)]
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="malicious-") as text:
        base = Path(text) / "original"
        original(base)
        for name in names:
            results.append(run_case(name, base, not arguments.no_interrupts))
            print(
                f"{name:45s} {results[-1].status:4d} {results[-1].seconds:6.1f} s {results[-1].peak_bytes / 2**20:6.0f}"
                f" MiB  {results[-1].complaint or results[-1].message[:150]!r}",
                flush=True,
            )
    complaints = [result for result in results if result.complaint]
    print(f"{len(results)} inputs, {len(complaints)} complaints")
    write_json(arguments.json, {"num_cases": len(results), "results": [result._asdict() for result in results]})


if __name__ == "__main__":
    main()
