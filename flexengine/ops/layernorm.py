"""LayerNorm: y = weight * (x - mean) / sqrt(var + eps) + bias, in float32 with one rounding.

Source: Ba et al. 2016, "Layer Normalization". With n = (x - mean) * r and gw = grad_y * weight:
grad_x = r * (gw - mean(gw) - n * mean(gw * n)), grad_weight = sum of grad_y * n, grad_bias = sum of grad_y.
An offset is added to weights that are stored less it (Nemotron). A norm without weight (OLMo) or bias (Cohere) has ones
or zeros in their place.
The input half recomputes the statistics from the row, which it reads anyway, and leaves the parts of the sums, which
the weight half adds up.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel, wide
from flexengine.ops.rmsnorm import ROW_GRAD_PARTIALS, parts_bytes, parts_of


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
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, grad_x: Tensor, accumulate: bool
) -> None:
    """grad_x (+)= input half of the gradient; shapes as in the forward."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import layernorm  # noqa: PLC0415

        return layernorm.layernorm_backward_input(grad_y, x, weight, eps, grad_x, accumulate)
    normalised, _, r = _normalised(x, eps)
    gw = wide(grad_y) * wide(weight)
    shift = gw.mean(-1, keepdim=True)
    projection = (gw * normalised).mean(-1, keepdim=True)
    grad = gw.sub_(shift).sub_(normalised.mul_(projection)).mul_(r)
    grad_x.copy_(grad.add_(grad_x) if accumulate else grad)


def layernorm_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, eps: float, grad_x: Tensor, partials: Tensor, accumulate: bool
) -> None:
    """The input half, and in partials [P, 2, D] what `add_partials` makes the gradients of weight and bias from: the
    sums over tokens of grad_y * (x - mean) * r and of grad_y."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import layernorm  # noqa: PLC0415

        return layernorm.layernorm_backward(grad_y, x, weight, eps, grad_x, parts_of(partials, len(x)), accumulate)
    terms = wide(grad_y)  # read before grad_x is written, which may be grad_y
    partials[0, 0], partials[0, 1] = _normalised(x, eps)[0].mul_(terms).sum(0), terms.sum(0)
    layernorm_backward_input(grad_y, x, weight, eps, grad_x, accumulate)


def add_partials(partials: Tensor, tokens: int, grad_weight: Tensor, grad_bias: Tensor, accumulate: bool) -> None:
    """grad_weight and grad_bias [D] (+)= the gradients of which `layernorm_backward` left the parts."""
    if use_kernel(partials) and partials.dtype != torch.float64:
        from flexengine.kernels import layernorm  # noqa: PLC0415

        return layernorm.sum_partials(parts_of(partials, tokens), grad_weight, grad_bias, accumulate)
    for acc, total in zip((grad_weight, grad_bias), partials[0], strict=True):
        acc.add_(total) if accumulate else acc.copy_(total)


class LayerNormStyle(NamedTuple):
    """eps; whether there are weight and bias; offset: what is added to the stored weight."""

    eps: float
    weight: bool = True
    bias: bool = True
    offset: float = 0.0


class LayerNorm(Op):
    """y [T, D] = layernorm(x [T, D]) with weight and bias [D], of which there may be one alone or none."""

    def __init__(
        self, name: str, x: str, y: str, width: int, weight: str | None, bias: str | None, eps: float,
        offset: float = 0.0,
    ) -> None:  # fmt: skip
        self.name, self.x, self.y, self.width, self.eps = name, x, y, width, eps
        self.weight, self.bias, self.offset = weight, bias, offset
        self.inputs = (x,)
        self.outputs = (TensorSpec(y, (width,)),)
        self.params = tuple(param for param in (weight, bias) if param is not None)
        self.needs_input = self.grad_inputs = (x,)
        rows, sums = ROW_GRAD_PARTIALS, f"{name}_partials"
        self.partials = TensorSpec(sums, (2, width), "float32", rows=rows, clip_rows=True)

    def _weight(self, env: OpEnv) -> Tensor:
        """What multiplies: a tensor of its own unless the weight is stored as it is."""
        if self.weight is None:
            return env.t[self.x].new_ones(self.width)
        return env.p[self.weight] + self.offset if self.offset else env.p[self.weight]

    def forward(self, env: OpEnv) -> None:
        x = env.t[self.x]
        bias = x.new_zeros(self.width) if self.bias is None else env.p[self.bias]
        layernorm_forward(x, self._weight(env), bias, self.eps, env.t[self.y])

    def backward_input(self, env: OpEnv) -> None:
        operands = (env.g[self.y], env.t[self.x], self._weight(env), self.eps, env.g[self.x])
        accumulate = self.x in env.accumulate
        if self.has_weight_half:
            layernorm_backward(*operands, env.t[self.partials.name], accumulate)
        else:
            layernorm_backward_input(*operands, accumulate)

    def backward_weight(self, env: OpEnv) -> None:
        sums, grad_y = env.t[self.partials.name], env.g[self.y]
        totals = [sums.new_zeros(self.width) if p is None else env.gp[p] for p in (self.weight, self.bias)]
        add_partials(sums, len(grad_y), totals[0], totals[1], not env.first)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return (self.partials,) if self.has_weight_half and half != "forward" else ()

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        own = 2 * self.width * max(4, compute_bytes) if len(self.params) < 2 or self.offset else 0
        return plain_bytes(5 * tokens * (self.width + 2), compute_bytes) + own

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.width * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        sums = parts_bytes(self.partials, tokens) if self.has_weight_half else 0.0
        return Work(memory_bytes=4.0 * tokens * self.width * compute_bytes + sums, kernels=1)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=parts_bytes(self.partials, tokens), kernels=1)
