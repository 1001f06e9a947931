"""The FFN of many experts: products of each expert with its rows, between which lies a gated unit.

Source: Shazeer et al. 2017, "Outrageously Large Neural Networks". A router's weight multiplies what goes into the last
product, not what comes out: the same by linearity, and no backward needs its output then. A bias of that product is
multiplied by the weight itself, w * (a @ W + b) = (w * a) @ W + w * b, from which the weight has a gradient as well.

Shapes: T tokens, K experts of each, R = T * K rows sorted by expert, E experts. `place` [T, K] and `bounds` [E + 1] as
the router writes them: rows bounds[e] to bounds[e + 1] are those of expert e. A chunk's buffers depend on T and K
alone, whatever the routing.

The experts may come in parts, which cross the link one by one: all ops from `Dispatch` to `Combine` then run part by
part, each on the rows of its experts.
"""

from __future__ import annotations

from typing import Self

from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes
from flexengine.ops.experts.fp8_experts import Fp8Product
from flexengine.ops.experts.grouped_products import (
    NOTHING,
    Added,
    bias_gradient,
    grouped_product,
    grouped_weight_gradient,
    row_weight_gradient,
)
from flexengine.ops.experts.shape import ExpertShape
from flexengine.ops.fp8_scaling import MULTIPLE
from flexengine.ops.glu import Activation, WeightedRows, glu_backward, glu_forward
from flexengine.ops.priced import PricedByHalf
from flexengine.ops.row_range import own_bounds, part_of


class GroupedLinear(PricedByHalf):
    """y [T, K * F]: every row times the weight [E, F, D] (transposed: [E, D, F]) of its expert, plus its bias [E, F].

    With the rows' weights [R] a row's bias is multiplied by its weight, whose gradient is grad_y . bias[e].
    """

    fp8: str | None = None
    """The value of --matmul-dtype by which forward and the gradient of x take FP8 operands; the weight's gradient stays
    in the compute dtype."""

    def __init__(
        self, name: str, x: str, bounds: str, y: str, in_features: int, out_features: int, num_experts: int,
        per_token: int, weight: str, bias: str | None = None, row_weight: str | None = None, transposed: bool = False,
        divisions: int = 1,
    ) -> None:  # fmt: skip
        self.name, self.x, self.bounds, self.y, self.weight, self.divisions = name, x, bounds, y, weight, divisions
        self.in_features, self.out_features = in_features, out_features
        self.num_experts, self.per_token, self.transposed = num_experts, per_token, transposed
        self.bias, self.row_weight = bias, row_weight
        weights = () if row_weight is None else (row_weight,)
        self.inputs = (x, bounds, *weights)
        self.outputs = (TensorSpec(y, (per_token * out_features,)),)
        self.params = (weight,) if bias is None else (weight, bias)
        self.needs_input = (bounds,)
        self.needs_weight = (x, bounds, *weights)
        self.grad_inputs = (x, *weights)

    @property
    def shape(self) -> ExpertShape:
        """What its speed depends on beside tokens."""
        return ExpertShape(self.num_experts, self.per_token, self.in_features, self.out_features)

    def _x(self, tensors: dict[str, Tensor]) -> Tensor:
        """x [R, D], or its gradient."""
        return tensors[self.x].view(-1, self.in_features)

    def _y(self, tensors: dict[str, Tensor]) -> Tensor:
        """y [R, F], or its gradient."""
        return tensors[self.y].view(-1, self.out_features)

    def _row_weight(self, tensors: dict[str, Tensor]) -> Tensor | None:
        return None if self.row_weight is None else tensors[self.row_weight].view(-1)

    def _bounds(self, env: OpEnv) -> Tensor:
        return part_of(env.t[self.bounds], env.part, self.num_parts)

    def with_fp8(self, matmul: str = "fp8") -> Self:
        """The same op with FP8 operands. Raises: ValueError where FP8 products cannot take its sizes."""
        if self.in_features % MULTIPLE or self.out_features % MULTIPLE:
            raise ValueError(
                f"{self.name} has {self.in_features} input and {self.out_features} output features of each expert; FP8"
                f" products need multiples of {MULTIPLE}; leave --matmul-dtype out"
            )
        return self.changed(fp8=matmul)

    def _fp8(self, half: str) -> Fp8Product:
        """The FP8 product of a half, forward or input."""
        ins, outs = self.in_features, self.out_features
        sizes = (ins, outs) if half == "forward" else (outs, ins)
        transposed = self.transposed == (half == "forward")
        blocks = self.fp8 is not None and "blockwise" in self.fp8
        experts = self.num_experts // self.num_parts
        return Fp8Product(self.name, half, *sizes, experts, self.per_token, transposed, blocks)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return self._fp8(half).scratch() if self.fp8 and half != "weight" else ()

    def _multiply(self, env: OpEnv, half: str, added: Added = NOTHING) -> None:
        """Write y, or in the input half the gradient of x, with what is added to it."""
        forward, weight, bounds = half == "forward", env.p[self.weight], self._bounds(env)
        rows, out = (self._x(env.t), self._y(env.t)) if forward else (self._grad_y(env), self._x(env.g))
        if self.fp8:
            self._fp8(half).multiply(env, rows, weight, bounds, out, added)
        else:
            grouped_product(rows, weight, bounds, out, self.transposed == forward, added)

    def _biases(self, env: OpEnv) -> Added:
        """What forward adds to the product."""
        return NOTHING if self.bias is None else Added(env.p[self.bias], self._row_weight(env.t))

    def _grad_y(self, env: OpEnv) -> Tensor:
        """The gradient of the product's sum [R, F]."""
        return self._y(env.g)

    def forward(self, env: OpEnv) -> None:
        self._multiply(env, "forward", self._biases(env))

    def backward_input(self, env: OpEnv) -> None:
        assert self.x not in env.accumulate, "nothing else reads the experts' rows"
        self._write_grad_x(env)
        grad_y, bounds = self._y(env.g), self._bounds(env)
        grad_weight = self._row_weight(env.g)
        if grad_weight is not None:
            assert self.bias is not None, "rows are weighed for their bias"
            added = self.row_weight in env.accumulate
            row_weight_gradient(grad_y, env.p[self.bias], bounds, grad_weight, added)

    def _write_grad_x(self, env: OpEnv) -> None:
        self._multiply(env, "input")

    def backward_weight(self, env: OpEnv) -> None:
        x, grad_y, bounds = self._x(env.t), self._y(env.g), self._bounds(env)
        outs, ins = (x, grad_y) if self.transposed else (grad_y, x)
        grouped_weight_gradient(outs, ins, bounds, env.gp[self.weight], not env.first)
        if self.bias is not None:
            bias_gradient(grad_y, bounds, self._row_weight(env.t), env.gp[self.bias], not env.first)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        matrix = 2 * self.in_features * self.out_features
        rows = 0 if self.bias is None else tokens * self.per_token * (self.out_features + 2)
        return plain_bytes(max(matrix, rows), compute_bytes)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        """Any expert may get all tokens, whose rows are widened in 16 bits."""
        rows = 4 * tokens * (self.in_features + self.out_features) if compute_bytes == 2 else 0
        return super().plain_workspace_bytes(tokens, compute_bytes) + rows

    def _work(self, tokens: int) -> Work:
        rows = tokens * self.per_token
        return Work(grouped_flops=2.0 * rows * self.in_features * self.out_features, kernels=1)

    def _pass(self, tokens: int, compute_bytes: int) -> Work:
        """Work of reading grad_y once more."""
        return Work(memory_bytes=float(tokens * self.per_token * self.out_features * compute_bytes), kernels=1)

    def half_work(self, half: str, tokens: int, compute_bytes: int) -> Work:
        reads_again = {"forward": False, "input": self.row_weight is not None, "weight": self.bias is not None}[half]
        if half == "weight":
            accumulators = 4.0 * self.num_experts * self.in_features * self.out_features
            work = self._work(tokens).plus(Work(memory_bytes=2 * accumulators))
        else:
            work = self._fp8(half).work(tokens, compute_bytes) if self.fp8 else self._work(tokens)
        return work.plus(self._pass(tokens, compute_bytes)) if reads_again else work


