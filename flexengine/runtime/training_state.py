"""What a checkpoint holds of an engine: every stored plane as full-shape tensors, and a description in JSON.

Neither depends on where the plan puts a plane, so an engine under another plan, with other budgets, can take them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flexengine.checkpoint.reader import CheckpointReader, ReadRequest
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.checkpoint.snapshot import StoredTensor
from flexengine.checkpoint.state_files import FORMAT_VERSION
from flexengine.plan import Plan
from flexengine.runtime.staging import load_staged
from flexengine.runtime.weight_store import SourceRun, WeightStore, on_host


def tensor_name(plane: str, source: str) -> str:
    """The name in a checkpoint of one plane of a Hugging Face tensor, such as exp_avg/model.norm.weight."""
    return f"{plane}/{source}"


def is_stored(run: SourceRun, from_folder: bool) -> bool:
    """Whether a checkpoint holds a tensor. Frozen ones that lie in the model's folder as they are come from there."""
    return not (run.frozen and from_folder and run.source.decode is None)


def state_tensors(weights: WeightStore, from_folder: bool) -> list[StoredTensor]:
    """Views of all planes but gradients, group by group in the order of the model."""
    found = []
    for name, run in weights.runs.items():
        for plane in run.segment.planes if is_stored(run, from_folder) else ():
            if plane.kind != "grad":
                data = weights.plane(plane.kind, run)
                assert data is not None
                found.append(StoredTensor(tensor_name(plane.kind, name), run.source.shape, data))
    return found


def load_tensors(weights: WeightStore, reader: CheckpointReader, from_folder: bool) -> None:
    """Read all planes of a checkpoint to where the plan puts them, and compare the files with their checksums.

    Raises: CheckpointError where a tensor is missing or of another shape or dtype, before anything is read, and where
    a file differs from its checksum, when all is read.
    """
    wanted = state_tensors(weights, from_folder)
    _check_tensors(wanted, reader)
    requests = [ReadRequest(tensor.name, tensor.data) for tensor in wanted]
    elsewhere = [request for request in requests if not on_host(request)]
    with reader.verifying():
        reader.read_many([request for request in requests if on_host(request)])
        if elsewhere:
            load_staged(reader, elsewhere, weights.arenas.device)


def _check_tensors(wanted: list[StoredTensor], reader: CheckpointReader) -> None:
    for tensor in wanted:
        entry = reader.tensors.get(tensor.name)
        found = None if entry is None else (list(entry.shape), str(entry.dtype))
        if found != (list(tensor.shape), str(tensor.data.dtype)):
            raise CheckpointError(
                f"{reader.folder}: the checkpoint has {tensor.name} as {found}, this engine needs"
                f" {(list(tensor.shape), str(tensor.data.dtype))}. Resume with the model and dtypes of the run that"
                " saved it"
            )


# ---- the description ------------------------------------------------------------------------------------------


def describe_state(
    plan: Plan, optimizer: Any, seed: int, step_count: int, run_state: Mapping[str, Any] | None = None
) -> str:
    """Describe an engine's state as JSON. run_state: what the caller adds, such as where its data stands."""
    options = {name: value for name, value in asdict(optimizer).items() if name != "lr"}  # every step has its own lr
    engine = {
        "model": plan.model,
        "step_count": step_count,
        "optimizer": {"name": type(optimizer).__name__, "options": options},
        "numerics": asdict(plan.request.numerics),
        "seed": seed,
        "chunk_tokens": plan.chunk_tokens,
        "round_tokens": plan.round_tokens,
    }
    return json.dumps({"format_version": FORMAT_VERSION, "engine": engine, "run": dict(run_state or {})}, indent=1)


def check_description(engine: Mapping[str, Any], folder: Path | str, expected: Mapping[str, Any]) -> None:
    """Raise ValueError unless a checkpoint's engine trained as this one will: optimizer, dtypes and seed."""
    names = {"optimizer": "the optimizer", "numerics": "the dtypes", "seed": "the seed"}
    found = [
        f"{words} was {engine.get(name)}, but is {expected[name]}"
        for name, words in names.items()
        if engine.get(name) != expected[name]
    ]
    if found:
        raise ValueError(f"{folder} cannot be resumed: {'; '.join(found)}. Give what it was saved with")
