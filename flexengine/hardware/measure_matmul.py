"""Measures the linear layers of one transformer block: forward, input gradient and weight gradient.

Shapes: T tokens; a product has D input and F output features: x [T, D], weight [F, D], y [T, F]. The calls are those
of the engine's linear op: weight gradients are added to an accumulator in float32 (float64 for float64 compute). With
the dtype of FP8 operands they are the calls of its FP8 linear op, which gives results in bf16 and writes the
accumulator.
Random data throughout: zeros draw less power and make a power-capped card look faster than it is in training.
"""

import math
from collections.abc import Callable, Sequence
from itertools import accumulate, cycle
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.hardware.curve import Curve, Points
from flexengine.hardware.timing import Timer
from flexengine.ops.fp8 import FORWARD_DTYPE, GRADIENT_DTYPE, MULTIPLE, scaled_product
from flexengine.ops.linear import accumulate_weight_grad

PASSES = ("forward", "input gradient", "weight gradient")
QUERY_HEADS_PER_KEY_HEAD = 4  # grouped queries as in most models since 2023: keys and values are a quarter as wide
LEAST_FEATURES = 2048  # a product cut to fewer features would run at another rate than the whole one
ALIGNMENT = 256  # elements: cuBLAS picks its fast kernels for operands that start at multiples of 16 bytes
OPERAND_SETS = 4  # weights of a few sets together exceed any GPU's cache, so each call reads them from memory


class Product(NamedTuple):
    """One linear layer: its name, D, F, and whether its result is added to a residual."""

    name: str
    in_features: int
    out_features: int
    adds: bool = False

    def flops(self, tokens: int) -> float:
        """FLOPs of one pass over `tokens` tokens."""
        return 2.0 * tokens * self.in_features * self.out_features

    def operand_bytes(self, tokens: int, dtype: torch.dtype) -> tuple[int, int]:
        """Give (bytes of the two operands, bytes of the result), the largest of the three passes."""
        x, y = tokens * self.in_features, tokens * self.out_features
        weight = self.in_features * self.out_features
        operands = max(x + weight, y + weight, x + y) + 2 * ALIGNMENT
        results = max(max(x, y) * max(2, dtype.itemsize), weight * max(4, dtype.itemsize))
        return operands * dtype.itemsize, results


class Buffers(NamedTuple):
    """Flat memory for all products: random operands in the compute dtype, and bytes for results."""

    operands: Tensor
    results: Tensor


class BlockRates(NamedTuple):
    """Rates of a block's linear layers by tokens, all passes together, and one curve per layer and pass."""

    matmul_flops_per_s: Points
    curves: tuple[Curve, ...]


def block_products(shape: tuple[int, int]) -> tuple[Product, ...]:
    """List a block's linear layers for (hidden_size, intermediate_size) = shape, fused as the engine fuses them."""
    hidden_size, intermediate_size = shape
    key_value_size = 2 * hidden_size // QUERY_HEADS_PER_KEY_HEAD
    return (
        Product("qkv_proj", hidden_size, hidden_size + key_value_size),
        Product("o_proj", hidden_size, hidden_size, adds=True),
        Product("gate_up_proj", hidden_size, 2 * intermediate_size),
        Product("down_proj", intermediate_size, hidden_size, adds=True),
    )


def affordable_tokens(counts: Sequence[int], shape: tuple[int, int], flops_per_s: float, most_s: float) -> list[int]:
    """Select the token counts, at least the first, at which a block's three passes take at most `most_s` seconds."""
    per_token = len(PASSES) * sum(product.flops(1) for product in block_products(shape))
    return [counts[0], *(tokens for tokens in counts[1:] if tokens * per_token / flops_per_s <= most_s)]


def fitting(product: Product, tokens: int, dtype: torch.dtype, buffers: Buffers) -> Product | None:
    """Halve the features of `product` until it fits the buffers; None if fewer than LEAST_FEATURES would be left.

    A product that large has many times as many tiles as there are multiprocessors, so half of it runs at the same rate.
    """
    while True:
        operand_bytes, result_bytes = product.operand_bytes(tokens, dtype)
        if operand_bytes <= buffers.operands.nbytes and result_bytes <= buffers.results.nbytes:
            return product
        wider = "out_features" if product.out_features >= product.in_features else "in_features"
        features = getattr(product, wider) // 2 // MULTIPLE * MULTIPLE
        if features < LEAST_FEATURES:
            return None
        product = product._replace(**{wider: features})


def block_rates(
    shape: tuple[int, int], counts: Sequence[int], dtype: torch.dtype, buffers: Buffers, timer: Timer, least_s: float
) -> BlockRates:
    """Measure rates at every token count that fits the buffers, timing each layer and pass for `least_s` twice.

    Order: counts down and up again with no gap between, so that a drifting clock affects all counts equally, and a card
    that has been at work stays at its sustained clock.
    Raises: ValueError if not even the smallest count fits.
    """
    products = block_products(shape)
    counts = [t for t in counts if all(fitting(p, t, dtype, buffers) for p in products)]
    if not counts:
        raise ValueError(f"not enough free memory to measure products of {shape[0]} x {shape[1]} features")
    seconds: dict[tuple[int, str, str], float] = {}
    for order in (reversed(counts), counts):
        for tokens in order:
            for product in products:
                for name in PASSES:
                    key = (tokens, product.name, name)
                    once_s = _seconds(product, tokens, name, dtype, buffers, timer, least_s)
                    seconds[key] = seconds.get(key, 0.0) + once_s
    rates = [_weighted_rate(products, tokens, seconds) for tokens in counts]
    # a longer product is never slower per token than a shorter one: it could be run in parts
    points = tuple(zip(counts, accumulate(rates, max), strict=True))
    return BlockRates(points, tuple(_curve(p, name, counts, seconds) for p in products for name in PASSES))


