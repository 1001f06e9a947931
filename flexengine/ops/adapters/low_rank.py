"""Describes the low-rank adapters of one layer: scale * (x @ A.T) @ B.T, added to what its modules make.

Shapes: x [T, D], A [J * R, D], B [rows of the adapted modules, R], y [T, F], low = scale * x @ A.T [T, J * R]. A fused
projection has an adapter for each of its modules: A holds theirs one below the other, and so does B. Of experts each
has its own (ops/adapters/experts.py).
Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685; scale
as Kalajdzievski 2023 (rsLoRA) where that is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple, Self

from torch import Tensor

from flexengine.ops.base import OpEnv, TensorSpec, Work
from flexengine.ops.glu import AddedHalf, Addend
from flexengine.ops.row_range import experts_of_part, part_of


class Slices(NamedTuple):
    """What a module has: columns of the output, columns of low, and rows of B. Without an adapter it has no low."""

    columns: slice
    low: slice = slice(0, 0)
    up: slice = slice(0, 0)

    @property
    def adapted(self) -> bool:
        """Whether it has an adapter."""
        return self.low.stop > self.low.start

    def cut(self, most: int) -> Iterator[Self]:
        """Cut it into pieces of at most so many columns."""
        for start in range(self.columns.start, self.columns.stop, most):
            end, moved = min(start + most, self.columns.stop), self.up.start - self.columns.start
            yield self._replace(columns=slice(start, end), up=slice(start + moved, end + moved))


class OfExperts(NamedTuple):
    """Experts that have adapters of their own. one_tensor: one tensor holds A of all, and one holds B."""

    num_experts: int
    per_token: int
    bounds: str
    one_tensor: bool = False

    def of_call(self, env: OpEnv, num_parts: int) -> tuple[Tensor, slice]:
        """Bounds of the rows of a call's experts, and where parameters have these: one tensor of all is never cut."""
        held = experts_of_part(self.num_experts, env.part, num_parts) if self.one_tensor else slice(None)
        return part_of(env.t[self.bounds], env.part, num_parts), held


@dataclass(frozen=True)
class Adapters:
    """The adapters of the layer `name`, which change its parameter `weight` (transposed: [D, F]).

    rows: columns of the output, by module that has an adapter of its own. has_magnitude: its outputs have trained
    magnitudes as well (DoRA).
    """

    name: str
    weight: str
    in_features: int
    out_features: int
    rank: int
    scale: float
    rows: tuple[range, ...]
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
    def params(self) -> tuple[str, ...]:
        """All parameters, A first."""
        return (self.down, self.up, self.magnitude) if self.has_magnitude else (self.down, self.up)

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
        return tuple(map(len, self.rows))

    @property
    def adapted_features(self) -> int:
        """Columns of the output that adapters add to."""
        return sum(self.widths)

    @cached_property
    def modules(self) -> tuple[Slices, ...]:
        """Every adapted module, in the order of the output's columns."""
        lows, ups = range(0, self.width, self.rank), pairwise(accumulate(self.widths, initial=0))
        return tuple(
            Slices(slice(own.start, own.stop), slice(low, low + self.rank), slice(*up))
            for own, low, up in zip(self.rows, lows, ups, strict=True)
        )

    def pieces(self, most: int) -> Iterator[Slices]:
        """Cut all columns of the output, also those that no adapter changes, into pieces of at most so many."""
        reached, end = 0, self.out_features
        for module in (*self.modules, Slices(slice(end, end))):
            yield from Slices(slice(reached, module.columns.start)).cut(most)
            yield from module.cut(most)
            reached = module.columns.stop

    def added_to_halves(self) -> Addend | None:
        """low @ B.T for a gated unit that reads the output; None where a module makes a part of gate or of up."""
        width = self.out_features // 2
        halves = [piece for piece in self.pieces(width) if piece.adapted]
        if any(half.columns not in (slice(0, width), slice(width, 2 * width)) for half in halves):
            return None
        found = (AddedHalf(half.columns.start, half.low.start, half.up.start) for half in halves)
        return Addend(self.low.name, self.up, self.rank, tuple(found))

    def added_to_gradient(self) -> Addend:
        """grad_low @ A for a gated unit that makes x."""
        return Addend(self.low.name, self.down, self.rank)

    def down_work(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """A product with A and so many passes over x or its gradient; of experts also one over low."""
        rows, moved, kind = tokens, passes * self.in_features, "matmul_flops"
        if self.experts is not None:
            rows, moved, kind = tokens * self.experts.per_token, moved + self.width, "grouped_flops"
        flops = {kind: 2.0 * rows * self.in_features * self.width}
        return Work(memory_bytes=float(rows * moved * compute_bytes), kernels=1, **flops)

    def up_work(self, tokens: int, passes: int, compute_bytes: int) -> Work:
        """A product with B and so many passes over y or its gradient; tokens: those of y."""
        rows = tokens * self.adapted_features
        return Work(2.0 * rows * self.rank, memory_bytes=float(passes * rows * compute_bytes), kernels=len(self.rows))

    def norm_work(self, compute_bytes: int, of_a_module: int, others: int) -> Work:
        """Reading the adapted rows of all experts twice, for norms, by so many kernels."""
        experts = 1 if self.experts is None else self.experts.num_experts
        elements = float(experts * self.adapted_features * self.in_features)
        kernels = of_a_module * len(self.rows) + others
        return Work(2.0 * elements * self.rank, memory_bytes=2.0 * elements * compute_bytes, kernels=kernels)
