"""Finds and loads the compiled library, and says what its absence costs.

The library is `flexengine/_native*.so`, built by setup.py from csrc/, with a plain C interface: functions return 0 or
a negative status, and `flex_last_error` has the message. ctypes releases the interpreter lock during every call.
"""

import ctypes
import logging
import os
from collections.abc import Callable
from functools import cache
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

ABI_VERSION = 4  # FLEX_ABI_VERSION of csrc/common.h
DISABLING_VARIABLE = "FLEXENGINE_NATIVE"  # "0" makes every function take its torch path

_PACKAGE = Path(__file__).resolve().parent.parent
# Status of csrc/common.h -> what Python raises.
_ERRORS: dict[int, type[Exception]] = {-1: ValueError, -2: MemoryError, -3: OSError}

logger = logging.getLogger(__name__)


def load() -> ctypes.CDLL | None:
    """The compiled library, or None where it is not built, stale, or switched off by FLEXENGINE_NATIVE=0.

    Loaded once per process; a library that cannot be used is named once in a warning.
    """
    if os.environ.get(DISABLING_VARIABLE, "1") == "0":
        return None
    return _load_once()


def bind(name: str, *argument_types: type) -> Callable[..., int] | None:
    """The exported function `name` of the library, which returns an int; None where `load` gives None.

    argument_types: ctypes types of its arguments. A library built before the function existed counts as none.
    """
    library = load()
    if library is None:
        return None
    function = getattr(library, name, None)
    if function is None:
        _say_stale(f"has no function {name}")
        return None
    function.argtypes = argument_types
    function.restype = ctypes.c_int
    return function


def check(status: int, what: str) -> None:
    """Raise what a negative status means: ValueError, MemoryError or OSError with `what` and the library's message."""
    if status >= 0:
        return
    library = load()
    message = "" if library is None else library.flex_last_error().decode(errors="replace")
    raise _ERRORS.get(status, OSError)(f"{what}: {message}")


@cache
def fallback_notice(what: str, cost: str) -> None:
    """Say once per function that its torch path is used and what that costs: `what` names it, `cost` is a clause."""
    logger.warning("native code is not available for %s: %s", what, cost)


@cache
def _load_once() -> ctypes.CDLL | None:
    path = library_path()
    if path is None:
        logger.info("the native library is not built; `pip install -e .` with a C++ compiler builds it")
        return None
    try:
        library = ctypes.CDLL(str(path))
        version = int(library.flex_abi_version())
    except (OSError, AttributeError) as error:
        logger.warning("the native library %s cannot be loaded and is ignored: %s", path, error)
        return None
    if version != ABI_VERSION:
        _say_stale(f"has interface version {version}, this package needs {ABI_VERSION}")
        return None
    library.flex_last_error.restype = ctypes.c_char_p
    return library


@cache
def _say_stale(finding: str) -> None:
    logger.warning(
        "the native library %s %s and is not used: `pip install -e .` builds it anew", library_path(), finding
    )


def library_path() -> Path | None:
    """Where the compiled library lies: the one of this interpreter's name first; None if there is none."""
    for suffix in EXTENSION_SUFFIXES:
        path = _PACKAGE / f"_native{suffix}"
        if path.exists():
            return path
    return next(iter(sorted(_PACKAGE.glob("_native*.so"))), None)  # the library does not depend on the interpreter
