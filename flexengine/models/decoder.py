"""Assembles embedding, blocks and head into the description of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from flexengine.models.block_parts import norm_op, norm_params
from flexengine.models.block_shape import AnyNorm, BlockNames, BlockShape
from flexengine.models.blocks import block_buffers, block_ops, block_params
from flexengine.models.fields import Fields
from flexengine.models.spec import GroupSpec, LayerSpec, ModelSpec, ParamSpec, Table, WeightSource, divided
from flexengine.ops.base import Op
from flexengine.ops.cross_entropy import LMHeadLoss
from flexengine.ops.embedding import Embedding
from flexengine.ops.experts.balance import Balancing
from flexengine.ops.scaled_sum import ScaledSum


@dataclass(frozen=True)
class DecoderNames:
    """What a checkpoint calls the parts of a decoder; all but the head stand under the prefix."""

    prefix: str = "model"
    embed: str = "embed_tokens"
    layers: str = "layers"
    norm: str = "norm"
    head: str = "lm_head.weight"


@dataclass(frozen=True)
class DecoderShape:
    """Sizes and options of a decoder.

    tables: rotary frequencies, under the names that the blocks' shapes use. embedding_scale multiplies the embedding's
    rows, logit_scale the logits. logit_soft_cap bounds logits; 0 for none. balance_coefficient: weight of the loss that
    balances experts; 0 for none. names, parts: the checkpoint's names, in blocks and around them.
    """

    vocab_size: int
    tie_word_embeddings: bool
    blocks: tuple[BlockShape, ...]
    tables: tuple[Table, ...]
    final_norm: AnyNorm
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0
    balance_coefficient: float = 0.0
    names: BlockNames = field(default_factory=BlockNames)
    parts: DecoderNames = field(default_factory=DecoderNames)

    @property
    def balancing(self) -> Balancing | None:
        """The loss that balances experts, over all layers that have some; None if there is no such loss."""
        # Layers without experts do not take part; those with experts have equally many in every family.
        counts = [block.experts.count for block in self.blocks if block.experts is not None]
        return (
            Balancing(self.balance_coefficient, counts[0], len(counts)) if self.balance_coefficient and counts else None
        )

    @property
    def hidden_size(self) -> int:
        """Width of the tensor between layers."""
        return self.blocks[0].hidden_size


class LayerContent(NamedTuple):
    """A layer's ops, the parameters that stream with it, and its buffers."""

    ops: tuple[Op, ...]
    params: tuple[ParamSpec, ...]
    buffers: tuple[tuple[str, WeightSource], ...] = ()


def assemble(
    name: str,
    family: str,
    config: dict,
    *,
    embedding: LayerContent,
    blocks: Sequence[LayerContent],
    head: LayerContent,
    **sizes: Any,
) -> ModelSpec:
    """Assemble a model whose embedding, blocks and head have a parameter group each: embed, block.0 and on, head.

    sizes: fields of `ModelSpec`. With tie_word_embeddings among them the head's `lm_head.weight` is the embedding's
    `embed.weight`.
    """
    groups = (
        GroupSpec("embed", "embed", embedding.params),
        *(_block_group(i, block) for i, block in enumerate(blocks)),
        *([GroupSpec("head", "head", head.params)] if head.params else []),
    )
    # A tied head has no group member of its own: it reads the embedding's tensor, whose gradient both add to.
    tied = (("lm_head.weight", 0, "embed.weight"),) if sizes["tie_word_embeddings"] else ()
    d, own = sizes["hidden_size"], _layer_params(len(groups) - 1, groups[-1]) if head.params else ()
    widths = (embedding.ops[-1].outputs[0].shape[0], *[d] * (len(blocks) - 1))
    layers = (
        LayerSpec("embedding", "embedding", embedding.ops, _layer_params(0, groups[0]), None, "y"),
        *(
            LayerSpec(f"block.{i}", "block", block.ops, _layer_params(i + 1, groups[i + 1]), "x", "y", w, block.buffers)
            for i, (block, w) in enumerate(zip(blocks, widths, strict=True))
        ),
        LayerSpec("head", "head", head.ops, (*own, *tied), "x", None, d),
    )
    return ModelSpec(name=name, family=family, hf_config=config, groups=groups, layers=layers, **sizes)


def _block_group(index: int, block: LayerContent) -> GroupSpec:
    divisions, cut = divided(block.ops, block.params)
    return GroupSpec(f"block.{index}", "block", block.params, divisions=divisions, cut=cut)


def _layer_params(group_index: int, group: GroupSpec) -> tuple[tuple[str, int, str], ...]:
    return tuple((p.name, group_index, p.name) for p in group.params)


def decoder_model(name: str, family: str, config: dict, s: DecoderShape) -> ModelSpec:
    """Describe a decoder of the given shape. Raises ValueError for what else it reads from the config."""
    fields, d, v, named = Fields(name, config), s.hidden_size, s.vocab_size, s.parts
    embed = ParamSpec("embed.weight", (v, d), (WeightSource(f"{named.prefix}.{named.embed}.weight", (v, d)),))
    lm_head = ParamSpec("lm_head.weight", (v, d), (WeightSource(named.head, (v, d)),))
    final_norm = tuple(norm_params("final_norm", f"{named.prefix}.{named.norm}", d, s.final_norm))
    # What scales the logits scales the rows that they come from, which are fewer.
    scaled = () if s.logit_scale == 1.0 else (ScaledSum("head_scale", "h", "h_scaled", d, s.logit_scale),)
    head_ops = (
        norm_op("final_norm", "x", "h", d, s.final_norm),
        *scaled,
        LMHeadLoss("lm_head", "h_scaled" if scaled else "h", d, v, "lm_head.weight", s.logit_soft_cap),
    )
    prefixes = [f"{named.prefix}.{named.layers}.{i}" for i in range(len(s.blocks))]
    params = [block_params(shape, prefix, s.names) for shape, prefix in zip(s.blocks, prefixes, strict=True)]
    dense = (own for shape, own in zip(s.blocks, params, strict=True) if shape.experts is None)
    largest = max((sum(param.numel for param in own) for own in dense), default=0)
    return assemble(
        name,
        family,
        config,
        embedding=LayerContent((Embedding("embed", "y", v, d, "embed.weight", s.embedding_scale),), (embed,)),
        blocks=[
            LayerContent(block_ops(shape, largest), own, block_buffers(shape, prefix, s.names))
            for shape, own, prefix in zip(s.blocks, params, prefixes, strict=True)
        ],
        head=LayerContent(head_ops, final_norm if s.tie_word_embeddings else (*final_norm, lm_head)),
        hidden_size=d,
        vocab_size=v,
        head_dim=s.blocks[0].head_dim,
        max_position_embeddings=fields.whole("max_position_embeddings", 2048),
        longest_sequence=min((t.longest for t in s.tables if t.longest is not None), default=None),
        initializer_range=fields.number("initializer_range", 0.02, high=100.0),
        tie_word_embeddings=s.tie_word_embeddings,
        head_source=named.head,
        prefix=f"{named.prefix}.",
        tables=s.tables,
        balancing=s.balancing,
    )
