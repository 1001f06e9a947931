"""Rates of causal attention by sequence length, with the calls of the engine's attention op.

Shapes: T tokens, N query heads, G key/value heads, H head width, S tokens of a sequence.
"""

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flexengine.hardware.curve import Points
from flexengine.hardware.measure.timing import Timer
from flexengine.ops.attention.choice import AttentionChoice, KernelName
from flexengine.ops.attention.kernels import KERNELS, Lengths, Results, Rows, can_serve
from flexengine.ops.attention.packages import PACKAGES
from flexengine.ops.attention.reference import attention_backward_reference, attention_forward_reference
from flexengine.ops.attention.style import AttentionShape, AttentionStyle

QUERIES_PER_KEY = 4
KERNEL_ROWS = 262144  # tokens x heads: keeps every multiprocessor busy at any length
ROW_BYTES = 20  # per row and width of a head: operands, results, gradients and what the backward works with
KERNEL_TOKENS = 16384
SLICE_TOKENS, SLICE_KEYS = (1024, 4096, 16384), 16384
SHORT_TOKENS = 4096
"""Attention of sequences up to this length is timed for as long as asked, of longer ones in proportion to their
length: it takes more and more of a step."""


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
    widths: tuple[int, int]

    def rates(self, timer: Timer, least_s: float) -> tuple[float, float]:
        """FLOP/s: a product with keys and one with values per pair forward, three and two backward."""
        forward_s, backward_s = timer(self.forward, least_s), timer(self.backward, least_s)
        keys, values = (2 * self.pairs * width for width in self.widths)
        return (keys + values) / forward_s, (3 * keys + 2 * values) / backward_s


def shape_of(head_dim: int) -> AttentionShape:
    """The shape that stands for a model of which only the width of heads is known."""
    return AttentionShape(QUERIES_PER_KEY, head_dim, head_dim)


def kernel_rates(
    kernels: KernelName, lengths: Sequence[int], shape: AttentionShape, device: torch.device, dtype: torch.dtype,
    timer: Timer, least_s: float, rows: int = KERNEL_ROWS,
) -> AttentionRates:  # fmt: skip
    """Measure the engine's calls of such kernels on about `rows` rows, which `fitting_rows` gives; lengths at which
    they do not serve are left out. Raises: RuntimeError where card or dtype have no such kernels."""

    def calls(length: int) -> Calls:
        return _kernel_calls(kernels, length, shape, device, dtype, rows)

    served = [length for length in lengths if serves(kernels, dtype, shape, length)]
    return _rates(served, calls, timer, least_s)._replace(kernels=kernels)


def serves(kernels: KernelName, dtype: torch.dtype, shape: AttentionShape, length: int) -> bool:
    """Whether such kernels are written for a shape and sequences of this length, in which a window may hide nothing."""
    return can_serve(kernels, dtype, shape.head_dim, shape.style.within(length), shape.value_dim)


def fastest_first(shape: AttentionShape, found: Sequence[AttentionRates]) -> AttentionChoice:
    """Order kernels by what both directions take together, at every length that any of them was measured at."""
    seconds: dict[int, dict[KernelName, float]] = {}
    for rates in found:
        for (length, forward), (_, backward) in zip(rates.forward, rates.backward, strict=True):
            both = shape.forward_flops(length) / forward + shape.backward_flops(length) / backward
            seconds.setdefault(length, {})[rates.kernels] = both
    orders = ((length, sorted(by_name, key=by_name.__getitem__)) for length, by_name in sorted(seconds.items()))
    return AttentionChoice(shape, tuple((length, tuple(order)) for length, order in orders))


def rates_of(choice: AttentionChoice, found: Sequence[AttentionRates]) -> AttentionRates:
    """The rates of the fastest kernels at every length; `kernels` are those of most lengths."""
    best: list[tuple[int, KernelName]] = [(length, order[0]) for length, order in choice.orders]
    by_name = {rates.kernels: (dict(rates.forward), dict(rates.backward)) for rates in found}
    forward, backward = (tuple((n, by_name[name][half][n]) for n, name in best) for half in (0, 1))
    names = [name for _, name in best]
    return AttentionRates(forward, backward, max(best, key=lambda each: names.count(each[1]))[1])


def slice_shares(
    shape: AttentionShape, whole: AttentionRates, device: torch.device, dtype: torch.dtype, timer: Timer, least_s: float
) -> Points:
    """Measure slices that see SLICE_KEYS earlier keys, by their tokens: the rate of both directions over that of whole
    sequences by the same kernels, at most 1.

    whole: at the longest sequences, of which slices are cut. Raises: RuntimeError where the kernels take no slices.
    """
    (_, forward), (_, backward) = whole.forward[-1], whole.backward[-1]
    shares = []
    for tokens in SLICE_TOKENS:
        calls = _slice_calls(whole.kernels, tokens, SLICE_KEYS, shape, device, dtype)
        rates = calls.rates(timer, _long_enough(least_s, SLICE_KEYS))
        keys, values = calls.widths
        parts = keys + values, 3 * keys + 2 * values
        slice_s, whole_s = (
            sum(f / r for f, r in zip(parts, each, strict=True)) for each in (rates, (forward, backward))
        )
        shares.append((tokens, min(1.0, whole_s / slice_s)))
    return tuple(shares)


