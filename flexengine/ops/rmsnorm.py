"""RMSNorm: y = weight * x / sqrt(mean(x^2) + eps), with the normalised value cast before the weight multiplies, as
Llama does, or in float32 throughout with a weight that is stored less an offset, as other families do.

Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization". With r = 1/sqrt(mean(x^2) + eps) and
gw = grad_y * weight: grad_x = r * (gw - x * r^2 * mean(gw * x)), grad_weight = sum over tokens of grad_y * x * r.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel

WEIGHT_GRAD_PARTIALS = 128
"""Row groups of the weight-gradient reduction on CUDA: fixed, so that the order of the sum depends on the shape
alone.
"""
HEAD_GRAD_PARTIALS = 1024
"""The most where rows are heads: with a tile of columns each it takes more groups to keep a card busy."""


def head_grad_partials(width: int) -> int:
    """Row groups for heads: fewer where they are wide, or so narrow that the sums would take more memory than rows."""
    return max(WEIGHT_GRAD_PARTIALS, min(HEAD_GRAD_PARTIALS, 8 * width, 256 * HEAD_GRAD_PARTIALS // width))


class NormStyle(NamedTuple):
    """offset: what is added to the stored weight (1 where weights are stored around zero). wide: the weight multiplies
    in float32, and only the result is rounded."""

    eps: float
    offset: float = 0.0
    wide: bool = False


def _stat_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rmsnorm_forward(
    x: Tensor, weight: Tensor, eps: float, out: Tensor, rstd: Tensor | None, residual: Tensor | None = None,
    offset: float = 0.0, wide: bool = False,
) -> None:  # fmt: skip
    """out = (residual +) rmsnorm(x) * (weight [D] + offset) for rows [T, D] or heads [T, K, D]; rstd [T] or [T, K] in
    float32 is kept for backward unless that recomputes it. out may be residual."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import rmsnorm  # noqa: PLC0415 (Triton is imported when first used)

        return rmsnorm.rmsnorm_forward(x, weight, eps, out, rstd, residual, offset, wide)
    long = x.to(_stat_dtype(x))
    r = torch.rsqrt(long.square().mean(-1) + eps)
    if rstd is not None:
        rstd.copy_(r)
    normalised = long * r[..., None]
    y = normalised * (weight.to(long.dtype) + offset) if wide else normalised.to(x.dtype) * (weight + offset)
    out.copy_(y if residual is None else residual.to(long.dtype) + y)


def rmsnorm_backward_input(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_x: Tensor, accumulate: bool, offset: float = 0.0,
    eps: float | None = None,
) -> None:  # fmt: skip
    """grad_x (+)= input half of the gradient; shapes as in the forward. With eps rstd is written here, not read."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import rmsnorm  # noqa: PLC0415

        return rmsnorm.rmsnorm_backward_input(grad_y, x, weight, rstd, grad_x, accumulate, offset, eps)
    long = x.to(_stat_dtype(x))
    if eps is not None:
        rstd.copy_(torch.rsqrt(long.square().mean(-1) + eps))
    r = rstd[..., None]
    gw = grad_y.to(long.dtype) * (weight.to(long.dtype) + offset)
    grad = r * (gw - long * r.square() * (gw * long).mean(-1, keepdim=True))
    grad_x.copy_(grad + grad_x.to(long.dtype) if accumulate else grad)


def rmsnorm_backward_weight(
    grad_y: Tensor, x: Tensor, rstd: Tensor, grad_weight: Tensor, partials: Tensor, accumulate: bool, wide: bool = False
) -> None:
    """grad_weight [D] (+)= sum over tokens (and heads) of grad_y * x * rstd. partials [P, D] float32 is workspace."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import rmsnorm  # noqa: PLC0415

        return rmsnorm.rmsnorm_backward_weight(grad_y, x, rstd, grad_weight, partials, accumulate, wide)
    dtype = _stat_dtype(x)
    normalised = x.to(dtype) * rstd[..., None]
    if not wide:
        normalised = normalised.to(x.dtype).to(dtype)
    total = (grad_y.to(dtype) * normalised).flatten(0, -2).sum(0)
    grad_weight.copy_(total) if not accumulate else grad_weight.add_(total)


class RMSNorm(Op):
    """y = rmsnorm(x) with statistics rstd, kept or recomputed together; or y = residual + rmsnorm(x), without. Where x
    is wider than `width`, its first columns are normalised, and the others are somebody else's.

    With a residual, whose gradient is the gradient of y itself, no backward reads y, and what would keep or recompute
    it for the statistics pays for a whole row: so the input half finds them again from x, which it reads anyway.
    """

    def __init__(
        self, name: str, x: str, y: str, width: int, weight: str, style: NormStyle, residual: str | None = None
    ) -> None:
        self.name, self.x, self.y, self.width, self.weight, self.style = name, x, y, width, weight, style
        self.rstd, self.residual = f"{name}_rstd", residual
        self.inputs = (x,) if residual is None else (x, residual)
        self.statistics = TensorSpec(self.rstd, (), "float32")
        kept = (self.statistics,) if residual is None else ()
        self.outputs = (TensorSpec(y, (width,)), *kept)
        self.params = (weight,)
        self.needs_input = self.needs_weight = (x, *(spec.name for spec in kept))
        self.grad_inputs = self.inputs
        self.grad_alias = () if residual is None else ((residual, y),)

    def forward(self, env: OpEnv) -> None:
        x, y, rstd, style = env.t[self.x][:, : self.width], env.t[self.y], env.t.get(self.rstd), self.style
        residual = None if self.residual is None else env.t[self.residual]
        rmsnorm_forward(x, env.p[self.weight], style.eps, y, rstd, residual, style.offset, style.wide)

    def backward_input(self, env: OpEnv) -> None:
        x, grad_x, accumulate = env.t[self.x], env.g[self.x], self.x in env.accumulate
        operands = (env.g[self.y], x[:, : self.width], env.p[self.weight], env.t[self.rstd], grad_x[:, : self.width])
        eps = None if self.residual is None else self.style.eps
        rmsnorm_backward_input(*operands, accumulate, self.style.offset, eps)
        if not accumulate:
            grad_x[:, self.width :].zero_()

    def backward_weight(self, env: OpEnv) -> None:
        operands = (env.g[self.y], env.t[self.x][:, : self.width], env.t[self.rstd], env.gp[self.weight])
        rmsnorm_backward_weight(*operands, env.t[f"{self.name}_partials"], not env.first, self.style.wide)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        if half == "forward":
            return ()
        found = () if self.residual is None else (self.statistics,)
        if half == "input":
            return found
        return (*found, TensorSpec(f"{self.name}_partials", (self.width,), "float32", rows=WEIGHT_GRAD_PARTIALS))

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(4 * tokens * (self.width + 2), compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        touched = 2.0 if self.residual is None else 3.0
        return Work(memory_bytes=touched * tokens * self.width * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=4.0 * tokens * self.width * compute_bytes, kernels=1)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.width * compute_bytes, kernels=2)
