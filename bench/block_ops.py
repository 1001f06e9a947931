"""Where a block's time goes: every op of a transformer block timed in all its halves, with the engine's own calls.

The ops run as in training at full chunks: gradients of parameters are added to float32 accumulators, a norm's input
gradient to that of the residual. Ops that a layer's program runs as one are one. Nothing is recomputed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.hardware.measure.timing import Timer
from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import ChunkContext, Op, OpEnv, TensorSpec, Work
from flexengine.schedule.save_sets import halves_of, in_pairs, leaving_out

KINDS = ("matmuls", "attention", "the rest")
HALVES = ("forward", "input gradient", "weight gradient")
WEIGHT_SCALE = 0.02  # of random weights, as models are initialised


class OpTime(NamedTuple):
    """One half of one op: seconds of a call, FLOPs of products and of attention, bytes beside them as declared."""

    op: str
    half: str
    kind: str
    seconds: float
    flops: float
    memory_bytes: float

    @property
    def flops_per_s(self) -> float:
        return self.flops / self.seconds


def block_times(
    spec: ModelSpec, tokens: int, seq_len: int, device: torch.device, dtype: torch.dtype, timer: Timer, least_s: float,
    block: int = 0,
) -> list[OpTime]:  # fmt: skip
    """Every half of every op of a block, on random data; sequences of `seq_len` tokens.

    Raises: ValueError unless seq_len divides tokens.
    """
    layer = spec.blocks[block]
    env = block_env(spec, layer, tokens, seq_len, device, dtype)
    times = []
    for op, half, call, work in _calls(layer, env, (tokens, seq_len, dtype.itemsize)):
        seconds = timer(call, least_s)
        times.append(OpTime(op.name, half, kind_of(op, tokens, seq_len), seconds, work.flops, work.memory_bytes))
    return times


def _calls(
    layer: LayerSpec, env: OpEnv, shape: tuple[int, int, int]
) -> Iterator[tuple[Op, str, Callable[[], object], Work]]:
    """(op, half, call, cost) of a block; forward first, so that backward finds what it writes."""
    all_halves = list(halves_of(layer.ops))
    unread = frozenset(spec.name for op in layer.ops for spec in op.outputs)
    unread -= {name for halves in all_halves for name in halves.needs}
    for op in in_pairs(layer.ops):
        run = leaving_out(op, unread)
        if run.outputs:
            yield run, HALVES[0], lambda op=run: op.forward(env), run.forward_work(*shape)
    for halves in all_halves:
        if halves.input is not None:
            op = halves.input
            yield op, HALVES[1], lambda op=op: op.backward_input(env), op.backward_input_work(*shape)
        for op in halves.weight:
            yield op, HALVES[2], lambda op=op: op.backward_weight(env), op.backward_weight_work(*shape)


def kind_of(op: Op, tokens: int, seq_len: int) -> str:
    """By what an op declares that it costs."""
    work = op.forward_work(tokens, seq_len, 2)
    if work.attention_forward_flops:
        return "attention"
    products = work.matmul_flops + work.grouped_flops + work.fp8_flops + work.fp8_weight_flops
    return "matmuls" if products else "the rest"


def block_env(
    spec: ModelSpec, layer: LayerSpec, tokens: int, seq_len: int, device: torch.device, dtype: torch.dtype
) -> OpEnv:
    """Random activations, gradients and weights for all ops of a layer. Raises: ValueError as `block_times`."""
    shapes = {
        local: next(p.shape for p in spec.groups[group].params if p.name == name) for local, group, name in layer.params
    }
    activations = _activations(layer, spec.hidden_size, tokens, device, dtype)
    gradients = {name: torch.randn_like(tensor) for name, tensor in activations.items() if tensor.is_floating_point()}
    ops = {*layer.ops, *(halves.input for halves in halves_of(layer.ops) if halves.input is not None)}
    scratch = [tensor for op in ops for half in ("forward", "input", "weight") for tensor in op.scratch(half)]
    activations |= {tensor.name: _empty(tensor, tokens, device, dtype) for tensor in scratch}
    weights = {n: (WEIGHT_SCALE * torch.randn(shape, device=device)).to(dtype) for n, shape in shapes.items()}
    buffers = {n: torch.zeros(source.shape, device=device, dtype=_wide(dtype)) for n, source in layer.buffers}
    return OpEnv(
        t=activations,
        p=weights | buffers,
        g=gradients,
        gp={n: torch.zeros(shape, device=device, dtype=_wide(dtype)) for n, shape in shapes.items()},
        chunk=_chunk(spec, tokens, seq_len, device, _wide(dtype)),
        accumulate=frozenset(residual for op in layer.ops for residual, _ in op.grad_alias),
        first=False,
    )


def _activations(
    layer: LayerSpec, width: int, tokens: int, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The layer's input and every op's outputs; an output that is written over its input shares its memory."""
    assert layer.input is not None, "a block has an input"
    tensors = {layer.input: torch.randn(tokens, width, device=device, dtype=dtype)}
    for op in layer.ops:
        for output in op.outputs:
            if op.in_place is not None and op.in_place[1] == output.name:
                tensors[output.name] = tensors[op.in_place[0]]
            else:
                tensor = _empty(output, tokens, device, dtype)
                tensors[output.name] = tensor.normal_() if tensor.is_floating_point() else tensor.zero_()
    return tensors


def _empty(tensor: TensorSpec, tokens: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    shape = (tensor.height(tokens), *tensor.shape)
    dtypes = {"compute": dtype, "float32": _wide(dtype), "int32": torch.int32, "uint8": torch.uint8}
    return torch.empty(shape, device=device, dtype=dtypes[tensor.dtype])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _chunk(spec: ModelSpec, tokens: int, seq_len: int, device: torch.device, wide: torch.dtype) -> ChunkContext:
    if tokens % seq_len:
        raise ValueError(f"{tokens} tokens are no whole number of sequences of {seq_len}; choose a multiple of it")
    count = tokens // seq_len
    ids = torch.zeros(tokens, dtype=torch.int64, device=device)
    return ChunkContext(
        tokens=tokens,
        input_ids=ids,
        labels=ids,
        positions=torch.arange(seq_len, device=device, dtype=torch.int32).repeat(count),
        cu_seqlens=torch.arange(0, tokens + 1, seq_len, device=device, dtype=torch.int32),
        seq_lens=(seq_len,) * count,
        losses=torch.zeros(tokens, device=device, dtype=wide),
        constants={
            **{table.name: torch.tensor(table.values, device=device, dtype=wide) for table in spec.tables},
            "attention_rng": torch.zeros(2, dtype=torch.int64, device=device),
        },
        attention="cudnn",  # where it serves
    )


def microseconds_per_token(times: list[OpTime], tokens: int) -> dict[str, dict[str, float]]:
    """By pass ("forward", "backward") and kind, and "all" of each pass."""
    columns: tuple[str, ...] = (*KINDS, "all")
    totals: dict[str, dict[str, float]] = {name: dict.fromkeys(columns, 0.0) for name in ("forward", "backward")}
    for time in times:
        per_token = 1e6 * time.seconds / tokens
        total = totals["forward" if time.half == HALVES[0] else "backward"]
        total[time.kind] += per_token
        total["all"] += per_token
    return totals
