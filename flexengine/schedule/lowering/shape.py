"""The shape of a round: all that its program depends on beside the plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class ChunkShape(NamedTuple):
    """Size of one chunk: its tokens and their mean sequence length, which sets costs.

    For a slice of a long sequence also: the first and last chunk of that sequence in the round, and the position of the
    chunk's first token in it.
    """

    tokens: int
    seq_len: int
    first_slice: int = -1
    last_slice: int = -1
    start: int = 0

    @property
    def is_slice(self) -> bool:
        """True when the chunk is a part of a sequence that is longer than a chunk."""
        return self.first_slice >= 0


class RoundShape(NamedTuple):
    """The chunks of one round. Programs depend on nothing else of a batch, so they are lowered once per shape.

    counts: where it is of several rounds that run together in stages, how many chunks each has.
    """

    chunks: tuple[ChunkShape, ...]
    counts: tuple[int, ...] = ()

    @staticmethod
    def of_wave(rounds: Sequence[RoundShape]) -> RoundShape:
        """The shape of rounds that run together."""
        chunks, counts = list[ChunkShape](), tuple(len(found.chunks) for found in rounds)
        for found in rounds:
            first = len(chunks)
            chunks += [
                chunk._replace(first_slice=first + chunk.first_slice, last_slice=first + chunk.last_slice)
                if chunk.is_slice
                else chunk
                for chunk in found.chunks
            ]
        return RoundShape(tuple(chunks), counts)

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)
