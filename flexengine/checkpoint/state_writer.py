"""Writes the state of a training run as a folder of safetensors shards, in the background, all of it or nothing.

Shards are written, hashed and synced by several threads, as one thread's checksums are slower than a good disk. The
folder appears under its name when all of it is on the disk (staged_folder.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.checkpoint.manifest import FOLDER_MANIFEST, FileRecord, manifest_text
from flexengine.checkpoint.safetensors_format import build_header
from flexengine.checkpoint.shards import check_disk, split_by_size
from flexengine.checkpoint.snapshot import Piece, SaveAbandonedError, Snapshot, StoredTensor, pieces_of
from flexengine.checkpoint.staged_folder import staged_folder
from flexengine.checkpoint.state_files import STATE_INDEX_FILE

MAX_SHARD_BYTES = 1 << 30
MIN_SHARD_BYTES = 16 << 20
"""Limits of a shard: smaller ones cost a sync each, larger ones leave threads without work at the end."""
NUM_THREADS = 8
"""Shards written at once: SHA-256 takes a core for 1 to 2 GB/s, and a disk wants several requests."""


class _Shard(NamedTuple):
    file: str
    header: bytes
    pieces: list[Piece]
    names: list[str]


class StateSave:
    """A checkpoint that is being written by threads of its own, from tensors that must stay until `release` returns.

    after: called on the writer's thread when the folder is whole and durable. made_by: what the manifest says beside
    the files, as `provenance.made_by` makes it.
    """

    def __init__(
        self,
        folder: Path | str,
        tensors: Sequence[StoredTensor],
        texts: Mapping[str, str],
        after: Callable[[], None] | None = None,
        made_by: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder, self.num_bytes = Path(folder), sum(tensor.num_bytes for tensor in tensors)
        self._texts, self._after, self._made_by = dict(texts), after, made_by or {"source": "checkpoint"}
        self._shards = _plan_shards(tensors, self.num_bytes)
        self._snapshot = Snapshot([piece for shard in self._shards for piece in shard.pieces])
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name="flexengine-checkpoint")
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the checkpoint is whole, or has failed."""
        return not self._thread.is_alive()

    def release(self, window_bytes: int) -> None:
        """Block until the tensors may be changed; copies up to window_bytes of what is not written yet."""
        self._snapshot.release(window_bytes)

    def wait(self) -> None:
        """Block until the checkpoint is whole. Raises what made it fail; an interrupt while waiting gives it up."""
        try:
            self._thread.join()
        except BaseException:
            self.abandon()
            raise
        if self._failure is not None:
            raise self._failure

    def abandon(self) -> None:
        """Give the checkpoint up, unless it is whole already, and remove what was written. Blocks until then."""
        self._snapshot.stop()
        self._thread.join()

    # -- on the writer's threads -------------------------------------------------------------------------------------

    def _guarded(self) -> None:
        try:
            self._write()
            if self._after is not None:
                self._after()
        except BaseException as failure:
            self._failure = failure
        finally:
            self._snapshot.stop()

    def _write(self) -> None:
        with staged_folder(self.folder) as staged:
            check_disk(self.folder, self.num_bytes)
            with ThreadPoolExecutor(NUM_THREADS, "flexengine-shards") as pool:
                parts = {s.file: pool.submit(self._write_shard, staged.stage(s.file), s) for s in self._shards}
            _raise_cause([part.exception() for part in parts.values()])
            records = {file: part.result() for file, part in parts.items()}
            for name, text in {**self._texts, STATE_INDEX_FILE: _index(self._shards)}.items():
                data = text.encode()
                staged.stage(name).write_bytes(data)
                records[name] = FileRecord(len(data), hashlib.sha256(data).hexdigest())
            text = manifest_text(records, self._made_by)
            staged.stage(FOLDER_MANIFEST).write_text(text, encoding="utf-8")

    def _write_shard(self, path: Path, shard: _Shard) -> FileRecord:
        digest, num_bytes = hashlib.sha256(shard.header), len(shard.header)
        try:
            with open(path, "wb", buffering=0) as file:
                _write_all(file.fileno(), memoryview(shard.header))
                for piece in shard.pieces:
                    with self._snapshot.reading(piece) as data:
                        _write_all(file.fileno(), data)
                        digest.update(data)  # neither holds the interpreter lock
                        num_bytes += len(data)
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # nobody reads it soon
        except BaseException:
            self._snapshot.stop()  # the other threads need not go on
            raise
        return FileRecord(num_bytes, digest.hexdigest())


def _raise_cause(failures: Sequence[BaseException | None]) -> None:
    """Raise what made the first thread fail; the others were then told to stop."""
    found = [failure for failure in failures if failure is not None]
    for failure in sorted(found, key=lambda failure: isinstance(failure, SaveAbandonedError)):
        raise failure


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _plan_shards(tensors: Sequence[StoredTensor], num_bytes: int) -> list[_Shard]:
    """Fill shards in the order of the tensors; within a shard wider elements come first, which keeps all aligned."""
    room = min(MAX_SHARD_BYTES, max(MIN_SHARD_BYTES, num_bytes // (4 * NUM_THREADS)))
    groups = split_by_size(tensors, room)
    return [_shard(f"state-{i:05d}-of-{len(groups):05d}.safetensors", group) for i, group in enumerate(groups, start=1)]


def _shard(file: str, group: list[StoredTensor]) -> _Shard:
    ordered = sorted(group, key=lambda tensor: -tensor.data.element_size())
    header, _ = build_header([(tensor.name, tensor.data.dtype, tensor.shape) for tensor in ordered], {"format": "pt"})
    pieces = [piece for tensor in ordered for piece in pieces_of(tensor)]
    return _Shard(file, header, pieces, [tensor.name for tensor in ordered])


def _index(shards: Sequence[_Shard]) -> str:
    weight_map = {name: shard.file for shard in shards for name in shard.names}
    return json.dumps({"metadata": {}, "weight_map": dict(sorted(weight_map.items()))}, indent=1) + "\n"
