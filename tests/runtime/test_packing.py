"""Sequences into chunks into rounds: nothing is lost or reordered, whatever the sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexengine.schedule.packing import PackedChunk, SequenceRange, most_chunks, pack, packed_shape


@given(
    longest=st.integers(1, 50),
    chunk_tokens=st.integers(1, 60),
    seed=st.randoms(use_true_random=False),
    batch_tokens=st.integers(1, 400),
)
def test_no_batch_makes_more_chunks_than_are_promised(longest, chunk_tokens, seed, batch_tokens):
    lengths, left = [], batch_tokens
    while left > 0:
        lengths.append(min(left, seed.choice((1, 2, longest, max(1, longest - 1), seed.randint(1, longest)))))
        left -= lengths[-1]
    chunks = sum(map(len, pack(lengths, chunk_tokens, 1000)))
    assert chunks <= most_chunks(longest, batch_tokens, chunk_tokens)


def rounds_in_order(lengths, chunk_tokens, chunks_per_round):
    """Rounds that take chunk after chunk, full ones, as those of equal sequences do; written out once more."""
    units = []
    for number, length in enumerate(lengths):
        if length > chunk_tokens:
            slices = [min(chunk_tokens, length - start) for start in range(0, length, chunk_tokens)]
            units.append([PackedChunk((SequenceRange(number, 0, tokens),), 0, 0) for tokens in slices])
        elif units and units[-1][0].first_slice < 0 and units[-1][0].tokens + length <= chunk_tokens:
            units[-1] = [PackedChunk((*units[-1][0].ranges, SequenceRange(number, 0, length)))]
        else:
            units.append([PackedChunk((SequenceRange(number, 0, length),))])
    rounds = [[]]
    for unit in units:
        if len(rounds[-1]) + len(unit) > chunks_per_round:
            rounds.append([])
        rounds[-1] += unit
    return rounds


def tokens_of(chunks):
    return sum(chunk.tokens for chunk in chunks)


def ranges(rounds):
    return [[[tuple(p) for p in chunk.ranges] for chunk in chunks] for chunks in rounds]


def test_whole_sequences_fill_chunks_in_order():
    assert ranges(pack([4, 3, 2, 6], chunk_tokens=8, chunks_per_round=2)) == [
        [[(0, 0, 4), (1, 0, 3)], [(2, 0, 2), (3, 0, 6)]],
    ]


def test_a_full_round_starts_another():
    assert ranges(pack([8, 8, 8], chunk_tokens=8, chunks_per_round=2)) == [[[(0, 0, 8)], [(1, 0, 8)]], [[(2, 0, 8)]]]


def test_a_long_sequence_becomes_slices_of_its_own():
    (chunks,) = pack([3, 20, 2], chunk_tokens=8, chunks_per_round=5)
    assert chunks == [
        PackedChunk((SequenceRange(0, 0, 3),)),
        PackedChunk((SequenceRange(1, 0, 8),), 1, 3),
        PackedChunk((SequenceRange(1, 8, 8),), 1, 3),
        PackedChunk((SequenceRange(1, 16, 4),), 1, 3),
        PackedChunk((SequenceRange(2, 0, 2),)),
    ]


def test_rounds_of_unequal_sequences_have_nearly_equal_tokens():
    lengths = [40, 60, 50, 30, 20, 30, 40, 60]
    assert [tokens_of(chunks) for chunks in pack(lengths, chunk_tokens=300, chunks_per_round=1)] == [180, 150]
    sliced = pack([700, 90, 80, 70, 60, 50], chunk_tokens=200, chunks_per_round=4)
    assert [[chunk.tokens for chunk in chunks] for chunks in sliced] == [[200, 200, 200, 100], [170, 180]]


def test_another_order_where_it_makes_fewer_rounds():
    rounds = pack([5, 6, 3, 2], chunk_tokens=8, chunks_per_round=1)
    assert ranges(rounds) == [[[(0, 0, 5), (2, 0, 3)]], [[(1, 0, 6), (3, 0, 2)]]]


def test_slices_stay_in_one_round():
    rounds = pack([3, 20], chunk_tokens=8, chunks_per_round=3)
    assert [len(chunks) for chunks in rounds] == [1, 3]
    assert [(c.first_slice, c.last_slice) for c in rounds[1]] == [(0, 2)] * 3


def test_a_shape_has_full_chunks_and_the_starts_of_slices():
    (chunks,) = pack([3, 20], chunk_tokens=8, chunks_per_round=4)
    shape = packed_shape(chunks, 8).chunks
    assert [(c.tokens, c.seq_len, c.start, c.is_slice) for c in shape] == [
        (8, 8, 0, False),
        (8, 8, 0, True),
        (8, 8, 8, True),
        (8, 8, 16, True),
    ]


def test_rounds_of_equal_structure_share_a_shape():
    one, other = (pack(lengths, 8, 2)[0] for lengths in ([5, 3, 7], [8, 2]))
    assert packed_shape(one, 8) == packed_shape(other, 8)


@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=20),
    chunk_tokens=st.integers(1, 60),
    spare=st.integers(0, 3),
)
def test_every_token_appears_once_in_as_few_rounds_as_in_order(lengths, chunk_tokens, spare):
    chunks_per_round = -(-max(lengths) // chunk_tokens) + spare
    rounds = pack(lengths, chunk_tokens, chunks_per_round)
    found = [(p.sequence, t) for r in rounds for c in r for p in c.ranges for t in range(p.start, p.start + p.length)]
    assert sorted(found) == [(i, t) for i, n in enumerate(lengths) for t in range(n)]
    in_order = rounds_in_order(lengths, chunk_tokens, chunks_per_round)
    assert len(rounds) <= len(in_order)
    if len(rounds) == len(in_order):
        assert found == sorted(found)
        assert max(map(tokens_of, rounds)) <= max(map(tokens_of, in_order))
    for chunks in rounds:
        assert 1 <= len(chunks) <= chunks_per_round
        for number, chunk in enumerate(chunks):
            assert 1 <= chunk.tokens <= chunk_tokens
            cut = any(p.length < lengths[p.sequence] for p in chunk.ranges)
            assert cut == (chunk.first_slice >= 0)
            assert not cut or (len(chunk.ranges) == 1 and chunk.first_slice <= number <= chunk.last_slice)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [([17], r"17 tokens does not fit in a round of 16 tokens")],
)
def test_impossible_batches_are_refused(lengths, message):
    with pytest.raises(ValueError, match=message):
        pack(lengths, chunk_tokens=8, chunks_per_round=2)


@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=40),
    chunk=st.integers(5, 16),
    chunks=st.integers(6, 8),
    multiple=st.integers(2, 5),
)
def test_rounds_for_ranks_are_even_and_keep_every_token(lengths, chunk, chunks, multiple):
    rounds = pack(lengths, chunk, chunks, multiple)
    assert all(0 < len(members) <= chunks for members in rounds)
    parts = sorted((r.sequence, r.start, r.length) for members in rounds for c in members for r in c.ranges)
    whole = sorted((r.sequence, r.start, r.length) for m in pack(lengths, chunk, chunks) for c in m for r in c.ranges)
    assert parts == whole
    for members in rounds:
        for number, c in enumerate(members):
            assert c.first_slice < 0 or c.first_slice <= number <= c.last_slice < len(members)


def test_as_many_rounds_as_ranks_where_there_are_chunks_enough():
    rounds = pack([8, 8, 8, 5, 5, 8], chunk_tokens=8, chunks_per_round=4, round_multiple=4)
    assert [sum(c.tokens for c in members) for members in rounds] == [13, 13, 8, 8]
