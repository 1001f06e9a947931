"""The linear attention of a block: Gated DeltaNet, in place of attention.

Source: Yang et al. 2024, "Gated Delta Networks". One projection gives queries, keys, values, the gate z of the output
and the gates b and a of every value head; a convolution passes over queries, keys and values; the delta rule reads
them; what it gives is normalised head by head and gated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from flexengine.models.blocks import BlockNames, BlockShape, closing, opening_norm
from flexengine.models.spec import ParamSpec, WeightSource
from flexengine.ops.base import Op
from flexengine.ops.causal_conv import CausalConv
from flexengine.ops.columns import Columns, whole
from flexengine.ops.delta_rule import DeltaRule
from flexengine.ops.gated_rmsnorm import GatedRMSNorm
from flexengine.ops.linear import Linear


class Layout(NamedTuple):
    """Columns of the projection."""

    q: Columns
    k: Columns
    v: Columns
    z: Columns
    b: Columns
    a: Columns


@dataclass(frozen=True)
class DeltaShape:
    """A block's mixer: sizes of linear attention. interleaved: the projection's rows come key head by key head, each
    with its queries, keys, values and gates; else queries of all heads, keys of all, values, gates."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    eps: float
    interleaved: bool = False

    @property
    def key_width(self) -> int:
        """Columns of all queries, and of all keys."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Columns of all values, and of the gate z."""
        return self.num_value_heads * self.value_dim

    @property
    def layout(self) -> Layout:
        """Where the parts of the projection lie."""
        k, v, n = self.key_width, self.value_width, self.num_value_heads
        end = 2 * (k + v)
        if not self.interleaved:
            ends = (0, k, 2 * k, 2 * k + v, end, end + n)
            widths = (k, k, v, v, n, n)
            return Layout(*(whole(start, width) for start, width in zip(ends, widths, strict=True)))
        g, key, each = self.num_key_heads, self.key_dim, n // self.num_key_heads
        value, step = each * self.value_dim, end // self.num_key_heads
        starts, widths = (0, key, 2 * key, 2 * key + value), (key, key, value, value)
        parts = [Columns(start, g, step, width) for start, width in zip(starts, widths, strict=True)]
        return Layout(*parts, *(Columns(start, g, 2 * each, each) for start in (end, end + each)))

    def ops(self, block: BlockShape) -> list[Op]:
        """x -> x1."""
        d, to, width = block.hidden_size, self.layout, 2 * (self.key_width + self.value_width + self.num_value_heads)
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
        """In the order of the ops."""

        def param(name: str, sources: dict[str, tuple[int, ...]], *shape: int, **kind: Any) -> ParamSpec:
            found = tuple(WeightSource(f"{module}.{source}", size) for source, size in sources.items())
            return ParamSpec(name, shape, found, **kind)

        module, d, n = f"{prefix}.linear_attn", block.hidden_size, self.num_value_heads
        k, v, conv = self.key_width, self.value_width, (2 * self.key_width + self.value_width, 1, self.taps)
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