def mixed_rates(parts: Sequence[tuple[AttentionShape, int, AttentionRates]]) -> AttentionRates:
    """Rates of shapes together, each with so many heads: all FLOPs over all seconds, at every length."""
    lengths = sorted(set.intersection(*({length for length, _ in rates.forward} for _, _, rates in parts)))

    def mix(half: Literal["forward", "backward"]) -> Points:
        def rate(length: int) -> float:
            flops = [heads * getattr(shape, f"{half}_flops")(length) for shape, heads, _ in parts]
            rates = [dict(getattr(rates, half))[length] for _, _, rates in parts]
            return sum(flops) / sum(f / r for f, r in zip(flops, rates, strict=True))

        return tuple((length, rate(length)) for length in lengths)

    return AttentionRates(mix("forward"), mix("backward"), parts[0][2].kernels)


def fitting_rows(head_dim: int, free_bytes: int) -> int:
    """Tokens x heads that a benchmark takes within so much memory: KERNEL_ROWS, or less by a power of two."""
    rows = KERNEL_ROWS
    while rows > QUERIES_PER_KEY * KERNEL_TOKENS and rows * head_dim * ROW_BYTES > free_bytes:
        rows //= 2
    return rows


def errors_of(
    kernels: KernelName,
) -> tuple[Callable[[KernelName, AttentionShape, torch.device, torch.dtype], float], ...]:
    """What kernels are checked by: of packages, of which a person may have any release, slices as well."""
    return (error_of, slice_error_of) if kernels in PACKAGES else (error_of,)


