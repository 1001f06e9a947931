"""Causal attention over packed sequences, with a window of earlier chunks' keys and values.

Shapes: a fused row holds N query and G key heads of width H and G value heads of width V, by default H: qkv
[T, (N + G) * H + G * V]; o [T, N * V]; lse [N, T] in float32 (stored as T * N elements). Packed
sequences are told apart by cumulative lengths; when a chunk continues a long sequence, its queries also see all keys of
the window.

Two windows meet here: the KeyValueWindow holds the keys of a long sequence's earlier chunks; a style's window, where
there is one, lets a query see the last so many keys only. A chunk then reads no more of the former than the latter
reaches.

Values may be narrower than keys (V < H): the plain path and our own kernels take them as they are.

Our own kernels take all keys of a window in one call. Other kernels take them a block at a time, and the parts are
joined by their log-sum-exps, so that what a call needs besides its operands does not grow with the sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.attention.choice import KernelName, order_of
from flexengine.ops.attention.kernels import (
    OWN,
    Kernels,
    Lengths,
    Results,
    RowGradients,
    Rows,
    can_serve,
    choose_kernels,
    kernel_key_bytes,
    kernel_workspace_bytes,
    own_workspace_bytes,
)
from flexengine.ops.attention.key_value_window import SUM_BYTES, KeyValueWindow, block_tokens_of, work_of_blocks
from flexengine.ops.attention.reference import (
    attention_backward_reference,
    attention_forward_reference,
    plain_window_bytes,
    plain_workspace_bytes,
)
from flexengine.ops.attention.sinks import PARTIALS, add_sinks, sink_gradients
from flexengine.ops.attention.style import CAUSAL, AttentionShape, AttentionStyle
from flexengine.ops.base import (
    FLOAT64_BYTES,
    Carried,
    Op,
    OpEnv,
    TensorSpec,
    Window,
    Work,
    in_plain_width,
)


def _seen_keys(window: KeyValueWindow, style: AttentionStyle, tokens: int) -> slice:
    """Rows of all keys that a chunk's queries see."""
    return slice(style.first_key(window.start), window.start + tokens)


def _first_call(window: KeyValueWindow, style: AttentionStyle, tokens: int) -> slice:
    """Rows that a causal call takes: a chunk's own keys, and with a style's window all that its queries see."""
    return _seen_keys(window, style, tokens) if style.window else slice(window.start, window.start + tokens)


def _window_rows(q: Tensor, window: KeyValueWindow, style: AttentionStyle) -> Rows:
    """Queries with all keys and values of the window that they see."""
    seen = _seen_keys(window, style, len(q))
    return Rows(q, window.keys[seen], window.values[seen])


