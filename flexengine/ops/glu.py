"""Gated linear units: a = act(gate) * up for gate_up [T, 2F] with gate in the first F columns.

Source: Shazeer 2020, "GLU Variants Improve Transformer"; SwiGLU with act = silu, GeGLU with the tanh form of GELU
(Hendrycks & Gimpel 2016, "Gaussian Error Linear Units"). Both are z * s(z) with s(z) = sigmoid(u(z)): u = z for silu,
u = sqrt(8 / pi) * (z + 0.044715 z^3) for GELU. So act' = s + z * s * (1 - s) * u', grad_gate = grad_a * up * act',
grad_up = grad_a * act. A clamped unit has u = alpha * z, other halves (`ClampedSwiGLU`), and no gradient where one is
clamped.

Beside layers with adapters a unit takes over what would cost passes over memory there (`Addend`). Of a layer before it
that leaves its frozen product alone it reads gate_up + low @ B.T, whose gradient is that of gate_up. Of adapters behind
it, which read a, backward adds grad_low @ A to the gradient of a while it reads that.
"""

from __future__ import annotations

import copy
import math
from typing import Literal, NamedTuple, Self

import torch
from torch import Tensor

from flexengine.ops.base import FLOAT64_BYTES, Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel, wide
from flexengine.ops.cards import multiplies_in_kernels
from flexengine.ops.row_range import rows_within


class ClampedSwiGLU(NamedTuple):
    """a = z * sigmoid(alpha * z) * (up + 1) with z = gate up to `limit` and up within +-limit; gate and up lie side by
    side, in even and odd columns. Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model Card"."""

    limit: float
    alpha: float


Activation = Literal["silu", "gelu_tanh"] | ClampedSwiGLU

GELU_LINEAR, GELU_CUBIC = math.sqrt(8 / math.pi), math.sqrt(8 / math.pi) * 0.044715
"""u(z) = GELU_LINEAR * z + GELU_CUBIC * z^3."""


