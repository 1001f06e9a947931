"""Carries out a program's copies between a drive and the host's memory, on whichever thread calls."""

from __future__ import annotations

from flexengine.native.drive import DrivePiece
from flexengine.runtime.arena import Arenas
from flexengine.runtime.execution.bound_program import Call
from flexengine.schedule.commands import DRIVE_READS, DRIVE_STREAMS, Command, Program


def with_drive(program: Program, arenas: Arenas, handler: Call) -> Call:
    """The handler of a program's commands of the host, with copies from and to a drive beside it."""

    def call(command: Command) -> None:
        if command.stream in DRIVE_STREAMS:
            move_blocks(command, program, arenas)
        else:
            handler(command)

    return call


def move_blocks(command: Command, program: Program, arenas: Arenas) -> None:
    """Read or write what a command copies. Blocks until it is done; raises DriveError where the drive fails."""
    drive, reads = arenas.drive, command.stream in DRIVE_READS
    assert drive is not None, f"{command.label} without a drive"
    pieces = []
    for region in command.copies:
        on_drive, start = (region.source, region.source_offset) if reads else (region.target, region.target_offset)
        staged, offset = (region.target, region.target_offset) if reads else (region.source, region.source_offset)
        place, home = program.slots[staged], program.slots[on_drive]
        memory = arenas.bytes_view(place.memory, place.offset + offset, region.num_bytes)
        pieces.append(DrivePiece(home.offset + start, memory))
    if reads and arenas.linked is not None:
        pieces = arenas.linked.read(pieces)
    if pieces:
        (drive.read if reads else drive.write)(pieces)
