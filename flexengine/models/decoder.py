"""Embedding, blocks and head assembled into the description of a decoder."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexengine.models.blocks import BlockNames, BlockShape, block_ops, block_params, norm_param
from flexengine.models.fields import Fields
from flexengine.models.spec import GroupSpec, LayerSpec, ModelSpec, ParamSpec, Table, WeightSource
from flexengine.ops.cross_entropy import LMHeadLoss
from flexengine.ops.embedding import Embedding
from flexengine.ops.rmsnorm import NormStyle, RMSNorm


@dataclass(frozen=True)
class DecoderShape:
    """Sizes and options of a decoder. tables: rotary frequencies, under the names that the blocks' shapes use.

    embedding_scale multiplies the embedding's rows; logits are bounded by logit_soft_cap unless that is 0.
    """

    vocab_size: int
    tie_word_embeddings: bool
    blocks: tuple[BlockShape, ...]
    tables: tuple[Table, ...]
    final_norm: NormStyle
    embedding_scale: float = 1.0
    logit_soft_cap: float = 0.0
    names: BlockNames = field(default_factory=BlockNames)
    prefix: str = "model"

    @property
    def hidden_size(self) -> int:
        """Width of the tensor between layers."""
        return self.blocks[0].hidden_size


def decoder_groups(s: DecoderShape) -> tuple[GroupSpec, ...]:
    """Parameter groups: embed, one per block, head (the final norm alone when the embedding is tied)."""
    vocab = (s.vocab_size, s.hidden_size)
    embed = ParamSpec("embed.weight", vocab, (WeightSource(f"{s.prefix}.embed_tokens.weight", vocab),))
    lm_head = ParamSpec("lm_head.weight", vocab, (WeightSource("lm_head.weight", vocab),))
    final_norm = norm_param("final_norm.weight", f"{s.prefix}.norm.weight", s.hidden_size, s.final_norm)
    blocks = [
        GroupSpec(f"block.{i}", "block", block_params(shape, f"{s.prefix}.layers.{i}", s.names))
        for i, shape in enumerate(s.blocks)
    ]
    head = (final_norm,) if s.tie_word_embeddings else (final_norm, lm_head)
    return (GroupSpec("embed", "embed", (embed,)), *blocks, GroupSpec("head", "head", head))


def decoder_layers(s: DecoderShape, groups: tuple[GroupSpec, ...]) -> tuple[LayerSpec, ...]:
    """Embedding, blocks (those of one shape share their ops) and head, over the given groups."""
    d, v, last = s.hidden_size, s.vocab_size, len(groups) - 1
    embed = LayerSpec(
        "embedding",
        "embedding",
        (Embedding("embed", "y", v, d, "embed.weight", s.embedding_scale),),
        (("embed.weight", 0, "embed.weight"),),
        None,
        "y",
    )
    blocks = [
        LayerSpec(f"block.{i}", "block", block_ops(shape), _layer_params(i + 1, groups[i + 1]), "x", "y")
        for i, shape in enumerate(s.blocks)
    ]
    group, name = (0, "embed.weight") if s.tie_word_embeddings else (last, "lm_head.weight")
    head = LayerSpec(
        "head",
        "head",
        (
            RMSNorm("final_norm", "x", "h", d, "final_norm.weight", s.final_norm),
            LMHeadLoss("lm_head", "h", d, v, "lm_head.weight", s.logit_soft_cap),
        ),
        (("final_norm.weight", last, "final_norm.weight"), ("lm_head.weight", group, name)),
        "x",
        None,
    )
    return (embed, *blocks, head)


def _layer_params(group_index: int, group: GroupSpec) -> tuple[tuple[str, int, str], ...]:
    return tuple((p.name, group_index, p.name) for p in group.params)


def decoder_model(name: str, family: str, config: dict, shape: DecoderShape) -> ModelSpec:
    """Assemble a decoder of the given shape. Raises ValueError for what else it reads from the config."""
    fields, groups, block = Fields(name, config), decoder_groups(shape), shape.blocks[0]
    return ModelSpec(
        name=name,
        family=family,
        hf_config=config,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        num_key_value_heads=block.num_key_value_heads,
        head_dim=block.head_dim,
        max_position_embeddings=fields.whole("max_position_embeddings", 2048),
        initializer_range=fields.number("initializer_range", 0.02, high=100.0),
        tie_word_embeddings=shape.tie_word_embeddings,
        tables=shape.tables,
        groups=groups,
        layers=decoder_layers(shape, groups),
    )
