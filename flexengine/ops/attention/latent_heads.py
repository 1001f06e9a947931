"""Puts queries, keys and values of latent attention side by side in one row, and rotates the parts with a position.

Source: DeepSeek-AI 2024, "DeepSeek-V2", section 2.1 (multi-head latent attention, decoupled rotary embedding): a head's
query is (query without position, rotated query), its key (key of the latent, rotated key); the rotated key is one for
all heads, so its gradient is the sum over them. Rotation as in `flexengine.ops.rope`. Pairs stay where they lie: where
the reference puts interleaved pairs apart, it does so in queries and keys alike, which leaves their products.

Shapes: N heads, P columns of a head without position, R rotated ones, H = P + R, V value columns, C of the latent:
q [T, N * H]; kv [T, N * (P + V)], keys before values in each head; shared [T, C + R], the key in its last R columns;
row [T, N * (2H + V)] with all queries first, then all keys, then all values.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel, wide
from flexengine.ops.rope import rope_


class HeadSizes(NamedTuple):
    """Sizes of the heads of a row: num_heads N, nope_dim P without position, rope_dim R rotated, value_dim V."""

    num_heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int

    @property
    def head_dim(self) -> int:
        """Columns H of a head of queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def query_width(self) -> int:
        """Columns of all queries."""
        return self.num_heads * self.head_dim

    @property
    def latent_width(self) -> int:
        """Columns of what comes from the latent."""
        return self.num_heads * (self.nope_dim + self.value_dim)

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.num_heads * (2 * self.head_dim + self.value_dim)

    def split(self, row: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, H], keys [T, N, H] and values [T, N, V] as views of a row."""
        heads, width = self.num_heads, self.query_width
        queries, keys, values = row[:, :width], row[:, width : 2 * width], row[:, 2 * width :]
        return queries.unflatten(1, (heads, -1)), keys.unflatten(1, (heads, -1)), values.unflatten(1, (heads, -1))


class Rotation(NamedTuple):
    """Positions [T] int32, frequencies [R/2], what multiplies cos and sin, and how pairs lie."""

    positions: Tensor
    inv_freq: Tensor
    scaling: float
    interleaved: bool

    def rotate(self, x: Tensor, inverse: bool) -> None:
        """Rotate x [T, heads, R] in place."""
        rope_(x, self.positions, self.inv_freq, self.scaling, x.shape[1], inverse, self.interleaved)


def latent_heads_forward(
    q: Tensor, kv: Tensor, shared: Tensor, rotation: Rotation, heads: HeadSizes, row: Tensor
) -> None:
    """Write the row from q, kv and the key that all heads share."""
    if use_kernel(q) and q.dtype != torch.float64:
        from flexengine.kernels import latent_heads  # noqa: PLC0415 (Triton is imported when first used)

        return latent_heads.latent_heads_forward(q, kv, shared, *rotation, heads, row)
    nope, (queries, keys, values) = heads.nope_dim, heads.split(row)
    queries.copy_(q.unflatten(1, (heads.num_heads, -1)))
    rotation.rotate(queries[..., nope:], inverse=False)
    from_latent = kv.unflatten(1, (heads.num_heads, -1))
    keys[..., :nope].copy_(from_latent[..., :nope])
    values.copy_(from_latent[..., nope:])
    key = keys[:, :1, nope:]
    key.copy_(shared[:, None, -heads.rope_dim :])
    rotation.rotate(key, inverse=False)
    keys[:, 1:, nope:] = key


def latent_heads_backward(
    grad_row: Tensor, rotation: Rotation, heads: HeadSizes, grads: tuple[Tensor, Tensor, Tensor], accumulate: bool
) -> None:
    """Gradients of q, kv and shared from that of the row. accumulate: the last one holds a value, and the key's
    gradient is added to it; else its first C columns become zero."""
    if use_kernel(grad_row) and grad_row.dtype != torch.float64:
        from flexengine.kernels import latent_heads  # noqa: PLC0415

        return latent_heads.latent_heads_backward(grad_row, *rotation, heads, *grads, accumulate)
    (grad_q, grad_kv, grad_shared), nope = grads, heads.nope_dim
    grad_queries, grad_keys, grad_values = heads.split(grad_row)
    queries, from_latent = (x.unflatten(1, (heads.num_heads, -1)) for x in (grad_q, grad_kv))
    queries.copy_(grad_queries)
    rotation.rotate(queries[..., nope:], inverse=True)
    from_latent[..., :nope].copy_(grad_keys[..., :nope])
    from_latent[..., nope:].copy_(grad_values)
    total = wide(grad_keys[..., nope:]).sum(1, keepdim=True)
    rotation.rotate(total, inverse=True)
    if not accumulate:
        grad_shared.zero_()
    grad_shared[:, -heads.rope_dim :] += total[:, 0]


class LatentHeads(Op):
    """qkv [T, N * (2H + V)], the row that attention reads. Backward needs the positions only.

    table: the constant of the model that holds the frequencies.
    """

    def __init__(
        self, name: str, parts: tuple[str, str, str], y: str, heads: HeadSizes, latent_dim: int, scaling: float,
        interleaved: bool, table: str = "inv_freq",
    ) -> None:  # fmt: skip
        self.name, self.inputs, self.y, self.heads, self.table = name, parts, y, heads, table
        self.latent_dim, self.scaling, self.interleaved = latent_dim, scaling, interleaved
        self.outputs = (TensorSpec(y, (heads.width,)),)
        self.grad_inputs = parts

    def _rotation(self, env: OpEnv) -> Rotation:
        inv_freq = env.chunk.constants[self.table]
        return Rotation(env.chunk.positions, inv_freq, self.scaling, self.interleaved)

    def forward(self, env: OpEnv) -> None:
        q, kv, shared = (env.t[name] for name in self.inputs)
        latent_heads_forward(q, kv, shared, self._rotation(env), self.heads, env.t[self.y])

    def backward_input(self, env: OpEnv) -> None:
        q, kv, shared = self.inputs
        assert not {q, kv} & env.accumulate, "nothing else reads a head's parts"
        grads = (env.g[q], env.g[kv], env.g[shared])
        latent_heads_backward(env.g[self.y], self._rotation(env), self.heads, grads, shared in env.accumulate)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return plain_bytes(4 * tokens * (self.heads.num_heads + 2) * self.heads.rope_dim, compute_bytes)

    def _work(self, tokens: int, compute_bytes: int, shared: int) -> Work:
        h = self.heads
        columns = h.query_width + h.latent_width + h.width + shared
        return Work(memory_bytes=1.0 * tokens * columns * compute_bytes, kernels=1)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, compute_bytes, self.heads.rope_dim)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, compute_bytes, self.latent_dim + self.heads.rope_dim)
