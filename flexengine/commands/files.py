"""Writes the files of commands: they appear whole or not at all, and an error says which flag named the place."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Callable
from pathlib import Path

from flexengine.wording import explain_os_error


def check_target(flag: str, path: Path | None) -> None:
    """Raise ValueError if a file cannot be written. Call it before anything is planned or measured for the file."""
    if path is None:
        return
    folder = _followed(path).parent
    if path.is_dir() or not (folder.is_dir() or path.exists()):
        found = "is a folder" if path.is_dir() else f"there is no folder {folder}"
        raise ValueError(f"{flag} {path}: {found}; name a file in a folder that exists")
    # A device or a FIFO is written in place: a rename would replace it by a file.
    if not _is_special(path):
        _try_to_write(flag, path, folder)
    elif not os.access(path, os.W_OK):  # not opened: a FIFO would wait for its reader
        raise ValueError(f"{flag} {path}: no permission to write to it; name another file")


def _try_to_write(flag: str, path: Path, folder: Path) -> None:
    """Make a file in the folder and remove it: rights alone do not tell, as nobody can write to /proc."""
    try:
        descriptor, name = tempfile.mkstemp(dir=folder, prefix=f".{path.stem}-")
        os.close(descriptor)
        os.unlink(name)
    except OSError as error:
        found = f"no file can be made in {folder} ({error.strerror})"
        raise ValueError(f"{flag} {path}: {found}; name a file in a folder that can be written to") from error


def _followed(path: Path) -> Path:
    """Give the absolute path without links. Unlike Path.resolve it leaves links that lead in a circle as they are."""
    return Path(os.path.realpath(path))


def _is_special(path: Path) -> bool:
    """Tell whether a path is something that no file may replace, such as a device or a FIFO; links are followed."""
    return path.exists() and not path.is_file()


def write_whole(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, sync it and rename it: a failure leaves what was there.

    The file that it fills has the suffix of `path`, and the rights that the umask gives a new file.
    A link keeps pointing to its file, which is the one that is replaced; a device or a FIFO is written to as it is.
    Raises ValueError, with the reason and a remedy, when the file system refuses.
    """
    from flexengine.checkpoint.atomic import sync_file  # noqa: PLC0415, brings torch, which no --help needs

    try:
        if _is_special(path):
            write(path)
            return
        target = _followed(path)
        # In the same folder, so that the rename stays within one file system and is atomic.
        beside = target.parent / f".{path.stem}-{secrets.token_hex(8)}{path.suffix}"
        try:
            write(beside)
            sync_file(beside)
            os.replace(beside, target)
            sync_file(target.parent)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        # Name the path that the user gave, not the hidden file beside it.
        named = OSError(error.errno, error.strerror, str(path)) if error.errno else error
        raise ValueError(explain_os_error(named, flag)) from error
