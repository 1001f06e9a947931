"""What a sequence leaves behind while it is generated token by token, and where that lies in the GPU arena.

Between steps only planes of parameter groups live. A forward pass uses a few slots; every other byte of the arena holds
what layers carry along a sequence, so generating takes no memory that a plan did not count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flexengine.models.spec import ModelSpec
from flexengine.ops.base import Carried, TensorSpec
from flexengine.schedule.commands import Program
from flexengine.schedule.layer_program import align
from flexengine.schedule.layout import Layout
from flexengine.schedule.relocation import ByteRange


class CachedTensor(NamedTuple):
    """What one op of a layer carries along a sequence: keys, values, the tail of a convolution, or a state."""

    layer: int
    carried: Carried
    spec: TensorSpec


def cached_tensors(model: ModelSpec, tokens: int) -> list[CachedTensor]:
    """List what a sequence of at most `tokens` tokens leaves in every layer.

    A state has two rows: a call reads what the one before left, and leaves its own beside that.
    """
    found = []
    for index, layer in enumerate(model.layers):
        for carried in (carried for op in layer.ops for carried in op.carried):
            rows = 2 if carried.per_chunk else tokens
            found.append(CachedTensor(index, carried, TensorSpec(carried.name, carried.shape, carried.dtype, rows)))
    return found


def sequence_cache_bytes(model: ModelSpec, tokens: int, compute_bytes: int) -> int:
    """Bytes that one sequence of at most `tokens` tokens takes, alignment included."""
    return sum(align(tensor.spec.num_bytes(0, compute_bytes)) for tensor in cached_tensors(model, tokens))


def free_ranges(layout: Layout, program: Program, capacity: int) -> list[ByteRange]:
    """Find the parts of the GPU arena, of `capacity` bytes, that neither hold planes nor are used by a program."""
    taken = [layout.slots[access.slot] for c in program.commands for access in (*c.reads, *c.writes)]
    for group, storage in enumerate(layout.groups):
        taken += [layout.slots[layout.plane_slot(kind, group)] for kind, size in storage.plane_bytes.items() if size]
    ranges, start = [], 0
    for slot in sorted({slot for slot in taken if slot.memory == "gpu"}, key=lambda slot: slot.offset):
        if slot.offset > start:
            ranges.append(ByteRange("gpu", start, slot.offset - start))
        start = max(start, align(slot.end))
    return [*ranges, ByteRange("gpu", start, capacity - start)] if capacity > start else ranges


def place_in(ranges: Iterable[ByteRange], sizes: Iterable[int]) -> list[ByteRange] | None:
    """Give each size a place of its own within the ranges, first fit; None where one finds none."""
    left = [[place.offset, place.offset + place.num_bytes] for place in ranges]
    found = []
    for size in sizes:
        room = next((room for room in left if room[1] - room[0] >= size), None)
        if room is None:
            return None
        found.append(ByteRange("gpu", room[0], size))
        room[0] += align(size)
    return found
