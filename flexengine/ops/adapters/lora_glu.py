"""Gated linear units beside linear layers with adapters: they take over what would cost passes over memory there.

Before the unit: a layer that makes gate and up leaves its frozen product and low = scale * x @ A.T alone, and the unit
adds low @ B.T while it reads gate_up in any case: a = act(gate) * up of gate_up + low @ B.T. In the layer the sum would
take one more write and read of gate_up. The gradient of the sum is that of gate_up, so the layer's backward is the
usual one.

Behind it: the unit makes low_a = scale * a @ A_a.T for the layer that reads a, and owns that A. Its backward adds
grad_low_a @ A_a to the gradient of a while it reads that, for which the layer would write and read it once more.

Shapes: gate_up [T, 2F] with gate in the first F columns, low [T, J * R], B [rows of the adapted modules, R], a [T, F],
low_a [T, R], A_a [R, F].
"""

from __future__ import annotations

from torch import Tensor

from flexengine.ops.adapters.lora import AddedHalf, LoRALinear, low_work, write_low
from flexengine.ops.base import OpEnv, Work, plain_bytes, use_kernel, wide
from flexengine.ops.glu import GLU, ClampedSwiGLU, glu_backward, glu_forward
from flexengine.ops.linear import accumulate_weight_grad, widened_bytes


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
    """A gated unit behind a layer that leaves the sum to it (`before`), before one that takes low (`after`) or both."""

    def __init__(self, glu: GLU, before: LoRALinear | None = None, after: LoRALinear | None = None) -> None:
        super().__init__(glu.name, glu.gate_up, glu.y, glu.width, glu.activation)
        assert not isinstance(glu.activation, ClampedSwiGLU), "its gate and up lie in turns"
        self.before, self.after = before, after
        self.halves = () if before is None else before.halves()
        if before is not None:
            self.inputs = self.needs_input = (self.gate_up, before.low.name)
        self.y_again = self.y
        if after is not None:
            self.outputs = (*self.outputs, after.low)
            self.params, self.needs_weight = (after.down,), (self.y,)

    def _added(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        """low and B of the layer before; without one, tensors that no half reads."""
        if self.before is None:
            gate_up = env.t[self.gate_up]
            return gate_up[:, :1], gate_up[:0, :1]
        return env.t[self.before.low.name], env.p[self.before.up]

    def forward(self, env: OpEnv) -> None:
        self._write_unit(env)
        if self.after is not None:
            write_low(env.t[self.y], env.p[self.after.down], self.after.scale, env.t[self.after.low.name])

    def _write_unit(self, env: OpEnv) -> None:
        if self.before is None:
            super().forward(env)
            return
        gate_up, (low, up), out = env.t[self.gate_up], self._added(env), env.t[self.y]
        if use_kernel(gate_up) and gate_up.element_size() < 8:
            from flexengine.kernels import lora_glu  # noqa: PLC0415 (Triton is imported when first used)

            return lora_glu.glu_forward(gate_up, low, up, self.halves, out, str(self.activation))
        total = with_adapters(gate_up, low, up, self.halves)
        glu_forward(total, out, self.activation)

    def backward_input(self, env: OpEnv) -> None:
        gate_up, (low, up) = env.t[self.gate_up], self._added(env)
        grad_out, grad_gate_up = env.g[self.y], env.g[self.gate_up]
        behind = None if self.after is None else (env.g[self.after.low.name], env.p[self.after.down])
        if use_kernel(gate_up) and gate_up.element_size() < 8:
            from flexengine.kernels import lora_glu  # noqa: PLC0415

            operands = (grad_out, gate_up, low, up, self.halves, grad_gate_up)
            return lora_glu.glu_backward(*operands, str(self.activation), behind)
        if behind is not None:
            grad_out = wide(grad_out).addmm(*map(wide, behind))
        total = with_adapters(gate_up, low, up, self.halves)
        glu_backward(grad_out, total, total, self.activation)
        grad_gate_up.copy_(total)

    def backward_weight(self, env: OpEnv) -> None:
        assert self.after is not None
        grad_low, down = env.g[self.after.low.name], self.after.down
        accumulate_weight_grad(env.gp[down], grad_low, env.t[self.y_again], env.first)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        grad = 0 if self.after is None else tokens * self.width
        return super().workspace_bytes(tokens, compute_bytes) + plain_bytes(grad, compute_bytes)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        widened = 0 if self.after is None else widened_bytes(tokens, self.after.rank, self.width, compute_bytes)
        return max(super().plain_workspace_bytes(tokens, compute_bytes), widened)

    def _ranks_work(self, tokens: int, compute_bytes: int, backward: bool) -> Work:
        """Reading low and B, and in backward their likes behind, whose products hide behind what the unit reads."""
        ranks = 0 if self.before is None else self.before.rank * len(self.halves)
        ranks += self.after.rank if backward and self.after is not None else 0
        return Work(memory_bytes=float((tokens + self.width) * ranks * compute_bytes))

    def _low_product(self, tokens: int, compute_bytes: int) -> Work:
        """The product with A of the layer behind, or the one that is its gradient: each reads a."""
        return Work() if self.after is None else low_work(tokens, self.width, self.after.rank, 1, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().forward_work(tokens, seq_len, compute_bytes).plus(self._low_product(tokens, compute_bytes))
        return work.plus(self._ranks_work(tokens, compute_bytes, backward=False))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().backward_input_work(tokens, seq_len, compute_bytes)
        return work.plus(self._ranks_work(tokens, compute_bytes, backward=True))

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._low_product(tokens, compute_bytes)

    def model_flops(self, seq_len: int) -> float:
        """The product with A, and its two gradients."""
        return 3 * self._low_product(seq_len, 2).flops
