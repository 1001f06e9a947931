"""Bytes a plan takes in both memories, as a process monitor would show them, with the parts that are no arena."""

from __future__ import annotations

from flexengine.hardware.profile import HardwareProfile
from flexengine.plan import Request
from flexengine.schedule.layout import Layout

GPU_SLACK_BYTES = 128 * 2**20
"""Kept free on CUDA: the allocator rounds segments up to 2 MiB, kernels are loaded later, library handles grow."""
HOST_SLACK_BYTES = 320 * 2**20
"""Kept free beside a CUDA arena for what comes after the first measurement: kernels and libraries as the first step
loads them, the driver's records of page-locked memory, batches. On an H200 these took 230 to 310 MiB."""


def gpu_categories(layout: Layout, profile: HardwareProfile) -> dict[str, int]:
    """GPU bytes by category. On a CPU the device is an arena alone, so nothing is added to it."""
    categories = layout.categories("gpu")
    if profile.device_type == "cuda":
        categories["CUDA context"] = profile.gpu_context_bytes
        categories["library workspace"] = layout.workspace_bytes
        categories["slack"] = GPU_SLACK_BYTES
    return categories


def host_categories(layout: Layout, profile: HardwareProfile) -> dict[str, int]:
    """Host bytes by category."""
    categories = layout.categories("host")
    categories["process"] = profile.host_base_bytes
    if profile.device_type == "cuda":
        categories["slack"] = HOST_SLACK_BYTES
    return categories


def gpu_overhead_bytes(layout: Layout, profile: HardwareProfile) -> int:
    """GPU bytes of the process outside the arena."""
    if profile.device_type != "cuda":
        return 0
    return profile.gpu_context_bytes + layout.workspace_bytes + GPU_SLACK_BYTES


def host_overhead_bytes(profile: HardwareProfile) -> int:
    """Host bytes of the process outside the arena."""
    return profile.host_base_bytes + (HOST_SLACK_BYTES if profile.device_type == "cuda" else 0)


def gpu_required_bytes(layout: Layout, profile: HardwareProfile) -> int:
    """GPU bytes that the process shows at its peak."""
    return layout.gpu_bytes + gpu_overhead_bytes(layout, profile)


def host_required_bytes(layout: Layout, profile: HardwareProfile) -> int:
    """Resident host bytes of the process at its peak."""
    return layout.host_bytes + host_overhead_bytes(profile)


def excess_bytes(layout: Layout, request: Request, profile: HardwareProfile) -> tuple[int, int]:
    """Bytes by which a layout exceeds the (GPU, host) budgets; negative where there is room."""
    return (
        gpu_required_bytes(layout, profile) - request.max_gpu_bytes,
        host_required_bytes(layout, profile) - request.max_host_bytes,
    )
