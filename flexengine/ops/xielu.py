"""xIELU, an activation with two trained numbers: quadratic above zero, with the slope of an exponential below.

a = p h^2 + b h above zero, and n (expm1(min(h, e)) - h) + b h below, where p = softplus(alpha_p) and n = b +
softplus(alpha_n). b = 0.5 and e = -1e-6 are no options of published models.

Source: Huang & Schlag 2024, "Deriving Activation Functions Using Integration".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, wide

BETA, EPS = 0.5, -1e-6


class XIELU(Op):
    """a [T, F] = xielu(h [T, F]) with the parameters alpha_p and alpha_n, of one element each."""

    def __init__(self, name: str, x: str, y: str, width: int) -> None:
        self.name, self.x, self.y, self.width = name, x, y, width
        self.inputs = (x,)
        self.outputs = (TensorSpec(y, (width,)),)
        self.params = (f"{name}.alpha_p", f"{name}.alpha_n")
        self.needs_input = self.needs_weight = self.grad_inputs = (x,)

    def _factors(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        above, below = (softplus(wide(env.p[param])) for param in self.params)
        return above, below + BETA

    def forward(self, env: OpEnv) -> None:
        x, (above, below) = wide(env.t[self.x]), self._factors(env)
        env.t[self.y].copy_(torch.where(x > 0, above * x * x, below * (torch.expm1(x.clamp(max=EPS)) - x)) + BETA * x)

    def backward_input(self, env: OpEnv) -> None:
        x, (above, below) = wide(env.t[self.x]), self._factors(env)
        slope = torch.where(x > 0, 2 * above * x, below * (torch.exp(x.clamp(max=EPS)) * (x < EPS) - 1)) + BETA
        env.g[self.x].copy_(slope.mul_(env.g[self.y]))

    def backward_weight(self, env: OpEnv) -> None:
        x, grad_y = wide(env.t[self.x]), wide(env.g[self.y])
        terms = (x * x * (x > 0), (torch.expm1(x.clamp(max=EPS)) - x) * (x <= 0))
        for param, term in zip(self.params, terms, strict=True):
            total, accumulated = (term * grad_y).sum() * torch.sigmoid(wide(env.p[param])), env.gp[param]
            accumulated.copy_(total) if env.first else accumulated.add_(total)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return 8 * tokens * self.width * max(4, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=12.0 * tokens * self.width * max(4, compute_bytes), kernels=9)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=14.0 * tokens * self.width * max(4, compute_bytes), kernels=11)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=14.0 * tokens * self.width * max(4, compute_bytes), kernels=12)
