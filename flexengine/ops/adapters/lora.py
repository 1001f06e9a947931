"""Low-rank adapters as two ops beside a frozen layer, which are never merged: low = scale * x @ A.T, y += low @ B.T.

Products with A and B take as long as the tensors that they read and write (docs/lora.md); low is nothing beside these.
The adapters' product, with a residual, is written first, and the large product adds to it. FP8 products cannot: they
come first, and the adapters' op adds a residual, too. Where low is not kept beside another output, backward reads x
once more. Shapes and source: ops/adapters/low_rank.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch

from flexengine.ops.adapters.dropout import NO_DROPOUT, Dropout
from flexengine.ops.adapters.lora_grads import accumulate_up_grad, in_one_pass, partial_sums, write_grad_low
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import OpEnv, TensorSpec, Work
from flexengine.ops.experts.grouped_products import grouped_product, grouped_weight_gradient
from flexengine.ops.linear import accumulate_weight_grad, sum_to_start_from, widened_bytes
from flexengine.ops.priced import PricedByHalf
from flexengine.ops.products import add_product


class LoraDown(PricedByHalf):
    """low = scale * drop(x) @ A.T; of experts x @ A[e].T, and what multiplies low has the scale.

    What stands for the gradient of low is that of x @ A.T.
    """

    keepable = False  # kept beside another output, or else made again: low takes little
    few_operands = True

    def __init__(self, adapters: Adapters, x: str, dropout: Dropout = NO_DROPOUT, divisions: int = 1) -> None:
        self.name, self.adapters, self.x, self.x_again = f"{adapters.name}.lora_down", adapters, x, x
        self.dropout, self.divisions = dropout, divisions
        self.replays = not dropout.probability  # what it draws is an operand, and changes with every step
        self.low, self.params, self.outputs = adapters.low, (adapters.down,), (adapters.low,)
        self.inputs = self.needs_weight = (x,) if adapters.experts is None else (x, adapters.experts.bounds)
        self.grad_inputs = (x,) if adapters.experts is None else ()  # their large product adds it

    def leaving_gradient(self) -> Self:
        """The same op, to whose x another op adds the gradient grad_low @ A."""
        return self.changed(grad_inputs=())

    def reading_again(self, x_again: str) -> tuple[Self, Self]:
        """The same op whose weight half reads x under another name, and what makes low of that for backward."""
        low = replace(self.low, name=f"{self.low.name}_again")
        again = self.untrained().changed(name=f"{self.name}_again", x=x_again, inputs=(x_again,), grad_inputs=())
        kept = self.changed(x_again=x_again, needs_weight=(x_again,))
        return kept, again.changed(low=low, outputs=(low,), for_backward=True)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return self.dropout.buffers

    def forward(self, env: OpEnv) -> None:
        if not env.adapters:
            return
        adapters, down, low = self.adapters, env.p[self.adapters.down], env.t[self.low.name]
        x = self.dropout.left_of(env.t[self.x], env)
        if adapters.experts is None:
            torch.addmm(low, x, down.t(), beta=0, alpha=adapters.scale, out=low)
            return
        bounds, held = adapters.experts.of_call(env, self.num_parts)
        grouped_product(x.view(-1, adapters.in_features), down[held], bounds, low.view(-1, adapters.width), False)

    def backward_input(self, env: OpEnv) -> None:
        # The frozen op comes after this one, and has written the gradient of x.
        grad_x, grad_low, down = env.g[self.x], env.g[self.low.name], env.p[self.adapters.down]
        if not self.dropout.probability:
            torch.addmm(grad_x, grad_low, down, out=grad_x)
            return
        through = torch.mm(grad_low, down, out=env.t[self.dropout.buffer.name])
        grad_x.add_(self.dropout.left_of(through, env))

    def backward_weight(self, env: OpEnv) -> None:
        adapters, grad_low, grad = self.adapters, env.g[self.low.name], env.gp[self.adapters.down]
        x = self.dropout.left_of(env.t[self.x_again], env)
        if adapters.experts is None:
            return accumulate_weight_grad(grad, grad_low, x, env.first)
        bounds, held = adapters.experts.of_call(env, self.num_parts)
        rows = (grad_low.view(-1, adapters.width), x.view(-1, adapters.in_features))
        grouped_weight_gradient(*rows, bounds, grad[held], not env.first)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        if self.adapters.experts is None:
            return widened_bytes(tokens, self.adapters.width, self.adapters.in_features, compute_bytes)
        # any expert may get all tokens, whose rows are widened
        return 4 * tokens * (self.adapters.in_features + self.adapters.width) if compute_bytes == 2 else 0

    def half_work(self, half: str, tokens: int, compute_bytes: int) -> Work:
        adapters, passes = self.adapters, 2 if half == "input" else 1
        work = adapters.down_work(tokens, passes, compute_bytes)
        work = work.plus(self.dropout.work(tokens, 2 * passes, compute_bytes))
        if half != "weight" or adapters.experts is None:
            return work
        accumulators = 8.0 * adapters.experts.num_experts * adapters.width * adapters.in_features
        return work.plus(Work(memory_bytes=accumulators))

    def model_flops(self, seq_len: int) -> float:
        """The product and both gradients; where another op adds that of x, it is counted here."""
        return 0.0 if self.for_backward else 3 * self.adapters.down_work(seq_len, 1, 2).flops


class LoraUp(PricedByHalf):
    """out = start + low @ B.T in the columns of adapted modules, and start in the others; the gradient of out passes.

    start: a tensor (a residual, or in place what the frozen product wrote), plus `bias` where it has one, or nothing.
    Without `out` the op that reads y adds low @ B.T, and there is backward alone, which reads the gradient of y; what
    the model's FLOPs are is told here in any case.
    """

    few_operands = True
    residual: str | None = None
    """What is added, too, where start is an FP8 product."""

    def __init__(
        self, adapters: Adapters, low_again: str, y: str, out: TensorSpec | None, start: str | None = None,
        bias: str | None = None, in_place: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.adapters, self.low = f"{adapters.name}.lora_up", adapters, adapters.low.name
        self.low_again, self.out, self.start, self.bias = low_again, y if out is None else out.name, start, bias
        starts = () if start is None else (start,)
        self.inputs = self.grad_inputs = (self.low, *starts)
        self.outputs, self.params = () if out is None else (out,), (adapters.up,)
        self.for_backward, self.grad_reads = out is None, (y,) if out is None else ()
        self.grad_alias = tuple((name, self.out) for name in starts)
        self.in_place = (start, self.out) if in_place and start is not None else None
        self.sums = None if adapters.is_router else partial_sums(adapters.name, adapters.widths, adapters.rank)
        self.keepable = not adapters.is_router  # logits take little to compute again
        self.needs_weight, self.needs_input = (low_again,), () if self.sums is None else (low_again,)

    def adding(self, residual: str) -> Self:
        """The same op that adds a residual as well."""
        inputs, alias = (*self.inputs, residual), (*self.grad_alias, (residual, self.out))
        return self.changed(residual=residual, inputs=inputs, grad_inputs=inputs, grad_alias=alias)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        if half == "forward" or self.sums is None:
            return ()
        return tuple(self.sums) if half == "input" else (self.sums.up,)

    def forward(self, env: OpEnv) -> None:
        out, residual = env.t[self.out], None if self.start is None else env.t[self.start]
        start = sum_to_start_from(residual, None if self.bias is None else env.p[self.bias], out)
        also = None if self.residual is None else env.t[self.residual]
        for piece in self.adapters.pieces(self.adapters.out_features):
            columns = out[:, piece.columns]
            before, added = (None if whole is None else whole[..., piece.columns] for whole in (start, also))
            if piece.adapted and env.adapters:
                add_product(before, env.t[self.low][:, piece.low], env.p[self.adapters.up][piece.up], columns, added)
                continue
            if before is None:
                columns.zero_()
            elif before.data_ptr() != columns.data_ptr():
                columns.copy_(before.expand_as(columns))
            if added is not None:
                columns.add_(added)

    def backward_input(self, env: OpEnv) -> None:
        """Write grad_low = scale * grad_y @ B; where that is one pass, the partial sums of B's gradient as well."""
        grad_y = env.g[self.out]
        if self.sums is not None and in_one_pass(grad_y):
            return self.sums.write(self.adapters, env, grad_y, env.t[self.low_again])
        write_grad_low(self.adapters, grad_y, env.p[self.adapters.up], env.g[self.low])

    def backward_weight(self, env: OpEnv) -> None:
        grad_y, grad_up = env.g[self.out], env.gp[self.adapters.up]
        if self.sums is not None and in_one_pass(grad_y):
            return self.sums.add(env, grad_up)
        accumulate_up_grad(self.adapters, grad_y, env.t[self.low_again], grad_up, env.first)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return widened_bytes(tokens, max(self.adapters.widths), self.adapters.rank, compute_bytes)

    def half_work(self, half: str, tokens: int, compute_bytes: int) -> Work:
        passes = 1 if half != "forward" else 2 if self.residual is None else 3
        work = self.adapters.up_work(tokens, passes, compute_bytes)
        if half == "forward" or self.sums is None:
            return work
        if half == "weight":
            return self.sums.add_work()
        both = work.plus(self.adapters.up_work(tokens, 0, compute_bytes))  # gradients, in one pass
        return both.plus(self.sums.write_work(tokens))._replace(kernels=2)
