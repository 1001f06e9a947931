"""What exports and training states share: how tensors are split into files, and whether these fit on the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, TypeVar

from flexengine.checkpoint.atomic import format_gib
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.wording import explain_os_error


class Sized(Protocol):
    """Something that takes bytes in a file."""

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        ...


SizedT = TypeVar("SizedT", bound=Sized)


def split_by_size(tensors: Iterable[SizedT], max_bytes: int) -> list[list[SizedT]]:
    """Fill groups of at most max_bytes in order; a larger tensor gets a group of its own.

    Without tensors there is one empty group.
    """
    groups: list[list[SizedT]] = [[]]
    used_bytes = 0
    for tensor in tensors:
        if groups[-1] and used_bytes + tensor.num_bytes > max_bytes:
            groups.append([])
            used_bytes = 0
        groups[-1].append(tensor)
        used_bytes += tensor.num_bytes
    return groups


def in_words(error: OSError) -> OSError:
    """An error whose text says what to do, so that another rank can tell it."""
    return OSError(explain_os_error(error))


def check_disk(folder: Path, needed_bytes: int) -> None:
    """Raise CheckpointError unless so many bytes are free where `folder` lies or will lie; its parent exists."""
    free_bytes = shutil.disk_usage(folder if folder.exists() else folder.parent).free
    if needed_bytes > free_bytes:
        raise CheckpointError(
            f"{folder}: the checkpoint needs {format_gib(needed_bytes)}, the disk has {format_gib(free_bytes)} free. "
            "Free some space or choose another folder."
        )
