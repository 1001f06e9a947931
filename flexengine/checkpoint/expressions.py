"""Matches regular expressions of downloaded files, a few characters of which may ask for hours."""

from __future__ import annotations

import re
from collections.abc import Collection

from flexengine.checkpoint.bounded_process import BoundedProcess
from flexengine.wording import shown

_PLAIN = re.compile(r"[\w.]*")  # takes no longer than the names are


def full_matches(expression: str, names: Collection[str], what: str) -> frozenset[str]:
    """Return the names that a regular expression matches as a whole.

    what: what it is, for messages. Raises: ValueError where it is no expression, or takes too long.
    """
    asked = sorted(names)

    def matched() -> list[str]:
        try:
            pattern = re.compile(expression)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"{what} {shown(expression)} is no regular expression: {error}") from None
        return [name for name in asked if pattern.fullmatch(name)]

    if _PLAIN.fullmatch(expression):
        return frozenset(matched())
    with BoundedProcess(f"{what} {shown(expression)}", lambda: {"matched": matched}) as process:
        return frozenset(process.call("matched"))
