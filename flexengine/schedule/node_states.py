"""Pieces in which nodes exchange a group's gradient, and the optimizer states that a node keeps of what they divide.

Each node adds up a share of every piece. Where nodes divide the states of a group, a node keeps those of its shares
alone, with the lower halves of their masters, updates these elements, and gives their weights to the others. While
somebody reads or writes masters, all lower halves lie in the place of the group's gradient, element by element.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import NamedTuple

from flexengine.schedule.group_storage import GroupStorage, Plane, Segment
from flexengine.schedule.layer_program import align
from flexengine.schedule.shares import SHARE_ELEMENTS, Share
from flexengine.schedule.slots import PlaneKind

PIECE_ELEMENTS = 1 << 21
"""Elements that cross at once. Up to three pieces of a rank are on their way, which takes 12 MiB of its memory in bf16.

It sets where squares are cut into sums: changing it changes the last bits of the gradient norm.
"""


class GroupPiece(NamedTuple):
    """Elements [first, first + numel) of a group, and the number of their run among those of the group."""

    run: int
    first: int
    numel: int

    def cuts(self, nodes: int) -> list[int]:
        """The elements of the group with which the nodes' shares of the piece begin, and the last one's end."""
        return [self.first + self.numel * node // nodes for node in range(nodes + 1)]


class NodeSpan(NamedTuple):
    """Elements [start, start + count) of a segment, and the number of the first one among those whose states a node
    keeps."""

    start: int
    count: int
    place: int


def pieces_of_group(stored: GroupStorage) -> Iterator[GroupPiece]:
    """All elements of a group in pieces that no number of ranks changes."""
    for run in (run for part in stored.parts for run in part.runs):
        for start in range(0, run.numel, PIECE_ELEMENTS):
            yield GroupPiece(run.number, run.first + start, min(PIECE_ELEMENTS, run.numel - start))


def within(piece: GroupPiece, segment: Segment) -> GroupPiece | None:
    """What of a piece lies in a segment; None if nothing does."""
    first = max(piece.first, segment.first_element)
    end = min(piece.first + piece.numel, segment.first_element + segment.numel)
    return GroupPiece(piece.run, first, end - first) if first < end else None


class NodeStates:
    """The planes of optimizer states of a group that nodes divide.

    All nodes have the same slots: of each piece they have room for the largest share, with states as far from a
    multiple of SHARE_ELEMENTS as their weights are.
    """

    def __init__(self, stored: GroupStorage, nodes: int) -> None:
        self._stored, self._nodes = stored, nodes

    def num_bytes(self, kind: PlaneKind) -> int:
        """Bytes that a node keeps of one of the planes."""
        return max((end for _, end in self._ranges.get(kind, {}).values()), default=0)

    def offset(self, segment: Segment, plane: Plane, place: int) -> int:
        """Where a node keeps the state of an element, by its number: the first byte in the plane's slot."""
        return self._ranges[plane.kind][segment.name][0] + plane.num_bytes(place)

    def spans(self, segment: Segment, share: Share) -> list[NodeSpan]:
        """What one of a node's ranks updates of the node's shares of a segment: what of these lies in its own."""
        first, count = share.of(segment)
        found = list[NodeSpan]()
        for span in self.of_node(segment, share.node):
            start, end = max(span.start, first), min(span.start + span.count, first + count)
            if start < end:
                found.append(NodeSpan(start, end - start, span.place + start - span.start))
        return found

    def of_node(self, segment: Segment, node: int) -> Iterator[NodeSpan]:
        """A node's shares of a segment."""
        begin = segment.first_element
        for base, piece in self.placed[0][segment.name]:
            start, end = (min(max(0, cut - begin), segment.numel) for cut in piece.cuts(self._nodes)[node : node + 2])
            if start < end:
                yield NodeSpan(start, end - start, base + start % SHARE_ELEMENTS)

    @cached_property
    def placed(self) -> tuple[dict[str, list[tuple[int, GroupPiece]]], dict[str, int]]:
        """By segment, its pieces with the first place of each, and the places of all."""
        found: dict[str, list[tuple[int, GroupPiece]]] = {segment.name: [] for segment in self._stored.segments}
        ends = dict.fromkeys(found, 0)
        for piece in pieces_of_group(self._stored):
            for segment in self._stored.segments:
                inside = within(piece, segment)
                if inside is not None:
                    found[segment.name].append((ends[segment.name], piece))
                    most = min(-(-piece.numel // self._nodes), inside.numel)
                    ends[segment.name] += SHARE_ELEMENTS * (1 + -(-most // SHARE_ELEMENTS))
        return found, ends

    @cached_property
    def _ranges(self) -> dict[PlaneKind, dict[str, tuple[int, int]]]:
        """By kind and segment, where its states begin and end in their slot."""
        found, ends = dict[PlaneKind, dict[str, tuple[int, int]]](), dict[PlaneKind, int]()
        for segment in self._stored.segments:
            for plane in segment.planes:
                start = align(ends.get(plane.kind, 0))
                ends[plane.kind] = start + plane.num_bytes(self.placed[1][segment.name])
                found.setdefault(plane.kind, {})[segment.name] = start, ends[plane.kind]
        return found


def why_no_node_states(stored: GroupStorage) -> str:
    """Why nodes cannot divide the states of a trained group; empty if they can."""
    if stored.on_gpu_only:
        return "whole matrices are updated at once"
    planes = [plane for segment in stored.segments for plane in segment.planes]
    if any(plane.kind == "remainder" and plane.dtype != "int16" for plane in planes):
        return "its masters lie beside its weights in whole"
    blocks = {plane.block for plane in planes}
    return f"its optimizer states lie in blocks of {max(blocks)} elements" if max(blocks) > 1 else ""
