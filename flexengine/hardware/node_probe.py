"""Measures what several ranks reach when all of them are at work, once per machine, and remembers it.

A profile is measured by one rank while the others wait. They share host memory and are joined with each other, which
only all of them together can measure.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from flexengine.hardware.cache import read_remembered, write_remembered
from flexengine.hardware.host_memory import host_memory
from flexengine.hardware.measure.node import AtOnce, measure_at_work
from flexengine.hardware.memory_usage import gpu_used_bytes, release_unused_heap, resident_bytes
from flexengine.hardware.node_rates import NodeRates, RankRates, slowest_of, with_node_rates
from flexengine.hardware.parts import PeerWay
from flexengine.hardware.probe import node_path
from flexengine.hardware.profile import HardwareProfile
from flexengine.parallel.collectives import Collectives
from flexengine.parallel.devices import gpus_of_ranks
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.team import Team

PEER_BYTES = 256 * 2**20
"""Of a gather and of an exchange: as a layer of a model of 8 billion parameters has them."""
PEER_CALLS = 20

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Measured(NamedTuple):
    """What a rank has found, and by how much its process has grown on the GPU and on the host: NCCL's kernels stay."""

    rates: RankRates
    adamw_state: str
    peer_way: PeerWay
    grown_gpu_bytes: int = 0
    grown_host_bytes: int = 0


def with_ranks_at_work(
    profile: HardwareProfile, team: Team, device: torch.device, dtype: torch.dtype
) -> HardwareProfile:
    """The profile that one rank has measured, with what all ranks reach at once, remembered or measured in seconds.

    Ranks on CPUs, those of which two share a GPU, and one on each node keep the profile. All ranks make this call
    together and get the same. Raises: on all ranks, what one raises.
    """
    if team.ranks.local_size == 1 or not gpus_of_ranks(team.control, device).all_own:
        return profile
    ranks, control = team.ranks, team.control
    path = node_path(device, dtype, ranks.local_size, ranks.nodes)
    known = read_remembered(path, NodeRates.from_json) if ranks.rank == 0 else None
    known = control.broadcast(known, NodeRates)
    if known is not None:
        return with_node_rates(profile, known)
    if ranks.rank == 0:
        logger.info("measuring what %d ranks reach at once (a few seconds)", ranks.size)
    measured = control.gather(measure_rank(profile, team, device, dtype), Measured, RankRates)
    slowest = slowest_of([each.rates for each in measured])
    found = NodeRates(ranks.local_size, measured[0].adamw_state, slowest, measured[0].peer_way)
    if ranks.rank == 0:
        write_remembered(path, found.to_json())
    return _grown(with_node_rates(profile, found), measured[0], ranks.local_size)


def measure_rank(profile: HardwareProfile, team: Team, device: torch.device, dtype: torch.dtype) -> Measured:
    """What this rank reaches while all others do the same."""

    def at_once(call: Callable[[], T]) -> T:
        with team.control.all_or_none():  # which all leave together, and so begin the next call together
            return call()

    before = at_once(lambda: _used(device))
    free_bytes = host_memory().available_bytes // team.ranks.local_size
    host = measure_at_work(device, dtype, profile.host.adamw_parameters_per_s, free_bytes, at_once)
    way, peer_bytes_per_s = _measure_peers(team, device, at_once)
    grown = [max(0, now - used) for now, used in zip(at_once(lambda: _used(device)), before, strict=True)]
    return Measured(RankRates(**host.rates, peer_bytes_per_s=peer_bytes_per_s), host.adamw_state, way, *grown)


def _measure_peers(team: Team, device: torch.device, at_once: AtOnce) -> tuple[PeerWay, float]:
    """What moves bytes between GPUs, and how many per second one way; NCCL's kernels stay loaded."""
    collectives = Collectives(team.control, device)
    try:
        buffers = at_once(lambda: _peer_buffers(team.ranks, device))
        collectives.share(buffers.memory)
        found = at_once(lambda: _peer_rate(team.ranks, collectives, buffers))
    except BaseException as error:
        collectives.abort(f"rank {team.ranks.rank}: {type(error).__name__}: {error}")
        raise
    way = collectives.way
    collectives.close()
    return ("nccl" if way == "host" else way), found


class _PeerBuffers(NamedTuple):
    """What a rank gathers (uint8, a share of each rank), and what it exchanges (float32); memory: of what it gets."""

    memory: Tensor
    shares: Tensor
    sent: Tensor
    received: Tensor


def _peer_buffers(ranks: Ranks, device: torch.device) -> _PeerBuffers:
    share = PEER_BYTES // ranks.local_size // 512 * 512
    memory = torch.empty(2, ranks.local_size, share, dtype=torch.uint8, device=device).random_()
    shares, received = memory[0], memory[1].view(-1).view(torch.float32)
    sent = torch.zeros_like(received)
    torch.cuda.synchronize(device)
    return _PeerBuffers(memory.view(-1), shares, sent, received)


def _peer_rate(ranks: Ranks, collectives: Collectives, buffers: _PeerBuffers) -> float:
    """Bytes per second that a GPU receives from the others in gathers and exchanges, while it sends as many."""
    _, shares, sent, received = buffers
    counts = [sent.numel() // ranks.local_size] * ranks.local_size
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(torch.cuda.Stream(shares.device, priority=-1)):
        for call in range(PEER_CALLS + 1):
            if call == 1:  # all ranks are here
                start.record()
            collectives.gather(shares.view(-1), shares[ranks.local_rank])
            collectives.exchange(received, sent, counts, counts[0], brings_own=False)
        end.record()
        end.synchronize()
    moved = 2 * shares.shape[1] * (ranks.local_size - 1)
    return PEER_CALLS * moved / (start.elapsed_time(end) / 1e3)


def _used(device: torch.device) -> tuple[int, int]:
    """Bytes of this process on the GPU, without torch's allocator, and on the host."""
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    release_unused_heap()
    return gpu_used_bytes(device) - torch.cuda.memory_reserved(device), resident_bytes()


def _grown(profile: HardwareProfile, measured: Measured, ranks: int) -> HardwareProfile:
    """The profile of processes that have all grown as the one that measured it."""
    gpu, host, memory = measured.grown_gpu_bytes, measured.grown_host_bytes, profile.memory
    return profile.changed(
        gpu_free_bytes=max(0, memory.gpu_free_bytes - gpu),
        gpu_context_bytes=min(memory.gpu_total_bytes, memory.gpu_context_bytes + gpu),
        host_available_bytes=max(0, memory.host_available_bytes - ranks * host),
        host_base_bytes=memory.host_base_bytes + host,
    )
