"""Sizes of slots that every plan has: a round's batch, and the numbers that the optimizer step depends on."""

from __future__ import annotations

from collections.abc import Iterable

from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.layer_program import align

SCALAR_BYTES = 8
NORM_SQUARE_BYTES = 8
"""Bytes of one run's sum of squares, a float64."""
HOST_GRAD_NORM, HOST_SCALES = 0, SCALAR_BYTES
"""Byte offsets in the host's slot of scalars: what it wants to know of an update that it takes part in."""
PARTIAL_SQUARES = 1024
"""Partial sums of squares per gradient. It is fixed, so that the order of a sum depends on the group's size alone."""
SQUARED_ELEMENTS = 4096
"""A partial sum is over a multiple of so many elements: what a program of the kernel takes at once."""


def part_elements(numel: int) -> int:
    """How many elements of a run of `numel` one partial sum of squares is over."""
    return -(-numel // SQUARED_ELEMENTS // PARTIAL_SQUARES) * SQUARED_ELEMENTS


def norm_square_bytes(groups: Iterable[GroupStorage]) -> int:
    """Bytes of the slot for the sums of squares of all gradients, run by run."""
    return NORM_SQUARE_BYTES * sum(group.num_runs for group in groups)


def run_square_bytes(groups: Iterable[GroupStorage]) -> int:
    """Bytes of the slot for the partial sums of squares of all gradients, run by run, each a float64."""
    return PARTIAL_SQUARES * norm_square_bytes(groups)


def host_scalar_bytes(num_groups: int, scale_bytes: int) -> int:
    """Bytes of the slot that tells the host the gradients' norm and the factor on each, of `scale_bytes` bytes."""
    return HOST_SCALES + scale_bytes * num_groups


def batch_offsets(chunks_per_round: int, chunk_tokens: int, num_axes: int = 1) -> dict[str, int]:
    """Byte offsets inside a batch slot, and its `end`.

    ids and labels are int64, positions and cumulative lengths int32. Rows are per chunk: chunk_tokens for the first
    three, chunk_tokens + 2 for cu_seqlens, and num_axes * chunk_tokens for axes, which is there for several axes.
    """
    tokens, offsets, end = chunks_per_round * chunk_tokens, {}, 0
    sizes = {
        "input_ids": 8 * tokens,
        "labels": 8 * tokens,
        "positions": 4 * tokens,
        "cu_seqlens": 4 * chunks_per_round * (chunk_tokens + 2),
        "axes": 4 * num_axes * tokens if num_axes > 1 else 0,
    }
    for name, size in sizes.items():
        offsets[name] = end
        end += align(size)
    return {**offsets, "end": end}
