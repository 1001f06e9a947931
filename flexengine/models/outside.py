"""Families from outside of the package: Python files and installed packages that call `register_family`."""

from __future__ import annotations

import os
import runpy
from importlib.metadata import entry_points
from pathlib import Path

GROUP = "flexengine.families"
"""Entry points of installed packages: functions without arguments, or modules, that register families."""
FILES = "FLEXENGINE_FAMILIES"
"""Environment variable with Python files that register families, separated as in PATH."""

_loaded: set[str] = set()


def load_families() -> None:
    """Run, once in a process, the files and entry points that register families.

    Raises: ValueError naming the file or the entry point for one that is not there or fails.
    """
    for text in filter(None, os.environ.get(FILES, "").split(os.pathsep)):
        if text not in _loaded:
            _loaded.add(text)  # first: what it runs may describe a model itself
            _run(f"{FILES}={text}", text)
    for point in entry_points(group=GROUP):
        if point.value not in _loaded:
            _loaded.add(point.value)
            try:
                found = point.load()
                if callable(found):
                    found()
            except Exception as error:
                raise _failed(f"the entry point {point.name} = {point.value} of {GROUP}", error) from error


def _run(what: str, file: str) -> None:
    if not Path(file).is_file():
        raise ValueError(f"{what}: no such file; give the Python file that calls flexengine.register_family")
    try:
        runpy.run_path(file, run_name=Path(file).stem)
    except Exception as error:  # whatever a stranger's file raises
        raise _failed(what, error) from error


def _failed(what: str, error: Exception) -> ValueError:
    return ValueError(f"{what} failed, so its families are unknown: {type(error).__name__}: {error}")
