"""`flexengine doctor`: what this machine lacks for training, one line each with the remedy. It never asks anything."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from flexengine.wording import FlagParser


def main(argv: Sequence[str]) -> int:
    """Print the findings; returns the exit status, which is 0 also where something is missing.

    Of ranks that torchrun starts the first one of each node looks and prints.
    """
    arguments = _parser().parse_args(argv)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return 0
    from flexengine.hardware.doctor import findings  # noqa: PLC0415, loads torch

    found = findings(Path.cwd(), arguments.offload_dir)
    width = max(len(finding.name) for finding in found)
    for finding in found:
        mark, remedy = ("!", f"; {finding.remedy}") if finding.remedy else (" ", "")
        print(f"{mark} {finding.name:<{width}}  {finding.found}{remedy}")
    return 0


def _parser() -> FlagParser:
    parser = FlagParser(
        prog="flexengine doctor",
        description="Says what this machine has and lacks: versions, GPU, driver and what holds its clocks"
        " down, native library, memory and its limits, page locks, huge pages, disk; of several GPUs, how they reach"
        " each other; under torchrun, whether nodes know each other. Lines with ! tell what to do.",
    )
    help_text = "look at the drive of this folder, too: file system, free bytes, whether it goes past the page cache"
    parser.add_argument("--offload-dir", metavar="DIR", type=Path, help=help_text)
    return parser
