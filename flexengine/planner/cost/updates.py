"""Seconds of the optimizer's update by where a group's planes live, without lowering it.

Tiles of host planes pass three stations: fetched, updated, returned. With enough slots the slowest station decides,
with few of them a tile's whole way shared by the slots.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flexengine.plan import GroupPlan
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.cost.loads import home_of, issue_s, link_seconds
from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.simulator import cpu_share

NUM_COPIES = 2
"""A streamed tile is fetched and returned."""


class Stations(NamedTuple):
    """Seconds of all tiles of a group at each station, at the rates of a busy link, and of its first tile's way; cpu_s:
    what the CPU takes for it while the link is idle."""

    h2d_s: float
    compute_s: float
    d2h_s: float
    issue_s: float
    first_s: float
    cpu_s: float = 0.0

    def seconds(self, slots: int, cost: CostModel) -> tuple[float, float, float, float]:
        """What the group adds to an update with so many tile slots, which other groups may overlap: on the link, in
        compute, in issue and on the CPU."""
        link_s = float(link_seconds(np.asarray(self.h2d_s), np.asarray(self.d2h_s), cost))
        way_s = self.h2d_s + self.compute_s + self.d2h_s
        return max(link_s, way_s / slots) if self.h2d_s else 0.0, self.compute_s, self.issue_s, self.cpu_s


def stations(group: GroupStorage, level: GroupPlan, tile: int, cost: CostModel) -> Stations:
    """Seconds of a group's tiles of at most `tile` elements under a level of residency."""
    p = cost.profile
    planes = group.plane_bytes
    touched = 2 * sum(planes.values()) - planes["grad"]
    if not level.trained:
        return Stations(0.0, 0.0, 0.0, 0.0, 0.0)
    if level.update == "cpu":
        issued_s = len(group.segments) * issue_s(cost, "update")
        cpu_s = touched / p.cpu_adamw_bytes_per_s(cost.state_dtype)
        return Stations(0.0, 0.0, 0.0, issued_s, 0.0, cpu_s)
    fetched = [kind for kind, num in planes.items() if num and home_of(kind, level) == "host"]
    returned = [kind for kind in fetched if kind != "grad"]
    count = sum(-(-segment.numel // tile) for segment in group.segments)
    fetch_s = sum(planes[kind] for kind in fetched) / p.h2d_duplex_bytes_per_s
    return_s = sum(planes[kind] for kind in returned) / p.d2h_duplex_bytes_per_s
    fetch_s += count * p.copy_latency_s * len(fetched) * p.h2d_bytes_per_s / p.h2d_duplex_bytes_per_s
    return_s += count * p.copy_latency_s * len(returned) * p.d2h_bytes_per_s / p.d2h_duplex_bytes_per_s
    compute_s = touched / p.memory_bytes_per_s + count * p.launch_s
    copies_s = NUM_COPIES * issue_s(cost, "copy") if fetched else 0.0
    issued_s = count * (issue_s(cost, "update") + copies_s)
    first_s = min(1.0, tile / max(1, group.numel)) * (fetch_s + compute_s + return_s)
    return Stations(fetch_s, compute_s, return_s, issued_s, first_s)


def exposed_s(parts: np.ndarray, first_s: float, hidden_s: float, cost: CostModel) -> np.ndarray:
    """Seconds [P] that updates add to a step, from sums [P, 4] of `Stations.seconds` and the first tile's way: the
    slowest station's, less what the CPU goes on with under the next forward, of which so many seconds could hide it.
    While both are at work, the link and the CPU slow each other down."""
    link_s, cpu_s = parts[:, 0], parts[:, 3]
    of_link, of_cpu = _shares_together(cost)
    both_s = np.minimum(link_s / of_link, cpu_s / of_cpu)
    link_s, cpu_s = link_s + both_s * (1 - of_link), cpu_s + both_s * (1 - of_cpu)
    gpu_s = np.maximum(link_s, parts[:, 1:3].max(axis=1))
    hidden = np.minimum(np.maximum(cpu_s - gpu_s, 0.0), hidden_s)
    return np.maximum(gpu_s, cpu_s) - hidden + np.where(parts[:, 0] > 0, first_s, 0.0)


def _shares_together(cost: CostModel) -> tuple[float, float]:
    """Of their rates, what a busy link and the CPU each have while the other is at work."""
    p = cost.profile
    up = min(p.h2d_duplex_bytes_per_s, p.h2d_beside_cpu_bytes_per_s)
    down = min(p.d2h_duplex_bytes_per_s, p.d2h_beside_cpu_bytes_per_s)
    link_share = min(up / p.h2d_duplex_bytes_per_s, down / p.d2h_duplex_bytes_per_s)
    return link_share, cpu_share(up + down, p.host_rate(cost.state_dtype))
