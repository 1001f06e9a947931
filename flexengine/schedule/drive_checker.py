"""Proves that copies to and from a drive move whole blocks, all that they declare, and all that updates leave there."""

from __future__ import annotations

from flexengine.schedule.commands import DRIVE_WRITES, Command, Program, Stream, UpdateTile
from flexengine.schedule.drive import BLOCK_BYTES
from flexengine.schedule.program_error import ProgramError

LEFT_FOR_DRIVE = ((Stream.CPU, "staged"), (Stream.D2H, "staged_grads"), (Stream.D2H, "staged_kept"))
"""Who leaves what in slots of the host that goes to a drive."""


def check_drive_copy(program: Program, command: Command) -> None:
    """Check that a copy on a stream of the drive moves whole blocks the way it says, and all that it declares."""
    _check_blocks(program, command)
    _check_all_moved(program, command)


def _check_blocks(program: Program, command: Command) -> None:
    """Check that a copy goes between a drive and the host as its stream says, in whole blocks, each slot on the drive
    at once."""
    ends = ("host", "drive") if command.stream in DRIVE_WRITES else ("drive", "host")
    for c in command.regions:
        source, target = program.slots[c.source], program.slots[c.target]
        if (source.memory, target.memory) != ends:
            raise ProgramError(f"{command.label} copies from {source.name} to {target.name} on stream {command.stream}")
        if any(n % BLOCK_BYTES for n in (source.offset + c.source_offset, target.offset + c.target_offset)):
            raise ProgramError(f"{command.label}: {source.name} or {target.name} begins inside a block of the drive")
        on_drive = source if source.memory == "drive" else target
        if c.num_bytes % BLOCK_BYTES or c.num_bytes != on_drive.num_bytes:
            raise ProgramError(f"{command.label} copies {c.num_bytes} of {on_drive.num_bytes} bytes of {on_drive.name}")


def _check_all_moved(program: Program, command: Command) -> None:
    """Check that a copy moves all that it declares of a drive, and of places within slots of the host."""
    moved = [(program.slots[c.source], c.source_offset, c.num_bytes) for c in command.copies]
    moved += [(program.slots[c.target], c.target_offset, c.num_bytes) for c in command.copies]
    for slot in (program.slots[access.slot] for access in (*command.reads, *command.writes)):
        if slot.memory == "drive" or (slot.memory == "host" and slot.key.within):
            reached = slot.offset
            for end, offset, num_bytes in sorted(moved, key=lambda each: each[0].offset + each[1]):
                if end.memory == slot.memory and end.offset + offset <= reached:
                    reached = max(reached, end.offset + offset + num_bytes)
            if reached < slot.end:
                raise ProgramError(
                    f"{command.label} declares {slot.name} and leaves its byte {reached - slot.offset} out"
                )


def check_written_back(program: Program) -> None:
    """Check that what is to go to a drive is written there before its slot holds other things: every plane of a tile
    but its gradient once the CPU has updated it, and gradients and activations that the GPU has left."""
    left, brought = dict[int, Command](), dict[int, Command]()
    for command in program.commands:
        if command.stream in DRIVE_WRITES:
            for slot, _ in command.reads:
                if slot in left:
                    _check_planes(program, left.pop(slot), command, slot)
        for slot, _ in command.writes:
            if slot in left:
                raise ProgramError(f"{command.label} overwrites what {left[slot].label} has left for the drive")
            role, *_, within = program.slots[slot].key
            if command.stream is Stream.DRIVE_IN:
                brought[slot] = command
            if not within and (command.stream, role) in LEFT_FOR_DRIVE:
                left[slot] = command
                if slot in brought:
                    _check_planes(program, command, brought.pop(slot), slot)
    for slot, command in left.items():
        raise ProgramError(f"{command.label} leaves {program.slots[slot].name}, and nothing writes it to the drive")


def _check_planes(program: Program, update: Command, copy: Command, slot: int) -> None:
    """Check that a copy brings an update every plane where it finds it in a slot, or takes every one that it wrote."""
    if not isinstance(update.args, UpdateTile):
        return
    reads = copy.stream is Stream.DRIVE_IN
    of_slot = ((kind, place) for kind, place in update.args.planes.items() if place.slot == slot)
    planes = {(kind, place.offset) for kind, place in of_slot if reads or kind != "grad"}
    ends = ((c.source, c.target_offset) if reads else (c.target, c.source_offset) for c in copy.copies)
    moved = {(program.slots[on_drive].key.role, offset) for on_drive, offset in ends}
    if moved != planes or copy.args.group != update.args.group:
        raise ProgramError(f"{copy.label} moves {sorted(moved)}, and {update.label} has {sorted(planes)}")
