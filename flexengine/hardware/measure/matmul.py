"""Measures the linear layers of a model's blocks: forward, input gradient and weight gradient.

Shapes: T tokens; a layer has D input and F output features: x [T, D], weight [F, D], y [T, F]. The calls are those
of the engine's linear op: weight gradients are added to an accumulator in float32 (float64 for float64 compute). With
the dtype of FP8 operands they are the calls of its FP8 linear op, which gives results in bf16 and writes the
accumulator; operands are rounded already, and their scales are ones.
Random data throughout: zeros draw less power and make a power-capped card look faster than it is in training.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle
from typing import NamedTuple, TypeVar

import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from flexengine.hardware.curve import Curve, Points
from flexengine.hardware.measure.timing import TimerOfAll
from flexengine.ops.fp8 import SCALINGS
from flexengine.ops.fp8_scaling import FORWARD_DTYPE
from flexengine.ops.linear import accumulate_weight_grad
from flexengine.ops.linear_shape import LinearShape

BY_WEIGHTS = ("forward", "input gradient")
PASSES = (*BY_WEIGHTS, "weight gradient")
QUERY_HEADS_PER_KEY_HEAD = 4  # grouped queries as in most models since 2023: keys and values are a quarter as wide
WHOLE_FEATURES = 32  # whose multiples operands of all kinds have
LEAST_FEATURES = 2048  # a product cut to fewer features would run at another rate than the whole one
ALIGNMENT = 256  # elements: cuBLAS picks its fast kernels for operands that start at multiples of 16 bytes
MOST_APART = 1.5
"""Between two measurements of a product by a clock that drifts. One that took longer fell in a moment when host or card
were held up by others, and the shorter one counts twice."""
OPERAND_SETS = 4  # weights of a few sets together exceed any GPU's cache, so each call reads them from memory


T = TypeVar("T")


class Buffers(NamedTuple):
    """Flat memory for all products: random operands in the compute dtype, and bytes for results.

    matmul: how operands are scaled that are FP8.
    """

    operands: Tensor
    results: Tensor
    matmul: str = "fp8"


class BlockRates(NamedTuple):
    """Rates of a block's linear layers by tokens, all passes together, and one curve per layer and pass."""

    matmul_flops_per_s: Points
    curves: tuple[Curve, ...]


def usual_layers(shape: tuple[int, int]) -> tuple[LinearShape, ...]:
    """List a gated block's linear layers for (hidden_size, intermediate_size) = shape, fused as the engine does."""
    hidden_size, intermediate_size = shape
    key_value_size = 2 * hidden_size // QUERY_HEADS_PER_KEY_HEAD
    return (
        LinearShape("qkv_proj", hidden_size, hidden_size + key_value_size),
        LinearShape("o_proj", hidden_size, hidden_size, adds=True),
        LinearShape("gate_up_proj", hidden_size, 2 * intermediate_size),
        LinearShape("down_proj", intermediate_size, hidden_size, adds=True),
    )


def operand_bytes(layer: LinearShape, tokens: int, dtype: torch.dtype) -> tuple[int, int]:
    """Give (bytes of the two operands, bytes of the result), the largest of the three passes."""
    x, y = tokens * layer.in_features, tokens * layer.out_features
    weight = layer.in_features * layer.out_features
    operands = max(x + weight, y + weight, x + y) + 2 * ALIGNMENT
    results = max(max(x, y) * max(2, dtype.itemsize), weight * max(4, dtype.itemsize))
    return operands * dtype.itemsize, results


def affordable_tokens(
    counts: Sequence[int], layers: Sequence[LinearShape], flops_per_s: float, most_s: float
) -> list[int]:
    """Select the token counts, at least the first, at which three passes through each layer once take at most `most_s`
    seconds."""
    per_token = len(PASSES) * sum(layer.flops(1) for layer in layers)
    return [counts[0], *(tokens for tokens in counts[1:] if tokens * per_token / flops_per_s <= most_s)]


