"""The linear attention of a block: Gated DeltaNet, in place of attention.

Source: Yang et al. 2024, "Gated Delta Networks". One projection gives queries, keys, values, the gate z of the output
and the gates b and a of every value head; a convolution passes over queries, keys and values; the delta rule reads
them; what it gives is normalised head by head and gated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
    """Sizes of linear attention. interleaved: the projection's rows come key head by key head, each with its queries,
    keys, values and gates; else queries of all heads, keys of all, values, gates."""

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


def delta_ops(d: int, s: DeltaShape, rows: str, x: str, y: str) -> list[Op]:
    """rows [T, d], the normalised x, -> y = x + linear attention."""
    to, width = s.layout, 2 * (s.key_width + s.value_width + s.num_value_heads)
    sizes = (s.num_key_heads, s.num_value_heads, s.key_dim, s.value_dim)
    return [
        Linear("in_proj", rows, "mixed", d, width, "in_proj.weight"),
        CausalConv("conv", "mixed", "qkv", (to.q, to.k, to.v), s.taps, "conv.weight"),
        DeltaRule("delta_rule", "qkv", "mixed", "o", sizes, to.b, to.a),
        GatedRMSNorm("gated_norm", "o", "mixed", "gated", to.z, s.value_dim, "gated_norm.weight", s.eps),
        Linear("out_proj", "gated", y, s.value_width, d, "out_proj.weight", residual=x),
    ]


def delta_params(d: int, s: DeltaShape, prefix: str) -> list[ParamSpec]:
    """Parameters of linear attention from tensors under `prefix` (such as model.layers.3.linear_attn)."""

    def source(name: str, *shape: int) -> WeightSource:
        return WeightSource(f"{prefix}.{name}", shape)

    k, v, n = s.key_width, s.value_width, s.num_value_heads
    rows = {"qkv": 2 * k + v, "z": v, "b": n, "a": n}
    if s.interleaved:
        rows = {"qkvz": 2 * (k + v), "ba": 2 * n}
    projection = tuple(source(f"in_proj_{name}.weight", count, d) for name, count in rows.items())
    conv = (2 * k + v, 1, s.taps)
    return [
        ParamSpec("in_proj.weight", (sum(rows.values()), d), projection),
        ParamSpec("conv.weight", conv, (source("conv1d.weight", *conv),)),
        ParamSpec("A_log", (n,), (source("A_log", n),), kind="vector", init="zeros"),
        ParamSpec("dt_bias", (n,), (source("dt_bias", n),), kind="vector", init="ones"),
        ParamSpec("gated_norm.weight", (s.value_dim,), (source("norm.weight", s.value_dim),), "vector", "ones"),
        ParamSpec("out_proj.weight", (d, v), (source("out_proj.weight", d, v),)),
    ]
