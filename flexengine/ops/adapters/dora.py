"""Linear layers that add low @ B.T and multiply outputs by magnitudes: y = g * (x @ (W + scale * B @ A).T) (+ ...).

g = m / |W + scale * B @ A| by output, where no gradient passes through the norm, as its authors suggest. What is
trained and stored is d = m - |W|: then an adapter that changes nothing has g = 1 exactly, whatever the compute dtype
rounds d to. Shapes as in ops/adapters/low_rank.py; d [rows of the adapted modules].

With dropout, which keeps d(x) of x, the difference to the frozen layer alone reads d(x):
y = x @ W.T + (g - 1) * (d(x) @ W.T) + g * scale * (d(x) @ A.T) @ B.T, as PEFT computes it.
Source: Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", https://arxiv.org/abs/2402.09353, section 4.3.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.ops.adapters.dropout import NO_DROPOUT, Dropout
from flexengine.ops.adapters.lora import accumulate_up_grad, write_grad_low
from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import FLOAT64_BYTES, OpEnv, TensorSpec, Work, in_plain_width, wide
from flexengine.ops.linear import Linear, accumulate_bias_grad, bias_grad_bytes, wide_product, widened_bytes

BLOCK_COLUMNS = 1 << 12
"""Columns of the output that are computed wide at a time; fewer take less scratch and more calls."""
LEAST_NORM = 1e-30
"""Below any norm of trained weights; rows of zeros stay zeros."""


class _Block(NamedTuple):
    """Columns of the output that are computed at a time, and their rows of B and columns of low; None without."""

    columns: slice
    rows: slice | None = None
    low: slice | None = None


class Magnitude(Linear):
    """A frozen product, what its adapters add, and trained magnitudes of their outputs, in one op.

    Factors of outputs stay wide: they are close to 1, where bf16 has steps of 0.8%. So sums are multiplied before they
    are rounded.

    Norms are computed in each call from |W|^2, W @ A.T and A @ A.T, which read the weight twice and never write one:
    they depend on weights alone, so that no plan changes them.
    """

    def __init__(self, base: Linear, adapters: Adapters, low_again: str, dropout: Dropout = NO_DROPOUT) -> None:
        vars(self).update(vars(base))
        self.adapters, self.low, self.low_again, self.dropout = adapters, adapters.low.name, low_again, dropout
        self.inputs = self.grad_inputs = (*base.inputs, self.low)
        self.params, self.needs_weight = (adapters.up, adapters.magnitude), (base.x_again, low_again)
        self.replays, self.blocks = not dropout.probability, tuple(_blocks(adapters))
        columns = min(self.out_features, BLOCK_COLUMNS)
        self.product = TensorSpec(f"{self.name}.product", (columns,), "float32")
        self.added = TensorSpec(f"{self.name}.added", (columns,))
        self.grad_product = TensorSpec(f"{self.name}.grad_product", (self.out_features,))
        self.norms = TensorSpec(f"{self.name}.norms", (adapters.adapted_features,), "float32", rows=1)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        kept, products = (self.grad_product, self.norms), (self.product, self.added)
        return {"forward": products, "input": kept, "weight": (*kept, *products)}[half] + self.dropout.buffers

    def _gains(self, env: OpEnv, norms: Tensor | None = None) -> Tensor:
        """What the adapted outputs are multiplied by [rows], wide; norms: also keeps |W + scale * B @ A| there."""
        modules = self.adapters.modules(env.p[self.adapters.down].t(), env.p[self.adapters.up])
        matrix, scale = self._matrix(env), self.adapters.scale
        found = [adapted_norms(matrix[rows.start : rows.end], down.t(), up, scale) for rows, down, up in modules]
        own, adapted = (torch.cat(each) for each in zip(*found, strict=True))
        if norms is not None:
            norms.copy_(adapted[None, :])
        return (own + wide(env.p[self.adapters.magnitude])).div_(adapted)

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, env: OpEnv) -> None:
        if not env.adapters:
            return super().forward(env)
        y, bias = env.t[self.y], None if self.bias is None else env.p[self.bias]
        residual = None if self.residual is None else env.t[self.residual]
        read, gains = self.dropout.left_of(env.t[self.x], env), self._gains(env)
        for block in self.blocks:
            product = self._adapted_product(env, read, block, gains)
            if bias is not None:
                product.add_(bias[block.columns])
            if residual is not None:
                product.add_(residual[:, block.columns])
            y[:, block.columns].copy_(product)

    def _adapted_product(self, env: OpEnv, read: Tensor, block: _Block, gains: Tensor) -> Tensor:
        """Columns of the output without bias and residual, wide; read: what A reads."""
        x, columns = env.t[self.x], block.columns
        if block.rows is None:
            return self._large_product(env, x, columns)
        gain = gains[block.rows]
        if read is x:
            return self._sum(env, read, block, self.low).mul_(gain)
        product = self._large_product(env, read, columns).mul_(gain - 1.0)
        product.addcmul_(self._small_product(env, block, self.low), gain)
        return self._large_product(env, x, columns, added=True)

    def _sum(self, env: OpEnv, x: Tensor, block: _Block, low: str) -> Tensor:
        """Columns of x @ W.T + low @ B.T, wide: their factors are so close to 1 that rounding first would undo them."""
        product = self._large_product(env, x, block.columns)
        return product.add_(self._small_product(env, block, low))

    def _large_product(self, env: OpEnv, x: Tensor, columns: slice, added: bool = False) -> Tensor:
        """Columns of x @ W.T, wide, in the buffer of products; added: on top of what that holds."""
        weight, product = self._matrix(env)[columns].t(), self._buffer(env, self.product, columns)
        if x.dtype != product.dtype and not x.is_cuda:
            x, weight = wide(x), wide(weight)
        kind: dict[str, Any] = {} if x.dtype == product.dtype else {"out_dtype": product.dtype}
        if added:
            return torch.addmm(product, x, weight, out=product, **kind)
        return torch.mm(x, weight, out=product, **kind)

    def _small_product(self, env: OpEnv, block: _Block, low: str) -> Tensor:
        """Columns of low @ B.T."""
        up = env.p[self.adapters.up][block.rows]
        return torch.mm(env.t[low][:, block.low], up.t(), out=self._buffer(env, self.added, block.columns))

    def _buffer(self, env: OpEnv, spec: TensorSpec, columns: slice) -> Tensor:
        """A buffer for these columns of the chunk's rows."""
        shape = (env.chunk.tokens, columns.stop - columns.start)
        return env.t[spec.name].flatten()[: shape[0] * shape[1]].view(shape)

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward_input(self, env: OpEnv) -> None:
        gains, grad_x = self._gains(env, env.t[self.norms.name]).split(self.adapters.widths), env.g[self.x]
        if self.dropout.probability:
            return self._backward_dropped(env, gains)
        grad = self._write_grads(env, gains)
        added, weight = self.x in env.accumulate, self._matrix(env)
        torch.addmm(grad_x, grad, weight, out=grad_x) if added else torch.mm(grad, weight, out=grad_x)

    def _write_grads(self, env: OpEnv, gains: tuple[Tensor, ...]) -> Tensor:
        """Write the gradient of the sum of both products, which is grad_y times gains, and that of low."""
        grad = env.t[self.grad_product.name]
        grad.copy_(env.g[self.y])
        for rows, gain in zip(self.adapters.rows, gains, strict=True):
            grad[:, rows.start : rows.end].mul_(gain)
        write_grad_low(self.adapters, grad, env.p[self.adapters.up], env.g[self.low])
        return grad

    def _backward_dropped(self, env: OpEnv, gains: tuple[Tensor, ...]) -> None:
        """grad_x (+)= grad_y @ W + d'(((g - 1) * grad_y) @ W + grad_low @ A), d' dropping what forward dropped."""
        grad_y, grad, grad_x = env.g[self.y], env.t[self.grad_product.name], env.g[self.x]
        grad.zero_()
        for rows, gain in zip(self.adapters.rows, gains, strict=True):
            torch.mul(grad_y[:, rows.start : rows.end], gain - 1.0, out=grad[:, rows.start : rows.end])
        through = torch.mm(grad, self._matrix(env), out=env.t[self.dropout.buffer.name])
        self._write_grads(env, gains)  # the weight half reads them
        torch.addmm(through, env.g[self.low], env.p[self.adapters.down], out=through)
        through = self.dropout.left_of(through, env)
        grad_x.add_(through) if self.x in env.accumulate else grad_x.copy_(through)
        torch.addmm(grad_x, grad_y, self._matrix(env), out=grad_x)

    def backward_weight(self, env: OpEnv) -> None:
        read, grad = self.dropout.left_of(env.t[self.x_again], env), env.t[self.grad_product.name]
        accumulate_up_grad(self.adapters, grad, env.t[self.low_again], env.gp[self.adapters.up], env.first)
        grad_y, norms, sums = env.g[self.y], env.t[self.norms.name][0], env.gp[self.adapters.magnitude]
        for block in self.blocks:
            if block.rows is not None:
                product = self._sum(env, read, block, self.low_again).mul_(grad_y[:, block.columns])
                accumulate_bias_grad(sums[block.rows], product.div_(norms[block.rows]), env.first)

    # -- costs -------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        wide_bytes = max(4, compute_bytes)
        rank, rows = self.adapters.rank, max(self.adapters.widths)
        norms = wide_bytes * (8 * self.adapters.adapted_features + 4 * rows * rank + 2 * rank**2)
        return norms + bias_grad_bytes(tokens, self.product.shape[0], wide_bytes)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        rank, rows, columns = self.adapters.rank, max(self.adapters.widths), self.product.shape[0]
        norms = 4 * (2 * rows + rank) * self.in_features
        block = 4 * ((tokens + columns) * self.in_features + 2 * tokens * columns)
        widened = widened_bytes(tokens, rows, rank, compute_bytes)
        own = max(in_plain_width(self.workspace_bytes(tokens, FLOAT64_BYTES), compute_bytes), widened)
        return own + (norms + block if compute_bytes == 2 else 0)

    def _products(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """The large product, one with B, and so many passes over outputs, of which a wide one counts twice."""
        moved = Work(memory_bytes=float(passes * tokens * self.out_features * compute_bytes), kernels=passes)
        return self._product(tokens).plus(self.adapters.up_work(tokens, 1, compute_bytes)).plus(moved)

    def _twice(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """The large product once more, of what dropout leaves; passes: over tensors like x, to drop."""
        if not self.dropout.probability:
            return Work()
        moved = Work(memory_bytes=3.0 * tokens * self.out_features * compute_bytes, kernels=3)
        return self._product(tokens).plus(moved).plus(self.dropout.work(tokens, passes, compute_bytes))

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = self._products(tokens, 15 if self.residual is None else 20, compute_bytes)
        return work.plus(self.adapters.norm_work(compute_bytes, 10, 3)).plus(self._twice(tokens, 2, compute_bytes))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = self._products(tokens, 4, compute_bytes).plus(self.adapters.norm_work(compute_bytes, 10, 3))
        work = work.plus(self._twice(tokens, 4, compute_bytes))
        return work.plus(self.adapters.down_work(tokens, 2, compute_bytes)) if self.dropout.probability else work

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._products(tokens, 19, compute_bytes).plus(self.dropout.work(tokens, 2, compute_bytes))

    def model_flops(self, seq_len: int) -> float:
        """The frozen product forward and for the gradient of x, that of B once more for its own gradient."""
        return 2 * self._product(seq_len).flops + 3 * self.adapters.up_work(seq_len, 1, 2).flops


def _blocks(adapters: Adapters) -> Iterator[_Block]:
    """Cut the columns of the output, those between adapted modules too."""
    reached, first, rank = 0, 0, adapters.rank
    for number, (start, end) in enumerate((*adapters.rows, (adapters.out_features, adapters.out_features))):
        yield from (_Block(columns) for columns in _cut(reached, start))
        for columns in _cut(start, end):
            own = slice(first + columns.start - start, first + columns.stop - start)
            yield _Block(columns, own, slice(number * rank, (number + 1) * rank))
        reached, first = end, first + end - start


def _cut(start: int, end: int) -> list[slice]:
    """Columns [start, end) in blocks."""
    return [slice(first, min(first + BLOCK_COLUMNS, end)) for first in range(start, end, BLOCK_COLUMNS)]


def adapted_norms(weight: Tensor, down: Tensor, up: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """|W| and |W + scale * B @ A| by rows [F], wide, without a matrix of W's size.

    Shapes: weight [F, D], down = A [R, D], up = B [F, R], or stacks of as many of each.
    """
    b = wide(up)
    square = torch.linalg.vector_norm(weight, dim=-1, dtype=b.dtype).square_()
    own = square.sqrt()
    mixed = (wide_product(weight, down) * b).sum(-1)
    added = ((b @ wide_product(down, down)) * b).sum(-1)
    total = square.add_(mixed, alpha=2 * scale).add_(added, alpha=scale * scale)
    return own, total.clamp_min_(LEAST_NORM**2 if total.dtype == torch.float64 else 0.0).sqrt_().clamp_min_(LEAST_NORM)
