"""SwiGLU: a = silu(gate) * up for gate_up [T, 2F] with gate in the first F columns.

Source: Shazeer 2020, "GLU Variants Improve Transformer". With s = sigmoid(gate): grad_gate = grad_a * up * s * (1 +
gate * (1 - s)), grad_up = grad_a * gate * s.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def swiglu_forward(gate_up: Tensor, out: Tensor) -> None:
    """out [T, F] = silu(gate) * up."""
    if use_kernel(gate_up) and gate_up.dtype != torch.float64:
        from flexengine.kernels import swiglu  # noqa: PLC0415 (Triton is imported when first used)

        return swiglu.swiglu_forward(gate_up, out)
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    out.copy_(torch.nn.functional.silu(gate) * up)


def swiglu_backward(grad_out: Tensor, gate_up: Tensor, grad_gate_up: Tensor) -> None:
    """grad_gate_up [T, 2F] from grad_out [T, F]; grad_gate_up may be gate_up itself."""
    if use_kernel(gate_up) and gate_up.dtype != torch.float64:
        from flexengine.kernels import swiglu  # noqa: PLC0415

        return swiglu.swiglu_backward(grad_out, gate_up, grad_gate_up)
    gate, up = _wide(gate_up).chunk(2, dim=-1)
    grad, s = _wide(grad_out), torch.sigmoid(gate)
    grad_gate, grad_up = grad * up * s * (1 + gate * (1 - s)), grad * gate * s
    grad_gate_up.copy_(torch.cat((grad_gate, grad_up), dim=-1))


class SwiGLU(Op):
    """a = silu(gate) * up. The gradient overwrites gate_up, which nothing reads afterwards."""

    def __init__(self, name: str, gate_up: str, y: str, width: int) -> None:
        self.name, self.gate_up, self.y, self.width = name, gate_up, y, width
        self.inputs = (gate_up,)
        self.outputs = (TensorSpec(y, (width,)),)
        self.needs_input = (gate_up,)
        self.grad_inputs = (gate_up,)
        self.grad_over = (gate_up,)

    def forward(self, env: OpEnv) -> None:
        swiglu_forward(env.t[self.gate_up], env.t[self.y])

    def backward_input(self, env: OpEnv) -> None:
        swiglu_backward(env.g[self.y], env.t[self.gate_up], env.g[self.gate_up])

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(6 * tokens * self.width, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=3.0 * tokens * self.width * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=5.0 * tokens * self.width * compute_bytes, kernels=1)
