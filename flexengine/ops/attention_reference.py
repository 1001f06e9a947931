"""The plain path of causal attention over packed sequences: any dtype and device, blocks of queries, scores in full.

Source: Dao 2023, "FlashAttention-2" for the statistics kept (log-sum-exp per query and head) and the backward from
them: P = exp(S - lse), dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = dS K, dK = dS^T Q.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

QUERY_BLOCK = 512
"""Queries per block of the plain path: bounds its score matrix to N * 512 * keys."""


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _padded_rows(seq_lens: tuple[int, ...], keys_before: int) -> Tensor | None:
    """[B, S] row of every token of B sequences padded to the longest, -1 where there is none.

    None where padding would cost more than it saves: with a window, or when most rows would be padding.
    """
    longest = max(seq_lens)
    if keys_before or longest > QUERY_BLOCK or len(seq_lens) * longest > 3 * sum(seq_lens) or len(seq_lens) == 1:
        return None
    lengths = torch.tensor(seq_lens)
    offsets = torch.arange(longest)[None, :]
    rows = (lengths.cumsum(0) - lengths)[:, None] + offsets
    return torch.where(offsets < lengths[:, None], rows, -1)


def _padded_heads(x: Tensor, rows: Tensor, num_heads: int) -> Tensor:
    """[T, G, H] -> [B, N, S, H] in float32 or wider, each of G heads repeated N/G times; padding repeats row 0."""
    heads = _wide(x)[rows.clamp(min=0)].transpose(1, 2)
    return heads.repeat_interleave(num_heads // x.shape[1], dim=1)


def _padded_scores(q: Tensor, k: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, keys [B, N, S, H], masked scaled scores [B, N, S, S]) of all sequences at once."""
    queries, keys = _padded_heads(q, rows, q.shape[1]), _padded_heads(k, rows, q.shape[1])
    scores = (queries @ keys.transpose(-1, -2)) * (1.0 / math.sqrt(q.shape[-1]))
    later = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool, device=q.device).triu(1)
    return queries, keys, scores.masked_fill_(later, float("-inf"))


def _padded_forward(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, out: Tensor, lse: Tensor) -> None:
    """The plain path's forward over padded sequences. Padding comes last, so no token attends to it."""
    _, _, scores = _padded_scores(q, k, rows)
    row_lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    result = scores.sub_(row_lse).exp_() @ _padded_heads(v, rows, q.shape[1])
    real = rows >= 0
    out.copy_(result.transpose(1, 2)[real])
    lse.copy_(row_lse[..., 0].transpose(1, 2)[real].t())


def _padded_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rows: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The plain path's backward over padded sequences; padded queries carry no gradient."""
    real, scale = rows >= 0, 1.0 / math.sqrt(q.shape[-1])
    queries, keys, scores = _padded_scores(q, k, rows)
    row_lse = lse.to(scores.dtype).t()[rows.clamp(min=0)].transpose(1, 2)[..., None]
    probs = scores.sub_(row_lse).exp_()
    grads = _padded_heads(grad_out, rows, q.shape[1]) * real[:, None, :, None]
    delta = (grads * _padded_heads(out, rows, q.shape[1])).sum(-1, keepdim=True)
    # a padded query's row repeats row 0 and may overflow: it is cleared, not multiplied by its zero gradient
    probs = probs.masked_fill_(~real[:, None, :, None], 0.0)
    grad_scores = probs * (grads @ _padded_heads(v, rows, q.shape[1]).transpose(-1, -2) - delta) * scale
    per_kv = (rows.shape[0], k.shape[1], -1, rows.shape[1], k.shape[2])
    grad_q = (grad_scores @ keys).transpose(1, 2)[real]
    grad_k = (grad_scores.transpose(-1, -2) @ queries).view(per_kv).sum(2).transpose(1, 2)[real]
    grad_v = (probs.transpose(-1, -2) @ grads).view(per_kv).sum(2).transpose(1, 2)[real]
    return grad_q, grad_k, grad_v


