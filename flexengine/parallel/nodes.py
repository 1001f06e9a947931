"""Adds what every node holds, over the network: torch.distributed moves bytes, and each node adds a share of them.

Ranks with the same place in their nodes are linked, so that all network cards of a node are used at once. A piece is
cut into a share for each node. Every node gets all copies of its share, adds them in the order of nodes, and sends the
sum to the others. So each node sends, and receives, twice what it holds less a share of it, and a sum depends on the
values and the number of nodes alone. What crosses, copies and sums alike, is as a `Sent` writes and reads it. Sums may
also stay with the node that has added them; what it makes of them is then given to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flexengine.parallel.control import Control

ROW_ELEMENTS = 4096
"""Squares are added row by row, each row by one thread: their sum depends on no number of threads."""
ROWS_AT_ONCE = 64
"""Rows that are widened at once, into 2 MiB at most."""
STRIP = ROWS_AT_ONCE * ROW_ELEMENTS
"""Elements that are written, or read, at once."""


class Sent(Protocol):
    """What crosses the network of elements, strip by strip: bytes of STRIP elements, as often as it takes.

    in_place: those of a piece as it is stored, so that its copies need not be written. keeps_errors: what rounding
    loses is kept, and a node adds its own copy as it is, so that each node keeps one error for each element: of the
    copy that it sends to the node that adds, or of the sum where it adds itself. All nodes then give something.
    """

    @property
    def in_place(self) -> bool: ...
    @property
    def keeps_errors(self) -> bool: ...

    def num_bytes(self, count: int) -> int:
        """Bytes of so many elements."""
        ...

    def write(self, values: Tensor, error: Tensor | None, out: Tensor) -> None:
        """Write values, a strip at the most, to bytes. error: what earlier steps lost, which is added to them before,
        and becomes what this one loses."""
        ...

    def read(self, data: Tensor, out: Tensor) -> None:
        """Read the elements of bytes into `out`."""
        ...

    def add(self, data: Tensor, total: Tensor) -> None:
        """Add the elements of bytes to `total`, in its dtype."""
        ...


class Piece(NamedTuple):
    """Elements, flat in this node's memory, and what rounding has lost of them in earlier steps, where that is kept.

    ended: called when this node holds the sums, or its share of them where they stay with those that have added them.
    """

    values: Tensor
    error: Tensor | None = None
    ended: Callable[[], None] | None = None

    def tell_end(self) -> None:
        """Call `ended`, where there is one."""
        if self.ended is not None:
            self.ended()


class NodeLink:
    """The ranks with this one's place in their nodes. All of them make the same calls in the same order."""

    def __init__(self, control: Control) -> None:
        """Join the others; all ranks make this call together."""
        self.node, self.nodes = control.ranks.node, control.ranks.nodes
        self.control = control
        self._group = control.link(f"nodes{control.ranks.local_rank}", self.node, self.nodes)
        self._spare: list[Tensor] = []  # buffers of pieces that are through, kept because freed ones leave holes

    def add(
        self, pieces: Iterable[Piece], givers: Sequence[int], wide: torch.dtype, sent: Sent,
        kept: Sequence[bool] | None = None,
    ) -> list[float]:  # fmt: skip
        """Replace pieces by the sums of all nodes' pieces; gives the squares of shares.

        givers: the nodes that hold something; what the others hold is not read. wide: dtype that is added in, in the
        order of nodes; each sum is rounded once, as it is sent. The squares are those of the elements that this node
        has added, by piece. While a piece is added, the next one, which is asked for before, is on its way.
        kept: by piece, whether sums stay with the nodes that have added them; the others then have of these elements
        nothing that is to be read. Raises: RankError when a node cannot be reached.
        """
        squares, arriving, leaving = list[float](), None, None
        for piece in chain(pieces, (None,)):
            begun = None if piece is None else self._send_shares(piece, sent, self.node in givers)
            if arriving is not None:
                self.control.wait(arriving.work)
                squares.append(arriving.add_own(self.node, givers, wide))
                self._end(leaving)
                stays = kept is not None and kept[len(squares) - 1]
                leaving = None if stays else self._send_sum(arriving)
                if stays:
                    self._spare.append(arriving.buffer)
                    arriving.piece.tell_end()
            arriving = begun
        self._end(leaving)
        return squares

    def give(self, pieces: Iterable[tuple[Tensor, Sequence[int]]]) -> None:
        """Give every node what the others have of pieces, flat in this node's memory, in place.

        With each piece come the elements with which the nodes' shares of it begin, and the end. While one is on its
        way the next one is asked for. Raises: RankError when a node cannot be reached.
        """
        leaving: tuple[Tensor, Any] | None = None
        for row in chain(pieces, (None,)):
            begun = None if row is None else self._give_own(*row)
            if leaving is not None:
                self.control.wait(leaving[1])
                self._spare.append(leaving[0])
            leaving = begun

    def collect(self, own: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Give flat bytes to the first node; there, what all nodes give, else nothing. sizes: bytes of each node's."""
        first = self.node == 0
        received = list(sizes) if first else [0] * self.nodes
        found = torch.empty(sum(received), dtype=torch.uint8)
        self.control.wait(self._move(found, own, received, [own.numel(), *[0] * (self.nodes - 1)]))
        return list(found.split(received)) if first else []

    def _end(self, leaving: _Exchange | None) -> None:
        """Wait until the sums of a piece are with all nodes."""
        if leaving is not None:
            self.control.wait(leaving.work)
            leaving.read_sums()
            self._spare.append(leaving.buffer)
            leaving.piece.tell_end()

    def _send_shares(self, piece: Piece, sent: Sent, gives: bool) -> _Exchange:
        """Start to give every node its share of a piece."""
        values = piece.values
        if sent.keeps_errors and not gives:
            values.zero_()  # all but what it owes
        bounds = [values.numel() * node // self.nodes for node in range(self.nodes + 1)]
        sizes = [sent.num_bytes(end - start) for start, end in pairwise(bounds)]
        copies_bytes, sent_bytes = self.nodes * sizes[self.node], 0 if sent.in_place else sum(sizes)
        buffer = self._buffer(copies_bytes + sent_bytes)
        copies = buffer[:copies_bytes].view(self.nodes, sizes[self.node])
        data = values.view(torch.uint8) if sent.in_place else buffer[copies_bytes : copies_bytes + sent_bytes]
        exchange = _Exchange(piece, sent, bounds, sizes, buffer, data, copies, None)
        exchange.write_copies(self.node)
        return exchange._replace(work=self._move(copies.flatten(), data, [sizes[self.node]] * self.nodes, sizes))

    def _send_sum(self, exchange: _Exchange) -> _Exchange:
        """Start to give every node the sum of this node's share, and to take the other sums."""
        copies, sizes = exchange.copies, exchange.sizes
        for node in range(self.nodes):
            if node != self.node:
                copies[node].copy_(copies[self.node])
        return exchange._replace(
            work=self._move(exchange.data, copies.flatten(), sizes, [sizes[self.node]] * self.nodes)
        )

    def _give_own(self, piece: Tensor, cuts: Sequence[int]) -> tuple[Tensor, Any]:
        """Start to give every node this node's share of a piece, and to take the others' into it; gives the buffer that
        this takes meanwhile."""
        sizes = [(end - start) * piece.element_size() for start, end in pairwise(cuts)]
        buffer = self._buffer(self.nodes * sizes[self.node])
        data, copies = piece.view(torch.uint8), buffer[: self.nodes * sizes[self.node]]
        own = data.split(sizes)[self.node]
        copies.view(self.nodes, -1).copy_(own.expand(self.nodes, -1))  # what is sent, while the piece is written
        return buffer, self._move(data, copies, sizes, [sizes[self.node]] * self.nodes)

    def _buffer(self, num_bytes: int) -> Tensor:
        buffer = self._spare.pop() if self._spare else torch.empty(0, dtype=torch.uint8)
        return buffer if buffer.numel() >= num_bytes else torch.empty(num_bytes, dtype=torch.uint8)

    def _move(self, target: Tensor, source: Tensor, received: list[int], sent: list[int]) -> Any:
        return self._group.alltoall_base(target, source, received, sent)


class _Exchange(NamedTuple):
    """A piece on its way. bounds: of the nodes' shares; sizes: their bytes as they cross.

    data: the bytes of all shares, those of the piece itself where it is sent as it is. copies [nodes, bytes]: what all
    nodes hold of this node's share. buffer: what these lie in.
    """

    piece: Piece
    sent: Sent
    bounds: list[int]
    sizes: list[int]
    buffer: Tensor
    data: Tensor
    copies: Tensor
    work: Any

    def _strips(self, node: int, data: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor | None, Tensor]]:
        """Elements of the share that a node adds, their errors, and their bytes: in `data`, or as they are sent."""
        span, width = slice(self.bounds[node], self.bounds[node + 1]), self.sent.num_bytes(STRIP)
        if not self.sizes[node]:
            return iter(())  # no bytes begin where an element may
        if data is None:
            begin = sum(self.sizes[:node])
            data = self.data[begin : begin + self.sizes[node]]
        values, error = self.piece.values[span].split(STRIP), self.piece.error
        errors = [None] * len(values) if error is None else error[span].split(STRIP)
        return zip(values, errors, data.split(width, dim=-1), strict=True)

    def write_copies(self, own: int) -> None:
        """Write what all nodes get, but for what is sent as it is stored, or added here as it is."""
        for node in range(0 if self.sent.in_place else len(self.sizes)):
            if node != own or not self.sent.keeps_errors:
                for values, error, out in self._strips(node):
                    self.sent.write(values, error, out)

    def add_own(self, own: int, givers: Sequence[int], wide: torch.dtype) -> float:
        """Add the copies of this node's share in the order of nodes, and write the sum in the place of its own copy;
        gives the sum of the squares of what it stores."""
        givers = range(len(self.sizes)) if self.sent.keeps_errors else givers
        for values, error, copies in self._strips(own, self.copies):
            total = torch.empty(values.numel(), dtype=wide)
            for number, node in enumerate(givers):
                if node == own and self.sent.keeps_errors:
                    total.copy_(values) if number == 0 else total.add_(values)
                else:
                    (self.sent.add if number else self.sent.read)(copies[node], total)
            self.sent.write(total, error, copies[own])
            self.sent.read(copies[own], values)
        return sum_of_squares(self.piece.values[self.bounds[own] : self.bounds[own + 1]])

    def read_sums(self) -> None:
        """Read the sums of all nodes into the piece."""
        for node in range(0 if self.sent.in_place else len(self.sizes)):
            for values, _, found in self._strips(node):
                self.sent.read(found, values)


def sum_of_squares(values: Tensor) -> float:
    """The sum of squares of flat `values` in float64, by rows of ROW_ELEMENTS."""
    rows = values.numel() // ROW_ELEMENTS
    whole, rest = values[: rows * ROW_ELEMENTS].view(rows, ROW_ELEMENTS), values[rows * ROW_ELEMENTS :]
    total = 0.0
    for part in (*whole.split(ROWS_AT_ONCE), rest[None]):
        for row in part.double().square_().sum(dim=1).tolist():
            total += row
    return total
