"""The plain path of causal attention over packed sequences: any dtype and device, a bounded block of scores at a time.

Source: Dao 2023, "FlashAttention-2" for the statistics kept (log-sum-exp per query and head) and the backward from
them: P = exp(S - lse), dV = P^T dO, dS = P * (dO V^T - rowsum(dO * O)), dQ = dS K, dK = dS^T Q.

With a soft cap C the scores are C tanh(S / C), and the gradient of S is dS (1 - tanh^2). A window hides keys from both.

Shapes: B sequences of a block, R queries and K keys of each, G key/value heads, M query heads of each (N = G * M), H
head width. Rows of one group's query heads lie below each other, so that keys are never repeated.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.attention.kernels import Results, Rows
from flexengine.ops.attention.style import CAUSAL, AttentionStyle
from flexengine.ops.base import wide

QUERY_BLOCK = 512
"""Most queries of one sequence in a block."""
BLOCK_TOKENS = 1024
"""Most tokens of several short sequences in a block, padding included."""
MOST_PADDING = 3
"""Sequences are padded to the longest where this many times their tokens come out at the most."""
SCORE_ELEMENTS = 1 << 24
"""Most elements of a block's scores, and of the keys of a key/value head that it widens, unless one head or one query
has more: beyond 100 000 keys and more."""


class Block(NamedTuple):
    """What is worked on at once: rows [B, R] of B padded sequences with their own keys, -1 past the end of each, and
    where `queries` lie among them, counted row by row; or, where that is None, `queries` and `keys` of one sequence in
    the key/value heads `groups`. Queries stand behind the first `before` keys.
    """

    rows: Tensor | None
    real: Tensor | None = None
    queries: slice = slice(0)
    keys: slice = slice(0)
    groups: slice = slice(None)
    before: int = 0

    def of_queries(self, x: Tensor, num_groups: int) -> Tensor:
        """[T, N, H] -> [B, G, M * R, H], wide; padding repeats row 0."""
        if self.rows is None:
            taken = x.unflatten(1, (num_groups, -1))[self.queries, self.groups][None]
        else:
            taken = x.unflatten(1, (num_groups, -1))[self.rows.clamp(min=0)]
        return wide(taken.permute(0, 2, 3, 1, 4).flatten(2, 3))

    def of_keys(self, x: Tensor) -> Tensor:
        """[K, G, H] -> [B, G, K, H], wide."""
        taken = x[self.keys, self.groups][None] if self.rows is None else x[self.rows.clamp(min=0)]
        return wide(taken.transpose(1, 2))

    def of_stats(self, x: Tensor, num_groups: int) -> Tensor:
        """[N, T] -> [B, G, M * R, 1]."""
        return self.of_queries(x.t()[..., None], num_groups)

    def put(self, target: Tensor, values: Tensor, num_groups: int) -> None:
        """target [T, N, H] at the block's queries = values [B, G, M * R, H]."""
        whole = target.unflatten(1, (num_groups, -1))
        count = self.queries.stop - self.queries.start if self.rows is None else self.rows.shape[1]
        parts = values.unflatten(2, (-1, count)).permute(0, 3, 1, 2, 4)
        if self.real is None:
            whole[self.queries, self.groups] = parts[0].to(target.dtype)
        else:
            whole[self.queries] = parts.flatten(0, 1)[self.real].to(target.dtype)

    def add(self, total: Tensor, values: Tensor) -> None:
        """total [K, G, H] at the block's keys += values [B, G, K, H]."""
        parts = values.transpose(1, 2)
        if self.real is None:
            total[self.keys, self.groups] += parts[0]
        else:
            total[self.queries] += parts.flatten(0, 1)[self.real]

    def hidden(self, num_queries: int, num_keys: int, window: int, device: torch.device) -> Tensor:
        """[R, K]: the keys that a query must not see: later ones, and those before its window."""
        own = torch.arange(num_queries, device=device)[:, None] + self.before
        keys = torch.arange(num_keys, device=device)[None, :]
        return (keys > own) | (keys <= own - window) if window else keys > own


