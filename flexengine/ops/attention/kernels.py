"""Attention kernels on CUDA behind one interface: torch's flash and memory-efficient ones, cuDNN's through torch's
operators, our own, and those of packages that are installed (packages.py).

A call is causal over packed sequences, every query with the keys of its own sequence up to itself, or it is over some
earlier keys of one long sequence, which all queries see; or, with more keys than queries, causal over the end of one
long sequence, whose last keys are the queries' own (a window reaches back into earlier chunks). Statistics are those of
FlashAttention: the log-sum-exp of every query's scores, from which backward finds the probabilities again; so calls
over parts of the keys add up.

Shapes: q, out [T, N, H]; k, v [K, G, H], K = T for packed sequences; lse [N, T] float32; all rows may be strided.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.ops.attention.choice import KERNEL_NAMES, KernelName
from flexengine.ops.attention.kernel_calls import Kernels, Lengths, Results, Rows
from flexengine.ops.attention.packages import MOST_SEQUENCES, PACKAGES, installed, package_runs_on
from flexengine.ops.attention.style import CAUSAL, AttentionStyle
from flexengine.ops.cards import capability, multiplies_in_kernels

CUDNN_LENGTHS = 256
"""cuDNN serves lengths that are multiples of this: it prepares itself for every new one, which takes up to a second."""

MOST_HEAD_DIM: dict[KernelName, int] = {"flash": 256, "cudnn": 128, "triton": 512, "efficient": 256}
"""Packages' have those of flash."""


