"""A gated unit with A of the adapter behind it that leaves codes to the FP8 layer with that adapter.

Forward reads gate_up once for three results: the codes of a that the layer multiplies, low of the adapter, and a itself
only where something else reads it. Backward is that of the unit without codes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.adapters.lora_grads import MOST_RANK, in_one_pass
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import OpEnv, Work
from flexengine.ops.fp8_blocks import round_vectors
from flexengine.ops.fp8_glu import CodedGLU, LeavesCodes
from flexengine.ops.fp8_scaling import LARGEST, LEAST_ABSMAX, Operand
from flexengine.ops.glu import GLU, Addend
from flexengine.ops.glu_down import COLUMNS, GLUDown


class CodedGLUDown(GLUDown, LeavesCodes):
    """As `GLUDown`, beside an FP8 layer with scales for blocks."""

    def forward(self, env: OpEnv) -> None:
        if env.adapters and in_one_pass(env.t[self.gate_up]):
            return self._write(env, env.t[self.y], None)
        super().forward(env)

    def write_codes(self, env: OpEnv, codes: Operand, out: Tensor | None) -> None:
        gate_up = env.t[self.gate_up]
        if not env.adapters:
            return super().write_codes(env, codes, out)
        if in_one_pass(gate_up):
            return self._write(env, out, codes)
        out = gate_up.new_empty(len(gate_up), self.width) if out is None else out
        self.write(gate_up, self._added(env), out)
        low, down = env.t[self.low], env.p[self.adapters.down]
        torch.addmm(low, out, down.t(), beta=0, alpha=self.adapters.scale, out=low)
        round_vectors(out, codes, None)

    def _write(self, env: OpEnv, out: Tensor | None, codes: Operand | None) -> None:
        """By the kernel, in tiles of one shape, so that low has the same bits with codes and without."""
        from flexengine.kernels import adapted_glu  # noqa: PLC0415 (Triton is imported when first used)

        down, parts = env.p[self.adapters.down], env.t[self.low_parts.name]
        behind = adapted_glu.Behind(env.t[self.low], down, parts, self.adapters.scale)
        coded = None if codes is None else adapted_glu.Codes(codes.codes, codes.scales, LARGEST, LEAST_ABSMAX)
        adapted_glu.unit_forward(
            env.t[self.gate_up], self._added(env), behind, COLUMNS, out, str(self.activation),
            adapted_glu.CODED_FORWARD, coded,
        )  # fmt: skip

    def coded_work(self, tokens: int, compute_bytes: int, whole: bool) -> Work:
        work = super().coded_work(tokens, compute_bytes, whole)
        beside = self._moved(tokens, 0.0, self.behind) * compute_bytes + 2.0 * self.low_parts.num_bytes(tokens, 4)
        return work.plus(Work(memory_bytes=beside, kernels=1))


def with_down(unit: GLU, before: Addend | None, down: Adapters) -> GLUDown | None:
    """A unit that does the work of these adapters behind it; None where it may not: magnitudes read a as well, and
    other units another a in backward."""
    kind = {GLU: GLUDown, CodedGLU: CodedGLUDown}.get(type(unit))
    if kind is None or down.rank > MOST_RANK or down.has_magnitude:
        return None
    return kind(unit, before, down)
