"""Gated delta rule: linear attention with a state that decays and is corrected, over packed and cut sequences.

Source: Yang et al. 2024, "Gated Delta Networks". Per value head, with keys of length one (x / sqrt(|x|^2 + 1e-6)):
S_t = exp(g_t) (I - b_t k_t k_t^T) S_{t-1} + b_t k_t v_t^T, o_t = S_t^T q_t / sqrt(K), where b = sigmoid(b_raw) and
g = -exp(A_log) * softplus(a_raw + dt_bias). All in float32 (float64), products of what came in bf16 in TF32; or what
lies between kernels in bf16, and products of it, with states in float32 where they are handed on: `storing`. How tiles
are computed: `tiles`.

Shapes: qkv [T, 2 G K + N V]: queries and keys of G heads of width K, values of N heads of width V, N a multiple of G;
the gates' b and a [T, N] are columns of another tensor; o [T, N * V]; A_log and dt_bias [N].
"""

from __future__ import annotations

from types import ModuleType
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import softplus

from flexengine.ops.base import OpEnv, Work, wide
from flexengine.ops.columns import Columns
from flexengine.ops.delta import plain as delta_plain
from flexengine.ops.delta.linear_attention import LinearAttention
from flexengine.ops.delta.segments import most_tile_heads, tile_heads
from flexengine.ops.delta.tiles import TILE


class Passes(NamedTuple):
    """Over a row of all value heads in float32, as many as would take the time of the kernels on an H200."""

    forward: int
    fill_window: int
    backward: int


PASSES = {"float32": Passes(33, 19, 85), "bfloat16": Passes(14, 12, 44)}
"""By what is stored between kernels."""


class DeltaRule(LinearAttention):
    """o = delta rule of (qkv, gates)."""

    def __init__(
        self, name: str, qkv: str, gates: str, y: str, sizes: tuple[int, int, int, int], strength: Columns,
        decay: Columns, params: tuple[str, str] = ("A_log", "dt_bias"),
    ) -> None:  # fmt: skip
        """sizes: key heads G, value heads N, and the widths K and V. strength, decay: columns of b and a in `gates`."""
        super().__init__(name, qkv, gates, y, sizes, (strength, decay), params)

    def storing(self, dtype: Literal["float32", "bfloat16"]) -> DeltaRule:
        """The same rule, which stores this type between its kernels, and multiplies it."""
        return self.changed(stores=dtype)

    def _raw_gates(self, env: OpEnv) -> tuple[Tensor, Tensor, Tensor]:
        """b, a + dt_bias [T, N] and exp(A_log) [N], wide."""
        a_log, dt_bias = (wide(env.p[name]) for name in self.params)
        strength, decay = self._raw(env)
        return strength, decay + dt_bias, a_log.exp()

    def _gates(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        strength, decay, rate = self._raw_gates(env)
        return -rate * softplus(decay), torch.sigmoid(strength)

    def _gate_grads(self, env: OpEnv, *grads: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        grad_decay, grad_strength = grads
        strength, decay, rate = self._raw_gates(env)
        strength = torch.sigmoid(strength)
        grad_b, grad_a = grad_strength * strength * (1 - strength), -grad_decay * rate * torch.sigmoid(decay)
        return (grad_b, grad_a), (grad_decay * -rate * softplus(decay), grad_a)

    def _kernels(self) -> ModuleType:
        from flexengine.ops.delta import kernels  # noqa: PLC0415 (Triton is imported when first used)

        return kernels

    # -- costs ---------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        if not self._served(compute_bytes):
            return delta_plain.workspace_bytes(tokens, max(4, compute_bytes), self.sizes)
        (_, n, k, v), width = self.sizes, self._between.itemsize
        parts, later = 4 * TILE * 2 * (2 + k // 32), TILE * (TILE - (-2 * k // self.sizes.ratio))  # once W is done with
        of_tile = (
            4 * TILE * 4 + width * (TILE * (TILE + 2 * v) + 2 * k * v) + max(width * TILE * k, width * later + parts)
        )
        return most_tile_heads(tokens, self.sizes) * of_tile + 4 * 8 * tokens * n

    def _work(self, tokens: int, products: int, passes: int, kernels: int, once: int) -> Work:
        """products: of a tile with a state; as many of a tile with a tile, which are half as large at usual widths.
        kernels: for a group of heads, beside those that run once."""
        _, n, k, v = self.sizes
        flops = 2.0 * tokens * n * products * (k * v + TILE * (k + v) / 2)
        groups = -(-tokens * n // (TILE * tile_heads(self.sizes)))
        return Work(flops, memory_bytes=4.0 * passes * tokens * n * (k + v) / 2, kernels=groups * kernels + once)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=3, passes=PASSES[self.stores].forward, kernels=3, once=20)

    def fill_window_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=2, passes=PASSES[self.stores].fill_window, kernels=2, once=20)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=12, passes=PASSES[self.stores].backward, kernels=8, once=50)
