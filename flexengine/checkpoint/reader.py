"""Read a Hugging Face checkpoint folder straight into memory the caller owns.

No mmap and no copy of a file in memory: os.preadv fills the destination, so loading adds nothing to the resident set
beyond one conversion buffer of CONVERSION_BUFFER_BYTES, and only where dtypes differ. The format itself is
safetensors_format.py; the index file is described at
https://huggingface.co/docs/transformers/big_models#sharded-checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from flexengine.checkpoint.layout import INDEX_FILE, SINGLE_FILE
from flexengine.checkpoint.safetensors_format import CheckpointError, TensorEntry, parse_json_object, read_header

__all__ = ["CheckpointError", "CheckpointReader", "TensorEntry"]

CONVERSION_BUFFER_BYTES = 16 << 20  # far above the size where a read's fixed cost matters, small beside any budget
CONVERTIBLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class CheckpointReader:
    """The tensors of one checkpoint folder, checked when opened, read on request.

    tensors: entry of each tensor by name (dtype, shape, place). shard_of: name -> file name. metadata: the strings of
    the index and the files' `__metadata__`. unlisted: tensors that shards hold but the index does not name; they are
    not readable, as the index is the authority.
    Safe to read from several threads (reads are positional); close() or leave the `with` block to free the files.
    """

    def __init__(self, folder: Path, descriptors: dict[str, int], tensors: dict[str, TensorEntry]) -> None:
        """Take over open files; use CheckpointReader.open."""
        assert sys.byteorder == "little", "safetensors are little-endian and are read without swapping"
        self.folder = folder
        self.tensors = tensors
        self.metadata: dict[str, str] = {}
        self.unlisted: tuple[str, ...] = ()
        self._descriptors = descriptors

    @classmethod
    def open(cls, folder: Path | str) -> CheckpointReader:
        """Open `folder`, which holds model.safetensors, or model.safetensors.index.json with its shards.

        Where both exist model.safetensors is read, as transformers does. Reads headers only.
        Raises: CheckpointError when files are missing, truncated or damaged, when the index lists a tensor that its
        shard lacks, and when two shards hold the same tensor.
        """
        folder = Path(folder)
        weight_map, index_metadata = _find_files(folder)
        files = [SINGLE_FILE] if weight_map is None else list(dict.fromkeys(weight_map.values()))
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise CheckpointError(
                f"{folder}: {INDEX_FILE} names {len(files)} shards, {len(missing)} are missing: "
                f"{', '.join(missing[:5])}{' ...' if len(missing) > 5 else ''}. Finish the download or copy them here."
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
            reader = cls(folder, descriptors, found if weight_map is None else _listed(weight_map, found, folder))
            reader.metadata = metadata
            reader.unlisted = tuple(name for name in found if name not in reader.tensors)
            undo.pop_all()
        return reader

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

    def read_into(self, name: str, dest: torch.Tensor, row_start: int = 0, num_rows: int | None = None) -> None:
        """Fill `dest` with rows [row_start, row_start + num_rows) of tensor `name` (all rows from row_start if None).

        Shapes: dest is contiguous, on the CPU, and has the shape of the rows up to dimensions of size 1, or is flat
        ([num_elements]). Rows count along dimension 0; a scalar has one row.
        dtypes: equal ones go from the file into dest's memory; F16, BF16, F32 and F64 convert to each other (rounding
        to nearest even) through a buffer of at most CONVERSION_BUFFER_BYTES.
        Raises: CheckpointError for an unknown name, rows out of range, differing shapes, dtypes without conversion,
        a file that shrank; OSError of the file system. dest's contents are undefined after an error.
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
        self._read_elements(entry, row_start * row_elements, dest.detach().view(-1))

    def read_float32_pieces(self, name: str, piece_elements: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (start_element, piece) over tensor `name` in row-major order; piece is float32 [up to piece_elements].

        Every piece is a view of one buffer of 4 * piece_elements bytes and is valid until the next one is taken.
        Raises: as read_into; CheckpointError for piece_elements < 1.
        """
        entry = self._entry(name)
        if piece_elements < 1:
            raise CheckpointError(f"{name}: piece_elements is {piece_elements}, must be at least 1.")
        buffer = torch.empty(min(piece_elements, entry.num_elements), dtype=torch.float32)
        _check_convertible(entry, buffer)
        for start in range(0, entry.num_elements, piece_elements):
            piece = buffer[: entry.num_elements - start]
            self._read_elements(entry, start, piece)
            yield start, piece

    def _entry(self, name: str) -> TensorEntry:
        if name not in self.tensors:
            some = ", ".join(list(self.tensors)[:3])
            raise CheckpointError(f"{self.folder}: no tensor {name!r} among {len(self.tensors)} (such as {some}).")
        return self.tensors[name]

    def _read_elements(self, entry: TensorEntry, start: int, dest: torch.Tensor) -> None:
        """Read dest.numel() elements from element `start` on into flat `dest`, converting piecewise where needed."""
        itemsize = entry.dtype.itemsize
        if entry.dtype == dest.dtype:
            self._read_bytes(entry, start * itemsize, dest)
            return
        step = min(CONVERSION_BUFFER_BYTES // itemsize, dest.numel())
        buffer = torch.empty(step, dtype=entry.dtype)
        for done in range(0, dest.numel(), step or 1):
            piece = buffer[: dest.numel() - done]
            self._read_bytes(entry, (start + done) * itemsize, piece)
            dest[done : done + piece.numel()].copy_(piece)

    def _read_bytes(self, entry: TensorEntry, skip_bytes: int, dest: torch.Tensor) -> None:
        """Fill flat `dest` with the file's bytes from `skip_bytes` into the tensor on; a read may return part of it."""
        if entry.file not in self._descriptors:
            raise CheckpointError(f"{self.folder}: reading {entry.name!r} after close().")
        memory = dest.view(torch.uint8).numpy().data
        position = entry.offset_bytes + skip_bytes
        while memory.nbytes:
            count = os.preadv(self._descriptors[entry.file], [memory], position)
            if count == 0:
                raise CheckpointError(
                    f"{self.folder / entry.file}: ended at byte {position} inside {entry.name!r}; it shrank since it "
                    "was opened. Leave checkpoint files alone while they are read."
                )
            memory, position = memory[count:], position + count


def _find_files(folder: Path) -> tuple[dict[str, str] | None, dict[str, str]]:
    """The index's weight map and metadata, or (None, {}) where a single file holds everything."""
    if (folder / SINGLE_FILE).is_file():
        return None, {}
    index_path = folder / INDEX_FILE
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
        raise CheckpointError(f"{index_path}: needs a non-empty 'weight_map' of tensor name to file name.")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(f"{index_path}: {name!r} lies in {file!r}, which is not a file name in {folder}.")
    metadata = index.get("metadata")
    return weight_map, {key: str(value) for key, value in metadata.items()} if isinstance(metadata, dict) else {}


def _add_entries(found: dict[str, TensorEntry], entries: list[TensorEntry], folder: Path) -> None:
    for entry in entries:
        if entry.name in found:
            raise CheckpointError(
                f"{folder}: tensor {entry.name!r} is in {found[entry.name].file} and in {entry.file}; which one "
                "counts is undefined. Fetch or export the checkpoint again."
            )
        found[entry.name] = entry


def _listed(weight_map: dict[str, str], found: dict[str, TensorEntry], folder: Path) -> dict[str, TensorEntry]:
    """The entries that the index lists, in its order."""
    for name, file in weight_map.items():
        if name not in found or found[name].file != file:
            where = f"it is in {found[name].file}" if name in found else "no shard holds it"
            raise CheckpointError(
                f"{folder / INDEX_FILE}: lists tensor {name!r} in {file}, but {where}. Index and shards are from "
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
    if entry.dtype != dest.dtype and not (entry.dtype in CONVERTIBLE and dest.dtype in CONVERTIBLE):
        raise CheckpointError(
            f"{entry.name}: no conversion from {entry.dtype} in the file to {dest.dtype}; only floats of 16 to 64 bits "
            "convert. Read it as it is stored, or convert the checkpoint first."
        )
