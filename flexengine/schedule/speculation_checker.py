"""Proves that a program leaves both ways out of a speculation open.

- places: a command that updates speculatively reads the first planes of its group and writes the same bytes of the
  second ones;
- the old values stay: no command of the program writes a first plane of such a group, so that an update with another
  factor finds what it would have found without speculation;
- the new values stay: no other command touches a second plane, so that they are right wherever the old ones were.
Together with order and contents: when planes change places, the first ones hold what an update with the assumed factor
leaves, and when they do not, nothing has happened.
"""

from __future__ import annotations

from flexengine.schedule.commands import Command, Program, UpdateTile
from flexengine.schedule.second_planes import second_key


class SpeculationError(AssertionError):
    """A program would lose the old or the new values of what it updates speculatively."""


def check_speculation(program: Program, overlaps: list[tuple[int, ...]]) -> None:
    """Raise SpeculationError unless what is updated speculatively may be kept or thrown away."""
    groups_of_first: dict[int, int] = {}  # slots of first and of second planes, with their groups
    groups_of_second: dict[int, int] = {}
    for command in program.commands:
        if isinstance(command.args, UpdateTile) and command.args.targets is not None:
            _check_places(program, command, command.args)
            for kind, target in command.args.targets.items():
                groups_of_first[command.args.planes[kind].slot] = command.args.group
                groups_of_second[target.slot] = command.args.group
    if not groups_of_second:
        return
    for command in program.commands:
        speculated = command.args.group if getattr(command.args, "targets", None) is not None else None
        written = {slot for access in command.writes for slot in overlaps[access.slot]}
        touched = written | {slot for access in command.reads for slot in overlaps[access.slot]}
        lost = [slot for slot in written if slot in groups_of_first]
        lost += [slot for slot in touched if groups_of_second.get(slot, speculated) != speculated]
        if lost:
            raise SpeculationError(
                f"{command.label} touches slot {program.slots[lost[0]].name} before it is known which planes count"
            )


def _check_places(program: Program, command: Command, args: UpdateTile) -> None:
    """Check that targets are all planes but the gradient, at the same place of the second planes."""
    targets = args.targets or {}
    if targets.keys() != args.planes.keys() - {"grad"}:
        raise SpeculationError(f"{command.label} does not write every plane that an update writes")
    for kind, target in targets.items():
        place, second = args.planes[kind], program.slots[target.slot]
        first = program.slots[place.slot]
        same = (second.key, target.offset, second.num_bytes) == (second_key(first.key), place.offset, first.num_bytes)
        if not same:
            raise SpeculationError(f"{command.label} writes {kind} elsewhere than at its place of the second plane")
