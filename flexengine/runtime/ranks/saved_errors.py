"""What rounding has lost of gradients that nodes exchange, as tensors of a checkpoint.

Each node has errors of its own: one flat tensor for each of them and each group, in the order of the group's gradient.
Ranks of the first node get those of the others over the network and write them beside the checkpoint, as its rank 0
writes all files, and its host has no room for them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from flexengine.checkpoint.reader import CheckpointReader, ReadRequest
from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.checkpoint.snapshot import StoredTensor
from flexengine.plan import Request
from flexengine.runtime.arena import DTYPES
from flexengine.runtime.ranks.context import RankContext, SeveralRanks
from flexengine.runtime.ranks.dealt_states import WRITTEN_BYTES, RanksFile, file_of_ranks
from flexengine.runtime.ranks.kept_errors import KeptErrors
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.node_exchange import ERROR_DTYPE

PREFIX = "exchange_error/"
_DTYPE = DTYPES[ERROR_DTYPE]


def are_taken(saved: Mapping[str, Any], request: Request) -> bool:
    """Whether a run of such a request goes on with the errors of a checkpoint's engine."""
    found = saved.get("exchange")
    return found is not None and (found["sent"], found["nodes"]) == (request.exchanged, request.nodes)


def describe_errors(errors: KeptErrors | None, request: Request) -> dict[str, Any]:
    """What a checkpoint says of errors, as JSON values; nothing where none are kept."""
    if errors is None:
        return {}
    kept = {"weight": errors.weight, "usual": errors.usual}
    return {"exchange": {"sent": request.exchanged, "nodes": request.nodes, **kept}}


def gather_errors(layout: Layout, context: RankContext, folder: Path) -> list[StoredTensor]:
    """Gather the errors of all nodes where the rank that writes files reads them; none on the others.

    All ranks make this call, when nothing of them runs. Raises: CheckpointError where the disk is too small; OSError.
    """
    if context.errors is None or not isinstance(context, SeveralRanks):
        return []
    names, begins, counts = list[str](), dict[tuple[int, int], int](), list[int]()
    for node in range(context.ranks.nodes):
        for group, spec in enumerate(layout.model.groups):
            if not spec.frozen:
                names.append(_name(node, spec.name))
                begins[node, group] = sum(counts) * _DTYPE.itemsize
                counts.append(layout.groups[group].numel)

    def write(file: RanksFile) -> None:
        _write_all(file, context, begins)

    raw = file_of_ranks(context, folder, sum(counts) * _DTYPE.itemsize, write)
    if raw is None:
        return []
    found = raw.view(_DTYPE).split(counts)
    return [StoredTensor(name, (len(data),), data) for name, data in zip(names, found, strict=True)]


def error_requests(layout: Layout, context: RankContext, reader: CheckpointReader) -> list[ReadRequest]:
    """What this rank reads of a checkpoint's errors. Raises: CheckpointError where they are not those of the model."""
    if context.errors is None or not isinstance(context, SeveralRanks):
        return []
    found = []
    for piece in context.errors.pieces:
        name = _name(context.ranks.node, layout.model.groups[piece.group].name)
        entry, shape = reader.tensors.get(name), (layout.groups[piece.group].numel,)
        if entry is None or (tuple(entry.shape), entry.dtype) != (shape, _DTYPE):
            raise CheckpointError(f"{reader.folder} lacks {name} {list(shape)} in {_DTYPE}; resume another checkpoint")
        found.append(ReadRequest(name, context.errors.of(piece), first_element=piece.first))
    return found


def _name(node: int, group: str) -> str:
    return f"{PREFIX}{node}/{group}"


def _write_all(file: RanksFile, context: SeveralRanks, begins: Mapping[tuple[int, int], int]) -> None:
    """Send this rank's errors to the rank of the first node that has its place there, which writes those of all
    nodes."""
    assert context.errors is not None
    assert context.link is not None, "there are several nodes"
    count = max(1, WRITTEN_BYTES // (_DTYPE.itemsize * context.ranks.nodes))
    for piece in context.errors.pieces:
        for start, data in enumerate(context.errors.of(piece).split(count)):
            sizes = [data.numel() * _DTYPE.itemsize] * context.ranks.nodes
            for node, of_node in enumerate(context.link.collect(data.view(torch.uint8), sizes)):
                file.write(begins[node, piece.group] + (piece.first + start * count) * _DTYPE.itemsize, of_node)
