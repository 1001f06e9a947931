"""Formats lists, shares and tables as plain text; `metrics.py` formats single figures with their units."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from flexengine.plan import Request

Value = TypeVar("Value", bound=Hashable)


def percent(share: float) -> str:
    """Format a share as a whole percentage: 0.914 is "91%"."""
    return f"{100 * share:.0f}%"


def join_words(parts: Iterable[str]) -> str:
    """Join words as a sentence does: "a", "a and b", "a, b and c"; no words give "nothing"."""
    *first, last = list(parts) or ["nothing"]
    return f"{', '.join(first)} and {last}" if first else last


def number_ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers as ranges: "0-2, 5, 7-9"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, ends)) for ends in ranges)


def positions_by_value(values: Iterable[Value]) -> dict[Value, list[int]]:
    """Map every distinct value to the positions that hold it, in order of first appearance."""
    found: dict[Value, list[int]] = {}
    for position, value in enumerate(values):
        found.setdefault(value, []).append(position)
    return found


def largest_first(bytes_by_category: dict[str, int]) -> list[tuple[str, int]]:
    """Sort (category, bytes) pairs, the most bytes first."""
    return sorted(bytes_by_category.items(), key=lambda item: -item[1])


def align_columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Pad cells to lines with aligned columns: those in `left` align left, the others right."""
    # zip of no rows gives no columns, so an empty table gives no lines.
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def indented_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align columns below a heading, two spaces to the right of it."""
    return ["  " + line for line in align_columns(rows)]


def of_each(request: Request) -> tuple[str, str]:
    """Whose GPU memory and whose host memory is told of: of each GPU and of each node, where there are several GPUs."""
    return (" of each GPU", " of each node") if request.shares_node else ("", "")
