"""The head of a model that labels tokens or sequences: a small linear layer, and the loss of its outputs.

For a block of B tokens: logits [B, K] = h @ weight.T (+ bias), with the loss and gradients of the LM head
(`cross_entropy.py`). Only tokens with a label have a loss. Of a single output (K = 1), which cross-entropy says
nothing of, a token's loss is minus the output itself: a loss of such scores, as of rewards, is weights of tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flexengine.ops.base import ChunkContext, OpEnv
from flexengine.ops.cross_entropy import LMHeadLoss
from flexengine.ops.custom_loss import IGNORE_INDEX
from flexengine.ops.linear import accumulate_bias_grad, bias_grad_bytes


class LabelHead(LMHeadLoss):
    """losses of h under a head with `num_labels` outputs. bias: the name of its bias, None for none."""

    def __init__(self, name: str, x: str, width: int, num_labels: int, weight: str, bias: str | None = None) -> None:
        super().__init__(name, x, width, num_labels, weight)
        self.bias = bias
        self.params = (weight,) if bias is None else (weight, bias)

    def _multiplied(self, env: OpEnv, rows: slice) -> Tensor:
        logits = super()._multiplied(env, rows)
        return logits if self.bias is None else logits.add_(env.p[self.bias])

    def _losses(self, chunk: ChunkContext, rows: slice, logits: Tensor, write_grad: bool) -> None:
        if self.vocab_size > 1 or chunk.custom_loss is not None:
            return super()._losses(chunk, rows, logits, write_grad)
        losses = chunk.losses[rows]
        share = (chunk.labels[rows] != IGNORE_INDEX).to(losses.dtype)
        share = -share if chunk.weights is None else -share * chunk.weights[rows]
        torch.mul(logits[:, 0], share, out=losses)
        if write_grad:
            logits[:, 0].copy_(share * chunk.grad_factor)
        return None

    def _accumulate(self, env: OpEnv, logits: Tensor, h: Tensor, first: bool) -> None:
        super()._accumulate(env, logits, h, first)
        if self.bias is not None:
            accumulate_bias_grad(env.gp[self.bias], logits, first)

    def logits_of(self, x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        logits = super().logits_of(x, weights)
        return logits if self.bias is None else logits + weights[self.bias]

    def workspace_bytes(self, tokens: int, compute_bytes: int) -> int:
        if self.bias is None or not self.trained:
            return super().workspace_bytes(tokens, compute_bytes)
        of_bias = bias_grad_bytes(self.blocks.rows(tokens), self.vocab_size, compute_bytes)
        return super().workspace_bytes(tokens, compute_bytes) + of_bias
