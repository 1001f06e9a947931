"""Measured profiles on disk, one file per machine, versions, dtype and shape, and rates of ranks that work at once.

A cache that fails is only slower.
"""

import hashlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

from flexengine.hardware.profile import HardwareProfile

MAX_PROFILE_BYTES = 1 << 20  # a profile takes some 20 KB

logger = logging.getLogger(__name__)

T = TypeVar("T")


def profile_path(readable: str, key: Sequence[object], kind: str = "profiles") -> Path | None:
    """The file of a profile: `readable` names it for people, `key` is all it depends on. None without a folder.

    kind: the folder within the cache's.
    """
    folder = _cache_folder()
    if folder is None:
        return None
    digest = hashlib.sha256(repr(tuple(key)).encode()).hexdigest()[:12]
    return folder / kind / f"{_file_name(readable)}-{digest}.json"


def remembers_any(readable: str, kind: str) -> bool:
    """Whether there is any file of this kind with this name, whatever it depends on."""
    folder = _cache_folder()
    return folder is not None and any((folder / kind).glob(f"{_file_name(readable)}-*.json"))


def _file_name(readable: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", readable.lower()).strip("-")


def read_cached(path: Path | None) -> HardwareProfile | None:
    """The remembered profile; None if there is none, or none that can be used, which is said once per file."""
    return read_remembered(path, HardwareProfile.from_json)


def read_remembered(path: Path | None, parse: Callable[[str], T]) -> T | None:
    """What a file remembers, as `parse` reads its text; None as of `read_cached`. parse: raises ValueError."""
    if path is None:
        return None
    try:
        text = _read_small_file(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # no permission, no plain file, too long, bytes that are no text
        _say_unusable(path, str(error))
        return None
    try:
        return parse(text)
    except ValueError as error:
        _say_unusable(path, str(error))
        return None


def _read_small_file(path: Path) -> str:
    """The text of a plain file. Reading anything else, such as a FIFO, could wait for ever."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no plain file")
        text = os.read(descriptor, MAX_PROFILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(text) > MAX_PROFILE_BYTES:
        raise ValueError(f"it is longer than {MAX_PROFILE_BYTES} bytes")
    return text.decode("utf-8")


def write_cached(path: Path | None, profile: HardwareProfile) -> bool:
    """Remember a profile; False if that failed."""
    return write_remembered(path, profile.to_json())


def write_remembered(path: Path | None, text: str) -> bool:
    """Write beside and rename, so that processes that start together never read half a file; False if that failed."""
    if path is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError as error:  # a read-only or full disk costs a few seconds next time, nothing else
        logger.info("the measured profile is not remembered: cannot write %s (%s)", path, error)
        return False
    return True


def age_s(path: Path | None) -> float | None:
    """Seconds since a file was written; None if there is none."""
    try:
        return None if path is None else max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None


@cache
def _say_unusable(path: Path, reason: str) -> None:
    logger.info("the remembered profile %s cannot be used, measuring again: %s", path, reason)


def _cache_folder() -> Path | None:
    """$FLEXENGINE_CACHE, else flexengine/ in the XDG cache folder (https://specifications.freedesktop.org/basedir)."""
    if own := os.environ.get("FLEXENGINE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "flexengine"
    try:
        return Path.home() / ".cache" / "flexengine"
    except RuntimeError:  # a user without a home
        return None
