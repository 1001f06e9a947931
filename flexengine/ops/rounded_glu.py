"""Gated linear units whose backward reads gate and up rounded to FP8, so that half the bytes are kept for it.

Forward computes with the exact gate_up [T, 2F]. Whatever backward needs of it comes from its codes: the gradient of
gate_up, and the unit's output a [T, F] that the next layer's weight gradient reads. A plan may keep the codes or
compute them again from gate_up, which gives the same codes, so no plan changes a bit. Where a unit reads the sum of
gate_up and what adapters add (`ops/glu.py`), the codes are those of the sum, and backward needs neither low nor B.

Codes are e4m3 with a scale for every row and 128 columns of a half: the largest magnitude there over 448. NaN stays
NaN, and a block with an infinity becomes NaN.
Source: DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3.3, https://arxiv.org/abs/2412.19437, which keeps
the inputs of SwiGLU so and computes its output again in backward; scales of 1 x 128 elements: section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Self

import torch
from torch import Tensor

from flexengine.ops.base import FLOAT64_BYTES, Op, OpEnv, TensorSpec, Work, wide
from flexengine.ops.fp8_scaling import FORWARD_DTYPE, LEAST_ABSMAX
from flexengine.ops.glu import GLU, Added, Addend, glu_backward, glu_forward, has_kernel, plus_product, with_added

COLUMNS = 128
"""Columns that share a scale: fewer are more exact, and their scales take more bytes (here 1/32 of the codes)."""
LARGEST = torch.finfo(FORWARD_DTYPE).max
PLAIN_ELEMENTS = 1 << 20
"""Elements of gate_up that the plain path works on at once; more take more memory, fewer more calls."""


class Codes(NamedTuple):
    """Names of the codes and scales of a gate_up of 2 * `width` columns."""

    codes: str
    scales: str
    width: int

    @property
    def blocks(self) -> int:
        """Blocks of columns of either half."""
        return -(-self.width // COLUMNS)

    @property
    def specs(self) -> tuple[TensorSpec, TensorSpec]:
        """What is kept of a token."""
        codes = TensorSpec(self.codes, (2 * self.width,), "uint8")
        return codes, TensorSpec(self.scales, (2 * self.blocks,), "float32")

    def of(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        """Codes and scales of a call."""
        return env.t[self.codes], env.t[self.scales]

    def num_bytes(self, tokens: int, compute_bytes: int) -> float:
        """Bytes of codes and scales."""
        return float(sum(spec.num_bytes(tokens, compute_bytes) for spec in self.specs))

    def row_blocks(self, tokens: int) -> Iterator[slice]:
        """Rows that the plain path works on at once."""
        step = self._rows_at_once
        return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))

    @property
    def _rows_at_once(self) -> int:
        return max(1, PLAIN_ELEMENTS // (2 * self.blocks * COLUMNS))

    def plain_bytes(self, tokens: int, compute_bytes: int, copies: int) -> int:
        """Bytes of so many wide copies of the rows that the plain path works on at once."""
        rows = min(tokens, self._rows_at_once)
        return copies * rows * 2 * self.blocks * COLUMNS * max(4, compute_bytes)


def round_rows(gate_up: Tensor, codes: Tensor, scales: Tensor) -> None:
    """codes, scales = gate_up rounded: the plain path, for some rows."""
    round_blocks(*(tensor.view(len(gate_up), 2, -1) for tensor in (gate_up, codes, scales)))


def round_blocks(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """codes [R, P, D], scales [R, P, B] = x [R, P, D] rounded, whose D columns begin blocks of their own: the plain
    path."""
    rows, parts, width = x.shape
    x = torch.nn.functional.pad(wide(x), (0, scales.shape[2] * COLUMNS - width)).view(rows, parts, -1, COLUMNS)
    absmax = x.abs().nan_to_num_(0.0, torch.inf).amax(-1, keepdim=True).clamp_(min=LEAST_ABSMAX)
    scales.copy_((absmax / LARGEST).squeeze(-1))
    factor = torch.full_like(absmax, LARGEST).div_(absmax)  # torch would divide a number by rounding twice
    scaled = (x * factor).clamp_(-LARGEST, LARGEST).view(rows, parts, -1)[..., :width]
    codes.copy_(scaled.to(FORWARD_DTYPE).view(torch.uint8))


def rounded_rows(codes: Tensor, scales: Tensor) -> Tensor:
    """What the codes of some rows stand for, wide [T, 2F]: the plain path."""
    return rounded_blocks(*(tensor.view(len(codes), 2, -1) for tensor in (codes, scales))).view(codes.shape)


def rounded_blocks(codes: Tensor, scales: Tensor) -> Tensor:
    """What `round_blocks` has rounded, in the dtype of the scales."""
    by_column = scales.repeat_interleave(COLUMNS, dim=2)[..., : codes.shape[2]]
    return codes.view(FORWARD_DTYPE).to(scales.dtype) * by_column


class RoundGateUp(Op):
    """codes, scales = gate_up [T, 2F] rounded, or the sum that the unit reads. Forward runs it only where they are
    kept."""

    for_backward = True
    before: Addend | None = None
    """What is added to gate_up."""

    def __init__(self, name: str, gate_up: str, kept: Codes) -> None:
        self.name, self.gate_up, self.kept = name, gate_up, kept
        self.inputs, self.outputs = (gate_up,), kept.specs

    def adding(self, before: Addend) -> Self:
        """The same op of gate_up plus a product."""
        return self.changed(before=before, inputs=(*self.inputs, before.low))

    def with_next(self, following: Op) -> Op | None:
        if isinstance(following, GLU) and following.gate_up == self.gate_up:
            return following.with_rounding(self)
        return None

    def forward(self, env: OpEnv) -> None:
        gate_up, (codes, scales) = env.t[self.gate_up], self.kept.of(env)
        if has_kernel(gate_up):
            return self.write(env)
        for rows in self.kept.row_blocks(len(gate_up)):
            total = gate_up[rows]
            if self.before is not None and env.adapters:
                low, up, halves = self.before.of(env)
                total = with_added(total, low[rows], up, halves)
            round_rows(total, codes[rows], scales[rows])

    def write(self, env: OpEnv, out: Tensor | None = None, activation: str = "silu") -> None:
        """Write codes and scales by a kernel, and with `out` also the output of the unit with this activation."""
        from flexengine.kernels import rounded_glu, rounded_lora_glu  # noqa: PLC0415 (Triton is imported when used)

        gate_up, operands = env.t[self.gate_up], (*self.kept.of(env), LARGEST, LEAST_ABSMAX, out, activation)
        if self.before is None or not env.adapters:
            return rounded_glu.round_gate_up(gate_up, *operands)
        rounded_lora_glu.round_sums(gate_up, *self.before.of(env), *operands)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        copies = 5 if self.before is None else 7
        return self.kept.plain_bytes(tokens, compute_bytes, copies) if compute_bytes == FLOAT64_BYTES else 0

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        ranks = 0 if self.before is None else self.before.rank * len(self.before.halves)
        read = 2.0 * tokens * self.kept.width + (tokens + self.kept.width) * ranks
        return Work(memory_bytes=read * compute_bytes + self.kept.num_bytes(tokens, compute_bytes), kernels=1)


class RoundedGLU(GLU):
    """a = act(gate) * up of the exact gate_up or sum; its backward reads the codes."""

    def __init__(self, glu: GLU, kept: Codes) -> None:
        assert glu.takes_addends, "its gate and up lie in turns"
        super().__init__(glu.name, glu.gate_up, glu.y, glu.width, glu.activation)
        self.kept = kept
        self.needs_input, self.grad_over = (kept.codes, kept.scales), ()

    def with_rounding(self, rounding: Op) -> Op:
        assert isinstance(rounding, RoundGateUp)
        return RoundingGLU(rounding, self)

    def _unit_of_sums(self, gate_up: Tensor, added: Added, out: Tensor) -> None:
        from flexengine.kernels import rounded_lora_glu  # noqa: PLC0415

        # Not the kernel of units without codes: its sums are of another tile, and could differ from the codes'.
        rounded_lora_glu.glu_forward(gate_up, *added, out, str(self.activation))

    def backward_input(self, env: OpEnv) -> None:
        grad_out, grad_gate_up, (codes, scales) = env.g[self.y], env.g[self.gate_up], self.kept.of(env)
        behind = self._product_behind(env)
        if has_kernel(grad_out):
            from flexengine.kernels import rounded_glu, rounded_lora_glu  # noqa: PLC0415

            operands = (grad_out, codes, scales, grad_gate_up, str(self.activation))
            if behind is None:
                return rounded_glu.glu_backward_from_codes(*operands)
            return rounded_lora_glu.glu_backward_from_codes(*operands, behind)
        for rows in self.kept.row_blocks(len(grad_out)):
            grad = plus_product(grad_out[rows], None if behind is None else (behind[0][rows], behind[1]))
            gate_up = rounded_rows(codes[rows], scales[rows])
            glu_backward(grad, gate_up, grad_gate_up[rows], self.activation)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        copies = 8 + (self.behind is not None)
        decoded = self.kept.plain_bytes(tokens, compute_bytes, copies) if compute_bytes == FLOAT64_BYTES else 0
        return max(super().workspace_bytes(tokens, compute_bytes), decoded)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        moved = self._moved(tokens, 3.0, self.behind) * compute_bytes
        return Work(memory_bytes=moved + self.kept.num_bytes(tokens, compute_bytes), kernels=1)


class RoundingGLU(Op):
    """Forward of `RoundGateUp` and then `RoundedGLU`, which reads gate_up once."""

    def __init__(self, rounding: RoundGateUp, unit: RoundedGLU) -> None:
        self.name, self.rounding, self.unit = unit.name, rounding, unit
        self.inputs, self.outputs = unit.inputs, (*unit.outputs, *rounding.outputs)

    def forward(self, env: OpEnv) -> None:
        if has_kernel(env.t[self.unit.gate_up]):
            return self.rounding.write(env, env.t[self.unit.y], str(self.unit.activation))
        self.rounding.forward(env)
        self.unit.forward(env)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        kept = self.unit.kept.num_bytes(tokens, compute_bytes)
        return self.unit.forward_work(tokens, seq_len, compute_bytes).plus(Work(memory_bytes=kept))


class GLUFromCodes(Op):
    """a_again = act(gate) * up of the rounded gate_up, for the weight gradient of the layer that reads a."""

    for_backward, keepable = True, False

    def __init__(self, glu: GLU, kept: Codes) -> None:
        self.name, self.y, self.glu, self.kept = f"{glu.name}_again", f"{glu.y}_again", glu, kept
        self.inputs = (self.kept.codes, self.kept.scales)
        self.outputs = (TensorSpec(self.y, (glu.width,)),)

    def forward(self, env: OpEnv) -> None:
        out, (codes, scales), activation = env.t[self.y], self.kept.of(env), self.glu.activation
        if has_kernel(out):
            from flexengine.kernels import rounded_glu  # noqa: PLC0415

            return rounded_glu.glu_from_codes(codes, scales, out, str(activation))
        for rows in self.kept.row_blocks(len(out)):
            glu_forward(rounded_rows(codes[rows], scales[rows]), out[rows], activation)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return self.kept.plain_bytes(tokens, compute_bytes, 6) if compute_bytes == FLOAT64_BYTES else 0

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        written = float(tokens * self.glu.width * compute_bytes)
        return Work(memory_bytes=written + self.kept.num_bytes(tokens, compute_bytes), kernels=1)
