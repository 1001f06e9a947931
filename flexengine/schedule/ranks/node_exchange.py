"""Before the update of a step several nodes add up their stored gradients: in which pieces, and how.

Each rank takes every N-th piece, waits until its node's last round has stored the piece's group, and exchanges it with
the ranks of the other nodes that have its place: on a thread, while that round goes on backward. All ranks have ended
that before any of them updates. A group that is updated before the norm is known waits for its own pieces alone. Which
round is the last only the call that updates knows, and of ranks that take rounds in turn only one runs it. So this is
no part of a round's program: `lower_exchange` writes it down as one of its own, which `ranks.checker` proves and
`ranks.simulator` prices beside the rounds.

Where nodes divide the optimizer states of a group, sums stay with the node that has added them and updates their
elements. It then gives their weights to the others, piece by piece, under the next step's forward (`lower_gather`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

from flexengine.schedule.commands import Access, Command, CommandName, Program, Stream
from flexengine.schedule.group_storage import DTYPE_BYTES
from flexengine.schedule.layout import Layout
from flexengine.schedule.node_states import GroupPiece, pieces_of_group
from flexengine.schedule.ranks.semaphores import Semaphores
from flexengine.schedule.shares import Share

PIECES_UNDER_WAY = 3
"""One whose shares are sent, one that is added up, and one whose sums are sent."""
WIDENED_BYTES = 12 * 2**20
"""What some rows of a piece take in float32 and in float64 while they are added, and what the network library takes."""
ERROR_DTYPE = "bfloat16"
"""Of what rounding to FP8 has lost, at most 1/16 of an element: keeping that loses at most 2^-13 of it again."""


class SentAs(NamedTuple):
    """What crosses the network of gradients that nodes store in a dtype: its name, the dtype or `fp8`.

    block: elements of FP8 that share a scale of one byte.
    """

    name: str
    stored: str
    block: int = 128

    @property
    def keeps_errors(self) -> bool:
        """Whether each node keeps what rounding has lost of each element."""
        return self.name == "fp8"

    def num_bytes(self, numel: int) -> int:
        """Bytes of so many elements that follow each other."""
        return numel + -(-numel // self.block) if self.name == "fp8" else numel * DTYPE_BYTES[self.name]

    @property
    def share(self) -> float:
        """Bytes that are sent for each that is stored, of many elements."""
        return self.num_bytes(self.block) / (self.block * DTYPE_BYTES[self.stored])


class NodePiece(NamedTuple):
    """Elements [first, first + numel) of a group's stored gradient; run: their run among those of all groups.

    of_group: the same within the group.
    """

    group: int
    run: int
    first: int
    numel: int
    of_group: GroupPiece


class NodeSum(NamedTuple):
    """Arguments of `exchange`: pieces of a gradient in the node's memory, each `num_bytes` bytes from an offset on; the
    nodes whose copies are added, in order. sent: the share of these bytes that is sent, where fewer are. kept: the
    bytes of the node's own sums, each from an offset on, where these stay with it; None where all nodes get them."""

    group: int
    slot: int
    pieces: tuple[tuple[int, int], ...]
    givers: tuple[int, ...]
    sent: float = 1.0
    kept: tuple[tuple[int, int], ...] | None = None

    @property
    def network_bytes(self) -> float:
        """Bytes that a rank sends, as it receives: all but the share that its node adds, then that share's sums."""
        nodes, ways = len(self.givers), 2 if self.kept is None else 1
        return ways * (nodes - 1) / nodes * self.sent * sum(num_bytes for _, num_bytes in self.pieces)


class NodeWeights(NamedTuple):
    """Arguments of `gather_weights`: pieces of a group's weights in the node's memory, as of `NodeSum`, of which each
    of `nodes` nodes has updated a share; kept: the bytes of the node's own."""

    group: int
    slot: int
    pieces: tuple[tuple[int, int], ...]
    kept: tuple[tuple[int, int], ...]
    nodes: int

    @property
    def network_bytes(self) -> float:
        """Bytes that a rank sends, as it receives."""
        return (self.nodes - 1) / self.nodes * sum(num_bytes for _, num_bytes in self.pieces)


def node_pieces(layout: Layout) -> Iterator[NodePiece]:
    """All elements that are trained, as backward leaves them, in pieces that no number of ranks changes."""
    for group in reversed(range(len(layout.groups))):
        if layout.model.groups[group].frozen:
            continue
        for piece in pieces_of_group(layout.groups[group]):
            yield NodePiece(group, layout.first_run(group) + piece.run, piece.first, piece.numel, piece)


def givers_of(num_rounds: int, nodes: int) -> range:
    """The nodes that have run a round of a step, in the order in which their gradients are added."""
    return range(min(num_rounds, nodes))


