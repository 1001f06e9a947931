"""Scales the queries of a fused QKV row by their positions p, in place: by 1 + beta * log(1 + floor(p / original)).

Attention so stays sharp over contexts longer than `original`; up to it the factor is 1.
Source: Nakanishi 2025, "Scalable-Softmax Is Superior for Attention", in the form that Llama 4 has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes


class QueryScale(Op):
    """qkv <- qkv with its queries scaled. Backward needs the positions only."""

    def __init__(self, name: str, x: str, y: str, query_width: int, width: int, beta: float, original: int) -> None:
        self.name, self.x, self.y, self.query_width, self.width = name, x, y, query_width, width
        self.beta, self.original = beta, original
        self.inputs = self.grad_inputs = (x,)
        self.outputs = (TensorSpec(y, (width,)),)
        self.in_place = (x, y)

    def _scale(self, qkv: Tensor, env: OpEnv) -> None:
        # wide like the reference implementation, which rounds the factor to the queries' dtype
        wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
        times = torch.floor(env.chunk.positions.to(wide) / self.original)
        factor = times.add_(1.0).log_().mul_(self.beta).add_(1.0)
        qkv[:, : self.query_width].mul_(factor.to(qkv.dtype)[:, None])

    def forward(self, env: OpEnv) -> None:
        self._scale(env.t[self.y], env)

    def backward_input(self, env: OpEnv) -> None:
        self._scale(env.g[self.x], env)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return 16 * tokens + plain_bytes(3 * tokens, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.query_width * compute_bytes, kernels=7)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self.forward_work(tokens, seq_len, compute_bytes)
