"""Gated units beside FP8 layers with scales for blocks: codes of what these multiply are written where it is made.

Forward writes the codes of a, and a itself only where something else reads it. Backward of the unit and of the layers
around it is one op: it writes the codes of the gradient of gate_up, as it is and transposed, and those of a transposed,
so that neither is written and read again, and a is neither kept nor computed again. Values are rounded to the compute
dtype first, so that their codes are those that the layers would make.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work
from flexengine.ops.fp8 import Fp8Linear
from flexengine.ops.fp8_blocks import TERMS, BlockScaling, round_squares, round_vectors
from flexengine.ops.fp8_scaling import LARGEST, LEAST_ABSMAX, Buffers, Operand, Scaling
from flexengine.ops.glu import GLU, glu_backward, glu_forward, has_kernel
from flexengine.ops.joined import Joined

JOINED = True
"""False: units and layers round by themselves, with the same bits and more memory traffic."""


class CodedGLU(GLU):
    """A unit that can leave codes to FP8 layers around it."""

    def __init__(self, unit: GLU) -> None:
        super().__init__(unit.name, unit.gate_up, unit.y, unit.width, unit.activation)

    def with_next(self, following: Op) -> Op | None:
        if self.before is not None or self.behind is not None or not isinstance(following, Fp8Linear):
            return None
        if following.x != self.y or not has_whole_blocks(following.scaling, self.width):
            return None
        return FedByUnit(self, following) if following.x_again == self.y else None

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        """Also a, the gradient of gate_up, and what rounding takes of it."""
        own = super().plain_workspace_bytes(tokens, compute_bytes)
        return own + tokens * (3 * self.width * compute_bytes + 16 * TERMS)


def has_whole_blocks(scaling: Scaling, width: int) -> bool:
    """Whether operands have scales for blocks, of which a unit of this width has whole ones."""
    return JOINED and isinstance(scaling, BlockScaling) and width % TERMS == 0


class FedByUnit(Joined):
    """A unit and the layer that reads its output; with `source`, in backward, also the layer that it reads."""

    source: Fp8Linear | None = None
    whole: bool = True
    """Whether forward writes the unit's output."""

    def __init__(self, unit: CodedGLU, layer: Fp8Linear) -> None:
        left = {"x8", "x8_t"} if layer.gradient_in_fp8 else {"x8"}
        self.name, self.unit, self.layer = layer.name, unit, layer.changed(coded=frozenset(left))
        if layer.gradient_in_fp8:
            self.layer = self.layer.changed(needs_weight=())
        rest = layer.inputs[1:]
        self.inputs, self.outputs = (*unit.inputs, *rest), (*unit.outputs, *layer.outputs)
        self.needs_input, self.grad_over = unit.needs_input, unit.grad_over
        self.grad_inputs, self.grad_alias = (unit.gate_up, *rest), layer.grad_alias

    def leaving_out(self, unread: frozenset[str]) -> Op:
        if self.unit.y not in unread:
            return self
        return self.changed(whole=False, outputs=self.layer.outputs)

    def with_previous(self, previous: Op) -> Op | None:
        if self.source is not None or not isinstance(previous, Fp8Linear) or not previous.has_input_half:
            return None
        of_same_blocks = has_whole_blocks(previous.scaling, self.unit.width)
        if previous.y != self.unit.gate_up or previous.residual is not None or not of_same_blocks:
            return None
        source = previous.changed(coded=frozenset({"grad8"}))
        read = (self.unit.gate_up,) if _reads_gradient(source) else ()
        grads = (*source.grad_inputs, *read, *self.grad_inputs[1:])
        return self.changed(source=source, grad_inputs=grads)

    def weight_half_of(self, member: Op) -> Op:
        """The layers, as they find codes of what they multiply."""
        if member.name == self.layer.name:
            return self.layer
        return self.source if self.source is not None and member.name == self.source.name else member

    @property
    def _grad_y(self) -> TensorSpec:
        return TensorSpec(f"{self.unit.y}_gradient", (self.unit.width,))

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        own = self.layer.scratch(half)
        if half == "forward":
            return own
        return (*own, self._grad_y, *(() if self.source is None else self.source.scratch(half)))

    # -- calls ---------------------------------------------------------------------------------------------------------

    def forward(self, env: OpEnv) -> None:
        gate_up, activation = env.t[self.unit.gate_up], self.unit.activation
        out = env.t[self.unit.y] if self.whole else None
        codes = self._scaling.rows_side(Buffers(env.t, self.layer.name), "x8")
        if has_kernel(gate_up):
            from flexengine.kernels import fp8_glu  # noqa: PLC0415 (Triton is imported when first used)

            limits = (LARGEST, LEAST_ABSMAX, str(activation), out)
            fp8_glu.glu_forward(gate_up, codes.codes, codes.scales, *limits)
        else:
            out = gate_up.new_empty(len(gate_up), self.unit.width) if out is None else out
            glu_forward(gate_up, out, activation)
            round_vectors(out, codes, None)
        self.layer.forward(env)

    @property
    def _scaling(self) -> BlockScaling:
        assert isinstance(self.layer.scaling, BlockScaling)
        return self.layer.scaling

    def backward_input(self, env: OpEnv) -> None:
        grad_y = env.t[self._grad_y.name]
        self.layer.backward_input(replace(env, g={**env.g, self.unit.y: grad_y}))
        values = env.g.get(self.unit.gate_up) if self._writes_gradient else None
        rows = columns = unit = None
        if self.source is not None:
            buffers = Buffers(env.t, self.source.name)
            rows = self._scaling.rows_side(buffers, "grad8")
            columns = self._scaling.transposed_side(buffers, "grad8_t") if self.source.gradient_in_fp8 else None
        if "x8_t" in self.layer.coded:
            unit = self._scaling.transposed_side(Buffers(env.t, self.layer.name), "x8_t")
        self._write(grad_y, env.t[self.unit.gate_up], values, rows, columns, unit)
        if self.source is not None:
            self.source.backward_input(env)

    def _write(
        self, grad_y: Tensor, gate_up: Tensor, values: Tensor | None, rows: Operand | None, columns: Operand | None,
        unit: Operand | None,
    ) -> None:  # fmt: skip
        activation = self.unit.activation
        if has_kernel(gate_up):
            from flexengine.kernels import fp8_glu  # noqa: PLC0415

            coded, turned, of_unit = (None if side is None else side[:2] for side in (rows, columns, unit))
            results = fp8_glu.Gradients(coded, turned, values, of_unit, unit is not None and unit.square)
            return fp8_glu.glu_backward(grad_y, gate_up, results, LARGEST, LEAST_ABSMAX, str(activation))
        if unit is not None:
            out = torch.empty_like(grad_y)
            glu_forward(gate_up, out, activation)
            round_squares(out, unit, transposed=True) if unit.square else round_vectors(out, None, unit)
        values = torch.empty_like(gate_up) if values is None else values
        glu_backward(grad_y, gate_up, values, activation)
        if rows is not None or columns is not None:
            round_vectors(values, rows, columns)

    # -- cost ----------------------------------------------------------------------------------------------------------

    @property
    def _writes_gradient(self) -> bool:
        return self.source is None or _reads_gradient(self.source)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        passes, elements = 3.0 if self.whole else 2.0, tokens * self.unit.width
        moved = Work(memory_bytes=passes * elements * compute_bytes + _code_bytes(elements), kernels=1)
        return moved.plus(self.layer.forward_work(tokens, seq_len, compute_bytes))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        sizes, elements = (tokens, seq_len, compute_bytes), tokens * self.unit.width
        passes = 5.0 if self._writes_gradient else 3.0
        codes = 0 if self.source is None else 2 + 2 * self.source.gradient_in_fp8
        codes += "x8_t" in self.layer.coded
        moved = Work(memory_bytes=passes * elements * compute_bytes + codes * _code_bytes(elements), kernels=1)
        work = moved.plus(self.layer.backward_input_work(*sizes))
        return work if self.source is None else work.plus(self.source.backward_input_work(*sizes))


def _reads_gradient(layer: Fp8Linear) -> bool:
    """Whether a layer's weight half reads the gradient of its output, not only its codes."""
    return layer.has_weight_half and (not layer.gradient_in_fp8 or layer.bias is not None)


def _code_bytes(elements: int) -> float:
    """Bytes of codes and scales."""
    return elements * (1.0 + 4.0 / TERMS)
