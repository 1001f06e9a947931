"""The tensor between layers in FP8: codes of its rows, which half the bytes keep, send and fetch.

A layer writes its output x [T, D] as codes, and the next one reads what they stand for, in forward as in backward. So
every row is rounded at the same places, whichever inputs a plan keeps or makes again, and no plan changes a bit. The
gradient passes straight through: that of what a layer reads is that of what the one before it wrote.

A row of codes [S] uint8 holds B = ceil(D / 128) float32 scales and then D e4m3 values, either filled up to 16 bytes.
The rounding is that of `ops/rounded_glu.py`: a scale for 128 columns is the largest magnitude there over 448. NaN
stays NaN, and a block with an infinity becomes NaN.
Source: straight through: Bengio et al. 2013, "Estimating or Propagating Gradients Through Stochastic Neurons for
Conditional Computation", https://arxiv.org/abs/1308.3432.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexengine.ops.base import FLOAT64_BYTES, Op, OpEnv, TensorSpec, Work
from flexengine.ops.fp8_scaling import LEAST_ABSMAX
from flexengine.ops.glu import has_kernel
from flexengine.ops.rounded_glu import COLUMNS, LARGEST, PLAIN_ELEMENTS, round_blocks, rounded_blocks

ALIGNMENT = 16
"""Scales and values of a row begin at multiples of so many bytes."""


def _filled(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


class CodedRows(Op):
    """What writes or reads codes. rows: the tensor [T, D] that they stand for; codes: [T, S]."""

    few_operands = True

    def __init__(self, name: str, rows: TensorSpec, codes: str) -> None:
        self.name, self.rows, self.width = name, rows, rows.shape[0]
        self.blocks = -(-self.width // COLUMNS)
        self.scale_bytes = _filled(4 * self.blocks)
        self.codes = TensorSpec(codes, (self.scale_bytes + _filled(self.width),), "uint8")

    def _parts(self, env: OpEnv) -> tuple[Tensor, Tensor, Tensor]:
        """The rows, their values [T, D] and scales [T, B]."""
        codes = env.t[self.codes.name]
        values = codes[:, self.scale_bytes : self.scale_bytes + self.width]
        return env.t[self.rows.name], values, codes[:, : 4 * self.blocks].view(torch.float32)

    def _row_blocks(self, tokens: int) -> Iterator[slice]:
        """Rows that the plain path works on at once."""
        step = self._rows_at_once
        return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))

    @property
    def _rows_at_once(self) -> int:
        return max(1, PLAIN_ELEMENTS // (self.blocks * COLUMNS))

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        if compute_bytes != FLOAT64_BYTES:
            return 0
        return 5 * min(tokens, self._rows_at_once) * self.blocks * COLUMNS * compute_bytes

    def backward_input(self, env: OpEnv) -> None:
        """Nothing: the gradient lies where it is."""

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        moved = self.rows.num_bytes(tokens, compute_bytes) + tokens * (self.width + 4 * self.blocks)
        return Work(memory_bytes=float(moved), kernels=1)


class WriteCodes(CodedRows):
    """codes = rows rounded, at the end of a layer; behind ops that run in parts, once the last has written rows."""

    def __init__(self, name: str, rows: TensorSpec, codes: str, divisions: int = 1) -> None:
        super().__init__(name, rows, codes)
        self.divisions = divisions
        self.inputs = self.grad_inputs = (rows.name,)
        self.outputs, self.grad_alias = (self.codes,), ((rows.name, codes),)

    def forward(self, env: OpEnv) -> None:
        if env.part < self.num_parts - 1:
            return None
        rows, values, scales = self._parts(env)
        if has_kernel(rows):
            from flexengine.kernels import coded_rows  # noqa: PLC0415 (Triton is imported when used)

            return coded_rows.write_codes(rows, values, scales, LARGEST, LEAST_ABSMAX)
        for some in self._row_blocks(len(rows)):
            round_blocks(rows[some].unsqueeze(1), values[some].unsqueeze(1), scales[some].unsqueeze(1))
        return None


class ReadCodes(CodedRows):
    """rows = what the codes stand for, at the beginning of a layer; of what backward reads it makes them again."""

    keepable = False

    def __init__(self, name: str, rows: TensorSpec, codes: str) -> None:
        super().__init__(name, rows, codes)
        self.inputs = self.grad_inputs = (codes,)
        self.outputs, self.grad_alias = (rows,), ((codes, rows.name),)

    def forward(self, env: OpEnv) -> None:
        rows, values, scales = self._parts(env)
        if has_kernel(rows):
            from flexengine.kernels import coded_rows  # noqa: PLC0415

            return coded_rows.read_codes(values, scales, rows)
        for some in self._row_blocks(len(rows)):
            rows[some] = rounded_blocks(values[some].unsqueeze(1), scales[some].unsqueeze(1)).squeeze(1)
