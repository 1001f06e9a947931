"""Gated linear units: a = act(gate) * up for gate_up [T, 2F] with gate in the first F columns.

Source: Shazeer 2020, "GLU Variants Improve Transformer"; SwiGLU with act = silu, GeGLU with the tanh form of GELU
(Hendrycks & Gimpel 2016, "Gaussian Error Linear Units"). Both are z * s(z) with s(z) = sigmoid(u(z)): u = z for silu,
u = sqrt(8 / pi) * (z + 0.044715 z^3) for GELU. So act' = s + z * s * (1 - s) * u', grad_gate = grad_a * up * act',
grad_up = grad_a * act. A clamped unit has u = alpha * z, other halves (`ClampedSwiGLU`), and no gradient where one is
clamped.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel, wide
from flexengine.ops.row_range import rows_within


class ClampedSwiGLU(NamedTuple):
    """a = z * sigmoid(alpha * z) * (up + 1) with z = gate up to `limit` and up within +-limit; gate and up lie side by
    side, in even and odd columns. Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card"."""

    limit: float
    alpha: float


Activation = Literal["silu", "gelu_tanh"] | ClampedSwiGLU

GELU_LINEAR, GELU_CUBIC = math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715
"""u(z) = GELU_LINEAR * z + GELU_CUBIC * z^3."""


def _parts(gate_up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """The gate and up columns as they are stored, wide."""
    if isinstance(activation, ClampedSwiGLU):
        return wide(gate_up[..., ::2]), wide(gate_up[..., 1::2])
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return gate, up


def _halves(gate_up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """What is multiplied: (z, factor of act(z))."""
    gate, up = _parts(gate_up, activation)
    if isinstance(activation, ClampedSwiGLU):
        return gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit).add_(1.0)
    return gate, up


def _gate(z: Tensor, activation: Activation) -> tuple[Tensor, Tensor | float]:
    """(s(z), u'(z))."""
    if isinstance(activation, ClampedSwiGLU):
        return torch.sigmoid(activation.alpha * z), activation.alpha
    if activation == "silu":
        return torch.sigmoid(z), 1.0
    return torch.sigmoid(GELU_LINEAR * z + GELU_CUBIC * z**3), GELU_LINEAR + 3 * GELU_CUBIC * z.square()


def _put(grad_gate: Tensor, grad_up: Tensor, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
    """Write gradients to where gate and up lie, which `out` may be."""
    if not isinstance(activation, ClampedSwiGLU):
        out.copy_(torch.cat((grad_gate, grad_up), dim=-1))
        return
    gate, up = _parts(gate_up, activation)
    grad_gate = grad_gate.masked_fill(gate > activation.limit, 0.0)
    grad_up = grad_up.masked_fill(up.abs() > activation.limit, 0.0)
    out[..., ::2].copy_(grad_gate)
    out[..., 1::2].copy_(grad_up)


def glu_forward(
    gate_up: Tensor, out: Tensor, activation: Activation, row_weight: Tensor | None = None,
    bounds: Tensor | None = None,
) -> None:  # fmt: skip
    """out [T, F] = (row_weight [T] *) act(gate) * up; bounds: only of rows from the first of them to the last."""
    if use_kernel(gate_up) and gate_up.dtype != torch.float64:
        from flexengine.kernels import glu  # noqa: PLC0415 (Triton is imported when first used)

        return glu.glu_forward(gate_up, out, activation, row_weight, bounds)
    gate, up = _halves(gate_up, activation)
    value = gate * _gate(gate, activation)[0] * up
    rows = rows_within(bounds)  # the others are computed as well: torch rounds the last few elements another way
    out[rows] = (value if row_weight is None else value * row_weight[:, None])[rows].to(out.dtype)


def glu_backward(
    grad_out: Tensor, gate_up: Tensor, grad_gate_up: Tensor, activation: Activation, row_weight: Tensor | None = None,
    grad_row_weight: Tensor | None = None, accumulate: bool = False, bounds: Tensor | None = None,
) -> None:  # fmt: skip
    """grad_gate_up [T, 2F] from grad_out [T, F], and with weights of rows their gradient [T], added to what is there
    with `accumulate`; grad_gate_up may be gate_up itself. bounds: as in forward, where rows have weights."""
    if use_kernel(gate_up) and gate_up.dtype != torch.float64:
        from flexengine.kernels import glu  # noqa: PLC0415

        weights = (row_weight, grad_row_weight, accumulate, bounds)
        return glu.glu_backward(grad_out, gate_up, grad_gate_up, activation, *weights)
    rows = rows_within(bounds)
    gate, up = _halves(gate_up, activation)
    grad, (s, slope) = wide(grad_out), _gate(gate, activation)
    if row_weight is not None:
        assert grad_row_weight is not None
        total = (grad * gate * s * up).sum(-1)
        total = grad_row_weight + total if accumulate else total
        grad_row_weight[rows] = total[rows].to(grad_row_weight.dtype)
        grad = grad * row_weight[:, None]
    grad_gate, grad_up = grad * up * s * (1 + gate * (1 - s) * slope), grad * gate * s
    _put(grad_gate[rows], grad_up[rows], gate_up[rows], activation, grad_gate_up[rows])


class GLU(Op):
    """a = act(gate) * up. The gradient overwrites gate_up, which nothing reads afterwards."""

    def __init__(self, name: str, gate_up: str, y: str, width: int, activation: Activation = "silu") -> None:
        self.name, self.gate_up, self.y, self.width = name, gate_up, y, width
        self.activation: Activation = activation
        self.inputs = (gate_up,)
        self.outputs = (TensorSpec(y, (width,)),)
        self.needs_input = (gate_up,)
        self.grad_inputs = (gate_up,)
        self.grad_over = (gate_up,)

    def with_rounding(self, rounding: Op) -> Op | None:
        """One op for what rounds gate_up and then this unit; None where its backward reads gate_up itself."""
        return None

    def forward(self, env: OpEnv) -> None:
        glu_forward(env.t[self.gate_up], env.t[self.y], self.activation)

    def backward_input(self, env: OpEnv) -> None:
        glu_backward(env.g[self.y], env.t[self.gate_up], env.g[self.gate_up], self.activation)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(8 * tokens * self.width, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=3.0 * tokens * self.width * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=5.0 * tokens * self.width * compute_bytes, kernels=1)
