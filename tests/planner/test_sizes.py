"""Sizes that are tried, and how many rounds a step is priced as: those that packing whole sequences makes."""

import random
from dataclasses import replace

import pytest

from flexengine.plan import MOST_ROUNDED, Numerics, Plan, Request
from flexengine.planner.feasibility.remedies import Least, Try, remedies
from flexengine.planner.sizes import chunk_sizes, filled
from flexengine.schedule.packing import full_round, later_rounds, pack, rounds_per_step
from flexengine.schedule.step_parts import full_step

GIB = 2**30


def request(seq_len: int, batch: int, **pins: int) -> Request:
    return Request(seq_len, batch, GIB, GIB, **pins)


@pytest.mark.parametrize("seed", range(60))
def test_rounds_are_those_that_packing_makes(seed):
    rng = random.Random(seed)
    seq_len, sequences = rng.randint(3, 9000), rng.randint(1, 40)
    asked = request(seq_len, seq_len * sequences)
    for chunk, chunks in rng.sample(chunk_sizes(asked), 3):
        packed = pack([seq_len] * sequences, chunk, chunks)
        shape = full_round(asked, chunk, chunks)
        assert rounds_per_step(asked, shape) == len(packed)
        assert Plan("any", asked, chunk, chunks, (), ()).num_rounds == len(packed)
        assert [c.tokens for c in shape.chunks] == [c.tokens for c in packed[0]]
        later = [shape for shape, count in later_rounds(asked, chunk, chunks) for _ in range(count)]
        assert [[c.tokens for c in s.chunks] for s in later] == [[c.tokens for c in r] for r in packed[1:]]


@pytest.mark.parametrize("seed", range(60))
def test_rounds_of_several_ranks_are_those_that_packing_makes(seed):
    rng = random.Random(seed)
    ranks, seq_len, sequences = rng.randint(2, 5), rng.randint(3, 9000), rng.randint(1, 40)
    asked = replace(request(seq_len, ranks * seq_len * sequences), ranks=ranks)
    for chunk, chunks in rng.sample(chunk_sizes(asked.of_rank), 3):
        fitting = max(1, chunk // seq_len)
        units = sequences - sequences % fitting or fitting  # per rank, as chunks that are all full
        asked = replace(asked, max_global_batch_tokens=ranks * seq_len * units)
        packed = pack([seq_len] * units * ranks, chunk, chunks, ranks)
        plan = Plan("any", asked.of_rank, chunk, chunks, (), ())
        found = [[c.tokens for c in shape.chunks] for shape, count in full_step(plan) for _ in range(count)]
        assert found == [[c.tokens for c in of_round] for of_round in packed[::ranks]]
        assert max(map(len, found)) <= chunks


@pytest.mark.parametrize(("seq_len", "chunk"), [(5000, 5056), (3000, 15040), (9000, 4544), (1100, 1152), (1100, 3328)])
def test_chunks_are_filled_by_whole_sequences_or_even_slices(seq_len, chunk):
    assert chunk in {size for size, _ in chunk_sizes(request(seq_len, 64 * seq_len))}


def test_powers_of_two_stay():
    for chunk in (256, 2048, 16384):
        for seq_len in (64, 256, 2048, 16384):
            assert filled(chunk, seq_len) == chunk


@pytest.mark.parametrize(("seq_len", "smallest"), [(1 << 19, 1024), (1 << 20, 2048), (1 << 24, 16384)])
def test_a_long_sequence_is_cut_into_no_more_parts_than_can_be_planned(seq_len, smallest):
    """Nor is a smaller chunk tried as a remedy: a refusal of 524288 tokens took minutes, most of them for those."""
    asked, tried = request(seq_len, seq_len), []
    assert min(chunk for chunk, _ in chunk_sizes(asked)) == smallest
    never = Try(lambda changed: bool(tried.append(changed)), lambda changed: Least(2 * GIB, None))
    assert not list(remedies(asked, Least(2 * GIB, None), never))
    assert tried
    assert not [changed for changed in tried if changed.chunk_tokens]
    assert chunk_sizes(replace(asked, chunk_tokens=256)) == [(256, seq_len // 256)]


def test_equal_parts_of_a_batch():
    assert 5120 in {size for size, _ in chunk_sizes(request(512, 20480))}
    assert 10240 in {size for size, _ in chunk_sizes(request(512, 10240))}


@pytest.mark.parametrize(("seq_len", "batch", "ranks"), [(64, 131072, 1), (2048, 1 << 20, 1), (300, 60000, 4)])
def test_no_size_makes_more_rounds_than_sums_in_16_bits_bear(seq_len, batch, ranks):
    asked = replace(request(seq_len, batch), ranks=ranks)
    rounds = {}
    for grad in ("bfloat16", "float32"):
        sized = replace(asked, numerics=Numerics(grad=grad))
        plans = [Plan("any", sized, *size, (), ()) for size in chunk_sizes(sized)]
        rounds[grad] = [ranks * plan.num_rounds for plan in plans]
    assert max(rounds["bfloat16"]) <= MOST_ROUNDED < max(rounds["float32"])
    assert len(rounds["bfloat16"]) == sum(count <= MOST_ROUNDED for count in rounds["float32"])


def test_pinned_sizes_stay_however_many_rounds_they_make():
    assert chunk_sizes(request(64, 131072, chunk_tokens=256, round_tokens=512)) == [(256, 2)]
