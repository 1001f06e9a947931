"""Rewards of completions: Python functions of a person's own, each in a process with bounds of time and memory.

A function is named `file.py:function` and called with keywords: prompts, completions, completion_ids, and every column
of the records, each a list with an entry for every completion, as far as it takes them. A conversation as prompt has
its completion as a list of one message, a text has a text. It returns a number for each, or None for none.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexengine.checkpoint.bounded_process import BoundedProcess, report_alive
from flexengine.wording import shown

IMPORT_S = 60.0
"""CPU seconds that a file of rewards may take to import what it needs."""


class Rewards:
    """Reward functions by name, each with a weight and a process. A call that takes longer than timeout_s fails."""

    def __init__(self, names: Sequence[str], weights: Sequence[float], timeout_s: float) -> None:
        """Import the functions. Order: before memory is page-locked. Raises: ValueError naming what is wrong."""
        self.names, self._weights = names, torch.tensor(weights or [1.0] * len(names), dtype=torch.float64)
        self._processes = [_process(name, timeout_s) for name in names]

    def of(self, columns: Mapping[str, Sequence[Any]]) -> Tensor:
        """Rewards [completions, functions] in float64, NaN for none. Functions run side by side.

        Raises: ValueError naming the function and what it did.
        """
        with ThreadPoolExecutor(len(self._processes)) as pool:
            found = list(pool.map(lambda process: process.call("reward", columns), self._processes))
        numbers = [[math.nan if value is None else value for value in row] for row in found]
        return torch.tensor(numbers, dtype=torch.float64).T

    def total(self, rewards: Tensor) -> Tensor:
        """The weighted sum of the functions' rewards for each completion; none counts as 0."""
        return (rewards * self._weights).nansum(1)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.close()


def _process(name: str, timeout_s: float) -> BoundedProcess:
    path, colon, function = name.rpartition(":")
    if not (colon and function.isidentifier() and path.endswith(".py")):
        raise ValueError(f"--rewards {name}: write file.py:function")
    if not Path(path).is_file():
        raise ValueError(f"--rewards {name}: there is no file {path}")
    what, remedy = f"--rewards {name}", "correct the function, or give --reward-timeout-s more seconds"
    return BoundedProcess(what, lambda: _calls(what, path, function, timeout_s), silent_s=timeout_s, remedy=remedy)


# ---- in the other process ------------------------------------------------------------------------------------------


def _calls(what: str, path: str, name: str, timeout_s: float) -> dict[str, Callable[..., Any]]:
    """Import the function; the process then has one call, of it."""
    report_alive(what, IMPORT_S)
    function: Callable[..., Any] | None = _guarded(what, path, lambda: getattr(_module(path), name, None))
    if not callable(function):
        raise ValueError(f"{what}: {path} has no function {name}")

    def reward(columns: dict[str, list[Any]]) -> list[float | None]:
        report_alive(what, timeout_s)
        given = _taken(function, columns)
        found = _guarded(what, path, lambda: list(function(**given)))
        count = len(columns["completions"])
        if len(found) != count:
            raise ValueError(f"{what} returned {len(found)} rewards for {count} completions; return one for each")
        return [_number(what, value) for value in found]

    return {"reward": reward}


def _module(path: str) -> Any:
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None, "the name ends in .py"
    assert spec.loader is not None, "the name ends in .py"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _taken(function: Callable[..., Any], columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """The columns that a function has parameters for; all where it takes any keyword."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return columns
    return {name: values for name, values in columns.items() if name in parameters}


def _guarded(what: str, path: str, call: Callable[[], Any]) -> Any:
    """Call a person's code; what it raises becomes one message with the line of their file."""
    try:
        return call()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == Path(path).resolve()]
        place = f" at line {lines[-1]}" if lines else ""
        raise ValueError(f"{what} raised {type(error).__name__}{place}: {error}; correct the function") from None


def _number(what: str, value: Any) -> float | None:
    if value is None:
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{what} returned {shown(value)}; a reward is a number, or None") from None
    if not math.isfinite(found):
        raise ValueError(f"{what} returned {found}; a reward is a finite number, or None")
    return found
