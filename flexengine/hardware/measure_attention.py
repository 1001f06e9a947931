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
    groups = max(1, num_heads // QUERIES_PER_KEY)
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
    """One sequence, by the engine's plain path."""
    operands, grad_out, _ = _operands(length, num_heads, length, head_dim, device, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    out, lse = torch.empty_like(grad_out), torch.empty(num_heads, length, device=device, dtype=wide)

    def forward() -> None:
        attention_forward_reference(*operands, (length,), 0, out, lse)

    def backward() -> None:
        attention_backward_reference(grad_out, *operands, out, lse, (length,), 0)

    forward()  # backward reads its results
    return Calls(forward, backward, num_heads * length * (length + 1) / 2, head_dim)
