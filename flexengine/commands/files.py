"""Files that a command is asked to write: whole or not at all, and an error says which flag named the place."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from pathlib import Path

from flexengine.wording import explain_os_error


def check_target(flag: str, path: Path | None) -> None:
    """Raise ValueError where a file cannot be: before anything is planned or measured for it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        found = "is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}"
        raise ValueError(f"{flag} {path}: {found}; name a file in a folder that exists")


def write_whole(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, sync it and rename it: a failure leaves what was there.

    The file that it fills has the suffix of `path`, and the rights that the umask gives a new file.
    Raises ValueError, with the reason and a remedy, when the file system refuses.
    """
    folder = path.absolute().parent
    beside = folder / f".{path.stem}-{secrets.token_hex(8)}{path.suffix}"
    try:
        try:
            write(beside)
            _sync(beside)
            os.replace(beside, path)
            _sync(folder)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        named = OSError(error.errno, error.strerror, str(path)) if error.errno else error
        raise ValueError(explain_os_error(named, flag)) from error


def _sync(path: Path) -> None:
    """Bring the contents of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
