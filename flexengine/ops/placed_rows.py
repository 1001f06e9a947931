"""Rows of the hidden state that are given, as a chunk finds them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PlacedRows(NamedTuple):
    """Rows of a chunk that a tower made. at [n], others [T - n] int64: which rows these are, and which are not.

    values: the rows, in pieces [n_i, D] on the host, page-locked where there is a GPU.
    """

    at: Tensor
    others: Tensor
    values: list[Tensor]
