"""Signals between processes: order, waits for one and for all rows, aborts."""

import os
import time

import numpy as np
import pytest
import torch
from ranks_helper import run_ranks, values_of

from flexengine.native.signals import open_words
from flexengine.parallel.control import Control
from flexengine.parallel.node_memory import NodeMemory
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.signals import RAISED, RankLost, Signals

PATHS = pytest.mark.parametrize("native", ["1", "0"], ids=["native", "python"])


def opened(num_semaphores: int, native: str, data_bytes: int = 0) -> tuple[Ranks, Control, Signals, torch.Tensor]:
    os.environ["FLEXENGINE_NATIVE"] = native
    ranks = Ranks.of_environment()
    control = Control.open(ranks, 60.0)
    table_bytes = Signals.num_bytes(ranks.local_size, num_semaphores)
    memory = NodeMemory.open(ranks, control, table_bytes + data_bytes)
    signals = Signals.over(memory.tensor, ranks.local_size, num_semaphores, ranks.local_rank)
    return ranks, control, signals, memory.tensor[table_bytes:]


def pass_round(rank: int, native: str) -> int:
    """A sum that goes from rank to rank: each adds its number to what the one before it left."""
    ranks, _, signals, data = opened(3, native, 8 * 1000)
    numbers = data.view(torch.int64)
    for turn in range(rank, 300, ranks.size):
        if turn:
            signals.wait(1, (rank - 1) % ranks.size, turn)
        numbers += turn
        signals.signal(1, turn + 1)
    signals.signal(2, 1)
    signals.wait(2, None, 1)
    assert (numbers == numbers[0]).all()
    return int(numbers[0])


@PATHS
def test_writes_before_a_signal_are_seen_after_the_wait(native):
    assert values_of(run_ranks(pass_round, 3, native)) == [sum(range(300))] * 3


def aborted(rank: int, native: str) -> str:
    _, control, signals, _ = opened(5, native)
    signals.check()
    if rank == 2:
        time.sleep(0.2)
        signals.abort("rank 2 has given up: µ" + "x" * 1000)
    with pytest.raises(RankLost) as caught:
        signals.wait(0, None, 7)
    with pytest.raises(RankLost):
        signals.check()
    signals.signal(4, 9)
    control.barrier()  # waits end before all semaphores are raised
    assert {signals.value(semaphore, row) for semaphore in range(5) for row in range(3)} == {RAISED}
    control.barrier()
    return str(caught.value)


@PATHS
def test_an_abort_ends_waits_on_all_ranks(native):
    messages = values_of(run_ranks(aborted, 3, native))
    assert len(set(messages)) == 1
    assert messages[0].startswith("rank 2 has given up: µxxx")
    assert len(messages[0].encode()) == 508


class AbortedOnceRead:
    """A table [1, 2] of a semaphore and the word of an abort, which comes right after that word was read first."""

    def __init__(self) -> None:
        self.semaphore, self.abort = 0, 0

    def __getitem__(self, place: tuple[slice, int]) -> np.ndarray:
        found = np.array([(self.semaphore, self.abort)[place[1]]])
        if place[1] == 1:
            self.semaphore, self.abort = RAISED, 1
        return found


def test_a_cell_that_an_abort_raises_has_not_been_reached(monkeypatch):
    monkeypatch.setenv("FLEXENGINE_NATIVE", "0")
    words = open_words(torch.zeros(1, 2, dtype=torch.uint32))
    monkeypatch.setattr(words, "_words", AbortedOnceRead())
    assert words.wait(0, range(1), 7, abort_column=1, seconds=60.0) == "aborted"


@pytest.fixture(params=["1", "0"], ids=["native", "python"])
def alone(request, monkeypatch) -> Signals:
    monkeypatch.setenv("FLEXENGINE_NATIVE", request.param)
    return Signals.over(torch.zeros(4096, dtype=torch.uint8), 2, 10, 1)


def test_a_wait_has_a_deadline(alone):
    alone.signal(3, 4)
    alone.wait(3, 1, 4)
    assert (alone.value(3), alone.value(3, 0), alone.num_semaphores) == (4, 0, 16)
    with pytest.raises(TimeoutError, match="semaphore 3 did not reach 4 within"):
        alone.wait(3, None, 4, timeout_s=0.1)


def test_only_the_first_message_counts(alone):
    alone.abort("first")
    alone.abort("second")
    with pytest.raises(RankLost, match=r"^first$"):
        alone.check()


def test_cells_that_are_lowered_stay_raised_after_an_abort(alone):
    alone.signal(3, 4)
    alone.lower_own()
    assert alone.value(3) == 0
    alone.abort("lost")
    alone.lower_own()
    assert alone.value(3) == RAISED
    with pytest.raises(RankLost, match="lost"):
        alone.check()


def test_nonsense_is_refused(alone):
    for semaphore, value in ((16, 1), (-1, 1), (0, 0), (0, RAISED)):
        with pytest.raises(ValueError, match="cannot have the value"):
            alone.signal(semaphore, value)
    with pytest.raises(ValueError, match="row 2"):
        Signals(alone.table, 2)
    with pytest.raises(ValueError, match="uint32"):
        Signals(alone.table.view(torch.int32), 0)
