"""What a plan predicts of a step, as a frozen value."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

CACHES = "caches of sequences"
"""The category of GPU bytes that sequences have beside a plan's slots while they are generated."""


class CacheBytes(NamedTuple):
    """What sequences that are generated take beside a plan: GPU bytes of their caches, and slack on the host."""

    gpu_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class Prediction:
    """What the planner expects of a full step: seconds, busy seconds per stream, bytes by category, and the bound.

    shared_host_bytes: of the host's bytes, those that several ranks have once for all. exchange_s: seconds in which
    the network is at work while several nodes add up their gradients. exchange_wait_s: those of them in which all else
    waits. after_clipping_s: seconds of a step after one that was clipped, where
    the plan speculates; else 0. unclipped_s: seconds of the same plan's step without clipping, where it runs its round
    twice for the norm; else 0. free_step_s, least_gpu_bytes: where the request is reproducible, seconds of a step of
    sizes that the planner is free to choose, and the least GPU memory that the sizes of the rule fit in; else 0.
    fewer_gpus, fewer_gpus_step_s: of several ranks, fewer GPUs of a node that are known to take the same step faster,
    and its seconds on them; else 0.
    drive_bytes, drive_written_bytes: what lies on a drive, and what a step writes there.
    """

    step_s: float = 0.0
    speed_of_light_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    recompute_share: float = 0.0
    gpu_bytes: int = 0
    host_bytes: int = 0
    gpu_categories: dict[str, int] = field(default_factory=dict)
    host_categories: dict[str, int] = field(default_factory=dict)
    limiter: str = ""
    shared_host_bytes: int = 0
    exchange_s: float = 0.0
    exchange_wait_s: float = 0.0
    after_clipping_s: float = 0.0
    unclipped_s: float = 0.0
    free_step_s: float = 0.0
    least_gpu_bytes: int = 0
    fewer_gpus: int = 0
    fewer_gpus_step_s: float = 0.0
    drive_bytes: int = 0
    drive_written_bytes: int = 0

    @property
    def once_s(self) -> float:
        """Seconds of a step in which a GPU computes what it would without recomputation."""
        return (1.0 - self.recompute_share) * self.busy_s["compute"]

    def with_caches(self, caches: CacheBytes) -> Prediction:
        """The same with caches of sequences beside the plan's slots."""
        gpu, host = caches
        on_gpu = self.gpu_categories | ({CACHES: gpu} if gpu else {})
        on_host = self.host_categories | ({"slack": self.host_categories.get("slack", 0) + host} if host else {})
        counted = replace(self, gpu_bytes=self.gpu_bytes + gpu, gpu_categories=on_gpu)
        return replace(counted, host_bytes=self.host_bytes + host, host_categories=on_host)
