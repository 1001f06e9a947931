"""Reads what a run left in its folder, for `flexengine report`; any damage is a ValueError that names the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from flexengine.metrics import TIMED_STEP, CardHealth, is_finite_number
from flexengine.options.train_config import (
    EVAL_LOG_FILE,
    LOG_FILE,
    PLAN_FILE,
    TIMELINE_FILE,
    TRACE_FILE,
    TrainConfig,
    options_from_yaml,
)
from flexengine.plan import Plan
from flexengine.reports.run_record import LoggedEvaluation, LoggedStep, RunRecord
from flexengine.schedule.timeline import MEASURED, SIMULATED
from flexengine.schedule.trace_reader import Trace, read_trace
from flexengine.wording import parse_json, shown

Line = TypeVar("Line")


def read_run(folder: Path) -> RunRecord:
    """Read what there is of a run. Raises ValueError if the folder is not that of a run, or a file in it is damaged."""
    if not folder.is_dir():
        found = "is a file, not a folder" if folder.exists() else "there is no such folder"
        raise ValueError(f"run folder {folder}: {found}; give the --output-dir of a run of flexengine train")
    texts = {name: _text(folder / name) for name in (PLAN_FILE, TIMELINE_FILE, TRACE_FILE)}
    texts[LOG_FILE] = _text(folder / LOG_FILE, "replace")
    if not any(text is not None for text in texts.values()):
        looked_for = ", ".join(texts)
        raise ValueError(
            f"run folder {folder} holds none of {looked_for}; give the --output-dir of a run of flexengine train"
        )
    # The plan and the trace come first: they tell which steps of the log were disturbed.
    measured = _trace(folder / TRACE_FILE, texts[TRACE_FILE], MEASURED)
    plan = _plan(folder / PLAN_FILE, texts[PLAN_FILE])
    disturbed = _disturbed(folder, plan, measured)
    steps, num_damaged = _lines(folder / LOG_FILE, texts[LOG_FILE], lambda value, where: _step(value, where, disturbed))
    eval_text = _text(folder / EVAL_LOG_FILE, "replace")
    evaluations, num_damaged_evaluations = _lines(folder / EVAL_LOG_FILE, eval_text, _evaluation)
    return RunRecord(
        folder=folder.resolve().name,
        plan=plan,
        simulated=_trace(folder / TIMELINE_FILE, texts[TIMELINE_FILE], SIMULATED),
        measured=measured,
        steps=steps,
        num_damaged_lines=num_damaged + num_damaged_evaluations,
        evaluations=evaluations,
    )


def _text(path: Path, errors: str = "strict") -> str | None:
    """Read the text of a file; None if there is no such file. errors: what to do with bytes that are no text."""
    if not path.exists():
        return None
    if not path.is_file():
        raise ValueError(f"{path} is no file; move it away, or give the folder of another run")
    try:
        return path.read_text(encoding="utf-8", errors=errors)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: no UTF-8 text at byte {error.start}; the run has to be done again") from None


def _plan(path: Path, text: str | None) -> Plan | None:
    if text is None:
        return None
    parse_json(text, path)  # names the file and the place
    try:
        plan = Plan.from_json(text)
        _finite(plan.predicted.step_s, "predicted step_s", path)
        _finite(plan.request.max_global_batch_tokens, "max_global_batch_tokens", path)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no plan of flexengine: {error}; move it away, or do the run again") from None
    return plan


def _trace(path: Path, text: str | None, timeline: str) -> Trace | None:
    return None if text is None else read_trace(parse_json(text, path), path, timeline)


def _disturbed(folder: Path, plan: Plan | None, measured: Trace | None) -> Callable[[int], bool]:
    """Make a function that tells which steps have unusual times, by their number.

    They are the first step, which warms up, steps that were timed or profiled, and, when the CPU updates, the steps
    after those, which begin with less left to do.
    """
    steps = {1, TIMED_STEP}
    if measured is not None and isinstance(measured.about.get("step"), int):
        steps.add(measured.about["step"])
    # The options of the run say which steps were profiled; a folder without them has no such steps.
    path = folder / "config.yaml"
    text = _text(path)
    profiled = range(0) if text is None else TrainConfig(**options_from_yaml(text, str(path))).profiled_steps
    slowed = steps.union(profiled)
    after = {step + 1 for step in slowed} if plan is not None and plan.updates_on_cpu else set()
    return lambda step: step in slowed or step in after


def _lines(path: Path, text: str | None, read: Callable[[Any, str], Line]) -> tuple[list[Line], int]:
    """Read the lines of a log, and count those that hold no step. Raises ValueError if none of them does."""
    found, errors = list[Line](), list[ValueError]()
    for number, line in enumerate(text.splitlines() if text is not None else (), start=1):
        where = f"{path}, line {number}"
        try:
            found.append(read(parse_json(line, where), where))
        except ValueError as error:
            errors.append(error)
    if errors and not found:
        raise errors[0]
    return found, len(errors)


def _step(value: Any, where: str, disturbed: Callable[[int], bool]) -> LoggedStep:
    _check_is_step(value, where)
    step = int(_finite(value.get("step"), "step", where))
    return LoggedStep(
        step=step,
        # Rates divide by it; a damaged log must not divide by zero.
        step_s=max(1e-9, _finite(value.get("step_s"), "step_s", where)),
        num_tokens=int(_finite(value.get("num_tokens"), "num_tokens", where)),
        loss=_finite_or_none(value.get("loss")),
        gpu_peak_bytes=_bytes(value.get("gpu_peak_bytes")),
        host_peak_bytes=_bytes(value.get("host_peak_bytes")),
        disturbed=disturbed(step),
        grad_norm=_finite_or_none(value.get("grad_norm")),
        lr=_finite_or_none(value.get("lr")),
        card=CardHealth.from_record(value),
    )


def _evaluation(value: Any, where: str) -> LoggedEvaluation:
    _check_is_step(value, where)
    return LoggedEvaluation(int(_finite(value.get("step"), "step", where)), _finite_or_none(value.get("loss")))


def _check_is_step(value: Any, where: str) -> None:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is no step of a run: found {shown(value)}; move the file away, or do the run again")


def _finite(value: object, name: str, where: object) -> float:
    """Read a number that is at least 0. Raises ValueError for anything else."""
    number = _finite_or_none(value)
    if number is None or number < 0:
        raise ValueError(f"{where}: {name} is {shown(value)}, expected a number of at least 0; do the run again")
    return number


def _bytes(value: object) -> int | None:
    number = _finite_or_none(value)
    return None if number is None else int(number)


def _finite_or_none(value: object) -> float | None:
    return float(value) if is_finite_number(value) else None  # JSON written by others may hold NaN