def fitting(layer: LinearShape, tokens: int, dtype: torch.dtype, buffers: Buffers) -> LinearShape | None:
    """Halve the features of `layer` until it fits the buffers; None if fewer than LEAST_FEATURES would be left.

    A product that large has many times as many tiles as there are multiprocessors, so half of it runs at the same rate.
    """
    while True:
        read, written = operand_bytes(layer, tokens, dtype)
        if read <= buffers.operands.nbytes and written <= buffers.results.nbytes:
            return layer
        wider = "out_features" if layer.out_features >= layer.in_features else "in_features"
        features = getattr(layer, wider) // 2 // WHOLE_FEATURES * WHOLE_FEATURES
        if features < LEAST_FEATURES:
            return None
        layer = layer._replace(**{wider: features})


def block_rates(
    layers: Sequence[LinearShape], counts: Sequence[int], dtype: torch.dtype, buffers: Buffers, timer: TimerOfAll,
    least_s: float,
) -> BlockRates:  # fmt: skip
    """Measure rates at every token count that fits the buffers, timing each layer and pass for `least_s` twice.

    Order: counts down and up again with no gap between, so that a drifting clock affects all counts equally, and a card
    that has been at work stays at its sustained clock.
    Raises: ValueError if not even the smallest count fits.
    """
    counts = [t for t in counts if all(fitting(layer, t, dtype, buffers) for layer in layers)]
    if not counts:
        widest = max(layers, key=lambda layer: layer.flops(1))
        size = f"{widest.in_features} x {widest.out_features}"
        raise ValueError(f"not enough free memory to measure products of {size} features")
    found: dict[tuple[int, str, str], list[float]] = defaultdict(list)
    for order in (reversed(counts), counts):
        for tokens in order:
            for key, pass_s in _seconds(layers, PASSES, tokens, dtype, buffers, timer, least_s).items():
                found[tokens, *key].append(pass_s)
    seconds = {key: _of_both(*both) for key, both in found.items()}
    rates = [_weighted_rate(layers, tokens, seconds) for tokens in counts]
    # a longer product is never slower per token than a shorter one, as it could be run in parts: where one was, the
    # clock had changed, and the mean of both is less wrong than the better one
    points = tuple(zip(counts, isotonic_regression(rates).x.tolist(), strict=True))
    return BlockRates(points, tuple(_curve(p, name, counts, seconds) for p in layers for name in PASSES))


def scaling_shares(
    layers: Sequence[LinearShape], counts: Sequence[int], matmul: str, buffers: Buffers, timer: TimerOfAll,
    least_s: float,
) -> tuple[Points, Points]:  # fmt: skip
    """Measure how fast FP8 products are whose operands are scaled as a value of --matmul-dtype says, by the time of
    those with one scale each: over all passes that it has in FP8, and over the two by weights."""
    passes = PASSES if SCALINGS[matmul].gradient_in_fp8 else BY_WEIGHTS
    found: tuple[list[tuple[int, float]], ...] = [], []
    for tokens in counts:
        if all(fitting(layer, tokens, FORWARD_DTYPE, buffers) for layer in layers):
            both = [
                _seconds(layers, passes, tokens, FORWARD_DTYPE, buffers._replace(matmul=scaled), timer, least_s)
                for scaled in ("fp8", matmul)
            ]
            one_s, own_s = (
                [sum(layer.count * seconds[layer.name, name] for layer in layers) for name in passes]
                for seconds in both
            )
            for points, count in zip(found, (len(passes), len(BY_WEIGHTS)), strict=True):
                points.append((tokens, sum(one_s[:count]) / sum(own_s[:count])))
    return tuple(found[0]), tuple(found[1])


def _of_both(first_s: float, second_s: float) -> float:
    """Add up two measurements of a product."""
    low_s, high_s = sorted((first_s, second_s))
    return 2 * low_s if high_s > MOST_APART * low_s else low_s + high_s


def _weighted_rate(layers: Sequence[LinearShape], tokens: int, seconds: dict[tuple[int, str, str], float]) -> float:
    """Divide the FLOPs of all layers and passes by their time; `seconds` are sums of two measurements."""
    total_s = sum(layer.count * seconds[tokens, layer.name, name] for layer in layers for name in PASSES)
    return 2 * len(PASSES) * sum(layer.count * layer.flops(tokens) for layer in layers) / total_s


