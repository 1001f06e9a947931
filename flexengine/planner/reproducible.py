"""Chunk and round sizes by a rule of model and batch alone, so that they set the same bits within any budget.

A free plan has chunks of 8192 to 32768 tokens where memory allows; those of 4096 take half or a quarter of a chunk's
memory and are 2 to 5% slower. Rounds of 16384 tokens take a card as long to compute as its link takes to bring the
weights. Of experts more is brought for each that is multiplied, of weights stored in fewer bytes less, and rounds are
longer or shorter by that. (Predicted for six models on four cards, 8 to 78 GiB: `bench.reproducible`.)
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil, floor, log2

from flexengine.models.spec import ModelSpec
from flexengine.ops.base import Op
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.plan import MOST_ROUNDED, Numerics, Request
from flexengine.planner.sizes import filled
from flexengine.schedule.group_storage import DTYPE_BYTES, group_storage

CHUNK_TOKENS, ROUND_TOKENS = 4096, 16384


def with_sizes_of_rule(model: ModelSpec, request: Request) -> Request:
    """Pin the sizes of a request that asks for reproducible ones; sizes that it names, as a checkpoint's, stay."""
    if not request.reproducible or request.round_tokens is not None:
        return request
    chunk, chunks = sizes_of_rule(model, request)
    return replace(request, chunk_tokens=chunk, round_tokens=chunk * chunks)


def sizes_of_rule(model: ModelSpec, request: Request) -> tuple[int, int]:
    """Choose tokens of a chunk and chunks of a round from the model, its dtypes and the batch, never from a budget.

    A small step has two chunks. A step has at most `MOST_ROUNDED` rounds, alike as far as sequences divide so.
    """
    longest, batch = request.max_seq_len, request.max_global_batch_tokens
    chunk = filled(min(CHUNK_TOKENS, max(longest, batch // 2)), longest)
    chunk = max(chunk, longest) if request.whole_sequences else chunk
    slices = ceil(longest / chunk)  # of a sequence; 1 where chunks hold whole ones
    unit_tokens = longest if slices > 1 else chunk // longest * longest
    units = ceil(batch / unit_tokens)
    wanted = ROUND_TOKENS * _brought_for_each_used(model, request.numerics) / unit_tokens
    of_round = min(units, max(1, int(wanted), ceil(units / MOST_ROUNDED)))
    return chunk, slices * ceil(units / ceil(units / of_round))


def _brought_for_each_used(model: ModelSpec, numerics: Numerics) -> float:
    """Bytes of blocks' weights that cross the link, over the bytes of what a token is multiplied by as it is computed:
    at least 1, and a power of two, as it steers no finer."""
    groups = [model.groups[index] for index in sorted({index for layer in model.blocks for index in layer.groups})]
    brought = sum(group_storage(group, numerics).plane_bytes["weights"] for group in groups)
    used = sum(group.numel for group in groups) - sum(_idle(op) for layer in model.blocks for op in layer.ops)
    return 2.0 ** max(0, floor(log2(brought / (DTYPE_BYTES[numerics.compute] * used))))


def _idle(op: Op) -> int:
    """Weights of experts that a token does not go to."""
    if not isinstance(op, GroupedLinear):
        return 0
    return (op.num_experts - op.per_token) * op.in_features * op.out_features
