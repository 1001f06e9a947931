"""Seconds of the optimizer's update by where a group's planes live, without lowering it.

Tiles of host planes are fetched, updated and returned. With enough slots the slowest of the three decides; with few of
them, a tile's whole way shared by the slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexengine.plan import GroupPlan
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.cost.stream_loads import home_of, issue_s
from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.simulator import cpu_share

NUM_COPIES = 2
"""A streamed tile is fetched and returned."""


class TileTimes(NamedTuple):
    """Seconds of a group's tiles on each stream, with a busy link, and of its first tile's way."""

    h2d_s: float = 0.0
    compute_s: float = 0.0
    d2h_s: float = 0.0
    issue_s: float = 0.0
    first_s: float = 0.0

    def seconds(self, slots: int, cost: CostModel) -> tuple[float, float, float]:
        """What the group adds to an update with so many tile slots: on the link, in compute and in issue."""
        link_s = link_seconds(self.h2d_s, self.d2h_s, cost)
        way_s = self.h2d_s + self.compute_s + self.d2h_s
        return max(link_s, way_s / slots) if self.h2d_s else 0.0, self.compute_s, self.issue_s


def link_seconds(h2d_s: float, d2h_s: float, cost: CostModel) -> float:
    """Seconds that both directions take side by side, from their seconds at the rates of a busy link.

    When the shorter direction has ended, the longer goes on at the rate it has alone.
    """
    p, both = cost.profile, min(h2d_s, d2h_s)
    h2d_share = p.h2d_duplex_bytes_per_s / p.h2d_bytes_per_s
    d2h_share = p.d2h_duplex_bytes_per_s / p.d2h_bytes_per_s
    return both + (h2d_s - both) * h2d_share + (d2h_s - both) * d2h_share


def tile_times(group: GroupStorage, home: GroupPlan, tile: int, cost: CostModel) -> TileTimes:
    """Seconds of a group's tiles of at most `tile` elements; what the CPU updates costs issue alone."""
    p, planes = cost.profile, group.plane_bytes
    if not home.trained:
        return TileTimes()
    if home.update == "cpu":
        return TileTimes(issue_s=len(group.segments) * issue_s(cost, "update"))
    fetched = [kind for kind, num in planes.items() if num and home_of(kind, home) == "host"]
    returned = [kind for kind in fetched if kind != "grad"]
    count = sum(len(segment.tiles(tile)) for segment in group.segments)
    latency_s = count * p.copy_latency_s
    fetch_s = sum(planes[kind] for kind in fetched) + latency_s * len(fetched) * p.h2d_bytes_per_s
    return_s = sum(planes[kind] for kind in returned) + latency_s * len(returned) * p.d2h_bytes_per_s
    fetch_s, return_s = fetch_s / p.h2d_duplex_bytes_per_s, return_s / p.d2h_duplex_bytes_per_s
    compute_s = touched_bytes(group) / p.memory_bytes_per_s + count * p.launch_s
    copies_s = NUM_COPIES * issue_s(cost, "copy") if fetched else 0.0
    issued_s = count * (issue_s(cost, "update") + copies_s)
    first_s = min(1.0, tile / max(1, group.numel)) * (fetch_s + compute_s + return_s)
    return TileTimes(fetch_s, compute_s, return_s, issued_s, first_s)


def cpu_update_s(group: GroupStorage, home: GroupPlan, cost: CostModel) -> float:
    """Seconds in which the CPU updates a group while the link is idle; 0 where the GPU does."""
    return touched_bytes(group) / cost.profile.cpu_adamw_bytes_per_s(cost.state_dtype) if home.update == "cpu" else 0.0


def touched_bytes(group: GroupStorage) -> int:
    """Bytes that an update reads and writes; gradients are only read."""
    return 2 * sum(group.plane_bytes.values()) - group.plane_bytes["grad"]


def gpu_update_s(
    parts: np.ndarray, cpu_s: np.ndarray, first_s: float, cost: CostModel
) -> tuple[np.ndarray, np.ndarray]:
    """Seconds [P] of the GPU's updates, and of the CPU's work, of cpu_s [P], that is done meanwhile.

    parts: sums [P, 3] of `TileTimes.seconds`; first_s: the first tile's way. While both are at work, the link and the
    CPU slow each other down, as both use host memory.
    """
    link_s, others_s = parts[:, 0], parts[:, 1:].max(axis=1)
    of_link, of_cpu = _shares_together(cost)
    both_s = np.minimum(link_s / of_link, cpu_s / of_cpu)
    gpu_s = np.maximum(link_s + both_s * (1 - of_link), others_s) + np.where(link_s > 0, first_s, 0.0)
    return gpu_s, np.minimum(cpu_s, both_s * of_cpu + np.maximum(gpu_s - both_s, 0.0))


def _shares_together(cost: CostModel) -> tuple[float, float]:
    """The shares of their rates that a busy link and the CPU each have while the other is at work."""
    p = cost.profile
    up = min(p.h2d_duplex_bytes_per_s, p.h2d_beside_cpu_bytes_per_s)
    down = min(p.d2h_duplex_bytes_per_s, p.d2h_beside_cpu_bytes_per_s)
    link_share = min(up / p.h2d_duplex_bytes_per_s, down / p.d2h_duplex_bytes_per_s)
    return link_share, cpu_share(up + down, p.host_rate(cost.state_dtype))
