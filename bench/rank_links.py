"""Rates of links and host memory of a machine with several GPUs: each rank alone, and all at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from bench.links import DIRECTIONS, Direction, HostWork, Together, all_together, host_works, together
from bench.shared_pages import huge_bytes
from flexengine.hardware.measure.host import copy_curve
from flexengine.hardware.measure.links import LinkBuffers, link_buffers
from flexengine.native.adamw import update_threads
from flexengine.native.page_lock import lock_pages, unlock_pages
from flexengine.native.transfer import open_transfers
from flexengine.native.transfer_operations import Copy, Transfers
from flexengine.parallel.node_memory import NodeMemory
from flexengine.parallel.team import Team

MIB = 2**20
SHARED_COPY_BYTES = 512 * MIB  # more than the processors' caches hold


def links(team: Team, device: torch.device, link_bytes: int, numel: int, seconds: float) -> dict[str, Any]:
    """Bytes per second of copies and of work on host memory: of this rank while others rest, and while all do it.

    AdamW runs on the rank's share of the cores but one, as in training.
    """
    torch.set_num_threads(update_threads())
    found: dict[str, Any] = {"threads": update_threads(), "alone": [], "all at once": []}
    engines: dict[Direction, Transfers] = {direction: open_transfers(device) for direction in DIRECTIONS}
    with link_buffers(link_bytes, device) as buffers, host_works(link_bytes, numel) as works:
        copies = _whole_copies(buffers)
        for rank in range(team.ranks.size):
            team.control.barrier()
            if rank == team.ranks.rank:
                found["alone"] = [row._asdict() for row in all_together(engines, copies, works[1:], seconds / 2)]
        for directions, work in _cases(works):
            team.control.barrier()
            row = together(engines, {d: copies[d] for d in directions}, work, seconds)
            found["all at once"].append({"directions": directions, **row._asdict()})
        team.control.barrier()
    for transfers in engines.values():
        transfers.close()
    return found


def _cases(works: Sequence[HostWork]) -> Iterator[tuple[tuple[Direction, ...], HostWork | None]]:
    """What all ranks do at the same time."""
    directions: list[tuple[Direction, ...]] = [("h2d",), ("d2h",), DIRECTIONS]
    yield from ((each, None) for each in directions)
    yield from (((), work) for work in works)
    if len(works) > 1:  # AdamW in native code
        yield DIRECTIONS, works[1]


def host(team: Team, device: torch.device, num_bytes: int, copy_bytes: int, seconds: float) -> dict[str, Any]:
    """Host memory: copies by all cores, and pages that all ranks share: mapping, page-locking, copies to the GPU."""
    found = host_copies(team, copy_bytes, seconds)
    team.control.barrier()
    start = time.perf_counter()
    with NodeMemory.open(team.ranks, team.control, num_bytes) as memory:
        found["shared"] = {
            "bytes": num_bytes,
            "map_bytes_per_s_of_all": num_bytes / (time.perf_counter() - start),
            "huge_bytes": huge_bytes(memory.tensor.data_ptr()),
        }
        if device.type == "cuda":
            found["shared"] |= shared_rates(team, device, memory.tensor, seconds)
        team.control.barrier()
    return found


def host_copies(team: Team, num_bytes: int, seconds: float) -> dict[str, Any]:
    """Copies within host memory, bytes read plus written: of this rank while others rest, and while all do it."""
    torch.set_num_threads(update_threads())
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    source, target = (torch.empty(num_bytes, dtype=torch.uint8).random_() for _ in range(2))
    for rank in range(team.ranks.size):
        team.control.barrier()
        if rank == team.ranks.rank:
            found["copy_bytes_per_s_by_threads"] = copy_curve(target, source, seconds / 4)
    team.control.barrier()
    row = together({}, {}, HostWork("host copy", lambda: target.copy_(source), 2 * num_bytes), seconds)
    found["copy_bytes_per_s_all_at_once"] = row.host_work_bytes_per_s
    return found


def shared_rates(team: Team, device: torch.device, memory: Tensor, seconds: float) -> dict[str, Any]:
    """Page-locking by every rank at once, and copies of what this rank and what the last rank brought into RAM."""
    found: dict[str, Any] = {"lock_bytes_per_s_alone": None}
    for ranks in ([0], range(team.ranks.size)):
        team.control.barrier()
        seconds_of = _timed(lambda: lock_pages(memory.data_ptr(), memory.numel())) if team.ranks.rank in ranks else 0.0
        name = "lock_bytes_per_s_all_at_once" if len(ranks) > 1 else "lock_bytes_per_s_alone"
        found[name] = memory.numel() / seconds_of if seconds_of else None
        if len(ranks) == 1 and team.ranks.rank in ranks:
            found["unlock_s_alone"] = _timed(lambda: unlock_pages(memory.data_ptr()))
    engines: dict[Direction, Transfers] = {direction: open_transfers(device) for direction in DIRECTIONS}
    part, rank, size = memory.numel() // team.ranks.size, team.ranks.rank, team.ranks.size
    for name, owner in (("own share", rank), ("next rank's share", (rank + 1) % size)):
        copies = _whole_copies(_buffers_within(memory[owner * part : (owner + 1) * part], device))
        team.control.barrier()
        found[f"{name}, all at once"] = _copied(together(engines, copies, None, seconds / 2))
        torch.cuda.synchronize(device)
        team.control.barrier()
    for transfers in engines.values():
        transfers.close()
    found["unlock_s_all_at_once"] = _timed(lambda: unlock_pages(memory.data_ptr()))
    return found


def _buffers_within(memory: Tensor, device: torch.device) -> LinkBuffers:
    """Buffers of a link whose host memory is at the beginning of some that is page-locked already."""
    count = min(memory.numel() // 2, SHARED_COPY_BYTES)
    up, down = (torch.empty(count, dtype=torch.uint8, device=device).random_() for _ in range(2))
    return LinkBuffers(memory[:count], up, down, memory[count : 2 * count])


def _whole_copies(buffers: LinkBuffers) -> dict[Direction, Copy]:
    """A copy of all of the buffers in each direction, on streams of their own."""
    size = buffers.num_bytes
    return {
        "h2d": Copy(torch.cuda.Stream(), buffers.up_gpu, 0, buffers.up_host, 0, size),
        "d2h": Copy(torch.cuda.Stream(), buffers.down_host, 0, buffers.down_gpu, 0, size),
    }


def _copied(row: Together) -> dict[str, float]:
    return {"h2d_bytes_per_s": row.h2d_bytes_per_s, "d2h_bytes_per_s": row.d2h_bytes_per_s}


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
