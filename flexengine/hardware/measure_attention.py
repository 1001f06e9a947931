"""Rates of causal attention by sequence length, with the calls of the engine's attention op.

Shapes: T tokens, N query heads, G key/value heads, H head width, S tokens of a sequence.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.hardware.curve import Points
from flexengine.hardware.timing import Timer

HEAD_DIM, QUERIES_PER_KEY = 128, 4
FLASH_ROWS = 262144  # tokens x heads: keeps every multiprocessor busy with less than half a GiB at any length
FLASH_TOKENS = 16384
PLAIN_BLOCK = 512  # queries per block of the plain path, as in the engine's


class AttentionRates(NamedTuple):
    """(tokens of a sequence, FLOP/s) of both directions; FLOPs counted as in `HardwareProfile`."""

    forward: Points
    backward: Points


class Calls(NamedTuple):
    """Both directions over one set of operands, and the (query, key) pairs that they make visible, times heads."""

    forward: Callable[[], object]
    backward: Callable[[], object]
    pairs: float
    head_dim: int

    def rates(self, timer: Timer, least_s: float) -> tuple[float, float]:
        """FLOP/s: two products of 2 H per pair forward, five backward."""
        forward_s, backward_s = timer(self.forward, least_s), timer(self.backward, least_s)
        return 4 * self.head_dim * self.pairs / forward_s, 10 * self.head_dim * self.pairs / backward_s


def flash_rates(
    lengths: Sequence[int], device: torch.device, dtype: torch.dtype, timer: Timer, least_s: float
) -> AttentionRates:
    """Rates of torch's variable-length flash kernels. Raises: RuntimeError where card or dtype have none."""
    return _rates(lengths, lambda length: _flash_calls(length, device, dtype), timer, least_s)


def plain_rates(
    lengths: Sequence[int], num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype, timer: Timer,
    least_s: float,
) -> AttentionRates:  # fmt: skip
    """Rates of the plain path, which serves where no flash kernel does: blocks of queries, scores in float32."""
    return _rates(lengths, lambda length: _plain_calls(length, num_heads, head_dim, device, dtype), timer, least_s)


def _rates(lengths: Sequence[int], calls: Callable[[int], Calls], timer: Timer, least_s: float) -> AttentionRates:
    forward, backward = [], []
    for length in lengths:
        rates = calls(length).rates(timer, least_s)
        forward.append((length, rates[0]))
        backward.append((length, rates[1]))
    return AttentionRates(tuple(forward), tuple(backward))


def _flash_calls(length: int, device: torch.device, dtype: torch.dtype) -> Calls:
    """Packed sequences of `length` tokens; queries, keys and values are views of a fused row, as in the engine."""
    T = max(length, FLASH_TOKENS)
    N = FLASH_ROWS // T
    G = N // QUERIES_PER_KEY
    qkv = torch.randn(T, N + 2 * G, HEAD_DIM, device=device, dtype=dtype)
    q, k, v = qkv[:, :N], qkv[:, N : N + G], qkv[:, N + G :]
    grad_out = torch.randn(T, N, HEAD_DIM, device=device, dtype=dtype)
    offsets = torch.arange(0, T + 1, length, device=device, dtype=torch.int32)
    ragged = (offsets, offsets, length, length, 0.0, True)  # offsets of q and k, longest q and k, dropout, causal
    rng_state = torch.zeros(2, dtype=torch.int64, device=device)  # unused without dropout

    def forward() -> tuple[Tensor, ...]:
        return torch.ops.aten._flash_attention_forward(q, k, v, *ragged, False)

    out, lse, *_ = forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.ops.aten._flash_attention_backward(grad_out, q, k, v, out, lse, *ragged, rng_state, rng_state)

    return Calls(forward, backward, N * T * (length + 1) / 2, HEAD_DIM)


def _plain_calls(length: int, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> Calls:
    """One sequence of `length` tokens."""
    wide = dtype if dtype == torch.float64 else torch.float32
    q, k, v, grad_out = (
        torch.randn(num_heads, length, head_dim, device=device, dtype=dtype).to(wide) for _ in range(4)
    )
    starts = range(0, length, PLAIN_BLOCK)
    masks = [_later_keys(start, min(PLAIN_BLOCK, length - start), device) for start in starts]

    def forward() -> None:
        for start, mask in zip(starts, masks, strict=True):
            _plain_forward(q[:, start : start + PLAIN_BLOCK], k, v, mask)

    def backward() -> None:
        for start, mask in zip(starts, masks, strict=True):
            rows = slice(start, start + PLAIN_BLOCK)
            _plain_backward(q[:, rows], k, v, grad_out[:, rows], mask)

    return Calls(forward, backward, num_heads * length * (length + 1) / 2, head_dim)


def _later_keys(start: int, rows: int, device: torch.device) -> Tensor:
    """[rows, start + rows]: the keys that queries start, start + 1, ... must not see."""
    queries = torch.arange(start, start + rows, device=device)
    return queries[:, None] < torch.arange(start + rows, device=device)[None, :]


def _plain_probabilities(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    scores = (q @ k[:, : mask.shape[1]].transpose(1, 2)) / math.sqrt(q.shape[-1])
    scores.masked_fill_(mask, float("-inf"))
    return torch.exp(scores - torch.logsumexp(scores, dim=-1, keepdim=True))


def _plain_forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return _plain_probabilities(q, k, mask) @ v[:, : mask.shape[1]]


def _plain_backward(q: Tensor, k: Tensor, v: Tensor, grad_out: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    keys, values = k[:, : mask.shape[1]], v[:, : mask.shape[1]]
    probabilities = _plain_probabilities(q, k, mask)
    grad_probabilities = grad_out @ values.transpose(1, 2)
    delta = (probabilities * grad_probabilities).sum(-1, keepdim=True)
    grad_scores = probabilities * (grad_probabilities - delta) / math.sqrt(q.shape[-1])
    return grad_scores @ keys, grad_scores.transpose(1, 2) @ q, probabilities.transpose(1, 2) @ grad_out
