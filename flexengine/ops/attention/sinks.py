"""Attention sinks: a learned score for every query head, a key of its own without a value.

It takes a share of a query's attention and gives nothing for it. Source: OpenAI 2025, "gpt-oss-120b & gpt-oss-20b Model
Card"; Miller 2023, "Attention Is Off By One", with a sink of 0; Xiao et al. 2023, "Efficient Streaming Language Models
with Attention Sinks".

With the log-sum-exp of a row's other scores, l' = log(exp(l) + exp(sink)), the output is exp(l - l') times that without
a sink. Backward of everything else stays as it is, given l' and that output: from them it finds the probabilities
exp(score - l') and delta = rowsum(grad_out * out), whose row of a sink, exp(sink - l') with a value of zero, adds only
grad_sink = -(the sum over rows of exp(sink - l') * delta).

Shapes: out [T, N, H]; lse [N, T], wide; sinks [N].
"""

from __future__ import annotations

import torch
from torch import Tensor

from flexengine.ops.base import use_kernel, wide

PARTIALS = 64
"""Parts of the sum over tokens, each of them one program's per head: from 8 heads on enough for a card's processors."""


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> None:
    """out and lse of all keys that rows see, in place with a sink more; once for a row, after all its parts."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None])
    share = lse.sub_(total).exp_()
    out.mul_(share.t()[..., None])
    lse.copy_(total)


def sink_gradients(
    grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, acc: Tensor, partials: Tensor, first: bool
) -> None:
    """acc [N] (+)= the gradient, from what `add_sinks` left; partials [P, N] float32 is workspace."""
    if use_kernel(out) and out.dtype != torch.float64:
        from flexengine.kernels import attention_sinks  # noqa: PLC0415 (Triton is imported when first used)

        attention_sinks.sink_gradients(grad_out, out, lse, sinks, partials)
    else:
        delta = (wide(grad_out) * wide(out)).sum(-1)
        partials.zero_()[0].copy_((delta.t() * (sinks.to(lse.dtype)[:, None] - lse).exp_()).sum(1).neg_())
    total = partials.sum(0)
    acc.copy_(total) if first else acc.add_(total)
