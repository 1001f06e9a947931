"""Linear layers with low-rank adapters: y = x @ weight.T (+ bias or residual) + scale * (x @ A.T) @ B.T.

Shapes: x [T, D], weight [F, D] (transposed: [D, F]), A [J * R, D], B [rows of the adapted modules, R], y [T, F]. A
fused projection has an adapter for each of its modules: A holds theirs one below the other, and so does B.

Products with A and B take as long as the tensors that they read and write. What adapters add to the passes of the
frozen layer, next to which low is nothing:

| layer | forward | backward |
|---|---|---|
| by itself | x, y twice | x twice, grad_y, grad_x twice |
| with a residual | x | as above |
| that gives low beside an output that is kept or recomputed in any case | as above | x, grad_y, grad_x twice |
| before a gated unit that adds low @ B.T | x | x, grad_y, grad_x twice |
| behind a gated unit that makes low and adds to grad_x | x | x, grad_y |

Twice: the adapters' product is written first, and the large product adds to it. The frozen layer copies a residual to y
in any case, which the adapters' sum replaces. Where B's gradient takes a pass of its own (ops/adapters/lora_grads.py
says when), grad_y is read once more. Before a gated unit whose backward reads FP8 codes
(ops/adapters/rounded_lora_glu.py) backward does not need y, and so makes low again, for which it reads x twice.
Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685; scale
as Kalajdzievski 2023 (rsLoRA) where that is asked for.
"""

from __future__ import annotations

import copy
from typing import NamedTuple, Self

import torch
from torch import Tensor

from flexengine.ops.adapters.dropout import drop
from flexengine.ops.adapters.lora_grads import (
    add_parts,
    in_one_pass,
    partial_sums,
    parts_work,
    sum_work,
    write_gradients,
)
from flexengine.ops.base import OpEnv, TensorSpec, Work, use_kernel
from flexengine.ops.linear import Linear, accumulate_weight_grad


class AdaptedRows(NamedTuple):
    """Columns [start, end) of the output that one module makes, which has an adapter of its own."""

    start: int
    end: int


class AddedHalf(NamedTuple):
    """Half of the columns of an output that begins at `start`, and where its columns of low and its rows of B begin."""

    start: int
    low_start: int
    up_start: int


def write_low(x: Tensor, down: Tensor, scale: float, low: Tensor) -> None:
    """low = scale * x @ A.T."""
    torch.addmm(low, x, down.t(), beta=0, alpha=scale, out=low)


def low_work(tokens: int, columns: int, ranks: int, passes: int, compute_bytes: int) -> Work:
    """A product with A or B of so many columns: it takes as long as reading or writing them."""
    num_bytes = float(passes * tokens * columns * compute_bytes)
    return Work(matmul_flops=2.0 * tokens * columns * ranks, memory_bytes=num_bytes, kernels=1)


def add_product(start: Tensor, low: Tensor, up: Tensor, out: Tensor) -> None:
    """out = start + low @ B.T. torch copies `start` to out first and then adds, which is one pass over out more."""
    if use_kernel(out) and out.element_size() < 8:
        from flexengine.kernels import lora_sum  # noqa: PLC0415 (Triton is imported when first used)

        return lora_sum.add_product(start, low, up, out)
    torch.addmm(start, low, up.t(), out=out)


