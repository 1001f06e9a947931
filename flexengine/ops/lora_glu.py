"""Gated linear units that add what adapters change of their input: a = act(gate) * up of gate_up + low @ B.T.

Where a linear layer with adapters makes the gate and up columns, it leaves the frozen product and low = scale * x @ A.T
alone, and the unit adds low @ B.T while it reads gate_up in any case. In the linear layer the sum would take one more
write and read of gate_up, which for large layers is most of what adapters cost in forward. The gradient of the sum is
that of gate_up, so the linear layer's backward is the usual one.

Shapes: gate_up [T, 2F] with gate in the first F columns, low [T, J * R], B [rows of the adapted modules, R], a [T, F].
"""

from __future__ import annotations

from torch import Tensor

from flexengine.ops.base import OpEnv, Work, use_kernel, wide
from flexengine.ops.glu import GLU, ClampedSwiGLU, glu_backward, glu_forward
from flexengine.ops.lora import AddedHalf, LoRALinear


def with_adapters(gate_up: Tensor, low: Tensor, up: Tensor, halves: tuple[AddedHalf, ...]) -> Tensor:
    """gate_up + low @ B.T, wide: the plain path's sum, which the kernels never write."""
    width = gate_up.shape[1] // 2
    total = wide(gate_up).clone()
    for half in halves:
        mine = wide(low[:, half.low_start : half.low_start + up.shape[1]])
        rows = wide(up[half.up_start : half.up_start + width])
        total[:, half.start : half.start + width].addmm_(mine, rows.t())
    return total


class LoRAGLU(GLU):
    """A gated unit of a linear layer's output and its adapters' low product."""

    def __init__(self, glu: GLU, linear: LoRALinear) -> None:
        super().__init__(glu.name, glu.gate_up, glu.y, glu.width, glu.activation)
        assert not isinstance(glu.activation, ClampedSwiGLU), "its gate and up lie in turns"
        self.low, self.up, self.rank = linear.low.name, linear.up, linear.rank
        self.halves = linear.halves()
        self.inputs = self.needs_input = (self.gate_up, self.low)

    def forward(self, env: OpEnv) -> None:
        gate_up, low, up, out = env.t[self.gate_up], env.t[self.low], env.p[self.up], env.t[self.y]
        if use_kernel(gate_up) and gate_up.element_size() < 8:
            from flexengine.kernels import lora_glu  # noqa: PLC0415 (Triton is imported when first used)

            return lora_glu.glu_forward(gate_up, low, up, self.halves, out, str(self.activation))
        total = with_adapters(gate_up, low, up, self.halves)
        glu_forward(total, out, self.activation)

    def backward_input(self, env: OpEnv) -> None:
        gate_up, low, up = env.t[self.gate_up], env.t[self.low], env.p[self.up]
        grad_out, grad_gate_up = env.g[self.y], env.g[self.gate_up]
        if use_kernel(gate_up) and gate_up.element_size() < 8:
            from flexengine.kernels import lora_glu  # noqa: PLC0415

            return lora_glu.glu_backward(grad_out, gate_up, low, up, self.halves, grad_gate_up, str(self.activation))
        total = with_adapters(gate_up, low, up, self.halves)
        glu_backward(grad_out, total, total, self.activation)
        grad_gate_up.copy_(total)

    def _low_work(self, tokens: int, compute_bytes: int) -> Work:
        """Reading low and B, whose product hides behind the memory that the unit reads."""
        ranks = self.rank * len(self.halves)
        return Work(memory_bytes=float((tokens + self.width) * ranks * compute_bytes))

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return super().forward_work(tokens, seq_len, compute_bytes).plus(self._low_work(tokens, compute_bytes))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().backward_input_work(tokens, seq_len, compute_bytes)
        return work.plus(self._low_work(tokens, compute_bytes))
