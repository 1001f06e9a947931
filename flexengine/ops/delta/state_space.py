"""Mamba-2's scan: linear attention with a state that decays and is written to without correction.

Source: Dao & Gu 2024, "Transformers are SSMs" (arXiv 2405.21060). Per head, with dt = softplus(dt_raw + dt_bias) held
within limits: S_t = exp(-exp(A_log) dt_t) S_{t-1} + dt_t B_t x_t^T, y_t = S_t^T C_t + D x_t. It is the delta rule's
tiled form without correction (`tiles`): queries are C, keys B, values x, the strength is dt. All in float32 (float64),
products of what came in bf16 in TF32. Where a limit holds dt, dt_raw has no gradient.

Shapes: xbc [T, N V + 2 G K]: values of N heads of width V, then B and C of G groups of width K, the size of the state;
N is a multiple of G; dt [T, N] are columns of another tensor; y [T, N * V]; A_log, dt_bias and D [N].
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from torch import Tensor
from torch.nn.functional import softplus

from flexengine.ops.base import OpEnv, Work, wide
from flexengine.ops.columns import Columns
from flexengine.ops.delta import plain as delta_plain
from flexengine.ops.delta.linear_attention import LinearAttention
from flexengine.ops.delta.segments import in_parts, most_slots, most_tile_heads
from flexengine.ops.delta.tiles import TILE


class Limits(NamedTuple):
    """The least and the largest dt."""

    low: float = 0.0
    high: float = float("inf")


UNLIMITED = Limits()


class StateSpaceScan(LinearAttention):
    """y = scan of (xbc, dt)."""

    def __init__(
        self, name: str, xbc: str, gates: str, y: str, sizes: tuple[int, int, int, int], dt: Columns,
        limits: Limits = UNLIMITED,
    ) -> None:  # fmt: skip
        """sizes: groups G, heads N, the size K of the state and the width V of a head. dt: its columns in `gates`."""
        super().__init__(name, xbc, gates, y, sizes, (dt,), ("A_log", "dt_bias", "D"))
        self.limits = limits

    def _steps(self, env: OpEnv) -> tuple[Tensor, Tensor, Tensor]:
        """dt_raw + dt_bias and softplus of it [T, N], and exp(A_log) [N], wide."""
        a_log, dt_bias = (wide(env.p[name]) for name in self.params[:2])
        raw = self._raw(env)[0] + dt_bias
        return raw, softplus(raw), a_log.exp()

    def _gates(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        _, dt, rate = self._steps(env)
        dt = dt.clamp_(*self.limits)
        return -rate * dt, dt

    def _skip(self, env: OpEnv) -> Tensor:
        return wide(env.p[self.params[2]])

    def _gate_grads(self, env: OpEnv, *grads: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        grad_decay, grad_dt, grad_skip = grads
        raw, dt, rate = self._steps(env)
        free = (dt >= self.limits.low) & (dt <= self.limits.high)
        grad_decay.mul_(-rate)
        grad_dt.add_(grad_decay).mul_(raw.sigmoid_()).mul_(free)
        return (grad_dt,), (grad_decay.mul_(dt.clamp_(*self.limits)), grad_dt, grad_skip)

    def _kernels(self) -> ModuleType:
        from flexengine.ops.delta import scan_kernels  # noqa: PLC0415 (Triton is imported when first used)

        return scan_kernels

    # -- costs ---------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        if not self._served(compute_bytes):
            return delta_plain.workspace_bytes(tokens, max(4, compute_bytes), self.sizes)
        sizes = in_parts(self.sizes)
        parts, n, k, v = sizes
        of_tile, of_slot = 2 * k * v + TILE * (2 + k // 32), 2 * TILE * k * parts
        held = most_tile_heads(tokens, sizes) * of_tile + most_slots(tokens, sizes) * of_slot
        return 4 * (held + 10 * tokens * n)

    def _work(self, tokens: int, products: int, states: int, rows: int, kernels: int, compute_bytes: int) -> Work:
        """products: of a tile with a state, and as many with a tile. states: passes over the states of all tiles in
        fp32; rows: over xbc; three times what kernels touch, as the delta rule's take on an H200. kernels: beside those
        on gates."""
        g, n, k, v = self.sizes
        flops = 2.0 * tokens * n * products * (k * v + TILE * (k + v) / 2)
        num_bytes = (
            4.0 * tokens * n * (states * k * v / TILE + 12) + rows * tokens * (n * v + 2 * g * k) * compute_bytes
        )
        return Work(flops, memory_bytes=num_bytes, kernels=kernels + 12)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=2, states=6, rows=9, kernels=2, compute_bytes=compute_bytes)

    def fill_window_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=1, states=0, rows=3, kernels=1, compute_bytes=compute_bytes)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._work(tokens, products=7, states=15, rows=21, kernels=6, compute_bytes=compute_bytes)
