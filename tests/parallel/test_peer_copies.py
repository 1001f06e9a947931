"""Copies between GPUs that words order, on a fake device whose streams lag behind each other; on a GPU as processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from fake_driver import FakeDriver, PlainStream, fake_driver
from ranks_helper import run_ranks, values_of
from torch import Tensor

from flexengine.native.peer_memory import PeerDriver
from flexengine.native.transfer import NativeTransfers
from flexengine.native.transfer_operations import Copy, RawMemory, Record
from flexengine.parallel import peer_copies
from flexengine.parallel.collectives import Collectives
from flexengine.parallel.control import Control
from flexengine.parallel.devices import SHARED_GPU_VARIABLE
from flexengine.parallel.peer_copies import PEER_COPIES_VARIABLE, PeerCopies, Region
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.signals import Signals

COUNTS = (5, 0, 9)
RANKS = len(COUNTS)
SHARE = 24


class FakeSharing:
    """Ranks that are threads of one process: each has the memory of the others already."""

    told: dict[int, list[RawMemory]]
    barrier: threading.Barrier

    def __init__(self, table: Tensor, row: int) -> None:
        self.signals = Signals.over(table, RANKS, 2, row)

    def region(self, own: Tensor) -> Region:
        told = self.told.setdefault(self.signals.row, [])
        told.append(RawMemory(own.data_ptr(), own.numel()))
        number = len(told) - 1  # others may be ahead
        self.barrier.wait()
        return Region(own, tuple(self.told[row][number] for row in range(RANKS)))

    def close(self) -> None:
        pass


class Rank(NamedTuple):
    """A rank of the fake device. memory: uint8, what calls fill, NaN in the beginning."""

    row: int
    copies: PeerCopies
    transfers: NativeTransfers
    stream: PlainStream
    memory: Tensor

    def move(self, target: Tensor, source: Tensor) -> None:
        """Copy on the stream."""
        ends = [tensor.view(torch.uint8).view(-1) for tensor in (target, source)]
        copy = Copy(self.stream, ends[0], 0, ends[1], 0, ends[0].numel())
        self.transfers.submit(self.transfers.prepare([copy]))


@pytest.fixture
def driver() -> FakeDriver:
    return fake_driver()


def on_ranks(driver: FakeDriver, work: Callable[[Rank], Any], lagging: int | None = None) -> list[Any]:
    """What ranks return that all do the same, one of them behind the others."""
    table = torch.zeros(Signals.num_bytes(RANKS, 2), dtype=torch.uint8)
    FakeSharing.told, FakeSharing.barrier = {}, threading.Barrier(RANKS, timeout=60)
    streams = [driver.stream() for _ in range(RANKS)]
    if lagging is not None:
        driver.lag(streams[lagging], True)

    held = []  # as long as copies need it

    def run(row: int) -> Any:
        transfers, memory = driver.open(), torch.full((4096,), 255, dtype=torch.uint8)
        scratch = torch.full((RANKS * peer_copies.SCRATCH_BYTES,), 255, dtype=torch.uint8)
        copies = PeerCopies(transfers, FakeSharing(table, row), scratch)
        copies.share(memory)
        held.append((transfers, memory, scratch, copies))
        return work(Rank(row, copies, transfers, streams[row], memory))

    with ThreadPoolExecutor(RANKS) as pool:
        found = list(pool.map(run, range(RANKS)))
    driver.settle()
    return found


@pytest.mark.parametrize("brings_own", [False, True])
@pytest.mark.parametrize("lagging", [None, 0, 1, 2])
def test_calls_one_behind_the_other_bring_each_its_own_bytes(driver, lagging, brings_own):
    """Buffers are filled again and again, and none before its rank has read what the call before brought; of an
    exchange that need not bring what is a rank's own, what was there before stays."""
    calls, sent = 4, torch.randn(4, RANKS, sum(COUNTS), generator=torch.Generator().manual_seed(3))
    told = torch.randint(256, (calls, RANKS, SHARE), dtype=torch.uint8)
    shards = [row.split(COUNTS) for row in torch.randint(256, (calls, sum(COUNTS)), dtype=torch.uint8)]

    def work(rank: Rank) -> list[tuple[Tensor, Tensor, Tensor]]:
        own, found = COUNTS[rank.row], []
        shares, received = rank.memory[: RANKS * SHARE], rank.memory[1024:].view(torch.float32)[: RANKS * own]
        accumulator, shard = torch.empty(sum(COUNTS)), torch.empty(own, dtype=torch.uint8)
        whole = rank.memory[3072:][: sum(COUNTS)]
        for call in range(calls):
            gathered, brought = torch.empty_like(shares), torch.full_like(received, float("nan"))
            part = shares[rank.row * SHARE :][:SHARE]
            rank.move(part, told[call, rank.row])
            rank.copies.gather(shares, part, rank.stream)
            rank.move(gathered, shares)
            rank.move(accumulator, sent[call, rank.row])
            rank.copies.exchange(received, accumulator, COUNTS, rank.stream, brings_own)
            together = torch.empty_like(whole)
            if own:
                rank.move(brought, received)
                rank.move(shard, shards[call][rank.row])
            rank.copies.gather_owned(whole, shard, COUNTS, rank.stream)
            rank.move(together, whole)
            found.append((gathered, brought, together))
        return [*found, (accumulator, shard, shard)]  # which live as long as copies need them

    for row, found in enumerate(on_ranks(driver, work, lagging)):
        for call, (gathered, brought, together) in enumerate(found[:-1]):
            assert torch.equal(together, torch.cat(shards[call]))
            assert torch.equal(gathered.view(RANKS, SHARE), told[call])
            wanted = [each.split(COUNTS)[row] for each in sent[call]]
            if not brings_own:
                wanted[row] = torch.full_like(wanted[row], float("nan"))
            assert torch.equal(brought.nan_to_num(nan=9e9), torch.cat(wanted).nan_to_num(nan=9e9))


