"""Context transport: which chunks of a round each rank runs.

Ranks cut the chunks of a round into consecutive runs, one for each, so that their work balances: late slices of a long
sequence have more keys to attend to, so that ranks take fewer of them. A rank without chunks is one of the last.
A layer passes a round's chunks from the first rank to the last in forward, and back in backward, so that its sums have
the order of one rank: a rank hands over what the layer carries along a sequence, in backward its gradient and the
accumulators. So each rank is a layer behind its neighbour. Where a round is cut changes no bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan
from flexengine.schedule.layer_program import LayerProgram

ATTENTION_TIME = 1.15
"""Seconds of a FLOP of attention over those of a product's: where this is off, ranks wait for the slowest."""


class Sizes(Protocol):
    """What a cut asks of `PlannedSizes`."""

    model: ModelSpec
    plan: Plan
    programs: tuple[LayerProgram, ...]
    compute_bytes: int

    @property
    def kept_chunks(self) -> int: ...


class Placed(Protocol):
    """What a cut asks of a chunk's shape."""

    @property
    def is_slice(self) -> bool: ...
    @property
    def start(self) -> int: ...


def shares_of(sizes: Sizes, chunks: Sequence[Placed], most: int | None = None) -> list[range]:
    """The chunks of a round that each rank runs. most: of one rank; None = as many as ranks keep activations of."""
    most, size = sizes.kept_chunks if most is None else most, sizes.plan.request.ranks
    return _cut(tuple(_work(sizes, chunk.start, chunk.is_slice) for chunk in chunks), size, most)


def most_kept(sizes: Sizes) -> int:
    """The most chunks of a round whose activations a rank keeps: of sequences of the greatest length, balanced."""
    plan = sizes.plan
    chunk, longest = plan.chunk_tokens, plan.request.max_seq_len
    slices = -(-longest // chunk)
    works = [_work(sizes, number % slices * chunk, slices > 1) for number in range(plan.chunks_per_round)]
    shares = _cut(tuple(works), plan.request.ranks, len(works))
    return max(len(share) for share in shares)


def _work(sizes: Sizes, start: int, is_slice: bool) -> float:
    """What all blocks take for a full chunk whose sequence has `start` tokens before it."""
    tokens = sizes.plan.chunk_tokens
    seq_len = 2 * start + tokens if is_slice else tokens
    programs = Counter(program for program in sizes.programs if program.is_block)
    total = 0.0
    for program, count in programs.items():
        forward, backward = (
            work(tokens, seq_len, sizes.compute_bytes) for work in (program.forward_work, program.backward_work)
        )
        both = forward.plus(backward)
        attention = both.attention_forward_flops + both.attention_backward_flops
        products = both.matmul_flops + both.fp8_flops + both.fp8_weight_flops + both.grouped_flops
        total += count * (products + ATTENTION_TIME * attention + 1.0)
    return total


@lru_cache(maxsize=256)
def _cut(works: tuple[float, ...], size: int, most: int) -> list[range]:
    """Consecutive runs of at most so many, the largest of which is as small as it can be."""
    low, high = max(works), sum(works)
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if len(_filled(works, middle, most)) <= size else (middle, high)
    shares = _filled(works, high, most)
    return [*shares, *[range(len(works), len(works))] * (size - len(shares))]


def _filled(works: tuple[float, ...], limit: float, most: int) -> list[range]:
    """Runs that take as much as they can within a limit."""
    found, start, total = list[range](), 0, 0.0
    for number, work in enumerate(works):
        if number > start and (total + work > limit * (1 + 1e-9) or number - start == most):
            found.append(range(start, number))
            start, total = number, 0.0
        total += work
    return [*found, range(start, len(works))]


def why_no_context(model: ModelSpec, in_parts: bool) -> str:
    """Why ranks cannot cut rounds of a model, in words; empty where they can."""
    reasons = {
        "it has a tower, whose rows come with the embedding": model.given is not None,
        "a loss balances its experts": model.balancing is not None,
        "its experts stream in parts": in_parts,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
