"""Parts of a split, as the hub's library writes them: train[:100], train[10%:20%], train[-50:]."""

from __future__ import annotations

import re
from typing import NamedTuple

SLICE = re.compile(r"\[([^\]\[]*)\]$")
"""Behind a place or its split."""
_PART = re.compile(r"(?P<start>-?\d+)?(?P<start_pct>%)?:(?P<end>-?\d+)?(?P<end_pct>%)?")


class Part(NamedTuple):
    """Records from `start` to `end`, each None for the first or last; negative ones count from the end.

    start_pct, end_pct: whether they are percentages of all records.
    """

    start: int | None
    end: int | None
    start_pct: bool = False
    end_pct: bool = False

    @property
    def needs_count(self) -> bool:
        """Whether the number of all records has to be known."""
        return self.start_pct or self.end_pct or (self.start or 0) < 0 or (self.end or 0) < 0

    def bounds(self, count: int | None) -> tuple[int, int | None]:
        """The first record and the one after the last, of `count` records; None where there is no limit."""
        start = _place(self.start, self.start_pct, count)
        return start or 0, _place(self.end, self.end_pct, count)


def read_part(text: str) -> Part:
    """Read what stands between the brackets. Raises: ValueError for what is no part."""
    match = _PART.fullmatch(text.replace(" ", "").replace("_", ""))
    if match is None or any(match[f"{name}_pct"] and not match[name] for name in ("start", "end")):
        raise ValueError("a part is written as [:100], [100:200], [10%:20%] or [-50:]")
    start, end = (int(match[name]) if match[name] else None for name in ("start", "end"))
    part = Part(start, end, bool(match["start_pct"]), bool(match["end_pct"]))
    if None not in (start, end) and part.start_pct != part.end_pct:
        raise ValueError(f"[{text}] mixes records and percentages; give both limits in one unit")
    wrong = next((v for v, pct in zip(part[:2], part[2:], strict=True) if pct and not -100 <= (v or 0) <= 100), None)
    if wrong is not None:
        raise ValueError(f"{wrong}% is no part of a split; give -100% to 100%")
    return part


def _place(value: int | None, is_percent: bool, count: int | None) -> int | None:
    """A limit as a position. Percentages are rounded to the nearest record, as `datasets` does by default."""
    if value is None:
        return None
    if is_percent:
        value = round(value * (count or 0) / 100)
    return max(0, value + (count or 0)) if value < 0 else value