class WeightedGLU(Op):
    """a [T, K * F] = weight[row] * act(gate) * up for rows of gate_up [T, K * 2F] and a router's weights [R].

    The gradient overwrites gate_up, which nothing reads afterwards. The router's is the sum of act(gate) * up * grad_a.
    Where a is not kept, backward writes it over its gradient: it has read all that a is made of.
    """

    def __init__(
        self, name: str, gate_up: str, row_weight: str, y: str, width: int, per_token: int, activation: Activation,
        bounds: str = "", divisions: int = 1,
    ) -> None:  # fmt: skip
        self.name, self.gate_up, self.row_weight, self.y, self.bounds = name, gate_up, row_weight, y, bounds
        self.width, self.per_token, self.divisions, self.part_inputs = width, per_token, divisions, (bounds,)
        self.activation: Activation = activation
        self.inputs = (gate_up, row_weight)
        self.outputs = (TensorSpec(y, (per_token * width,)),)
        self.needs_input = (gate_up, row_weight)
        self.grad_inputs = (gate_up, row_weight)
        self.grad_over, self.remakable = (gate_up,), (y,)

    def forward(self, env: OpEnv) -> None:
        gate_up, y = env.t[self.gate_up].view(-1, 2 * self.width), env.t[self.y].view(-1, self.width)
        glu_forward(gate_up, y, self.activation, env.t[self.row_weight].view(-1), own_bounds(self, env))

    def backward_input(self, env: OpEnv) -> None:
        rows = (env.g[self.y].view(-1, self.width), env.t[self.gate_up].view(-1, 2 * self.width))
        grad_gate_up, grad_weight = env.g[self.gate_up].view(-1, 2 * self.width), env.g[self.row_weight].view(-1)
        again = env.t[self.y].view(-1, self.width) if self.y in env.t else None
        given = (self.row_weight in env.accumulate, own_bounds(self, env), again)
        weighted = WeightedRows(env.t[self.row_weight].view(-1), grad_weight, *given)
        glu_backward(*rows, grad_gate_up, self.activation, weighted)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(10 * tokens * self.per_token * (self.width + 1), compute_bytes)

    def _bytes(self, tokens: int, compute_bytes: int) -> float:
        return float(tokens * self.per_token * self.width * compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=3 * self._bytes(tokens, compute_bytes), kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=5 * self._bytes(tokens, compute_bytes), kernels=1)
