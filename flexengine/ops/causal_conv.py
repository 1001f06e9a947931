"""Causal convolution along the tokens of a sequence, each channel by itself, then silu.

Source: Yang et al. 2024, "Gated Delta Networks" (short convolutions of queries, keys and values). With x_p the input p
tokens back, none before a sequence's first: z = bias + sum over p < W of weight[:, W - 1 - p] * x_p, y = silu(z). With
grad_z = grad_y * s * (1 + z * (1 - s)), s = sigmoid(z): grad_x gets weight[:, W - 1 - p] * grad_z from p tokens ahead,
grad_weight[:, W - 1 - p] is the sum over tokens of grad_z * x_p, grad_bias that of grad_z.

Shapes: C channels, which are columns of a fused projection, several parts one after the other; y [T, C]; weight
[C, 1, W], bias [C]. Along a sequence that is cut into chunks go the last W - 1 inputs [W - 1, C] of each.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flexengine.ops.base import Carried, Op, OpEnv, TensorSpec, Work, plain_bytes, use_kernel, wide
from flexengine.ops.columns import Columns

if TYPE_CHECKING:
    from flexengine.kernels.causal_conv import ConvChannels

WEIGHT_GRAD_PARTIALS = 32
"""Groups of tokens in the weight half on CUDA: fixed, so that the order of the sum depends on the shape alone."""


def _kernels() -> ModuleType:
    from flexengine.kernels import causal_conv  # noqa: PLC0415 (Triton is imported when first used)

    return causal_conv


class CausalConv(Op):
    """y = silu(conv(parts of x)). Backward finds z again; it writes the gradients of its own columns of x."""

    def __init__(
        self, name: str, x: str, y: str, parts: tuple[Columns, ...], taps: int, weight: str, bias: str | None = None
    ) -> None:
        self.name, self.x, self.y, self.parts, self.taps, self.weight = name, x, y, parts, taps, weight
        self.bias = bias
        self.channels = sum(part.total for part in parts)
        self.inputs = self.needs_input = self.needs_weight = self.grad_inputs = (x,)
        self.outputs = (TensorSpec(y, (self.channels,)),)
        self.params = (weight,) if bias is None else (weight, bias)
        self.sums = taps + len(self.params) - 1
        width = self.sums * self.channels
        self.partials = TensorSpec(f"{name}_partials", (width,), "float32", rows=WEIGHT_GRAD_PARTIALS)
        self.tail = f"{name}_tail"
        self.carried = (Carried(self.tail, (taps - 1, self.channels), per_chunk=True),)

    # -- the plain path ------------------------------------------------------------------------------------------------

    def _rows(self, env: OpEnv) -> Tensor:
        """The inputs [W - 1 + T, C], wide, behind those that the chunk before left, or behind zeros."""
        x, window = env.t[self.x], env.chunk.window
        own = torch.cat([part.of(x).flatten(1) for part in self.parts], dim=1)
        before = None if window is None else window.before(self.tail)
        return wide(torch.cat((own.new_zeros(self.taps - 1, self.channels) if before is None else before, own)))

    def _shifted(self, env: OpEnv, rows: Tensor, back: int) -> Tensor:
        """The inputs [T, C] of `back` tokens before; zero across the start of a sequence."""
        taken = rows[self.taps - 1 - back : len(rows) - back]
        return taken * (env.chunk.positions >= back)[:, None]

    def _weights(self, env: OpEnv) -> list[Tensor]:
        """The weights [C] for every number of tokens back."""
        return list(wide(env.p[self.weight])[:, 0].flip(1).unbind(1))

    def _sums(self, env: OpEnv, rows: Tensor) -> Tensor:
        """The sums z [T, C] before silu."""
        z = torch.zeros_like(rows[self.taps - 1 :])
        if self.bias is not None:
            z += wide(env.p[self.bias])
        for back, weight in enumerate(self._weights(env)):
            z += weight * self._shifted(env, rows, back)
        return z

    def _grad_sums(self, env: OpEnv, rows: Tensor) -> Tensor:
        """The gradient of the sums z [T, C]."""
        z = self._sums(env, rows)
        s = torch.sigmoid(z)
        return wide(env.g[self.y]) * s * (1 + z * (1 - s))

    def _plain_backward(self, env: OpEnv, before: Tensor | None, left: Tensor | None) -> None:
        """Backward in plain torch. before, left: gradients of what the chunk before left, and of what this leaves."""
        rows = self._rows(env)
        grad_z, grad_rows = self._grad_sums(env, rows), torch.zeros_like(rows)
        for back, weight in enumerate(self._weights(env)):
            part = weight * grad_z * (env.chunk.positions >= back)[:, None]
            grad_rows[self.taps - 1 - back : len(rows) - back] += part
        if left is not None:
            grad_rows[-(self.taps - 1) :] += left
        if before is not None:
            before.copy_(grad_rows[: self.taps - 1])
        found = grad_rows[self.taps - 1 :].split([part.total for part in self.parts], dim=1)
        for part, grad in zip(self.parts, found, strict=True):
            part.of(env.g[self.x]).copy_(grad.unflatten(1, (part.groups, part.width)))

    # -- the halves ----------------------------------------------------------------------------------------------------

    def _kernel_parts(self, env: OpEnv) -> list[tuple[Columns, ConvChannels]]:
        """Operands of the kernels; empty where the kernels do not serve."""
        x, window, found, first = env.t[self.x], env.chunk.window, [], 0
        if not use_kernel(x) or x.dtype == torch.float64:
            return found
        tail = None if window is None else window.before(self.tail)
        bias = None if self.bias is None else env.p[self.bias]
        for part in self.parts:
            channels = _kernels().ConvChannels(part.of(x), first, env.p[self.weight], bias, env.chunk.positions, tail)
            found.append((part, channels))
            first += part.total
        return found

    def forward(self, env: OpEnv) -> None:
        if env.chunk.window is not None:
            self.fill_window(env)
        parts = self._kernel_parts(env)
        if not parts:
            env.t[self.y].copy_(torch.nn.functional.silu(self._sums(env, self._rows(env))))
        for _, part in parts:
            _kernels().causal_conv_forward(part, env.t[self.y])

    def fill_window(self, env: OpEnv) -> None:
        window, count = env.chunk.window, self.taps - 1
        assert window is not None
        before, left = window.before(self.tail), window.left(self.tail)
        own = torch.cat([part.of(env.t[self.x][-count:]).flatten(1) for part in self.parts], dim=1)
        if len(own) < count:
            missing = count - len(own)
            own = torch.cat((own.new_zeros(missing, self.channels) if before is None else before[-missing:], own))
        left.copy_(own)

    def backward_input(self, env: OpEnv) -> None:
        window, parts = env.chunk.window, self._kernel_parts(env)
        before, left = (
            (None, None) if window is None else (window.before(self.tail, True), window.left(self.tail, True))
        )
        if not parts:
            self._plain_backward(env, before, left)
        for columns, part in parts:
            _kernels().causal_conv_backward_input(part, env.g[self.y], columns.of(env.g[self.x]), left, before)

    def backward_weight(self, env: OpEnv) -> None:
        parts = self._kernel_parts(env)
        if parts:
            partials = env.t[self.partials.name].view(-1, self.sums, self.channels)
            for _, part in parts:
                _kernels().causal_conv_backward_weight(part, env.g[self.y], partials)
            found = list(partials.sum(0))
        else:
            rows = self._rows(env)
            grad_z = self._grad_sums(env, rows)
            found = [(grad_z * self._shifted(env, rows, back)).sum(0) for back in range(self.taps)]
            found += [grad_z.sum(0)] if self.bias else []
        totals = torch.stack(found[: self.taps][::-1], dim=1)[:, None], *found[self.taps :]
        for name, total in zip(self.params, totals, strict=True):
            env.gp[name].copy_(total) if env.first else env.gp[name].add_(total)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return (self.partials,) if half == "weight" else ()

    # -- costs ---------------------------------------------------------------------------------------------------------

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        sums = 4 * (self.taps + 2) * self.channels * 4
        return sums + plain_bytes(8 * (tokens + 4 * self.taps) * self.channels, compute_bytes)

    def _passes(self, tokens: int, compute_bytes: int, passes: int, more: int = 0) -> Work:
        """passes: over all channels, as many as would take the time of the kernels on an H200, which their arithmetic
        bounds (bench/results/h200_block_qwen3.5-9b.json); more: kernels beside one for each part."""
        num_bytes = float(passes * tokens * self.channels * compute_bytes)
        return Work(memory_bytes=num_bytes, kernels=len(self.parts) + more)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._passes(tokens, compute_bytes, passes=3)

    def fill_window_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return Work(kernels=2)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._passes(tokens, compute_bytes, passes=7)

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        return self._passes(tokens, compute_bytes, passes=8, more=3)
