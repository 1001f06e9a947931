"""Adds what every node holds, over the network: torch.distributed moves bytes, and each node adds a share of them.

Ranks with the same place in their nodes are linked, so that all network cards of a node are used at once. A piece is
cut into a share for each node. Every node gets all copies of its share, adds them in the order of nodes, and sends the
sum to the others. So each node sends, and receives, twice what it holds less a share of it, and a sum depends on the
values and the number of nodes alone. What is sent may be rounded to a narrower dtype, copies and sums alike. Sums may
also stay with the node that has added them; what it makes of them is then given to the others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.parallel.control import Control

ROW_ELEMENTS = 4096
"""Squares are added row by row, each row by one thread: their sum depends on no number of threads."""
ROWS_AT_ONCE = 64
"""Rows that are widened at once, into 2 MiB at most."""


class NodeLink:
    """The ranks with this one's place in their nodes. All of them make the same calls in the same order."""

    def __init__(self, control: Control) -> None:
        """Join the others; all ranks make this call together."""
        self.node, self.nodes = control.ranks.node, control.ranks.nodes
        self._control = control
        self._group = control.link(f"nodes{control.ranks.local_rank}", self.node, self.nodes)
        self._spare: list[Tensor] = []  # buffers of pieces that are through, kept because freed ones leave holes

    def add(
        self, pieces: Iterable[Tensor], givers: Sequence[int], wide: torch.dtype, sent: torch.dtype,
        kept: Sequence[bool] | None = None,
    ) -> list[float]:  # fmt: skip
        """Replace pieces, flat in this node's memory, by the sums of all nodes' pieces; gives the squares of shares.

        givers: the nodes that hold something; what the others hold is not read. wide: dtype that is added in, in the
        order of nodes; each sum is rounded once, to `sent`, in which pieces cross the network. The squares are those of
        the elements that this node has added, by piece. While a piece is added, the next one, which is asked for
        before, is on its way. kept: by piece, whether sums stay with the nodes that have added them; the others then
        keep what they hold of these elements. Raises: RankError when a node cannot be reached.
        """
        squares, arriving, leaving = list[float](), None, None
        for piece in chain(pieces, (None,)):
            begun = None if piece is None else self._send_shares(piece, sent)
            if arriving is not None:
                self._control.wait(arriving.work)
                squares.append(arriving.add_own(givers, wide))
                self._end(leaving)
                stays = kept is not None and kept[len(squares) - 1]
                leaving = None if stays else self._send_sum(arriving)
                self._spare += [arriving.buffer] if stays else []
            arriving = begun
        self._end(leaving)
        return squares

    def give(self, pieces: Iterable[tuple[Tensor, Sequence[int]]]) -> None:
        """Give every node what the others have of pieces, flat in this node's memory, in place.

        With each piece come the elements with which the nodes' shares of it begin, and the end. While one is on its
        way the next one is asked for. Raises: RankError when a node cannot be reached.
        """
        leaving = None
        for row in chain(pieces, (None,)):
            begun = None if row is None else self._send_own(*row)
            self._end(leaving)
            leaving = begun
        self._end(leaving)

    def collect(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Give flat bytes to the first node; there, what all nodes give, else nothing. sizes: bytes of each node's."""
        first = self.node == 0
        found = torch.empty(sum(sizes) if first else 0, dtype=torch.uint8)
        received = list(sizes) if first else [0] * self.nodes
        work = self._move(found, own, received, [own.numel(), *[0] * (self.nodes - 1)])
        self._control.wait(work)
        return list(found.split(received)) if first else []

    def _end(self, leaving: _Exchange | None) -> None:
        """Wait until the sums of a piece are with all nodes."""
        if leaving is not None:
            self._control.wait(leaving.work)
            if leaving.sent is not leaving.piece:
                leaving.piece.copy_(leaving.sent)
            self._spare.append(leaving.buffer)

    def _send_shares(self, piece: Tensor, dtype: torch.dtype) -> _Exchange:
        """Start to give every node its share of a piece."""
        bounds = [piece.numel() * node // self.nodes for node in range(self.nodes + 1)]
        own = piece[bounds[self.node] : bounds[self.node + 1]]
        width, count = dtype.itemsize, self.nodes * own.numel()
        needed = width * (count + (piece.numel() if dtype != piece.dtype else 0))
        buffer = self._spare.pop() if self._spare else torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < needed:
            buffer = torch.empty(needed, dtype=torch.uint8)
        copies = buffer[: count * width].view(dtype).view(self.nodes, own.numel())
        sent = piece if dtype == piece.dtype else buffer[count * width : needed].view(dtype).copy_(piece)
        sizes = [(end - start) * width for start, end in pairwise(bounds)]
        work = self._move(copies.flatten(), sent, [own.numel() * width] * self.nodes, sizes)
        return _Exchange(piece, own, sent, buffer, copies, sizes, work)

    def _send_sum(self, exchange: _Exchange) -> _Exchange:
        """Start to give every node the sum of this node's share, and to take the other sums into the piece."""
        own, copies = exchange.own, exchange.copies
        copies.copy_(own.expand_as(copies))  # what is sent, while the piece is written
        sizes = [copies[0].numel() * copies.element_size()] * self.nodes
        return exchange._replace(work=self._move(exchange.sent, copies.flatten(), exchange.sizes, sizes))

    def _send_own(self, piece: Tensor, cuts: Sequence[int]) -> _Exchange:
        """Start to give every node this node's share of a piece, and to take the others' into it."""
        own, width = piece[cuts[self.node] : cuts[self.node + 1]], piece.element_size()
        needed = self.nodes * own.numel() * width
        buffer = self._spare.pop() if self._spare else torch.empty(0, dtype=torch.uint8)
        if buffer.numel() < needed:
            buffer = torch.empty(needed, dtype=torch.uint8)
        copies = buffer[:needed].view(piece.dtype).view(self.nodes, own.numel())
        copies.copy_(own.expand_as(copies))  # what is sent, while the piece is written
        sizes = [(end - start) * width for start, end in pairwise(cuts)]
        work = self._move(piece, copies.flatten(), sizes, [own.numel() * width] * self.nodes)
        return _Exchange(piece, own, piece, buffer, copies, sizes, work)

    def _move(self, target: Tensor, source: Tensor, received: list[int], sent: list[int]) -> Any:
        return self._group.alltoall_base(target.view(torch.uint8), source.view(torch.uint8), received, sent)


class _Exchange(NamedTuple):
    """A piece on its way. own: this node's share of it; copies [nodes, share]: what all nodes hold of that.

    sent: the piece in the dtype that crosses, itself where that is its own. buffer: what this and the copies lie in.
    sizes: bytes of every node's share as they cross.
    """

    piece: Tensor
    own: Tensor
    sent: Tensor
    buffer: Tensor
    copies: Tensor
    sizes: list[int]
    work: Any

    def add_own(self, givers: Sequence[int], wide: torch.dtype) -> float:
        """Add the copies of this node's share in the order of nodes; gives the sum of the squares of what it stores."""
        rows = ROWS_AT_ONCE * ROW_ELEMENTS
        for own, copies in zip(self.own.split(rows), self.copies.split(rows, dim=1), strict=True):
            total = copies[givers[0]].to(wide)
            for node in givers[1:]:
                total += copies[node]
            own.copy_(total.to(copies.dtype))
        return sum_of_squares(self.own)


def sum_of_squares(values: Tensor) -> float:
    """The sum of squares of flat `values` in float64, by rows of ROW_ELEMENTS."""
    rows = values.numel() // ROW_ELEMENTS
    whole, rest = values[: rows * ROW_ELEMENTS].view(rows, ROW_ELEMENTS), values[rows * ROW_ELEMENTS :]
    total = 0.0
    for part in (*whole.split(ROWS_AT_ONCE), rest[None]):
        for row in part.double().square_().sum(dim=1).tolist():
            total += row
    return total
