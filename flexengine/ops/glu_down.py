"""A gated unit with A of the adapter behind it: a = act(gate) * up and low = scale * a @ A.T in one op.

By itself `LoraDown` would read a [T, F] once for low and once more for the gradient of A, so that backward would keep
or recompute a. Here both are sums that the unit writes while it has a (kernels/adapted_glu.py): forward sums over
COLUMNS columns, backward, which makes a of gate_up in any case, those over a span of tokens.
"""

from __future__ import annotations

import torch

from flexengine.ops.adapters.lora_grads import MOST_RANK, SPANS, in_one_pass
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import OpEnv, TensorSpec, Work
from flexengine.ops.fp8_glu import CodedGLU
from flexengine.ops.glu import GLU, Addend
from flexengine.ops.linear import accumulate_weight_grad

COLUMNS = 1024
"""Columns of a partial sum for low. More take less memory, fewer keep more of a card busy."""
ROWS = 64
"""A span of tokens is so many times a number."""


class GLUDown(GLU):
    """a and low of gate_up, or of a sum; backward adds grad_low @ A to the gradient of a, and has that of A."""

    def __init__(self, unit: GLU, before: Addend | None, down: Adapters) -> None:
        vars(self).update(vars(unit.adding(before, down.added_to_gradient())))
        self.keepable = False  # backward reads low alone, which is kept beside gate_up
        self.adapters, self.low, self.params, self.grad_reads = down, down.low.name, (down.down,), ()
        self.outputs = (*unit.outputs, down.low)
        self.low_parts = TensorSpec(f"{down.name}.low_parts", (-(-self.width // COLUMNS) * down.rank,), "float32")
        self.down_parts = TensorSpec(f"{down.name}.grad_down_parts", (down.rank * self.width,), "float32", rows=SPANS)

    @staticmethod
    def takes(unit: GLU, down: Adapters) -> bool:
        """Whether a unit may do the work of these adapters. Magnitudes read a as well, and rounded units another a."""
        return type(unit) in (GLU, CodedGLU) and down.rank <= MOST_RANK and not down.has_magnitude

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return (self.low_parts,) if half == "forward" else (self.down_parts,)

    def forward(self, env: OpEnv) -> None:
        gate_up, out = env.t[self.gate_up], env.t[self.y]
        if not env.adapters:
            return super().forward(env)
        low, down, scale = env.t[self.low], env.p[self.adapters.down], self.adapters.scale
        if in_one_pass(gate_up):
            from flexengine.kernels import adapted_glu  # noqa: PLC0415 (Triton is imported when first used)

            behind = adapted_glu.Behind(low, down, env.t[self.low_parts.name], scale)
            return adapted_glu.unit_forward(gate_up, self._added(env), behind, COLUMNS, out, str(self.activation))
        super().forward(env)
        torch.addmm(low, out, down.t(), beta=0, alpha=scale, out=low)

    def backward_input(self, env: OpEnv) -> None:
        """Write the gradient of gate_up, which is that of the sum, and the partial sums of A's gradient."""
        gate_up, parts = env.t[self.gate_up], env.t[self.down_parts.name]
        grad_low, down = env.g[self.low], env.p[self.adapters.down]
        if in_one_pass(gate_up):
            from flexengine.kernels import adapted_glu  # noqa: PLC0415

            behind = adapted_glu.Behind(grad_low, down, parts)
            operands = (env.g[self.y], gate_up, self._added(env), behind, env.g[self.gate_up], str(self.activation))
            return adapted_glu.unit_backward(*operands)
        step = _span_rows(len(gate_up))
        for number, part in enumerate(parts):
            rows = slice(number * step, (number + 1) * step)
            out = gate_up.new_empty((len(gate_up[rows]), self.width))
            self.write(gate_up[rows], self._added(env, rows), out)
            accumulate_weight_grad(part.view(down.shape), grad_low[rows], out, True)
        super().backward_input(env)

    def backward_weight(self, env: OpEnv) -> None:
        """Add up the partial sums."""
        parts, grad = env.t[self.down_parts.name], env.gp[self.adapters.down]
        if in_one_pass(env.g[self.y]):
            from flexengine.kernels import lora_grads  # noqa: PLC0415

            return lora_grads.add_parts(parts, grad, env.first)
        total = parts.sum(0).view_as(grad)
        grad.copy_(total) if env.first else grad.add_(total)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        # Without the kernel, which takes 16 bits: a of a span, and later the sum of the parts.
        elements = self.width * max(_span_rows(tokens), self.adapters.rank) if compute_bytes > 2 else 0
        return max(super().workspace_bytes(tokens, compute_bytes), elements * compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        moved = self._moved(tokens, 3.0, self.before, self.behind) * compute_bytes
        return Work(memory_bytes=moved + 2.0 * self.low_parts.num_bytes(tokens, 4), kernels=2)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().backward_input_work(tokens, seq_len, compute_bytes)
        return work.plus(Work(memory_bytes=float(self.down_parts.num_bytes(tokens, 4))))

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=self.down_parts.num_bytes(tokens, 4) * (1.0 + 2.0 / SPANS), kernels=1)

    def model_flops(self, seq_len: int) -> float:
        """Those of `LoraDown`: the product and both gradients."""
        return 3 * self.adapters.down_work(seq_len, 1, 2).flops


def _span_rows(tokens: int) -> int:
    """Tokens of a span."""
    return -(-tokens // (ROWS * SPANS)) * ROWS
