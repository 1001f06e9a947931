"""What is planned: a model and a request on a machine. It alone decides whether a plan fits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Request
from flexengine.planner import limits
from flexengine.planner.cost.memory import gpu_required_bytes, host_required_bytes
from flexengine.planner.limits import SearchLimits
from flexengine.schedule.layout import Layout


class Room(NamedTuple):
    """Bytes that a plan leaves of the budgets; negative where it lacks so many."""

    gpu_bytes: int
    host_bytes: int
    drive_bytes: int = 0

    @property
    def fits(self) -> bool:
        """Whether nothing lacks."""
        return min(self) >= 0

    def lacks(self, spare_bytes: int) -> tuple[int, int]:
        """Bytes of (GPU, host) that lack, and some to spare where any do."""
        gpu, host = (spare_bytes - left if left < 0 else 0 for left in self[:2])
        return gpu, host


@dataclass(frozen=True, eq=False)
class Problem:
    """A model that is planned for a request on a machine, and how far is searched.

    streams_adapters: what is trained beside frozen groups lives on the host, too. Of ranks of a node it does so always.
    on_drive: optimizer states of what is not on the GPU altogether may lie on a drive. all_on_drive: so may weights and
    gradients of blocks. kept_on_drive: so does what blocks keep from forward to backward and the GPU does not.
    """

    model: ModelSpec
    request: Request
    profile: HardwareProfile
    limits: SearchLimits = field(default_factory=lambda: limits.LIMITS)
    streams_adapters: bool = False
    on_drive: bool = False
    all_on_drive: bool = False
    kept_on_drive: bool = False

    @property
    def may_update_by_cpu(self) -> bool:
        """Whether updates by the CPU are others than the device's: of a CPU, only those of states on a drive."""
        return self.profile.device_type == "cuda" or self.on_drive

    @property
    def without_drive(self) -> Self:
        """The same problem without a drive."""
        return replace(self, request=replace(self.request, max_drive_bytes=0))

    def layout(self, plan: Plan) -> Layout:
        """Lay out a plan of the model."""
        return Layout(self.model, plan)

    def room(self, layout: Layout) -> Room:
        """What a layout leaves of the request's budgets. A plan fits where it lacks nothing."""
        return Room(
            self.request.max_gpu_bytes - gpu_required_bytes(layout, self.profile),
            self.request.max_host_bytes - host_required_bytes(layout, self.profile),
            self.request.max_drive_bytes - layout.drive_bytes,
        )

    def fits(self, layout: Layout) -> bool:
        """Whether the budgets hold a layout."""
        return self.room(layout).fits
