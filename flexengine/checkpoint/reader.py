"""Read a Hugging Face checkpoint folder straight into memory the caller owns.

No mmap and no copy of a file in memory: the destinations are filled by positional reads (native/reader.py), so loading
adds nothing to the resident set beyond small conversion buffers, and those only where dtypes differ. The format itself
is safetensors_format.py; the index file is described at
https://huggingface.co/docs/transformers/big_models#sharded-checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch

from flexengine.checkpoint.layout import INDEX_FILE, SINGLE_FILE, is_file_name
from flexengine.checkpoint.manifest import DAMAGED_MODEL, ManifestError, check_files
from flexengine.checkpoint.safetensors_format import CheckpointError, TensorEntry, parse_json_object, read_header
from flexengine.native.reader import NUMBERS, ReadFailureError, ReadJob, read_jobs
from flexengine.wording import shown

__all__ = ["CheckpointError", "CheckpointReader", "ReadRequest", "TensorEntry"]


class ReadRequest(NamedTuple):
    """Elements [first_element, first_element + target.numel()) of a tensor, in row-major order, into flat `target`.

    remainder: with a bf16 target, takes what the bf16 lacks of the float32 value (int16, same size).
    """

    name: str
    target: torch.Tensor
    remainder: torch.Tensor | None = None
    first_element: int = 0


class CheckpointReader:
    """The tensors of one checkpoint folder, checked when opened, read on request.

    tensors: entry of each tensor by name (dtype, shape, place). shard_of: name -> file name. metadata: the strings of
    the index and the files' `__metadata__`. unlisted: tensors that shards hold but the index does not name; they are
    not readable, as the index is the authority.
    Safe to read from several threads (reads are positional); close() or leave the `with` block to free the files.
    """

    def __init__(
        self, folder: Path, descriptors: dict[str, int], tensors: dict[str, TensorEntry], index_file: str = INDEX_FILE
    ) -> None:
        """Take over open files; use CheckpointReader.open."""
        assert sys.byteorder == "little", "safetensors are little-endian and are read without swapping"
        self.folder = folder
        self.tensors = tensors
        self.metadata: dict[str, str] = {}
        self.unlisted: tuple[str, ...] = ()
        self._descriptors, self._index_file = descriptors, index_file

    @classmethod
    def open(cls, folder: Path | str, index_file: str = INDEX_FILE) -> CheckpointReader:
        """Open `folder`, which holds model.safetensors, or model.safetensors.index.json with its shards.

        Where both exist model.safetensors is read, as transformers does. Reads headers only.
        index_file: another index than that of a model, whose shards are then the only ones.
        Raises: CheckpointError when files are missing, truncated or damaged, when the index lists a tensor that its
        shard lacks, and when two shards hold the same tensor.
        """
        folder = Path(folder)
        weight_map, index_metadata = find_files(folder, index_file)
        files = [SINGLE_FILE] if weight_map is None else list(dict.fromkeys(weight_map.values()))
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            names = ", ".join(shown(name)[1:-1] for name in missing[:5])
            raise CheckpointError(
                f"{folder}: {index_file} names {len(files)} shards, {len(missing)} are missing: "
                f"{names}{' ...' if len(missing) > 5 else ''}. Finish the download or copy them here."
            )
        with contextlib.ExitStack() as undo:
            descriptors: dict[str, int] = {}
            found: dict[str, TensorEntry] = {}
            metadata: dict[str, str] = dict(index_metadata)
            for name in files:
                descriptors[name] = os.open(folder / name, os.O_RDONLY)
                undo.callback(os.close, descriptors[name])
                header = read_header(descriptors[name], folder / name)
                _add_entries(found, header.entries, folder)
                metadata.update(header.metadata)
            names = list(found)
            if weight_map is not None:
                found = _listed(weight_map, found, folder / index_file)
            reader = cls(folder, descriptors, found, index_file)
            reader.metadata = metadata
            reader.unlisted = tuple(name for name in names if name not in reader.tensors)
            undo.pop_all()
        return reader

    def rename(self, names: Mapping[str, str]) -> None:
        """Call tensors as their reader does: `tensors` has these names, and its entries those of the files.

        names: name in the files -> name to call it. Raises: ValueError where two tensors would have one name.
        """
        renamed: dict[str, TensorEntry] = {}
        for entry in self.tensors.values():
            name = names.get(entry.name, entry.name)
            if name in renamed:
                raise ValueError(
                    f"{self.folder}: {shown(renamed[name].name)} and {shown(entry.name)} are both {name}; which one"
                    " counts is undefined. Remove the wrong one from the checkpoint"
                )
            renamed[name] = entry
        self.tensors = renamed

    @property
    def shard_of(self) -> dict[str, str]:
        """File name of each tensor, as `write_checkpoint` takes it."""
        return {name: entry.file for name, entry in self.tensors.items()}

    def close(self) -> None:
        """Close the files; reading afterwards raises CheckpointError."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_descriptors"):
            self.close()

    @contextlib.contextmanager
    def verifying(self, tell: Callable[[CheckpointError], None] | None = None) -> Iterator[None]:
        """Compare the weights' files with the manifest of sizes and SHA-256 in the folder while the block reads them.

        A folder without a manifest, as other programs write it, is taken as it is. tell: is given the error in place of
        its being raised.
        Raises: CheckpointError when the block has ended well and a file is not what the manifest says.
        """
        stop = threading.Event()
        with ThreadPoolExecutor(1, "checksums") as aside:
            check = aside.submit(self._check_manifest, stop)
            try:
                yield
            except BaseException:
                stop.set()
                raise
            try:
                check.result()
            except CheckpointError as error:
                if tell is None:
                    raise
                tell(error)

    def _check_manifest(self, stop: threading.Event) -> None:
        names = [*self._descriptors, *([self._index_file] if list(self._descriptors) != [SINGLE_FILE] else [])]
        try:
            remedy = DAMAGED_MODEL if self._index_file == INDEX_FILE else "The checkpoint is damaged; resume another."
            check_files(self.folder, names, stop, remedy)
        except ManifestError as error:
            raise CheckpointError(str(error)) from None

    def read_into(self, name: str, dest: torch.Tensor, row_start: int = 0, num_rows: int | None = None) -> None:
        """Fill `dest` with rows [row_start, row_start + num_rows) of tensor `name` (all rows from row_start if None).

        Shapes: dest is contiguous, on the CPU, and has the shape of the rows up to dimensions of size 1, or is flat
        ([num_elements]). Rows count along dimension 0; a scalar has one row.
        dtypes: equal ones go from the file into dest's memory; F16, BF16, F32 and F64 convert to each other (rounding
        to nearest even).
        Raises: CheckpointError for an unknown name, rows out of range, differing shapes, dtypes without conversion,
        a file that shrank; OSError of the file system, naming file and tensor. dest's contents are undefined after an
        error.
        """
        entry = self._entry(name)
        rows = entry.shape[0] if entry.shape else 1
        num_rows = rows - row_start if num_rows is None else num_rows
        if row_start < 0 or num_rows < 0 or row_start + num_rows > rows:
            raise CheckpointError(
                f"{name}: asked for rows {row_start} to {row_start + num_rows}, shape {list(entry.shape)} has {rows}."
            )
        wanted = (num_rows, *entry.shape[1:]) if entry.shape else ()
        _check_destination(entry, wanted, dest)
        row_elements = entry.num_elements // rows if rows else 0
        self._read([ReadRequest(name, dest, None, row_start * row_elements)])

    def read_many(self, requests: Iterable[ReadRequest]) -> None:
        """Carry out all requests together, in parallel, in whichever order.

        Shapes: targets (and remainders) are contiguous, on the CPU, [n] with n elements inside the tensor.
        dtypes and errors: as read_into.
        """
        requests = list(requests)
        for request in requests:
            entry, count = self._entry(request.name), request.target.numel()
            if request.first_element < 0 or request.first_element + count > entry.num_elements:
                raise CheckpointError(
                    f"{entry.name}: asked for elements {request.first_element} to {request.first_element + count}, it "
                    f"has {entry.num_elements}."
                )
            _check_destination(entry, (count,), request.target)
        self._read(requests)

    def _read(self, requests: Sequence[ReadRequest]) -> None:
        entries = [self._entry(request.name) for request in requests]
        jobs = [self._job(request, entry) for request, entry in zip(requests, entries, strict=True)]
        try:
            read_jobs(jobs)
        except ReadFailureError as failure:
            raise self._explained(failure, entries[failure.job]) from failure

    def _job(self, request: ReadRequest, entry: TensorEntry) -> ReadJob:
        if entry.file not in self._descriptors:
            raise CheckpointError(f"{self.folder}: reading {entry.name!r} after close().")
        offset_bytes = entry.offset_bytes + request.first_element * entry.dtype.itemsize
        return ReadJob(self._descriptors[entry.file], offset_bytes, entry.dtype, request.target, request.remainder)

    def _explained(self, failure: ReadFailureError, entry: TensorEntry) -> Exception:
        path, position = self.folder / entry.file, failure.offset_bytes
        if failure.errno == 0:
            return CheckpointError(
                f"{path}: ended at byte {position} inside {entry.name!r}; it shrank since it was opened. Leave "
                "checkpoint files alone while they are read."
            )
        why = os.strerror(failure.errno or 0)
        return OSError(
            failure.errno, f"reading {entry.name!r} failed at byte {position} ({why}); check the disk", str(path)
        )

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.tensors:
            some = ", ".join(list(self.tensors)[:3])
            raise CheckpointError(f"{self.folder}: no tensor {name!r} among {len(self.tensors)} (such as {some}).")
        return self.tensors[name]


