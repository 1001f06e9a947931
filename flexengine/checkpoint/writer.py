"""Write a Hugging Face checkpoint folder, one tensor in memory at a time.

Headers follow from declared dtypes and shapes, so data streams to its final offset. All files are written into a new
folder, synced, and take the old folder's place together (staged_folder.py): an error leaves the folder as it was.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from flexengine.checkpoint.atomic import sha256_of
from flexengine.checkpoint.layout import (
    CONFIG_FILE,
    INDEX_FILE,
    RUN_FILE,
    SINGLE_FILE,
    is_file_name,
    is_support_file,
    is_tokenizer_file,
)
from flexengine.checkpoint.manifest import FOLDER_MANIFEST, FileRecord, manifest_text
from flexengine.checkpoint.safetensors_format import CheckpointError, build_header
from flexengine.checkpoint.shards import check_disk, split_by_size
from flexengine.checkpoint.staged_folder import staged_folder
from flexengine.wording import parse_json

__all__ = ["TensorSource", "support_files", "write_checkpoint"]

DEFAULT_SHARD_BYTES = 5 << 30  # near the 5 GB to which published checkpoints have long been split


class TensorSource(NamedTuple):
    """A tensor to be written: what it is, and how to get it when its turn comes.

    read() returns a tensor of this dtype and shape on any device, or its elements in flat tensors, one after the other;
    it is called once, and what it returns is dropped at once.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor | Iterable[torch.Tensor]]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_checkpoint(
    folder: Path | str,
    tensors: Iterable[TensorSource],
    shards: dict[str, str] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    metadata: dict[str, str] | None = None,
    beside: Mapping[str, Path | str] | None = None,
    with_manifest: bool = False,
    made_by: Mapping[str, Any] | None = None,
) -> list[Path]:
    """Write `tensors` as safetensors files into `folder` (created if absent); returns the paths, index last.

    shards: name -> file name, as CheckpointReader.shard_of gives it, reproduces that split; otherwise tensors fill
    shards in order up to max_shard_bytes (a larger tensor gets a shard of its own): model.safetensors when one is
    enough, else model-0000i-of-0000n.safetensors. Any split but a lone model.safetensors gets an index.
    metadata: strings for each file's header, {"format": "pt"} by default, which transformers requires.
    beside: files that appear with the tensors, such as the configuration: name -> a file to copy, or a text.
    with_manifest: also write the sizes and SHA-256 of all files, which `CheckpointReader` checks when it reads.
    made_by: what the manifest says beside them, as `provenance.made_by` makes it.
    A checkpoint that was in `folder` is replaced: shards that its index names and what tells of its run go, other
    files stay.
    Order: tensors are read shard by shard, within a shard by falling element size (keeps them aligned), then as given.
    Raises: CheckpointError for repeated names, a `shards` map that does not name exactly these tensors, read() results
    that differ from the declaration, too little disk space, a folder holding a checkpoint of the other layout, which
    loaders would confuse with this one; OSError; what read() raises. Nothing is left behind in any of these cases.
    """
    assert sys.byteorder == "little", "safetensors are little-endian and are written without swapping"
    folder, sources = Path(folder), list(tensors)
    plan = _plan_shards(sources, shards, max_shard_bytes)
    single = list(plan) == [SINGLE_FILE]
    headers = {file: _header(group, {"format": "pt"} if metadata is None else metadata) for file, group in plan.items()}
    files = [*plan, *([] if single else [INDEX_FILE])]
    with staged_folder(folder) as staged:
        _check_layout(folder, single)
        check_disk(folder, sum(source.num_bytes for source in sources))
        staged.drop({FOLDER_MANIFEST, RUN_FILE, *_listed_shards(folder)})
        records = {name: _write_beside(staged.stage(name), contents) for name, contents in (beside or {}).items()}
        for file, group in plan.items():
            records[file] = _write_shard(staged.stage(file), group, *headers[file])
        if not single:
            text = json.dumps(_index(plan), indent=2) + "\n"
            records[INDEX_FILE] = _write_beside(staged.stage(INDEX_FILE), text)
        if with_manifest:
            _write_beside(staged.stage(FOLDER_MANIFEST), manifest_text(records, made_by or {"source": "export"}))
    return [folder / file for file in files]


def support_files(folder: Path | str, tokenizer: Path | None = None, with_code: bool = False) -> dict[str, Path]:
    """Return what `layout.is_support_file` keeps of a model folder, as `write_checkpoint` takes it.

    With it goes the code that tokenizer and processors name as theirs (`auto_map`): it is copied, never run. tokenizer:
    the folder whose tokenizer and chat templates take the place of the model's. with_code: the model's code goes, too.
    """
    folder = Path(folder)
    found = {path.relative_to(folder).as_posix(): path for pattern in ("*", "*/*") for path in folder.glob(pattern)}
    kept = {name: found[name] for name in sorted(found) if is_support_file(name) and found[name].is_file()}
    # Else exports name no code of the model itself, as transformers has a class for every family.
    named = ("tokenizer_config.json", "processor_config.json", *([CONFIG_FILE] if with_code else []))
    configs = [path for name, path in kept.items() if name.endswith(named)]
    kept |= {name: found[name] for name in sorted(_code_of(configs, found))}
    if tokenizer is None or tokenizer == folder:
        return kept
    others = {name: path for name, path in kept.items() if not is_tokenizer_file(name)}
    return others | {n: p for n, p in support_files(tokenizer).items() if is_tokenizer_file(n) or n.endswith(".py")}


