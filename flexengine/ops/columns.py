"""Columns of a fused projection that belong together, as views of its rows.

Ops that read disjoint columns of one tensor write the same columns of its gradient, each once and whatever is there:
together they cover it, so that nothing is cleared before and nothing added up.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Columns(NamedTuple):
    """`width` columns from `start` on in each of `groups` groups, which begin `step` columns apart."""

    start: int
    groups: int
    step: int
    width: int

    @property
    def total(self) -> int:
        """Number of columns of all groups."""
        return self.groups * self.width

    def of(self, rows: Tensor) -> Tensor:
        """View rows [T, all] as these columns [T, groups, width]."""
        offset = rows.storage_offset() + self.start
        return rows.as_strided((len(rows), self.groups, self.width), (rows.stride(0), self.step, 1), offset)

    def heads(self, rows: Tensor, head_dim: int) -> Tensor:
        """View rows [T, all] as heads [T, groups, heads of a group, head_dim]."""
        return self.of(rows).unflatten(2, (-1, head_dim))


def whole(start: int, width: int) -> Columns:
    """Columns side by side."""
    return Columns(start, 1, width, width)
