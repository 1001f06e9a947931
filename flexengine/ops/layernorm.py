"""LayerNorm: y = weight * (x - mean) / sqrt(var + eps) + bias, in float32 with one rounding, by torch's operators.

Source: Ba et al. 2016, "Layer Normalization". With n = (x - mean) * r and gw = grad_y * weight:
grad_x = r * (gw - mean(gw) - n * mean(gw * n)), grad_weight = sum of grad_y * n, grad_bias = sum of grad_y.
Backward recomputes the statistics from the row, which it reads anyway.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, wide


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The normalised rows n [T, D] and factors r [T, 1], wide."""
    x = wide(x)
    centred = x - x.mean(-1, keepdim=True)
    r = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred.mul_(r), r


class LayerNorm(Op):
    """y [T, D] = layernorm(x [T, D]) with weight and bias [D]."""

    def __init__(self, name: str, x: str, y: str, width: int, weight: str, bias: str, eps: float) -> None:
        self.name, self.x, self.y, self.width, self.eps = name, x, y, width, eps
        self.weight, self.bias = weight, bias
        self.inputs = (x,)
        self.outputs = (TensorSpec(y, (width,)),)
        self.params = (weight, bias)
        self.needs_input = self.needs_weight = (x,)
        self.grad_inputs = (x,)

    def forward(self, env: OpEnv) -> None:
        normalised, _ = _normalised(env.t[self.x], self.eps)
        env.t[self.y].copy_(normalised.mul_(wide(env.p[self.weight])).add_(wide(env.p[self.bias])))

    def backward_input(self, env: OpEnv) -> None:
        grad_x = env.g[self.x]
        normalised, r = _normalised(env.t[self.x], self.eps)
        gw = wide(env.g[self.y]) * wide(env.p[self.weight])
        shift = gw.mean(-1, keepdim=True)
        projection = (gw * normalised).mean(-1, keepdim=True)
        grad = gw.sub_(shift).sub_(normalised.mul_(projection)).mul_(r)
        grad_x.copy_(grad.add_(grad_x) if self.x in env.accumulate else grad)

    def backward_weight(self, env: OpEnv) -> None:
        grad_y = wide(env.g[self.y])
        normalised, _ = _normalised(env.t[self.x], self.eps)
        for param, terms in ((self.weight, normalised.mul_(grad_y)), (self.bias, grad_y)):
            acc, total = env.gp[param], terms.sum(0)
            acc.copy_(total) if env.first else acc.add_(total)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return 5 * tokens * (self.width + 2) * max(4, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=14.0 * tokens * self.width * max(4, compute_bytes), kernels=8)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=26.0 * tokens * self.width * max(4, compute_bytes), kernels=14)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=16.0 * tokens * self.width * max(4, compute_bytes), kernels=10)
