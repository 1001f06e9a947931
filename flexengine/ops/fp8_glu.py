"""Gated units beside FP8 layers with scales for blocks: codes of what these multiply are written where it is made.

Forward writes the codes of a, and a itself only where something else reads it. Backward between frozen layers writes
the codes of the gradient of gate_up alone. Values are rounded to the compute dtype first, so that their codes are those
that the layers would make. Codes of transposed matrices, which gradients of weights take, are made in passes of their
own: on an H200 one pass for all took 2.5 ms where these take 2.0 (16384 tokens of llama-3.1-8b).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work
from flexengine.ops.fp8 import Fp8Linear
from flexengine.ops.fp8_blocks import TERMS, BlockScaling, round_vectors
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
        self.name, self.unit, self.layer = layer.name, unit, layer.changed(coded=frozenset({"x8"}))
        rest = layer.inputs[1:]
        self.inputs, self.outputs = (*unit.inputs, *rest), (*unit.outputs, *layer.outputs)
        self.needs_input, self.grad_over = unit.needs_input, unit.grad_over
        backward = layer.has_input_half and not layer.has_weight_half
        self.grad_inputs, self.grad_alias = ((unit.gate_up, *rest), layer.grad_alias) if backward else ((), ())

    def leaving_out(self, unread: frozenset[str]) -> Op:
        if self.unit.y not in unread:
            return self
        return self.changed(whole=False, outputs=self.layer.outputs)

    def with_previous(self, previous: Op) -> Op | None:
        if self.source is not None or not isinstance(previous, Fp8Linear) or not previous.has_input_half:
            return None
        apart = previous.y != self.unit.gate_up or previous.residual is not None or previous.has_weight_half
        if apart or not has_whole_blocks(previous.scaling, self.unit.width):
            return None
        source = previous.changed(coded=frozenset({"grad8"}))
        return self.changed(source=source, grad_inputs=(*source.grad_inputs, *self.grad_inputs[1:]), grad_over=())

    @property
    def _grad_y(self) -> TensorSpec:
        return TensorSpec(f"{self.unit.y}_gradient", (self.unit.width,))

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        own = self.layer.scratch(half)
        if half == "forward":
            return own
        return (*own, self._grad_y, *(() if self.source is None else self.source.scratch(half)))

    def forward(self, env: OpEnv) -> None:
        gate_up, activation = env.t[self.unit.gate_up], self.unit.activation
        out, codes = env.t[self.unit.y] if self.whole else None, _codes(self.layer, "x8", env)
        if has_kernel(gate_up):
            from flexengine.kernels import fp8_glu  # noqa: PLC0415 (Triton is imported when first used)

            limits = (LARGEST, LEAST_ABSMAX, str(activation), out)
            fp8_glu.glu_forward(gate_up, codes.codes, codes.scales, *limits)
        else:
            out = gate_up.new_empty(len(gate_up), self.unit.width) if out is None else out
            glu_forward(gate_up, out, activation)
            round_vectors(out, codes, None)
        self.layer.forward(env)

    def backward_input(self, env: OpEnv) -> None:
        grad_y, gate_up, activation = env.t[self._grad_y.name], env.t[self.unit.gate_up], self.unit.activation
        env = replace(env, g={**env.g, self.unit.y: grad_y})
        self.layer.backward_input(env)
        if self.source is None:
            return self.unit.backward_input(env)
        codes = _codes(self.source, "grad8", env)
        if has_kernel(gate_up):
            from flexengine.kernels import fp8_glu  # noqa: PLC0415

            limits = (LARGEST, LEAST_ABSMAX, str(activation))
            fp8_glu.glu_backward(grad_y, gate_up, codes.codes, codes.scales, *limits)
        else:
            values = torch.empty_like(gate_up)
            glu_backward(grad_y, gate_up, values, activation)
            round_vectors(values, codes, None)
        self.source.backward_input(env)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        passes, elements = 3.0 if self.whole else 2.0, tokens * self.unit.width
        moved = Work(memory_bytes=passes * elements * compute_bytes + _code_bytes(elements), kernels=1)
        return moved.plus(self.layer.forward_work(tokens, seq_len, compute_bytes))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        sizes, elements = (tokens, seq_len, compute_bytes), tokens * self.unit.width
        work = self.layer.backward_input_work(*sizes)
        if self.source is None:
            return work.plus(self.unit.backward_input_work(*sizes))
        moved = Work(memory_bytes=3.0 * elements * compute_bytes + 2 * _code_bytes(elements), kernels=1)
        return work.plus(moved).plus(self.source.backward_input_work(*sizes))


def _codes(layer: Fp8Linear, suffix: str, env: OpEnv) -> Operand:
    assert isinstance(layer.scaling, BlockScaling)
    return layer.scaling.rows_side(Buffers(env.t, layer.name), suffix)


def _code_bytes(elements: int) -> float:
    """Bytes of codes and scales."""
    return elements * (1.0 + 4.0 / TERMS)
