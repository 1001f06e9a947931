"""Describes the low-rank adapters of one layer: scale * (x @ A.T) @ B.T, added to what its modules make.

Shapes: x [T, D], A [J * R, D], B [rows of the adapted modules, R], y [T, F], low = scale * x @ A.T [T, J * R]. A fused
projection has an adapter for each of its modules: A holds theirs one below the other, and so does B. Of experts each
has its own (ops/adapters/experts.py).
Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685; scale
as Kalajdzievski 2023 (rsLoRA) where that is asked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from flexengine.ops.base import TensorSpec, Work
from flexengine.ops.glu import AddedHalf, Addend


class AdaptedRows(NamedTuple):
    """Columns [start, end) of the output that one module makes, which has an adapter of its own."""

    start: int
    end: int


class OfExperts(NamedTuple):
    """Experts that have adapters of their own. one_tensor: one tensor holds A of all, and one holds B."""

    num_experts: int
    per_token: int
    bounds: str
    one_tensor: bool = False

    def part(self, number: int, num_parts: int) -> slice:
        """The experts of a part."""
        count = self.num_experts // num_parts
        return slice(number * count, (number + 1) * count)

    def held(self, number: int, num_parts: int) -> slice:
        """The same among those that a call's parameters hold: one tensor of all experts is never cut."""
        return self.part(number, num_parts) if self.one_tensor else slice(None)


@dataclass(frozen=True)
class Adapters:
    """The adapters of the layer `name`, which change its parameter `weight` (transposed: [D, F]).

    has_magnitude: its outputs have trained magnitudes as well (DoRA).
    """

    name: str
    weight: str
    in_features: int
    out_features: int
    rank: int
    scale: float
    rows: tuple[AdaptedRows, ...]
    transposed: bool = False
    has_magnitude: bool = False
    experts: OfExperts | None = None
    is_router: bool = False

    @property
    def down(self) -> str:
        """The parameter A."""
        return f"{self.name}.lora_A"

    @property
    def up(self) -> str:
        """The parameter B."""
        return f"{self.name}.lora_B"

    @property
    def magnitude(self) -> str:
        """The parameter of the outputs' magnitudes."""
        return f"{self.name}.lora_magnitude_vector"

    @property
    def low(self) -> TensorSpec:
        """What A makes of a token."""
        return TensorSpec(f"{self.name}.low", (self.width * (self.experts.per_token if self.experts else 1),))

    @property
    def width(self) -> int:
        """Columns of low."""
        return len(self.rows) * self.rank

    @property
    def widths(self) -> tuple[int, ...]:
        """Columns of the output of every adapted module."""
        return tuple(rows.end - rows.start for rows in self.rows)

    @property
    def adapted_features(self) -> int:
        """Columns of the output that adapters add to."""
        return sum(self.widths)

    def modules(self, low: Tensor, up: Tensor) -> list[tuple[AdaptedRows, Tensor, Tensor]]:
        """Every adapted module with its columns of a tensor [T, J * R] and its rows of one like B."""
        lows = low.split(self.rank, dim=1)
        return list(zip(self.rows, lows, up.split(self.widths), strict=True))

    def added_to_halves(self) -> Addend | None:
        """low @ B.T for a gated unit that reads the output; None where a module makes a part of gate or of up."""
        found, width, first = list[AddedHalf](), self.out_features // 2, 0
        for number, rows in enumerate(self.rows):
            for start in (0, width):
                if rows.start < start + width and rows.end > start:
                    if rows.start > start or rows.end < start + width:
                        return None
                    found.append(AddedHalf(start, number * self.rank, first + start - rows.start))
            first += rows.end - rows.start
        return Addend(self.low.name, self.up, self.rank, tuple(found))

    def added_to_gradient(self) -> Addend:
        """grad_low @ A for a gated unit that makes x."""
        return Addend(self.low.name, self.down, self.rank)

    def down_work(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """A product with A and so many passes over x or its gradient; of experts also one over low."""
        if self.experts is None:
            return low_work(tokens, self.in_features, self.width, passes, compute_bytes)
        rows = tokens * self.experts.per_token
        num_bytes = float(rows * (passes * self.in_features + self.width) * compute_bytes)
        return Work(grouped_flops=2.0 * rows * self.in_features * self.width, memory_bytes=num_bytes, kernels=1)

    def up_work(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """A product with B and so many passes over y or its gradient."""
        work = low_work(tokens, self.adapted_features, self.rank, passes, compute_bytes)
        return work._replace(kernels=len(self.rows))

    def norm_work(self, compute_bytes: int, of_a_module: int, others: int) -> Work:
        """Reading the adapted rows of all experts twice, for norms, by so many kernels."""
        experts = 1 if self.experts is None else self.experts.num_experts
        elements = float(experts * self.adapted_features * self.in_features)
        kernels = of_a_module * len(self.rows) + others
        return Work(2.0 * elements * self.rank, memory_bytes=2.0 * elements * compute_bytes, kernels=kernels)


def low_work(tokens: int, columns: int, ranks: int, passes: int, compute_bytes: int) -> Work:
    """A product with A or B of so many columns: it takes as long as reading or writing them."""
    num_bytes = float(passes * tokens * columns * compute_bytes)
    return Work(matmul_flops=2.0 * tokens * columns * ranks, memory_bytes=num_bytes, kernels=1)
