"""Bytes a plan takes in both memories, as a process monitor would show them, with the parts that are no arena."""

from __future__ import annotations

from flexengine.hardware.nodes import NCCL_BYTES
from flexengine.hardware.profile import HardwareProfile
from flexengine.ops.base import Op
from flexengine.ops.delta_rule import DeltaRule
from flexengine.ops.experts import GroupedLinear
from flexengine.plan import Request
from flexengine.schedule.layout import Layout
from flexengine.schedule.node_exchange import exchange_bytes
from flexengine.schedule.replays import replay_bytes

GPU_SLACK_BYTES = 128 * 2**20
"""Kept free on CUDA: the allocator rounds segments up to 2 MiB, kernels are loaded later, library handles grow."""
HOST_SLACK_BYTES = 320 * 2**20
"""Kept free beside a CUDA arena for what comes after the first measurement: kernels and libraries as the first step
loads them, the driver's records of page-locked memory, batches. On an H200 these took 230 to 310 MiB."""
EXPERTS_SLACK_BYTES = 64 * 2**20
"""What more kernels, those of experts, take besides: with adapters on an NF4 base 370 MiB in all."""
DELTA_RULE_SLACK_BYTES = 128 * 2**20
"""What the delta rule's many kernels take besides: they compile for 40 s, and the process had 398 MiB more in all."""
MORE_SLACK: dict[type[Op], int] = {GroupedLinear: EXPERTS_SLACK_BYTES, DeltaRule: DELTA_RULE_SLACK_BYTES}
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
    return (
        layout.categories("host") | shared | between | _host_overhead(layout, profile) | _temporaries(layout, profile)
    )


def _gpu_overhead(layout: Layout, profile: HardwareProfile) -> dict[str, int]:
    if profile.device_type != "cuda":
        return {}
    found = {"CUDA context": profile.gpu_context_bytes, "library workspace": layout.workspace_bytes}
    graphs = {"CUDA graphs": replay_bytes(layout.model, layout.plan)} if layout.plan.replays else {}
    return found | graphs | ({"NCCL": NCCL_BYTES} if layout.plan.split else {}) | {"slack": GPU_SLACK_BYTES}


def _host_overhead(layout: Layout | None, profile: HardwareProfile) -> dict[str, int]:
    """Bytes outside the arena; without a layout, of a model of the fewest kernels."""
    slack_bytes = HOST_SLACK_BYTES if profile.device_type == "cuda" else CPU_SLACK_BYTES
    if layout is not None and profile.device_type == "cuda":
        slack_bytes += sum(more for op_type, more in MORE_SLACK.items() if _has(layout, op_type))
    return {"process": profile.host_base_bytes, "slack": slack_bytes}


def _has(layout: Layout, op_type: type[Op]) -> bool:
    kinds = {block.ops for block in layout.model.blocks}
    return any(isinstance(op, op_type) for ops in kinds for op in ops)


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
        sum(_temporaries(layout, profile).values())
        + exchange_bytes(layout)
        + sum(_host_overhead(layout, profile).values())
    )
    return layout.host_bytes + -(-layout.node_bytes // layout.plan.request.ranks) + beside


def excess_bytes(layout: Layout, request: Request, profile: HardwareProfile) -> tuple[int, int]:
    """Bytes by which a layout exceeds the (GPU, host) budgets; negative where there is room."""
    return (
        gpu_required_bytes(layout, profile) - request.max_gpu_bytes,
        host_required_bytes(layout, profile) - request.max_host_bytes,
    )
