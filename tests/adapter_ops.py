"""Runs the ops of a layer with adapters one after another as a layer program does, over buffers filled with NaN."""

import torch

from flexengine.models.lora_layers import with_adapters
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import ChunkContext, OpEnv


def adapted(ops, rows, rank=3, scale=2.0, dropout=0.0, has_magnitude=False):
    """The ops with adapters beside the linear layers of these names; rows: (start, end) of their modules, by name."""
    found = []
    for op in ops:
        if op.name in rows:
            sizes = (op.in_features, op.out_features, rank, scale, tuple(range(*span) for span in rows[op.name]))
            found.append(Adapters(op.name, op.weight, *sizes, op.transposed, has_magnitude))
    frozen = tuple(op.untrained() if op.name in rows else op for op in ops)
    return with_adapters(frozen, tuple(found), dropout)


def chunk_of(tokens, dropout=None):
    empty = torch.empty(0)
    return ChunkContext(tokens, *[empty] * 4, (tokens,), empty, {}, dropout=dropout)


def unwritten(spec, tokens, dtype):
    shape = (spec.height(tokens), *spec.shape)
    if spec.dtype == "uint8":
        return torch.full(shape, 0x7F, dtype=torch.uint8)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.full(shape, float("nan"), dtype=wide if spec.dtype == "float32" else dtype)


def run_ops(ops, params, inputs, grads, *, chunk=None, before=None, lost=(), fused=True, chunks=1):
    """Outputs by name after forward, gradients of inputs and of trained parameters.

    grads: of the last outputs. before: gradients of inputs to add to. lost: tensors that backward must not read.
    fused: two ops that can be one are. chunks: how often backward adds to the parameters' gradients.
    """
    x = next(iter(inputs.values()))
    dtype, chunk = x.dtype, chunk or chunk_of(len(x))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    env = OpEnv(dict(inputs), params, {}, {}, chunk)
    env.gp = {n: torch.full(params[n].shape, float("nan"), dtype=wide) for op in ops if op.trained for n in op.params}
    for op in forward_ops(ops, fused):
        forward(op, env, dtype)
    found = {name: tensor.clone() for name, tensor in env.t.items()}
    for name in lost:
        env.t[name].fill_(float("nan"))
    for op in ops:
        if op.for_backward and op.outputs and op.outputs[0].name not in env.t:
            forward(op, env, dtype)
    for number in range(chunks):
        env.first, env.g = number == 0, {**grads, **{n: g.clone() for n, g in (before or {}).items()}}
        for op in reversed(ops):
            backward(op, env, dtype, over=chunks == 1)
    return found, {name: env.g[name] for name in inputs if name in env.g}, env.gp


def forward_ops(ops, fused):
    """What forward runs; unfused, codes are computed too, by themselves."""
    found = []
    for op in ops:
        both = found[-1].with_next(op) if found and fused else None
        if both is not None:
            found[-1] = both
        elif not op.for_backward or (hasattr(op, "kept") and op.keepable):
            found.append(op)
    return found


def forward(op, env, dtype):
    env.t |= {spec.name: unwritten(spec, env.chunk.tokens, dtype) for spec in (*op.outputs, *op.scratch("forward"))}
    if op.in_place:
        env.t[op.in_place[1]] = env.t[op.in_place[0]]
    op.forward(env)


def backward(op, env, dtype, over):
    if op.has_input_half:
        env.accumulate = frozenset(op.grad_inputs) & env.g.keys() - dict(op.grad_alias).keys()
        for name in set(op.grad_inputs) - env.accumulate:
            of = dict(op.grad_alias).get(name)
            fresh = env.t[name] if over and name in op.grad_over else torch.full_like(env.t[name], float("nan"))
            env.g[name] = fresh if of is None else env.g[of]
        env.t |= {spec.name: unwritten(spec, env.chunk.tokens, dtype) for spec in op.scratch("input")}
        op.backward_input(env)
    if op.has_weight_half:
        left = {spec.name for spec in op.scratch("input")} if op.has_input_half else set()
        new = (spec for spec in op.scratch("weight") if spec.name not in left)
        env.t |= {spec.name: unwritten(spec, env.chunk.tokens, dtype) for spec in new}
        op.backward_weight(env)