def error_of(kernels: KernelName, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> float:
    """Largest relative error of output, statistics and gradients against the plain path, on two sequences of 512.

    The plain path runs on the CPU, because its many small kernels would stay loaded and raise the process's memory.
    """
    style = shape.style.within(512)
    groups = max(1, KERNEL_ROWS // KERNEL_TOKENS // shape.members)  # as for rates: our own are compiled for each number
    operands, grad_out, lengths = _operands(1024, groups, 512, shape, device, dtype)
    rng = torch.zeros(2, dtype=torch.int64, device=device)
    results = Results(*KERNELS[kernels].forward(*operands, lengths, style))
    grads = KERNELS[kernels].backward(grad_out, operands, results, lengths, rng, style)
    return _largest_error((*results, *grads), operands, grad_out, lengths.seq_lens, style)


def slice_error_of(kernels: KernelName, shape: AttentionShape, device: torch.device, dtype: torch.dtype) -> float:
    """The same for the last 512 queries of a sequence of 1024: with a window one call, else one over their own keys and
    one over the earlier ones, whose log-sum-exps join them."""
    style, groups = shape.style.within(1024), max(1, KERNEL_ROWS // KERNEL_TOKENS // shape.members)
    (q, k, v), grad_out, _ = _operands(1024, groups, 1024, shape, device, dtype)
    q, grad_out, run = q[512:], grad_out[512:], KERNELS[kernels]
    own = Lengths((512,), torch.arange(0, 1024, 512, dtype=torch.int32, device=device))
    calls = [(slice(0, 1024), own)] if style.window else [(slice(512, 1024), own), (slice(0, 512), None)]
    parts = [run.forward(q, k[keys], v[keys], lengths, style) for keys, lengths in calls]
    lse = torch.stack([part.cpu() for _, part in parts]).logsumexp(0)
    out = sum(out.cpu().float() * (part.cpu() - lse).exp().t()[..., None] for out, part in parts)
    assert isinstance(out, Tensor)
    joined = Results(out.to(device, dtype), lse.to(device))
    rng, grads = torch.zeros(2, dtype=torch.int64, device=device), Rows(*(torch.zeros(x.shape) for x in (q, k, v)))
    for keys, lengths in calls:
        found = run.backward(grad_out, Rows(q, k[keys], v[keys]), joined, lengths, rng, style)
        for total, grad in zip((grads.q, grads.k[keys], grads.v[keys]), found, strict=True):
            total.add_(grad.cpu())
    return _largest_error((*joined, *grads), Rows(q, k, v), grad_out, (512,), style, 512)


def _largest_error(
    found: Sequence[Tensor], operands: Rows, grad_out: Tensor, seq_lens: tuple[int, ...], style: AttentionStyle,
    keys_before: int = 0,
) -> float:  # fmt: skip
    """Compare output, statistics and gradients with the plain path's on the CPU."""
    rows, (tokens, heads) = Rows(*(x.cpu() for x in operands)), grad_out.shape[:2]
    plain = Results(torch.empty(grad_out.shape, dtype=grad_out.dtype), torch.empty(heads, tokens))
    attention_forward_reference(*rows, seq_lens, keys_before, *plain, style)
    wanted = attention_backward_reference(grad_out.cpu(), rows, plain, seq_lens, keys_before, style=style)
    pairs = zip(found, (*plain, *wanted), strict=True)
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
        rates = calls(length).rates(timer, _long_enough(least_s, length))
        forward.append((length, rates[0]))
        backward.append((length, rates[1]))
    return AttentionRates(tuple(forward), tuple(backward))


def _long_enough(least_s: float, length: int) -> float:
    return least_s * max(1.0, length / SHORT_TOKENS)


def _operands(
    tokens: int, groups: int, length: int, shape: AttentionShape, device: torch.device, dtype: torch.dtype
) -> tuple[Rows, Tensor, Lengths]:
    """(rows, grad_out, lengths) of packed sequences; rows are views of fused ones, as in the engine."""
    heads, width = groups * shape.members, shape.head_dim
    row = torch.randn(tokens, (heads + groups) * width + groups * shape.value_dim, device=device, dtype=dtype)
    q, k = row[:, : (heads + groups) * width].unflatten(1, (-1, width)).split((heads, groups), dim=1)
    v = row[:, (heads + groups) * width :].unflatten(1, (groups, -1))
    offsets = torch.arange(0, tokens + 1, length, device=device, dtype=torch.int32)
    grad_out = torch.randn(tokens, heads, shape.value_dim, device=device, dtype=dtype)
    return Rows(q, k, v), grad_out, Lengths((length,) * (tokens // length), offsets)


def _kernel_calls(
    name: KernelName, length: int, shape: AttentionShape, device: torch.device, dtype: torch.dtype,
    rows: int = KERNEL_ROWS,
) -> Calls:  # fmt: skip
    """Packed sequences of `length` tokens."""
    tokens, style = max(length, KERNEL_TOKENS), shape.style.within(length)
    groups, kernels = max(1, rows // tokens // shape.members), KERNELS[name]
    operands, grad_out, lengths = _operands(tokens, groups, length, shape, device, dtype)
    rng = torch.zeros(2, dtype=torch.int64, device=device)

    def forward() -> tuple[Tensor, Tensor]:
        return kernels.forward(*operands, lengths, style)

    results = Results(*forward())

    def backward() -> tuple[Tensor, ...]:
        return kernels.backward(grad_out, operands, results, lengths, rng, style)

    pairs = groups * shape.members * tokens * (style.mean_keys(length) if style.window else (length + 1) / 2)
    return Calls(forward, backward, pairs, (shape.head_dim, shape.value_dim))


def _slice_calls(
    name: KernelName, tokens: int, keys: int, shape: AttentionShape, device: torch.device, dtype: torch.dtype
) -> Calls:
    """The last `tokens` queries of a sequence over so many keys, all of which they see."""
    groups = max(1, KERNEL_ROWS // KERNEL_TOKENS // shape.members)
    longest = max(tokens, keys)
    (q, k, v), grad_out, _ = _operands(longest, groups, longest, shape, device, dtype)
    rows, grad_out, rng = Rows(q[:tokens], k[:keys], v[:keys]), grad_out[:tokens], torch.zeros(2, dtype=torch.int64)
    rng, style, kernels = rng.to(device), shape.style, KERNELS[name]

    def forward() -> tuple[Tensor, Tensor]:
        return kernels.forward(*rows, None, style)

    results = Results(*forward())

    def backward() -> tuple[Tensor, ...]:
        return kernels.backward(grad_out, rows, results, None, rng, style)

    return Calls(forward, backward, groups * shape.members * tokens * keys, (shape.head_dim, shape.value_dim))


def _plain_calls(length: int, num_heads: int, head_dim: int, device: torch.device, dtype: torch.dtype) -> Calls:
    """One sequence, by the engine's plain path."""
    groups = max(1, num_heads // QUERIES_PER_KEY)
    shape = AttentionShape(num_heads // groups, head_dim, head_dim)
    operands, grad_out, _ = _operands(length, groups, length, shape, device, dtype)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    results = Results(torch.empty_like(grad_out), torch.empty(num_heads, length, device=device, dtype=wide))

    def forward() -> None:
        attention_forward_reference(*operands, (length,), 0, *results)

    def backward() -> None:
        attention_backward_reference(grad_out, operands, results, (length,), 0)

    forward()  # backward reads its results
    return Calls(forward, backward, num_heads * length * (length + 1) / 2, (head_dim, head_dim))
