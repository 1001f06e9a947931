"""What the parts of a round's lowering share: the layout, the round's shape, the program in the making."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flexengine.schedule.commands import Signal
from flexengine.schedule.layer_program import Stage
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.shape import ChunkShape, RoundShape
from flexengine.schedule.program_builder import ProgramBuilder


class RoundContext:
    """A round's layout, shape and program builder. routed: what each chunk's slot of bounds holds by now."""

    def __init__(self, layout: Layout, shape: RoundShape, builder: ProgramBuilder) -> None:
        self.layout, self.shape, self.builder = layout, shape, builder
        self.plan, self.model = layout.plan, layout.model
        self.chunks = range(len(shape.chunks))
        self.routed: dict[int, str] = {}

    def slices_here(self, chunk: ChunkShape) -> range:
        """The slices of a sequence that this rank runs, of which `chunk` is one."""
        return range(chunk.first_slice, chunk.last_slice + 1)

    def number_kept(self, c: int) -> int:
        """The number of a chunk among those whose activations this rank keeps."""
        return c

    def updated_before(self, group: int) -> tuple[Signal, ...]:
        """What a fetch of a group's weights awaits of other ranks."""
        return ()

    def part_name(self, group: int, part: int) -> str:
        """A parameter group, or one of its parts where it has several."""
        name = self.model.groups[group].name
        return f"{name}/{part}" if len(self.layout.groups[group].parts) > 1 else name

    def is_in_parts(self, group: int) -> bool:
        """Whether a group crosses the link in several parts."""
        return len(self.layout.groups[group].parts) > 1


@dataclass
class SlotRing:
    """Equal slots that are used one after the other, again and again."""

    slots: list[int]
    next: int = 0

    def take(self) -> int:
        """The next slot. Whoever writes it waits for those who still read it."""
        slot = self.slots[self.next % len(self.slots)]
        self.next += 1
        return slot


class StagePart(NamedTuple):
    """A stage of a layer with one part of the layer's weights.

    number: of the stage. opens, closes: it is the layer's first or last. All chunks of a round pass through it before
    the next one begins.
    """

    stage: Stage
    number: int
    part: int
    opens: bool
    closes: bool

    @property
    def in_parts(self) -> bool:
        """Whether the stage runs once for each of several parts: part 0 is what is not cut."""
        return self.part > 0


def stage_parts(stages: tuple[Stage, ...]) -> list[StagePart]:
    """Every stage with each of its parts, in order."""
    pairs = [(stage, number, part) for number, stage in enumerate(stages) for part in stage.parts]
    return [StagePart(*pair, opens=i == 0, closes=i == len(pairs) - 1) for i, pair in enumerate(pairs)]
