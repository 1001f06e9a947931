"""Appends slots of one memory, one after the other."""

from __future__ import annotations

from collections.abc import Iterable

from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.layer_program import align
from flexengine.schedule.slots import Memory, PlaneKind, Role, Slot, SlotKey

RUN = "run"
"""Category of slots within planes, which take no bytes of their own."""


class Region:
    """Appends slots of one memory to a list, one after the other from `start`; `end` is where the next one begins."""

    def __init__(self, slots: list[Slot], memory: Memory, start: int = 0) -> None:
        self.slots, self.end = slots, align(start)
        self.memory: Memory = memory
        self._shared = dict[SlotKey, Slot]()

    def add(self, role: Role, num_bytes: int, category: str, owner: str | int = "", index: int = -1) -> None:
        """Append a slot."""
        self.slots.append(Slot(SlotKey(role, owner, index, self.memory), self.end, num_bytes, category))
        self.end += align(num_bytes)

    def add_once(self, key: SlotKey, num_bytes: int, category: str, most_bytes: int) -> None:
        """Append a slot unless it is there: of the largest of those that share it, within which lies that of a key with
        `within`."""
        whole = key._replace(within=())
        if whole not in self._shared:
            self.add(key.role, most_bytes, category, key.owner, key.index)
            self._shared[whole] = self.slots[-1]
        if key not in self._shared:
            self._shared[key] = self._shared[whole].subslot(key.within, 0, num_bytes, category)
            self.slots.append(self._shared[key])

    def add_pieces(self, pieces: Iterable[tuple[int, int, int]], within: str = "piece") -> None:
        """Append slots within the last one: (number, first byte there, bytes) of each."""
        whole = self.slots[-1]
        self.slots += [whole.subslot((within, number), start, num_bytes, RUN) for number, start, num_bytes in pieces]

    def add_places(self, places: Iterable[tuple[int, int]]) -> None:
        """Append slots within the last one, each once: (first byte there, bytes)."""
        whole = self.slots[-1]
        self.slots += [whole.subslot(place, *place, RUN) for place in dict.fromkeys(places)]

    def add_plane(self, kind: PlaneKind, owner: str, group: GroupStorage, category: str) -> None:
        """Append a plane; within it, for weights and gradients of a group in parts, a slot for each run."""
        self.add(kind, group.plane_bytes[kind], category, owner)
        if len(group.parts) == 1 or kind not in ("weights", "grad"):
            return
        plane = self.slots[-1]
        for run in (run for part in group.parts for run in part.runs):
            start, _, num_bytes = group.run_bytes(kind, run)
            self.slots.append(plane.subslot((run.number,), start, num_bytes, RUN))
