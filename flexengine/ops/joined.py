"""Ops that stand for several and may leave less than these do by themselves."""

from __future__ import annotations

from flexengine.ops.base import Op


class Joined(Op):
    """Does what several ops do one after the other."""

    def leaving_out(self, unread: frozenset[str]) -> Op:
        """The same op where nothing reads these tensors, which forward then need not write."""
        return self

    def with_previous(self, previous: Op) -> Op | None:
        """What takes over also the op before, or None."""
        return None
