"""Gradients that adapters read grad_y for: of low, to multiply with A, and of B. On a GPU both come of one pass.

Shapes: grad_y [T, F] of the adapted columns, low and its gradient [T, J * R], B [rows of the adapted modules, R]. The
pass writes partial sums (kernels/lora_grads.py): for low by COLUMNS columns, for B by spans of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.adapters.low_rank import Adapters
from flexengine.ops.base import OpEnv, TensorSpec, Work
from flexengine.ops.linear import accumulate_weight_grad
from flexengine.ops.products import use_product_kernel

SPANS = 16
"""Spans of tokens whose sums for B are added up at the end. More of them keep more of a card busy where there are few
columns, and take more memory. The number must depend on nothing, or the sums would."""
COLUMNS = 256
"""Columns of a partial sum for low. Fewer take more memory for partial sums, more take more registers."""
MOST_RANK = 32
"""Largest rank; beyond, the sums for B do not fit a program's registers, and each gradient takes its own pass."""


class PartialSums(NamedTuple):
    """Buffers of one layer's partial sums: for low and for B."""

    low: TensorSpec
    up: TensorSpec

    def write(self, adapters: Adapters, env: OpEnv, grad_y: Tensor, low: Tensor) -> None:
        """Write grad_low = scale * grad_y @ B and the sums of grad_y.T @ low, module by module."""
        from flexengine.kernels import lora_grads  # noqa: PLC0415 (Triton is imported when first used)

        up, grad_low, rank = env.p[adapters.up], env.g[adapters.low.name], adapters.rank
        for numbers in lora_grads.runs(adapters.rows, COLUMNS):
            ends = zip(adapters.modules[numbers[0]], adapters.modules[numbers[-1]], strict=True)
            columns, lows, rows = (slice(first.start, last.stop) for first, last in ends)
            widths = adapters.widths[numbers.start : numbers.stop]
            low_parts = env.t[self.low.name][:, : sum(-(-width // COLUMNS) for width in widths) * rank]
            up_parts = env.t[self.up.name][:, rows.start * rank : rows.stop * rank]
            operands = (grad_y[:, columns], low[:, lows], up[rows], adapters.scale, grad_low[:, lows])
            lora_grads.write_gradients(*operands, low_parts, up_parts, widths, COLUMNS)

    def add(self, env: OpEnv, grad_up: Tensor) -> None:
        """grad_B (+)= the sums for B."""
        from flexengine.kernels import lora_grads  # noqa: PLC0415

        lora_grads.add_parts(env.t[self.up.name], grad_up, env.first)

    def write_work(self, tokens: int) -> Work:
        """Writing and reading those for low, and writing those for B, beside the pass over grad_y."""
        return Work(memory_bytes=2.0 * self.low.num_bytes(tokens, 4) + self.up.num_bytes(tokens, 4), kernels=1)

    def add_work(self) -> Work:
        """Adding up those for B to an accumulator, which is read and written."""
        return Work(memory_bytes=self.up.num_bytes(0, 4) * (1.0 + 2.0 / SPANS), kernels=1)


def partial_sums(name: str, widths: tuple[int, ...], rank: int) -> PartialSums | None:
    """The buffers for modules with so many columns; None where each gradient takes its own pass."""
    if rank > MOST_RANK:
        return None
    tiles = sum(-(-width // COLUMNS) for width in widths)
    return PartialSums(
        TensorSpec(f"{name}.grad_low_parts", (tiles * rank,), "float32"),
        TensorSpec(f"{name}.grad_up_parts", (sum(widths) * rank,), "float32", rows=SPANS),
    )


def in_one_pass(grad_y: Tensor) -> bool:
    """Whether the kernel runs: for 16 bits, since a tile of 32 takes more shared memory than consumer cards have."""
    return use_product_kernel(grad_y) and grad_y.element_size() == 2


def write_grad_low(adapters: Adapters, grad_y: Tensor, up: Tensor, grad_low: Tensor) -> None:
    """grad_low = scale * grad_y @ B, module by module."""
    for module in adapters.modules:
        low = grad_low[:, module.low]
        torch.addmm(low, grad_y[:, module.columns], up[module.up], beta=0, alpha=adapters.scale, out=low)


def accumulate_up_grad(adapters: Adapters, grad_y: Tensor, low: Tensor, grad_up: Tensor, first: bool) -> None:
    """grad_B (+)= grad_y.T @ low, module by module."""
    for module in adapters.modules:
        accumulate_weight_grad(grad_up[module.up], grad_y[:, module.columns], low[:, module.low], first)
