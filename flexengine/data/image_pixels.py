"""Pixels of batches, decoded ahead in processes with bounds: the next batch's images lie in files until it is due."""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import pad

from flexengine.checkpoint.bounded_process import MOST_BYTES, BoundedProcess
from flexengine.data.batches import Batch, ImageBatch
from flexengine.data.image_processor import in_own_process
from flexengine.data.kept_images import KeptImage

MOST_WORKERS = 4
AHEAD = 1
"""Batches whose images are decoded before they are due. More would wait for a slow image less, and take more disk."""


class PixelReader:
    """Decodes the images of batches in a few processes. Order: made before memory is page-locked."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        """folder: of the model, whose processor each process reads. Raises: ValueError as `ImageProcessor`."""
        import transformers  # noqa: F401, PLC0415 - forked processes have it from here

        count = max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0)) - 1))
        self._scratch = tempfile.TemporaryDirectory(prefix="flexengine-pixels")
        self._processes = [BoundedProcess(str(folder), lambda: _calls(folder), most_bytes) for _ in range(count)]
        self._free = SimpleQueue[BoundedProcess]()
        for process in self._processes:
            self._free.put(process)
        self._threads = ThreadPoolExecutor(count, "pixels")
        self._number = 0

    def filled(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Batches with the columns of their images, each decoded while the one before it is trained on.

        Raises: ValueError naming an image that cannot be read any more.
        """
        waiting = deque[tuple[Batch, list[Future[Path]]]]()
        try:
            for batch in batches:
                images = batch.images if isinstance(batch, ImageBatch) else ()
                decoded = {image: self._submitted(image) for image in dict.fromkeys(images)}  # a pair has each twice
                waiting.append((batch, [decoded[image] for image in images]))
                if len(waiting) > AHEAD:
                    yield self._finished(*waiting.popleft())
            while waiting:
                yield self._finished(*waiting.popleft())
        finally:
            for _, futures in waiting:
                for future in futures:
                    future.cancel()

    def _submitted(self, image: KeptImage) -> Future[Path]:
        self._number += 1
        return self._threads.submit(self._decode, image, Path(self._scratch.name, str(self._number)))

    def _decode(self, image: KeptImage, target: Path) -> Path:
        """Have a free process decode an image into a file."""
        process = self._free.get()
        try:
            given = target.with_suffix(".image")
            if image.placed is None:
                given.write_bytes(image.data)
            process.call("pixels", image.name, image.placed, str(given), str(target))
            given.unlink(missing_ok=True)
        finally:
            self._free.put(process)
        return target

    def _finished(self, batch: Batch, futures: Sequence[Future[Path]]) -> Batch:
        if not futures:
            return batch
        found = dict[Path, dict[str, Tensor]]()
        for path in (future.result() for future in futures):
            if path not in found:
                found[path] = load_file(path)
                path.unlink()
        assert isinstance(batch, ImageBatch), "a batch without images waits for none"
        return replace(batch, columns=joined([found[future.result()] for future in futures]))

    def close(self) -> None:
        """End the processes and remove what they wrote. A second call does nothing."""
        for process in self._processes:
            process.close()
        self._threads.shutdown(cancel_futures=True)
        self._scratch.cleanup()


def joined(images: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The columns of a batch from those of its images: pictures are padded to the largest, at their ends."""
    found = dict[str, Tensor]()
    for name in images[0] if images else ():
        columns = [image[name] for image in images]
        nested = columns[0].dim() > 2 and columns[0].shape[0] == 1 and images[0]["pixel_values"].dim() == 5
        columns = [column[0] for column in columns] if nested else columns
        largest = [max(column.shape[axis] for column in columns) for axis in range(1, columns[0].dim())]
        columns = [
            pad(c, [n for most, own in zip(largest[::-1], list(c.shape)[:0:-1], strict=True) for n in (0, most - own)])
            for c in columns
        ]
        found[name] = torch.cat(columns)[None] if nested else torch.cat(columns)
    return found


def _calls(folder: Path) -> dict[str, Callable[..., Any]]:
    """The functions of a process that decodes."""
    processor = in_own_process(folder)

    def pixels(name: str, placed: list[Any] | None, given: str, target: str) -> None:
        image = KeptImage(name, None, Path(given).read_bytes()) if placed is None else KeptImage(name, tuple(placed))
        save_file(processor.pixels(image), f"{target}.part")
        os.replace(f"{target}.part", target)

    return {"pixels": pixels}