def _weighted_rate(products: Sequence[Product], tokens: int, seconds: dict[tuple[int, str, str], float]) -> float:
    """Divide the FLOPs of all products and passes by their time; `seconds` are sums of two measurements."""
    total_s = sum(seconds[tokens, product.name, name] for product in products for name in PASSES)
    return 2 * len(PASSES) * sum(product.flops(tokens) for product in products) / total_s


def _curve(product: Product, name: str, counts: Sequence[int], seconds: dict[tuple[int, str, str], float]) -> Curve:
    points = tuple((tokens, 2 * product.flops(tokens) / seconds[tokens, product.name, name]) for tokens in counts)
    return Curve(f"{product.name} {name}", "tokens", "FLOP/s", points)


def _seconds(
    product: Product, tokens: int, name: str, dtype: torch.dtype, buffers: Buffers, timer: Timer, least_s: float
) -> float:
    """Measure seconds of one pass of a whole product, from as much of it as fits the buffers."""
    part = fitting(product, tokens, dtype, buffers)
    assert part is not None
    return timer(_work(part, tokens, name, dtype, buffers), least_s) * product.flops(tokens) / part.flops(tokens)


def _work(part: Product, tokens: int, name: str, dtype: torch.dtype, buffers: Buffers) -> Callable[[], object]:
    """Make a function that runs one pass, each time on the next of a few sets of operands."""
    if dtype == FORWARD_DTYPE:
        return _fp8_work(part, tokens, name, buffers)
    x, y, weight = (tokens, part.in_features), (tokens, part.out_features), (part.out_features, part.in_features)
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if name == "forward":
        sets, out = _operand_sets(buffers, x, weight), _result(buffers, y, dtype)
        if part.adds:
            return _repeat(sets, lambda x_TD, weight_FD: torch.addmm(out, x_TD, weight_FD.t(), out=out))
        return _repeat(sets, lambda x_TD, weight_FD: torch.mm(x_TD, weight_FD.t(), out=out))
    if name == "input gradient":
        sets, out = _operand_sets(buffers, y, weight), _result(buffers, x, dtype)
        return _repeat(sets, lambda grad_y_TF, weight_FD: torch.mm(grad_y_TF, weight_FD, out=out))
    sets, out = _operand_sets(buffers, y, x), _result(buffers, weight, acc_dtype)
    return _repeat(sets, lambda grad_y_TF, x_TD: accumulate_weight_grad(out, grad_y_TF, x_TD, first=False))


def _fp8_work(part: Product, tokens: int, name: str, buffers: Buffers) -> Callable[[], object]:
    """Make the function of `_work` for FP8 operands, which must both be contiguous along the summed dimension."""
    d, f = part.in_features, part.out_features
    one = torch.ones(1, device=buffers.operands.device)
    if name == "forward":
        sets, out = _operand_sets(buffers, (tokens, d), (f, d)), _result(buffers, (tokens, f), torch.bfloat16)
        return _repeat(sets, lambda x8, weight8: scaled_product(x8, weight8, one, one, out, fast=True))
    if name == "input gradient":
        sets, out = _operand_sets(buffers, (tokens, f), (d, f)), _result(buffers, (tokens, d), torch.bfloat16)
    else:
        sets, out = _operand_sets(buffers, (f, tokens), (d, tokens)), _result(buffers, (f, d), torch.float32)
    return _repeat(sets, lambda grad8, other8: scaled_product(grad8.view(GRADIENT_DTYPE), other8, one, one, out))


def _repeat(sets: Sequence[tuple[Tensor, Tensor]], work: Callable[[Tensor, Tensor], object]) -> Callable[[], object]:
    endless = cycle(sets)
    return lambda: work(*next(endless))


def _operand_sets(buffers: Buffers, first: tuple[int, int], second: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
    """Cut up to OPERAND_SETS disjoint pairs of matrices of two shapes out of the random operands."""
    lengths = [-(-math.prod(shape) // ALIGNMENT) * ALIGNMENT for shape in (first, second)]
    count = max(1, min(OPERAND_SETS, buffers.operands.numel() // sum(lengths)))
    sets = []
    for start in range(0, count * sum(lengths), sum(lengths)):
        a = buffers.operands[start : start + math.prod(first)].view(first)
        b = buffers.operands[start + lengths[0] : start + lengths[0] + math.prod(second)].view(second)
        sets.append((a, b))
    return sets


def _result(buffers: Buffers, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Give a zeroed matrix for results, in the memory of the last one."""
    return buffers.results[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape).zero_()
