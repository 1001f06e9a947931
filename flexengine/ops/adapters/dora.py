"""Linear layers with low-rank adapters and a magnitude for each output: y = g * (x @ (W + scale * B @ A).T) (+ ...).

g = m / |W + scale * B @ A| by output, where no gradient passes through the norm, as its authors suggest. What is
trained and stored is d = m - |W|: then an adapter that changes nothing has g = 1 exactly, whatever the compute dtype
rounds d to. Shapes as in ops/adapters/lora.py; d [rows of the adapted modules].

With dropout, which keeps d(x) of x, the difference to the frozen layer alone reads d(x):
y = x @ W.T + (g - 1) * (d(x) @ W.T) + g * scale * (d(x) @ A.T) @ B.T, as PEFT computes it.
Source: Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", https://arxiv.org/abs/2402.09353, section 4.3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flexengine.ops.adapters.lora import AdaptedRows, LoRALinear
from flexengine.ops.base import OpEnv, TensorSpec, Work, wide
from flexengine.ops.linear import Linear, accumulate_bias_grad, bias_grad_bytes, wide_product

BLOCK_COLUMNS = 1 << 12
"""Columns of the output that are computed wide at a time; fewer take less scratch and more calls."""
LEAST_NORM = 1e-30
"""Below any norm of trained weights; rows of zeros stay zeros."""


class DoRALinear(LoRALinear):
    """A frozen linear layer whose adapted outputs have low-rank adapters and trained magnitudes.

    Factors of outputs stay wide: they are close to 1, where bf16 has steps of 0.8%.

    Norms are computed in each call from |W|^2, W @ A.T and A @ A.T, which read the weight twice and never write one:
    they depend on weights alone, so that no plan changes them.
    """

    sum_passes = 1
    one_pass = False

    def __init__(
        self, base: Linear, rank: int, scale: float, adapted: tuple[AdaptedRows, ...], dropout: float = 0.0,
        number: int = 0,
    ) -> None:  # fmt: skip
        super().__init__(base, rank, scale, adapted, dropout, number)
        self.magnitude = f"{self.name}.lora_magnitude_vector"
        self.params = (*self.params, self.magnitude)
        columns = min(self.out_features, BLOCK_COLUMNS)
        self.product = TensorSpec(f"{self.name}.product", (columns,), "float32")
        self.added = TensorSpec(f"{self.name}.added", (columns,))
        self.grad_product = TensorSpec(f"{self.name}.grad_product", (self.out_features,))
        self.norms = TensorSpec(f"{self.name}.norms", (self.adapted_features,), "float32", rows=1)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        own = {
            "forward": (self.product, self.added),
            "input": (self.grad_product, self.norms),
            "weight": (self.grad_product, self.norms, self.product, self.added),
        }
        return (*super().scratch(half), *own[half])

    # -- norms -------------------------------------------------------------------------------------------------------

    def _norms(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        """|W| and |W + scale * B @ A| of the adapted outputs [rows], wide."""
        found = []
        for number, (rows, _, up) in enumerate(self._modules(env.p[self.down].t(), env.p[self.up])):
            down = env.p[self.down][number * self.rank : (number + 1) * self.rank]
            found.append(adapted_norms(self._matrix(env)[rows.start : rows.end], down, up, self.scale))
        return torch.cat([own for own, _ in found]), torch.cat([norm for _, norm in found])

    def _gains(self, env: OpEnv, norms: Tensor | None = None) -> list[tuple[AdaptedRows, Tensor]]:
        """What the outputs of every adapted module are multiplied by; norms: also keeps the norms there."""
        own, adapted = self._norms(env)
        if norms is not None:
            norms.copy_(adapted[None, :])
        gains = (own + wide(env.p[self.magnitude])).div_(adapted)
        return [(rows, gain) for rows, gain in self._by_module(gains)]

    def _by_module(self, values: Tensor) -> list[tuple[AdaptedRows, Tensor]]:
        """Values of the adapted outputs, module by module."""
        sizes = [rows.end - rows.start for rows in self.adapted]
        return list(zip(self.adapted, values.split(sizes), strict=True))

    # -- forward -----------------------------------------------------------------------------------------------------

    def forward(self, env: OpEnv) -> None:
        y, bias = env.t[self.y], None if self.bias is None else env.p[self.bias]
        residual = None if self.residual is None else env.t[self.residual]
        read = self._what_a_reads(env)
        self._write_low(env, read)
        gains = dict(self._gains(env))
        for columns, rows, low, up in self._blocks(env):
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

    def _blocks(self, env: OpEnv) -> Iterator[tuple[slice, AdaptedRows | None, Tensor | None, Tensor | None]]:
        """Columns of the output, some at a time, with the module that adapts them, its low and its rows of B."""
        reached = 0
        for rows, low, up in self._modules(env.t[self.low.name], env.p[self.up]):
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
        shape = (len(env.t[self.low.name]), columns.stop - columns.start)
        return env.t[spec.name].flatten()[: shape[0] * shape[1]].view(shape)

    # -- backward ----------------------------------------------------------------------------------------------------

    def _grad_product(self, env: OpEnv) -> Tensor:
        return env.t[self.grad_product.name]

    def backward_input(self, env: OpEnv) -> None:
        gains = self._gains(env, env.t[self.norms.name])
        if self.dropout:
            self._backward_dropped(env, gains)
            return
        self._write_grad_product(env, gains)
        super().backward_input(env)

    def _write_grad_product(self, env: OpEnv, gains: list[tuple[AdaptedRows, Tensor]]) -> None:
        """grad_product = grad_y with the adapted outputs times their gains."""
        grad = self._grad_product(env)
        grad.copy_(env.g[self.y])
        for rows, gain in gains:
            grad[:, rows.start : rows.end].mul_(gain)

    def _backward_dropped(self, env: OpEnv, gains: list[tuple[AdaptedRows, Tensor]]) -> None:
        """grad_x (+)= grad_y @ W + d'(((g - 1) * grad_y) @ W + grad_low @ A), d' dropping what forward dropped."""
        grad_y, grad, through = env.g[self.y], self._grad_product(env), env.t[self.dropped.name]
        grad.zero_()
        for rows, gain in gains:
            torch.mul(grad_y[:, rows.start : rows.end], gain - 1.0, out=grad[:, rows.start : rows.end])
        torch.mm(grad, self._matrix(env), out=through)
        self._write_grad_product(env, gains)  # the weight half reads it
        grad_low = self._write_grad_low(env)
        torch.addmm(through, grad_low, env.p[self.down], out=through)
        self._drop(through, env)
        grad_x = env.g[self.x]
        grad_x.add_(through) if self.x in env.accumulate else grad_x.copy_(through)
        torch.addmm(grad_x, grad_y, self._matrix(env), out=grad_x)

    def backward_weight(self, env: OpEnv) -> None:
        super().backward_weight(env)
        read = env.t[self.dropped.name if self.dropout else self.x_again]  # the line above has dropped again
        grad_y, norms, sums = env.g[self.y], env.t[self.norms.name][0], env.gp[self.magnitude]
        first = 0
        for columns, rows, low, up in self._blocks(env):
            if rows is None or low is None or up is None:
                continue
            end = first + columns.stop - columns.start
            product = self._product_of(env, read, columns, low, up).mul_(grad_y[:, columns]).div_(norms[first:end])
            accumulate_bias_grad(sums[first:end], product, env.first)
            first = end

    # -- costs -------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        wide_bytes = max(4, compute_bytes)
        rows = max(rows.end - rows.start for rows in self.adapted)
        norms = wide_bytes * (8 * self.adapted_features + 4 * rows * self.rank + 2 * self.rank**2)
        return norms + bias_grad_bytes(tokens, self.product.shape[0], wide_bytes)

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        rows, columns = max(rows.end - rows.start for rows in self.adapted), self.product.shape[0]
        norms = 4 * (2 * rows + self.rank) * self.in_features
        block = 4 * ((tokens + columns) * self.in_features + 2 * tokens * columns)
        return super().plain_workspace_bytes(tokens, compute_bytes) + (norms + block if compute_bytes == 2 else 0)

    def _norm_work(self, compute_bytes: int) -> Work:
        """Reading the adapted rows twice."""
        elements = self.adapted_features * self.in_features
        kernels = 10 * len(self.adapted) + 3
        return Work(2.0 * elements * self.rank, memory_bytes=2.0 * elements * compute_bytes, kernels=kernels)

    def _passes(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """Reading or writing outputs of the compute dtype so many times; a wide one counts twice."""
        num_bytes = float(passes * tokens * self.out_features * compute_bytes)
        return Work(memory_bytes=num_bytes, kernels=passes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().forward_work(tokens, seq_len, compute_bytes).plus(self._norm_work(compute_bytes))
        work = work.plus(self._passes(tokens, 15 if self.residual is None else 20, compute_bytes))
        return work.plus(self._twice(tokens, compute_bytes))

    def _twice(self, tokens: int, compute_bytes: int) -> Work:
        """The large product once more, of what dropout leaves."""
        return self._product(tokens).plus(self._passes(tokens, 3, compute_bytes)) if self.dropout else Work()

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().backward_input_work(tokens, seq_len, compute_bytes).plus(self._norm_work(compute_bytes))
        return work.plus(self._passes(tokens, 4, compute_bytes)).plus(self._twice(tokens, compute_bytes))

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        work = super().backward_weight_work(tokens, seq_len, compute_bytes).plus(self._product(tokens))
        return work.plus(self._passes(tokens, 19, compute_bytes))


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
