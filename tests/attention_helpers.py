"""What tests of attention share: ops, masks, random rows, and the interface of the CUDA kernels on the CPU."""

import torch

from flexengine.kernels import attention as attention_kernel
from flexengine.kernels import attention_backward
from flexengine.kernels.attention_tilings import Tiling
from flexengine.ops.attention import attention
from flexengine.ops.attention.attention import CausalAttention
from flexengine.ops.attention.kernels import OWN, Kernels
from flexengine.ops.attention.style import CAUSAL

SMALL_TILE = Tiling(16, 16, 4, 1)
"""For Triton's interpreter."""


def use_tiles(monkeypatch, tiling=SMALL_TILE):
    """Let our own kernels work in such tiles."""
    monkeypatch.setattr(attention_kernel, "forward_tiling", lambda *_: tiling)
    for name in ("query_tiling", "key_tiling"):
        monkeypatch.setattr(attention_backward, name, lambda *_: tiling)


def use_own_kernels(monkeypatch):
    """Let attention run our own kernels on the CPU, in Triton's interpreter."""
    monkeypatch.setattr(attention, "choose_kernels", lambda *_: OWN)
    use_tiles(monkeypatch)


def make(n, g, width, style=CAUSAL, value_dim=None):
    return CausalAttention("attention", "qkv", "o", n, g, width, style, value_dim)


def masked(scores, style, first_query=0):
    """Bounded scores of queries from `first_query` on, -inf where a key is hidden."""
    if style.soft_cap:
        scores = style.soft_cap * torch.tanh(scores / style.soft_cap)
    queries = torch.arange(scores.shape[-2])[:, None] + first_query
    keys = torch.arange(scores.shape[-1])[None, :]
    hidden = keys > queries
    if style.window:
        hidden = hidden | (queries - keys >= style.window)
    return scores.masked_fill(hidden, float("-inf"))


def random_rows(h, tokens, n, g, width, value_dim=None):
    value_dim = value_dim or width
    return h.randn(tokens, (n + g) * width + g * value_dim), h.randn(tokens, n * value_dim)


class PlainKernels(Kernels):
    """The interface of the CUDA kernels over full masks."""

    def probabilities(self, q, k, lengths, style, lse=None):
        scores = torch.einsum("tnh,knh->ntk", q.float(), k.float().repeat_interleave(q.shape[1] // k.shape[1], dim=1))
        scores = scores * style.scale_of(q.shape[-1])
        if lengths is not None:
            scores = masked(scores, style, len(k) - len(q))
            sequence = torch.repeat_interleave(torch.arange(len(lengths.seq_lens)), torch.tensor(lengths.seq_lens))
            if len(k) == len(q):
                scores = scores.masked_fill(sequence[:, None] != sequence[None, :], float("-inf"))
        stats = torch.logsumexp(scores, dim=-1) if lse is None else lse
        return torch.exp(scores - stats[..., None]), stats

    def forward(self, q, k, v, lengths, style=CAUSAL):
        probs, lse = self.probabilities(q, k, lengths, style)
        return torch.einsum("ntk,knh->tnh", probs, v.repeat_interleave(q.shape[1] // k.shape[1], dim=1)), lse

    def backward(self, grad_out, rows, results, lengths, rng, style=CAUSAL):
        (q, k, v), (out, lse) = rows, results
        repeats = q.shape[1] // k.shape[1]
        keys, values = (t.repeat_interleave(repeats, dim=1) for t in (k, v))
        probs, _ = self.probabilities(q, k, lengths, style, lse)
        delta = (grad_out * out).sum(-1).t()[..., None]
        grad_scores = probs * (torch.einsum("tnh,knh->ntk", grad_out, values) - delta) * style.scale_of(q.shape[-1])
        grads = torch.einsum("ntk,tnh->knh", grad_scores, q), torch.einsum("ntk,tnh->knh", probs, grad_out)
        grad_k, grad_v = (g.unflatten(1, (-1, repeats)).sum(2) for g in grads)
        return torch.einsum("ntk,knh->tnh", grad_scores, keys), grad_k, grad_v
