from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexengine.data import batches
from flexengine.data.batches import GlobalBatches, batch_ends, split_epoch
from flexengine.data.prepare import prepare_sequences
from flexengine.data.records import IGNORE, TokenizedRecord
from flexengine.data.synthetic import DEFAULT_STEPS, SyntheticBatches


def sequences(lengths):
    """Sequence i holds the token i, length times."""
    return [TokenizedRecord([i] * n, [i] * n) for i, n in enumerate(lengths)]


def test_split_epoch_by_hand():
    assert split_epoch([4, 4, 3, 8, 1], max_tokens=8, order=[0, 1, 2, 3, 4]) == [[0, 1], [2], [3], [4]]
    assert split_epoch([4, 4, 3, 8, 1], max_tokens=8, order=[3, 2, 4, 1, 0]) == [[3], [2, 4, 1], [0]]


@given(st.lists(st.integers(2, 9), min_size=1, max_size=40), st.integers(9, 30), st.integers(0, 5))
def test_an_epoch_is_every_sequence_once_within_the_limit(lengths, max_tokens, seed):
    data = GlobalBatches(sequences(lengths), max_tokens, seed)
    epoch = list(data.batches(data.num_steps(None, None)))
    assert sorted(row[0] for b in epoch for row in b.input_ids) == list(range(len(lengths)))
    assert all(0 < b.num_tokens <= max_tokens for b in epoch)
    # No batch could have taken the first sequence of the next one.
    assert all(a.num_tokens + len(b.input_ids[0]) > max_tokens for a, b in pairwise(epoch))


@given(st.lists(st.integers(1, 9), max_size=40), st.integers(9, 30), st.integers(1, 5))
def test_batches_do_not_depend_on_how_many_numbers_are_added_up_at_once(lengths, max_tokens, at_once):
    whole, data = batch_ends(lengths, max_tokens, range(len(lengths))), GlobalBatches(sequences(lengths), max_tokens, 0)
    fingerprint = data.fingerprint()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batches, "NUMBERS_AT_ONCE", at_once)
        assert batch_ends(lengths, max_tokens, range(len(lengths))) == whole
        assert data.fingerprint() == fingerprint


def test_an_epoch_is_ordered_once_and_before_its_first_batch(monkeypatch):
    data, ordered, order = GlobalBatches(sequences([3] * 20), 9, seed=0), [], GlobalBatches._order
    monkeypatch.setattr(GlobalBatches, "_order", lambda self, epoch: ordered.append(epoch) or order(self, epoch))
    assert data.num_steps(None, None) == 7
    data.begin()
    assert ordered == [0]
    assert len(list(data.batches(15))) == 15
    assert ordered == [0, 1, 2]


def test_order_depends_on_seed_and_epoch_only():
    data = sequences([3] * 20)
    first, again, other = (list(GlobalBatches(data, 9, seed).batches(14)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    epochs = [list(chain.from_iterable(b.input_ids for b in first[i : i + 7])) for i in (0, 7)]
    assert epochs[0] != epochs[1]
    assert sorted(epochs[0]) == sorted(epochs[1])


def test_steps_and_epochs():
    data = GlobalBatches(sequences([3] * 20), 9, seed=0)  # 7 batches: six of 3 sequences, one of 2
    assert data.num_steps(None, None) == 7
    assert data.num_steps(None, 3.0) == 21
    assert data.num_steps(None, 1.5) == 11
    assert data.num_steps(None, 0.01) == 1
    assert data.num_steps(100, None) == 100
    assert len(list(data.batches(100))) == 100


def test_batch_limit_below_a_sequence_is_refused():
    with pytest.raises(ValueError, match="sequence of 5 tokens exceeds --max-global-batch-tokens 4"):
        GlobalBatches(sequences([5]), 4, seed=0)


def test_long_records_are_dropped_or_cut():
    records = [
        TokenizedRecord([1, 2, 3, 4], [IGNORE, 2, 3, 4]),
        TokenizedRecord([5, 6, 7, 8], [IGNORE, IGNORE, IGNORE, 8]),
        TokenizedRecord([9, 10], [9, 10]),
        TokenizedRecord([11], [11]),
    ]
    dropped = prepare_sequences(records, max_seq_len=3, truncate_long=False)
    assert list(dropped.sequences) == [([9, 10], [9, 10])]
    assert (dropped.cut.num_records, dropped.cut.num_too_long, dropped.cut.num_without_targets) == (4, 2, 1)
    cut = prepare_sequences(records, max_seq_len=3, truncate_long=True)
    assert list(cut.sequences) == [([1, 2, 3], [IGNORE, 2, 3]), ([9, 10], [9, 10])]
    assert (cut.cut.num_truncated, cut.cut.num_without_targets) == (1, 2)
    assert cut.describe() == ("2 of 4 records, 5 tokens; 1 truncated to --max-seq-len; 2 dropped without target tokens")


def test_nothing_left_says_what_would_work():
    with pytest.raises(ValueError, match="works with: --max-seq-len 4"):
        prepare_sequences([TokenizedRecord([1, 2, 3, 4], [IGNORE, 2, 3, 4])], max_seq_len=3, truncate_long=False)


def test_target_tokens_leave_out_the_first_of_each_sequence():
    (batch,) = GlobalBatches(sequences([4, 2]), 8, seed=0).batches(1)
    assert (batch.num_tokens, batch.num_target_tokens) == (6, 4)


def test_synthetic_fills_the_batch_from_the_seed():
    data = SyntheticBatches(vocab_size=50, max_seq_len=8, max_global_batch_tokens=35, seed=3)
    first, second = data.batches(2)
    assert [len(row) for row in first.input_ids] == [8] * 4
    assert first.input_ids == first.labels
    assert first != second
    assert first == SyntheticBatches(50, 8, 35, seed=3).batch(0)
    assert first != SyntheticBatches(50, 8, 35, seed=4).batch(0)
    assert all(0 <= token < 50 for row in first.input_ids for token in row)


def test_synthetic_repeat_and_length():
    data = SyntheticBatches(50, 8, 16, seed=0, repeat=True)
    assert list(data.batches(3)) == [data.batch(0)] * 3
    assert (data.num_steps(4, None), data.num_steps(None, None)) == (4, DEFAULT_STEPS)
    with pytest.raises(ValueError, match="--epochs has no meaning"):
        data.num_steps(None, 2.0)
    with pytest.raises(ValueError, match="exceeds"):
        SyntheticBatches(50, 8, 7, seed=0)
