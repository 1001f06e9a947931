"""Packs whole sequences into chunks, and chunks into rounds. It depends on chunk and round sizes, never on memory.

Sequences keep their order. A chunk takes whole sequences while they fit; a sequence longer than a chunk becomes
consecutive chunks of its own in one round.
"""

from __future__ import annotations

from typing import NamedTuple

from flexengine.schedule.lowering.shape import ChunkShape, RoundShape


class SequenceRange(NamedTuple):
    """Tokens [start, start + length) of sequence number `sequence`."""

    sequence: int
    start: int
    length: int


class PackedChunk(NamedTuple):
    """What one chunk holds: ranges of sequences.

    first_slice, last_slice: for a slice of a long sequence, the numbers of that sequence's first and last chunk in the
    round; -1 otherwise.
    """

    ranges: tuple[SequenceRange, ...]
    first_slice: int = -1
    last_slice: int = -1

    @property
    def tokens(self) -> int:
        """Tokens of the chunk."""
        return sum(p.length for p in self.ranges)


def pack(seq_lens: list[int], chunk_tokens: int, chunks_per_round: int) -> list[list[PackedChunk]]:
    """Pack sequences of the given lengths into rounds of chunks.

    Raises ValueError for an empty sequence or one that does not fit in a round.
    """
    rounds: list[list[PackedChunk]] = [[]]
    for unit in _units(seq_lens, chunk_tokens):
        if len(unit) > chunks_per_round:
            longest = sum(part.length for chunk in unit for part in chunk)
            raise ValueError(
                f"a sequence of {longest} tokens does not fit in a round of {chunk_tokens * chunks_per_round} tokens"
            )
        if len(rounds[-1]) + len(unit) > chunks_per_round:
            rounds.append([])
        first = len(rounds[-1])
        span = (first, first + len(unit) - 1) if len(unit) > 1 else (-1, -1)
        rounds[-1].extend(PackedChunk(tuple(chunk), *span) for chunk in unit)
    return rounds


def _units(seq_lens: list[int], chunk_tokens: int) -> list[list[list[SequenceRange]]]:
    """Chunks that must stay together: one chunk of whole sequences, or all slices of a long one."""
    units: list[list[list[SequenceRange]]] = []
    room = 0
    for i, length in enumerate(seq_lens):
        if length < 1:
            raise ValueError(f"sequence {i} of the batch is empty; every sequence needs at least one token")
        if length > chunk_tokens:
            units.append([[SequenceRange(i, s, min(chunk_tokens, length - s))] for s in range(0, length, chunk_tokens)])
            room = 0
        elif length <= room:
            units[-1][0].append(SequenceRange(i, 0, length))
            room -= length
        else:
            units.append([[SequenceRange(i, 0, length)]])
            room = chunk_tokens - length
    return units


def packed_shape(chunks: list[PackedChunk], chunk_tokens: int) -> RoundShape:
    """The shape to lower packed chunks for: full chunks, so that rounds of equal structure share one program."""
    return RoundShape(
        tuple(
            ChunkShape(
                chunk_tokens, chunk_tokens, c.first_slice, c.last_slice, c.ranges[0].start if c.first_slice >= 0 else 0
            )
            for c in chunks
        )
    )
