"""Runs a model's layers op by op on the CPU, on one sequence, and shows what each op gives.

It is for comparisons with other code, and keeps all weights of a layer in the compute dtype. Shapes: T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.checkpoint.reader import CheckpointReader
from flexengine.models.checkpoints import open_checkpoint
from flexengine.models.spec import LayerSpec, ModelSpec, WeightSource
from flexengine.ops.base import ChunkContext, Op, OpEnv, TensorSpec


class OpOutput(NamedTuple):
    """What one op gives: its first output [T, ...] without the residual that it may add, and its parameters' sources.

    last: whether it is the last op of its layer, whose output with the residual is `whole`.
    """

    layer: str
    op: str
    output: Tensor
    whole: Tensor
    sources: tuple[str, ...]
    last: bool


def op_outputs(model: ModelSpec, folder: Path, ids: Sequence[int], dtype: torch.dtype) -> Iterator[OpOutput]:
    """Run forward and give the output of every op but those of the head, in order.

    Raises: ValueError where the checkpoint holds weights quantised.
    """
    with open_checkpoint(model, folder) as reader, torch.no_grad():
        named = model.named_as(reader.tensors)
        chunk, x = _chunk(named, ids, dtype), None
        for layer in named.layers[:-1]:
            tensors: dict[str, Tensor] = {} if layer.input is None or x is None else {layer.input: x}
            params = _params(named, layer, reader, dtype)
            for op in layer.ops:
                yield _run(layer, op, tensors, params, chunk, named)
            assert layer.output is not None, "the head alone has no output"
            x = tensors[layer.output]


def _run(
    layer: LayerSpec, op: Op, tensors: dict[str, Tensor], params: dict[str, Tensor], chunk: ChunkContext,
    model: ModelSpec,
) -> OpOutput:  # fmt: skip
    """Run one op; its outputs are added to the tensors."""
    dtype = next(param.dtype for param in params.values())
    made = {spec.name: _empty(spec, chunk.tokens, dtype) for spec in (*op.outputs, *op.scratch("forward"))}
    if op.in_place:
        source, target = op.in_place
        made[target] = tensors[source].clone()
    op.forward(OpEnv({**tensors, **made}, params, {}, {}, chunk))
    tensors |= {spec.name: made[spec.name] for spec in op.outputs}
    whole = made[op.outputs[0].name][: chunk.tokens]
    residual = getattr(op, "residual", None)
    sources = tuple(source.name for name in op.params for source in model.param_of(layer, name).sources)
    own = whole - tensors[residual] if residual else whole
    return OpOutput(layer.name, op.name, own.clone(), whole.clone(), sources, op is layer.ops[-1])


def _empty(spec: TensorSpec, tokens: int, dtype: torch.dtype) -> Tensor:
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    kinds = {"compute": dtype, "float32": wide, "int32": torch.int32, "uint8": torch.uint8}
    return torch.zeros(spec.height(tokens), *spec.shape, dtype=kinds[spec.dtype])


def _params(model: ModelSpec, layer: LayerSpec, reader: CheckpointReader, dtype: torch.dtype) -> dict[str, Tensor]:
    """Read the parameters and buffers of a layer, by the names that its ops use."""
    found = {}
    for local, _, _ in layer.params:
        param = model.param_of(layer, local)
        parts = [_read(reader, source, dtype).reshape(-1) for source in param.sources]
        found[local] = torch.cat(parts).view(param.shape)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return {**found, **{local: _read(reader, source, wide).reshape(-1) for local, source in layer.buffers}}


def _read(reader: CheckpointReader, source: WeightSource, dtype: torch.dtype) -> Tensor:
    if source.decode is not None:
        raise ValueError(
            f"{reader.folder}: {source.name} is quantised ({source.decode}), which is not compared op by op; give the "
            "checkpoint in 16 or 32 bits that it was made from"
        )
    tensor = torch.empty(source.shape, dtype=torch.float32)
    reader.read_into(source.name, tensor)
    return tensor.to(dtype)


def _chunk(model: ModelSpec, ids: Sequence[int], dtype: torch.dtype) -> ChunkContext:
    wide, tokens = torch.float64 if dtype == torch.float64 else torch.float32, len(ids)
    frequencies = {t.name: torch.tensor(t.values_for(tokens), dtype=torch.float32).to(wide) for t in model.tables}
    rows = torch.tensor(ids)
    return ChunkContext(
        tokens=tokens,
        input_ids=rows,
        labels=rows,
        positions=torch.arange(tokens, dtype=torch.int32),
        cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32),
        seq_lens=(tokens,),
        losses=torch.zeros(tokens, dtype=wide),
        constants={"attention_rng": torch.zeros(2, dtype=torch.int64), **frequencies},
    )
