"""Causal attention over packed sequences, with a window of earlier chunks' keys and values.

Shapes: a fused row holds N query, G key and G value heads of width H: qkv [T, (N + 2G) * H]; o [T, N * H]; lse [N, T]
in float32 (stored as T * N elements). Packed sequences are told apart by cumulative lengths; when a chunk continues a
long sequence, its queries also see all keys of the window.

Two windows meet here: the KeyValueWindow holds the keys of a long sequence's earlier chunks; a style's window, where
there is one, lets a query see the last so many keys only. A chunk then reads no more of the former than the latter
reaches.

On CUDA the keys of a window are taken a block at a time, and the parts are joined by their log-sum-exps, so that what a
call needs besides its operands does not grow with the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.attention_kernels import (
    Kernels,
    Lengths,
    can_serve,
    choose_kernels,
    kernel_key_bytes,
    kernel_workspace_bytes,
)
from flexengine.ops.attention_reference import (
    attention_backward_reference,
    attention_forward_reference,
    plain_window_bytes,
    plain_workspace_bytes,
)
from flexengine.ops.attention_style import CAUSAL, AttentionStyle
from flexengine.ops.base import Carried, KeyValueWindow, Op, OpEnv, TensorSpec, Work


def _first_call(window: KeyValueWindow, style: AttentionStyle, tokens: int) -> slice:
    """Rows that a causal call takes: a chunk's own keys, and with a window all that its queries see."""
    first = style.first_key(window.start) if style.window else window.start
    return slice(first, window.start + tokens)


