"""Describes a decoder of transformers as opaque blocks: one op for each layer, what is around them as it is."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch import nn

from flexengine.models.decoder import LayerContent, assemble
from flexengine.models.opaque.checks import TRACED_TOKENS, check_contexts, check_gradients, check_layer, takes_batches
from flexengine.models.opaque.contexts import Context, LayerCalls
from flexengine.models.opaque.edges import Edges, parameter
from flexengine.models.opaque.linears import linears_of
from flexengine.models.opaque.loading import empty_model
from flexengine.models.opaque.names import sources_of
from flexengine.models.opaque.skeleton import Skeleton, StructureError
from flexengine.models.spec import ModelSpec, WeightSource
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.opaque import OpaqueBlock
from flexengine.ops.opaque_cost import CostCurve

NOTICE = "runs as opaque blocks: recomputed, not fused"
UNBALANCED = "; the loss that balances experts is left out"


def build(name: str, config: dict[str, Any]) -> ModelSpec:
    """Describe the model of a config that transformers knows.

    Raises: ValueError, saying what is in the way, for one that does not run layer by layer.
    """
    skeleton = Skeleton(empty_model(config))
    skeleton.learn_outputs()
    edges, calls = Edges(skeleton), skeleton.titled(LayerCalls(skeleton))
    contexts, in_batches = _check(skeleton, calls)
    text = skeleton.model.config.get_text_config()
    spec = assemble(
        name,
        config["model_type"],
        config,
        embedding=edges.embedding(),
        blocks=_blocks(edges, calls, contexts, in_batches),
        head=edges.head(),
        hidden_size=skeleton.width,
        vocab_size=edges.vocab_size,
        head_dim=_head_dim(text) or skeleton.width // (getattr(text, "num_attention_heads", 0) or 1),
        max_position_embeddings=getattr(text, "max_position_embeddings", None) or 2048,
        longest_sequence=skeleton.longest_sequence,
        initializer_range=getattr(text, "initializer_range", None) or 0.02,
        tie_word_embeddings=edges.tied,
        head_source=edges.head_source,
        prefix=edges.prefix,
        notice=NOTICE + (UNBALANCED if getattr(text, "output_router_logits", False) else ""),
    )
    _check_sources(spec)
    return spec


def _head_dim(text: Any) -> int | None:
    found = text.to_dict().get("head_dim")  # as an attribute it is refused where layers differ in it
    return found if isinstance(found, int) else None


def _check_sources(spec: ModelSpec) -> None:
    """Raise StructureError where parameters share a tensor of checkpoints, of which each has some rows."""
    names = Counter(source.name for group in spec.groups for param in group.params for source in param.sources)
    shared = [name for name, count in names.items() if count > 1]
    if shared:
        raise StructureError(
            f"checkpoints hold {names[shared[0]]} of the model's parameters in one tensor, {shared[0]}"
        )


def _check(skeleton: Skeleton, calls: LayerCalls) -> tuple[list[Context], bool]:
    """What layers are given beside the hidden state, of which they are a chain of functions; whether they take batches.

    Raises: StructureError where they are no such chain.
    """
    kinds = {_kind(skeleton, index): index for index in reversed(range(len(skeleton.layers)))}
    contexts = check_contexts(skeleton)
    for index in kinds.values():
        check_layer(skeleton, index, contexts[index])
        calls.cost(index, min(TRACED_TOKENS, skeleton.longest_sequence or TRACED_TOKENS))
    check_gradients(skeleton, calls)
    return contexts, takes_batches(skeleton, calls, kinds.values())


def _blocks(edges: Edges, calls: LayerCalls, contexts: list[Context], in_batches: bool) -> list[LayerContent]:
    known, blocks, skeleton = {}, [], calls.skeleton
    entry = edges.entry()
    for index, layer in enumerate(skeleton.layers):
        key = _kind(skeleton, index), index == 0 and bool(entry.ops)
        params = tuple(parameter(skeleton, name, p) for name, p in layer.named_parameters())
        buffers = _buffers(skeleton, layer)
        if key not in known:

            def cost_of(adapters: tuple[Adapters, ...], trained: tuple[str, ...], index: int = index) -> CostCurve:
                return CostCurve(
                    lambda tokens, sequences: calls.cost(index, tokens, adapters, trained, sequences),
                    skeleton.longest_sequence,
                )

            names = tuple(param.name for param in params)
            op = OpaqueBlock(
                "layer", ("entered" if key[1] else "x", "y"), (skeleton.width, skeleton.width), names, calls, cost_of
            )
            op.buffers, op.in_batches = tuple(name for name, _ in buffers), in_batches
            op.linears = linears_of(skeleton, index, contexts[index])
            known[key] = (*entry.ops, op) if key[1] else (op,)
        own = LayerContent(known[key], params, buffers)
        blocks.append(
            own._replace(params=(*entry.params, *params), buffers=(*entry.buffers, *buffers)) if key[1] else own
        )
    return blocks


def _buffers(skeleton: Skeleton, layer: nn.Module) -> tuple[tuple[str, WeightSource], ...]:
    """Buffers of a layer that checkpoints hold, by name."""
    stored, prefix = layer.state_dict(), skeleton.modules[id(layer)]
    return tuple(
        (name, sources_of(skeleton.model, f"{prefix}.{name}", tuple(buffer.shape))[0])
        for name, buffer in layer.named_buffers()
        if name in stored
    )


def _kind(skeleton: Skeleton, index: int) -> str:
    """What two layers have in common that share an op: modules, shapes, numbers, and what the config says of each."""
    facts: list[Any] = []
    for name, module in skeleton.layers[index].named_modules():
        simple = {k: v for k, v in vars(module).items() if isinstance(v, (int, float, str, bool, type(None)))}
        shapes = [(n, tuple(p.shape)) for n, p in module.named_parameters(recurse=False)]
        facts.append((name, type(module), sorted((k, repr(v)) for k, v in simple.items() if k != "layer_idx"), shapes))
    count = len(skeleton.layers)
    for field, value in vars(skeleton.model.config.get_text_config()).items():
        if isinstance(value, list) and len(value) == count:
            facts.append((field, repr(value[index])))
    return repr(facts)
