"""Images of a record as tables keep them behind its tokens: where each lies with its SHA-256, or its data."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flexengine.data.image_places import ImageSource
from flexengine.wording import explain_os_error

MOST_FILE_BYTES = 2**26
"""Largest file of an image that is read: 64 MiB, as a row of a file may be long."""
Placed = tuple[str, int, int, str]
"""Path, bytes, time of the last change in nanoseconds and SHA-256 of an image's file."""


class KeptImage(NamedTuple):
    """An image that a table keeps: a file as it was read, or the data themselves."""

    name: str
    placed: Placed | None
    data: bytes = b""

    def read(self) -> bytes:
        """The image's data. Raises: ValueError where its file is gone, or is another one now."""
        if self.placed is None:
            return self.data
        path, _, _, sha256 = self.placed
        data = _read_file(path, self.name)
        if hashlib.sha256(data).hexdigest() != sha256:
            raise ValueError(f"{self.name}: the image has changed since it was read; start the run again")
        return data


class PicturedRecord(NamedTuple):
    """One training sequence with its images, in the order in which their tokens stand, and its label as a value."""

    input_ids: list[int]
    labels: list[int]
    images: list[KeptImage]
    value: float = 0.0


def kept(source: ImageSource) -> tuple[KeptImage, bytes]:
    """What a table keeps of an image, and its data. Raises: ValueError where there is no such file."""
    if source.path is None:
        assert source.data is not None, "an image has a path or data"
        return KeptImage(source.name, None, source.data), source.data
    data = _read_file(source.path, source.name)
    about = os.stat(source.path)
    placed = source.path, about.st_size, about.st_mtime_ns, hashlib.sha256(data).hexdigest()
    return KeptImage(source.name, placed), data


def _read_file(path: str, name: str) -> bytes:
    try:
        with Path(path).open("rb") as file:
            data = file.read(MOST_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(f"the image {name}: {explain_os_error(error, '--dataset')}") from None
    if len(data) > MOST_FILE_BYTES:
        raise ValueError(f"the image {name} has more than {MOST_FILE_BYTES >> 20} MiB; save it smaller")
    return data


def are_as_they_were(images: Iterable[KeptImage]) -> bool:
    """Whether the files of images have the sizes and times with which they were read."""
    for path, size, changed, _ in (image.placed for image in images if image.placed is not None):
        try:
            about = os.stat(path)
        except OSError:
            return False
        if (about.st_size, about.st_mtime_ns) != (size, changed):
            return False
    return True


def packed(images: Sequence[KeptImage]) -> np.ndarray:
    """Images as numbers [n] int32, none for none: the length of a list in JSON, the list, and data."""
    if not images:
        return np.zeros(0, np.int32)
    told: list[Any] = [[image.name, image.placed, len(image.data)] for image in images]
    written = json.dumps(told).encode()
    whole = len(written).to_bytes(4, "little") + written + b"".join(image.data for image in images)
    return np.frombuffer(whole + bytes(-len(whole) % 4), np.int32)


def unpacked(numbers: np.ndarray) -> list[KeptImage]:
    """Images from what `packed` made."""
    whole = numbers.tobytes()
    if not whole:
        return []
    start = 4 + int.from_bytes(whole[:4], "little")
    found = []
    for name, placed, size in json.loads(whole[4:start]):
        found.append(KeptImage(name, None if placed is None else tuple(placed), whole[start : start + size]))
        start += size
    return found
