"""Files that a command is asked to write: whole or not at all, and an error says which flag named the place."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

from flexengine.wording import explain_os_error


def check_target(flag: str, path: Path | None) -> None:
    """Raise ValueError where a file cannot be: before anything is planned or measured for it."""
    if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
        found = "is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}"
        raise ValueError(f"{flag} {path}: {found}; name a file in a folder that exists")


def write_whole(flag: str, path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path` and rename it: a failure leaves what was there.

    Raises ValueError, with the reason and a remedy, when the file system refuses.
    """
    try:
        descriptor, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.stem}-", suffix=path.suffix)
        os.close(descriptor)
        try:
            write(Path(name))
            os.chmod(name, 0o644)  # mkstemp's files are private
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        named = OSError(error.errno, error.strerror, str(path)) if error.errno else error
        raise ValueError(explain_os_error(named, flag)) from error
