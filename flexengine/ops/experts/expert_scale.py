"""Multiplies the weights that a router gives to a token's experts by a number of each expert.

Source: the router of Gemma 4. With weights w [T * K] of rows sorted by expert and scales s [E]: y = w * s[expert],
grad_w = grad_y * s[expert], grad_s[e] = the sum of grad_y * w over the rows of expert e.

Shapes: as in `router.py`. Nothing is read back to the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, wide
from flexengine.ops.experts.router import Router
from flexengine.ops.linear import accumulate_bias_grad
from flexengine.ops.row_range import experts_of_rows


class ExpertScale(Op):
    """y [T, K] in float32 from what the router gives: its weights, places, experts and bounds."""

    def __init__(self, name: str, router: Router, param: str) -> None:
        self.name, self.router, self.param, self.y = name, router, param, f"{name}_weight"
        self.inputs = (router.row_weight, router.bounds, router.place, router.expert)
        self.outputs = (TensorSpec(self.y, (router.per_token,), "float32"),)
        self.params = (param,)
        self.needs_input = (router.bounds,)
        self.needs_weight = (router.row_weight, router.place, router.expert)
        self.grad_inputs = (router.row_weight,)

    def _of_rows(self, env: OpEnv) -> Tensor:
        """Give the scale of every row [T * K]."""
        expert = experts_of_rows(env.t[self.router.bounds], env.chunk.tokens * self.router.per_token)
        return wide(env.p[self.param])[expert]

    def forward(self, env: OpEnv) -> None:
        torch.mul(env.t[self.router.row_weight].view(-1), self._of_rows(env), out=env.t[self.y].view(-1))

    def backward_input(self, env: OpEnv) -> None:
        torch.mul(env.g[self.y].view(-1), self._of_rows(env), out=env.g[self.router.row_weight].view(-1))

    def backward_weight(self, env: OpEnv) -> None:
        place, expert = (env.t[name].long() for name in (self.router.place, self.router.expert))
        products = (env.g[self.y] * env.t[self.router.row_weight]).view(-1)[place.flatten()]
        by_expert = products.new_zeros(len(place), self.router.num_experts)
        first = torch.arange(len(place), device=place.device)[:, None] * self.router.num_experts
        # in one dimension, as the router does: a token has an expert once, so the order of writes tells nothing
        by_expert.view(-1).scatter_(0, (first + expert).flatten(), products)
        accumulate_bias_grad(env.gp[self.param], by_expert, env.first)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        wide_bytes, rows = max(4, compute_bytes), tokens * self.router.per_token
        return 2 * tokens * self.router.num_experts * wide_bytes + 5 * rows * 8 + 64 * self.router.num_experts

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=32.0 * tokens * self.router.per_token, kernels=5)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self.forward_work(tokens, seq_len, compute_bytes)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        rows, experts = self.router.per_token, self.router.num_experts
        return Work(memory_bytes=float(tokens * (64 * rows + 12 * experts)), kernels=11)