def _code_of(configs: Iterable[Path], found: Mapping[str, Path]) -> set[str]:
    """Find the Python files that configs name, and those that these import from beside them."""
    named = [name for path in configs for name in _auto_map(path)]
    code: set[str] = set()
    while named:
        name = f"{named.pop()}.py"
        if name in found and name not in code:
            code.add(name)
            text = found[name].read_text(encoding="utf-8", errors="replace")
            named += re.findall(r"^\s*from\s+\.(\w+)\s+import", text, re.MULTILINE)
    return code


def _auto_map(config: Path) -> list[str]:
    """The modules beside a config that its auto_map names; none where it is no such config."""
    try:
        classes = parse_json(config.read_bytes(), config)["auto_map"].values()
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
    flat = [name for entry in classes for name in (entry if isinstance(entry, list) else [entry])]
    return [name.partition(".")[0] for name in flat if isinstance(name, str) and "--" not in name]


def _plan_shards(
    sources: list[TensorSource], shards: dict[str, str] | None, max_shard_bytes: int
) -> dict[str, list[TensorSource]]:
    """File name -> its tensors in layout order."""
    names = [source.name for source in sources]
    if not names:
        raise CheckpointError("asked to write a checkpoint without tensors.")
    if len(set(names)) != len(names) or "__metadata__" in names:
        seen = {"__metadata__"}
        wrong = next(name for name in names if name in seen or seen.add(name))
        raise CheckpointError(
            f"tensor name {wrong!r} is given twice or reserved; every tensor needs a name of its own."
        )
    plan = _split_by_size(sources, max_shard_bytes) if shards is None else _split_by_map(sources, shards)
    return {file: sorted(group, key=lambda source: -source.dtype.itemsize) for file, group in plan.items()}


def _split_by_map(sources: list[TensorSource], shards: dict[str, str]) -> dict[str, list[TensorSource]]:
    names = {source.name for source in sources}
    if names != shards.keys():
        extra, absent = sorted(names - shards.keys()), sorted(shards.keys() - names)
        raise CheckpointError(
            f"the shard map and the tensors differ: {len(extra)} tensors without a shard {extra[:3]}, {len(absent)} in "
            f"the map without a tensor {absent[:3]}. Give a map of exactly the written tensors, or none."
        )
    plan: dict[str, list[TensorSource]] = {}
    for source in sources:
        file = shards[source.name]
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(
                f"shard of {source.name!r} is {file!r}; expected a plain name ending in .safetensors."
            )
        plan.setdefault(file, []).append(source)
    return dict(sorted(plan.items()))


def _split_by_size(sources: list[TensorSource], max_shard_bytes: int) -> dict[str, list[TensorSource]]:
    groups = split_by_size(sources, max_shard_bytes)
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def _header(group: list[TensorSource], metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    return build_header([(source.name, source.dtype, tuple(source.shape)) for source in group], metadata)


def _check_layout(folder: Path, single: bool) -> None:
    rival = folder / (INDEX_FILE if single else SINGLE_FILE)
    if rival.exists():
        raise CheckpointError(
            f"{folder}: already holds {rival.name}, and this checkpoint is {'one file' if single else 'sharded'}; with "
            "both, loaders may pick the old one. Write to an empty folder or remove the old checkpoint first."
        )


def _write_shard(path: Path, group: list[TensorSource], header: bytes, offset_of: dict[str, int]) -> FileRecord:
    digest = hashlib.sha256(header)
    with open(path, "wb") as file, ThreadPoolExecutor(1, "checksum") as aside:
        file.write(header)
        for source in group:
            assert file.tell() == offset_of[source.name], f"{source.name}: at {file.tell()}, header says otherwise"
            for data in _bytes_of(source):
                hashed = aside.submit(digest.update, data)  # neither holds the interpreter lock
                file.write(data)
                hashed.result()
        return FileRecord(file.tell(), digest.hexdigest())


def _write_beside(path: Path, contents: Path | str) -> FileRecord:
    if isinstance(contents, Path):
        shutil.copyfile(contents, path)
    else:
        path.write_text(contents, encoding="utf-8")
    return FileRecord(path.stat().st_size, sha256_of(path))


def _listed_shards(folder: Path) -> set[str]:
    """The shards that an index in `folder` names; none where there is no index that can be read."""
    try:
        weight_map = parse_json((folder / INDEX_FILE).read_bytes(), INDEX_FILE)["weight_map"]
        return {file for file in weight_map.values() if is_file_name(file) and file.endswith(".safetensors")}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return set()


def _bytes_of(source: TensorSource) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order, without a copy where it is contiguous on the CPU already."""
    found, count = source.read(), 0
    for tensor in [found] if isinstance(found, torch.Tensor) else found:
        if tensor.dtype != source.dtype or (tensor is found and tuple(tensor.shape) != tuple(source.shape)):
            raise _undeclared(source, f"{list(tensor.shape)} {tensor.dtype}")
        count += tensor.numel()
        yield tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
    if count != math.prod(source.shape):
        raise _undeclared(source, f"{count} elements")


def _undeclared(source: TensorSource, found: str) -> CheckpointError:
    return CheckpointError(
        f"tensor {source.name!r} was declared {list(source.shape)} {source.dtype}, but its source returned {found}."
    )


def _index(plan: dict[str, list[TensorSource]]) -> dict[str, dict]:
    weight_map = {source.name: file for file, group in plan.items() for source in group}
    total_bytes = sum(source.num_bytes for group in plan.values() for source in group)
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
