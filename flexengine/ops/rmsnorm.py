"""RMSNorm: y = weight * x / sqrt(mean(x^2) + eps), normalised in float32 and cast before the weight, as Hugging Face
does.

Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization". With r = 1/sqrt(mean(x^2) + eps) and
gw = grad_y * weight: grad_x = r * (gw - x * r^2 * mean(gw * x)), grad_weight = sum over tokens of grad_y * x * r.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel

WEIGHT_GRAD_PARTIALS = 128
"""Row groups of the weight-gradient reduction on CUDA: fixed, so that the order of the sum depends on the shape
alone.
"""


def _stat_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rmsnorm_forward(x: Tensor, weight: Tensor, eps: float, out: Tensor, rstd: Tensor) -> None:
    """out [T, D] = rmsnorm(x [T, D]) * weight [D]; rstd [T] in float32 is kept for backward."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import rmsnorm  # noqa: PLC0415 (Triton is imported when first used)

        return rmsnorm.rmsnorm_forward(x, weight, eps, out, rstd)
    wide = x.to(_stat_dtype(x))
    rstd.copy_(torch.rsqrt(wide.square().mean(-1) + eps))
    out.copy_((wide * rstd[:, None]).to(x.dtype) * weight)


def rmsnorm_backward_input(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_x: Tensor, accumulate: bool
) -> None:
    """grad_x (+)= input half of the gradient. All [T, D] except weight [D] and rstd [T]."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import rmsnorm  # noqa: PLC0415

        return rmsnorm.rmsnorm_backward_input(grad_y, x, weight, rstd, grad_x, accumulate)
    wide, r = x.to(_stat_dtype(x)), rstd[:, None]
    gw = grad_y.to(wide.dtype) * weight.to(wide.dtype)
    grad = r * (gw - wide * r.square() * (gw * wide).mean(-1, keepdim=True))
    grad_x.copy_(grad + grad_x.to(wide.dtype) if accumulate else grad)


def rmsnorm_backward_weight(
    grad_y: Tensor, x: Tensor, rstd: Tensor, grad_weight: Tensor, partials: Tensor, accumulate: bool
) -> None:
    """grad_weight [D] (+)= sum over tokens of grad_y * x * rstd. partials [P, D] float32 is workspace."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import rmsnorm  # noqa: PLC0415

        return rmsnorm.rmsnorm_backward_weight(grad_y, x, rstd, grad_weight, partials, accumulate)
    wide = _stat_dtype(x)
    total = (grad_y.to(wide) * (x.to(wide) * rstd[:, None]).to(x.dtype).to(wide)).sum(0)
    grad_weight.copy_(total) if not accumulate else grad_weight.add_(total)


class RMSNorm(Op):
    """h = rmsnorm(x) with statistics rstd; both are kept together or recomputed together."""

    def __init__(self, name: str, x: str, y: str, width: int, weight: str, eps: float) -> None:
        self.name, self.x, self.y, self.width, self.weight, self.eps = name, x, y, width, weight, eps
        self.rstd = f"{y}_rstd"
        self.inputs = (x,)
        self.outputs = (TensorSpec(y, (width,)), TensorSpec(self.rstd, (), "float32"))
        self.params = (weight,)
        self.needs_input = self.needs_weight = (x, self.rstd)
        self.grad_inputs = (x,)

    def forward(self, env: OpEnv) -> None:
        rmsnorm_forward(env.t[self.x], env.p[self.weight], self.eps, env.t[self.y], env.t[self.rstd])

    def backward_input(self, env: OpEnv) -> None:
        rmsnorm_backward_input(
            env.g[self.y],
            env.t[self.x],
            env.p[self.weight],
            env.t[self.rstd],
            env.g[self.x],
            accumulate=self.x in env.accumulate,
        )

    def backward_weight(self, env: OpEnv) -> None:
        x, grad_y = env.t[self.x], env.g[self.y]
        partials = env.t[f"{self.name}_partials"]
        rmsnorm_backward_weight(grad_y, x, env.t[self.rstd], env.gp[self.weight], partials, accumulate=not env.first)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        if half != "weight":
            return ()
        return (TensorSpec(f"{self.name}_partials", (self.width,), "float32", rows=WEIGHT_GRAD_PARTIALS),)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(3 * tokens * (self.width + 2), compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.width * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=4.0 * tokens * self.width * compute_bytes, kernels=1)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.width * compute_bytes, kernels=2)
