"""Streams of several ranks wait for each other's by words of the node's memory, on the fake device."""

import contextlib

import pytest
import torch
from fake_driver import FakeDriver, fake_driver

from flexengine.native.transfer_operations import WordValue
from flexengine.parallel.signals import RAISED, Signals
from flexengine.runtime.arena import Arenas
from flexengine.runtime.execution.bound_program import BoundProgram
from flexengine.runtime.execution.executor import STREAM_SIGNALS_VARIABLE, CommandHooks, Executor
from flexengine.schedule.commands import CommandName, CopyRegion, Program, Signal, Stream
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.slots import Slot, SlotKey, overlapping_slots

CPU = torch.device("cpu")
SLOT_BYTES = 48
RANK_SLOTS = (
    Slot(SlotKey("gpu"), 0, SLOT_BYTES, "test"),
    *(Slot(SlotKey(f"node{i}", memory="node"), i * SLOT_BYTES, SLOT_BYTES, "test") for i in range(3)),
)
RANK_STREAMS = (Stream.COMPUTE, Stream.H2D, Stream.D2H, Stream.RELAY_IN, Stream.RELAY_OUT)


def relaying_program(rank: int) -> Program:
    """Fetch what the rank before left in the node's memory, and leave it in the next slot there."""
    builder = ProgramBuilder("relay", RANK_SLOTS, overlapping_slots(RANK_SLOTS))
    here, there = CopyRegion(1 + rank, 0, 0, 0, SLOT_BYTES), CopyRegion(0, 0, 2 + rank, 0, SLOT_BYTES)
    builder.copy(CommandName("fetch", "grad"), Stream.RELAY_IN, "any", [here])
    builder.between_ranks(-1, awaits=(Signal(0, "previous", "round", lag=1),))
    builder.copy(CommandName("offload", "grad"), Stream.RELAY_OUT, "any", [there])
    builder.between_ranks(-1, signals=(Signal(0, "own", "round"),))
    return builder.build()


class Rank:
    """A bound program of one of two ranks, whose streams await and raise semaphores. clock: the number of its round."""

    def __init__(self, driver: FakeDriver, rank: int, node: torch.Tensor, signals: Signals) -> None:
        self.clock, self._rows, self._signals = 0, {"own": rank, "previous": 1 - rank, "all": None}, signals
        self.arenas, self.transfers = Arenas(CPU, SLOT_BYTES, 1), driver.open(piece_bytes=7)
        if self.transfers.word_address(node.data_ptr()) is None:
            pytest.skip("the native library is older than its sources")
        self.arenas.add_node(node)
        self.streams = {stream: driver.stream() for stream in RANK_STREAMS}
        self.bound = BoundProgram(relaying_program(rank), self.arenas, self.streams, self.transfers, words=self.words)

    def words(self, signal: Signal) -> list[WordValue]:
        addresses = self._signals.addresses(signal.semaphore, self._rows[signal.of])
        return [WordValue(address, max(0, self.clock - signal.lag)) for address in addresses]

    def run(self, clock: int) -> None:
        self.clock = clock
        self.bound.set_words(self.words)
        self.bound.run(lambda command: None)


def two_ranks(driver: FakeDriver) -> tuple[torch.Tensor, Signals, list[Rank]]:
    node, table = torch.zeros(3 * SLOT_BYTES, dtype=torch.uint8), torch.zeros(2, Signals.columns(1), dtype=torch.uint32)
    signals = Signals(table, 0)
    return node, signals, [Rank(driver, rank, node, signals) for rank in range(2)]


@pytest.mark.parametrize("lagging", [None, Stream.RELAY_IN, Stream.RELAY_OUT])
def test_streams_of_ranks_wait_for_each_other(lagging: Stream | None):
    """The rank of a round is issued before that of the round before it; rounds count on from step to step."""
    driver = fake_driver()
    node, signals, ranks = two_ranks(driver)
    for rank in ranks:
        for name, stream in rank.streams.items():
            driver.lag(stream, name is lagging)
    for step in range(10):
        node[:SLOT_BYTES] = torch.arange(SLOT_BYTES) + step
        ranks[1].run(2 * step + 2)
        driver.settle()
        ranks[0].run(2 * step + 1)
        driver.settle()
        assert [signals.value(0, row) for row in range(2)] == [2 * step + 1, 2 * step + 2]
        assert torch.equal(node[2 * SLOT_BYTES :], node[:SLOT_BYTES])


def test_a_lost_rank_lets_streams_go_on():
    driver = fake_driver()
    _, signals, ranks = two_ranks(driver)
    ranks[1].run(2)
    driver.settle()
    assert signals.value(0, 1) == 0  # it waits
    signals.abort("lost")
    driver.await_calls("cuEventRecord", 1)
    ranks[1].bound.wait_for(1)
    signals.raise_all()  # as the watch repeats it: the stream has lowered its semaphore
    assert signals.value(0, 1) == RAISED


def test_streams_wait_where_the_driver_lets_them():
    driver = fake_driver()
    transfers = driver.open()
    word = torch.zeros(1, dtype=torch.uint32)
    found = transfers.word_address(word.data_ptr())
    assert found in (None, word.data_ptr())  # None: the native library is older than its sources
    driver.memory_operations(False)
    assert transfers.word_address(word.data_ptr()) is None


@pytest.mark.parametrize("by", ["streams", "host", "host, as the driver cannot"])
def test_an_executor_has_streams_wait_where_they_can(by, driven, driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setenv(STREAM_SIGNALS_VARIABLE, "0" if by == "host" else "1")
    driver.memory_operations(by != "host, as the driver cannot")
    node, signals, ranks = two_ranks(driver) if by == "streams" else (torch.zeros(144, dtype=torch.uint8), None, [])
    executor, asked, told = driven(Executor(CPU, Arenas(CPU, SLOT_BYTES, 1))), list[str](), list[str]()
    executor.arenas.add_node(node)
    words = ranks[0].words if ranks else lambda signal: [WordValue(node.data_ptr(), 1)]
    hooks = CommandHooks(lambda c: asked.append(c.label), lambda c: told.append(c.label), words)
    if ranks:
        ranks[0].clock = 1
    executor.run(relaying_program(0), lambda command: None, hooks=hooks)
    executor.synchronize()
    by_host = ([], []) if by == "streams" else (["fetch grad", "offload grad"], ["offload grad"])
    assert (asked, told) == by_host
    assert driver.calls("cuStreamWaitValue32_v2") == driver.calls("cuStreamWriteValue32_v2") == (by == "streams")
    assert signals is None or signals.value(0, 0) == 1
