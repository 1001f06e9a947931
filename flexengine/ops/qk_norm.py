"""RMSNorm of queries and keys within a fused QKV row, before they are rotated: of every head by itself, or of all
heads of a token together.

Source: Dehghani et al. 2023, "Scaling Vision Transformers to 22 Billion Parameters" (query/key normalisation); per head
as in Qwen3 and Gemma 3, over the whole row as in OLMo 2. Shapes: qkv [T, (N + 2G) * H]; weights [H], or [N * H] for
queries and [G * H] for keys; statistics [T, N + G], or [T, 2]. Values pass unchanged, or are normalised head by head
without a weight, as in Gemma 4, where they may be the keys before their norm: the row before the norm then has none,
and is G * H columns narrower. Where queries are gated, it holds the gate of every head behind its query, and is N * H
columns wider; the gate is for a later op, which writes its gradient.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes
from flexengine.ops.columns import Columns, whole
from flexengine.ops.rmsnorm import (
    NormStyle,
    StyleAgain,
    add_partials,
    grad_partials,
    parts_bytes,
    rmsnorm_backward,
    rmsnorm_backward_input,
    rmsnorm_forward,
)

NormSpan = Literal["head", "row"]
"""What one norm covers: one head of a token, or all its query (key) heads together."""


Values = Literal["plain", "normed", "keys"]
"""What values are: a projection's result as it is or normalised, or the keys, normalised without their weight."""


class NormedColumns(NamedTuple):
    """Queries, keys or values of a row, normalised group by group.

    x, y: their columns in the row before and after the norm. statistic: index of their first statistic. weight: its
    name, None for none. again: whether another part has given these columns of x a gradient already.
    """

    x: Columns
    y: Columns
    statistic: int
    weight: str | None
    again: bool = False

    def statistics(self, rstd: Tensor) -> Tensor:
        """Select the statistics of these columns: a view [T, groups] of [T, all]."""
        return rstd[:, self.statistic : self.statistic + self.y.groups]


class QKNorm(Op):
    """Writes qkv with normalised queries and keys, and perhaps values.

    Backward reads the row before the norm and recomputes its statistics: an op is kept with all its outputs, so keeping
    the statistics would keep the whole row, which the rotation that follows overwrites.
    """

    def __init__(
        self, name: str, x: str, y: str, num_heads: int, num_kv_heads: int, head_dim: int, span: NormSpan,
        weights: tuple[str, str], style: NormStyle, gated: bool = False, values: Values = "plain",
    ) -> None:  # fmt: skip
        self.name, self.x, self.y, self.style, self.params = name, x, y, style, weights
        queries, keys = num_heads * head_dim, num_kv_heads * head_dim
        (n, by_query), (g, by_key) = (
            ((num_heads, head_dim), (num_kv_heads, head_dim)) if span == "head" else ((1, queries), (1, keys))
        )
        step = 2 * by_query if gated else by_query
        normed = (
            NormedColumns(Columns(0, n, step, by_query), Columns(0, n, by_query, by_query), 0, weights[0]),
            NormedColumns(Columns(n * step, g, by_key, by_key), Columns(queries, g, by_key, by_key), n, weights[1]),
        )
        first, last = n * step + (0 if values == "keys" else keys), queries + keys
        self.values = None if values != "plain" else (whole(first, keys), whole(last, keys))
        heads = num_kv_heads if values != "plain" else 0
        x_values, y_values = (Columns(start, heads, head_dim, head_dim) for start in (first, last))
        bare = NormedColumns(x_values, y_values, n + g, None, again=values == "keys")
        self.parts = (*normed, bare) if heads else normed
        self.width = queries + 2 * keys
        self.statistics = TensorSpec(f"{name}_rstd", (n + g + heads,), "float32")
        self.inputs = (x,)
        self.outputs = (TensorSpec(y, (self.width,)),)
        self.needs_input = self.grad_inputs = (x,)
        self.partials = tuple(
            TensorSpec(f"{part.weight}_partials", (part.y.width,), "float32", rows=grad_partials(part.y.width))
            for part in normed
        )

    def forward(self, env: OpEnv) -> None:
        x, y, (eps, offset, wide) = env.t[self.x], env.t[self.y], self.style
        for part in self.parts:
            weight, added = (None, 0.0) if part.weight is None else (env.p[part.weight], offset)
            rmsnorm_forward(part.x.of(x), weight, eps, part.y.of(y), None, offset=added, wide=wide)
        if self.values is not None:
            source, target = self.values
            target.of(y).copy_(source.of(x))

    def backward_input(self, env: OpEnv) -> None:
        x, rstd, grad_x, grad_y = env.t[self.x], env.t[self.statistics.name], env.g[self.x], env.g[self.y]
        eps, offset, wide = self.style
        for i, part in enumerate(self.parts):
            rows, grads = (part.y.of(grad_y), part.x.of(x)), (part.statistics(rstd), part.x.of(grad_x))
            if part.weight is None:
                rmsnorm_backward_input(*rows, None, *grads, accumulate=part.again, eps=eps)
            elif self.trained:
                sums = env.t[self.partials[i].name]
                rmsnorm_backward(*rows, env.p[part.weight], *grads, sums, False, StyleAgain(offset, eps, wide))
            else:
                rmsnorm_backward_input(*rows, env.p[part.weight], *grads, accumulate=False, offset=offset, eps=eps)
        if self.values is not None:
            target, source = self.values
            target.of(grad_x).copy_(source.of(grad_y))

    def backward_weight(self, env: OpEnv) -> None:
        for weight, part, sums in zip(self.params, self.parts, self.partials, strict=False):
            rows = len(env.g[self.y]) * part.y.groups
            add_partials(env.t[sums.name], rows, env.gp[weight], not env.first)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        sums = self.partials if self.trained else ()
        return {"forward": (), "input": (self.statistics, *sums), "weight": sums}[half]

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(4 * tokens * (self.width + 2), compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=2.0 * tokens * self.width * compute_bytes, kernels=3)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        sums = self._sums_bytes(tokens) if self.trained else 0.0
        return Work(memory_bytes=3.0 * tokens * self.width * compute_bytes + sums, kernels=3)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=self._sums_bytes(tokens), kernels=2)

    def _sums_bytes(self, tokens: int) -> float:
        """Bytes of the parts of the weights' gradients."""
        pairs = zip(self.parts, self.partials, strict=False)
        return sum(parts_bytes(sums, tokens * part.y.groups) for part, sums in pairs)
