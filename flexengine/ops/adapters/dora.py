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

import torch
from torch import Tensor

from flexengine.ops.adapters.dropout import Dropout
from flexengine.ops.adapters.lora import accumulate_up_grad, write_grad_low
from flexengine.ops.adapters.low_rank import AdaptedRows, Adapters
from flexengine.ops.base import FLOAT64_BYTES, OpEnv, TensorSpec, Work, in_plain_width, wide
from flexengine.ops.linear import Linear, accumulate_bias_grad, bias_grad_bytes, wide_product, widened_bytes

BLOCK_COLUMNS = 1 << 12
"""Columns of the output that are computed wide at a time; fewer take less scratch and more calls."""
LEAST_NORM = 1e-30
"""Below any norm of trained weights; rows of zeros stay zeros."""


class Magnitude(Linear):
    """A frozen product, what its adapters add, and trained magnitudes of their outputs, in one op.

    Factors of outputs stay wide: they are close to 1, where bf16 has steps of 0.8%. So sums are multiplied before they
    are rounded.

    Norms are computed in each call from |W|^2, W @ A.T and A @ A.T, which read the weight twice and never write one:
    they depend on weights alone, so that no plan changes them.
    """

    def __init__(self, base: Linear, adapters: Adapters, low_again: str, dropout: Dropout | None = None) -> None:
        super().__init__(
            base.name, base.x, base.y, base.in_features, base.out_features,
            base.weight, base.bias, base.residual, base.transposed,
        )  # fmt: skip
        self.adapters, self.low, self.low_again, self.dropout = adapters, adapters.low.name, low_again, dropout
        self.inputs = self.grad_inputs = (*self.inputs, self.low)
        self.params, self.replays = (adapters.up, adapters.magnitude), dropout is None
        self.x_again, self.needs_weight = base.x_again, (base.x_again, low_again)
        columns = min(self.out_features, BLOCK_COLUMNS)
        self.product = TensorSpec(f"{self.name}.product", (columns,), "float32")
        self.added = TensorSpec(f"{self.name}.added", (columns,))
        self.grad_product = TensorSpec(f"{self.name}.grad_product", (self.out_features,))
        self.norms = TensorSpec(f"{self.name}.norms", (adapters.adapted_features,), "float32", rows=1)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        own = {
            "forward": (self.product, self.added),
            "input": (self.grad_product, self.norms),
            "weight": (self.grad_product, self.norms, self.product, self.added),
        }
        return own[half] if self.dropout is None else (*own[half], self.dropout.buffer)

    # -- norms -------------------------------------------------------------------------------------------------------

    def _norms(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        """|W| and |W + scale * B @ A| of the adapted outputs [rows], wide."""
        found = []
        for rows, down, up in self.adapters.modules(env.p[self.adapters.down].t(), env.p[self.adapters.up]):
            weight = self._matrix(env)[rows.start : rows.end]
            found.append(adapted_norms(weight, down.t(), up, self.adapters.scale))
        return torch.cat([own for own, _ in found]), torch.cat([norm for _, norm in found])

    def _gains(self, env: OpEnv, norms: Tensor | None = None) -> list[tuple[AdaptedRows, Tensor]]:
        """What the outputs of every adapted module are multiplied by; norms: also keeps the norms there."""
        own, adapted = self._norms(env)
        if norms is not None:
            norms.copy_(adapted[None, :])
        gains = (own + wide(env.p[self.adapters.magnitude])).div_(adapted)
        return list(zip(self.adapters.rows, gains.split(self.adapters.widths), strict=True))

    def _read(self, env: OpEnv, x: str) -> Tensor:
        """What A reads: x, or while training with dropout what is left of it."""
        return env.t[x] if self.dropout is None else self.dropout.left_of(env.t[x], env)

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, env: OpEnv) -> None:
        if not env.adapters:
            return super().forward(env)
        y, bias = env.t[self.y], None if self.bias is None else env.p[self.bias]
        residual = None if self.residual is None else env.t[self.residual]
        read, gains = self._read(env, self.x), dict(self._gains(env))
        for columns, rows, low, up in self._blocks(env, self.low):
            if rows is None or low is None or up is None:
                product = self._large_product(env, env.t[self.x], columns)
            else:
                gain = gains[rows][columns.start - rows.start : columns.stop - rows.start]
                product = self._adapted_product(env, read, columns, (low, up, gain))
            if bias is not None:
                product.add_(bias[columns])
            if residual is not None:
                product.add_(residual[:, columns])
            y[:, columns].copy_(product)

    def _blocks(
        self, env: OpEnv, low_name: str
    ) -> Iterator[tuple[slice, AdaptedRows | None, Tensor | None, Tensor | None]]:
        """Columns of the output, some at a time, with the module that adapts them, its low and its rows of B."""
        reached = 0
        for rows, low, up in self.adapters.modules(env.t[low_name], env.p[self.adapters.up]):
            yield from ((columns, None, None, None) for columns in _cut(reached, rows.start))
            for columns in _cut(rows.start, rows.end):
                yield columns, rows, low, up[columns.start - rows.start : columns.stop - rows.start]
            reached = rows.end
        yield from ((columns, None, None, None) for columns in _cut(reached, self.out_features))

    def _adapted_product(
        self, env: OpEnv, read: Tensor, columns: slice, adapter: tuple[Tensor, Tensor, Tensor]
    ) -> Tensor:
        """Columns of the output without bias and residual, wide; read: what A reads; adapter: low, B's rows, gains."""
        low, up, gain = adapter
        if read is env.t[self.x]:
            return self._product_of(env, read, columns, low, up).mul_(gain)
        product = self._large_product(env, read, columns).mul_(gain - 1.0)
        product.addcmul_(self._small_product(env, columns, low, up), gain)
        return self._large_product(env, env.t[self.x], columns, added=True)

    def _product_of(self, env: OpEnv, x: Tensor, columns: slice, low: Tensor, up: Tensor) -> Tensor:
        """Columns of x @ W.T + low @ B.T, wide: their factors are so close to 1 that rounding first would undo them."""
        product = self._large_product(env, x, columns)
        return product.add_(self._small_product(env, columns, low, up))

    def _large_product(self, env: OpEnv, x: Tensor, columns: slice, added: bool = False) -> Tensor:
        """Columns of x @ W.T, wide, in the buffer of products; added: on top of what that holds."""
        weight = self._matrix(env)[columns].t()
        product = self._block(env, self.product, columns)
        if x.dtype != product.dtype and not x.is_cuda:
            x, weight = wide(x), wide(weight)
        kind = product.dtype
        if x.dtype == kind:
            return torch.addmm(product, x, weight, out=product) if added else torch.mm(x, weight, out=product)
        if added:
            return torch.addmm(product, x, weight, out_dtype=kind, out=product)
        return torch.mm(x, weight, out_dtype=kind, out=product)

    def _small_product(self, env: OpEnv, columns: slice, low: Tensor, up: Tensor) -> Tensor:
        """Columns of low @ B.T."""
        return torch.mm(low, up.t(), out=self._block(env, self.added, columns))

    def _block(self, env: OpEnv, spec: TensorSpec, columns: slice) -> Tensor:
        """A buffer for these columns of the chunk's rows."""
        shape = (env.chunk.tokens, columns.stop - columns.start)
        return env.t[spec.name].flatten()[: shape[0] * shape[1]].view(shape)

    # -- backward ----------------------------------------------------------------------------------------------------

    def backward_input(self, env: OpEnv) -> None:
        gains, grad_x = self._gains(env, env.t[self.norms.name]), env.g[self.x]
        if self.dropout is not None:
            self._backward_dropped(env, gains, self.dropout)
            return
        grad = self._write_grads(env, gains)
        added, weight = self.x in env.accumulate, self._matrix(env)
        torch.addmm(grad_x, grad, weight, out=grad_x) if added else torch.mm(grad, weight, out=grad_x)

    def _write_grads(self, env: OpEnv, gains: list[tuple[AdaptedRows, Tensor]]) -> Tensor:
        """Write the gradient of the sum of both products, which is grad_y times gains, and that of low."""
        grad = env.t[self.grad_product.name]
        grad.copy_(env.g[self.y])
        for rows, gain in gains:
            grad[:, rows.start : rows.end].mul_(gain)
        write_grad_low(self.adapters, grad, env.p[self.adapters.up], env.g[self.low])
        return grad

    def _backward_dropped(self, env: OpEnv, gains: list[tuple[AdaptedRows, Tensor]], dropout: Dropout) -> None:
        """grad_x (+)= grad_y @ W + d'(((g - 1) * grad_y) @ W + grad_low @ A), d' dropping what forward dropped."""
        grad_y, grad, grad_x = env.g[self.y], env.t[self.grad_product.name], env.g[self.x]
        grad.zero_()
        for rows, gain in gains:
            torch.mul(grad_y[:, rows.start : rows.end], gain - 1.0, out=grad[:, rows.start : rows.end])
        through = torch.mm(grad, self._matrix(env), out=env.t[dropout.buffer.name])
        self._write_grads(env, gains)  # the weight half reads them
        torch.addmm(through, env.g[self.low], env.p[self.adapters.down], out=through)
        through = dropout.left_of(through, env)
        grad_x.add_(through) if self.x in env.accumulate else grad_x.copy_(through)
        torch.addmm(grad_x, grad_y, self._matrix(env), out=grad_x)

    def backward_weight(self, env: OpEnv) -> None:
        read, grad = self._read(env, self.x_again), env.t[self.grad_product.name]
        accumulate_up_grad(self.adapters, grad, env.t[self.low_again], env.gp[self.adapters.up], env.first)
        grad_y, norms, sums = env.g[self.y], env.t[self.norms.name][0], env.gp[self.adapters.magnitude]
        first = 0
        for columns, rows, low, up in self._blocks(env, self.low_again):
            if rows is None or low is None or up is None:
                continue
            end = first + columns.stop - columns.start
            product = self._product_of(env, read, columns, low, up).mul_(grad_y[:, columns]).div_(norms[first:end])
            accumulate_bias_grad(sums[first:end], product, env.first)
            first = end

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

    def _norm_work(self, compute_bytes: int) -> Work:
        """Reading the adapted rows twice."""
        elements = self.adapters.adapted_features * self.in_features
        kernels = 10 * len(self.adapters.rows) + 3
        return Work(2.0 * elements * self.adapters.rank, memory_bytes=2.0 * elements * compute_bytes, kernels=kernels)

    def _passes(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """Reading or writing outputs of the compute dtype so many times; a wide one counts twice."""
        num_bytes = float(passes * tokens * self.out_features * compute_bytes)
        return Work(memory_bytes=num_bytes, kernels=passes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = self._product(tokens).plus(self.adapters.up_work(tokens, 1, compute_bytes))
        passes = self._passes(tokens, 15 if self.residual is None else 20, compute_bytes)
        return work.plus(self._norm_work(compute_bytes)).plus(passes).plus(self._twice(tokens, 2, compute_bytes))

    def _twice(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """The large product once more, of what dropout leaves; passes: over tensors like x, to drop."""
        if self.dropout is None:
            return Work()
        work = self._product(tokens).plus(self._passes(tokens, 3, compute_bytes))
        return work.plus(self.dropout.work(tokens, passes, passes // 2, compute_bytes))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = self._product(tokens).plus(self.adapters.up_work(tokens, 1, compute_bytes))
        work = work.plus(self._norm_work(compute_bytes))
        work = work.plus(self._passes(tokens, 4, compute_bytes)).plus(self._twice(tokens, 4, compute_bytes))
        return work if self.dropout is None else work.plus(self.adapters.down_work(tokens, 2, compute_bytes))

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = self._product(tokens).plus(self.adapters.up_work(tokens, 1, compute_bytes))
        work = work.plus(self._passes(tokens, 19, compute_bytes))
        return work if self.dropout is None else work.plus(self.dropout.work(tokens, 2, 1, compute_bytes))

    def model_flops(self, seq_len: int) -> float:
        """The frozen product forward and for the gradient of x, that of B once more for its own gradient."""
        return 2 * self._product(seq_len).flops + 3 * self.adapters.up_work(seq_len, 1, 2).flops


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
