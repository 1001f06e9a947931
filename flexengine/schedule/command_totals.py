"""Adds up seconds of commands by class, so that a measured and a simulated program can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from flexengine.models.spec import ModelSpec
from flexengine.schedule.commands import Command, Program, RowCopy

CommandClass = tuple[str, str, str]
"""(stream, kind of command, kind of layer or nothing)."""


class CommandTotal(NamedTuple):
    """Commands of one class: how many, their seconds from start to end, and the bytes that they copied.

    Of fetches of touched experts, num_bytes has what was expected.
    """

    count: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


def command_class(command: Command, model: ModelSpec) -> CommandClass:
    """The class of a command; layers of one kind share it."""
    layer = getattr(command.args, "layer", None)
    return command.stream.value, command.kind, "" if layer is None else model.layers[layer].kind


def moved_bytes(command: Command, rows: Sequence[int]) -> int:
    """Bytes that a command copies in a run whose chunks have so many rows; none given: full ones."""
    if not rows or not isinstance(command.args, RowCopy):
        return command.copy_bytes
    return sum(region.num_bytes for region in command.args.regions(rows[command.args.chunk]))


def add_totals(
    totals: dict[CommandClass, CommandTotal],
    program: Program,
    spans_s: Iterable[tuple[float, float]],
    model: ModelSpec,
    rows: Sequence[int] = (),
) -> None:
    """Add (start, end) seconds of a program's commands, in command order, to `totals`. rows: as of `moved_bytes`."""
    for command, (start_s, end_s) in zip(program.commands, spans_s, strict=True):
        key = command_class(command, model)
        before = totals.get(key, CommandTotal())
        num_bytes = before.num_bytes + moved_bytes(command, rows)
        totals[key] = CommandTotal(before.count + 1, before.seconds + end_s - start_s, num_bytes)
