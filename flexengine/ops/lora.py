"""Linear layers with low-rank adapters: y = x @ weight.T (+ bias or residual) + scale * (x @ A.T) @ B.T.

Shapes: x [T, D], weight [F, D] (transposed: [D, F]), A [J * R, D], B [rows of the adapted modules, R], y [T, F]. A
fused projection has an adapter for each of its modules: A holds theirs one below the other, and so does B.

Products with A and B take as long as the tensors that they read and write. What adapters add to the passes of the
frozen layer, next to which low is nothing:

| layer | forward | gradient of x | gradients of A and B |
|---|---|---|---|
| by itself | x, y twice | grad_y, grad_x twice | x twice, grad_y |
| with a residual | x | grad_y, grad_x twice | x twice, grad_y |
| before a gated unit that adds low @ B.T | x | grad_y, grad_x twice | x, grad_y |
| behind a gated unit that makes low (and adds to grad_x) | x | grad_y | x, grad_y |

Twice: the adapters' product is written first, and the large product adds to it. The frozen layer copies a residual to y
in any case, which the adapters' sum replaces.
Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685; scale
as Kalajdzievski 2023 (rsLoRA) where that is asked for.
"""

from __future__ import annotations

import copy
from typing import NamedTuple, Self

import torch
from torch import Tensor

from flexengine.ops.base import OpEnv, TensorSpec, Work, use_kernel
from flexengine.ops.dropout import drop
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
        self.dropped = TensorSpec(f"{self.name}.dropped", (self.in_features,))
        self.leaves_low = self.takes_low = False

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        if self.takes_low:
            return ()
        dropped = (self.dropped,) if self.dropout else ()
        low = () if self.leaves_low else (self.low,)
        if half == "forward":
            return (*low, *dropped)
        return (self.grad_low, *dropped) if half == "input" else (self.grad_low, *low, *dropped)

    # -- low as an output or an input --------------------------------------------------------------------------------

    def leaving_low(self) -> Self:
        """The same layer with outputs y, of the frozen product alone, and low: what reads y adds low @ B.T itself."""
        op = copy.copy(self)
        op.leaves_low = True
        op.outputs, op.needs_weight = (*self.outputs, self.low), (*self.needs_weight, self.low.name)
        return op

    def taking_low(self) -> Self:
        """The same layer with inputs x and low = scale * x @ A.T, which what makes x makes beside it.

        The gradient of low here is that of x @ A.T, scaled; the gradient of x is that of the frozen product alone.
        """
        assert not self.dropout, "what dropout leaves of x is the layer's own"
        op = copy.copy(self)
        op.takes_low, op.params = True, (self.up,)
        op.inputs = op.grad_inputs = (*self.inputs, self.low.name)
        op.needs_weight = (self.low.name,)
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
        if self.leaves_low:
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

    def _what_a_reads(self, env: OpEnv) -> Tensor:
        """x, or while training with dropout what is left of it."""
        x = env.t[self.x]
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
        """grad_low = scale * the gradient of the products @ B, module by module."""
        grad_y = self._grad_product(env)
        grad_low = env.g[self.low.name] if self.takes_low else env.t[self.grad_low.name]
        for rows, low, up in self._modules(grad_low, env.p[self.up]):
            torch.addmm(low, grad_y[:, rows.start : rows.end], up, beta=0, alpha=self.scale, out=low)
        return grad_low

    def _add_dropped(self, env: OpEnv, grad_x: Tensor, grad_low: Tensor) -> None:
        """grad_x (+)= grad_low @ A where forward dropped nothing."""
        through = env.t[self.dropped.name]
        torch.mm(grad_low, env.p[self.down], out=through)
        self._drop(through, env)
        grad_x.add_(through) if self.x in env.accumulate else grad_x.copy_(through)

    def backward_weight(self, env: OpEnv) -> None:
        grad_y = self._grad_product(env)
        if not self.takes_low:
            x = self._what_a_reads(env)
            if not self.leaves_low:
                self._write_low(env, x)
            accumulate_weight_grad(env.gp[self.down], env.t[self.grad_low.name], x, env.first)
        for rows, low, grad_up in self._modules(env.t[self.low.name], env.gp[self.up]):
            accumulate_weight_grad(grad_up, grad_y[:, rows.start : rows.end], low, env.first)

    # -- costs -------------------------------------------------------------------------------------------------------

    @property
    def adapted_features(self) -> int:
        """Columns of the output that adapters add to."""
        return sum(rows.end - rows.start for rows in self.adapted)

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
        if not self.leaves_low:
            work = work.plus(self._up_work(tokens, self.sum_passes, compute_bytes))
        return work.plus(self._dropping(tokens, 2, 1, compute_bytes))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = self._frozen_work("input", tokens, seq_len, compute_bytes)
        work = work.plus(self._up_work(tokens, 1, compute_bytes)).plus(self._down_work(tokens, 2, compute_bytes))
        return work.plus(self._dropping(tokens, 4, 2, compute_bytes))

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = self._up_work(tokens, 1, compute_bytes).plus(self._down_work(tokens, 1, compute_bytes))
        again = Work() if self.leaves_low else self._down_work(tokens, 1, compute_bytes)
        return work.plus(again).plus(self._dropping(tokens, 2, 1, compute_bytes))

    def model_flops(self, seq_len: int) -> float:
        """The frozen product forward and for the gradient of x, the adapters' once more for their own gradients."""
        added = self._down_work(seq_len, 1, 2).plus(self._up_work(seq_len, 1, 2))
        return 2 * self._product(seq_len).flops + 3 * added.flops
