"""Proves that a program leaves both ways out of a speculation open.

- places: a command that updates speculatively reads the first planes of its group and writes the same bytes of the
  second ones; of tiles of a drive the copies before and after it do;
- the old values stay: no command of the program writes a first plane of such a group, so that an update with another
  factor finds what it would have found without speculation;
- the new values stay: no other command touches a second plane, so that they are right wherever the old ones were.
Together with order and contents: when planes change places, the first ones hold what an update with the assumed factor
leaves, and when they do not, nothing has happened.
"""

from __future__ import annotations

from flexengine.schedule.commands import Command, Program, Stream, UpdateTile
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
    on_drive = _groups_on_drive(program)
    for command in (command for command in program.commands if _writes_second(command, on_drive)):
        for first, second in _planes_of_copy(program, command):
            groups_of_first[first], groups_of_second[second] = command.args.group, command.args.group
    if not groups_of_second:
        return
    for command in program.commands:
        bold = getattr(command.args, "targets", None) is not None or _writes_second(command, on_drive)
        speculated = command.args.group if bold else None
        written = {slot for access in command.writes for slot in overlaps[access.slot]}
        touched = written | {slot for access in command.reads for slot in overlaps[access.slot]}
        lost = [slot for slot in written if slot in groups_of_first]
        lost += [slot for slot in touched if groups_of_second.get(slot, speculated) != speculated]
        if lost:
            raise SpeculationError(
                f"{command.label} touches slot {program.slots[lost[0]].name} before it is known which planes count"
            )


def _groups_on_drive(program: Program) -> set[int]:
    """Groups that are updated speculatively tile by tile, as a drive holds them."""
    updates = (command.args for command in program.commands if isinstance(command.args, UpdateTile))
    return {update.group for update in updates if update.targets == {}}


def _writes_second(command: Command, on_drive: set[int]) -> bool:
    return command.stream is Stream.DRIVE_OUT and command.args.group in on_drive


def _planes_of_copy(program: Program, command: Command) -> list[tuple[int, int]]:
    """The places of first planes that were read into a slot of the host, each with the one of the second plane that a
    copy from there writes; an error unless the keys agree."""
    [staging] = {region.source for region in command.copies}
    reads = (c for c in program.commands[: command.index] if c.stream is Stream.DRIVE_IN)
    last = max((c for c in reads if c.copies[0].target == staging), key=lambda c: c.index)
    first = {(region.target_offset, region.num_bytes): region.source for region in last.copies}
    found = list[tuple[int, int]]()
    for region in command.copies:
        source = first.get((region.source_offset, region.num_bytes), -1)
        if source < 0 or program.slots[region.target].key != second_key(program.slots[source].key):
            where = program.slots[region.target].name
            raise SpeculationError(f"{command.label} writes {where}, which is not the second plane of what was read")
        found.append((source, region.target))
    return found


def _check_places(program: Program, command: Command, args: UpdateTile) -> None:
    """Check that targets are all planes but the gradient, at the same place of the second planes."""
    targets = args.targets or {}
    if not targets:  # a drive takes them from where they are
        return
    if targets.keys() != args.planes.keys() - {"grad"}:
        raise SpeculationError(f"{command.label} does not write every plane that an update writes")
    for kind, target in targets.items():
        place, second = args.planes[kind], program.slots[target.slot]
        first = program.slots[place.slot]
        same = (second.key, target.offset, second.num_bytes) == (second_key(first.key), place.offset, first.num_bytes)
        if not same:
            raise SpeculationError(f"{command.label} writes {kind} elsewhere than at its place of the second plane")
