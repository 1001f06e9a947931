"""The groups that are trained beside frozen ones, as plans place them: all alike, on the GPU or on the host.

On the GPU they cost no copies. On the host they cross the link with their block, twice a round, their gradients go
home, and updates pass through tiles, as of any group that streams. Ranks of a node have one copy, on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.plan import GroupPlan, Home, Request
from flexengine.planner.cost.stream_loads import RESIDENT, STREAMED, plane_bytes_in, residencies_of
from flexengine.schedule.group_storage import GroupStorage, group_storage
from flexengine.schedule.group_uses import GroupUse, group_uses


class AdapterGroup(NamedTuple):
    """One of them: its number in the model, how it is stored, where it lies, and by whom it is read."""

    number: int
    layout: GroupStorage
    home: GroupPlan
    use: GroupUse


class AdapterGroups:
    """The groups beside others of a model. streamed: they live on the host."""

    def __init__(self, model: ModelSpec, request: Request, streamed: bool) -> None:
        self.residency, self._request = STREAMED if streamed else RESIDENT, request
        unstored = streamed and request.gpu_updates == "unstored"
        self.members = [
            AdapterGroup(
                number,
                group_storage(group, request.numerics),
                residencies_of(group, unstored and use.gradients == 1 and group.num_parts == 1)[self.residency],
                use,
            )
            for number, (group, use) in enumerate(zip(model.groups, group_uses(model), strict=True))
            if group.adapter
        ]
        self._by_number = {member.number: member for member in self.members}

    def __contains__(self, number: int) -> bool:
        return number in self._by_number

    def of_layer(self, layer: LayerSpec) -> list[AdapterGroup]:
        """Those that a layer reads."""
        return [self._by_number[group] for group in layer.groups if group in self._by_number]

    @property
    def layouts(self) -> list[GroupStorage]:
        """How they are stored, in the model's order."""
        return [member.layout for member in self.members]

    def plane_bytes_in(self, memory: Home) -> int:
        """Bytes of their planes that live in a memory."""
        return sum(plane_bytes_in(memory, member.layout, member.home) for member in self.members)

    def host_bytes_beyond(self, small: ModelSpec) -> int:
        """A rank's share of the host bytes of their planes, less those of a small model that one rank would have."""
        of_small = AdapterGroups(small, self._request, self.residency == STREAMED).plane_bytes_in("host")
        return self.plane_bytes_in("host") // self._request.ranks - of_small

    @cached_property
    def uses_tiles(self) -> bool:
        """Whether their updates by the GPU pass through tiles."""
        return any(member.home.uses_tiles for member in self.members)


def resident_adapter_bytes(model: ModelSpec, request: Request) -> int:
    """GPU bytes of all adapters with their gradients and states."""
    return AdapterGroups(model, request, streamed=False).plane_bytes_in("gpu")


def updated_by_cpu(groups: Sequence[GroupPlan], adapters: AdapterGroups) -> tuple[GroupPlan, ...]:
    """The homes of a plan with adapters that the CPU updates where they live on the host altogether."""
    return tuple(
        GroupPlan(update="cpu") if number in adapters and home == GroupPlan() else home
        for number, home in enumerate(groups)
    )
