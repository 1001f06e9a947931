"""Checks that a model's layers hand on nothing but the hidden state, before anything is planned.

Its own forward is one chain of functions then, and the gradients of the blocks are those of the whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from flexengine.models.opaque.contexts import Context, LayerCalls, hidden_of
from flexengine.models.opaque.graph import leaves_of
from flexengine.models.opaque.skeleton import DTYPE, Skeleton, StructureError, Unread

TOKENS, TRACED_TOKENS = 5, 256
MOST_COMPARED = 1 << 22
"""Parameters of models whose gradients are compared with plain autograd's as well: that takes 64 MiB at the most."""
BOUND = 1e-4
"""Largest relative difference of gradients, in float32."""


class _Other:
    """What a layer gives beside the hidden state, such as weights of attention: nobody may use it."""


def check_contexts(skeleton: Skeleton) -> list[Context]:
    """Check that what layers are given beside the hidden state is the same for all inputs and weights; returns it.

    Raises: StructureError, naming what is not.
    """
    found, skeleton.others = [], _Other()
    for value in (0.0, 1.0):
        zero = torch.full((), value, dtype=DTYPE)
        values = {name: zero.expand(p.shape).requires_grad_() for name, p in skeleton.outside.items()}
        rows = torch.full((1, TOKENS, skeleton.input_width), value, dtype=DTYPE, requires_grad=True)
        with torch.enable_grad():
            found.append(skeleton.record(rows, values))
    skeleton.others = None
    for index, (one, other) in enumerate(zip(*found, strict=True)):
        for name, value in one.items():
            check_given(index, name, value, other.get(name))
    return found[0]


def check_given(index: int, name: str, value: Any, other: Any) -> None:
    """Check one thing that a layer is given. Raises: StructureError where it is more than a constant."""
    given = f"layer {index} is given {name} beside the hidden state"
    for leaf, same in zip(tree_leaves(value), tree_leaves(other), strict=True):
        if isinstance(leaf, Tensor):
            if leaf.requires_grad:
                raise StructureError(f"{given}, which has a gradient")
            if not torch.equal(leaf, same):
                raise StructureError(f"{given}, which depends on the tokens")
        elif isinstance(leaf, _Other):
            raise StructureError(f"{given}, which the layer before hands on")
        elif not isinstance(leaf, (bool, int, float, str, torch.dtype, type(None), Unread)):
            raise StructureError(f"{given}, an object of type {type(leaf).__name__}")


def check_layer(skeleton: Skeleton, index: int, context: Context) -> None:
    """Check on tensors without storage that a layer gives a function of the hidden state and its own weights.

    Raises: StructureError, saying what else it reads or hands on.
    """
    given = tree_map(lambda value: value.to("meta") if isinstance(value, Tensor) else value, context)
    weights = {
        name: torch.empty(p.shape, dtype=DTYPE, device="meta").requires_grad_()
        for name, p in skeleton.layers[index].named_parameters()
    }
    x = torch.empty(TOKENS, skeleton.width, dtype=DTYPE, device="meta", requires_grad=True)
    before = {name: [id(leaf) for leaf in tree_leaves(value)] for name, value in given.items()}
    with torch.enable_grad():
        found = skeleton.call_layer(index, weights, x, given)
    for name, value in given.items():
        if before[name] != [id(leaf) for leaf in tree_leaves(value)]:
            raise StructureError(f"layer {index} hands on {name} beside the hidden state")
    y = found[0] if isinstance(found, (tuple, list)) else found
    if y.shape != (1, TOKENS, *skeleton.inner):
        raise StructureError(f"layer {index} turns a hidden state of {list(x.shape)} into {list(y.shape)}")
    if leaves_of(y) - {id(x), *map(id, weights.values())}:
        raise StructureError(f"layer {index} reads parameters of other modules")


def check_gradients(skeleton: Skeleton, calls: LayerCalls) -> None:
    """Compare a small model, layer by layer, with plain autograd of its own forward, in loss and every gradient.

    Raises: StructureError where they differ. Larger models pass: what was checked without storage holds for them.
    """
    if sum(p.numel() for p in skeleton.model.parameters()) > MOST_COMPARED:
        return
    generator = torch.Generator().manual_seed(0)
    values = {
        name: (torch.randn(p.shape, generator=generator) * 0.1).requires_grad_()
        for name, p in skeleton.model.named_parameters()
    }
    ids = torch.arange(TOKENS)
    buffers = skeleton.buffers_of(skeleton.model, next(iter(values.values())))
    with torch.enable_grad():
        state = {**buffers, **values}
        whole = functional_call(skeleton.model, state, (), {"input_ids": ids[None], "use_cache": False}).logits[0]
        wanted = torch.autograd.grad(whole.float().square().sum(), list(values.values()), allow_unused=True)
        chained = _chained(skeleton, calls, values, ids)
        found = torch.autograd.grad(chained.float().square().sum(), list(values.values()), allow_unused=True)
    floor = BOUND * max(grad.norm().item() for grad in wanted if grad is not None)
    for name, one, other in zip(values, wanted, found, strict=True):
        difference = 0.0 if one is None and other is None else _norm(one, other)
        if not difference <= max(BOUND * _norm(one, None), floor):
            raise StructureError(f"layer by layer the gradient of {name} is not that of its own forward")


def takes_batches(skeleton: Skeleton, calls: LayerCalls, indices: Collection[int]) -> bool:
    """Whether these layers take two sequences of one length at once and give of each what they give of it alone.

    Numbers are compared where gradients are; of a larger model shapes are, without storage.
    """
    small = sum(p.numel() for p in skeleton.model.parameters()) <= MOST_COMPARED
    generator, x = torch.Generator().manual_seed(0), torch.empty(2 * TOKENS, skeleton.width, device="meta")
    try:
        contexts = skeleton.contexts(TOKENS, DTYPE, torch.device("cpu"), 2)
        for index in indices:
            found = hidden_of(skeleton.call_without_storage(index, contexts[index], TOKENS, 2))
            if found.shape != x.shape:
                return False
            if small:
                named = skeleton.layers[index].named_parameters()
                weights = {name: 0.1 * torch.randn(p.shape, generator=generator) for name, p in named}
                x = torch.randn(x.shape, generator=generator)
                with torch.no_grad():
                    alone = torch.cat([calls(index + 1, weights, part) for part in x.split(TOKENS)])
                    if not _norm(calls(index + 1, weights, x, (), 2), alone) <= BOUND * _norm(alone, None):
                        return False
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):  # it is made for one sequence
        return False
    return True


def _norm(one: Tensor | None, other: Tensor | None) -> float:
    parts = [tensor for tensor in (one, None if other is None else -other) if tensor is not None]
    return sum(parts[1:], parts[0]).norm().item() if parts else 0.0


def _chained(skeleton: Skeleton, calls: LayerCalls, values: Mapping[str, Tensor], ids: Tensor) -> Tensor:
    """The logits [T, V] as blocks make them."""
    own = {id(p): values[name] for name, p in skeleton.model.named_parameters()}
    outside = {name: own[id(p)] for name, p in skeleton.outside.items()}
    x = skeleton.first_input(next(iter(values.values())), outside, input_ids=ids[None])
    for index, layer in enumerate(skeleton.layers):
        weights = {name: own[id(p)] for name, p in layer.named_parameters()}
        x = calls(index + 1, weights, x)
    h = skeleton.after_layers(x, outside)
    return skeleton.logits(h, {name: own[id(p)] for name, p in skeleton.head_parameters.items()})
