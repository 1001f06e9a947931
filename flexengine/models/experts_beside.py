"""Experts beside a dense FFN, each with norms of its own, which replace the FFN of a block.

Source: Gemma 4 26B-A4B; names of tensors as in Hugging Face. The dense FFN reads the residual through a norm, the
experts through another, and the router through a norm whose weight scales what it reads. Both results are normalised,
and so is their sum. The weights of a token's experts, which add up to 1, are scaled expert by expert.
"""

from __future__ import annotations

from dataclasses import dataclass

from flexengine.models.block_parts import norm_op, norm_params, opening_norm
from flexengine.models.block_shape import BlockNames, BlockShape, ExpertShape
from flexengine.models.blocks import expert_params, routed_ops
from flexengine.models.spec import ParamSpec, WeightSource
from flexengine.ops.base import Op
from flexengine.ops.experts.expert_scale import ExpertScale
from flexengine.ops.experts.router import Router
from flexengine.ops.glu import GLU
from flexengine.ops.linear import Linear
from flexengine.ops.rmsnorm import NormStyle, RMSNorm
from flexengine.ops.scaled_sum import ScaledSum

NORMS = {
    "dense_post_norm": "post_feedforward_layernorm_1",
    "expert_norm": "pre_feedforward_layernorm_2",
    "expert_post_norm": "post_feedforward_layernorm_2",
}
"""Norms that other blocks lack -> their names in a checkpoint."""
MADE_AGAIN = (RMSNorm, ScaledSum, ExpertScale)
"""Ops whose outputs are not kept: they take one pass over the rows, and each more of them doubles the save sets that
the planner compares, of which there are 16384 without them."""


@dataclass(frozen=True)
class ExpertsBeside:
    """The experts of a block whose dense FFN `BlockShape` describes. Their ops do not run in parts: norms follow."""

    experts: ExpertShape

    def ops(self, block: BlockShape) -> list[Op]:
        """List the ops from x1 to `block.end`."""
        assert block.norms == "both"
        assert isinstance(block.norm, NormStyle)
        d, norm = block.hidden_size, block.norm
        ops = [
            *_dense(block),
            *self._routed(block, norm),
            RMSNorm("expert_post_norm", "routed", "ffn", d, "expert_post_norm.weight", norm, residual="dense"),
            RMSNorm("mlp_post_norm", "ffn", block.end, d, "mlp_post_norm.weight", norm, residual="x1"),
        ]
        for op in ops:
            op.keepable = not isinstance(op, MADE_AGAIN)
        return ops

    def _routed(self, block: BlockShape, norm: NormStyle) -> list[Op]:
        """List the ops of router and experts, from x1 to routed."""
        e, d = self.experts, block.hidden_size
        router = Router("router", "router_x", d, e.count, e.per_token, "router.weight", e.normalised)
        scale = ExpertScale("expert_scale", router, "router.per_expert_scale")
        return [
            RMSNorm("router_norm", "x1", "router_normed", d, "router.scale", norm._replace(wide=False)),
            ScaledSum("router_scaled", "router_normed", "router_x", d, d**-0.5),
            router,
            scale,
            norm_op("expert_norm", "x1", "h3", d, norm),
            *routed_ops(block, e, "h3", router, scale.y, (None, "routed")),
        ]

    def params(self, block: BlockShape, prefix: str, names: BlockNames) -> list[ParamSpec]:
        """List the parameters of experts and router, and norms that other blocks lack."""
        d, count = block.hidden_size, self.experts.count
        vectors = {"router.scale": d, "router.per_expert_scale": count}
        return [
            *(p for name, source in NORMS.items() for p in norm_params(name, f"{prefix}.{source}", d, block.norm)),
            *(
                ParamSpec(name, (width,), (WeightSource(f"{prefix}.{name}", (width,)),), "vector", "ones")
                for name, width in vectors.items()
            ),
            *expert_params(block, self.experts, prefix, names),
        ]


def _dense(block: BlockShape) -> list[Op]:
    """List the ops of the dense FFN, from x1 to dense."""
    d, f = block.hidden_size, block.intermediate_size
    ops, rows = opening_norm(block, "mlp_norm", "x1", "h2")
    return [
        *ops,
        Linear("gate_up_proj", rows, "dense_gate_up", d, 2 * f, "gate_up_proj.weight"),
        GLU("geglu", "dense_gate_up", "dense_a", f, block.activation),
        Linear("down_proj", "dense_a", "dense_out", f, d, "down_proj.weight"),
        norm_op("dense_post_norm", "dense_out", "dense", d, block.norm),
    ]
