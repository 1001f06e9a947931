"""Gradients that adapters read grad_y for: of low, to multiply with A, and of B. On a GPU both come of one pass.

Shapes: grad_y [T, F] of the adapted columns, low and its gradient [T, J * R], B [rows of the adapted modules, R]. The
pass writes partial sums (kernels/lora_grads.py): for low by COLUMNS columns, for B by spans of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from flexengine.ops.base import TensorSpec, Work
from flexengine.ops.products import use_product_kernel

SPANS = 16
"""Spans of tokens whose sums for B are added up at the end. More of them keep more of a card busy where there are few
columns, and take more memory. The number must depend on nothing, or the sums would."""
COLUMNS = 256
"""Columns of a partial sum for low. Fewer take more memory for partial sums, more take more registers."""
MOST_MODULES = 3
"""Modules of one call: queries, keys and values."""
MOST_RANK = 32
"""Largest rank; beyond, the sums for B do not fit a program's registers, and each gradient takes its own pass."""


class PartialSums(NamedTuple):
    """Buffers of one layer's partial sums: for low and for B."""

    low: TensorSpec
    up: TensorSpec

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


def runs(spans: Sequence[tuple[int, int]]) -> Iterator[range]:
    """Numbers of modules, by their columns [start, end), that one call of the kernel takes together.

    Their columns lie side by side, and no partial sum for low has columns of two of them.
    """
    first = 0
    for number, (_, end) in enumerate(spans):
        together = number + 1 < len(spans) and spans[number + 1][0] == end and number + 1 - first < MOST_MODULES
        if not together or (end - spans[number][0]) % COLUMNS:
            yield range(first, number + 1)
            first = number + 1


def write_gradients(
    grad_y: Tensor, low: Tensor, up: Tensor, scale: float, grad_low: Tensor, parts: tuple[Tensor, Tensor],
    spans: Sequence[tuple[int, int]],
) -> None:  # fmt: skip
    """grad_low = scale * grad_y @ B and sums of grad_y.T @ low, module by module; parts: as `partial_sums` says.

    spans: columns [start, end) of grad_y by module, which has as many columns of low as B has, and rows of B.
    """
    from flexengine.kernels import lora_grads  # noqa: PLC0415 (Triton is imported when first used)

    rank, row = up.shape[1], 0
    for numbers in runs(spans):
        widths = [spans[n][1] - spans[n][0] for n in numbers]
        ranks, rows = slice(numbers.start * rank, numbers.stop * rank), slice(row, row + sum(widths))
        low_parts = parts[0][:, : sum(-(-width // COLUMNS) for width in widths) * rank]
        up_parts = parts[1][:, rows.start * rank : rows.stop * rank]
        columns = grad_y[:, spans[numbers.start][0] : spans[numbers.stop - 1][1]]
        lora_grads.write_gradients(
            columns, low[:, ranks], up[rows], scale, grad_low[:, ranks], low_parts, up_parts, widths, COLUMNS
        )
        row = rows.stop


def add_parts(up_parts: Tensor, grad_up: Tensor, first: bool) -> None:
    """grad_up (+)= the sums of up_parts; first: it holds nothing yet."""
    from flexengine.kernels import lora_grads  # noqa: PLC0415

    lora_grads.add_parts(up_parts, grad_up, first)
