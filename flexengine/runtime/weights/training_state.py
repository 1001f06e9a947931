"""What a checkpoint holds of an engine: every stored plane as full-shape tensors, and a description in JSON.

Neither depends on where the plan puts a plane, so an engine under another plan, with other budgets, can take them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flexengine.checkpoint.reader import CheckpointReader, ReadRequest
from flexengine.checkpoint.snapshot import StoredTensor
from flexengine.checkpoint.state_files import FORMAT_VERSION
from flexengine.models.spec import ModelSpec
from flexengine.plan import Numerics, Plan
from flexengine.runtime.arena import DTYPES
from flexengine.runtime.ranks.dealt_states import DealtTensor
from flexengine.runtime.ranks.saved_errors import PREFIX
from flexengine.runtime.step_state import StepState
from flexengine.runtime.weights.staging import load_staged, on_host
from flexengine.runtime.weights.weight_store import SourceRun, WeightStore
from flexengine.schedule.group_storage import Plane
from flexengine.schedule.shares import ALONE


def tensor_name(plane: str, source: str) -> str:
    """The name in a checkpoint of one plane of a Hugging Face tensor, such as exp_avg/model.norm.weight."""
    return f"{plane}/{source}"


def state_tensors(weights: WeightStore, gathered: Mapping[str, Tensor] | None = None) -> list[StoredTensor]:
    """Views of all planes of what is trained, but for gradients, in the order of the model.

    What is frozen comes from the model's folder or from the seed. A plane whose entries stand for blocks of elements,
    as scales do, is one tensor for each segment of a group, since tensors need not begin with a block. gathered: by
    name, what ranks divide; what it lacks of that has a shape and a dtype, and no memory.
    """
    found: dict[str, StoredTensor] = {}
    for name, run in weights.runs.items():
        for plane in () if run.frozen else run.segment.planes:
            if plane.kind == "grad":
                continue
            if weights.layout.is_divided(plane.kind, run.group):
                stored = _divided_tensor(weights, name, run, plane, gathered or {})
            elif plane.block == 1:
                data = weights.plane(plane.kind, run)
                assert data is not None
                stored = StoredTensor(tensor_name(plane.kind, name), run.source.shape, data)
            else:
                group = weights.layout.model.groups[run.group].name
                data = _whole_plane(weights, run, plane)
                stored = StoredTensor(tensor_name(plane.kind, f"{group}.{run.segment.name}"), tuple(data.shape), data)
            found[stored.name] = stored
    return list(found.values())


def _divided_tensor(
    weights: WeightStore, name: str, run: SourceRun, plane: Plane, gathered: Mapping[str, Tensor]
) -> StoredTensor:
    tensor = _dealt_tensor(weights, name, run, plane)
    count = tensor.num_bytes // tensor.dtype.itemsize
    data = gathered.get(tensor.name, torch.empty(count, dtype=tensor.dtype, device="meta"))
    return StoredTensor(tensor.name, run.source.shape if plane.block == 1 else (count,), data)


def _dealt_tensor(weights: WeightStore, name: str, run: SourceRun, plane: Plane) -> DealtTensor:
    if plane.block == 1:
        return DealtTensor(tensor_name(plane.kind, name), run, plane, run.start, run.count)
    group = weights.layout.model.groups[run.group].name
    return DealtTensor(tensor_name(plane.kind, f"{group}.{run.segment.name}"), run, plane, 0, run.segment.numel)


def dealt_tensors(weights: WeightStore) -> list[DealtTensor]:
    """The tensors of a checkpoint that ranks divide, in the order of the model."""
    rows = ((name, run, plane) for name, run in weights.runs.items() if not run.frozen for plane in run.segment.planes)
    dealt = (_dealt_tensor(weights, *row) for row in rows if weights.layout.is_divided(row[2].kind, row[1].group))
    return list({tensor.name: tensor for tensor in dealt}.values())


def _whole_plane(weights: WeightStore, run: SourceRun, plane: Plane) -> Tensor:
    """View one plane of the segment that a source lies in."""
    dtype = DTYPES[plane.dtype]
    slot = weights.layout.slots[weights.layout.stored_slot(plane.kind, run.group)]
    count = plane.num_bytes(run.segment.numel) // dtype.itemsize
    start = weights.layout.plane_start(run.group, run.segment, plane, ALONE)[0]
    return weights.arenas.view(slot, start, (count,), dtype)


def load_tensors(weights: WeightStore, reader: CheckpointReader, more: Sequence[ReadRequest] = ()) -> None:
    """Read all planes of a checkpoint to where the plan puts them, and compare the files with their checksums.

    Of several ranks, each reads some of the planes and its own part of what ranks divide, and the first compares the
    files. more: what this rank reads besides.

    Raises: CheckpointError where a file differs from its checksum, when all is read.
    """
    dealt = dealt_tensors(weights)
    divided = {tensor.name for tensor in dealt}
    shared = [tensor for tensor in state_tensors(weights) if tensor.name not in divided]
    requests = [*more, *(ReadRequest(tensor.name, tensor.data) for tensor in weights.share.every(shared))]
    for tensor in dealt:
        own = tensor.own(weights)
        requests += [ReadRequest(tensor.name, data, first_element=first) for first, data in own if data.numel()]
    elsewhere = [request for request in requests if not on_host(request)]
    with reader.verifying() if weights.share.rank == 0 else nullcontext():
        reader.read_many([request for request in requests if on_host(request)])
        if elsewhere:
            load_staged(reader, elsewhere, weights.arenas.device)


def check_same_tensors(weights: WeightStore, reader: CheckpointReader) -> None:
    """Raise ValueError unless a checkpoint holds exactly the tensors that are trained here, in their shapes and dtypes.

    One that holds more was saved by a run that trained more, whose work would be lost without a word. What exchanges
    between nodes have lost is left to the caller.
    """
    wanted = {tensor.name: (list(tensor.shape), str(tensor.data.dtype)) for tensor in state_tensors(weights)}
    found = {name: (list(entry.shape), str(entry.dtype)) for name, entry in reader.tensors.items()}
    found = {name: entry for name, entry in found.items() if not name.startswith(PREFIX)}
    differing = [name for name in (*wanted, *found) if wanted.get(name) != found.get(name)]
    if differing:
        name = differing[0]
        raise ValueError(
            f"{reader.folder}: the checkpoint has {name} as {found.get(name)}, this engine needs {wanted.get(name)}."
            " Resume with the model, the dtypes, and the frozen layers or adapters of the run that saved it"
        )


# ---- the description ------------------------------------------------------------------------------------------


def training_of(optimizer: Any, numerics: Numerics, seed: int) -> dict[str, Any]:
    """What a checkpoint and the engine that loads it must have in common, as JSON values."""
    options = {name: value for name, value in asdict(optimizer).items() if name != "lr"}  # every step has its own lr
    value = {"optimizer": {"name": type(optimizer).__name__, **options}, "numerics": asdict(numerics), "seed": seed}
    return json.loads(json.dumps(value))


def describe_adapters(model: ModelSpec) -> dict[str, Any]:
    """What a checkpoint of adapters and the engine that loads it must have in common beside their tensors."""
    lora = model.lora
    return {"lora": None if lora is None else {"rank": lora.rank, "scale": lora.scale}}


def describe_state(
    plan: Plan, training: Mapping[str, Any], state: StepState, run_state: Mapping[str, Any] | None = None
) -> str:
    """Describe an engine's state as JSON.

    training: `training_of` and `describe_adapters` of the engine. state: its count of steps and loss scale. run_state:
    what the caller adds, such as where its data stands.
    """
    engine = {
        "model": plan.model,
        "step_count": state.step_count,
        **training,
        "chunk_tokens": plan.chunk_tokens,
        "round_tokens": plan.round_tokens,
        "round_multiple": plan.round_multiple,
        "nodes": plan.request.nodes,
    }
    if state.loss_scale is not None:
        engine["loss_scale"] = asdict(state.loss_scale)
    return json.dumps({"format_version": FORMAT_VERSION, "engine": engine, "run": dict(run_state or {})}, indent=1)


def check_same_training(engine: Mapping[str, Any], folder: Path | str, wanted: Mapping[str, Any]) -> None:
    """Raise ValueError unless a checkpoint's engine trained as `wanted`, which `training_of` gives."""
    found = [
        f"{name} was {_shown(engine.get(name))}, is {_shown(wanted[name])}"
        for name in wanted
        if engine.get(name) != wanted[name]
    ]
    if found:
        raise ValueError(f"{folder} cannot be resumed: {'; '.join(found)}. Give what it was saved with")


def _shown(value: Any) -> str:
    """Write a mapping as its values with names, without braces and quotation marks."""
    return " ".join(f"{name}={item}" for name, item in value.items()) if isinstance(value, dict) else str(value)
