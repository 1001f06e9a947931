"""A trained model as a Hugging Face folder: which tensors it has, and where each is taken from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from flexengine.checkpoint.layout import CONFIG_FILE
from flexengine.checkpoint.quantised import EXPORT_DTYPE
from flexengine.checkpoint.reader import CheckpointReader
from flexengine.checkpoint.writer import TensorSource, support_files, write_checkpoint
from flexengine.models.registry import ModelSource
from flexengine.models.spec import ModelSpec
from flexengine.runtime.not_finite import checked
from flexengine.runtime.weight_store import WeightStore, stored_tensors


def export_checkpoint(
    folder: str | Path, source: ModelSource, weights: WeightStore, buffers: dict[str, Tensor], texts: Mapping[str, str]
) -> None:
    """Write what `Engine.save_pretrained` promises. Buffers are written for a preset alone; a checkpoint has its own.

    texts: further files by name. Order: nothing may be running that writes weights.
    """
    beside = {**({} if source.support_folder is None else support_files(source.support_folder)), **texts}
    if source.weights_folder is None:
        _export_preset(folder, source.spec, weights, buffers, beside)
    else:
        _export_over(folder, source.weights_folder, source.spec, weights, beside)


def _export_preset(
    folder: str | Path,
    model: ModelSpec,
    weights: WeightStore,
    buffers: dict[str, Tensor],
    beside: Mapping[str, Path | str],
) -> None:
    compute = weights.layout.plan.request.numerics.compute
    tensors = [_trained(weights, name, getattr(torch, compute)) for name in weights.runs]
    tensors += [
        TensorSource(name, torch.float32, tuple(buffer.shape), buffer.float) for name, buffer in buffers.items()
    ]
    beside = {**beside, CONFIG_FILE: _config_text(model, compute)}
    write_checkpoint(folder, tensors, beside=beside, with_manifest=True)


def _export_over(
    folder: str | Path, original: Path, model: ModelSpec, weights: WeightStore, beside: Mapping[str, Path | str]
) -> None:
    """What was loaded, with the tensors that were trained in the place of theirs."""
    decoded = {
        part: run.source.name
        for run in weights.runs.values()
        if run.source.decode is not None
        for part in stored_tensors(run.source)
    }
    if decoded:
        beside = {**beside, CONFIG_FILE: _config_text(model, str(EXPORT_DTYPE).removeprefix("torch."))}
    with CheckpointReader.open(original) as reader:
        kept = [_as_stored(reader, name, model, weights) for name in reader.tensors if name not in decoded]
        tensors = [*kept, *(_trained(weights, name, EXPORT_DTYPE) for name in dict.fromkeys(decoded.values()))]
        shards = None if decoded else reader.shard_of
        write_checkpoint(folder, tensors, shards, beside=beside, with_manifest=True)


def _trained(weights: WeightStore, name: str, dtype: torch.dtype) -> TensorSource:
    """A trained tensor, which is checked when its turn comes; an error then leaves the old folder as it was."""

    def read() -> Tensor:
        weight = weights.read(name, dtype)
        return weight if weights.runs[name].frozen else checked(name, weight)

    return TensorSource(name, dtype, weights.runs[name].source.shape, read)


def _as_stored(reader: CheckpointReader, name: str, model: ModelSpec, weights: WeightStore) -> TensorSource:
    """A tensor of the source checkpoint: trained, tied to a trained one, or carried through untouched."""
    entry, tied = reader.tensors[name], model.tie_word_embeddings and name == model.head_source
    source = model.embedding_source if tied else name
    run = weights.runs.get(source)
    # What is trained beside a base in fewer bytes was fitted to its decoded values, so these are the model.
    if run is not None and (not run.frozen or run.in_fewer_bytes):
        return _trained(weights, source, entry.dtype)._replace(name=name)

    def carried() -> Tensor:
        tensor = torch.empty(entry.shape, dtype=entry.dtype)
        reader.read_into(name, tensor)
        return tensor

    return TensorSource(name, entry.dtype, tuple(entry.shape), carried)


def _config_text(model: ModelSpec, dtype: str) -> str:
    config = {**model.hf_config, "dtype": dtype}
    for name in ("torch_dtype", "quantization_config"):
        config.pop(name, None)
    return json.dumps(config, indent=2) + "\n"