def _query_blocks(seq_lens: tuple[int, ...], keys_before: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """(query rows, key rows, causal mask [q, k] of allowed pairs) block by block; key rows count from the window."""
    start = 0
    for length in seq_lens:
        for offset in range(0, length, QUERY_BLOCK):
            rows = min(QUERY_BLOCK, length - offset)
            last_key = keys_before + offset + rows
            q_pos = torch.arange(keys_before + offset, last_key)
            mask = q_pos[:, None] >= torch.arange(last_key)[None, :]
            yield slice(start + offset, start + offset + rows), slice(start, start + last_key), mask
        start += length


def _expand(kv: Tensor, num_heads: int) -> Tensor:
    """[K, G, H] -> [N, K, H], each key/value head repeated for its N/G query heads."""
    return _wide(kv).transpose(0, 1).repeat_interleave(num_heads // kv.shape[1], dim=0)


def attention_forward_reference(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: tuple[int, ...], keys_before: int, out: Tensor, lse: Tensor
) -> None:
    """out [T, N, H] and lse [N, T] from q [T, N, H], k and v [keys_before + T, G, H], in float32 or wider."""
    rows = _padded_rows(seq_lens, keys_before)
    if rows is not None:
        return _padded_forward(q, k, v, rows.to(q.device), out, lse)
    scale = 1.0 / math.sqrt(q.shape[-1])
    for q_rows, k_rows, mask in _query_blocks(seq_lens, keys_before):
        queries = _wide(q[q_rows]).transpose(0, 1)
        scores = (queries @ _expand(k[k_rows], q.shape[1]).transpose(1, 2)) * scale
        scores.masked_fill_(~mask.to(q.device), float("-inf"))
        row_lse = torch.logsumexp(scores, dim=-1)
        probs = torch.exp(scores - row_lse[..., None])
        out[q_rows] = (probs @ _expand(v[k_rows], q.shape[1])).transpose(0, 1).to(out.dtype)
        lse[:, q_rows] = row_lse.to(lse.dtype)


def attention_backward_reference(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    seq_lens: tuple[int, ...],
    keys_before: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """(grad_q [T, N, H], grad_k, grad_v [keys_before + T, G, H]) in float32 or wider."""
    rows = _padded_rows(seq_lens, keys_before)
    if rows is not None:
        return _padded_backward(grad_out, q, k, v, out, lse, rows.to(q.device))
    scale, (num_kv, width) = 1.0 / math.sqrt(q.shape[-1]), k.shape[1:]
    wide = _wide(q).dtype
    grad_q = torch.zeros(q.shape, dtype=wide, device=q.device)
    grad_k = torch.zeros(k.shape, dtype=wide, device=q.device)
    grad_v = torch.zeros(v.shape, dtype=wide, device=q.device)
    for q_rows, k_rows, mask in _query_blocks(seq_lens, keys_before):
        queries, keys = _wide(q[q_rows]).transpose(0, 1), _expand(k[k_rows], q.shape[1])
        values, grads = _expand(v[k_rows], q.shape[1]), _wide(grad_out[q_rows]).transpose(0, 1)
        scores = (queries @ keys.transpose(1, 2)) * scale
        scores.masked_fill_(~mask.to(q.device), float("-inf"))
        probs = torch.exp(scores - lse[:, q_rows].to(wide)[..., None])
        delta = (grads * _wide(out[q_rows]).transpose(0, 1)).sum(-1, keepdim=True)
        grad_scores = probs * (grads @ values.transpose(1, 2) - delta) * scale
        grad_q[q_rows] = (grad_scores @ keys).transpose(0, 1)
        for total, part in ((grad_k, grad_scores.transpose(1, 2) @ queries), (grad_v, probs.transpose(1, 2) @ grads)):
            per_kv_head = part.view(num_kv, -1, part.shape[1], width).sum(1)
            total[k_rows] += per_kv_head.transpose(0, 1)
    return grad_q, grad_k, grad_v
