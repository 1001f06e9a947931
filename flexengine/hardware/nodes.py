"""What is assumed of machines with several GPUs, and of networks between them, until they are measured.

A preset describes one GPU and the usual host around it. Several GPUs share one host memory, which then may be what
limits their links together.
"""

from __future__ import annotations

from dataclasses import replace

from flexengine.hardware.parts import ONLY_FIELDS, PeerWay
from flexengine.hardware.profile import HardwareProfile

SERVER_NODE_BYTES_PER_S = ((2, 230e9), (8, 480e9))
"""Host memory of a server with up to so many data-centre cards. Two: what links and updates on 32 cores moved together
beside two H100 (bench/results/h100x2_ranks.json). More: two sockets with twelve channels of DDR5-4800 each move 920
GB/s on paper, of which about half is taken to be attained; assumed, not measured."""
DESKTOP_NODE_BYTES_PER_S = ((2, 75e9), (4, 150e9), (8, 300e9))
"""Host memory of a machine with up to so many GeForce or workstation cards: two channels of DDR5, then boards with
eight channels, then two sockets of them. Assumed, not measured."""
NETWORK_BYTES_PER_S = 100e9 / 8
"""Network of a node where none is named: 100 Gbit/s. Assumed, not measured."""

PEER_MEMORY_BYTES: dict[PeerWay, int] = {"copies": 64 * 2**20, "nccl": 896 * 2**20}
"""GPU memory that the ranks of a node take to exchange what lies there. NCCL: 864 MiB on two H100 without multicast,
all kinds of calls connected, beside its kernels, which are counted with the context
(bench/results/h100x2_ranks_shared.json). Copies: a MiB for each rank, in a piece of torch's allocator."""

PEER_WAIT_S: dict[PeerWay, float] = {"copies": 50e-6, "nccl": 1e-3}
"""What an exchange takes longer beside products. A collective of NCCL begins when one ends, which keeps all
multiprocessors until then: products of 8192^3 on two H100 add 1.0 to 1.2 ms. Copies wait for two signals: there gathers
take 0.01 ms longer (bench/results/h100x2_ranks_copies.json)."""
WITHIN_WAIT_S = 1e-3
"""What copies within a GPU, which are kernels, take longer beside products, as of a rank's own piece of an exchange."""


def peer_s(profile: HardwareProfile, num_bytes: int, within: bool = False) -> float:
    """Seconds of an exchange in which each GPU sends so many bytes to others, as it receives as many.

    within: a GPU copies a piece of its own, too. Where the rate between GPUs is not known, they are taken to reach each
    other through the host alone: every byte crosses a link twice.
    """
    if not num_bytes:
        return 0.0
    link = profile.link
    if link.peer_bytes_per_s:
        wait_s = PEER_WAIT_S[link.peer_way] + (WITHIN_WAIT_S if within and link.peer_way == "copies" else 0.0)
        return wait_s + num_bytes / link.peer_bytes_per_s
    return link.copy_latency_s + 2 * num_bytes / min(link.d2h_duplex_bytes_per_s, link.h2d_duplex_bytes_per_s)


def with_gpus(profile: HardwareProfile, gpus: int, host_bytes_per_s: float | None = None) -> HardwareProfile:
    """Put `gpus` cards of a profile on one node; its host memory is that of so many hosts, unless it was measured.

    host_bytes_per_s: rate of the node's host memory; None = what is assumed of presets, or what was measured. Updates
    by the CPU are taken to grow with the number of GPUs, as cores do, up to that rate.
    """
    if gpus == 1 and host_bytes_per_s is None:
        return profile
    assumed = profile.source == "preset"
    node = host_bytes_per_s or (assumed_node_rate(profile, gpus) if assumed else profile.host.bytes_per_s)
    cores = gpus if assumed else 1
    faster = min(cores, node / profile.host.bytes_per_s)
    sizes = {}
    if assumed:
        total = gpus * profile.memory.host_total_bytes
        sizes = {"host_total_bytes": total, "host_available_bytes": total - profile.memory.host_base_bytes}
    return profile.changed(
        host_bytes_per_s=node,
        cpu_share_beside_link=0.0,
        cpu_adamw_parameters_per_s=profile.host.faster(faster),
        **sizes,
    )


def assumed_node_rate(profile: HardwareProfile, gpus: int) -> float:
    """Bytes per second of host memory that are assumed of a node with so many cards of a preset."""
    if gpus == 1:
        return profile.host.bytes_per_s
    nodes = SERVER_NODE_BYTES_PER_S if profile.host.bytes_per_s >= 100e9 else DESKTOP_NODE_BYTES_PER_S
    rates = [rate for most, rate in nodes if gpus <= most] or [nodes[-1][1]]
    return max(rates[0], profile.host.bytes_per_s)


def rank_profile(profile: HardwareProfile, ranks: int) -> HardwareProfile:
    """The profile of one of several ranks of a node, which have equal shares of its drive, and their links of its host
    memory.

    Where links were measured with at least as many ranks at work, they are as they were measured.
    """
    profile = replace(profile, drive=profile.drive.among(ranks))
    if 1 < ranks <= profile.measured_ranks:
        return profile
    alone, both = profile.host.bytes_per_s / ranks, profile.host.bytes_per_s / (2 * ranks)
    limits = {name: alone for name in ("h2d_bytes_per_s", "d2h_bytes_per_s", *ONLY_FIELDS)}
    limits |= {
        name: both
        for name in (
            "h2d_duplex_bytes_per_s", "d2h_duplex_bytes_per_s", "h2d_beside_cpu_bytes_per_s",
            "d2h_beside_cpu_bytes_per_s",
        )
    }  # fmt: skip
    link = profile.link
    return replace(
        profile, link=replace(link, **{name: min(getattr(link, name), most) for name, most in limits.items()})
    )
