"""Packs whole sequences into chunks, and chunks into rounds. It depends on the batch and on chunk and round sizes,
never on memory.

A chunk takes whole sequences while they fit; a sequence longer than a chunk becomes consecutive chunks of its own in
one round. Sequences of one length fill round after round. Others are divided over as few rounds, all of nearly as many
tokens: weights cross the link in every round, and a round that is nearly empty would wait for nothing else. Sequences
keep their order, unless another one makes fewer rounds.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from flexengine.plan import Request
from flexengine.schedule.lowering.shape import ChunkShape, RoundShape


def most_chunks(longest: int, batch_tokens: int, chunk_tokens: int) -> int:
    """The most chunks that `pack` makes of any batch of so many tokens, in sequences of at most `longest` tokens.

    Of two chunks of whole sequences that follow each other, the first lacks room for the second's first sequence: both
    have more than a chunk's tokens together, and each but the last more than a chunk's less the longest. A sequence in
    slices has fewer than twice its part of chunks, and may leave the chunk before it nearly empty.
    """
    pairs = batch_tokens // (chunk_tokens + 1)
    if longest > chunk_tokens:
        return 3 * pairs + 1
    return min(2 * pairs + 1, (batch_tokens - 1) // (chunk_tokens - longest + 1) + 1)


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


Unit = list[list[SequenceRange]]
"""Chunks that must stay together."""


def pack(
    seq_lens: list[int], chunk_tokens: int, chunks_per_round: int, round_multiple: int = 1
) -> list[list[PackedChunk]]:
    """Pack sequences of the given lengths into rounds of chunks. No chunk holds a sequence of no tokens.

    round_multiple: the number of rounds is a multiple of it where there are units enough, and rounds are filled evenly,
    so that ranks that take rounds in turn have equal work.
    Raises ValueError for a sequence that does not fit in a round.
    """
    units = _units(seq_lens, chunk_tokens)
    for unit in units:
        if len(unit) > chunks_per_round:
            longest = sum(part.length for chunk in unit for part in chunk)
            raise ValueError(
                f"a sequence of {longest} tokens does not fit in a round of {chunk_tokens * chunks_per_round} tokens"
            )
    if round_multiple == 1:
        rounds = _in_order(units, chunks_per_round)
        if len(set(seq_lens) - {0}) > 1:
            rounds = _balanced(seq_lens, chunk_tokens, chunks_per_round, len(rounds))
        return [_packed(members) for members in rounds]
    return [_packed(members) for members in _even(units, chunks_per_round, round_multiple)]


def _packed(units: list[Unit]) -> list[PackedChunk]:
    """The chunks of one round."""
    chunks: list[PackedChunk] = []
    for unit in units:
        first = len(chunks)
        span = (first, first + len(unit) - 1) if len(unit) > 1 else (-1, -1)
        chunks.extend(PackedChunk(tuple(chunk), *span) for chunk in unit)
    return chunks


def _in_order(units: list[Unit], chunks_per_round: int, most_tokens: int | None = None) -> list[list[Unit]]:
    """Fill round after round, each with at most so many tokens, or with one unit that has more."""
    rounds: list[list[Unit]] = [[]]
    chunks = tokens = 0
    for unit in units:
        chunks, tokens = chunks + len(unit), tokens + _tokens(unit)
        if rounds[-1] and (chunks > chunks_per_round or (most_tokens is not None and tokens > most_tokens)):
            rounds.append([])
            chunks, tokens = len(unit), _tokens(unit)
        rounds[-1].append(unit)
    return rounds


def _balanced(seq_lens: list[int], chunk_tokens: int, chunks_per_round: int, num_rounds: int) -> list[list[Unit]]:
    """At most `num_rounds` rounds, as many as those in order; of as few chunks as make them equally long, all with
    nearly as many tokens."""
    tokens, longest = sum(seq_lens), max(seq_lens)
    if num_rounds > -(-tokens // (chunk_tokens * chunks_per_round)) and longest <= chunk_tokens:
        fitted = _best_fit(seq_lens, chunk_tokens)
        if -(-len(fitted) // chunks_per_round) < num_rounds:
            return _of_equal_tokens(fitted, chunks_per_round, -(-len(fitted) // chunks_per_round))
    chunks = sum(map(len, _units(seq_lens, chunk_tokens)))
    most_chunks = num_rounds * -(-chunks // num_rounds)

    def is_enough(limit: int) -> bool:
        """Whether chunks of so many tokens hold all, in as many rounds."""
        units = _units(seq_lens, chunk_tokens, limit)
        few = sum(map(len, units)) <= max(chunks, most_chunks)
        return few and len(_in_order(units, chunks_per_round)) <= num_rounds

    least = -(-tokens // max(chunks, most_chunks))
    limit = least + bisect_left(range(least, chunk_tokens), True, key=is_enough)
    return _of_equal_tokens(_units(seq_lens, chunk_tokens, limit), chunks_per_round, num_rounds)


def _of_equal_tokens(units: list[Unit], chunks_per_round: int, num_rounds: int) -> list[list[Unit]]:
    """Units in order in at most so many rounds, of which the one with the most tokens has as few as can be."""
    tokens = sum(map(_tokens, units))
    least = -(-tokens // num_rounds)

    def is_enough(most_tokens: int) -> bool:
        return len(_in_order(units, chunks_per_round, most_tokens)) <= num_rounds

    return _in_order(units, chunks_per_round, least + bisect_left(range(least, tokens), True, key=is_enough))


def _best_fit(seq_lens: list[int], chunk_tokens: int) -> list[Unit]:
    """Chunks of whole sequences, each put, the longest first, where it leaves the least room."""
    rooms, members = list[int](), list[list[int]]()
    for i in sorted(range(len(seq_lens)), key=lambda i: (-seq_lens[i], i)):
        if not seq_lens[i]:
            continue
        fits = [(room, c) for c, room in enumerate(rooms) if room >= seq_lens[i]]
        if not fits:
            rooms.append(chunk_tokens)
            members.append([])
        room, c = min(fits, default=(chunk_tokens, len(rooms) - 1))
        rooms[c] = room - seq_lens[i]
        members[c].append(i)
    return [[[SequenceRange(i, 0, seq_lens[i]) for i in sorted(of_chunk)]] for of_chunk in sorted(members, key=min)]


def _even(units: list[Unit], chunks_per_round: int, multiple: int) -> list[list[Unit]]:
    """Give each unit, the largest first, to the round with the least tokens; rounds without one are left out.

    Within a round units keep their order. Long sequences may not fit so, and then there are `multiple` rounds more.
    """
    num_rounds = multiple * -(-sum(map(len, units)) // (chunks_per_round * multiple))
    largest_first = sorted(range(len(units)), key=lambda number: (-_tokens(units[number]), number))
    while True:
        members: list[list[int]] = [[] for _ in range(num_rounds)]
        chunks, tokens = [0] * num_rounds, [0] * num_rounds
        for number in largest_first:
            size = len(units[number])
            open_rounds = [r for r in range(num_rounds) if chunks[r] + size <= chunks_per_round]
            if not open_rounds:
                break
            least = min(open_rounds, key=lambda r: (tokens[r], r))
            members[least].append(number)
            chunks[least] += size
            tokens[least] += _tokens(units[number])
        else:
            return [[units[number] for number in sorted(found)] for found in members if found]
        num_rounds += multiple


def _tokens(unit: Unit) -> int:
    return sum(part.length for chunk in unit for part in chunk)


def _units(seq_lens: list[int], chunk_tokens: int, most_tokens: int | None = None) -> list[Unit]:
    """Chunks that must stay together: one chunk of whole sequences, or all slices of a long one.

    most_tokens: of a chunk of several whole sequences; None: it is filled.
    """
    most_tokens = most_tokens or chunk_tokens
    units: list[Unit] = []
    room = 0
    for i, length in enumerate(seq_lens):
        if not length:
            continue
        if length > chunk_tokens:
            units.append([[SequenceRange(i, s, min(chunk_tokens, length - s))] for s in range(0, length, chunk_tokens)])
            room = 0
        elif length <= room:
            units[-1][0].append(SequenceRange(i, 0, length))
            room -= length
        else:
            units.append([[SequenceRange(i, 0, length)]])
            room = most_tokens - length
    return units


def joined(rounds: Iterable[Sequence[PackedChunk]]) -> list[PackedChunk]:
    """The chunks of rounds that run together, in one numbering."""
    found = list[PackedChunk]()
    for chunks in rounds:
        first = len(found)
        found += [
            c._replace(first_slice=first + c.first_slice, last_slice=first + c.last_slice) if c.first_slice >= 0 else c
            for c in chunks
        ]
    return found


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


def full_round(
    request: Request, chunk_tokens: int, chunks_per_round: int, left_tokens: int | None = None
) -> RoundShape:
    """A full round of sequences of max_seq_len tokens, as `pack` packs them: a chunk takes whole sequences,
    and one longer than a chunk is cut into slices. left_tokens: of the batch, where it is not all.

    A slice's seq_len is the one whose causal cost per token is that of its queries over all keys before them:
    2 * start + tokens.
    """
    longest = request.max_seq_len
    batch = request.max_global_batch_tokens if left_tokens is None else left_tokens
    if longest <= chunk_tokens:
        counts = _full_chunks(batch, chunk_tokens // longest * longest, chunks_per_round)
        return RoundShape(tuple(ChunkShape(count, min(longest, count)) for count in counts))
    slices = -(-longest // chunk_tokens)
    sequences = max(1, min(chunks_per_round // slices, -(-batch // longest)))
    chunks = []
    for first in range(0, sequences * slices, slices):
        for i in range(slices):
            start = i * chunk_tokens
            tokens = min(chunk_tokens, longest - start)
            chunks.append(ChunkShape(tokens, 2 * start + tokens, first, first + slices - 1, start))
    return RoundShape(tuple(chunks))


def _full_chunks(batch_tokens: int, tokens_per_chunk: int, chunks_per_round: int) -> list[int]:
    """Tokens per chunk when a round takes as much of the batch as it can."""
    left = min(batch_tokens, tokens_per_chunk * chunks_per_round)
    counts = []
    while left > 0:
        counts.append(min(tokens_per_chunk, left))
        left -= counts[-1]
    return counts


def rounds_per_step(request: Request, shape: RoundShape) -> int:
    """Rounds of a full step made of such rounds."""
    return max(1, math.ceil(full_rounds(request, shape)))


def full_rounds(request: Request, shape: RoundShape) -> float:
    """The same as a fraction: the last one may be short."""
    return request.max_global_batch_tokens / sum(c.tokens for c in shape.chunks)


def later_rounds(request: Request, chunk_tokens: int, chunks_per_round: int) -> list[tuple[RoundShape, int]]:
    """The rounds of a full step after its first, as shapes and how many there are of each: full ones, and a shorter one
    where the batch ends within a round."""
    full = full_round(request, chunk_tokens, chunks_per_round)
    tokens = sum(c.tokens for c in full.chunks)
    count = rounds_per_step(request, full) - 1
    last = full_round(request, chunk_tokens, chunks_per_round, request.max_global_batch_tokens - count * tokens)
    rounds = [(full, count)] if last == full else [(full, count - 1), (last, 1)]
    return [(shape, number) for shape, number in rounds if number]


def even_rounds(
    request: Request, chunk_tokens: int, chunks_per_round: int, multiple: int
) -> list[tuple[RoundShape, int]]:
    """The rounds of a full step, a multiple of so many, as `pack` fills them evenly: shapes, and how many of each."""
    longest = request.max_seq_len
    unit = longest if longest > chunk_tokens else chunk_tokens // longest * longest
    most = sum(chunk.tokens for chunk in full_round(request, chunk_tokens, chunks_per_round, 1 << 62).chunks) // unit
    units = -(-request.max_global_batch_tokens // unit)
    rounds = min(units, multiple * -(-units // (most * multiple)))
    each, more = divmod(units, rounds)
    tokens = [(each + (number < more)) * unit for number in range(rounds)]
    tokens[-1] -= units * unit - request.max_global_batch_tokens
    return [
        (full_round(request, chunk_tokens, chunks_per_round, of_round), len(list(alike)))
        for of_round, alike in groupby(tokens)
    ]
