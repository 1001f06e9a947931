"""Measured profiles on disk, one file per machine, versions, dtype and shape. A cache that fails is only slower."""

import hashlib
import logging
import os
import re
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from flexengine.hardware.profile import HardwareProfile

logger = logging.getLogger(__name__)


def profile_path(readable: str, key: Sequence[object]) -> Path | None:
    """The file of a profile: `readable` names it for people, `key` is all it depends on. None without a folder."""
    folder = _cache_folder()
    if folder is None:
        return None
    digest = hashlib.sha256(repr(tuple(key)).encode()).hexdigest()[:12]
    name = re.sub(r"[^a-z0-9]+", "-", readable.lower()).strip("-")
    return folder / "profiles" / f"{name}-{digest}.json"


def read_cached(path: Path | None) -> HardwareProfile | None:
    """The remembered profile; None if there is none, or none that can be used, which is said once per file."""
    if path is None:
        return None
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:  # no permission, a folder in its place, bytes that are no text
        _say_unusable(path, str(error))
        return None
    try:
        return HardwareProfile.from_json(text)
    except ValueError as error:
        _say_unusable(path, str(error))
        return None


def write_cached(path: Path | None, profile: HardwareProfile) -> bool:
    """Write beside and rename, so that processes that start together never read half a file; False if that failed."""
    if path is None:
        return False
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(profile.to_json())
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