def window_forward(
    kernels: Kernels, q: Tensor, window: KeyValueWindow, lengths: Lengths, style: AttentionStyle, out: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    """out [T, N, H] and lse [N, T] of queries that see the window's keys up to `start`, and causally their own."""
    own = _first_call(window, style, len(q))
    part, stats = kernels.forward(q, window.keys[own], window.values[own], lengths, style)
    lse.copy_(stats)
    if window.start == 0 or style.window:
        out.copy_(part)
        return
    from flexengine.kernels.attention_merge import attention_merge_  # noqa: PLC0415 (Triton: imported when first used)

    total = part.float().contiguous()
    for rows in window.blocks():
        part, stats = kernels.forward(q, window.keys[rows], window.values[rows], None, style)
        attention_merge_(total, lse, part.contiguous(), stats.contiguous())
    out.copy_(total)


def window_backward(
    kernels: Kernels,
    grad_out: Tensor,
    q: Tensor,
    window: KeyValueWindow,
    out: Tensor,
    lse: Tensor,
    lengths: Lengths,
    rng: Tensor,
    style: AttentionStyle,
) -> Tensor:
    """grad_q [T, N, H]; gradients of all keys and values that the queries saw are added to the window's."""
    grad_keys, grad_values = window.grad_keys, window.grad_values
    assert grad_keys is not None
    assert grad_values is not None

    def backward(rows: slice, causal: Lengths | None) -> Tensor:
        grad_q, grad_k, grad_v = kernels.backward(
            grad_out, q, window.keys[rows], window.values[rows], out, lse, causal, rng, style
        )
        grad_keys[rows] += grad_k
        grad_values[rows] += grad_v
        return grad_q

    grad_q = backward(_first_call(window, style, len(q)), lengths)
    if window.start == 0 or style.window:
        return grad_q
    total = grad_q.float()
    del grad_q
    for rows in window.blocks():
        total += backward(rows, None)
    return total


class CausalAttention(Op):
    """o, lse = attention(qkv). A chunk that continues a sequence first puts its own keys and values into the window."""

    def __init__(
        self, name: str, qkv: str, y: str, num_heads: int, num_kv_heads: int, head_dim: int,
        style: AttentionStyle = CAUSAL,
    ) -> None:  # fmt: skip
        self.style = style
        self.name, self.qkv, self.y, self.lse = name, qkv, y, f"{y}_lse"
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.inputs = (qkv,)
        self.outputs = (TensorSpec(y, (num_heads * head_dim,)), TensorSpec(self.lse, (num_heads,), "float32"))
        self.needs_input = (qkv, y, self.lse)
        self.grad_inputs = (qkv,)
        self.carried = tuple(Carried(f"{name}_{part}", (num_kv_heads, head_dim)) for part in ("keys", "values"))

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, N, H], k [T, G, H], v [T, G, H] as views of a fused row."""
        n, g, h = self.num_heads, self.num_kv_heads, self.head_dim
        heads = qkv.view(-1, n + 2 * g, h)
        return heads[:, :n], heads[:, n : n + g], heads[:, n + g :]

    def window(self, env: OpEnv) -> KeyValueWindow | None:
        """Keys, values and their gradients, where the chunk is a part of a longer sequence."""
        window = env.chunk.window
        if window is None:
            return None
        (keys, values), grads = (window.carried[c.name] for c in self.carried), window.grads
        return KeyValueWindow(
            keys, values, window.start, *(grads.get(c.name) for c in self.carried), block_tokens=window.chunk_tokens
        )

    def fill_window(self, env: OpEnv) -> None:
        """Copy this chunk's keys and values into the window at its start."""
        window = self.window(env)
        assert window is not None
        _, k, v = self.split(env.t[self.qkv])
        rows = slice(window.start, window.start + env.chunk.tokens)
        window.keys[rows].copy_(k)
        window.values[rows].copy_(v)

    def _views(self, env: OpEnv) -> tuple[Tensor, Tensor]:
        """out [T, N, H] and lse [N, T]."""
        return env.t[self.y].view(-1, self.num_heads, self.head_dim), env.t[self.lse].view(self.num_heads, -1)

    def _kernels(self, env: OpEnv, q: Tensor) -> tuple[Kernels | None, AttentionStyle]:
        """What serves, and the style without a window that hides no key of this chunk's queries."""
        window, seq_lens = env.chunk.window, env.chunk.seq_lens
        other = () if window is None else (window.start, window.chunk_tokens)
        style = self.style.within(max(seq_lens) + (0 if window is None else window.start))
        return choose_kernels(env.chunk.attention, q, seq_lens, other, style), style

    def forward(self, env: OpEnv) -> None:
        chunk, window = env.chunk, self.window(env)
        if window is not None:
            self.fill_window(env)
        q, k, v = self.split(env.t[self.qkv])
        out, lse = self._views(env)
        kernels, style = self._kernels(env, q)
        if kernels is None:
            keys, values, before = (k, v, 0) if window is None else window.seen(chunk.tokens)
            return attention_forward_reference(q, keys, values, chunk.seq_lens, before, out, lse, style)
        lengths = Lengths(chunk.seq_lens, chunk.cu_seqlens)
        if window is not None:
            return window_forward(kernels, q, window, lengths, style, out, lse)
        kernel_out, kernel_lse = kernels.forward(q, k, v, lengths, style)
        out.copy_(kernel_out)
        lse.copy_(kernel_lse)

    def backward_input(self, env: OpEnv) -> None:
        chunk, window = env.chunk, self.window(env)
        q, k, v = self.split(env.t[self.qkv])
        out, lse = self._views(env)
        grad_out = env.g[self.y].view(-1, self.num_heads, self.head_dim)
        (kernels, style), lengths = self._kernels(env, q), Lengths(chunk.seq_lens, chunk.cu_seqlens)
        rng = chunk.constants["attention_rng"]
        if window is None:
            if kernels is None:
                grads = attention_backward_reference(grad_out, q, k, v, out, lse, chunk.seq_lens, 0, style=style)
            else:
                grads = kernels.backward(grad_out, q, k, v, out, lse, lengths, rng, style)
        elif kernels is None:
            grads = self._plain_window_backward(grad_out, q, window, out, lse, style)
        else:
            grad_q = window_backward(kernels, grad_out, q, window, out, lse, lengths, rng, style)
            grads = (grad_q, *window.own_grads(chunk.tokens))
        for target, grad in zip(self.split(env.g[self.qkv]), grads, strict=True):
            target.copy_(grad)

    @staticmethod
    def _plain_window_backward(
        grad_out: Tensor, q: Tensor, window: KeyValueWindow, out: Tensor, lse: Tensor, style: AttentionStyle
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert window.grad_keys is not None
        assert window.grad_values is not None
        keys, values, before = window.seen(len(q))
        totals = window.grad_keys[: len(keys)], window.grad_values[: len(keys)]
        grads = attention_backward_reference(grad_out, q, keys, values, out, lse, (len(q),), before, totals, style)
        return (grads[0], *window.own_grads(len(q)))

    def _flops(self, tokens: int, seq_len: int) -> float:
        # two products of 2 * H FLOPs per head and visible pair; backward has five
        return 4.0 * tokens * self.num_heads * self.head_dim * self.style.mean_keys(seq_len)

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        copies = 2.0 * tokens * self.num_heads * self.head_dim * compute_bytes
        return Work(attention_forward_flops=self._flops(tokens, seq_len), memory_bytes=copies, kernels=3)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        copies = 2.0 * tokens * (self.num_heads + 2 * self.num_kv_heads) * self.head_dim * compute_bytes
        return Work(attention_backward_flops=2.5 * self._flops(tokens, seq_len), memory_bytes=copies, kernels=7)

    def fill_window_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        row = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return Work(memory_bytes=2.0 * tokens * row * compute_bytes, kernels=2)

    def _has_kernels(self, compute_bytes: int) -> bool:
        """Whether kernels serve such operands on CUDA; else it is the plain path."""
        return can_serve("flash", torch.bfloat16 if compute_bytes == 2 else torch.float32, self.head_dim, self.style)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        sizes = (tokens, self.num_heads, self.num_kv_heads, self.head_dim)
        if self._has_kernels(compute_bytes):
            return kernel_workspace_bytes(*sizes, compute_bytes)
        return plain_workspace_bytes(*sizes, max(4, compute_bytes), bool(self.style.soft_cap))

    def window_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        if not self._has_kernels(compute_bytes):
            return plain_window_bytes(max(4, compute_bytes), bool(self.style.soft_cap))
        blocks = 4 * tokens * self.num_heads * self.head_dim  # float32 sum over the blocks of keys
        if not self.style.window:
            return blocks
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim, compute_bytes)
        return max(blocks, kernel_key_bytes(self.style.window, *sizes))
