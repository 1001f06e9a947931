"""Bytes a plan takes in both memories, as a process monitor would show them, with the parts that are no arena."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flexengine.hardware.nodes import PEER_MEMORY_BYTES
from flexengine.hardware.parts import PeerWay
from flexengine.hardware.profile import HardwareProfile
from flexengine.ops.attention.attention import CausalAttention
from flexengine.ops.attention.style import CAUSAL
from flexengine.ops.base import Op
from flexengine.ops.delta.delta_rule import DeltaRule
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.layernorm import LayerNorm
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.node_exchange import exchange_bytes
from flexengine.schedule.replays import replay_bytes

GPU_SLACK_BYTES = 128 * 2**20
"""Kept free on CUDA: the allocator rounds segments up to 2 MiB, kernels are loaded later, library handles grow."""
HOST_SLACK_BYTES = 328 * 2**20
"""Kept free beside a CUDA arena for what comes after the first measurement: kernels and libraries as the first step
loads them, the driver's records of page-locked memory, batches. They took 188 to 310 MiB on an H200; on an H100 250
with kernels that were there, and up to 323 where the process compiled them itself."""
EXPERTS_SLACK_BYTES, DELTA_RULE_SLACK_BYTES, ATTENTION_SLACK_BYTES = 112 * 2**20, 128 * 2**20, 96 * 2**20
LAYERNORM_SLACK_BYTES = 48 * 2**20
"""What compiling more kernels takes besides: those of experts (403 MiB in all), of the delta rule (425), of attention
that windows, soft caps or sinks keep from other libraries (382), and of models with LayerNorm, biases and a vocabulary
that is no multiple of 8 (348)."""
DELTA_RULE_GPU_SLACK_BYTES = 32 * 2**20
"""Kept free on CUDA besides where blocks have the delta rule, whose calls take buffers of many sizes: on an H100 such a
plan took 4 MiB more than without."""
PEER_NAMES: dict[PeerWay, str] = {"copies": "copies between GPUs", "nccl": "NCCL"}
CPU_SLACK_BYTES = 64 * 2**20
"""Kept free where the CPU is the device: kernels' own buffers and compiled products, what the allocator holds back."""


def gpu_categories(layout: Layout, profile: HardwareProfile) -> dict[str, int]:
    """GPU bytes by category. On a CPU the device is an arena alone, so nothing is added to it."""
    return layout.categories("gpu") | _gpu_overhead(layout, profile)


def host_categories(layout: Layout, profile: HardwareProfile) -> dict[str, int]:
    """Host bytes by category. On a CPU what ops allocate is memory of the process, beside both arenas."""
    ranks = layout.plan.request.ranks
    shared = {name: num_bytes // ranks for name, num_bytes in layout.categories("node").items()}
    between = {"exchange between nodes": num_bytes} if (num_bytes := exchange_bytes(layout)) else {}
    given = {"pixels": num_bytes} if (num_bytes := column_bytes(layout)) else {}
    return (
        layout.categories("host")
        | given
        | shared
        | between
        | _host_overhead(layout, profile)
        | _temporaries(layout, profile)
    )


def _gpu_overhead(layout: Layout, profile: HardwareProfile) -> dict[str, int]:
    if profile.device_type != "cuda":
        return {}
    found = {"CUDA context": profile.memory.gpu_context_bytes, "library workspace": layout.workspace_bytes}
    graphs = {"CUDA graphs": replay_bytes(layout.model, layout.plan)} if layout.plan.replays else {}
    peers = (
        {PEER_NAMES[profile.link.peer_way]: PEER_MEMORY_BYTES[profile.link.peer_way]}
        if layout.places.uses_peers
        else {}
    )
    delta_rule = any(isinstance(op, DeltaRule) for op in _ops_of_blocks(layout))
    slack_bytes = GPU_SLACK_BYTES + (DELTA_RULE_GPU_SLACK_BYTES if delta_rule else 0)
    return found | graphs | peers | {"slack": slack_bytes}


def _host_overhead(layout: Layout | None, profile: HardwareProfile) -> dict[str, int]:
    """Bytes outside the arena; without a layout, of a model of the fewest kernels."""
    slack_bytes = HOST_SLACK_BYTES if profile.device_type == "cuda" else CPU_SLACK_BYTES
    if layout is not None and profile.device_type == "cuda":
        slack_bytes += sum(_kernels_slack(_ops_of_blocks(layout)).values())
    return {"process": profile.memory.host_base_bytes, "slack": slack_bytes}


def _ops_of_blocks(layout: Layout) -> list[Op]:
    """The ops of one block of each kind."""
    return [op for ops in {block.ops for block in layout.model.blocks} for op in ops]


def _kernels_slack(ops: Iterable[Op]) -> dict[str, int]:
    """Bytes that compiling takes beside the usual, by what needs the kernels."""
    found: dict[str, int] = {}
    for op in ops:
        if isinstance(op, GroupedLinear):
            found["experts"] = EXPERTS_SLACK_BYTES
        elif isinstance(op, DeltaRule):
            found["delta rule"] = DELTA_RULE_SLACK_BYTES
        elif isinstance(op, CausalAttention) and op.style._replace(scale=None) != CAUSAL:
            found["attention"] = ATTENTION_SLACK_BYTES
        elif isinstance(op, LayerNorm):
            found["layer norm"] = LAYERNORM_SLACK_BYTES
    return found


def _temporaries(layout: Layout, profile: HardwareProfile) -> dict[str, int]:
    return {} if profile.device_type == "cuda" else {"temporaries": layout.plain_workspace_bytes}


def gpu_overhead_bytes(layout: Layout, profile: HardwareProfile) -> int:
    """GPU bytes of the process outside the arena."""
    return sum(_gpu_overhead(layout, profile).values())


def host_overhead_bytes(profile: HardwareProfile) -> int:
    """Host bytes of any process outside the arena and what ops allocate on a CPU."""
    return sum(_host_overhead(None, profile).values())


def gpu_required_bytes(layout: Layout, profile: HardwareProfile) -> int:
    """GPU bytes that the process shows at its peak."""
    return layout.gpu_bytes + gpu_overhead_bytes(layout, profile)


def host_required_bytes(layout: Layout, profile: HardwareProfile) -> int:
    """Resident host bytes of the process at its peak, with its share of what several ranks have together."""
    beside = (
        column_bytes(layout)
        + sum(_temporaries(layout, profile).values())
        + exchange_bytes(layout)
        + sum(_host_overhead(layout, profile).values())
    )
    return layout.host_bytes + -(-layout.node_bytes // layout.plan.request.ranks) + beside


def column_bytes(layout: Layout) -> int:
    """Host bytes of what a batch brings of images, which a caller holds until its call ends."""
    return 0 if layout.model.given is None else layout.model.given.column_bytes


class ProcessBytes(NamedTuple):
    """What a process takes of both memories, in all and by category, named as in `Prediction`."""

    gpu_bytes: int
    host_bytes: int
    gpu_categories: dict[str, int]
    host_categories: dict[str, int]


def process_bytes(layout: Layout, profile: HardwareProfile) -> ProcessBytes:
    """What the process that has a layout takes."""
    return ProcessBytes(
        gpu_required_bytes(layout, profile),
        host_required_bytes(layout, profile),
        gpu_categories(layout, profile),
        host_categories(layout, profile),
    )
