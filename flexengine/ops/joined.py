"""Ops that stand for several whose weight halves, or whose readers, may find less than the ops by themselves leave."""

from __future__ import annotations

from flexengine.ops.base import Op


class Joined(Op):
    """Does what several ops do one after the other; their weight halves run after its input half."""

    def leaving_out(self, unread: frozenset[str]) -> Op:
        """The same op where nothing reads these tensors, which forward then need not write."""
        return self

    def weight_half_of(self, member: Op) -> Op:
        """One of the ops, as its weight half finds what the input half of all has left."""
        return member

    def with_previous(self, previous: Op) -> Op | None:
        """What takes over also the op before, or None."""
        return None