class Flash(Kernels):
    """FlashAttention-2 as torch has it: packed sequences by their running sum, bf16 or fp16, head width up to 256."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, style: AttentionStyle = CAUSAL
    ) -> tuple[Tensor, Tensor]:
        forward, options = torch.ops.aten._flash_attention_forward, _flash_options(style)
        if lengths is None or len(k) != len(q):
            operands = (q[None], k[None], v[None], None, None, len(q), len(k))
            out, lse, *_ = forward(*operands, 0.0, lengths is not None, False, **options)
            return out[0], lse[0]
        cu, longest = lengths.cu_seqlens, max(lengths.seq_lens)
        out, lse, *_ = forward(q, k, v, cu, cu, longest, longest, 0.0, True, False, **options)
        return out, lse

    def backward(
        self, grad_out: Tensor, rows: Rows, results: Results, lengths: Lengths | None, rng: Tensor,
        style: AttentionStyle = CAUSAL,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        backward, options = torch.ops.aten._flash_attention_backward, _flash_options(style)
        if lengths is None or len(rows.k) != len(rows.q):
            operands = (x[None] for x in (grad_out, *rows, *results))
            sizes = (None, None, len(rows.q), len(rows.k))
            grads = backward(*operands, *sizes, 0.0, lengths is not None, rng, rng, **options)
            return grads[0][0], grads[1][0], grads[2][0]
        cu, longest = lengths.cu_seqlens, max(lengths.seq_lens)
        return backward(grad_out, *rows, *results, cu, cu, longest, longest, 0.0, True, rng, rng, **options)


def _flash_options(style: AttentionStyle) -> dict[str, Any]:
    """Keys seen before a query's own, none after it, and the scale: only what differs from the operators' defaults."""
    window = {"window_size_left": style.window - 1, "window_size_right": 0} if style.window else {}
    return window if style.scale is None else {"scale": style.scale, **window}


class Cudnn(Kernels):
    """cuDNN's fused attention: B sequences of equal length as a batch, views of the packed rows."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, style: AttentionStyle = CAUSAL
    ) -> tuple[Tensor, Tensor]:
        batch, causal = _batch(lengths), lengths is not None
        heads = (_by_head(x, batch) for x in (q, k, v))
        forward = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = forward(*heads, None, True, 0.0, causal, False, scale=style.scale)
        return out.transpose(1, 2).reshape(q.shape), lse.view(batch, q.shape[1], -1).transpose(0, 1).flatten(1)

    def backward(
        self, grad_out: Tensor, rows: Rows, results: Results, lengths: Lengths | None, rng: Tensor,
        style: AttentionStyle = CAUSAL,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        batch, causal = _batch(lengths), lengths is not None
        heads = [_by_head(x, batch) for x in (grad_out, *rows, results.out)]
        stats = results.lse.view(len(results.lse), batch, -1, 1).transpose(0, 1).contiguous()
        sizes = (len(rows.q) // batch, len(rows.k) // batch)
        grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *heads, stats, rng[0], rng[1], None, None, None, *sizes, 0.0, causal,
            scale=style.scale,
        )  # fmt: skip
        grad_q, grad_k, grad_v = (g.transpose(1, 2).flatten(0, 1) for g in grads)
        return grad_q, grad_k, grad_v


def _batch(lengths: Lengths | None) -> int:
    return 1 if lengths is None else len(lengths.seq_lens)


def _by_head(x: Tensor, batch: int) -> Tensor:
    """[T, N, H] -> [B, N, T / B, H], a view."""
    return x.unflatten(0, (batch, -1)).transpose(1, 2)


class Efficient(Kernels):
    """Memory-efficient attention as torch has it, whose products in float16 take the tensor cores of any card. Heads of
    keys are repeated for those of queries; statistics lie sequence by sequence, each padded to a multiple of 32."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, style: AttentionStyle = CAUSAL
    ) -> tuple[Tensor, Tensor]:
        own, keys, values = self._repeated(Rows(q, k, v))
        cu, cu_keys, longest, longest_keys, mask = self._sizes(own, keys, lengths)
        out, lse, *_ = torch.ops.aten._efficient_attention_forward(
            own[None], keys[None], values[None], None, cu, cu_keys, longest, longest_keys, 0.0, mask, True,
            scale=style.scale,
        )  # fmt: skip
        pieces = [rows[:, :count] for rows, count in zip(lse, self._counts(own, cu, lengths), strict=True)]
        return out[0], torch.cat(pieces, dim=1)

    def backward(
        self, grad_out: Tensor, rows: Rows, results: Results, lengths: Lengths | None, rng: Tensor,
        style: AttentionStyle = CAUSAL,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        q, k, v = self._repeated(rows)
        cu, cu_keys, longest, longest_keys, mask = self._sizes(q, k, lengths)
        counts = self._counts(q, cu, lengths)
        lse = results.lse.new_full((len(counts), q.shape[1], -(-max(counts) // 32) * 32), torch.inf)
        for padded, piece, count in zip(lse, results.lse.split(counts, dim=1), counts, strict=True):
            padded[:, :count] = piece
        operands = (x.contiguous()[None] for x in (grad_out, q, k, v))
        grad_q, grad_k, grad_v, _ = torch.ops.aten._efficient_attention_backward(
            *operands, None, results.out.contiguous()[None], cu, cu_keys, longest, longest_keys, lse, 0.0, rng[0],
            rng[1], mask, False, scale=style.scale,
        )  # fmt: skip
        groups = rows.k.shape[1]
        return grad_q[0], *(x[0].unflatten(1, (groups, -1)).sum(2) for x in (grad_k, grad_v))

    @staticmethod
    def _repeated(rows: Rows) -> Rows:
        members = rows.q.shape[1] // rows.k.shape[1]
        return Rows(rows.q, *(x.repeat_interleave(members, 1) for x in rows[1:]))

    @staticmethod
    def _sizes(q: Tensor, k: Tensor, lengths: Lengths | None) -> tuple[Tensor | None, Tensor | None, int, int, int]:
        """Running sums of queries and keys, the longest of both, and which keys a mask hides: 0 none, 1 those after a
        query, 2 the same where the last keys are the queries' own."""
        if lengths is None or len(k) != len(q):
            return None, None, len(q), len(k), 0 if lengths is None else 2
        longest = max(lengths.seq_lens)
        return lengths.cu_seqlens, lengths.cu_seqlens, longest, longest, 1

    @staticmethod
    def _counts(q: Tensor, cu: Tensor | None, lengths: Lengths | None) -> list[int]:
        """Tokens of the sequences whose statistics come one by one. cu: running sums, where there are several."""
        return [len(q)] if cu is None or lengths is None else list(lengths.seq_lens)


class RowGradients(NamedTuple):
    """Where gradients of `Rows` go. add: to float32 sums that keys and values have already; else all are written."""

    rows: Rows
    add: bool = False


class Triton(Kernels):
    """Our own kernels for 16 bits: every style, values narrower than keys, earlier keys in the same call, results and
    gradients written where they belong. Deterministic."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Lengths | None, style: AttentionStyle = CAUSAL
    ) -> tuple[Tensor, Tensor]:
        out = q.new_empty(*q.shape[:2], v.shape[2])
        lse = torch.empty(q.shape[1], len(q), dtype=torch.float32, device=q.device)
        self.attend(Rows(q, k, v), lengths, style, Results(out, lse))
        return out, lse

    def backward(
        self, grad_out: Tensor, rows: Rows, results: Results, lengths: Lengths | None, rng: Tensor,
        style: AttentionStyle = CAUSAL,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        grads = Rows(*(torch.empty_like(x) for x in rows))
        self.differentiate(rows, lengths, style, results, grad_out, RowGradients(grads))
        return grads

    def attend(
        self, rows: Rows, lengths: Lengths | None, style: AttentionStyle, results: Results, sinks: Tensor | None = None
    ) -> None:
        """Write results, with what the sinks [N] of a style take."""
        from flexengine.kernels import attention as kernel  # noqa: PLC0415 (Triton is imported when first used)

        kernel.attention_forward(*_operands(rows, lengths, style), *results, sinks)

    def differentiate(
        self, rows: Rows, lengths: Lengths | None, style: AttentionStyle, results: Results, grad_out: Tensor,
        grads: RowGradients,
    ) -> None:  # fmt: skip
        """Write the gradients of rows, from what `attend` left in results."""
        from flexengine.kernels import attention_backward as kernel  # noqa: PLC0415 (Triton is imported when first used)

        forward, targets = kernel.Forward(grad_out, *results), kernel.Gradients(*grads.rows, grads.add)
        kernel.attention_backward(*_operands(rows, lengths, style), forward, targets)


def _operands(rows: Rows, lengths: Lengths | None, style: AttentionStyle) -> tuple[Any, Any]:
    """The kernels' operands and scoring; without lengths it is one sequence, whose queries see all keys."""
    from flexengine.kernels.attention import Operands  # noqa: PLC0415 (Triton is imported when first used)
    from flexengine.kernels.attention_tilings import Scoring  # noqa: PLC0415

    causal = lengths is not None
    ends = lengths.cu_seqlens if causal else torch.tensor((0, len(rows.q)), dtype=torch.int32, device=rows.q.device)
    scoring = Scoring(style.scale_of(rows.q.shape[2]), style.soft_cap, style.window if causal else 0, causal)
    return Operands(*rows, ends), scoring


OWN = Triton()
KERNELS: dict[KernelName, Kernels] = {
    "flash": Flash(), "cudnn": Cudnn(), "triton": OWN, "efficient": Efficient(), **PACKAGES,
}  # fmt: skip


def choose_kernels(
    preferred: tuple[KernelName, ...] | KernelName, q: Tensor, seq_lens: tuple[int, ...],
    other_lens: tuple[int, ...] = (), style: AttentionStyle = CAUSAL, value_dim: int | None = None,
) -> Kernels | None:  # fmt: skip
    """What serves q [T, N, H] and values of width value_dim, by default H: the first of the preferred kernels that can,
    else our own where a window hides keys or no others can, else flash; None where only the plain path can.

    seq_lens: of the packed sequences; other_lens: further numbers of keys, where the chunk continues a sequence.
    """
    if not q.is_cuda:
        return None
    width = q.shape[-1]
    names: list[KernelName] = [name for name in KERNEL_NAMES if runs_on(name, q.device)]
    able: list[KernelName] = [name for name in names if can_serve(name, q.dtype, width, style, value_dim)]
    if "cudnn" in able and not _serves_cudnn(seq_lens, other_lens):
        able.remove("cudnn")
    if len(seq_lens) > MOST_SEQUENCES:
        able = [name for name in able if name not in PACKAGES]
    order: tuple[KernelName, ...] = ("triton", "flash") if style.window else ("flash", "triton")
    order = (*order, "efficient")
    choices: tuple[KernelName, ...] = (*((preferred,) if isinstance(preferred, str) else preferred), *order)
    return next((KERNELS[name] for name in choices if name in able), None)


def _serves_cudnn(seq_lens: tuple[int, ...], other_lens: tuple[int, ...]) -> bool:
    """Whether cuDNN is for calls of such lengths."""
    known = all(length % CUDNN_LENGTHS == 0 for length in (*seq_lens, *other_lens))
    return known and len(set(seq_lens)) == 1


def runs_on(kernels: KernelName, device: torch.device) -> bool:
    """Whether a card has such kernels in torch's mode of now: before compute capability 8.0 there are only torch's
    memory-efficient ones, packages know some cards, and cuDNN's backward sums in any order."""
    if kernels in PACKAGES:
        return device.type == "cuda" and package_runs_on(kernels, capability(device)[0])
    if kernels == "cudnn" and torch.are_deterministic_algorithms_enabled():
        return False
    return kernels == "efficient" or multiplies_in_kernels(device)


def can_serve(
    kernels: KernelName, dtype: torch.dtype, head_dim: int, style: AttentionStyle = CAUSAL, value_dim: int | None = None
) -> bool:
    """Whether such kernels are written for operands like these; a card may still have none of them. Only our own have
    soft caps, values narrower than keys and heads of any width, and cuDNN has no window through torch's operators.
    Packages serve what flash does, so that `kernel_workspace_bytes` counts their memory, where they are installed."""
    if kernels in PACKAGES and not installed(kernels):
        return False
    if head_dim > MOST_HEAD_DIM["flash" if kernels in PACKAGES else kernels]:
        return False
    if kernels == "triton":
        return dtype in (torch.bfloat16, torch.float16)
    if kernels == "efficient" and (dtype != torch.float16 or style.window):
        return False  # its gradients of slices with a window are wrong, as of torch 2.11
    if style.soft_cap or (value_dim or head_dim) < head_dim or (style.window and kernels == "cudnn"):
        return False
    return dtype in (torch.bfloat16, torch.float16) and head_dim % 8 == 0


def own_workspace_bytes(tokens: int, num_heads: int) -> int:
    """Bytes that backward of our own kernels takes from the allocator: two float32 statistics of every row."""
    return 2 * 4 * tokens * num_heads


def kernel_workspace_bytes(tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, compute_bytes: int) -> int:
    """Most bytes that a backward call takes from the allocator: grad_q, and grad_k and grad_v for N heads and reduced;
    a float32 sum of grad_q and row statistics."""
    width = _padded_width(head_dim)
    keys = kernel_key_bytes(tokens, num_heads, num_kv_heads, head_dim, compute_bytes)
    queries = tokens * num_heads * width * compute_bytes
    return keys + queries + (tokens + 128 * 64) * num_heads * (width + 2) * 4


def kernel_key_bytes(keys: int, num_heads: int, num_kv_heads: int, head_dim: int, compute_bytes: int) -> int:
    """Bytes of the gradients of so many keys and values, for N heads and reduced."""
    return keys * 2 * (num_heads + num_kv_heads) * _padded_width(head_dim) * compute_bytes


def _padded_width(head_dim: int) -> int:
    """Kernels pad heads to multiples of 32, above 192 to 256."""
    return 256 if head_dim > 192 else -(-head_dim // 32) * 32
