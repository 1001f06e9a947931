"""Causal attention in which tokens of a block, such as those of an image, see each other, the later ones too.

What causal attention hides of a block are its later tokens. They are a causal call on the block's rows in reverse:
of queries without the block's last token and keys without its first, so that query i sees the keys up to the i-th and
never its own. So every kernel serves that serves causal attention. Results of both calls are joined by their
log-sum-exps, from which backward finds the probabilities again, as of earlier chunks (`attention.py`).

A window hides no later key, and a chunk holds its sequences whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.attention.attention import CausalAttention
from flexengine.ops.attention.kernels import Results, Rows
from flexengine.ops.attention.reference import attention_backward_reference, attention_forward_reference
from flexengine.ops.attention.style import AttentionStyle
from flexengine.ops.base import FLOAT64_BYTES, OpEnv, Work, in_plain_width, wide
from flexengine.ops.given_rows import GivenRows
from flexengine.ops.placed_rows import SeenBlocks


class BlockAttention(CausalAttention):
    """o, lse = attention(qkv), where a query also sees the later tokens of its own block."""

    replays = False
    whole_sequences = True

    def __init__(self, op: CausalAttention, given: GivenRows) -> None:
        sizes = op.num_heads, op.num_kv_heads, op.head_dim
        super().__init__(op.name, op.qkv, op.y, *sizes, op.style, op.value_dim)
        self.given = given

    @property
    def _later_style(self) -> AttentionStyle:
        return self.style._replace(window=0, sinks=False)

    def forward(self, env: OpEnv) -> None:
        super().forward(env)
        blocks = env.chunk.blocks
        if blocks is None:
            return
        (out, lse), at, style, lengths = self._views(env), blocks.queries, self._later_style, blocks.lengths
        q, k, v = self._rows(env.t[self.qkv], blocks)
        kernels = self.serving(env, q, lengths.seq_lens, style)
        if kernels is None:
            part, stats = torch.empty_like(out[at]), torch.empty_like(lse[:, at])
            attention_forward_reference(q, k, v, lengths.seq_lens, 0, part, stats, style)
        else:
            part, stats = kernels.forward(q, k, v, lengths, style)
        own = lse[:, at]
        total = torch.logaddexp(own, stats)
        shares = ((x - total).exp_().t()[..., None] for x in (own, stats))
        joined = [wide(x).mul(share) for x, share in zip((out[at], part), shares, strict=True)]
        out.index_copy_(0, at, joined[0].add_(joined[1]).to(out.dtype))
        lse.index_copy_(1, at, total)

    def backward_input(self, env: OpEnv) -> None:
        super().backward_input(env)
        blocks = env.chunk.blocks
        if blocks is None:
            return
        (out, lse), at, style, lengths = self._views(env), blocks.queries, self._later_style, blocks.lengths
        rows = self._rows(env.t[self.qkv], blocks)
        kernels = self.serving(env, rows[0], lengths.seq_lens, style)
        results = Results(out[at], lse[:, at].contiguous())
        grad_out = env.g[self.y].view_as(out)[at]
        if kernels is None:
            grads = attention_backward_reference(grad_out, rows, results, lengths.seq_lens, 0, style=style)
        else:
            rng = env.chunk.constants["attention_rng"]
            grads = kernels.backward(grad_out, rows, results, lengths, rng, style)
        places = at, blocks.keys, blocks.keys
        for target, place, grad in zip(self.split(env.g[self.qkv]), places, grads, strict=True):
            target.index_copy_(0, place, wide(target[place]).add_(grad).to(target.dtype))

    def _rows(self, qkv: Tensor, blocks: SeenBlocks) -> Rows:
        q, k, v = self.split(qkv)
        return Rows(q[blocks.queries], k[blocks.keys], v[blocks.keys])

    # -- what it costs -----------------------------------------------------------------------------------------------

    def _row_elements(self) -> int:
        return (self.num_heads + self.num_kv_heads) * self.head_dim + self.num_kv_heads * self.value_dim

    def _later_work(self, tokens: int, compute_bytes: int) -> tuple[float, float]:
        """Heads of the queries of a chunk that see later tokens, and bytes that go to put their rows together."""
        queries = tokens * self.given.share
        values = 3 * self.num_heads * self.value_dim
        return queries * self.num_heads, 2.0 * queries * (self._row_elements() + values) * compute_bytes

    def forward_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        heads, moved = self._later_work(tokens, compute_bytes)
        flops = heads * self.shape._replace(window=0).forward_flops(self.given.block_rows)
        later = Work(attention_forward_flops=flops, memory_bytes=moved, kernels=16)
        return super().forward_work(tokens, seq_len, compute_bytes).plus(later)

    def backward_input_work(self, tokens: int, seq_len: int, compute_bytes: int) -> Work:
        heads, moved = self._later_work(tokens, compute_bytes)
        flops = heads * self.shape._replace(window=0).backward_flops(self.given.block_rows)
        later = Work(attention_backward_flops=flops, memory_bytes=2 * moved, kernels=24)
        return super().backward_input_work(tokens, seq_len, compute_bytes).plus(later)

    def model_flops(self, seq_len: int) -> float:
        """FLOPs of the pairs of a text of this length, as of towers: images are not known by its length."""
        return (3.0 if self.has_input_half else 1.0) * super().forward_work(seq_len, seq_len, 2).flops

    def _later_bytes(self, tokens: int, compute_bytes: int) -> tuple[int, int]:
        """Rows that see later ones, and bytes of what is put together of them."""
        rows = min(tokens, self.given.max_tokens)
        elements = 2 * self._row_elements() + 4 * self.num_heads * self.head_dim
        return rows, rows * elements * max(4, compute_bytes)

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        rows, moved = self._later_bytes(tokens, compute_bytes)
        own = super().workspace_bytes(tokens, compute_bytes)
        return own + super().workspace_bytes(rows, compute_bytes) + moved

    def plain_workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        rows, moved = self._later_bytes(tokens, FLOAT64_BYTES)
        own = super().plain_workspace_bytes(tokens, compute_bytes)
        return max(own, super().plain_workspace_bytes(rows, compute_bytes) + in_plain_width(moved, compute_bytes))
