"""Multi-head latent attention, which replaces attention in a block.

Queries come from the input or from a latent of it; keys and values come from a latent and one rotated key that all
heads share.

Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1. Names as in its checkpoints.
"""

from __future__ import annotations

from typing import NamedTuple

from flexengine.models.block_parts import closing, norm_params, opening_norm, stacked, weight_names
from flexengine.models.block_shape import BlockNames, BlockShape
from flexengine.models.spec import ParamSpec
from flexengine.ops.attention.attention import CausalAttention
from flexengine.ops.attention.latent_heads import HeadSizes, LatentHeads
from flexengine.ops.base import Op
from flexengine.ops.linear import Linear
from flexengine.ops.rmsnorm import NormStyle, RMSNorm

LATENT_NORM = NormStyle(1e-6)
"""The norm of latents, whatever epsilon the config gives the other norms."""


class LatentAttention(NamedTuple):
    """Latent attention as the mixer of a block.

    query_rank: width of the queries' latent, 0 for none. key_rank: width of the latent of keys and values. bias:
    whether the projections to latents and of the output have biases. The block's `rope` rotates the last columns of
    each head.
    """

    heads: HeadSizes
    query_rank: int
    key_rank: int
    bias: bool
    interleaved: bool

    def ops(self, block: BlockShape) -> list[Op]:
        """List the ops from x to x1."""
        assert block.rope is not None, "latent attention rotates a part of each head"
        heads, rank = self.heads, self.key_rank
        ops, rows = opening_norm(block, "attn_norm", "x", "h1")
        attention = CausalAttention(
            "attention", "qkv", "o", heads.num_heads, heads.num_heads, heads.head_dim, block.attention, heads.value_dim
        )
        parts, scaling = ("q", "kv", "kv_a"), block.rope_scaling
        return [
            *ops,
            *self._query_ops(block.hidden_size, rows),
            Linear(
                "kv_a_proj", rows, "kv_a", block.hidden_size, rank + heads.rope_dim,
                *weight_names("kv_a_proj", self.bias),
            ),
            RMSNorm("kv_a_norm", "kv_a", "latent", rank, "kv_a_norm.weight", LATENT_NORM),
            Linear("kv_b_proj", "latent", "kv", rank, heads.latent_width, "kv_b_proj.weight"),
            LatentHeads("heads", parts, "qkv", heads, rank, scaling, self.interleaved, block.rope),
            attention,
            *closing(block, ("o_proj", "o", self._output_width, self.bias), "attn_post_norm", "x", "x1"),
        ]  # fmt: skip

    def _query_ops(self, width: int, x: str) -> list[Op]:
        """List the ops from x to the queries q."""
        rank, columns = self.query_rank, self.heads.query_width
        if not rank:
            return [Linear("q_proj", x, "q", width, columns, "q_proj.weight")]
        return [
            Linear("q_a_proj", x, "q_a", width, rank, *weight_names("q_a_proj", self.bias)),
            RMSNorm("q_a_norm", "q_a", "q_latent", rank, "q_a_norm.weight", LATENT_NORM),
            Linear("q_b_proj", "q_latent", "q", rank, columns, "q_b_proj.weight"),
        ]

    @property
    def _output_width(self) -> int:
        return self.heads.num_heads * self.heads.value_dim

    def params(self, block: BlockShape, prefix: str, names: BlockNames) -> list[ParamSpec]:
        """List the parameters in the order of the ops."""
        heads, d, module = self.heads, block.hidden_size, f"{prefix}.self_attn"

        def linear(name: str, source: str, rows: int, columns: int, bias: bool = False) -> list[ParamSpec]:
            return stacked(name, [(f"{module}.{source}", rows)], columns, bias)

        def latent(name: str, rank: int, rows: int, source: str) -> list[ParamSpec]:
            norm = norm_params(f"{name}_norm", f"{module}.{name}_layernorm", rank, LATENT_NORM)
            return [*linear(f"{name}_proj", source, rows, d, self.bias), *norm]

        queries = linear("q_proj", "q_proj", heads.query_width, d)
        if self.query_rank:  # the large models compress queries, too
            queries = latent("q_a", self.query_rank, self.query_rank, "q_a_proj")
            queries += linear("q_b_proj", "q_b_proj", heads.query_width, self.query_rank)
        return [
            *queries,
            *latent("kv_a", self.key_rank, self.key_rank + heads.rope_dim, "kv_a_proj_with_mqa"),
            *linear("kv_b_proj", "kv_b_proj", heads.latent_width, self.key_rank),
            *stacked("o_proj", [(f"{prefix}.{names.o}", d)], self._output_width, self.bias),
        ]
