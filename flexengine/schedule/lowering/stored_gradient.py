"""Pieces of a group's stored gradient, with their homes: what a round's lowering fetches, adds to and sends back."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.schedule.commands import CopyRegion, StoredRun
from flexengine.schedule.lowering.context import RoundContext
from flexengine.schedule.pieces import Piece


class StoredPiece(NamedTuple):
    """A piece of a group's stored gradient, and for each of its runs the slot and first element of its home.

    number: of the piece in its part. homes: none of a gradient that is not stored, or lies on a drive.
    """

    group: int
    part: int
    number: int
    piece: Piece
    name: str
    homes: list[tuple[int, int]]
    element_bytes: int

    @property
    def content(self) -> str:
        """What its slots hold."""
        return f"grad of {self.name}"

    def regions_home(self, staging: int) -> list[CopyRegion]:
        """Copies from a staging slot to the runs' homes."""
        width = self.element_bytes
        return [
            CopyRegion(staging, (run.start - self.piece.start) * width, home, first * width, run.numel * width)
            for run, (home, first) in zip(self.piece.runs, self.homes, strict=True)
        ]

    def stored_runs(self, begins_at: int, staging: int | None, first_run: int) -> tuple[StoredRun, ...]:
        """Where the accumulator's runs go: to a staging slot, or to their homes where there is none.

        begins_at: the element of the part that the accumulator's slot begins with.
        """
        runs = self.piece.runs
        places = self.homes if staging is None else [(staging, run.start - self.piece.start) for run in runs]
        return tuple(
            StoredRun(run.start - begins_at, *place, run.numel, first_run + run.run.number, run.before, run.run.numel)
            for run, place in zip(runs, places, strict=True)
        )


def stored_pieces(context: RoundContext, group: int, part: int) -> list[StoredPiece]:
    """The pieces of a part of a group's gradient, in order."""
    layout = context.layout
    pieces, name = layout.pieces[group][part], context.part_name(group, part)
    width, at_home = layout.groups[group].element_bytes("grad"), layout.homes[group].grads not in ("none", "drive")
    names = [name] if len(pieces) == 1 else [f"{name} piece {number}" for number in range(len(pieces))]
    return [
        StoredPiece(group, part, i, piece, own, layout.piece_places(group, piece) if at_home else [], width)
        for i, (piece, own) in enumerate(zip(pieces, names, strict=True))
    ]
