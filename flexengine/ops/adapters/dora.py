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

from flexengine.ops.adapters.dropout import NO_DROPOUT, Dropout
from flexengine.ops.adapters.lora_grads import accumulate_up_grad, write_grad_low
from flexengine.ops.adapters.low_rank import Adapters, Slices
from flexengine.ops.base import FLOAT64_BYTES, OpEnv, TensorSpec, Work, in_plain_width, wide
from flexengine.ops.linear import Linear, accumulate_bias_grad, bias_grad_bytes, widened_bytes
from flexengine.ops.products import wide_product, write_product

BLOCK_COLUMNS = 1 << 12
"""Columns of the output that are computed wide at a time; fewer take less scratch and more calls."""
LEAST_NORM = 1e-30
"""Below any norm of trained weights; rows of zeros stay zeros."""


class Magnitude(Linear):
    """A frozen product, what its adapters add, and trained magnitudes of their outputs, in one op.

    Factors of outputs stay wide: they are close to 1, where bf16 has steps of 0.8%. So sums are multiplied before they
    are rounded, which would undo the factors.

    Norms are computed in each call from |W|^2, W @ A.T and A @ A.T, which read the weight twice and never write one:
    they depend on weights alone, so that no plan changes them.
    """

    def __init__(self, base: Linear, adapters: Adapters, low_again: str, dropout: Dropout = NO_DROPOUT) -> None:
        vars(self).update(vars(base))
        self.adapters, self.low, self.low_again, self.dropout = adapters, adapters.low.name, low_again, dropout
        self.inputs = self.grad_inputs = (*base.inputs, self.low)
        self.params, self.needs_weight = adapters.params[1:], (base.x_again, low_again)
        self.replays, columns = not dropout.probability, min(self.out_features, BLOCK_COLUMNS)
        self.product = TensorSpec(f"{self.name}.product", (columns,), "float32")
        self.added = TensorSpec(f"{self.name}.added", (columns,))
        self.grad_product = TensorSpec(f"{self.name}.grad_product", (self.out_features,))
        self.norms = TensorSpec(f"{self.name}.norms", (adapters.adapted_features,), "float32", rows=1)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        kept, products = (self.grad_product, self.norms), (self.product, self.added)
        return {"forward": products, "input": kept, "weight": (*kept, *products)}[half] + self.dropout.buffers

    def _gains(self, env: OpEnv) -> list[Tensor]:
        """What the adapted outputs are multiplied by, and |W + scale * B @ A|, both wide [rows]."""
        found = (both for _, *both in module_gains(self.adapters, self._matrix(env), env.p))
        return [torch.cat(each) for each in zip(*found, strict=True)]

    def forward(self, env: OpEnv) -> None:
        if not env.adapters:
            return super().forward(env)
        read, (gains, _) = self.dropout.left_of(env.t[self.x], env), self._gains(env)
        for block in self.adapters.pieces(BLOCK_COLUMNS):
            product = self._adapted_product(env, read, block, gains[block.up])
            if self.bias is not None:
                product.add_(env.p[self.bias][block.columns])
            if self.residual is not None:
                product.add_(env.t[self.residual][:, block.columns])
            env.t[self.y][:, block.columns].copy_(product)

    def _adapted_product(self, env: OpEnv, read: Tensor, block: Slices, gains: Tensor) -> Tensor:
        """Columns of the output without bias and residual, wide; read: what A reads."""
        x = env.t[self.x]
        if not block.adapted:
            return self._large_product(env, x, block)
        if read is x:
            return self._large_product(env, x, block).add_(self._small_product(env, block, self.low)).mul_(gains)
        product = self._large_product(env, read, block).mul_(gains - 1.0)
        product.addcmul_(self._small_product(env, block, self.low), gains)
        return self._large_product(env, x, block, added=True)

    def _large_product(self, env: OpEnv, x: Tensor, block: Slices, added: bool = False) -> Tensor:
        """Columns of x @ W.T, wide, in the buffer of products; added: on top of what that holds."""
        weight, product = self._matrix(env)[block.columns].t(), self._buffer(env, self.product, block)
        write_product(product, x, weight, added)
        return product

    def _small_product(self, env: OpEnv, block: Slices, low: str) -> Tensor:
        """Columns of low @ B.T."""
        up = env.p[self.adapters.up][block.up]
        return torch.mm(env.t[low][:, block.low], up.t(), out=self._buffer(env, self.added, block))

    def _buffer(self, env: OpEnv, spec: TensorSpec, block: Slices) -> Tensor:
        """A buffer for these columns of the chunk's rows."""
        shape = (env.chunk.tokens, block.columns.stop - block.columns.start)
        return env.t[spec.name].flatten()[: shape[0] * shape[1]].view(shape)

    def backward_input(self, env: OpEnv) -> None:
        gains, norms = self._gains(env)
        env.t[self.norms.name].copy_(norms[None, :])
        if self.dropout.probability:
            return self._backward_dropped(env, gains)
        write_product(env.g[self.x], self._write_grads(env, gains), self._matrix(env), self.x in env.accumulate)

    def _write_grads(self, env: OpEnv, gains: Tensor) -> Tensor:
        """Write the gradient of the sum of both products, which is grad_y times gains, and that of low."""
        grad = env.t[self.grad_product.name]
        grad.copy_(env.g[self.y])
        for module in self.adapters.modules:
            grad[:, module.columns].mul_(gains[module.up])
        write_grad_low(self.adapters, grad, env.p[self.adapters.up], env.g[self.low])
        return grad

    def _backward_dropped(self, env: OpEnv, gains: Tensor) -> None:
        """grad_x (+)= grad_y @ W + d'(((g - 1) * grad_y) @ W + grad_low @ A), d' dropping what forward dropped."""
        grad_y, grad, grad_x = env.g[self.y], env.t[self.grad_product.name], env.g[self.x]
        grad.zero_()
        for module in self.adapters.modules:
            torch.mul(grad_y[:, module.columns], gains[module.up] - 1.0, out=grad[:, module.columns])
        through = torch.mm(grad, self._matrix(env), out=env.t[self.dropout.buffer.name])
        self._write_grads(env, gains)  # the weight half reads them
        write_product(through, env.g[self.low], env.p[self.adapters.down], added=True)
        through = self.dropout.left_of(through, env)
        grad_x.add_(through) if self.x in env.accumulate else grad_x.copy_(through)
        write_product(grad_x, grad_y, self._matrix(env), added=True)

    def backward_weight(self, env: OpEnv) -> None:
        read, grad = self.dropout.left_of(env.t[self.x_again], env), env.t[self.grad_product.name]
        accumulate_up_grad(self.adapters, grad, env.t[self.low_again], env.gp[self.adapters.up], env.first)
        grad_y, norms, sums = env.g[self.y], env.t[self.norms.name][0], env.gp[self.adapters.magnitude]
        for block in self.adapters.pieces(BLOCK_COLUMNS):
            if block.adapted:
                product = self._large_product(env, read, block).add_(self._small_product(env, block, self.low_again))
                product.mul_(grad_y[:, block.columns]).div_(norms[block.up])
                accumulate_bias_grad(sums[block.up], product, env.first)

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

    def half_work(self, half: str, tokens: int, compute_bytes: int) -> Work:
        """The large product, one with B, and passes over outputs, of which a wide one counts twice. Gains take norms,
        and with dropout the large product once more, of what it leaves."""
        passes = {"forward": 15 if self.residual is None else 20, "input": 4, "weight": 19}[half]
        work, product = self.adapters.up_work(tokens, 1, compute_bytes), self._product(tokens)
        if half != "weight":
            work = work.plus(self.adapters.norm_work(compute_bytes, 10, 3))
            if self.dropout.probability:
                passes, product = passes + 3, product.times(2)
        if half == "input" and self.dropout.probability:
            work = work.plus(self.adapters.down_work(tokens, 2, compute_bytes))
        moved = Work(memory_bytes=float(passes * tokens * self.out_features * compute_bytes), kernels=passes)
        dropped = self.dropout.work(tokens, 4 if half == "input" else 2, compute_bytes)
        return work.plus(product).plus(moved).plus(dropped)

    def model_flops(self, seq_len: int) -> float:
        """The frozen product forward and for the gradient of x, that of B once more for its own gradient."""
        return 2 * self._product(seq_len).flops + 3 * self.adapters.up_work(seq_len, 1, 2).flops


def module_gains(
    adapters: Adapters, weight: Tensor, params: dict[str, Tensor]
) -> Iterator[tuple[Slices, Tensor, Tensor]]:
    """Of each module what its outputs are multiplied by, and |W + scale * B @ A|, both wide [rows].

    weight: W [F, D], or a stack of the weights of experts, of which parameters then are stacks, too.
    """
    down, up, magnitudes = (params[name] for name in (adapters.down, adapters.up, adapters.magnitude))
    for module in adapters.modules:
        matrices = (weight[..., module.columns, :], down[..., module.low, :], up[..., module.up, :])
        own, adapted = adapted_norms(*matrices, adapters.scale)
        yield module, own.add_(wide(magnitudes[..., module.up])).div_(adapted), adapted


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
