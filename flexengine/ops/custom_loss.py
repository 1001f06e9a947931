"""A loss of one's own on blocks of logits, where the head would take the cross-entropy.

The full logits never exist, so such a loss sees the logits of a few tokens at a time and returns its sum over them;
autograd differentiates it there. A loss that joins the tokens of a sequence (DPO) is a weight on each token instead:
docs/losses.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

IGNORE_INDEX = -100
"""The label of tokens without a loss, as in torch and Hugging Face."""
CALL_BYTES = 2**23
"""Float32 logits of one call. A function and autograd hold several such matrices, which stay within the memory that a
plan leaves free beside its slots; a larger one would launch fewer kernels."""


class LogitsBlock(NamedTuple):
    """Tokens that have a loss, with the logits that predict them. Row i is about one of them.

    logits [B, V]: float32 (float64 for float64 compute), after a soft cap; they require a gradient. labels [B] int64:
    the labels of these tokens, none of them -100. sequences [B], positions [B] int64: row i predicts token positions[i]
    (1 or more) of sequence sequences[i] of the batch as it is read: without padding, rows cut where position_ids begin
    again. weights [B]: the call's weights of these tokens, None where it has none; the function applies them.
    """

    logits: Tensor
    labels: Tensor
    sequences: Tensor
    positions: Tensor
    weights: Tensor | None


LossFunction = Callable[[LogitsBlock], Tensor]
"""Returns the sum [] of the losses of a block's tokens, computed from its logits."""


class CustomLoss(NamedTuple):
    """A loss function, and which token of the batch each token of a chunk predicts: sequences [T], positions [T]."""

    function: LossFunction
    sequences: Tensor
    positions: Tensor

    def of_rows(self, rows: slice) -> CustomLoss:
        """The same for some tokens of the chunk."""
        return CustomLoss(self.function, self.sequences[rows], self.positions[rows])


def call_tokens(vocab_size: int) -> int:
    """Most tokens of one call of the function: a power of two within 1..4096 that follows from the vocabulary alone."""
    return min(4096, 1 << max(0, (CALL_BYTES // (4 * vocab_size)).bit_length() - 1))


def custom_loss_(
    custom: CustomLoss,
    logits: Tensor,
    labels: Tensor,
    weights: Tensor | None,
    losses: Tensor,
    write_grad: bool,
    soft_cap: float = 0.0,
    grad_factor: float = 1.0,
) -> None:
    """losses [B] = the function's sums, each in the first row of its call, 0 elsewhere; optionally logits <- gradient.

    Shapes: logits [B, V], labels [B] int64, weights [B] or None. Rows whose label is -100 get no gradient. grad_factor
    multiplies the gradient alone.
    Order: every call of the function waits for the device, which counts the tokens that have a loss.
    Raises: ValueError when the function returns no sum.
    """
    losses.zero_()
    size = call_tokens(logits.shape[1])
    for first in range(0, len(logits), size):
        rows = slice(first, first + size)
        active = (labels[rows] != IGNORE_INDEX).nonzero()[:, 0]
        part, given = logits[rows], _wide(logits[rows][active]).requires_grad_()
        if write_grad:
            part.zero_()
        if not active.numel():
            continue
        with torch.enable_grad():
            shown = soft_cap * torch.tanh(given / soft_cap) if soft_cap else given
            places = (custom.sequences[rows][active], custom.positions[rows][active])
            total = custom.function(
                LogitsBlock(shown, labels[rows][active], *places, None if weights is None else weights[rows][active])
            )
        _check_sum(total)
        losses[first] = total.detach()
        if write_grad:
            (grad,) = torch.autograd.grad(total, given)
            part.index_copy_(0, active, grad.mul_(grad_factor).to(part.dtype))


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _check_sum(total: object) -> None:
    """Raise ValueError unless it is a scalar that depends on the logits."""
    if not isinstance(total, Tensor) or total.dim() != 0 or not total.requires_grad:
        found = f"a tensor of shape {list(total.shape)}" if isinstance(total, Tensor) else f"a {type(total).__name__}"
        if isinstance(total, Tensor) and total.dim() == 0:
            found = "a number that does not depend on the logits"
        raise ValueError(
            f"loss returned {found}; return the sum of the losses of the block's tokens, computed from block.logits"
            " with torch (end with .sum())"
        )
