"""Ends of ranks that are no fault, or that a script brings about without telling anybody."""

import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from ranks_helper import run_ranks, values_of

from flexengine.parallel import control as control_module
from flexengine.parallel import watch as watch_module
from flexengine.parallel.control import Control
from flexengine.parallel.node_memory import NodeMemory
from flexengine.parallel.processes import Process
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.signals import RankLost, Signals
from flexengine.parallel.team import Team
from flexengine.parallel.watch import Watch


def opened() -> tuple[Ranks, Control, Watch]:
    ranks = Ranks.of_environment()
    control = Control.open(ranks, 60.0)
    return ranks, control, Watch.open(ranks, control)


def ends_first(rank: int) -> int:
    _, control, watch = opened()
    with watch:
        if rank == 0:
            time.sleep(3 * watch_module.BEAT_S)
            watch.check()
    assert control.check_lost is None
    return len([name for name in os.listdir("/proc/self/fd") if "pidfd" in readable(name)])


def readable(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except OSError:
        return ""


def test_a_rank_may_end_before_the_others():
    assert values_of(run_ranks(ends_first, 3)) == [0, 0, 0]


def is_awaited(rank: int) -> str:
    ranks, control, watch = opened()
    memory = NodeMemory.open(ranks, control, Signals.num_bytes(2, 1))
    signals = Signals.over(memory.tensor, 2, 1, rank)
    watch.follow(signals)
    if rank == 1:
        watch.close()
        return ""
    with pytest.raises(RankLost) as caught:
        signals.wait(0, 1, 1)
    watch.close()
    return str(caught.value)


def test_nobody_waits_for_a_rank_that_has_ended():
    first, _ = values_of(run_ranks(is_awaited, 2))
    assert first == "rank 1 has ended while this rank still waits for it"


def gives_up(rank: int) -> str:
    _, control, watch = opened()
    if rank == 1:
        watch.abort("rank 1 gives up")
    with pytest.raises(RankLost) as caught:
        control.barrier()
    watch.close()
    return str(caught.value)


def test_an_abort_reaches_calls_of_control():
    assert values_of(run_ranks(gives_up, 3)) == ["rank 1 gives up"] * 3


def test_one_rank_watches_nobody():
    with Watch.open(Ranks.alone(), Control.open(Ranks.alone())) as watch:
        watch.check()


def test_a_process_is_seen_to_stop_and_to_end():
    pid = os.fork()
    if pid == 0:
        while True:
            time.sleep(1)
    process = Process(pid)
    assert (process.ended, process.stopped) == (False, False)
    os.kill(pid, signal.SIGSTOP)
    await_that(lambda: process.stopped)
    process.kill()
    await_that(lambda: process.ended)
    os.waitpid(pid, 0)
    process.kill()
    process.close()


def test_a_process_has_ended_before_its_memory_is_given_back(monkeypatch):
    pid = os.fork()
    if pid == 0:
        while True:
            time.sleep(1)
    process = Process(pid)
    monkeypatch.setattr(process, "_poll", SimpleNamespace(poll=lambda _: []))  # the kernel is not done with it
    assert not process.ended
    process.kill()
    await_that(lambda: process.ended)
    os.waitpid(pid, 0)
    process.close()


def await_that(condition) -> None:
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.01)


def not_looking() -> tuple[Watch, Signals]:
    """A watch of rank 0 whose thread has not looked yet, and the semaphores of rank 1."""
    table = torch.zeros(2, Signals.columns(1), dtype=torch.uint32)
    watch = Watch.__new__(Watch)
    watch.ranks, watch.loss, watch._own = Ranks(0, 2, 0, 2, 0, 1), None, Signals(table, 0)
    watch._news, watch._followed, watch._following = None, [], threading.Lock()
    return watch, Signals(table, 1)


def test_a_rank_learns_of_a_loss_by_a_call_before_its_watch_has_looked():
    """Another rank that ends closes its connections: whoever sees that asks why, and does not wait for a beat."""
    watch, other = not_looking()
    other.abort("1 rank 2 is stopped")
    with pytest.raises(RankLost, match=r"^rank 2 is stopped$"):
        watch.check()


def test_a_rank_that_learns_of_a_loss_by_a_wait_still_tells_of_it():
    """Waits for followed signals end before the watch itself has looked: the rank that was named has to tell."""
    named, other = not_looking()
    other.abort("0 rank 1 is stopped")
    named.abort("rank 1 is stopped")
    assert named.loss == ("rank 1 is stopped", True)


def leaves_after_a_loss(rank: int, folder: Path) -> None:
    ranks, control, watch = opened()
    team = Team(ranks, control, watch)
    if rank == 1:
        watch.abort("rank 1 gives up")
        watch.close()
        await_that(lambda: len(list(folder.iterdir())) == 2)  # it does not come to leave before the others have left
        return
    await_that(lambda: watch.loss is not None)
    team.close()
    (folder / str(rank)).touch()


def test_nobody_waits_to_leave_together_after_a_loss(tmp_path, monkeypatch):
    monkeypatch.setattr(control_module, "_LEAVE_S", 600.0)
    assert values_of(run_ranks(leaves_after_a_loss, 3, tmp_path)) == [None] * 3
