"""Seconds of a signal from one of two ranks until the other has seen it, and answers: of hosts, and of streams."""

from __future__ import annotations

import time
from typing import Any

import torch

from flexengine.native.transfer import open_transfers
from flexengine.native.transfer_operations import Await, Raise, Record, WordValue
from flexengine.parallel.node_memory import NodeMemory
from flexengine.parallel.signals import Signals
from flexengine.parallel.team import Team

PINGS = 1000


def hops(team: Team, device: torch.device) -> dict[str, Any]:
    """Seconds of a signal from one rank to the other, by hosts, and by streams where they can."""
    ranks, control, cells = team.ranks, team.control, 2
    memory = NodeMemory.open(ranks, control, Signals.num_bytes(2, cells), page_locked=device.type == "cuda")
    signals = Signals.over(memory.tensor, 2, cells, ranks.local_rank)
    found: dict[str, Any] = {"host_s": hop_of_hosts(team, signals)}
    if device.type == "cuda":
        found["stream_s"] = hop_of_streams(team, signals, device)
    control.barrier()
    memory.close()
    return found


def hop_of_hosts(team: Team, signals: Signals) -> float:
    """Two hosts answer each other through cell 0."""
    team.control.barrier()
    start, other = time.perf_counter(), 1 - team.ranks.local_rank
    for value in range(1, PINGS + 1):
        if team.ranks.local_rank == 0:
            signals.signal(0, value)
            signals.wait(0, other, value)
        else:
            signals.wait(0, other, value)
            signals.signal(0, value)
    return (time.perf_counter() - start) / PINGS / 2


def hop_of_streams(team: Team, signals: Signals, device: torch.device) -> float | None:
    """Two streams answer each other through cell 1; None where they cannot."""
    transfers, stream = open_transfers(device), torch.cuda.Stream(device)
    row = team.ranks.local_rank
    own, other = (transfers.word_address(signals.addresses(1, r)[0]) for r in (row, 1 - row))
    if own is None or other is None:
        return None
    pair = [Raise(stream), Await(stream)] if row == 0 else [Await(stream), Raise(stream)]
    [done] = transfers.create_events(1)
    prepared = transfers.prepare([*pair * PINGS, Record(stream, done)])
    words = [(own if isinstance(operation, Raise) else other, operation) for operation in pair]
    for value in range(PINGS):
        values = ((2 * value + i, WordValue(address, value + 1)) for i, (address, _) in enumerate(words))
        transfers.set_words(prepared, values)
    team.control.barrier()
    start = time.perf_counter()
    transfers.submit(prepared)
    transfers.synchronize(done)
    seconds = (time.perf_counter() - start) / PINGS / 2
    transfers.close()
    return seconds
