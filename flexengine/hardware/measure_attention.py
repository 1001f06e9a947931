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
from flexengine.ops.attention_kernels import KERNELS, Lengths
from flexengine.ops.attention_reference import attention_backward_reference, attention_forward_reference
from flexengine.ops.base import KernelName

QUERIES_PER_KEY = 4
KERNEL_ROWS = 262144  # tokens x heads: keeps every multiprocessor busy at any length
ROW_BYTES = 20  # per row and width of a head: operands, results, gradients and what the backward works with
KERNEL_TOKENS = 16384
PLAIN_BLOCK = 512  # queries per block of the plain path, as in the engine's


class AttentionRates(NamedTuple):
    """(tokens of a sequence, FLOP/s) of both directions by some kernels; FLOPs counted as in `HardwareProfile`."""

    forward: Points
    backward: Points
    kernels: KernelName = "flash"

    @property
    def mean(self) -> float:
        """Geometric mean of all rates."""
        return math.prod(rate ** (1 / len(points)) for points in (self.forward, self.backward) for _, rate in points)


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


def kernel_rates(
    kernels: KernelName, lengths: Sequence[int], head_dim: int, device: torch.device, dtype: torch.dtype, timer: Timer,
    least_s: float, rows: int = KERNEL_ROWS,
) -> AttentionRates:  # fmt: skip
    """Rates of the engine's calls of such kernels on about so many rows (`fitting_rows`). Raises: RuntimeError where
    card or dtype have none."""

    def calls(length: int) -> Calls:
        return _kernel_calls(kernels, length, head_dim, device, dtype, rows)

    rates = _rates(lengths, calls, timer, least_s)
    return rates._replace(kernels=kernels)


def fitting_rows(head_dim: int, free_bytes: int) -> int:
    """Tokens x heads that a benchmark takes within so much memory: KERNEL_ROWS, or less by a power of two."""
    rows = KERNEL_ROWS
    while rows > QUERIES_PER_KEY * KERNEL_TOKENS and rows * head_dim * ROW_BYTES > free_bytes:
        rows //= 2
    return rows


def error_of(kernels: KernelName, head_dim: int, device: torch.device, dtype: torch.dtype) -> float:
    """Largest relative error of output, statistics and gradients against the plain path, on two sequences of 512.

    The plain path runs on the CPU, as its many small kernels would stay loaded and raise the process's memory.
    """
    operands, grad_out, lengths = _operands(1024, 8, 512, head_dim, device, dtype)
    rng = torch.zeros(2, dtype=torch.int64, device=device)
    out, lse = KERNELS[kernels].forward(*operands, lengths)
    grads = KERNELS[kernels].backward(grad_out, *operands, out, lse, lengths, rng)
    q, k, v = (x.cpu() for x in operands)
    plain_out, plain_lse = torch.empty(q.shape, dtype=dtype), torch.empty(lse.shape)
    attention_forward_reference(q, k, v, lengths.seq_lens, 0, plain_out, plain_lse)
    wanted = attention_backward_reference(grad_out.cpu(), q, k, v, plain_out, plain_lse, lengths.seq_lens, 0)
    pairs = zip((out, lse, *grads), (plain_out, plain_lse, *wanted), strict=True)
    return max(float((a.cpu().float() - b.float()).norm() / b.float().norm()) for a, b in pairs)


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


def _operands(
    tokens: int, num_heads: int, length: int, head_dim: int, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Lengths]:
    """((q, k, v), grad_out, lengths) of packed sequences; q, k and v are views of a fused row, as in the engine."""
    groups = num_heads // QUERIES_PER_KEY
    qkv = torch.randn(tokens, num_heads + 2 * groups, head_dim, device=device, dtype=dtype)
    q, k, v = qkv.split((num_heads, groups, groups), dim=1)
    offsets = torch.arange(0, tokens + 1, length, device=device, dtype=torch.int32)
    grad_out = torch.randn(tokens, num_heads, head_dim, device=device, dtype=dtype)
    return (q, k, v), grad_out, Lengths((length,) * (tokens // length), offsets)


def _kernel_calls(
    name: KernelName, length: int, head_dim: int, device: torch.device, dtype: torch.dtype, rows: int = KERNEL_ROWS
) -> Calls:
    """Packed sequences of `length` tokens."""
    tokens = max(length, KERNEL_TOKENS)
    num_heads, kernels = max(QUERIES_PER_KEY, rows // tokens), KERNELS[name]
    operands, grad_out, lengths = _operands(tokens, num_heads, length, head_dim, device, dtype)
    rng = torch.zeros(2, dtype=torch.int64, device=device)

    def forward() -> tuple[Tensor, Tensor]:
        return kernels.forward(*operands, lengths)

    out, lse = forward()

    def backward() -> tuple[Tensor, ...]:
        return kernels.backward(grad_out, *operands, out, lse, lengths, rng)

    return Calls(forward, backward, num_heads * tokens * (length + 1) / 2, head_dim)


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