def window_forward(
    kernels: Kernels, q: Tensor, window: KeyValueWindow, lengths: Lengths, style: AttentionStyle, out: Tensor,
    lse: Tensor,
) -> None:  # fmt: skip
    """out [T, N, V] and lse [N, T] of queries that see the window's keys up to `start`, and causally their own."""
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
    kernels: Kernels, grad_out: Tensor, q: Tensor, window: KeyValueWindow, results: Results, lengths: Lengths,
    rng: Tensor, style: AttentionStyle,
) -> Tensor:  # fmt: skip
    """grad_q [T, N, H]; gradients of all keys and values that the queries saw are added to the window's."""
    grad_keys, grad_values = window.grad_keys, window.grad_values
    assert grad_keys is not None
    assert grad_values is not None

    def backward(rows: slice, causal: Lengths | None) -> Tensor:
        seen = Rows(q, window.keys[rows], window.values[rows])
        grad_q, grad_k, grad_v = kernels.backward(grad_out, seen, results, causal, rng, style)
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
    """o, lse = attention(qkv). A chunk that continues a sequence first puts its own keys and values into the window.

    A style with sinks has them as the parameter `sinks` [N]: they are added to what the keys of a row come to, and
    backward of the kernels, which reads o and lse with them, knows nothing else of them.
    """

    def __init__(
        self, name: str, qkv: str, y: str, num_heads: int, num_kv_heads: int, head_dim: int,
        style: AttentionStyle = CAUSAL, value_dim: int | None = None,
    ) -> None:  # fmt: skip
        self.style, self.value_dim = style, value_dim or head_dim
        assert self.value_dim <= head_dim, "values may be narrower than keys, not wider"
        self.name, self.qkv, self.y, self.lse = name, qkv, y, f"{y}_lse"
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.inputs = (qkv,)
        self.outputs = (TensorSpec(y, (num_heads * self.value_dim,)), TensorSpec(self.lse, (num_heads,), "float32"))
        self.needs_input = (qkv, y, self.lse)
        self.grad_inputs = (qkv,)
        widths = {"keys": head_dim, "values": self.value_dim}
        self.carried = tuple(Carried(f"{name}_{part}", (num_kv_heads, width)) for part, width in widths.items())
        self.params = ("sinks",) if style.sinks else ()
        self.needs_weight = (y, self.lse) if style.sinks else ()
        self.partials = TensorSpec(f"{name}_partials", (num_heads,), "float32", rows=PARTIALS)

    @property
    def shape(self) -> AttentionShape:
        """What its speed depends on."""
        members, style = self.num_heads // self.num_kv_heads, self.style
        return AttentionShape(members, self.head_dim, self.value_dim, style.window, style.soft_cap > 0)

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T, N, H], k [T, G, H], v [T, G, V] as views of a fused row."""
        n, g, h = self.num_heads, self.num_kv_heads, self.head_dim
        heads = qkv[:, : (n + g) * h].unflatten(1, (n + g, h))
        return heads[:, :n], heads[:, n:], qkv[:, (n + g) * h :].unflatten(1, (g, self.value_dim))

    def window(self, env: OpEnv) -> KeyValueWindow | None:
        """Keys, values and their gradients, where the chunk is a part of a longer sequence."""
        window = env.chunk.window
        if window is None:
            return None
        (keys, values), grads = (window.carried[c.name] for c in self.carried), window.grads
        block_tokens = block_tokens_of(window.chunk_tokens)
        return KeyValueWindow(
            keys, values, window.start, *(grads.get(c.name) for c in self.carried), block_tokens=block_tokens
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
        """out [T, N, V] and lse [N, T]."""
        return env.t[self.y].view(-1, self.num_heads, self.value_dim), env.t[self.lse].view(self.num_heads, -1)

    def _kernels(self, env: OpEnv, q: Tensor) -> tuple[Kernels | None, AttentionStyle]:
        """What serves, and the style without a window that hides no key of this chunk's queries."""
        window, seq_lens = env.chunk.window, env.chunk.seq_lens
        style = self.style.within(max(seq_lens) + (0 if window is None else window.start))
        return self.serving(env, q, seq_lens, style, window), style

    def serving(
        self, env: OpEnv, q: Tensor, seq_lens: tuple[int, ...], style: AttentionStyle, window: Window | None = None
    ) -> Kernels | None:
        """What serves queries of sequences of these lengths, the first of which may continue one in a window."""
        other = () if window is None else (window.start, window.chunk_tokens)
        longest = max(seq_lens) + (0 if window is None else window.start)
        preferred = (*order_of(env.chunk.attention_choices, self.shape, longest), env.chunk.attention)
        return choose_kernels(preferred, q, seq_lens, other, style, self.value_dim)

    def forward(self, env: OpEnv) -> None:
        out, lse = self._views(env)
        window = self.window(env)
        if window is not None:
            self.fill_window(env)
        q, k, v = self.split(env.t[self.qkv])
        kernels, style = self._kernels(env, q)
        lengths, sinks = Lengths(env.chunk.seq_lens, env.chunk.cu_seqlens), env.p["sinks"] if self.style.sinks else None
        if kernels is OWN:
            rows = Rows(q, k, v) if window is None else _window_rows(q, window, style)
            OWN.attend(rows, lengths, style, Results(out, lse), sinks)
            return
        if kernels is None:
            keys, values, before = (k, v, 0) if window is None else window.seen(env.chunk.tokens)
            attention_forward_reference(q, keys, values, env.chunk.seq_lens, before, out, lse, style)
        elif window is not None:
            window_forward(kernels, q, window, lengths, style, out, lse)
        else:
            kernel_out, kernel_lse = kernels.forward(q, k, v, lengths, style)
            out.copy_(kernel_out)
            lse.copy_(kernel_lse)
        if sinks is not None:
            add_sinks(out, lse, sinks)

    def fill_caches(self, env: OpEnv, caches: list[list[Tensor]]) -> None:
        """Copy the keys and values of whole sequences into the beginning of caches, as of `decode`."""
        lengths, (_, k, v) = list(env.chunk.seq_lens), self.split(env.t[self.qkv])
        for rows, part in zip((k, v), caches, strict=True):
            own = [cache[:length] for cache, length in zip(part, lengths, strict=True)]
            torch._foreach_copy_(own, list(rows.split(lengths)))  # pyright: ignore[reportPrivateImportUsage]

    def decodes(self, env: OpEnv) -> bool:
        """Whether new tokens of many sequences are computed in one call."""
        qkv = env.t[self.qkv]
        return qkv.is_cuda and can_serve("triton", qkv.dtype, self.head_dim, self.style, self.value_dim)

    def decode(self, env: OpEnv, rows: Tensor, starts: Tensor, caches: list[list[Tensor]]) -> None:
        """Attend from rows [B] of the chunk, the tokens after `starts` [B] others of a sequence each, which its cache
        holds, and put theirs behind those. caches: keys [*, G, H] of all sequences, then values [*, G, V]."""
        from flexengine.kernels import attention_decode as kernel  # noqa: PLC0415 (Triton is imported when first used)
        from flexengine.kernels.attention_tilings import Scoring  # noqa: PLC0415

        addresses = torch.tensor([[cache.data_ptr() for cache in part] for part in caches], dtype=torch.int64)
        style, new = self.style, kernel.NewTokens(rows, starts, addresses.to(rows.device))
        heads = kernel.Heads(self.num_heads, self.num_kv_heads, self.head_dim, self.value_dim)
        scoring = Scoring(style.scale_of(self.head_dim), style.soft_cap, style.window)
        sinks = env.p["sinks"] if style.sinks else None
        kernel.attention_decode(env.t[self.qkv], new, heads, scoring, env.t[self.y], sinks)

    def backward_input(self, env: OpEnv) -> None:
        chunk, window = env.chunk, self.window(env)
        rows, results = Rows(*self.split(env.t[self.qkv])), Results(*self._views(env))
        grad_out = env.g[self.y].view(-1, self.num_heads, self.value_dim)
        (kernels, style), lengths = self._kernels(env, rows.q), Lengths(chunk.seq_lens, chunk.cu_seqlens)
        targets, rng = self.split(env.g[self.qkv]), chunk.constants["attention_rng"]
        if kernels is OWN:
            return self._own_backward(rows, window, lengths, style, results, grad_out, targets)
        if window is None:
            if kernels is None:
                grads = attention_backward_reference(grad_out, rows, results, chunk.seq_lens, 0, style=style)
            else:
                grads = kernels.backward(grad_out, rows, results, lengths, rng, style)
        elif kernels is None:
            grads = self._plain_window_backward(grad_out, rows.q, window, results, style)
        else:
            grad_q = window_backward(kernels, grad_out, rows.q, window, results, lengths, rng, style)
            grads = (grad_q, *window.own_grads(chunk.tokens))
        for target, grad in zip(targets, grads, strict=True):
            target.copy_(grad)

    @staticmethod
    def _own_backward(
        rows: Rows, window: KeyValueWindow | None, lengths: Lengths, style: AttentionStyle, results: Results,
        grad_out: Tensor, targets: tuple[Tensor, Tensor, Tensor],
    ) -> None:  # fmt: skip
        """Write the gradients of a fused row; those of a window's keys and values are added to its sums."""
        if window is None:
            OWN.differentiate(rows, lengths, style, results, grad_out, RowGradients(Rows(*targets)))
            return
        assert window.grad_keys is not None
        assert window.grad_values is not None
        seen = _seen_keys(window, style, len(rows.q))
        grads = Rows(targets[0], window.grad_keys[seen], window.grad_values[seen])
        OWN.differentiate(
            _window_rows(rows.q, window, style), lengths, style, results, grad_out, RowGradients(grads, add=True)
        )
        for target, grad in zip(targets[1:], window.own_grads(len(rows.q)), strict=True):
            target.copy_(grad)

    @staticmethod
    def _plain_window_backward(
        grad_out: Tensor, q: Tensor, window: KeyValueWindow, results: Results, style: AttentionStyle
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert window.grad_keys is not None
        assert window.grad_values is not None
        keys, values, before = window.seen(len(q))
        totals = window.grad_keys[: len(keys)], window.grad_values[: len(keys)]
        rows = Rows(q, keys, values)
        grads = attention_backward_reference(grad_out, rows, results, (len(q),), before, totals, style)
        return (grads[0], *window.own_grads(len(q)))

    def backward_weight(self, env: OpEnv) -> None:
        out, lse = self._views(env)
        partials = env.t[self.partials.name]
        sink_gradients(env.g[self.y].view_as(out), out, lse, env.p["sinks"], env.gp["sinks"], partials, env.first)

    def scratch(self, half: str) -> tuple[TensorSpec, ...]:
        return (self.partials,) if half == "weight" and self.style.sinks else ()

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        flops = tokens * self.num_heads * self.shape.forward_flops(seq_len)
        if self._own_only(compute_bytes):
            return Work(attention_forward_flops=flops, kernels=1)
        columns = self.num_heads * self.value_dim * (2 if self.style.sinks else 1)
        moved, kernels = 2.0 * tokens * columns * compute_bytes, 8 if self.style.sinks else 3
        work = Work(attention_forward_flops=flops, memory_bytes=moved, kernels=kernels)
        if self.style.window:
            return work
        return work.plus(work_of_blocks(tokens, seq_len, self.num_heads * self.value_dim, 0, compute_bytes))

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        flops = tokens * self.num_heads * self.shape.backward_flops(seq_len)
        if self._own_only(compute_bytes):
            return Work(attention_backward_flops=flops, kernels=3)
        columns = (self.num_heads + self.num_kv_heads) * self.head_dim + self.num_kv_heads * self.value_dim
        work = Work(attention_backward_flops=flops, memory_bytes=2.0 * tokens * columns * compute_bytes, kernels=7)
        if self.style.window:
            return work
        keys = self.num_kv_heads * (self.head_dim + self.value_dim)
        return work.plus(work_of_blocks(tokens, seq_len, self.num_heads * self.head_dim, keys, compute_bytes))

    def backward_weight_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        if not self.style.sinks:
            return Work()
        return Work(memory_bytes=2.0 * tokens * self.num_heads * self.head_dim * compute_bytes, kernels=3)

    def fill_window_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        row = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        return Work(memory_bytes=2.0 * tokens * row * compute_bytes, kernels=2)

    def _serves(self, kernels: KernelName, compute_bytes: int) -> bool:
        """Whether such kernels serve on CUDA."""
        dtype = torch.bfloat16 if compute_bytes == 2 else torch.float32
        return can_serve(kernels, dtype, self.head_dim, self.style, self.value_dim)

    def _own_only(self, compute_bytes: int) -> bool:
        """Whether no kernels but our own serve, which need no copies of operands or results."""
        return self._serves("triton", compute_bytes) and not self._serves("flash", compute_bytes)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        sizes = (tokens, self.num_heads, self.num_kv_heads, self.head_dim)
        if self._own_only(compute_bytes):
            return own_workspace_bytes(tokens, self.num_heads)
        if self._serves("flash", compute_bytes):
            return kernel_workspace_bytes(*sizes, compute_bytes)
        return plain_workspace_bytes(*sizes, max(4, compute_bytes), bool(self.style.soft_cap))

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        sizes = (tokens, self.num_heads, self.num_kv_heads, self.head_dim)
        return in_plain_width(plain_workspace_bytes(*sizes, FLOAT64_BYTES, bool(self.style.soft_cap)), compute_bytes)

    def plain_window_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        return in_plain_width(plain_window_bytes(FLOAT64_BYTES, bool(self.style.soft_cap)), compute_bytes)

    def window_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        if self._own_only(compute_bytes):
            return 0
        if not self._serves("flash", compute_bytes):
            return plain_window_bytes(max(4, compute_bytes), bool(self.style.soft_cap))
        blocks = SUM_BYTES * tokens * self.num_heads * self.head_dim  # sum over the blocks of keys
        sizes = (self.num_heads, self.num_kv_heads, self.head_dim, compute_bytes)
        if not self.style.window:
            return blocks
        return max(blocks, kernel_key_bytes(self.style.window, *sizes))


def block_workspace_bytes(op: CausalAttention, tokens: int, earlier: int, compute_bytes: int) -> int:
    """What calls of a slice take beside `window_workspace_bytes`, where blocks of earlier keys are larger than the
    slice: gradients of more keys. earlier: the most keys before a slice."""
    more = min(block_tokens_of(tokens), earlier) - tokens
    own = op.style.window or op._own_only(compute_bytes) or not op._serves("flash", compute_bytes)
    if more <= 0 or own:
        return 0
    return kernel_key_bytes(more, op.num_heads, op.num_kv_heads, op.head_dim, compute_bytes)