def test_tables_longer_than_the_scratch_memory_are_added_up(driver, monkeypatch):
    monkeypatch.setattr(peer_copies, "SCRATCH_BYTES", 256)
    tables = torch.randn(RANKS, 77, dtype=torch.float64)

    def work(rank: Rank) -> Tensor:
        table, submit = tables[rank.row].clone(), rank.transfers.submit
        [event] = rank.transfers.create_events(1)

        def at_once(prepared: Any) -> None:  # what is added follows on the stream of a GPU, here in this thread
            submit(prepared)
            submit(rank.transfers.prepare([Record(rank.stream, event)]))
            rank.transfers.synchronize(event)

        monkeypatch.setattr(rank.transfers, "submit", at_once, raising=False)
        rank.copies.add(table, rank.stream)
        return table

    for table in on_ranks(driver, work):
        assert torch.equal(table, tables[0] + tables[1] + tables[2])


def test_memory_that_no_rank_shares_is_refused(driver):
    def work(rank: Rank) -> None:
        elsewhere = torch.empty(RANKS * SHARE, dtype=torch.uint8)
        with pytest.raises(ValueError, match="72 bytes lies in no memory that the ranks share"):
            rank.copies.gather(elsewhere, elsewhere[:SHARE], rank.stream)
        rank.copies.abort()  # streams that wait for what never comes go on

    on_ranks(driver, work)


def test_memory_is_mapped_at_its_place_in_an_allocation(driver):
    peers, memory = PeerDriver(driver.path), torch.zeros(8192, dtype=torch.uint8)[100:200]
    offered = peers.offer(memory)
    assert (len(offered.handle), offered.num_bytes) == (64, 100)
    mapped = peers.map(offered)
    assert mapped.memory == RawMemory(memory.data_ptr(), 100)
    mapped.close()
    mapped.close()
    assert driver.calls("cuIpcCloseMemHandle") == 1
    driver.fail("cuIpcOpenMemHandle_v2", 217)
    with pytest.raises(OSError, match="cuIpcOpenMemHandle_v2: CUDA driver error 217: fake error 217"):
        peers.map(offered)
    with pytest.raises(OSError, match="has no cuNothing"):
        peers.call("cuNothing")


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def on_one_gpu(rank: int, copying: str) -> tuple[str, bool]:
    """Two ranks that share a GPU make calls of every kind; what moved bytes, and whether they were right."""
    os.environ.update({PEER_COPIES_VARIABLE: copying, SHARED_GPU_VARIABLE: "1"})
    control, device = Control.open(Ranks.of_environment()), torch.device("cuda", 0)
    collectives = Collectives(control, device)
    memory = torch.full((2**22,), 255, dtype=torch.uint8, device=device)
    collectives.share(memory)
    counts, right = [70001, 3], True
    for call in range(20):
        sent = torch.arange(sum(counts), device=device, dtype=torch.float32) + 1000 * rank + call
        received = memory[2**21 :].view(torch.float32)[: 2 * counts[rank]]
        collectives.exchange(received, sent, counts, counts[rank])
        expected = [(torch.arange(sum(counts)) + 1000.0 * r + call).split(counts)[rank] for r in range(2)]
        right &= torch.equal(received.cpu(), torch.cat(expected))
        shares = memory[: 2 * 99991]
        own = shares[rank * 99991 :][:99991].fill_(2 * call + rank)
        collectives.gather(shares, own)
        right &= shares.view(2, -1).float().mean(1).tolist() == [2.0 * call, 2.0 * call + 1]
    way = collectives.way
    collectives.close()
    control.close()
    return way, right


@pytest.mark.gpu
@pytest.mark.parametrize(("copying", "way"), [("1", "copies"), ("0", "host")])
def test_ranks_that_share_a_gpu_copy_to_each_other(copying, way):
    outcomes = values_of(run_ranks(on_one_gpu, 2, copying, anew=True))
    assert outcomes == [(way, True)] * 2
