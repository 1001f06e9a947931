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

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel
from flexengine.ops.columns import Columns, whole
from flexengine.ops.rmsnorm import (
    NormStyle,
    StyleAgain,
    add_partials,
    grad_partials,
    parts_bytes,
    parts_of,
    rmsnorm_backward,
    rmsnorm_backward_input,
    rmsnorm_forward,
)
from flexengine.ops.rope import RoPE

if TYPE_CHECKING:
    from flexengine.kernels.norm_rope import Norm, Rotation

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
        self.rotated, self.parts = normed, (*normed, bare) if heads else normed
        self.width = queries + 2 * keys
        self.statistics = TensorSpec(f"{name}_rstd", (n + g + heads,), "float32")
        self.inputs = (x,)
        self.outputs = (TensorSpec(y, (self.width,)),)
        self.needs_input = self.grad_inputs = (x,)
        self.partials = tuple(
            TensorSpec(f"{part.weight}_partials", (part.y.width,), "float32", rows=grad_partials(part.y.width))
            for part in normed
        )

    def with_next(self, following: Op) -> Op | None:
        """With the rotation that reads the row, of queries and keys alike."""
        if isinstance(following, RoPE) and following.after_norm and following.x == self.y:
            return NormedRoPE(self, following)
        return None

    def forward(self, env: OpEnv) -> None:
        x, y, (eps, offset, wide) = env.t[self.x], env.t[self.y], self.style
        for part in self.rotated:
            weight = None if part.weight is None else env.p[part.weight]
            rmsnorm_forward(part.x.of(x), weight, eps, part.y.of(y), None, offset=offset, wide=wide)
        self.write_values(x, y)

    def write_values(self, x: Tensor, y: Tensor) -> None:
        """Write the values of y."""
        for part in self.parts[2:]:
            rmsnorm_forward(part.x.of(x), None, self.style.eps, part.y.of(y), None, wide=self.style.wide)
        if self.values is not None:
            source, target = self.values
            target.of(y).copy_(source.of(x))

    def backward_input(self, env: OpEnv) -> None:
        x, rstd, grad_x, grad_y = env.t[self.x], env.t[self.statistics.name], env.g[self.x], env.g[self.y]
        eps, offset, wide = self.style
        for part, sums in zip(self.rotated, self.partials, strict=True):
            assert part.weight is not None
            rows, grads = (part.y.of(grad_y), part.x.of(x)), (part.statistics(rstd), part.x.of(grad_x))
            operands = (*rows, env.p[part.weight], *grads)
            if self.trained:
                rmsnorm_backward(*operands, env.t[sums.name], False, StyleAgain(offset, eps, wide))
            else:
                rmsnorm_backward_input(*operands, accumulate=False, offset=offset, eps=eps)
        self.write_values_gradient(env)

    def write_values_gradient(self, env: OpEnv) -> None:
        """Write what the values give the gradient of x, after queries and keys have given theirs."""
        x, rstd, grad_x, grad_y = env.t[self.x], env.t[self.statistics.name], env.g[self.x], env.g[self.y]
        for part in self.parts[2:]:
            rows, grads = (part.y.of(grad_y), part.x.of(x)), (part.statistics(rstd), part.x.of(grad_x))
            rmsnorm_backward_input(*rows, None, *grads, accumulate=part.again, eps=self.style.eps)
        if self.values is not None:
            target, source = self.values
            target.of(grad_x).copy_(source.of(grad_y))

    def backward_weight(self, env: OpEnv) -> None:
        for weight, part, sums in zip(self.params, self.parts, self.partials, strict=False):
            rows = env.chunk.tokens * part.y.groups
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


class NormedRoPE(Op):
    """The norm and the rotation of queries and keys, in one pass each way."""

    def __init__(self, norm: QKNorm, rope: RoPE) -> None:
        # Both work on the tensor that the rotation gives: nothing else reads the one between them.
        self.norm, self.rope, self.name = norm.changed(y=rope.y), rope.changed(x=rope.y), norm.name
        self.inputs, self.outputs, self.params = norm.inputs, rope.outputs, norm.params
        self.needs_input, self.grad_inputs, self.trained = norm.needs_input, norm.grad_inputs, norm.trained

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return self.norm.scratch(half)

    def forward(self, env: OpEnv) -> None:
        norm, x, y = self.norm, env.t[self.norm.x], env.t[self.norm.y]
        if not use_kernel(y) or y.dtype == torch.float64:
            norm.forward(env)
            return self.rope.forward(env)
        from flexengine.kernels import norm_rope  # noqa: PLC0415 (Triton is imported when first used)

        for part in norm.rotated:
            norm_rope.norm_rope_forward(part.x.of(x), part.y.of(y), self._norm_of(part, env), self._rotation(env))
        norm.write_values(x, y)

    def backward_input(self, env: OpEnv) -> None:
        norm, x, grad_y, grad_x = self.norm, env.t[self.norm.x], env.g[self.norm.y], env.g[self.norm.x]
        if not use_kernel(grad_y) or grad_y.dtype == torch.float64:
            self.rope.backward_input(env)
            return norm.backward_input(env)
        from flexengine.kernels import norm_rope  # noqa: PLC0415

        for part, sums in zip(norm.rotated, norm.partials, strict=True):
            rows = env.chunk.tokens * part.y.groups
            own = parts_of(env.t[sums.name], rows) if self.trained else None
            operands = (part.y.of(grad_y), part.x.of(x), part.x.of(grad_x), self._norm_of(part, env))
            norm_rope.norm_rope_backward(*operands, self._rotation(env), own)
        norm.write_values_gradient(env)

    def backward_weight(self, env: OpEnv) -> None:
        self.norm.backward_weight(env)

    def _norm_of(self, part: NormedColumns, env: OpEnv) -> Norm:
        from flexengine.kernels.norm_rope import Norm  # noqa: PLC0415

        assert part.weight is not None
        eps, offset, wide = self.norm.style
        return Norm(env.p[part.weight], eps, offset, wide)

    def _rotation(self, env: OpEnv) -> Rotation:
        from flexengine.kernels.norm_rope import Rotation  # noqa: PLC0415

        rope, chunk = self.rope, env.chunk
        inv_freq = chunk.constants[rope.table]
        return Rotation(chunk.positions, inv_freq, rope.scaling, rope.interleaved, rope.head_dim)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return max(op.workspace_bytes(tokens, compute_bytes) for op in (self.norm, self.rope))

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self.norm.forward_work(tokens, seq_len, compute_bytes)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self.norm.backward_input_work(tokens, seq_len, compute_bytes)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self.norm.backward_weight_work(tokens, seq_len, compute_bytes)
