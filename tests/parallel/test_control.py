"""Values, agreement and errors among processes that are ranks."""

import os
import time
from contextlib import nullcontext

import pytest
from ranks_helper import run_ranks, values_of
from torch import distributed

from flexengine.checkpoint.safetensors_format import CheckpointError
from flexengine.parallel.control import Control, RankError
from flexengine.parallel.ranks import Ranks


def opened(timeout_s: float = 60.0) -> Control:
    return Control.open(Ranks.of_environment(), timeout_s)


def exchange(rank: int) -> tuple:
    control = opened()
    long = control.broadcast("x" * 100_000 if rank == 0 else None)
    gathered = control.gather({"rank": rank, "text": "y" * (rank * 3000)})
    control.barrier()
    control.agree(b"same", "batch")
    assert not distributed.is_initialized()
    return len(long), [(value["rank"], len(value["text"])) for value in gathered]


def test_values_reach_every_rank_in_order():
    assert values_of(run_ranks(exchange, 3)) == [(100_000, [(0, 0), (1, 3000), (2, 6000)])] * 3


def disagree(rank: int) -> str:
    control = opened()
    with pytest.raises(ValueError, match="batch") as caught:
        control.agree(bytes([rank % 2]), "batch")
    return str(caught.value)


def test_another_digest_is_an_error_on_all():
    told = "ranks 1, 3 have another batch than rank 0; give every rank the same batch"
    assert values_of(run_ranks(disagree, 4)) == [told] * 4


def all_or_none(rank: int) -> list[str]:
    control, seen = opened(), []
    with control.all_or_none():
        pass
    for failing in (ValueError("no room"), KeyError("k"), CheckpointError("damaged")):
        try:
            with control.all_or_none():
                if rank >= 1:
                    raise failing
        except Exception as error:
            seen.append(f"{type(error).__name__}: {error}")
    assert control.gather(rank) == [0, 1, 2]  # goes on
    return seen


def test_an_error_of_one_rank_is_raised_on_all():
    first, failed, other = values_of(run_ranks(all_or_none, 3))
    assert failed == ["ValueError: no room", "KeyError: 'k'", "CheckpointError: damaged"]
    own = "CheckpointError: rank 1: damaged"
    assert first == other == ["ValueError: rank 1: no room", "RankError: rank 1: KeyError: 'k'", own]


def other_call(rank: int) -> str:
    control = opened()
    with pytest.raises(RankError) as caught:
        control.barrier() if rank == 0 else control.gather(0)
    return str(caught.value)


def test_different_calls_are_named():
    first, second = values_of(run_ranks(other_call, 2))
    assert "rank 0 is at its call 1 (barrier), rank 1 at its call 1 (gather)" in first
    assert "rank 1 is at its call 1 (gather), rank 0 at its call 1 (barrier)" in second


def absent(rank: int) -> None:
    control = opened(timeout_s=1.0)
    if rank == 0:
        with pytest.raises(RankError, match=r"did not come within 1 s|has ended or cannot be reached"):
            control.barrier()
    else:
        time.sleep(2.0)


def test_a_rank_that_does_not_come_is_not_awaited_for_ever():
    values_of(run_ranks(absent, 2))


def leaves(rank: int) -> None:
    control = opened()
    control.barrier()
    if rank == 0:
        time.sleep(0.2)
    control.close()
    control.close()
    with pytest.raises(RankError, match="closed"):
        control.barrier()
    os._exit(0)


def test_ranks_leave_together():
    assert [outcome.error for outcome in run_ranks(leaves, 3)] == ["ended"] * 3


def beside_other_groups(rank: int) -> list[int]:
    distributed.init_process_group("gloo")
    control = opened()
    again = opened()
    distributed.barrier()
    return control.gather(rank) + again.gather(rank)


def test_the_callers_group_is_left_alone():
    assert values_of(run_ranks(beside_other_groups, 2)) == [[0, 1, 0, 1]] * 2


def test_one_rank_needs_no_group(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delitem(os.environ, name, raising=False)
    control = Control.open(Ranks.alone())
    control.barrier()
    control.agree(b"", "batch")
    assert control.broadcast(3) == 3
    assert control.gather("a") == ["a"]
    with pytest.raises(KeyError), control.all_or_none():
        raise KeyError


class Work:
    """A call that has ended when it is asked so many times."""

    def __init__(self, asks: float) -> None:
        self.left = asks

    def is_completed(self) -> bool:
        self.left -= 1
        return self.left < 0

    def wait(self) -> None:
        assert self.left < 0


@pytest.mark.parametrize("comes", [True, False])
def test_what_a_lost_rank_sent_before_still_comes(comes, monkeypatch):
    def lost() -> None:
        raise RankError("rank 1 ended with ValueError: no room")

    monkeypatch.setattr("flexengine.parallel.control._LAST_WORDS_S", 60.0 if comes else 0.01)
    control = Control(Ranks(0, 2, 0, 2, 0, 1))
    control.check_lost = lost
    with nullcontext() if comes else pytest.raises(RankError, match="no room"):
        control.wait(Work(30 if comes else float("inf")))