def _curve(layer: LinearShape, name: str, counts: Sequence[int], seconds: dict[tuple[int, str, str], float]) -> Curve:
    points = tuple((tokens, 2 * layer.flops(tokens) / seconds[tokens, layer.name, name]) for tokens in counts)
    return Curve(f"{layer.name} {name}", "tokens", "FLOP/s", points)


def _seconds(
    layers: Sequence[LinearShape], passes: Sequence[str], tokens: int, dtype: torch.dtype, buffers: Buffers,
    timer: TimerOfAll, least_s: float,
) -> dict[tuple[str, str], float]:  # fmt: skip
    """Measure seconds of passes of whole layers, by layer and pass, from as much of each layer as fits the buffers."""
    shares, makers = dict[tuple[str, str], float](), list[Callable[[], Callable[[], object]]]()
    for layer in layers:
        part = fitting(layer, tokens, dtype, buffers)
        assert part is not None, "the caller has seen that some of it fits"
        for name in passes:
            shares[layer.name, name] = layer.flops(tokens) / part.flops(tokens)
            makers.append(partial(_work, part, tokens, name, dtype, buffers))
    works = (make() for make in makers)
    return {key: share * part_s for (key, share), part_s in zip(shares.items(), timer(works, least_s), strict=True)}


def _work(part: LinearShape, tokens: int, name: str, dtype: torch.dtype, buffers: Buffers) -> Callable[[], object]:
    """Make a function that runs one pass, each time on the next of a few sets of operands."""
    if dtype == FORWARD_DTYPE:
        return _fp8_work(part, tokens, name, buffers)
    x, y, weight = (tokens, part.in_features), (tokens, part.out_features), (part.out_features, part.in_features)
    acc_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    if name != "weight gradient":
        stored = (weight[1], weight[0]) if part.transposed else weight
        sets = _operand_sets(buffers, x if name == "forward" else y, stored)
        sets = [(rows, matrix.t() if part.transposed else matrix) for rows, matrix in sets]
        out = _result(buffers, y if name == "forward" else x, dtype)
        if name == "input gradient":
            return _repeat(sets, lambda grad_y_TF, weight_FD: torch.mm(grad_y_TF, weight_FD, out=out))
        if part.adds:
            return _repeat(sets, lambda x_TD, weight_FD: torch.addmm(out, x_TD, weight_FD.t(), out=out))
        return _repeat(sets, lambda x_TD, weight_FD: torch.mm(x_TD, weight_FD.t(), out=out))
    if part.transposed:
        x, y, weight = y, x, (weight[1], weight[0])
    sets, out = _operand_sets(buffers, y, x), _result(buffers, weight, acc_dtype)
    return _repeat(sets, lambda grad_y_TF, x_TD: accumulate_weight_grad(out, grad_y_TF, x_TD, first=False))


def _fp8_work(part: LinearShape, tokens: int, name: str, buffers: Buffers) -> Callable[[], object]:
    """Make the function of `_work` for FP8 operands, which must both be contiguous along the summed dimension."""
    d, f = part.in_features, part.out_features
    scaling, out_dtype = SCALINGS[buffers.matmul], torch.bfloat16
    if name == "forward":
        shapes, width = ((tokens, d), (f, d)), f
    elif name == "input gradient":
        shapes, width = ((tokens, f), (d, f)), d
    else:
        shapes, width, out_dtype = ((f, tokens), (d, tokens)), d, torch.float32
    forward, other = name == "forward", "transposed tokens" if name == "weight gradient" else "weight"
    out = _result(buffers, (shapes[0][0], width), out_dtype)
    pairs = [
        (scaling.with_ones(a, "tokens" if forward else "gradient"), scaling.with_ones(b, other))
        for a, b in _operand_sets(buffers, *shapes)
    ]
    return _repeat(pairs, lambda a, b: scaling.multiply(a, b, out, fast=forward))


def _repeat(sets: Sequence[tuple[T, T]], work: Callable[[T, T], object]) -> Callable[[], object]:
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
    """Give a zeroed matrix for results, in the memory of all: what works that take turns leave there for each other may
    be any bits, which are added to in the same time."""
    return buffers.results[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape).zero_()
