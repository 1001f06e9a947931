"""Budgets that are more than the machine has: plans for them are possible, and say so."""

from __future__ import annotations

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes
from flexengine.plan import Request


def budget_notes(request: Request, profile: HardwareProfile) -> list[str]:
    """A line for every budget above what the machine of the profile has; on a CPU both budgets are of one memory."""
    gpu_bytes, host_bytes = request.max_gpu_bytes, request.max_host_bytes
    if profile.device_type == "cpu":
        pools = [("machine", "the sum of the two memory budgets", gpu_bytes + host_bytes, profile.host_total_bytes)]
    else:
        pools = [
            ("card", "the GPU memory budget", gpu_bytes, profile.gpu_total_bytes),
            ("machine", "the host memory budget", host_bytes, profile.host_total_bytes),
        ]
    return [
        f"{budget}, {format_bytes(asked_bytes)}, is more than the {format_bytes(total_bytes)} of this {place}:"
        f" this plan is for another {place}"
        for place, budget, asked_bytes, total_bytes in pools
        if asked_bytes > total_bytes
    ]


def remedy_note(changed: Request, request: Request, profile: HardwareProfile) -> str:
    """ "more than this card's 23.50 GiB" if `changed` has a budget above that of `request` and what there is, or ""."""
    card = ("card", profile.gpu_total_bytes) if profile.device_type != "cpu" else ("machine", profile.host_total_bytes)
    machine = ("machine", profile.host_total_bytes)
    notes = [
        f"more than this {place}'s {format_bytes(total_bytes)}"
        for (place, total_bytes), new, old in (
            (card, changed.max_gpu_bytes, request.max_gpu_bytes),
            (machine, changed.max_host_bytes, request.max_host_bytes),
        )
        if new > max(old, total_bytes)
    ]
    return " and ".join(notes)
