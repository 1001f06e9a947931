"""Starts a script of bench/ once for each of several ranks of this machine, and brings back what each has found."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flexengine.parallel.team import Team

GIVE_UP_S = 280.0
SHOWN_CHARACTERS = 3000
"""Of what each rank has printed, where one has failed."""


class RanksFailedError(RuntimeError):
    """Ranks that have failed, with what all have printed. found: what each had written to its file by then."""

    def __init__(self, message: str, found: list[Any]) -> None:
        super().__init__(message)
        self.found = found


def run_ranks(
    module: str, flags: Sequence[str], count: int, give_up_s: float = GIVE_UP_S,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:  # fmt: skip
    """What each of `count` processes of `python -m module flags --out FILE` writes to its file.

    Raises: RanksFailedError when one fails or goes on for longer than give_up_s.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, port = Path(name), free_port()
        running = []
        for rank in range(count):
            told = {**os.environ, **environment_of(rank, count, port), **(environment or {})}
            command = [sys.executable, "-m", module, *flags, "--out", f"{folder}/{rank}.json"]
            with (folder / f"{rank}.log").open("w") as log:
                running.append(subprocess.Popen(command, env=told, stdout=log, stderr=log))
        return _outcomes(running, folder, time.monotonic() + give_up_s)


def free_port() -> int:
    """A port that nobody listens at."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment_of(rank: int, count: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank of one node."""
    numbers = {"RANK": rank, "WORLD_SIZE": count, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": count, "MASTER_PORT": port}
    return {name: str(number) for name, number in numbers.items()} | {"MASTER_ADDR": "127.0.0.1"}


def _outcomes(running: list[subprocess.Popen[bytes]], folder: Path, end_s: float) -> list[dict[str, Any]]:
    try:
        while any(process.poll() is None for process in running) and time.monotonic() < end_s:
            if any(process.poll() for process in running):
                end_s = min(end_s, time.monotonic() + 10)  # the others of a failed one
            time.sleep(0.05)
    finally:
        for process in running:
            process.kill()
            process.wait()
    files = [folder / f"{rank}.json" for rank in range(len(running))]
    found: list[Any] = [json.loads(file.read_text()) if file.exists() else None for file in files]
    if any(process.returncode for process in running):
        statuses = ", ".join(str(process.returncode) for process in running)
        text = "\n".join(path.read_text()[-SHOWN_CHARACTERS:] for path in sorted(folder.glob("*.log")))
        raise RanksFailedError(f"ranks ended with status {statuses} (negative: killed by that signal):\n{text}", found)
    return found


def save(path: Path, found: dict[str, Any]) -> None:
    """Write what a rank has found, whole or not at all."""
    beside = path.with_suffix(".tmp")
    beside.write_text(json.dumps(found))
    beside.replace(path)


def required(team: Team | None) -> Team:
    """The team of several ranks."""
    assert team is not None, "one rank has no others"
    return team


def told(values: dict[str, Any]) -> str:
    """Values in one line."""
    return ", ".join(
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in values.items()
    )
