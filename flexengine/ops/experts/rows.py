"""Dispatches the rows of tokens to their experts, and combines the experts' results.

Source: Shazeer et al. 2017, "Outrageously Large Neural Networks". Shapes: T tokens, K experts of each, R = T * K rows
sorted by expert; `place` [T, K] and `bounds` [E + 1] as the router writes them. A token's rows add up in the order of
their experts, in backward in reverse order. When experts come in parts, the sum is kept in float32 (float64) from one
part to the next, so that it has the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel, wide
from flexengine.ops.row_range import own_bounds


def dispatch(x: Tensor, place: Tensor, rows: Tensor, bounds: Tensor | None = None) -> None:
    """Write rows [R, D] at place[t, k] = x [T, D][t]; with bounds only rows from the first bound to the last."""
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import experts  # noqa: PLC0415 (Triton is imported when first used)

        return experts.dispatch(x, place, rows, bounds)
    for column in place.unbind(1):
        mine = _columns_within(column, bounds)
        rows.index_copy_(0, column[mine].long(), x[mine])


def _columns_within(column: Tensor, bounds: Tensor | None) -> slice | Tensor:
    """Select the rows [T] that lie within bounds."""
    return slice(None) if bounds is None else (column >= bounds[0]) & (column < bounds[-1])


def combine(
    rows: Tensor, place: Tensor, out: Tensor, added: Tensor | None, last_first: bool = False,
    bounds: Tensor | None = None, sums: Tensor | None = None,
) -> None:  # fmt: skip
    """Write out [T, D] = (sums +) sum over k of rows [R, D] at place[t, k] (+ added).

    The sum runs in the order of rows or, with last_first, in reverse order. sums or added may be out. With bounds only
    rows from the first bound to the last count.
    """
    if use_kernel(rows) and rows.dtype != torch.float64:
        from flexengine.kernels import experts  # noqa: PLC0415

        return experts.combine(rows, place, out, added, last_first, bounds, sums)
    total = torch.zeros(out.shape, dtype=wide(rows[:0]).dtype, device=out.device)
    if sums is not None:
        total += sums
    for column in place.sort(dim=1, descending=last_first).values.unbind(1):
        mine = _columns_within(column, bounds)
        total[mine] += rows[column[mine].long()]
    out.copy_(total if added is None else total.add_(added))


class Dispatch(Op):
    """Writes rows [T, K * D]: every token's row once for each of its experts, sorted by expert.

    With experts in parts, whose bounds it reads, gradients of rows add up beside those of x until the last part ends.
    """

    def __init__(
        self, name: str, x: str, place: str, y: str, width: int, per_token: int, bounds: str = "", divisions: int = 1
    ) -> None:
        self.name, self.x, self.place, self.y, self.bounds = name, x, place, y, bounds
        self.width, self.per_token, self.divisions, self.part_inputs = width, per_token, divisions, (bounds,)
        self.inputs = (x, place)
        self.outputs = (TensorSpec(y, (per_token * width,)),)
        self.needs_input = (place,)
        self.grad_inputs = (x,)
        self.sums = TensorSpec(f"{name}_sums", (width,), "float32")

    def part_sums(self, half: str) -> tuple[TensorSpec, ...]:
        return (self.sums,) if half == "input" and self.num_parts > 1 else ()

    def forward(self, env: OpEnv) -> None:
        rows = env.t[self.y].view(-1, self.width)
        dispatch(env.t[self.x], env.t[self.place], rows, own_bounds(self, env))

    def backward_input(self, env: OpEnv) -> None:
        rows, grad_x = env.g[self.y].view(-1, self.width), env.g[self.x]
        added = grad_x if self.x in env.accumulate else None
        _combine_part(self, env, rows, grad_x, added, last_first=True)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return _rows_workspace(self, tokens, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return _dispatch_work(self, tokens, compute_bytes)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return _combine_work(self, tokens, compute_bytes)


class Combine(Op):
    """Writes y [T, D] = (residual +) the sum of a token's rows; the gradient of the residual is that of y itself.

    With experts in parts, whose bounds it reads, rows add up beside y until the last part ends.
    """

    def __init__(
        self, name: str, x: str, place: str, y: str, width: int, per_token: int, residual: str | None,
        bounds: str = "", divisions: int = 1,
    ) -> None:  # fmt: skip
        self.name, self.x, self.place, self.y, self.residual, self.bounds = name, x, place, y, residual, bounds
        self.width, self.per_token, self.divisions, self.part_inputs = width, per_token, divisions, (bounds,)
        added = () if residual is None else (residual,)
        self.inputs = (x, place, *added)
        self.outputs = (TensorSpec(y, (width,)),)
        self.needs_input = (place,)
        self.grad_inputs = (x, *added)
        self.grad_alias = tuple((name, y) for name in added)
        self.sums = TensorSpec(f"{name}_sums", (width,), "float32")

    def part_sums(self, half: str) -> tuple[TensorSpec, ...]:
        return (self.sums,) if half == "forward" and self.num_parts > 1 else ()

    def forward(self, env: OpEnv) -> None:
        rows, added = env.t[self.x].view(-1, self.width), None if self.residual is None else env.t[self.residual]
        _combine_part(self, env, rows, env.t[self.y], added, last_first=False)

    def backward_input(self, env: OpEnv) -> None:
        assert self.x not in env.accumulate, "nothing else reads the experts' results"
        dispatch(env.g[self.y], env.t[self.place], env.g[self.x].view(-1, self.width), own_bounds(self, env))

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return _rows_workspace(self, tokens, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return _combine_work(self, tokens, compute_bytes)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return _dispatch_work(self, tokens, compute_bytes)


def _combine_part(
    op: Dispatch | Combine, env: OpEnv, rows: Tensor, out: Tensor, added: Tensor | None, last_first: bool
) -> None:
    """Combine all rows, or those of one part on top of the sums so far; the last part rounds the sums."""
    place, bounds = env.t[op.place], own_bounds(op, env)
    if bounds is None:
        return combine(rows, place, out, added, last_first)
    sums, first, last = env.t[op.sums.name], 0, op.num_parts - 1
    if last_first:
        first, last = last, first
    before = None if env.part == first else sums
    target, added = (out, added) if env.part == last else (sums, None)
    combine(rows, place, target, added, last_first, bounds, before)


def _rows_workspace(op: Dispatch | Combine, tokens: int, compute_bytes: int) -> int:
    """Count the workspace of the plain path in either direction: a few rows of every token, and their places."""
    return plain_bytes(4 * tokens * (op.width + 8), compute_bytes)


def _dispatch_work(op: Dispatch | Combine, tokens: int, compute_bytes: int) -> Work:
    """Count work that reads a row of every token, once for each part, and writes K rows."""
    rows = float(op.num_parts + op.per_token)
    return Work(memory_bytes=rows * tokens * op.width * compute_bytes, kernels=1)


def _combine_work(op: Dispatch | Combine, tokens: int, compute_bytes: int) -> Work:
    """Count work that reads K + 1 rows of every token and writes one; sums between parts are written and read."""
    sums = 2.0 * max(4, compute_bytes) * (op.num_parts - 1)
    return Work(memory_bytes=tokens * op.width * ((2.0 + op.per_token) * compute_bytes + sums), kernels=1)