def find_files(folder: Path, index_file: str) -> tuple[dict[str, str] | None, dict[str, str]]:
    """The index's weight map and metadata, or (None, {}) where a single file holds everything."""
    if index_file == INDEX_FILE and (folder / SINGLE_FILE).is_file():
        return None, {}
    index_path = folder / index_file
    if not index_path.is_file():
        names = sorted(path.name for path in folder.iterdir())[:8] if folder.is_dir() else None
        found = "the folder does not exist" if names is None else f"found {', '.join(names) or 'an empty folder'}"
        raise CheckpointError(
            f"{folder}: expected {SINGLE_FILE} or {INDEX_FILE}; {found}. Give the folder of a Hugging Face checkpoint; "
            "weights in .bin or .pth files must be converted to safetensors first."
        )
    index = parse_json_object(index_path.read_bytes(), index_path)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index_path}: needs a non-empty 'weight_map' of tensor name to file name; fetch it again."
        )
    for name, file in weight_map.items():
        if not is_file_name(file):
            raise CheckpointError(
                f"{index_path}: tensor {shown(name)} lies in {shown(file)}, which is no name of a file; fetch it again."
            )
    metadata = index.get("metadata")
    return weight_map, {key: str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def _add_entries(found: dict[str, TensorEntry], entries: list[TensorEntry], folder: Path) -> None:
    for entry in entries:
        if entry.name in found:
            raise CheckpointError(
                f"{folder}: tensor {shown(entry.name)} is in {found[entry.name].file} and in {entry.file}; which one "
                "counts is undefined. Fetch or export the checkpoint again."
            )
        found[entry.name] = entry


def _listed(weight_map: dict[str, str], found: dict[str, TensorEntry], index: Path) -> dict[str, TensorEntry]:
    """The entries that the index lists, in its order."""
    for name, file in weight_map.items():
        if name not in found or found[name].file != file:
            where = f"it is in {found[name].file}" if name in found else "no shard holds it"
            raise CheckpointError(
                f"{index}: lists tensor {shown(name)} in {file}, but {where}. Index and shards are from "
                "different checkpoints, or damaged; fetch them again."
            )
    return {name: found[name] for name in weight_map}


def _check_destination(entry: TensorEntry, wanted: tuple[int, ...], dest: torch.Tensor) -> None:
    shape = tuple(dest.shape)
    same = [n for n in shape if n != 1] == [n for n in wanted if n != 1]
    flat = dest.dim() == 1 and dest.numel() == torch.Size(wanted).numel()
    if not same and not flat:
        raise CheckpointError(
            f"{entry.name}: the file holds shape {list(wanted)}, the destination has {list(shape)}. "
            "Check that the model's configuration belongs to this checkpoint."
        )
    if dest.device.type != "cpu" or not dest.is_contiguous():
        layout = "contiguous" if dest.is_contiguous() else "strided"
        raise CheckpointError(f"{entry.name}: destination must be contiguous on the CPU, is {layout} on {dest.device}.")
    _check_convertible(entry, dest)


def _check_convertible(entry: TensorEntry, dest: torch.Tensor) -> None:
    if entry.dtype != dest.dtype and not (entry.dtype in NUMBERS and dest.dtype in NUMBERS):
        raise CheckpointError(
            f"{entry.name}: no conversion from {entry.dtype} in the file to {dest.dtype}; only floats of 16 to 64 bits "
            "convert. Read it as it is stored, or convert the checkpoint first."
        )
