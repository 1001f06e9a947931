"""A trained model as a Hugging Face folder: which tensors it has, and where each is taken from."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.checkpoint.adapter import save_adapter
from flexengine.checkpoint.adapter_config import adapter_config
from flexengine.checkpoint.layout import CONFIG_FILE
from flexengine.checkpoint.manifest import ManifestError, check_acted_on
from flexengine.checkpoint.quantised import EXPORT_DTYPE
from flexengine.checkpoint.reader import CheckpointReader
from flexengine.checkpoint.writer import TensorSource, support_files, write_checkpoint
from flexengine.models.checkpoints import HEADS, exported_name, open_checkpoint, stored_tensors
from flexengine.models.lora import Adapter, adapters
from flexengine.models.lora_files import file_targets, unread_by_peft
from flexengine.models.opaque.remote_code import digest_of_code
from flexengine.models.quantised_weights import without_quantisation
from flexengine.models.registry import ModelSource
from flexengine.models.spec import ModelSpec
from flexengine.runtime.not_finite import checked
from flexengine.runtime.weights.adapters import Begin, changed, file_tensors
from flexengine.runtime.weights.stored_matrices import read_pieces
from flexengine.runtime.weights.weight_store import WeightStore

logger = logging.getLogger(__name__)


def export_checkpoint(
    folder: str | Path,
    source: ModelSource,
    weights: WeightStore,
    buffers: dict[str, Tensor],
    texts: Mapping[str, str],
    made_by: Mapping[str, Any],
) -> None:
    """Write what `Engine.save_pretrained` promises. Buffers are written for a preset alone; a checkpoint has its own.

    texts: further files by name. made_by: what the manifest says beside the files. Order: nothing may be running that
    writes weights.
    """
    _tell_of_changes(source.support_folder)
    beside = {**_beside(source), **texts}
    if source.weights_folder is None:
        _export_preset(folder, source.spec, weights, buffers, beside, made_by)
    else:
        _export_over(folder, source.weights_folder, source.spec, weights, beside, made_by)


def _beside(source: ModelSource) -> dict[str, Path | str]:
    """What stands beside the weights: the model's own files, with the tokenizer that it was trained with."""
    folder = source.support_folder or source.tokenizer_folder
    with_code = bool(digest_of_code(source.spec.family))
    own = {} if folder is None else support_files(folder, source.tokenizer_folder, with_code)
    return {**own, **(source.texts or {})}


def export_adapter(
    folder: str | Path,
    source: ModelSource,
    weights: WeightStore,
    seed: int,
    texts: Mapping[str, str],
    made_by: Mapping[str, Any],
) -> None:
    """Write the adapters of a model that has some, as PEFT does, with the tokenizer of the model beneath.

    seed: the run's. texts: further files by name. made_by: what the manifest says beside the files. Order: nothing may
    be running that writes weights.
    Raises: NotFiniteError.
    """
    _tell_of_changes(source.support_folder)
    model, found = source.spec, list(adapters(source.spec))
    assert model.lora is not None
    begin = Begin(source.weights_folder, seed)
    tensors = {name: checked(name, tensor) for name, tensor in file_tensors(weights, begin)}
    base = made_by.get("made_from", {}).get("base", {})
    if unread := unread_by_peft(model):
        logger.warning(unread)
    transposed = any(adapter.transposed and adapter.module.kind != "experts" for adapter in found)
    name = base.get("repo", base.get("name", model.name))
    config = adapter_config(model.lora, file_targets(model), name, transposed, model.task and model.task.task)
    config |= {"revision": base["revision"]} if base.keys() >= {"repo", "revision"} else {}
    beside = _beside(source)
    beside.pop(CONFIG_FILE, None)  # it would make a model of the folder
    save_adapter(folder, config, tensors, {**beside, **texts}, made_by)


def _tell_of_changes(folder: Path | None) -> None:
    """Warn where what an export copies is no longer what its manifest says, which was compared when it was loaded."""
    try:
        if folder is not None:
            check_acted_on(folder)
    except ManifestError as error:
        _say_changed(error)


def _say_changed(error: Exception) -> None:
    """Warn rather than raise: hours of training would be lost with the export."""
    logger.warning("files of the model changed while it was trained, and are exported as they are now: %s", error)


