"""Mamba-2, the state-space layer that replaces attention in a block.

Source: Dao & Gu 2024, "Transformers are SSMs". One projection gives the gate z, the values x, B, C and the steps dt of
every head. A convolution passes over x, B and C, and the scan reads its result. What the scan gives is gated and
normalised group by group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flexengine.models.block_parts import closing, opening_norm, weight_names
from flexengine.models.block_shape import BlockNames, BlockShape
from flexengine.models.fields import Fields
from flexengine.models.spec import ParamSpec, WeightSource
from flexengine.ops.base import Op
from flexengine.ops.causal_conv import CausalConv
from flexengine.ops.columns import whole
from flexengine.ops.delta.state_space import UNLIMITED, Limits, StateSpaceScan
from flexengine.ops.gated_rmsnorm import GatedRMSNorm
from flexengine.ops.linear import Linear
from flexengine.wording import shown


@dataclass(frozen=True)
class MambaShape:
    """Sizes of a Mamba-2 layer, as the mixer of a block.

    state: columns of B and of C in each group. conv_bias, bias: of the convolution, and of both projections. module:
    what a checkpoint calls the layer.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state: int
    taps: int
    eps: float
    conv_bias: bool = True
    bias: bool = False
    limits: Limits = UNLIMITED
    module: str = "mamba"

    @property
    def width(self) -> int:
        """Number of columns of the values of all heads, which is also that of the gate z."""
        return self.num_heads * self.head_dim

    @property
    def channels(self) -> int:
        """Number of columns of x, B and C."""
        return self.width + 2 * self.num_groups * self.state

    def ops(self, block: BlockShape) -> list[Op]:
        """List the ops from x to `block.middle`."""
        width, end = self.width, self.width + self.channels
        sizes = (self.num_groups, self.num_heads, self.state, self.head_dim)
        ops, rows = opening_norm(block, "attn_norm", "x", "h1")
        in_proj = weight_names("in_proj", self.bias)
        return [
            *ops,
            Linear("in_proj", rows, "mixed", block.hidden_size, end + self.num_heads, *in_proj),
            CausalConv(
                "conv", "mixed", "xbc", (whole(width, self.channels),), self.taps, *weight_names("conv", self.conv_bias)
            ),
            StateSpaceScan("scan", "xbc", "mixed", "o", sizes, whole(end, self.num_heads), self.limits),
            GatedRMSNorm(
                "gated_norm", "o", "mixed", "gated", whole(0, width), width // self.num_groups, "gated_norm.weight",
                self.eps, shared=False, gate_first=True,
            ),
            *closing(block, ("out_proj", "gated", width, self.bias), "attn_post_norm", "x", block.middle),
        ]  # fmt: skip

    def params(self, block: BlockShape, prefix: str, names: BlockNames) -> list[ParamSpec]:
        """List the parameters in the order of the ops."""

        def param(name: str, source: str, *shape: int, **kind: Any) -> ParamSpec:
            return ParamSpec(name, shape, (WeightSource(f"{prefix}.{self.module}.{source}", shape),), **kind)

        def vector(name: str, source: str, size: int, init: str = "zeros") -> ParamSpec:
            return param(name, source, size, kind="vector", init=init)

        # The shape of the convolution is that of torch's depthwise Conv1d, as the checkpoint has it.
        d, n, width, rows = block.hidden_size, self.num_heads, self.width, self.width + self.channels + self.num_heads
        return [
            param("in_proj.weight", "in_proj.weight", rows, d),
            *([vector("in_proj.bias", "in_proj.bias", rows)] if self.bias else []),
            param("conv.weight", "conv1d.weight", self.channels, 1, self.taps),
            *([vector("conv.bias", "conv1d.bias", self.channels)] if self.conv_bias else []),
            vector("A_log", "A_log", n),
            vector("dt_bias", "dt_bias", n, "ones"),
            vector("D", "D", n, "ones"),
            vector("gated_norm.weight", "norm.weight", width, "ones"),
            param("out_proj.weight", "out_proj.weight", d, width),
            *([vector("out_proj.bias", "out_proj.bias", d)] if self.bias else []),
        ]


def read_mamba(fields: Fields) -> MambaShape:
    """Read the Mamba-2 layers of a config. Raises ValueError for sizes that do not go with each other.

    Where a config has no `mamba_expand`, which a row gives to those that leave it out, heads are as wide as they say.
    """
    heads, groups = fields.whole("mamba_n_heads", 128), fields.whole("mamba_n_groups", 1)
    stated, expand = fields.values.get("mamba_d_head"), fields.whole("mamba_expand", None)
    width = heads * fields.whole("mamba_d_head") if expand is None else expand * fields.whole("hidden_size")
    head_dim = width // heads if stated in (None, "auto") else fields.whole("mamba_d_head")
    if head_dim * heads != width or heads % groups:
        raise ValueError(
            f"{fields.model}: mamba_n_heads={heads}, mamba_d_head={shown(stated)}, mamba_n_groups={groups} and "
            f"their width together={width} (mamba_expand * hidden_size) in config.json do not go "
            "together, or groups have not equally many heads. Fetch the published one again"
        )
    return MambaShape(
        heads,
        head_dim,
        groups,
        fields.whole("mamba_d_state", 256),
        fields.whole("mamba_d_conv", 4, least=2),
        fields.number("rms_norm_eps", 1e-6, high=1.0),
        fields.switch("mamba_conv_bias", True),
        fields.switch("mamba_proj_bias", False),
        read_limits(fields),
    )


def read_limits(fields: Fields) -> Limits:
    """Read the limits of dt; configs write infinity as an object."""
    stated = fields.values.get("time_step_limit")
    if stated is None:
        return UNLIMITED
    infinite = isinstance(stated, list) and stated[1:] in ([{"__float__": "Infinity"}], [float("inf")])
    values = {"time_step_limit": [*stated[:1], 1e30] if infinite else stated}
    low, high = Fields(fields.model, values).numbers("time_step_limit", 2, 0.0, 1e30)
    return Limits(low, high if high < 1e30 else float("inf"))
