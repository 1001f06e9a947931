"""Rotary position embedding, in place on the query and key heads of a fused QKV row.

Source: Su et al. 2021, "RoFormer"; rotate-half layout as in Hugging Face. For the pair (a, b) = (x[i], x[i + R/2]) and
angle p * inv_freq[i]: (a cos - b sin, b cos + a sin), times `scaling` (yarn's attention factor). Interleaved pairs are
(x[2i], x[2i + 1]), as in the paper. Backward is the transpose: the same with the sign of sin turned. The frequencies
are the model's business (`flexengine.models.rope`).
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from flexengine.ops.base import Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel


def rope_(
    x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, num_rotated_heads: int, inverse: bool,
    interleaved: bool = False,
) -> None:  # fmt: skip
    """Rotate the first `num_rotated_heads` heads of x [T, heads, H] in place (inverse: the backward).

    positions [T] int32, inv_freq [R/2] float32 with R <= H; the other H - R columns stay as they are.
    """
    if use_kernel(x) and x.dtype != torch.float64:
        from flexengine.kernels import rope  # noqa: PLC0415 (Triton is imported when first used)

        return rope.rope_(x, positions, inv_freq, scaling, num_rotated_heads, inverse, interleaved)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = inv_freq.numel()
    angle = positions.to(wide)[:, None] * inv_freq.to(wide)[None, :]
    cos, sin = (angle.cos() * scaling)[:, None, :], (angle.sin() * scaling)[:, None, :]
    if inverse:
        sin = -sin
    rotated = x[:, :num_rotated_heads, : 2 * half]
    first, second = (rotated[..., ::2], rotated[..., 1::2]) if interleaved else rotated.chunk(2, dim=-1)
    a, b = first.to(wide), second.to(wide)
    new_a, new_b = a * cos - b * sin, b * cos + a * sin  # both before either is stored: a and b may be views
    first.copy_(new_a)
    second.copy_(new_b)


class RoPE(Op):
    """qkv <- qkv with its N query and G key heads rotated; values untouched. Backward needs the positions only.

    table: the constant of the model that holds the frequencies. interleaved: how pairs lie.
    """

    after_norm = False
    """Whether the norm before it rotates as well (`NormedRoPE`): then there are no passes of its own."""

    def __init__(
        self, name: str, x: str, y: str, num_heads: int, num_kv_heads: int, head_dim: int, scaling: float,
        table: str = "inv_freq", interleaved: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.x, self.y, self.table, self.interleaved = name, x, y, table, interleaved
        self.num_heads, self.num_kv_heads, self.head_dim, self.scaling = num_heads, num_kv_heads, head_dim, scaling
        self.inputs = (x,)
        self.outputs = (TensorSpec(y, ((num_heads + 2 * num_kv_heads) * head_dim,)),)
        self.grad_inputs = (x,)
        self.in_place = (x, y)

    def alone(self) -> Self:
        return self.changed(after_norm=False) if self.after_norm else self

    def _rotate(self, tensor: Tensor, env: OpEnv, inverse: bool) -> None:
        heads = tensor.view(env.chunk.tokens, -1, self.head_dim)
        inv_freq = env.chunk.constants[self.table]
        rotated = self.num_heads + self.num_kv_heads
        rope_(heads, env.chunk.positions, inv_freq, self.scaling, rotated, inverse, self.interleaved)

    def forward(self, env: OpEnv) -> None:
        self._rotate(env.t[self.y], env, inverse=False)

    def backward_input(self, env: OpEnv) -> None:
        self._rotate(env.g[self.x], env, inverse=True)

    def _bytes(self, tokens: int, compute_bytes: int) -> float:
        passes = 0.0 if self.after_norm else 2.0
        return passes * tokens * (self.num_heads + self.num_kv_heads) * self.head_dim * compute_bytes

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        heads = self.num_heads + self.num_kv_heads
        return plain_bytes(2 * tokens * (heads + 2) * self.head_dim, compute_bytes)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=self._bytes(tokens, compute_bytes), kernels=0 if self.after_norm else 1)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(memory_bytes=self._bytes(tokens, compute_bytes), kernels=0 if self.after_norm else 1)


class RoPEInAxes(RoPE):
    """The same where each frequency rotates by the position in one of several axes: a call for each axis.

    The table of an axis, `table.0` and so on, has zeros in place of the frequencies of others, and a rotation by an
    angle of zero changes no bit of a number. Scaling would be applied by every call, so there is none.
    """

    def __init__(self, rope: RoPE, num_axes: int) -> None:
        assert rope.scaling == 1.0, "each axis would scale"
        super().__init__(rope.name, rope.x, rope.y, rope.num_heads, rope.num_kv_heads, rope.head_dim, 1.0, rope.table)
        self.interleaved, self.num_axes = rope.interleaved, num_axes

    def _rotate(self, tensor: Tensor, env: OpEnv, inverse: bool) -> None:
        heads, axes = tensor.view(env.chunk.tokens, -1, self.head_dim), env.chunk.axes
        assert axes is not None, "batches of this model have positions in several axes"
        for axis in range(self.num_axes):
            inv_freq = env.chunk.constants[table_of_axis(self.table, axis)]
            rope_(heads, axes[axis], inv_freq, 1.0, self.num_heads + self.num_kv_heads, inverse, self.interleaved)

    def _bytes(self, tokens: int, compute_bytes: int) -> float:
        return self.num_axes * super()._bytes(tokens, compute_bytes)


def table_of_axis(table: str, axis: int) -> str:
    """Name of the constant that holds the frequencies of one axis."""
    return f"{table}.{axis}"
