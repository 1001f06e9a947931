"""Plans of earlier starts on disk, by all that they depend on: model, request, rates of the machine, and this code.

A command that is given again then need not search again, which takes seconds. What cannot be told apart for sure, such
as modules of other packages, is planned anew.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache, cached_property
from pathlib import Path
from types import FunctionType
from typing import Any

from flexengine.hardware.cache import profile_path, read_remembered, write_remembered
from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, PlanError, Request

OWN_PACKAGE = __name__.partition(".")[0]
BASE_STEP_BYTES = 64 * 2**20
"""The process's own bytes are rounded up to a multiple of this: they differ by a few MiB from start to start. A larger
step leaves more of the host's budget unused; a smaller one finds fewer plans again."""
MOST_SPARE_BYTES = 4 * BASE_STEP_BYTES
"""A plan serves a process that holds so much less than the one that it was made for: one that measures holds more than
those that find what it measured (`probe.BENCHMARKS_HOST_BYTES`)."""
FREE_NOW = ("gpu_free_bytes", "host_available_bytes", "host_base_bytes")
"""What a profile tells of this moment or process; budgets that follow from it are in the request."""
MOST_PLANS = 64

logger = logging.getLogger(__name__)

FindPlan = Callable[[ModelSpec, Request, HardwareProfile], Plan]


def remembered_plan(find: FindPlan, model: ModelSpec, request: Request, profile: HardwareProfile) -> Plan:
    """The plan of an earlier start with the same request, or what `find` finds now, which is remembered.

    Its host bytes have the process's own ones rounded up, where a plan fits so, or those of a process that held a
    little more. Raises: PlanError as `find`.
    """

    def serving(text: str) -> Plan | None:
        found_bytes, _, plan = text.partition("\n")
        return Plan.from_json(plan) if 0 <= int(found_bytes) - base_bytes <= MOST_SPARE_BYTES else None

    base_bytes = -(-profile.memory.host_base_bytes // BASE_STEP_BYTES) * BASE_STEP_BYTES
    rounded = profile.changed(host_base_bytes=base_bytes)
    path = plan_path(model, request, rounded)
    plan = read_remembered(path, serving)
    if plan is not None:
        logger.info("the plan is that of an earlier start with the same request and rates (%s)", path)
        return plan
    began_s = time.monotonic()
    try:
        plan = find(model, request, rounded)
    except PlanError:
        return find(model, request, profile)
    logger.info("the plan was found in %.1f s", time.monotonic() - began_s)
    if path is not None and write_remembered(path, f"{base_bytes}\n{plan.to_json()}"):
        _forget_oldest(path.parent)
    return plan


def plan_path(model: ModelSpec, request: Request, profile: HardwareProfile) -> Path | None:
    """The file of a plan; None where there is no folder for it, or something that it depends on cannot be written
    down."""
    rates = {name: value for name, value in profile.values().items() if name not in FREE_NOW}
    digest, needed = hashlib.sha256(), (model, request, profile.name, sorted(rates.items()))
    try:
        for word in _words(needed):
            digest.update(word.encode() + b"\0")
    except TypeError as error:
        logger.debug("a plan is not remembered: %s", error)
        return None
    return profile_path(model.name, (_code(), digest.hexdigest()), "plans")


def _words(value: Any) -> Iterator[str]:
    """Everything that a value consists of, in order. Raises: TypeError for what has no such description."""
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}"
    if value is None or isinstance(value, str | bytes | int | float | complex | slice | range | Path | Enum):
        yield repr(value)
    elif isinstance(value, tuple | list):
        yield str(len(value))
        for item in value:
            yield from _words(item)
    elif isinstance(value, dict):
        yield from _words(list(value.items()))
    elif isinstance(value, set | frozenset):
        yield from sorted("\1".join(_words(item)) for item in value)
    elif _is_found_by_name(value):
        yield f"{value.__module__}.{value.__qualname__}"
    elif is_dataclass(value):
        for field in fields(value):
            yield field.name
            yield from _words(getattr(value, field.name))
    elif kind.__module__.partition(".")[0] == OWN_PACKAGE and hasattr(value, "__dict__"):
        yield from _words(_own_values(value))
    else:
        raise TypeError(f"{kind.__module__}.{kind.__qualname__} says nothing of what it holds")


def _is_found_by_name(value: Any) -> bool:
    """Whether its name says all of a value: a class, or a function of a module."""
    is_function = isinstance(value, FunctionType) and value.__closure__ is None and "<" not in value.__qualname__
    return isinstance(value, type) or is_function


def _own_values(value: Any) -> list[tuple[str, Any]]:
    """What an object was given, without what it has found since."""
    found = (name for name in sorted(vars(value)) if not isinstance(getattr(type(value), name, None), cached_property))
    return [(name, vars(value)[name]) for name in found]


@cache
def _code() -> tuple[object, ...]:
    """What tells this code from another state of it, and from other versions of what plans are searched with."""
    folder = Path(__file__).resolve().parents[1]
    files = ((path.relative_to(folder), path.stat()) for path in sorted(folder.rglob("*.py")))
    states = [(str(path), state.st_size, state.st_mtime_ns) for path, state in files]
    return (*(importlib.metadata.version(name) for name in ("numpy", "scipy")), *states)


def _forget_oldest(folder: Path) -> None:
    """Keep the latest plans alone."""
    try:
        found = sorted(folder.glob("*.json"), key=lambda path: path.stat().st_mtime, reverse=True)
        for path in found[MOST_PLANS:]:
            path.unlink(missing_ok=True)
    except OSError as error:  # another process may do the same at the same time
        logger.debug("old plans in %s stay: %s", folder, error)
