"""Gated linear units: a = act(gate) * up for gate_up [T, 2F] with gate in the first F columns.

Source: Shazeer 2020, "GLU Variants Improve Transformer"; SwiGLU with act = silu, GeGLU with the tanh form of GELU
(Hendrycks & Gimpel 2016, "Gaussian Error Linear Units"). Both are z * s(z) with s(z) = sigmoid(u(z)): u = z for silu,
u = sqrt(8 / pi) * (z + 0.044715 z^3) for GELU. So act' = s + z * s * (1 - s) * u', grad_gate = grad_a * up * act',
grad_up = grad_a * act.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel, wide

Activation = Literal["silu", "gelu_tanh"]

GELU_LINEAR, GELU_CUBIC = math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715
"""u(z) = GELU_LINEAR * z + GELU_CUBIC * z^3."""


def _gate(z: Tensor, activation: Activation) -> tuple[Tensor, Tensor | float]:
    """(s(z), u'(z))."""
    if activation == "silu":
        return torch.sigmoid(z), 1.0
    return torch.sigmoid(GELU_LINEAR * z + GELU_CUBIC * z**3), GELU_LINEAR + 3 * GELU_CUBIC * z.square()


def glu_forward(gate_up: Tensor, out: Tensor, activation: Activation, row_weight: Tensor | None = None) -> None:
    """out [T, F] = (row_weight [T] *) act(gate) * up."""
    if use_kernel(gate_up) and gate_up.dtype != torch.float64:
        from flexengine.kernels import glu  # noqa: PLC0415 (Triton is imported when first used)

        return glu.glu_forward(gate_up, out, activation, row_weight)
    gate, up = wide(gate_up).chunk(2, dim=-1)
    value = gate * _gate(gate, activation)[0] * up
    out.copy_(value if row_weight is None else value * row_weight[:, None])


def glu_backward(
    grad_out: Tensor, gate_up: Tensor, grad_gate_up: Tensor, activation: Activation, row_weight: Tensor | None = None,
    grad_row_weight: Tensor | None = None,
) -> None:  # fmt: skip
    """grad_gate_up [T, 2F] from grad_out [T, F], and with weights of rows their gradient [T]; grad_gate_up may be
    gate_up itself."""
    if use_kernel(gate_up) and gate_up.dtype != torch.float64:
        from flexengine.kernels import glu  # noqa: PLC0415

        return glu.glu_backward(grad_out, gate_up, grad_gate_up, activation, row_weight, grad_row_weight)
    gate, up = wide(gate_up).chunk(2, dim=-1)
    grad, (s, slope) = wide(grad_out), _gate(gate, activation)
    if row_weight is not None:
        assert grad_row_weight is not None
        grad_row_weight.copy_((grad * gate * s * up).sum(-1))
        grad = grad * row_weight[:, None]
    grad_gate, grad_up = grad * up * s * (1 + gate * (1 - s) * slope), grad * gate * s
    grad_gate_up.copy_(torch.cat((grad_gate, grad_up), dim=-1))


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

    def forward(self, env: OpEnv) -> None:
        glu_forward(env.t[self.gate_up], env.t[self.y], self.activation)

    def backward_input(self, env: OpEnv) -> None:
        glu_backward(env.g[self.y], env.t[self.gate_up], env.g[self.gate_up], self.activation)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(7 * tokens * self.width, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=3.0 * tokens * self.width * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=5.0 * tokens * self.width * compute_bytes, kernels=1)