class LoRALinear(Linear):
    """A frozen linear layer and the adapters of some of its modules, which are never merged.

    The adapters' product is written first and the large product adds to it, so that the sum is rounded once and costs
    no pass over memory of its own. Backward computes x @ A.T again: it reads x for the gradient of A in any case.

    dropout: probability for an element of what A reads, drawn once for all modules of a fused projection. number: of
    the op among its layer's, for the draws.
    """

    sum_passes = 2
    """How often forward passes over the outputs for what adapters add: it writes them, the large product reads them."""
    one_pass = True
    """Whether the input half may make B's gradient too, while it reads grad_y for that of low."""

    def __init__(
        self, base: Linear, rank: int, scale: float, adapted: tuple[AdaptedRows, ...], dropout: float = 0.0,
        number: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(
            base.name, base.x, base.y, base.in_features, base.out_features,
            base.weight, base.bias, base.residual, base.transposed,
        )  # fmt: skip
        self.rank, self.scale, self.adapted = rank, scale, adapted
        self.down, self.up = f"{self.name}.lora_A", f"{self.name}.lora_B"
        self.params = (self.down, self.up)
        width = len(adapted) * rank
        self.low = TensorSpec(f"{self.name}.low", (width,))
        self.grad_low = TensorSpec(f"{self.name}.grad_low", (width,))
        self.dropout, self.number = dropout, number
        self.replays = not dropout  # what it draws is an operand, and changes with every step
        self.dropped = TensorSpec(f"{self.name}.dropped", (self.in_features,))
        self.gives_low = self.leaves_sum = self.takes_low = False
        self.low_again = self.low.name
        # With dropout the input half would have to drop elements of x once more for low.
        self.sums = partial_sums(self.name, self.widths, rank) if self.one_pass and not dropout else None
        self.x_again, self.needs_weight = base.x_again, (base.x_again,)
        self.needs_input = () if self.sums is None else (self.x_again,)

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the output of every adapted module."""
        return tuple(rows.end - rows.start for rows in self.adapted)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        dropped = (self.dropped,) if self.dropout else ()
        grad_low = () if self.takes_low else (self.grad_low,)
        if half == "forward":
            return dropped if self.leaves_sum or self.gives_low or self.takes_low else (self.low, *dropped)
        low = () if self.gives_low or self.takes_low else (self.low,)
        if self.sums is None:
            return (*grad_low, *dropped) if half == "input" else (*grad_low, *low, *dropped)
        return (*grad_low, *low, *(self.sums if half == "input" else (self.sums.up,)))

    # -- low as an output or an input --------------------------------------------------------------------------------

    def leaving_sum(self, needed: bool = True) -> Self:
        """The same layer with outputs y, of the frozen product alone, and low: what reads y adds low @ B.T itself.

        needed: backward needs y in any case and finds low beside it. Otherwise it computes low again from x.
        """
        op = self.giving_low() if needed else copy.copy(self)
        op.leaves_sum, op.outputs = True, (self.outputs[0], self.low)
        return op

    def giving_low(self) -> Self:
        """The same layer with outputs y and low, so that backward does not compute low again where y is kept."""
        op = copy.copy(self)
        op.gives_low = True
        op.outputs, op.needs_weight = (*self.outputs, self.low), (*self.needs_weight, self.low.name)
        op.needs_input = () if self.sums is None else (self.low.name,)
        return op

    def taking_low(self, low_again: str | None = None) -> Self:
        """The same layer with inputs x and low = scale * x @ A.T, which what makes x makes beside it.

        The gradient of low here is that of x @ A.T, scaled; the gradient of x is that of the frozen product alone.
        low_again: what backward reads in the place of low, which is computed again from rounded values.
        """
        assert not self.dropout, "what dropout leaves of x is the layer's own"
        op = copy.copy(self)
        op.takes_low, op.params = True, (self.up,)
        op.inputs = op.grad_inputs = (*self.inputs, self.low.name)
        op.low_again = low_again or self.low.name
        op.needs_weight = (op.low_again,)
        op.needs_input = () if self.sums is None else op.needs_weight
        return op

    def halves(self) -> tuple[AddedHalf, ...]:
        """Where adapters add to the halves of the output; nothing where one adds to a part of a half."""
        found, width = list[AddedHalf](), self.out_features // 2
        first = 0
        for number, rows in enumerate(self.adapted):
            for start in (0, width):
                if rows.start < start + width and rows.end > start:
                    if rows.start > start or rows.end < start + width:
                        return ()
                    found.append(AddedHalf(start, number * self.rank, first + start - rows.start))
            first += rows.end - rows.start
        return tuple(found)

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, env: OpEnv) -> None:
        x, y = env.t[self.x], env.t[self.y]
        self._write_low(env)
        if self.leaves_sum:
            super().forward(env)
            return
        start = self._start(env)
        reached = 0
        for rows, low, up in self._modules(env.t[self.low.name], env.p[self.up]):
            self._fill(y, start, reached, rows.start)
            out, reached = y[:, rows.start : rows.end], rows.end
            if start is None:
                torch.mm(low, up.t(), out=out)
            else:
                add_product(start[..., rows.start : rows.end], low, up, out)
        self._fill(y, start, reached, self.out_features)
        torch.addmm(y, x, self._matrix(env).t(), out=y)

    def _what_a_reads(self, env: OpEnv, again: bool = False) -> Tensor:
        """x, or while training with dropout what is left of it; again: as backward reads it."""
        x = env.t[self.x_again if again else self.x]
        if not self.dropout or env.chunk.dropout is None:
            return x
        self._drop(x, env)
        return env.t[self.dropped.name]

    def _drop(self, x: Tensor, env: OpEnv) -> None:
        """dropped = x with the elements of this call's draws set to zero."""
        assert env.chunk.dropout is not None
        drop(x, env.t[self.dropped.name], self.dropout, env.chunk.dropout, env.layer, self.number)

    def _write_low(self, env: OpEnv, x: Tensor | None = None) -> None:
        """Write low from x, or what A reads of it, where low is no input."""
        if not self.takes_low:
            write_low(self._what_a_reads(env) if x is None else x, env.p[self.down], self.scale, env.t[self.low.name])

    def _start(self, env: OpEnv) -> Tensor | None:
        """What the products are added to: residual [T, F], bias [F], their sum, or None."""
        if self.residual is None:
            return None if self.bias is None else env.p[self.bias]
        residual, y = env.t[self.residual], env.t[self.y]
        if self.bias is None:
            return residual
        torch.add(residual, env.p[self.bias], out=y)
        return y

    @staticmethod
    def _fill(y: Tensor, start: Tensor | None, first: int, end: int) -> None:
        """Columns [first, end) of y, which no adapter makes, become what the large product is added to."""
        if first == end:
            return
        columns = y[:, first:end]
        if start is None:
            columns.zero_()
        elif start.data_ptr() != y.data_ptr():
            columns.copy_(start[..., first:end].expand_as(columns))

    def _modules(self, low: Tensor, up: Tensor) -> list[tuple[AdaptedRows, Tensor, Tensor]]:
        """Every adapted module with its columns of a tensor [T, J * R] and its rows of one like B."""
        found, first = [], 0
        for number, rows in enumerate(self.adapted):
            end = first + rows.end - rows.start
            found.append((rows, low[:, number * self.rank : (number + 1) * self.rank], up[first:end]))
            first = end
        return found

    # -- backward ----------------------------------------------------------------------------------------------------

    def _grad_product(self, env: OpEnv) -> Tensor:
        """The gradient of the sum of both products [T, F]."""
        return env.g[self.y]

    def backward_input(self, env: OpEnv) -> None:
        grad_x, grad_y, grad_low = env.g[self.x], self._grad_product(env), self._write_grad_low(env)
        if self.takes_low:
            super().backward_input(env)
            return
        if self.dropout:
            self._add_dropped(env, grad_x, grad_low)
        elif self.x in env.accumulate:
            torch.addmm(grad_x, grad_low, env.p[self.down], out=grad_x)
        else:
            torch.mm(grad_low, env.p[self.down], out=grad_x)
        torch.addmm(grad_x, grad_y, self._matrix(env), out=grad_x)

    def _write_grad_low(self, env: OpEnv) -> Tensor:
        """grad_low = scale * the gradient of the products @ B, module by module; on a GPU the sums for B as well."""
        grad_y = self._grad_product(env)
        grad_low = env.g[self.low.name] if self.takes_low else env.t[self.grad_low.name]
        if self.sums is not None and not (self.gives_low or self.takes_low):
            self._write_low(env, self._what_a_reads(env, again=True))
        if self.sums is not None and in_one_pass(grad_y):
            self._write_both(env, grad_y, grad_low)
            return grad_low
        for rows, low, up in self._modules(grad_low, env.p[self.up]):
            torch.addmm(low, grad_y[:, rows.start : rows.end], up, beta=0, alpha=self.scale, out=low)
        return grad_low

    def _write_both(self, env: OpEnv, grad_y: Tensor, grad_low: Tensor) -> None:
        """grad_low and the partial sums of B's gradient, of one pass over grad_y."""
        assert self.sums is not None
        parts = env.t[self.sums.low.name], env.t[self.sums.up.name]
        write_gradients(grad_y, env.t[self.low_again], env.p[self.up], self.scale, grad_low, parts, self.adapted)

    def _add_dropped(self, env: OpEnv, grad_x: Tensor, grad_low: Tensor) -> None:
        """grad_x (+)= grad_low @ A where forward dropped nothing."""
        through = env.t[self.dropped.name]
        torch.mm(grad_low, env.p[self.down], out=through)
        self._drop(through, env)
        grad_x.add_(through) if self.x in env.accumulate else grad_x.copy_(through)

    def backward_weight(self, env: OpEnv) -> None:
        grad_y = self._grad_product(env)
        if not self.takes_low:
            x = self._what_a_reads(env, again=True)
            if self.sums is None and not self.gives_low:
                self._write_low(env, x)
            accumulate_weight_grad(env.gp[self.down], env.t[self.grad_low.name], x, env.first)
        if self.sums is not None and in_one_pass(grad_y):
            add_parts(env.t[self.sums.up.name], env.gp[self.up], env.first)
            return
        for rows, low, grad_up in self._modules(env.t[self.low_again], env.gp[self.up]):
            accumulate_weight_grad(grad_up, grad_y[:, rows.start : rows.end], low, env.first)

    # -- costs -------------------------------------------------------------------------------------------------------

    @property
    def adapted_features(self) -> int:
        """Columns of the output that adapters add to."""
        return sum(self.widths)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return 0

    def _dropping(self, tokens: int, passes: int, kernels: int, compute_bytes: int) -> Work:
        """Reading and writing tensors like x where there is dropout."""
        num_bytes = float(passes * tokens * self.in_features * compute_bytes)
        return Work(memory_bytes=num_bytes, kernels=kernels) if self.dropout else Work()

    def _down_work(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """A product with A and so many passes over x or its gradient; none where what makes x multiplies with A."""
        if self.takes_low:
            return Work()
        return low_work(tokens, self.in_features, len(self.adapted) * self.rank, passes, compute_bytes)

    def _up_work(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """A product with B and so many passes over y or its gradient."""
        work = low_work(tokens, self.adapted_features, self.rank, passes, compute_bytes)
        return work._replace(kernels=len(self.adapted))

    def _frozen_work(self, half: str, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        """The frozen layer's product; half: forward or input. What it adds to is written with the adapters'."""
        return self._product(tokens)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = self._frozen_work("forward", tokens, seq_len, compute_bytes)
        work = work.plus(self._down_work(tokens, 1, compute_bytes))
        if not self.leaves_sum:
            work = work.plus(self._up_work(tokens, self.sum_passes, compute_bytes))
        return work.plus(self._dropping(tokens, 2, 1, compute_bytes))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = self._frozen_work("input", tokens, seq_len, compute_bytes)
        work, up = work.plus(self._down_work(tokens, 2, compute_bytes)), self._up_work(tokens, 1, compute_bytes)
        if self.sums is not None:
            work = work.plus(self._low_again(tokens, compute_bytes))
            up = up.plus(self._up_work(tokens, 0, compute_bytes)).plus(parts_work(tokens, self.widths, self.rank))
            up = up._replace(kernels=2)
        return work.plus(up).plus(self._dropping(tokens, 4, 2, compute_bytes))

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = self._down_work(tokens, 1, compute_bytes)
        if self.sums is not None:
            return work.plus(sum_work(self.widths, self.rank))
        work = work.plus(self._up_work(tokens, 1, compute_bytes)).plus(self._low_again(tokens, compute_bytes))
        return work.plus(self._dropping(tokens, 2, 1, compute_bytes))

    def _low_again(self, tokens: int, compute_bytes: int) -> Work:
        """Backward's product for low, where forward does not leave it."""
        return Work() if self.gives_low else self._down_work(tokens, 1, compute_bytes)

    def model_flops(self, seq_len: int) -> float:
        """The frozen product forward and for the gradient of x, the adapters' once more for their own gradients."""
        added = self._down_work(seq_len, 1, 2).plus(self._up_work(seq_len, 1, 2))
        return 2 * self._product(seq_len).flops + 3 * added.flops
