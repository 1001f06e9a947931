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

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel, wide
from flexengine.ops.glu import Activation, glu_backward, glu_forward
from flexengine.ops.row_range import own_bounds, part_of, rows_within


class LowRank(NamedTuple):
    """What adapters add to a product: low [R, W] times up [E, F, W][e].T; transposed: up [E, W, F][e]."""

    low: Tensor
    up: Tensor
    transposed: bool = False


def _slices(bounds: Tensor) -> Iterator[tuple[int, slice]]:
    """Each expert with its rows, for the plain path, which reads the counts: on the CPU, and on CUDA in float64."""
    for expert, (start, end) in enumerate(pairwise(bounds.tolist())):
        if end > start:
            yield expert, slice(start, end)


def grouped_product(
    x: Tensor, weight: Tensor, bounds: Tensor, out: Tensor, transposed: bool, bias: Tensor | None = None,
    row_weight: Tensor | None = None, adapter: LowRank | None = None, gains: Tensor | None = None,
) -> None:  # fmt: skip
    """out [R, F] = x [R, D] @ weight [E, F, D][e].T (+ low @ up) (+ (row_weight [R] *) bias [E, F][e]) for the rows of
    every expert; transposed: @ weight [E, D, F][e]; gains [E, F], wide: what the sum is multiplied by, where there is
    no bias."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import grouped  # noqa: PLC0415

        low_rank = None if adapter is None else grouped.LowRank(*adapter)
        return grouped.grouped_product(x, weight, bounds, out, transposed, bias, row_weight, low_rank, gains)
    for expert, rows in _slices(bounds):
        matrix = weight[expert] if transposed else weight[expert].t()
        start = None
        if adapter is not None:
            up = adapter.up[expert] if adapter.transposed else adapter.up[expert].t()
            start = adapter.low[rows] @ up
        if gains is not None:
            total = wide(x[rows]) @ wide(matrix)
            out[rows] = (total if start is None else total.add_(start)).mul_(gains[expert])
            continue
        if bias is not None:
            own = bias[expert] if row_weight is None else (row_weight[rows, None] * bias[expert]).to(out.dtype)
            start = own if start is None else start + own
        if start is None:
            torch.mm(x[rows], matrix, out=out[rows])
        else:
            torch.addmm(start, x[rows], matrix, out=out[rows])


def grouped_weight_gradient(grad_y: Tensor, x: Tensor, bounds: Tensor, acc: Tensor, accumulate: bool) -> None:
    """acc [E, F, D] (+)= grad_y [R, F][rows of e].T @ x [R, D][rows of e], summed in the accumulator's precision."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import grouped  # noqa: PLC0415

        return grouped.grouped_weight_gradient(grad_y, x, bounds, acc, accumulate)
    if not accumulate:
        acc.zero_()
    for expert, rows in _slices(bounds):
        acc[expert] += grad_y[rows].t().to(acc.dtype) @ x[rows].to(acc.dtype)


def bias_gradient(grad_y: Tensor, bounds: Tensor, row_weight: Tensor | None, acc: Tensor, accumulate: bool) -> None:
    """acc [E, F] (+)= the sum over the rows of e of (row_weight [R] *) grad_y [R, F], in acc's precision."""
    if use_kernel(grad_y) and grad_y.dtype != torch.float64:
        from flexengine.kernels import expert_biases  # noqa: PLC0415

        return expert_biases.bias_gradient(grad_y, bounds, row_weight, acc, accumulate)
    if not accumulate:
        acc.zero_()
    for expert, rows in _slices(bounds):
        weights = acc.new_ones(rows.stop - rows.start) if row_weight is None else row_weight[rows].to(acc.dtype)
        acc[expert] += weights @ grad_y[rows].to(acc.dtype)


def row_weight_gradient(grad_y: Tensor, bias: Tensor, bounds: Tensor, out: Tensor, accumulate: bool) -> None:
    """out [R] (+)= grad_y [R, F] . bias [E, F][e] for the rows of every expert."""
    if use_kernel(grad_y) and grad_y.dtype != torch.float64:
        from flexengine.kernels import expert_biases  # noqa: PLC0415

        return expert_biases.row_weight_gradient(grad_y, bias, bounds, out, accumulate)
    if not accumulate:
        out[rows_within(bounds)] = 0.0
    for expert, rows in _slices(bounds):
        out[rows] += wide(grad_y[rows]) @ wide(bias[expert])


class GroupedLinear(Op):
    """y [T, K * F]: every row times the weight [E, F, D] (transposed: [E, D, F]) of its expert, plus its bias [E, F].

    With the rows' weights [R] a row's bias is multiplied by its weight, whose gradient is grad_y . bias[e].
    """

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

    def forward(self, env: OpEnv) -> None:
        bias = None if self.bias is None else env.p[self.bias]
        operands = (self._x(env.t), env.p[self.weight], self._bounds(env), self._y(env.t), self.transposed)
        grouped_product(*operands, bias, self._row_weight(env.t))

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
        grouped_product(self._y(env.g), env.p[self.weight], self._bounds(env), self._x(env.g), not self.transposed)

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

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = self._work(tokens)
        return work if self.row_weight is None else work.plus(self._pass(tokens, compute_bytes))

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        accumulators = 4.0 * self.num_experts * self.in_features * self.out_features
        work = self._work(tokens).plus(Work(memory_bytes=2 * accumulators))
        return work if self.bias is None else work.plus(self._pass(tokens, compute_bytes))


class WeightedGLU(Op):
    """a [T, K * F] = weight[row] * act(gate) * up for rows of gate_up [T, K * 2F] and a router's weights [R].

    The gradient overwrites gate_up, which nothing reads afterwards. The router's is the sum of act(gate) * up * grad_a.
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
        self.grad_over = (gate_up,)

    def forward(self, env: OpEnv) -> None:
        gate_up, y = env.t[self.gate_up].view(-1, 2 * self.width), env.t[self.y].view(-1, self.width)
        glu_forward(gate_up, y, self.activation, env.t[self.row_weight].view(-1), own_bounds(self, env))

    def backward_input(self, env: OpEnv) -> None:
        rows = (env.g[self.y].view(-1, self.width), env.t[self.gate_up].view(-1, 2 * self.width))
        grad_gate_up, weight = env.g[self.gate_up].view(-1, 2 * self.width), env.t[self.row_weight].view(-1)
        given = (env.g[self.row_weight].view(-1), self.row_weight in env.accumulate, own_bounds(self, env))
        glu_backward(*rows, grad_gate_up, self.activation, weight, *given)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(9 * tokens * self.per_token * (self.width + 1), compute_bytes)

    def _bytes(self, tokens: int, compute_bytes: int) -> float:
        return float(tokens * self.per_token * self.width * compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=3 * self._bytes(tokens, compute_bytes), kernels=1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=5 * self._bytes(tokens, compute_bytes), kernels=1)
