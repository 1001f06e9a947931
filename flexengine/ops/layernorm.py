"""LayerNorm: y = weight * (x - mean) / sqrt(var + eps) + bias, in float32 with one rounding.

Source: Ba et al. 2016, "Layer Normalization". With n = (x - mean) * r and gw = grad_y * weight:
grad_x = r * (gw - mean(gw) - n * mean(gw * n)), grad_weight = sum of grad_y * n, grad_bias = sum of grad_y.
The input half recomputes the statistics from the row, which it reads anyway, and leaves them for the weight half.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel, wide

WEIGHT_GRAD_PARTIALS = 256
"""The most row groups of the weight half's sums on CUDA: fixed, so that the order of a sum depends on its shape alone.
Twice as many as of RMSNorm, as models with LayerNorm are narrow, and rows of 768 columns have six tiles of them.
"""


def _normalised(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normalised rows n [T, D], means [T, 1] and factors r [T, 1], wide."""
    x = wide(x)
    mean = x.mean(-1, keepdim=True)
    centred = x - mean
    r = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return centred.mul_(r), mean, r


def layernorm_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float, out: Tensor) -> None:
    """out = weight * (x - mean) * r + bias for rows [T, D]; weight and bias [D]."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import layernorm  # noqa: PLC0415 (Triton is imported when first used)

        return layernorm.layernorm_forward(x, weight, bias, eps, out)
    out.copy_(_normalised(x, eps)[0].mul_(wide(weight)).add_(wide(bias)))


def layernorm_backward_input(
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, grad_x: Tensor, accumulate: bool,
    statistics: Tensor | None = None,
) -> None:  # fmt: skip
    """grad_x (+)= input half of the gradient; shapes as in the forward. Writes mean and r to statistics [T, 2], wide,
    where they are asked for."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import layernorm  # noqa: PLC0415

        return layernorm.layernorm_backward_input(grad_y, x, weight, eps, grad_x, accumulate, statistics)
    normalised, mean, r = _normalised(x, eps)
    if statistics is not None:
        statistics[:, :1].copy_(mean)
        statistics[:, 1:].copy_(r)
    gw = wide(grad_y) * wide(weight)
    shift = gw.mean(-1, keepdim=True)
    projection = (gw * normalised).mean(-1, keepdim=True)
    grad = gw.sub_(shift).sub_(normalised.mul_(projection)).mul_(r)
    grad_x.copy_(grad.add_(grad_x) if accumulate else grad)


def layernorm_backward_weight(
    grad_y: Tensor, x: Tensor, statistics: Tensor, grad_weight: Tensor, grad_bias: Tensor, partials: Tensor,
    accumulate: bool,
) -> None:  # fmt: skip
    """grad_weight [D] (+)= the sum over tokens of grad_y * (x - mean) * r, grad_bias [D] (+)= that of grad_y;
    statistics from the input half; partials [P, 2, D] float32 is workspace."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import layernorm  # noqa: PLC0415

        operands = (grad_y, x, statistics, grad_weight, grad_bias, partials)
        return layernorm.layernorm_backward_weight(*operands, accumulate)
    grad_y, normalised = wide(grad_y), (wide(x) - statistics[:, :1]).mul_(statistics[:, 1:])
    for acc, terms in ((grad_weight, normalised.mul_(grad_y)), (grad_bias, grad_y)):
        total = terms.sum(0)
        acc.add_(total) if accumulate else acc.copy_(total)


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
        self.statistics = TensorSpec(f"{name}_statistics", (2,), "float32")

    def forward(self, env: OpEnv) -> None:
        layernorm_forward(env.t[self.x], env.p[self.weight], env.p[self.bias], self.eps, env.t[self.y])

    def backward_input(self, env: OpEnv) -> None:
        operands = (env.g[self.y], env.t[self.x], env.p[self.weight], self.eps, env.g[self.x])
        layernorm_backward_input(*operands, self.x in env.accumulate, env.t.get(self.statistics.name))

    def backward_weight(self, env: OpEnv) -> None:
        operands = (env.g[self.y], env.t[self.x], env.t[self.statistics.name])
        totals = (env.gp[self.weight], env.gp[self.bias])
        layernorm_backward_weight(*operands, *totals, env.t[f"{self.name}_partials"], not env.first)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        if half == "forward" or not self.trained:
            return ()
        if half == "input":
            return (self.statistics,)
        rows, name = WEIGHT_GRAD_PARTIALS, f"{self.name}_partials"
        return self.statistics, TensorSpec(name, (2, self.width), "float32", rows=rows, clip_rows=True)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(5 * tokens * (self.width + 2), compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.width * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=4.0 * tokens * self.width * compute_bytes, kernels=1)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.width * compute_bytes, kernels=2)