def sent_as(layout: Layout) -> SentAs:
    """What crosses the network of the gradients of a layout."""
    return SentAs(layout.plan.request.exchanged, layout.plan.request.numerics.grad)


def own_pieces(layout: Layout, share: Share) -> Sequence[NodePiece]:
    """The pieces that a rank exchanges, in order."""
    return share.every(list(node_pieces(layout)))


def exchange_bytes(layout: Layout) -> int:
    """Host bytes that a rank takes while nodes add up gradients, and for what it keeps of them; 0 for one node."""
    request, sent = layout.plan.request, sent_as(layout)
    if request.nodes == 1:
        return 0
    sizes = [piece.numel for piece in node_pieces(layout)]
    most = max(sum(Share(rank, request.ranks).every(sizes)) for rank in range(request.ranks))  # not by their number
    numel = max(sizes, default=0)
    copies = request.nodes * sent.num_bytes(-(-numel // request.nodes))
    rounded = sent.num_bytes(numel) + request.nodes * sent.keeps_errors if sent.name != sent.stored else 0
    kept = DTYPE_BYTES[ERROR_DTYPE] * most if sent.keeps_errors else 0
    return PIECES_UNDER_WAY * (copies + rounded) + WIDENED_BYTES + kept


def lower_exchange(layout: Layout, share: Share) -> Program:
    """What a rank exchanges in a step of which every node has run a round: its pieces of one group after the other.

    Of a speculative group it tells so, also where it has no pieces.
    """
    semaphores, width, found = Semaphores(layout), DTYPE_BYTES[layout.plan.request.numerics.grad], list[Command]()
    givers = tuple(givers_of(layout.plan.request.nodes, layout.plan.request.nodes))
    sent = sent_as(layout).share
    own = {group: list(of) for group, of in groupby(own_pieces(layout, share), key=attrgetter("group"))}
    for group in reversed(range(len(layout.groups))):
        signals = (semaphores.exchanged(group),) if semaphores.is_speculative(group) else ()
        if group not in own and not signals:
            continue
        slot, pieces = layout.plane_slot("grad", group), [piece.of_group for piece in own.get(group, [])]
        places = tuple((piece.first * width, piece.numel * width) for piece in pieces)
        kept = _own_bytes(pieces, share.node, len(givers), width) if group in layout.node_states else None
        found.append(
            Command(
                index=len(found),
                kind="exchange",
                name=CommandName("exchange", "grad", layout.model.groups[group].name),
                stream=Stream.CPU,
                reads=(Access(slot, "grad of the node"),),
                writes=(Access(slot, "grad of all nodes"),),
                waits=(),
                args=NodeSum(group, slot, places, givers, sent, kept),
                awaits=semaphores.stored_by_node(group),
                signals=signals,
            )
        )
    return Program("exchange", layout.slots, tuple(found))


def divided_pieces(layout: Layout, share: Share) -> dict[int, list[GroupPiece]]:
    """The pieces that a rank moves of each group whose states nodes divide, groups in forward order."""
    found: dict[int, list[GroupPiece]] = {group: [] for group in sorted(layout.node_states)}
    for piece in share.every([piece for piece in node_pieces(layout) if piece.group in found]):
        found[piece.group].append(piece.of_group)
    return found


def lower_gather(layout: Layout, share: Share) -> Program:
    """What a rank moves of weights after an update of which each node has made a share: its pieces of one group after
    the other, as forward needs them, each group when all ranks of the node have updated it."""
    semaphores, width, found = Semaphores(layout), DTYPE_BYTES[layout.plan.request.numerics.compute], list[Command]()
    nodes = layout.plan.request.nodes
    for group, pieces in divided_pieces(layout, share).items():
        slot = layout.plane_slot("weights", group)
        places = tuple((piece.first * width, piece.numel * width) for piece in pieces)
        kept = _own_bytes(pieces, share.node, nodes, width)
        found.append(
            Command(
                index=len(found),
                kind="gather_weights",
                name=CommandName("gather", "weights", layout.model.groups[group].name),
                stream=Stream.CPU,
                reads=(Access(slot, "weights of the node"),),
                writes=(Access(slot, "weights of all nodes"),),
                waits=(),
                args=NodeWeights(group, slot, places, kept, nodes),
                awaits=semaphores.updated_by_node(group),
                signals=(semaphores.gathered(group),),
            )
        )
    return Program("gather", layout.slots, tuple(found))


def _own_bytes(pieces: Sequence[GroupPiece], node: int, nodes: int, width: int) -> tuple[tuple[int, int], ...]:
    """Where a node's shares of pieces lie in a plane: offset, bytes."""
    cuts = (piece.cuts(nodes)[node : node + 2] for piece in pieces)
    return tuple((start * width, (end - start) * width) for start, end in cuts if start < end)
