"""The window of a sliced sequence: where the rows lie that a layer carries from slice to slice, and their gradients."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from flexengine.ops.base import FLOAT64_BYTES, Op, TensorSpec
from flexengine.schedule.layer_program import align


class CarriedPlace(NamedTuple):
    """A carried tensor, with all rows of a sequence, and its byte offsets in the window and the window of gradients."""

    spec: TensorSpec
    offset: int
    grad_offset: int


class WindowPlaces(NamedTuple):
    """Places of all that a layer carries, and the bytes of both windows."""

    places: tuple[CarriedPlace, ...]
    num_bytes: int
    grad_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of both windows."""
        return self.num_bytes + self.grad_bytes


class SlicePiece(NamedTuple):
    """What one slice has of a carried tensor: bytes, from `first` on in the window, from `packed` on among all that the
    slice has."""

    first: int
    packed: int
    num_bytes: int


@lru_cache(maxsize=1 << 14)
def slice_pieces(
    window: WindowPlaces, slices: int, number: int, compute_bytes: int, grads: bool
) -> tuple[SlicePiece, ...]:
    """The pieces of slice `number` of so many, in the window or in that of gradients."""
    found, packed = list[SlicePiece](), 0
    for spec, offset, grad_offset in window.places:
        width = FLOAT64_BYTES if compute_bytes == FLOAT64_BYTES else 4
        whole = spec.elements(0) * width if grads else spec.num_bytes(0, compute_bytes)
        num_bytes = whole // slices
        found.append(SlicePiece((grad_offset if grads else offset) + number * num_bytes, packed, num_bytes))
        packed += align(num_bytes)
    return tuple(found)


def slice_bytes(window: WindowPlaces, slices: int, compute_bytes: int, grads: bool) -> int:
    """Bytes of all that a slice has in the window, or in that of gradients."""
    return sum(align(piece.num_bytes) for piece in slice_pieces(window, slices, 0, compute_bytes, grads))


@lru_cache(maxsize=4096)
def window_places(ops: tuple[Op, ...], sequence_tokens: int, chunk_tokens: int, compute_bytes: int) -> WindowPlaces:
    """Places for sequences of at most `sequence_tokens` tokens. Gradients take 8 bytes in float64 runs, else 4."""
    grad_bytes = FLOAT64_BYTES if compute_bytes == FLOAT64_BYTES else 4
    places, end, grad_end = [], 0, 0
    for carried in (carried for op in ops for carried in op.carried):
        assert carried.name not in {place.spec.name for place in places}, f"two ops of a layer carry {carried.name}"
        spec = carried.spec(sequence_tokens, chunk_tokens)
        places.append(CarriedPlace(spec, end, grad_end))
        end += align(spec.num_bytes(chunk_tokens, compute_bytes))
        grad_end += align(spec.elements(chunk_tokens) * grad_bytes)
    return WindowPlaces(tuple(places), end, grad_end)
