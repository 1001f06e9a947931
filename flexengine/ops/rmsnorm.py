"""RMSNorm: y = weight * x / sqrt(mean(x^2) + eps), with the normalised value cast before the weight multiplies, as
Llama does, or in float32 throughout with a weight that is stored less an offset, as other families do.

Source: Zhang & Sennrich 2019, "Root Mean Square Layer Normalization". With r = 1/sqrt(mean(x^2) + eps) and
gw = grad_y * weight: grad_x = r * (gw - x * r^2 * mean(gw * x)), grad_weight = sum over tokens of grad_y * x * r.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel

ROW_GRAD_PARTIALS, HEAD_GRAD_PARTIALS = 512, 1024
"""Groups of rows, at the most, whose parts of the weight's gradient are summed side by side on CUDA; the second where
rows are heads, whose sums are short. Fixed, so that the order of the sum depends on the shape alone."""
WIDEST_HEAD = 256
LEAST_GROUP_ROWS = 4
"""Of these groups, or sums would take as much of memory as a second pass over the rows."""


def grad_partials(width: int) -> int:
    """Groups of rows of this width: fewer of heads that are so narrow that other programs suffice."""
    return ROW_GRAD_PARTIALS if width > WIDEST_HEAD else min(HEAD_GRAD_PARTIALS, 8 * width)


class NormStyle(NamedTuple):
    """offset: what is added to the stored weight (1 where weights are stored around zero). wide: the weight multiplies
    in float32, and only the result is rounded."""

    eps: float
    offset: float = 0.0
    wide: bool = False


class StyleAgain(NamedTuple):
    """A style as backward takes it. eps: where it is given, statistics are written, not read."""

    offset: float = 0.0
    eps: float | None = None
    wide: bool = False


AS_READ = StyleAgain()
"""Statistics of forward, and a weight that multiplies as it is stored."""


def _stat_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rmsnorm_forward(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor, rstd: Tensor | None, residual: Tensor | None = None,
    offset: float = 0.0, wide: bool = False,
) -> None:  # fmt: skip
    """out = (residual +) rmsnorm(x) * (weight [D] + offset) for rows [T, D] or heads [T, K, D]; rstd [T] or [T, K] in
    float32 is kept for backward unless that recomputes it. out may be residual. Without a weight nothing multiplies,
    and there is no offset."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import rmsnorm  # noqa: PLC0415 (Triton is imported when first used)

        return rmsnorm.rmsnorm_forward(x, weight, eps, out, rstd, residual, offset, wide)
    long = x.to(_stat_dtype(x))
    r = torch.rsqrt(long.square().mean(-1) + eps)
    if rstd is not None:
        rstd.copy_(r)
    normalised = long * r[..., None]
    if weight is None:
        y = normalised
    else:
        y = normalised * (weight.to(long.dtype) + offset) if wide else normalised.to(x.dtype) * (weight + offset)
    out.copy_(y if residual is None else residual.to(long.dtype) + y)


def rmsnorm_backward_input(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, grad_x: Tensor, accumulate: bool,
    offset: float = 0.0, eps: float | None = None,
) -> None:  # fmt: skip
    """grad_x (+)= input half of the gradient; shapes as in the forward. With eps rstd is written here, not read."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import rmsnorm  # noqa: PLC0415

        return rmsnorm.rmsnorm_backward_input(grad_y, x, weight, rstd, grad_x, accumulate, offset, eps)
    long = x.to(_stat_dtype(x))
    if eps is not None:
        rstd.copy_(torch.rsqrt(long.square().mean(-1) + eps))
    r = rstd[..., None]
    gw = grad_y.to(long.dtype) * (1.0 if weight is None else weight.to(long.dtype) + offset)
    grad = r * (gw - long * r.square() * (gw * long).mean(-1, keepdim=True))
    grad_x.copy_(grad + grad_x.to(long.dtype) if accumulate else grad)


def rmsnorm_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_x: Tensor, partials: Tensor, accumulate: bool,
    style: StyleAgain = AS_READ,
) -> None:  # fmt: skip
    """The input half, and in partials [P, D] what `add_partials` makes the gradient of the weight from: the sum over
    tokens (and heads) of grad_y * x * rstd."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import rmsnorm  # noqa: PLC0415

        sums = parts_of(partials, x.shape[:-1].numel())
        return rmsnorm.rmsnorm_backward(grad_y, x, weight, rstd, grad_x, sums, accumulate, *style)
    long = x.to(_stat_dtype(x))
    if style.eps is not None:
        rstd.copy_(torch.rsqrt(long.square().mean(-1) + style.eps))
    normalised = long * rstd[..., None]
    if not style.wide:
        normalised = normalised.to(x.dtype).to(long.dtype)
    partials[0] = (grad_y.to(long.dtype) * normalised).flatten(0, -2).sum(0)  # before grad_x, which may be grad_y
    rmsnorm_backward_input(grad_y, x, weight, rstd, grad_x, accumulate, style.offset)


