"""Rows of the relaxation for a drive: what lies there spares the host, and crosses the drive as often as it is used."""

from __future__ import annotations

from flexengine.planner.bound.linear_program import LinearProgram
from flexengine.planner.bound.unavoidable import SizeWork, Unavoidable

Moved = dict[str, float]


class DriveRows:
    """Adds variables and rows to a relaxation of some rounds; none without a drive.

    Weights are read for every use that the GPU does not hold them for, gradients written and read between rounds, and
    what an update changes is read and written once. units: bytes and seconds of one. earlier: terms and seconds, in
    units, of the backward passes that no update may begin in.
    """

    def __init__(
        self,
        lp: LinearProgram,
        step: Unavoidable,
        size: SizeWork,
        units: tuple[float, float],
        earlier: tuple[Moved, float],
    ) -> None:
        (unit_bytes, unit_s), self._earlier = units, earlier
        self._lp, self._step, self._rounds = lp, step, size.rounds
        self._scale = unit_s / unit_bytes
        self._members = step.parameters if step.request.max_drive_bytes else ()
        self.kept = {"drive kept": 1.0} if self._members else {}  # over all rounds, of what is not on the GPU
        for p in self._members:
            for kind, num_bytes in (("w", p.weights), ("g", p.grads), ("s", p.states)):
                name, total = f"drive {kind} {p.name}", num_bytes / unit_bytes
                lp.at_most(f"{name} there", {lp.variable(name): 1.0, f"{kind} {p.name}": 1.0}, total)
        if self._members:
            lp.at_most("kept on drive", {lp.variable("drive kept"): 1.0, "on host": -1.0}, 0.0)
            there = self.there("wgs") | dict.fromkeys(self.kept, size.round_share)
            lp.at_most("size of the drive", there, step.request.max_drive_bytes / unit_bytes)
            self._move()

    def there(self, kinds: str, factor: float = 1.0) -> Moved:
        """Terms of the bytes on the drive; kinds: letters of w, g, s."""
        return {f"drive {kind} {p.name}": factor for kind in kinds for p in self._members}

    def _move(self) -> None:
        r, trained = self._rounds, [p for p in self._members if p.trained]
        once = 1.0 / self._step.request.ranks  # of weights a rank updates its share, as states are counted
        updated = {f"drive {kind} {p.name}": once if kind == "w" else 1.0 for kind in "ws" for p in trained}
        reads = {f"drive w {p.name}": float(r * (1 + p.twice)) + once * p.trained for p in self._members}
        reads |= {"hold turn": -float(r), "hold between": 1.0 - r, "hold end": -1.0, **self._states(1.0)}
        reads |= {f"drive g {p.name}": r - 1.0 for p in trained}
        writes = {**updated, **{f"drive g {p.name}": r - 1.0 for p in trained}}
        reads, writes = reads | self.kept, writes | self.kept
        self._seconds("all", "T", reads, writes)
        # beside what an update moves, the next forward's weights, and the last backward's
        beside = {f"drive w {p.name}": 1.0 + once * p.trained for p in self._members} | {"hold end": -1.0}
        if self._step.request.waits_for_norm:
            self._seconds("update", "V", {**updated, **beside}, updated)
            return
        beside |= {f"drive w {p.name}": 1.0 + once * p.trained + p.twice for p in self._members} | {"hold turn": -1.0}
        beside |= self.kept if r == 1 else {}
        if r > 1:
            beside |= {f"drive g {p.name}": 1.0 for p in trained}
        self._seconds("update", "VB", {**updated, **beside}, updated, self._earlier)

    def _states(self, factor: float) -> Moved:
        return {f"drive s {p.name}": factor for p in self._members}

    def _seconds(
        self, name: str, parts: str, reads: Moved, writes: Moved, less: tuple[Moved, float] = ({}, 0.0)
    ) -> None:
        """What is read and written takes no longer than some parts of the step: each alone, or both at once."""
        drive = self._step.profile.drive.known
        spent = {f"drive {name} {way}": 1.0 for way in ("in", "out", "both")}
        for each in spent:
            self._lp.variable(each)
        self._lp.at_most(f"{name} drive", {**spent, **less[0], **dict.fromkeys(parts, -1.0)}, -less[1])
        for way, moved, alone, beside in (
            ("in", reads, drive.read_bytes_per_s, drive.read_beside_bytes_per_s),
            ("out", writes, drive.write_bytes_per_s, drive.write_beside_bytes_per_s),
        ):
            row = {key: value / (alone * self._scale) for key, value in moved.items()}
            most = {f"drive {name} {way}": -1.0, f"drive {name} both": -min(1.0, beside / alone)}
            self._lp.at_most(f"{name} {way} drive", {**row, **most}, 0.0)