def _blocks(
    seq_lens: tuple[int, ...], keys_before: int, num_heads: int, num_groups: int, width: int, style: AttentionStyle,
    device: torch.device,
) -> Iterator[Block]:  # fmt: skip
    """Every query once with all keys that it sees, for all heads."""
    longest = max(seq_lens)
    few_pads = len(seq_lens) > 1 and len(seq_lens) * longest <= MOST_PADDING * sum(seq_lens)
    if few_pads and not keys_before and longest <= QUERY_BLOCK and num_heads * longest**2 <= SCORE_ELEMENTS:
        yield from _padded_blocks(seq_lens, num_heads, device)
        return
    start, members = 0, num_heads // num_groups
    for length in seq_lens:
        for first in range(0, length, QUERY_BLOCK):
            keys = keys_before + min(first + QUERY_BLOCK, length)
            groups = max(1, min(num_groups, SCORE_ELEMENTS // (keys * max(members, width))))
            step = max(1, min(QUERY_BLOCK, SCORE_ELEMENTS // (groups * members * keys)))
            for offset in range(first, min(first + QUERY_BLOCK, length), step):
                end = min(offset + step, first + QUERY_BLOCK, length)
                hidden = style.first_key(keys_before + offset)
                seen = slice(start + hidden, start + keys_before + end)
                for group in range(0, num_groups, groups):
                    heads = slice(group, min(group + groups, num_groups))
                    before = keys_before + offset - hidden
                    yield Block(None, None, slice(start + offset, start + end), seen, heads, before)
        start += length


def _padded_blocks(seq_lens: tuple[int, ...], num_heads: int, device: torch.device) -> Iterator[Block]:
    longest = max(seq_lens)
    count = max(1, min(BLOCK_TOKENS // longest, SCORE_ELEMENTS // (num_heads * longest**2)))
    lengths = torch.tensor(seq_lens)
    offsets = torch.arange(longest)[None, :]
    rows = torch.where(offsets < lengths[:, None], (lengths.cumsum(0) - lengths)[:, None] + offsets, -1)
    real = [(part.flatten() >= 0).nonzero()[:, 0] for part in rows.split(count)]
    parts = zip(rows.to(device).split(count), torch.cat(real).to(device).split([len(r) for r in real]), strict=True)
    start = 0
    for part, found in parts:
        yield Block(part, found, slice(start, start + len(found)))
        start += len(found)


class Scores(NamedTuple):
    """Scores [B, G, M * R, K] as softmax takes them, -inf for hidden keys; capped: tanh(scores / soft_cap), if any."""

    values: Tensor
    capped: Tensor | None


def _scores(block: Block, queries: Tensor, keys: Tensor, members: int, style: AttentionStyle) -> Scores:
    scores, capped = (queries @ keys.transpose(2, 3)).mul_(style.scale_of(queries.shape[-1])), None
    if style.soft_cap:
        capped = scores.div_(style.soft_cap).tanh_()
        scores = capped * style.soft_cap
    by_query = scores.unflatten(2, (members, -1))
    hidden = block.hidden(by_query.shape[3], by_query.shape[4], style.window, scores.device)
    by_query.masked_fill_(hidden, float("-inf"))
    return Scores(scores, capped)


def attention_forward_reference(
    q: Tensor, k: Tensor, v: Tensor, seq_lens: tuple[int, ...], keys_before: int, out: Tensor, lse: Tensor,
    style: AttentionStyle = CAUSAL,
) -> None:  # fmt: skip
    """out [T, N, H] and lse [N, T] from q [T, N, H], k and v [keys_before + T, G, H], in float32 or wider."""
    (num_heads, width), num_groups = q.shape[1:], k.shape[1]
    for block in _blocks(seq_lens, keys_before, num_heads, num_groups, width, style, q.device):
        _forward_block(block, q, k, v, out, lse, style)


def _forward_block(
    block: Block, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, style: AttentionStyle
) -> None:
    num_groups = k.shape[1]
    queries, members = block.of_queries(q, num_groups), q.shape[1] // num_groups
    scores = _scores(block, queries, block.of_keys(k), members, style).values
    row_lse = torch.logsumexp(scores, dim=-1, keepdim=True)
    block.put(lse.t()[..., None], row_lse, num_groups)
    block.put(out, scores.sub_(row_lse).exp_() @ block.of_keys(v), num_groups)


def attention_backward_reference(
    grad_out: Tensor, rows: Rows, results: Results, seq_lens: tuple[int, ...], keys_before: int,
    totals: tuple[Tensor, Tensor] | None = None, style: AttentionStyle = CAUSAL,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(grad_q [T, N, H], grad_k, grad_v [keys_before + T, G, H]) in float32 or wider; the last two are added to
    `totals` where these are given."""
    q, num_groups = rows.q, rows.k.shape[1]
    dtype = wide(q[:0]).dtype
    grad_q = torch.empty(q.shape, dtype=dtype, device=q.device)
    grads = Rows(grad_q, *(totals or (torch.zeros(x.shape, dtype=dtype, device=q.device) for x in rows[1:])))
    for block in _blocks(seq_lens, keys_before, q.shape[1], num_groups, q.shape[2], style, q.device):
        _backward_block(block, grad_out, rows, results, grads, style)
    return grads


def _backward_block(
    block: Block, grad_out: Tensor, rows: Rows, results: Results, gradients: Rows, style: AttentionStyle
) -> None:
    (q, k, v), (out, lse), (grad_q, grad_k, grad_v) = rows, results, gradients
    (num_heads, width), num_groups = q.shape[1:], k.shape[1]
    queries, keys = block.of_queries(q, num_groups), block.of_keys(k)
    grads = block.of_queries(grad_out, num_groups)
    delta = (grads * block.of_queries(out, num_groups)).sum(-1, keepdim=True)
    probs, capped = _scores(block, queries, keys, num_heads // num_groups, style)
    probs.sub_(block.of_stats(lse, num_groups)).exp_()
    if block.rows is not None:  # a padded query repeats row 0, and its row of probabilities may overflow
        padding = (block.rows < 0)[:, None, None, :, None]
        for tensor in (probs, grads):
            tensor.unflatten(2, (-1, block.rows.shape[1])).masked_fill_(padding, 0.0)
    grad_scores = (grads @ block.of_keys(v).transpose(2, 3)).sub_(delta).mul_(probs).mul_(style.scale_of(width))
    if capped is not None:
        grad_scores.mul_(capped.square_().neg_().add_(1.0))
    block.put(grad_q, grad_scores @ keys, num_groups)
    block.add(grad_k, grad_scores.transpose(2, 3) @ queries)
    block.add(grad_v, probs.transpose(2, 3) @ grads)


def plain_workspace_bytes(
    tokens: int, num_heads: int, num_groups: int, width: int, wide_bytes: int, soft_cap: bool = False
) -> int:
    """Most bytes that a backward call without earlier keys takes: two matrices of scores, three with a soft cap, the
    block's queries in six forms, its keys and values in four, and the gradients of everything; padding may triple a
    block's tokens."""
    padded = min(MOST_PADDING * tokens, BLOCK_TOKENS)
    scores = min(SCORE_ELEMENTS, num_heads * max(padded, tokens) * min(tokens, QUERY_BLOCK))
    queries, keys = padded * num_heads * width, max(padded, tokens) * num_groups * width
    return wide_bytes * ((2 + soft_cap) * scores + 6 * queries + 6 * keys + tokens * num_heads * width)


def plain_window_bytes(wide_bytes: int, soft_cap: bool = False) -> int:
    """What comes on top where earlier keys are seen: scores, keys, values and their gradients of full blocks."""
    return wide_bytes * (6 + soft_cap) * SCORE_ELEMENTS
