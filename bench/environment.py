"""What a result was measured with: machine, versions, commit, command. Every script in bench/ writes it beside its
figures.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str:
    """The commit measured: $FLEXENGINE_COMMIT where the checkout has no history, else git's HEAD (+ when changed)."""
    if "FLEXENGINE_COMMIT" in os.environ:
        return os.environ["FLEXENGINE_COMMIT"]
    root = Path(__file__).resolve().parent.parent
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True).stdout
        dirty = subprocess.run(["git", "status", "--porcelain"], cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("+" if dirty.stdout.strip() else "")


def _command() -> str:
    """The command line from the repository's root; the output file is left out, and folders that paths begin with."""
    arguments = list(sys.argv[1:])
    if "--json" in arguments:
        at = arguments.index("--json")
        arguments[at : at + 2] = ["--json", "OUT.json"]
    arguments = [re.sub(r"(^|=)/(\S*/)?", r"\1", text) for text in arguments]
    return " ".join(["python -m", f"bench.{Path(sys.argv[0]).stem}", *arguments])


def describe_environment() -> dict:
    """Machine, versions, commit and command line as a JSON-ready dict."""
    from flexengine.hardware.probe import cpu_name  # noqa: PLC0415 (processes that only start others stay small)
    from flexengine.native.library import load  # noqa: PLC0415

    cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name() if cuda else None,
        "cpu": cpu_name(),
        "cpu_count": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": _version("triton"),
        "native_code": load() is not None,
        "commit": _commit(),
        "command": _command(),
    }


def require_gpu(script: str) -> None:
    """Ends a script that measures an NVIDIA GPU where there is none, with a message and status 1."""
    if not torch.cuda.is_available():
        raise SystemExit(
            f"{script} measures an NVIDIA GPU, but torch {torch.__version__} finds none here: run it on a machine with "
            "one, with a CUDA build of torch and its driver"
        )


def require_native_code(script: str) -> None:
    """Ends a script that measures training on a GPU where the native library is missing, with status 1.

    Steps would take several times as long as planned. FLEXENGINE_NATIVE=0 says that this is wanted.
    """
    from flexengine.native.library import DISABLING_VARIABLE, load  # noqa: PLC0415 (as above)

    if torch.cuda.is_available() and load() is None and os.environ.get(DISABLING_VARIABLE, "1") != "0":
        raise SystemExit(
            f"{script} measures training with native code, and the library is not built here: `pip install -e .` with "
            f"a C++ compiler builds it; {DISABLING_VARIABLE}=0 measures without"
        )


def rounded(value: Any, digits: int) -> Any:
    """Numbers of a result, at any depth, to so many digits."""
    if isinstance(value, dict):
        return {name: rounded(each, digits) for name, each in value.items()}
    if isinstance(value, list):
        return [rounded(each, digits) for each in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value


def write_json(path: str | None, results: dict) -> None:
    """Write `results` with the environment to a file, if one is named."""
    if path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(in_rows({"environment": describe_environment(), **results}))


def in_rows(results: dict) -> str:
    """Results as JSON with a line for every row: for every entry of a list, or of a dict that holds lists or dicts."""
    blocks = []
    for name, value in results.items():
        entries: list[str] = []
        if isinstance(value, list):
            entries = [_compact(each) for each in value]
        elif isinstance(value, dict) and any(isinstance(each, list | dict) for each in value.values()):
            entries = [f"{json.dumps(key)}: {_compact(each)}" for key, each in value.items()]
        ends = "[]" if isinstance(value, list) else "{}"
        rows = ",\n  ".join(entries)
        blocks.append(f"{json.dumps(name)}: " + (f"{ends[0]}\n  {rows}\n {ends[1]}" if entries else json.dumps(value)))
    return "{\n " + ",\n ".join(blocks) + "\n}\n"


def _compact(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))