def _parts(gate_up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """The gate and up columns as they are stored, wide."""
    if isinstance(activation, ClampedSwiGLU):
        return wide(gate_up[..., ::2]), wide(gate_up[..., 1::2])
    gate, up = wide(gate_up).chunk(2, dim=-1)
    return gate, up


def _halves(gate_up: Tensor, activation: Activation) -> tuple[Tensor, Tensor]:
    """What is multiplied: (z, factor of act(z))."""
    gate, up = _parts(gate_up, activation)
    if isinstance(activation, ClampedSwiGLU):
        return gate.clamp(max=activation.limit), up.clamp(-activation.limit, activation.limit).add_(1.0)
    return gate, up


def _gate(z: Tensor, activation: Activation) -> tuple[Tensor, Tensor | float]:
    """(s(z), u'(z))."""
    if isinstance(activation, ClampedSwiGLU):
        return torch.sigmoid(activation.alpha * z), activation.alpha
    if activation == "silu":
        return torch.sigmoid(z), 1.0
    return torch.sigmoid(GELU_LINEAR * z + GELU_CUBIC * z**3), GELU_LINEAR + 3 * GELU_CUBIC * z.square()


def _put(grad_gate: Tensor, grad_up: Tensor, gate_up: Tensor, activation: Activation, out: Tensor) -> None:
    """Write gradients to where gate and up lie, which `out` may be."""
    if not isinstance(activation, ClampedSwiGLU):
        out.copy_(torch.cat((grad_gate, grad_up), dim=-1))
        return
    gate, up = _parts(gate_up, activation)
    grad_gate = grad_gate.masked_fill(gate > activation.limit, 0.0)
    grad_up = grad_up.masked_fill(up.abs() > activation.limit, 0.0)
    out[..., ::2].copy_(grad_gate)
    out[..., 1::2].copy_(grad_up)


def glu_forward(
    gate_up: Tensor, out: Tensor, activation: Activation, row_weight: Tensor | None = None,
    bounds: Tensor | None = None,
) -> None:  # fmt: skip
    """out [T, F] = (row_weight [T] *) act(gate) * up; bounds: only of rows from the first of them to the last."""
    if has_kernel(gate_up):
        from flexengine.kernels import glu  # noqa: PLC0415 (Triton is imported when first used)

        return glu.glu_forward(gate_up, out, activation, row_weight, bounds)
    gate, up = _halves(gate_up, activation)
    value = gate * _gate(gate, activation)[0] * up
    rows = rows_within(bounds)  # the others are computed as well: torch rounds the last few elements another way
    out[rows] = (value if row_weight is None else value * row_weight[:, None])[rows].to(out.dtype)


class WeightedRows(NamedTuple):
    """What backward has of rows with weights: these and their gradient [T], whether that is added to, bounds of experts
    whose rows alone count, and where forward's output is written again."""

    weight: Tensor
    grad: Tensor
    accumulate: bool = False
    bounds: Tensor | None = None
    again: Tensor | None = None


def glu_backward(
    grad_out: Tensor,
    gate_up: Tensor,
    grad_gate_up: Tensor,
    activation: Activation,
    weighted: WeightedRows | None = None,
) -> None:
    """grad_gate_up [T, 2F] from grad_out [T, F]; it may be gate_up itself. weighted: of rows with weights, whose
    gradient is written as well; what is written again may lie over grad_out."""
    if has_kernel(gate_up):
        from flexengine.kernels import glu  # noqa: PLC0415

        if weighted is None:
            return glu.glu_backward(grad_out, gate_up, grad_gate_up, activation)
        rows = glu.WeightedRows(*weighted)
        return glu.weighted_glu_backward(grad_out, gate_up, grad_gate_up, activation, rows)
    rows = rows_within(None if weighted is None else weighted.bounds)
    gate, up = _halves(gate_up, activation)
    grad, (s, slope) = wide(grad_out), _gate(gate, activation)
    again = None
    if weighted is not None:
        total = (grad * gate * s * up).sum(-1)
        total = weighted.grad + total if weighted.accumulate else total
        weighted.grad[rows] = total[rows].to(weighted.grad.dtype)
        grad = grad * weighted.weight[:, None]
        again = None if weighted.again is None else gate * s * up * weighted.weight[:, None]
    grad_gate, grad_up = grad * up * s * (1 + gate * (1 - s) * slope), grad * gate * s
    _put(grad_gate[rows], grad_up[rows], gate_up[rows], activation, grad_gate_up[rows])
    if weighted is not None and weighted.again is not None and again is not None:
        weighted.again[rows] = again[rows].to(weighted.again.dtype)


class AddedHalf(NamedTuple):
    """Half of gate_up, by its first column, and where its columns of low and its rows of B begin."""

    start: int
    low_start: int
    up_start: int


Added = tuple[Tensor, Tensor, tuple[AddedHalf, ...]]
"""low [T, L], B [N, R] and the halves of gate_up that low @ B.T is added to."""


class Addend(NamedTuple):
    """Names of the operands of a product of rank R that a unit adds: low and B, or behind it low and A."""

    low: str
    matrix: str
    rank: int
    halves: tuple[AddedHalf, ...] = ()

    def of(self, env: OpEnv) -> Added:
        """The operands of a call, before the unit."""
        return env.t[self.low], env.p[self.matrix], self.halves


def with_added(gate_up: Tensor, low: Tensor, up: Tensor, halves: tuple[AddedHalf, ...]) -> Tensor:
    """gate_up + low @ B.T, wide: the plain path's sum, which the kernels never write."""
    width = gate_up.shape[1] // 2
    total = wide(gate_up).clone()
    for half in halves:
        mine = wide(low[:, half.low_start : half.low_start + up.shape[1]])
        rows = wide(up[half.up_start : half.up_start + width])
        total[:, half.start : half.start + width].addmm_(mine, rows.t())
    return total


class GLU(Op):
    """a = act(gate) * up, also of a sum. The gradient overwrites gate_up, which nothing reads afterwards."""

    before: Addend | None = None
    """What is added to gate_up."""
    behind: Addend | None = None
    """What backward adds to the gradient of a."""

    def __init__(self, name: str, gate_up: str, y: str, width: int, activation: Activation = "silu") -> None:
        self.name, self.gate_up, self.y, self.width = name, gate_up, y, width
        self.activation: Activation = activation
        self.inputs = (gate_up,)
        self.outputs = (TensorSpec(y, (width,)),)
        self.needs_input = (gate_up,)
        self.grad_inputs = (gate_up,)
        self.grad_over = (gate_up,)

    @property
    def takes_addends(self) -> bool:
        """Whether it can add products: not where gate and up lie in turns."""
        return not isinstance(self.activation, ClampedSwiGLU)

    def adding(self, before: Addend | None, behind: Addend | None) -> Self:
        """The same unit of gate_up plus the product `before`, whose backward adds the one `behind`."""
        assert self.takes_addends, "gate and up lie in turns"
        op = copy.copy(self)
        op.before, op.behind = before, behind
        op.grad_reads = () if behind is None else (behind.low,)
        if before is not None:
            op.inputs = (*self.inputs, before.low)
            op.needs_input = op.inputs if self.gate_up in self.needs_input else self.needs_input
        return op

    def with_rounding(self, rounding: Op) -> Op | None:
        """One op for what rounds gate_up and then this unit; None where its backward reads gate_up itself."""
        return None

    def forward(self, env: OpEnv) -> None:
        adds = self.before is not None and env.adapters
        self.write(env.t[self.gate_up], self._added(env) if adds else None, env.t[self.y])

    def write(self, gate_up: Tensor, added: Added | None, out: Tensor) -> None:
        """out = the unit of gate_up or of a sum."""
        if added is None:
            return glu_forward(gate_up, out, self.activation)
        if has_product_kernel(gate_up):
            return self._unit_of_sums(gate_up, added, out)
        glu_forward(with_added(gate_up, *added), out, self.activation)

    def _unit_of_sums(self, gate_up: Tensor, added: Added, out: Tensor) -> None:
        """out = the unit of gate_up + low @ B.T, by a kernel."""
        from flexengine.kernels import lora_glu  # noqa: PLC0415 (Triton is imported when first used)

        lora_glu.glu_forward(gate_up, *added, out, str(self.activation))

    def _added(self, env: OpEnv, rows: slice = slice(None)) -> Added:
        """What is added to these rows of gate_up: nothing, or low @ B.T."""
        gate_up = env.t[self.gate_up]
        low, up, halves = (gate_up[:, :1], gate_up[:0, :1], ()) if self.before is None else self.before.of(env)
        return low[rows], up, halves

    def _product_behind(self, env: OpEnv) -> tuple[Tensor, Tensor] | None:
        """grad_low and A of the adapters behind."""
        return None if self.behind is None else (env.g[self.behind.low], env.p[self.behind.matrix])

    def backward_input(self, env: OpEnv) -> None:
        gate_up, behind = env.t[self.gate_up], self._product_behind(env)
        grad_out, grad_gate_up = env.g[self.y], env.g[self.gate_up]
        if self.before is None and behind is None:
            return glu_backward(grad_out, gate_up, grad_gate_up, self.activation)
        added = self._added(env)
        if has_product_kernel(gate_up):
            from flexengine.kernels import lora_glu  # noqa: PLC0415

            return lora_glu.glu_backward(grad_out, gate_up, *added, grad_gate_up, str(self.activation), behind)
        total = with_added(gate_up, *added)
        glu_backward(plus_product(grad_out, behind), total, total, self.activation)
        grad_gate_up.copy_(total)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes((8 + (self.behind is not None)) * tokens * self.width, compute_bytes)

    def _moved(self, tokens: int, passes: float, *addends: Addend | None) -> float:
        """Elements of passes over a, and of the operands of products, which hide behind what the unit reads."""
        ranks = sum(addend.rank * max(1, len(addend.halves)) for addend in addends if addend is not None)
        return passes * tokens * self.width + (tokens + self.width) * ranks

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=self._moved(tokens, 3.0, self.before) * compute_bytes, kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=self._moved(tokens, 5.0, self.before, self.behind) * compute_bytes, kernels=1)


def plus_product(grad_out: Tensor, behind: tuple[Tensor, Tensor] | None) -> Tensor:
    """grad_out + grad_low @ A, wide: the plain path's sum. Without adapters behind, grad_out itself."""
    return grad_out if behind is None else wide(grad_out).addmm(*map(wide, behind))


def has_kernel(tensor: Tensor) -> bool:
    """Whether kernels of units take a tensor: all types but float64."""
    return use_kernel(tensor) and tensor.element_size() < FLOAT64_BYTES


def has_product_kernel(tensor: Tensor) -> bool:
    """Whether kernels of units that multiply by adapters' matrices take a tensor."""
    return has_kernel(tensor) and multiplies_in_kernels(tensor.device)
