"""Gated linear units beside layers with adapters, as in ops/adapters/lora_glu.py, whose backward reads FP8 codes, as in
ops/rounded_glu.py.

The codes are those of what the unit reads: gate_up [T, 2F], or gate_up + low @ B.T where the layer before leaves the
sum to the unit. So backward needs neither low nor B for the gradient of gate_up. Forward is that of
ops/adapters/lora_glu.py with the exact values.
"""

from __future__ import annotations

from flexengine.ops.adapters.lora_glu import LoRAGLU, with_adapters
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import FLOAT64_BYTES, Op, OpEnv, Work, use_kernel, wide
from flexengine.ops.fp8 import LEAST_ABSMAX
from flexengine.ops.glu import glu_backward
from flexengine.ops.rounded_glu import LARGEST, RoundedGLU, RoundGateUp, round_rows, rounded_rows


class RoundGateUpSum(RoundGateUp):
    """codes, scales = gate_up + low @ B.T rounded, of adapters that leave the sum (`before`)."""

    def __init__(self, rounding: RoundGateUp, before: Adapters) -> None:
        super().__init__(rounding.name, rounding.gate_up, rounding.kept)
        self.before, self.halves = before, before.halves()
        self.inputs = (self.gate_up, before.low.name)

    def forward(self, env: OpEnv) -> None:
        gate_up, low, up = env.t[self.gate_up], env.t[self.before.low.name], env.p[self.before.up]
        codes, scales = self.kept.of(env)
        if use_kernel(gate_up) and gate_up.element_size() < FLOAT64_BYTES:
            from flexengine.kernels import rounded_lora_glu  # noqa: PLC0415 (Triton is imported when first used)

            operands = (gate_up, low, up, self.halves, codes, scales, LARGEST, LEAST_ABSMAX)
            return rounded_lora_glu.round_sums(*operands)
        for rows in self.kept.row_blocks(len(gate_up)):
            round_rows(with_adapters(gate_up[rows], low[rows], up, self.halves), codes[rows], scales[rows])

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        total = self.kept.plain_bytes(tokens, compute_bytes, 2) if compute_bytes == FLOAT64_BYTES else 0
        return super().workspace_bytes(tokens, compute_bytes) + total

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        ranks = self.before.rank * len(self.halves)
        read = Work(memory_bytes=float((tokens + self.kept.width) * ranks * compute_bytes))
        return super().forward_work(tokens, seq_len, compute_bytes).plus(read)


class RoundedLoRAGLU(LoRAGLU):
    """A gated unit between layers with adapters, of the exact sums; its backward reads the codes of these."""

    def __init__(self, unit: RoundedGLU, before: Adapters | None, behind: Adapters | None) -> None:
        super().__init__(unit, before, behind)
        self.kept = unit.kept
        self.needs_input, self.grad_over = (self.kept.codes, self.kept.scales), ()

    def with_rounding(self, rounding: Op) -> Op:
        assert isinstance(rounding, RoundGateUp)
        return RoundingLoRAGLU(rounding, self)

    def forward(self, env: OpEnv) -> None:
        gate_up = env.t[self.gate_up]
        if not (self.before and env.adapters) or not use_kernel(gate_up) or gate_up.element_size() == FLOAT64_BYTES:
            super().forward(env)
            return
        from flexengine.kernels import rounded_lora_glu  # noqa: PLC0415

        # Not the kernel of ops/adapters/lora_glu.py: its sums are of another tile, and could differ from the codes'.
        operands = (gate_up, *self._added(env), self.halves, env.t[self.y])
        rounded_lora_glu.glu_forward(*operands, str(self.activation))

    def write_unit_and_codes(self, env: OpEnv, rounding: RoundGateUp) -> None:
        """Write the unit's output and the codes in one pass over gate_up."""
        gate_up, kept = env.t[self.gate_up], self.kept.of(env)
        if not use_kernel(gate_up) or gate_up.element_size() == FLOAT64_BYTES:
            rounding.forward(env)
            self.forward(env)
            return
        from flexengine.kernels import rounded_glu, rounded_lora_glu  # noqa: PLC0415

        operands = (*kept, LARGEST, LEAST_ABSMAX, env.t[self.y], str(self.activation))
        if self.before is None:
            return rounded_glu.round_gate_up(gate_up, *operands)
        rounded_lora_glu.round_sums(gate_up, *self._added(env), self.halves, *operands)

    def backward_input(self, env: OpEnv) -> None:
        grad_out, grad_gate_up, (codes, scales) = env.g[self.y], env.g[self.gate_up], self.kept.of(env)
        behind = self._behind(env)
        if use_kernel(grad_out) and grad_out.element_size() < FLOAT64_BYTES:
            from flexengine.kernels import rounded_glu, rounded_lora_glu  # noqa: PLC0415

            operands = (grad_out, codes, scales, grad_gate_up, str(self.activation))
            if behind is None:
                return rounded_glu.glu_backward_from_codes(*operands)
            return rounded_lora_glu.glu_backward_from_codes(*operands, behind)
        for rows in self.kept.row_blocks(len(grad_out)):
            grad = grad_out[rows]
            if behind is not None:
                grad = wide(grad).addmm(wide(behind[0][rows]), wide(behind[1]))
            glu_backward(grad, rounded_rows(codes[rows], scales[rows]), grad_gate_up[rows], self.activation)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        decoded = self.kept.plain_bytes(tokens, compute_bytes, 9) if compute_bytes == FLOAT64_BYTES else 0
        return max(super().workspace_bytes(tokens, compute_bytes), decoded)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        ranks = 0 if self.behind is None else self.behind.rank
        moved = 3.0 * tokens * self.width + (tokens + self.width) * ranks
        return Work(memory_bytes=moved * compute_bytes + self.kept.num_bytes(tokens, compute_bytes), kernels=1)


class RoundingLoRAGLU(LoRAGLU):
    """Forward of the rounding and then `RoundedLoRAGLU`, which reads gate_up once."""

    def __init__(self, rounding: RoundGateUp, unit: RoundedLoRAGLU) -> None:
        super().__init__(unit, unit.before)
        self.rounding, self.unit = rounding, unit
        self.outputs = (*unit.outputs, *rounding.outputs)
        self.needs_input = self.needs_weight = self.grad_inputs = self.grad_over = ()

    def forward(self, env: OpEnv) -> None:
        self.unit.write_unit_and_codes(env, self.rounding)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        kept = self.unit.kept.num_bytes(tokens, compute_bytes)
        return super().forward_work(tokens, seq_len, compute_bytes).plus(Work(memory_bytes=kept))
