"""Files that appear whole or not at all: written under a temporary name beside the target, synced, renamed."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from flexengine.checkpoint.bounded_process import report_alive

_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)
HASH_BLOCK_BYTES = 1 << 20  # large enough that SHA-256, not the system call, sets the rate
STALE_AFTER_S = 24 * 3600.0  # a temporary file that nobody wrote to for so long has lost its writer
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{16}\.flexengine\.tmp")


def temporary_name(target: Path) -> Path:
    """A new name beside `target` (same folder, hence same file system) under which it is written.

    It is random: the process numbers of two containers that share a folder may be equal.
    """
    return target.with_name(f".{target.name}.{secrets.token_hex(8)}.flexengine.tmp")


def is_temporary(name: str) -> bool:
    """Whether a file is one that is being written, or was when its writer was killed."""
    return _TEMPORARY.fullmatch(name) is not None


def remove_stale(folder: Path) -> None:
    """Remove the temporary files in `folder` whose writers were killed: those of `temporary_name` older than a day.

    A living writer would have to leave a file untouched for STALE_AFTER_S; it then fails before it renames anything.
    What cannot be removed stays, silently.
    """
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # removed by somebody else meanwhile, or not ours to remove
                if is_temporary(entry.name) and entry.is_file(follow_symlinks=False):
                    age_s = time.time() - entry.stat(follow_symlinks=False).st_mtime
                    if age_s > STALE_AFTER_S:
                        os.unlink(entry.path)


def refuse_folder(target: Path) -> None:
    """Raise what a rename onto a folder would, before anything is renamed. A link to a folder can be replaced."""
    if target.is_dir() and not target.is_symlink():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Errors of the disk get a name: a failed write, unlike a failed open, comes without."""
    try:
        yield
    except OSError as error:
        if error.errno in _OF_THE_DISK and error.filename is None:
            error.filename = str(path)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text file whole or not at all, ending in a line break; folders that are missing are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(path, "w", encoding="utf-8") as file:
        file.write(text if text.endswith("\n") else text + "\n")


@contextlib.contextmanager
def atomic_file(target: Path, mode: str = "wb", **open_arguments: Any) -> Iterator[IO[Any]]:
    """Open a file for writing that replaces `target` when the block ends well and vanishes when it raises.

    Order: contents reach the disk (fsync) before the name does (rename, then fsync of the folder), so after a power
    loss `target` is the old file or the complete new one. Leftovers of killed writers beside it are removed.
    Raises: OSError of the file system; whatever the block raises, after removing the temporary file.
    """
    refuse_folder(target)
    remove_stale(target.parent)
    temporary = temporary_name(target)
    try:
        with naming(target), open(temporary, mode, **open_arguments) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
        sync_folder(target.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(target: Path, value: Any) -> None:
    """Write `value` as indented JSON to `target`, atomically."""
    with atomic_file(target, "w", encoding="utf-8") as file:
        file.write(json.dumps(value, indent=2) + "\n")


def sync_file(path: Path) -> None:
    """Bring the contents of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable."""
    sync_file(folder)


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's contents as 64 hex digits, read in blocks of HASH_BLOCK_BYTES."""
    digest = sha256_unless(path, threading.Event())
    assert digest is not None, "nobody stops it"
    return digest


def sha256_unless(path: Path, stop: threading.Event) -> str | None:
    """`sha256_of`, or None once `stop` is set."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(HASH_BLOCK_BYTES):
            if stop.is_set():
                return None
            digest.update(block)
            report_alive(str(path))
    return digest.hexdigest()


def format_gib(num_bytes: int) -> str:
    """Bytes as printed text: GiB from 0.1 GiB on, else MiB or plain bytes, so that small files do not read 0.00 GiB."""
    if num_bytes >= 2**30 // 10:
        return f"{num_bytes / 2**30:.2f} GiB"
    if num_bytes >= 2**20 // 10:
        return f"{num_bytes / 2**20:.2f} MiB"
    return f"{num_bytes} bytes"