class _Exported(NamedTuple):
    """The tensors of a model as they are exported: adapters are added to the weights that they change.

    adapter_of: by the name of the weight. scale: what the products of adapters are multiplied by.
    """

    weights: WeightStore
    adapter_of: Mapping[str, Adapter]
    scale: float

    @staticmethod
    def of(weights: WeightStore) -> _Exported:
        """Those of the model that the weights belong to."""
        model = weights.layout.model
        scale = 0.0 if model.lora is None else model.lora.scale
        return _Exported(weights, {adapter.weight.name: adapter for adapter in adapters(model)}, scale)

    def differs(self, name: str) -> bool:
        """Whether a tensor of this name is not what was loaded."""
        run = self.weights.runs.get(name)
        # What is trained beside a base in fewer bytes was fitted to its decoded values, so these are the model.
        # Beside adapters a tensor with new rows may have come out of their file.
        own = name in self.adapter_of or (self.weights.layout.model.lora is not None and self.grew(name))
        return run is not None and (not run.frozen or run.in_fewer_bytes or own)

    def grew(self, name: str) -> bool:
        """Whether a tensor of this name has rows that were not loaded."""
        run = self.weights.runs.get(name)
        return run is not None and run.source.rows_in_file is not None

    def tensor(self, name: str, dtype: torch.dtype) -> TensorSource:
        """A tensor, which is checked when its turn comes; an error then leaves the old folder as it was."""
        return TensorSource(name, dtype, self.weights.runs[name].source.shape, lambda: self._read(name, dtype))

    def _read(self, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
        adapter = self.adapter_of.get(name)
        if adapter is not None:
            for rows in changed(self.weights, adapter, self.scale):
                yield checked(name, rows.to(dtype)).flatten()
            return
        frozen = self.weights.runs[name].frozen
        for piece in self.weights.pieces(name, dtype):
            yield piece if frozen else checked(name, piece)


def _export_preset(
    folder: str | Path,
    model: ModelSpec,
    weights: WeightStore,
    buffers: dict[str, Tensor],
    beside: Mapping[str, Path | str],
    made_by: Mapping[str, Any],
) -> None:
    compute = weights.layout.plan.request.numerics.compute
    own = [name for name, run in weights.runs.items() if not run.param.added]
    exported = _Exported.of(weights)
    tensors = [exported.tensor(name, getattr(torch, compute)) for name in own]
    tensors += [
        TensorSource(name, torch.float32, tuple(buffer.shape), buffer.float) for name, buffer in buffers.items()
    ]
    beside = {**beside, CONFIG_FILE: _config_text(model, compute)}
    write_checkpoint(folder, tensors, beside=beside, with_manifest=True, made_by=made_by)


def _export_over(
    folder: str | Path,
    original: Path,
    model: ModelSpec,
    weights: WeightStore,
    beside: Mapping[str, Path | str],
    made_by: Mapping[str, Any],
) -> None:
    """What was loaded, with the tensors that were trained in the place of theirs."""
    decoded = {
        run.source.name: tuple(stored_tensors(run.source))
        for run in weights.runs.values()
        if run.source.decode is not None
    }
    dtype = str(EXPORT_DTYPE).removeprefix("torch.") if decoded else None
    text = _config_text(model, dtype)
    if json.loads(text) != json.loads((original / CONFIG_FILE).read_bytes()):
        beside = {**beside, CONFIG_FILE: text}
    exported, parts = _Exported.of(weights), {part for names in decoded.values() for part in names}
    with open_checkpoint(model, original) as reader, reader.verifying(_say_changed):
        left = {name for name in reader.tensors if model.task is not None and name.startswith(HEADS)} | parts
        kept = {name: _as_stored(reader, name, model, exported) for name in reader.tensors if name not in left}
        # What is decoded is called as the first of its parts, without what a part's name has beside.
        stored = {
            name: reader.tensors[first].name.removesuffix(first.removeprefix(name))
            for name, (first, *_) in decoded.items()
        }
        stored |= {name: reader.tensors[name].name for name in kept}
        tensors = {**kept, **{name: exported.tensor(name, EXPORT_DTYPE) for name in decoded}}
        tensors |= {name: exported.tensor(name, _dtype_of(reader, model)) for name in _new(weights)}
        written = {name: exported_name(model, name, stored.get(name, name)) for name in tensors}
        files = {name: reader.tensors[name].file for name in kept}
        files |= dict.fromkeys(_new(weights), max(files.values(), default=""))
        shards = None if decoded else {written[name]: file for name, file in files.items()}
        renamed = [tensor._replace(name=written[name]) for name, tensor in tensors.items()]
        write_checkpoint(folder, renamed, shards, beside=beside, with_manifest=True, made_by=made_by)


def _new(weights: WeightStore) -> list[str]:
    """Name the tensors of the model that its checkpoint lacks."""
    return [name for name, run in weights.runs.items() if run.param.new]


def _dtype_of(reader: CheckpointReader, model: ModelSpec) -> torch.dtype:
    """The dtype of what is written beside a checkpoint's tensors: that of its embedding."""
    entry = reader.tensors.get(model.embedding_source)
    return EXPORT_DTYPE if entry is None or not entry.dtype.is_floating_point else entry.dtype


def _as_stored(reader: CheckpointReader, name: str, model: ModelSpec, exported: _Exported) -> TensorSource:
    """A tensor of the source checkpoint: trained, tied to a trained one, or carried through untouched."""
    entry, tied = reader.tensors[name], model.tie_word_embeddings and name == model.head_source
    source = model.embedding_source if tied else name
    if exported.differs(source):
        return exported.tensor(source, entry.dtype)

    if exported.grew(source):
        shape = exported.weights.runs[source].source.shape
        return TensorSource(name, entry.dtype, shape, lambda: _grown(reader, exported.weights, source, entry.dtype))
    count = math.prod(entry.shape)
    return TensorSource(name, entry.dtype, tuple(entry.shape), lambda: read_pieces(reader, name, count, entry.dtype))


def _grown(reader: CheckpointReader, weights: WeightStore, name: str, dtype: torch.dtype) -> Iterator[Tensor]:
    """Read a frozen tensor to which rows were added: those of the checkpoint as they are, then the new ones."""
    held = math.prod(weights.runs[name].source.shape_in_file)
    yield from read_pieces(reader, name, held, dtype)
    yield from weights.pieces(name, dtype, held)


def _config_text(model: ModelSpec, dtype: str | None) -> str:
    """Describe exported weights as config.json does. dtype: theirs; None for that of the checkpoint they came from.

    What is exported has no quantised weights and, where transformers has a class for the family, no code beside it that
    `auto_map` could name.
    """
    dropped = {"auto_map": not digest_of_code(model.family), "torch_dtype": dtype is not None}
    config = {name: value for name, value in without_quantisation(model.hf_config).items() if not dropped.get(name)}
    return json.dumps(config if dtype is None else {**config, "dtype": dtype}, indent=2) + "\n"