def add_partials(partials: Tensor, rows: int, grad_weight: Tensor, accumulate: bool) -> None:
    """grad_weight [D] (+)= the gradient of which `rmsnorm_backward` over so many rows or heads left the parts."""
    if use_kernel(partials) and partials.dtype != torch.float64:
        from flexengine.kernels import rmsnorm  # noqa: PLC0415

        return rmsnorm.sum_partials(parts_of(partials, rows), grad_weight, accumulate)
    grad_weight.add_(partials[0]) if accumulate else grad_weight.copy_(partials[0])


def parts_of(partials: Tensor, rows: int) -> Tensor:
    """As many of the sums as there are groups of so many rows."""
    return partials[: num_parts(len(partials), rows)]


def num_parts(most: int, rows: int) -> int:
    """Groups of so many rows, at the most `most`."""
    return min(most, max(1, -(-rows // LEAST_GROUP_ROWS)))


def parts_bytes(partials: TensorSpec, rows: int) -> float:
    """Bytes of the sums of so many rows in float32."""
    assert partials.rows is not None, "sums are of a fixed number of groups at the most"
    return 4.0 * math.prod(partials.shape) * num_parts(partials.rows, rows)


class RMSNorm(Op):
    """y = rmsnorm(x) with statistics rstd, kept or recomputed together; or y = residual + rmsnorm(x), without. Where x
    is wider than `width`, its first columns are normalised, and the others are somebody else's. Where the weight is
    trained, the input half leaves the parts of its gradient, which the weight half adds up.

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
        self.needs_input = (x, *(spec.name for spec in kept))
        self.grad_inputs = self.inputs
        self.grad_alias = () if residual is None else ((residual, y),)
        self.partials = TensorSpec(f"{name}_partials", (width,), "float32", rows=grad_partials(width), clip_rows=True)

    def forward(self, env: OpEnv) -> None:
        x, y, rstd, style = env.t[self.x][:, : self.width], env.t[self.y], env.t.get(self.rstd), self.style
        residual = None if self.residual is None else env.t[self.residual]
        rmsnorm_forward(x, env.p[self.weight], style.eps, y, rstd, residual, style.offset, style.wide)

    def backward_input(self, env: OpEnv) -> None:
        x, grad_x, accumulate = env.t[self.x], env.g[self.x], self.x in env.accumulate
        operands = (env.g[self.y], x[:, : self.width], env.p[self.weight], env.t[self.rstd], grad_x[:, : self.width])
        eps = None if self.residual is None else self.style.eps
        if self.trained:
            sums = env.t[self.partials.name]
            rmsnorm_backward(*operands, sums, accumulate, StyleAgain(self.style.offset, eps, self.style.wide))
        else:
            rmsnorm_backward_input(*operands, accumulate, self.style.offset, eps)
        if not accumulate:
            grad_x[:, self.width :].zero_()

    def backward_weight(self, env: OpEnv) -> None:
        add_partials(env.t[self.partials.name], len(env.g[self.y]), env.gp[self.weight], not env.first)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        if half == "forward":
            return ()
        sums = (self.partials,) if self.trained else ()
        return sums if half == "weight" or self.residual is None else (*sums, self.statistics)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(4 * tokens * (self.width + 2), compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        touched = 2.0 if self.residual is None else 3.0
        return Work(memory_bytes=touched * tokens * self.width * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        sums = parts_bytes(self.partials, tokens) if self.trained else 0.0
        return Work(memory_bytes=4.0 * tokens * self.width * compute_bytes + sums, kernels=1)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=parts_bytes(self.partials, tokens), kernels=1)
