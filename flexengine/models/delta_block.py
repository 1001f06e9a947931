"""Gated DeltaNet, the linear attention that replaces attention in a block.

Source: Yang et al. 2024, "Gated Delta Networks". One projection gives queries, keys, values, the gate z of the output
and the gates b and a of every value head. A convolution passes over queries, keys and values, and the delta rule reads
its result. The output of the rule is normalised head by head and gated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from flexengine.models.block_parts import closing, opening_norm
from flexengine.models.block_shape import BlockNames, BlockShape
from flexengine.models.spec import ParamSpec, WeightSource
from flexengine.ops.base import Op
from flexengine.ops.causal_conv import CausalConv
from flexengine.ops.columns import Columns, whole
from flexengine.ops.delta.delta_rule import DeltaRule
from flexengine.ops.gated_rmsnorm import GatedRMSNorm
from flexengine.ops.linear import Linear


class ProjectionColumns(NamedTuple):
    """Where each part of the projection has its columns."""

    q: Columns
    k: Columns
    v: Columns
    z: Columns
    b: Columns
    a: Columns


@dataclass(frozen=True)
class DeltaShape:
    """Sizes of linear attention, as the mixer of a block.

    interleaved: the projection's rows come key head by key head, each with its queries, keys, values and gates;
    otherwise come the queries of all heads, then all keys, all values and all gates.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    interleaved: bool = False

    @property
    def key_width(self) -> int:
        """Number of columns of all queries, which is also that of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Number of columns of all values, which is also that of the gate z."""
        return self.num_value_heads * self.value_dim

    @property
    def columns(self) -> ProjectionColumns:
        """The columns of every part of the projection."""
        k, v, n = self.key_width, self.value_width, self.num_value_heads
        end = 2 * (k + v)
        if not self.interleaved:
            ends = (0, k, 2 * k, 2 * k + v, end, end + n)
            widths = (k, k, v, v, n, n)
            return ProjectionColumns(*(whole(start, width) for start, width in zip(ends, widths, strict=True)))
        # Key head by key head: its queries and keys, then values and z of the value heads that it serves. The gates b
        # and a have a projection of their own in the checkpoint, whose rows follow all of these.
        g, key, each = self.num_key_heads, self.key_dim, n // self.num_key_heads
        value, step = each * self.value_dim, end // self.num_key_heads
        starts, widths = (0, key, 2 * key, 2 * key + value), (key, key, value, value)
        parts = [Columns(start, g, step, width) for start, width in zip(starts, widths, strict=True)]
        return ProjectionColumns(*parts, *(Columns(start, g, 2 * each, each) for start in (end, end + each)))

    def ops(self, block: BlockShape) -> list[Op]:
        """List the ops from x to x1."""
        d, to, width = block.hidden_size, self.columns, 2 * (self.key_width + self.value_width + self.num_value_heads)
        sizes = (self.num_key_heads, self.num_value_heads, self.key_dim, self.value_dim)
        ops, rows = opening_norm(block, "attn_norm", "x", "h1")
        return [
            *ops,
            Linear("in_proj", rows, "mixed", d, width, "in_proj.weight"),
            CausalConv("conv", "mixed", "qkv", (to.q, to.k, to.v), self.taps, "conv.weight"),
            DeltaRule("delta_rule", "qkv", "mixed", "o", sizes, to.b, to.a),
            GatedRMSNorm("gated_norm", "o", "mixed", "gated", to.z, self.value_dim, "gated_norm.weight", self.eps),
            *closing(block, ("out_proj", "gated", self.value_width, False), "attn_post_norm", "x", "x1"),
        ]

    def params(self, block: BlockShape, prefix: str, names: BlockNames) -> list[ParamSpec]:
        """List the parameters in the order of the ops."""

        def param(name: str, sources: dict[str, tuple[int, ...]], *shape: int, **kind: Any) -> ParamSpec:
            found = tuple(WeightSource(f"{module}.{source}", size) for source, size in sources.items())
            return ParamSpec(name, shape, found, **kind)

        # The shape of the convolution is that of torch's depthwise Conv1d, as the checkpoint has it.
        module, d, n = f"{prefix}.linear_attn", block.hidden_size, self.num_value_heads
        k, v, conv = self.key_width, self.value_width, (2 * self.key_width + self.value_width, 1, self.taps)
        # Qwen3-Next stores two fused projections, Qwen3.5 four; both are stacked into one product here.
        rows = {"qkvz": 2 * (k + v), "ba": 2 * n} if self.interleaved else {"qkv": 2 * k + v, "z": v, "b": n, "a": n}
        projection = {f"in_proj_{name}.weight": (count, d) for name, count in rows.items()}
        return [
            param("in_proj.weight", projection, sum(rows.values()), d),
            param("conv.weight", {"conv1d.weight": conv}, *conv),
            param("A_log", {"A_log": (n,)}, n, kind="vector", init="zeros"),
            param("dt_bias", {"dt_bias": (n,)}, n, kind="vector", init="ones"),
            param("gated_norm.weight", {"norm.weight": (self.value_dim,)}, self.value_dim, kind="vector", init="ones"),
            param("out_proj.weight", {"out_proj.weight": (d, v)}, d, v),
        ]
