"""Gated linear units beside layers with adapters, which take over what would cost passes over memory there.

Before the unit: a layer that makes gate and up leaves its frozen product alone, and the unit adds low @ B.T while it
reads gate_up in any case: a = act(gate) * up of gate_up + low @ B.T. The gradient of the sum is that of gate_up.

Behind it: backward adds grad_low_a @ A_a, of the adapters that read a, to the gradient of a while it reads that.

Shapes: gate_up [T, 2F] with gate in the first F columns, low [T, J * R], B [rows of the adapted modules, R], a [T, F],
low_a [T, R], A_a [R, F].
"""

from __future__ import annotations

from torch import Tensor

from flexengine.ops.adapters.low_rank import Adapters, AddedHalf
from flexengine.ops.base import OpEnv, Work, plain_bytes, use_kernel, wide
from flexengine.ops.glu import GLU, ClampedSwiGLU, glu_backward, glu_forward


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
    """A gated unit that adds low @ B.T of adapters `before` it, grad_low @ A of those `behind` it, or both."""

    def __init__(self, glu: GLU, before: Adapters | None = None, behind: Adapters | None = None) -> None:
        super().__init__(glu.name, glu.gate_up, glu.y, glu.width, glu.activation)
        assert not isinstance(glu.activation, ClampedSwiGLU), "its gate and up lie in turns"
        self.before, self.behind = before, behind
        self.halves = () if before is None else before.halves()
        if before is not None:
            self.inputs = self.needs_input = (self.gate_up, before.low.name)
        self.grad_reads = () if behind is None else (behind.low.name,)

    def _added(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        """low and B of the adapters before; without any, tensors that no half reads."""
        if self.before is None:
            gate_up = env.t[self.gate_up]
            return gate_up[:, :1], gate_up[:0, :1]
        return env.t[self.before.low.name], env.p[self.before.up]

    def _behind(self, env: OpEnv) -> tuple[Tensor, Tensor] | None:
        """grad_low and A of the adapters behind."""
        return None if self.behind is None else (env.g[self.behind.low.name], env.p[self.behind.down])

    def forward(self, env: OpEnv) -> None:
        if self.before is None or not env.adapters:
            super().forward(env)
            return
        gate_up, (low, up), out = env.t[self.gate_up], self._added(env), env.t[self.y]
        if use_kernel(gate_up) and gate_up.element_size() < 8:
            from flexengine.kernels import lora_glu  # noqa: PLC0415 (Triton is imported when first used)

            return lora_glu.glu_forward(gate_up, low, up, self.halves, out, str(self.activation))
        glu_forward(with_adapters(gate_up, low, up, self.halves), out, self.activation)

    def backward_input(self, env: OpEnv) -> None:
        gate_up, (low, up), behind = env.t[self.gate_up], self._added(env), self._behind(env)
        grad_out, grad_gate_up = env.g[self.y], env.g[self.gate_up]
        if use_kernel(gate_up) and gate_up.element_size() < 8:
            from flexengine.kernels import lora_glu  # noqa: PLC0415

            operands = (grad_out, gate_up, low, up, self.halves, grad_gate_up)
            return lora_glu.glu_backward(*operands, str(self.activation), behind)
        if behind is not None:
            grad_out = wide(grad_out).addmm(*map(wide, behind))
        total = with_adapters(gate_up, low, up, self.halves)
        glu_backward(grad_out, total, total, self.activation)
        grad_gate_up.copy_(total)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        grad = 0 if self.behind is None else tokens * self.width
        return super().workspace_bytes(tokens, compute_bytes) + plain_bytes(grad, compute_bytes)

    def _ranks_work(self, tokens: int, compute_bytes: int, backward: bool) -> Work:
        """Reading low and B, and in backward their likes behind, whose products hide behind what the unit reads."""
        ranks = 0 if self.before is None else self.before.rank * len(self.halves)
        ranks += self.behind.rank if backward and self.behind is not None else 0
        return Work(memory_bytes=float((tokens + self.width) * ranks * compute_bytes))

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().forward_work(tokens, seq_len, compute_bytes)
        return work.plus(self._ranks_work(tokens, compute_bytes, backward=False))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().backward_input_work(tokens, seq_len, compute_bytes)
        return work.plus(self._ranks_work(tokens, compute_bytes, backward=True))
