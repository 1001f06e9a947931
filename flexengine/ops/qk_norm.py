"""RMSNorm of queries and keys within a fused QKV row, before they are rotated: of every head by itself, or of all
heads of a token together.

Source: Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters" (query/key normalisation); per head
as in Qwen3 and Gemma 3, over the whole row as in OLMo 2. Shapes: qkv [T, (N + 2G) * H]; weights [H], or [N * H] for
queries and [G * H] for keys; statistics [T, N + G], or [T, 2]. Values pass unchanged.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes
from flexengine.ops.rmsnorm import (
    WEIGHT_GRAD_PARTIALS,
    NormStyle,
    rmsnorm_backward_input,
    rmsnorm_backward_weight,
    rmsnorm_forward,
)

Span = Literal["head", "row"]


class Part(NamedTuple):
    """Queries or keys of a row: first column, how many rows are normalised side by side, their width, first statistic,
    and the weight's name."""

    start: int
    count: int
    width: int
    statistic: int
    weight: str

    def of(self, rows: Tensor) -> Tensor:
        """[T, (N + 2G) * H] -> [T, count, width], a view."""
        return rows[:, self.start : self.start + self.count * self.width].unflatten(1, (self.count, self.width))

    def statistics(self, rstd: Tensor) -> Tensor:
        """[T, all] -> [T, count], a view."""
        return rstd[:, self.statistic : self.statistic + self.count]


class QKNorm(Op):
    """qkv with normalised queries and keys. Backward reads the row before it, and finds its statistics anew there: what
    is kept for them would be the whole row, over which the rotation that follows writes.
    """

    def __init__(
        self, name: str, x: str, y: str, num_heads: int, num_kv_heads: int, head_dim: int, span: Span,
        weights: tuple[str, str], style: NormStyle,
    ) -> None:  # fmt: skip
        self.name, self.x, self.y, self.style, self.params = name, x, y, style, weights
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        sizes = ((num_heads, head_dim), (num_kv_heads, head_dim)) if span == "head" else ((1, queries), (1, keys))
        starts = ((0, 0), (queries, sizes[0][0]))
        self.parts = tuple(
            Part(start, count, width, statistic, weight)
            for (start, statistic), (count, width), weight in zip(starts, sizes, weights, strict=True)
        )
        self.width, self.normalised = queries + 2 * keys, queries + keys
        self.statistics = TensorSpec(f"{name}_rstd", (sizes[0][0] + sizes[1][0],), "float32")
        self.inputs = (x,)
        self.outputs = (TensorSpec(y, (self.width,)),)
        self.needs_input = self.needs_weight = (x,)
        self.grad_inputs = (x,)

    def forward(self, env: OpEnv) -> None:
        x, y, (eps, offset, wide) = env.t[self.x], env.t[self.y], self.style
        for part in self.parts:
            rmsnorm_forward(part.of(x), env.p[part.weight], eps, part.of(y), None, offset=offset, wide=wide)
        y[:, self.normalised :].copy_(x[:, self.normalised :])

    def backward_input(self, env: OpEnv) -> None:
        x, rstd, grad_x, grad_y = env.t[self.x], env.t[self.statistics.name], env.g[self.x], env.g[self.y]
        assert self.x not in env.accumulate, "nothing else reads the row before the norm"
        for part in self.parts:
            operands = (part.of(grad_y), part.of(x), env.p[part.weight], part.statistics(rstd), part.of(grad_x))
            rmsnorm_backward_input(*operands, accumulate=False, offset=self.style.offset, eps=self.style.eps)
        grad_x[:, self.normalised :].copy_(grad_y[:, self.normalised :])

    def backward_weight(self, env: OpEnv) -> None:
        x, rstd, grad_y = env.t[self.x], env.t[self.statistics.name], env.g[self.y]
        for part in self.parts:
            operands = (part.of(grad_y), part.of(x), part.statistics(rstd), env.gp[part.weight])
            rmsnorm_backward_weight(*operands, env.t[f"{part.weight}_partials"], not env.first, self.style.wide)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        partials = (
            TensorSpec(f"{part.weight}_partials", (part.width,), "float32", rows=WEIGHT_GRAD_PARTIALS)
            for part in self.parts
        )
        return {"forward": (), "input": (self.statistics,), "weight": (self.statistics, *partials)}[half]

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(4 * tokens * (self.width + 2), compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.width * compute_bytes, kernels=3)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=3.0 * tokens * self.width * compute_bytes, kernels=3)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.normalised * compute_bytes, kernels=4)
