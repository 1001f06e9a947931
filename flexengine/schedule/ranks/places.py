"""Slots that ranks need beside those of one rank, by how they share weights and gradients.

`Alone` has none. The layout asks the places of a plan wherever transports differ, and never which one it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Plan
from flexengine.schedule.fixed_slots import norm_square_bytes, run_square_bytes
from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.group_uses import group_uses
from flexengine.schedule.layer_program import align
from flexengine.schedule.parts import Part
from flexengine.schedule.pieces import Piece, pieces_of, whole_piece
from flexengine.schedule.ranks.waves import Section, owned_pieces
from flexengine.schedule.region import Region
from flexengine.schedule.slots import PlaneKind
from flexengine.schedule.window import WindowPlaces, slice_bytes


class Sizes(Protocol):
    """What places ask of `PlannedSizes`, which has them."""

    model: ModelSpec
    plan: Plan
    homes: tuple[GroupPlan, ...]
    groups: tuple[GroupStorage, ...]
    acc_bytes: int
    pieces: tuple[tuple[tuple[Piece, ...], ...], ...]

    compute_bytes: int

    @property
    def either_hidden_bytes(self) -> int: ...
    @property
    def window_rows(self) -> int: ...
    @property
    def window_slices(self) -> int: ...
    def window_of(self, layer: int) -> WindowPlaces: ...
    def piece_bytes(self, group: int) -> int: ...
    def spilled_piece_bytes(self, group: int) -> int: ...
    def received_bytes(self, group: int) -> int: ...
    def sections(self, group: int, part: int) -> list[Section]: ...


class Alone:
    """The places of one rank.

    accumulators: slots of each class that gradients are added up in. relays_pieces: ranks wait for each other's pieces
    of stored gradients. uses_peers: GPUs copy to each other's memory.
    """

    accumulators = 1
    relays_pieces = True
    uses_peers = False

    def check_home(self, home: GroupPlan, what: str) -> None:
        """Raise ValueError where a plan keeps on a GPU what other ranks need of a trained group as well."""

    def has_place(self, kind: PlaneKind, on_host: bool) -> bool:
        """Whether a plane has a place on the host, beside one on a GPU or instead."""
        return on_host

    def cut_gradient(self, sizes: Sizes, group: int, part: Part) -> tuple[Piece, ...]:
        """The pieces in which the gradient of a part moves."""
        return (whole_piece(part),)

    def add_scalars(self, sizes: Sizes, region: Region) -> None:
        """Append slots for numbers on the GPU."""

    def add_on_host(self, sizes: Sizes, own: Region, node: Region) -> None:
        """Append slots behind the planes: in a rank's own memory, and in what all ranks of the node map."""

    def add_gradient_ring(self, sizes: Sizes, region: Region, name: str, groups: Sequence[int], num_bytes: int) -> None:
        """Append slots that stored gradients of groups of a class pass through. num_bytes: of slots for whole parts.

        Where gradients move in pieces, as many slots for pieces as so many bytes have room for: fewer would have
        compute wait for pieces of a layer that has ended its backward.
        """
        piece = max((sizes.piece_bytes(i) for i in groups), default=0)
        num_pieces = sum(len(pieces) for i in groups for pieces in sizes.pieces[i])
        for k in range(min(num_pieces, max(1, num_bytes // align(piece))) if piece else 0):
            region.add("grad", piece, "gradient slots", name, k)

    def spilled_slot_bytes(self, sizes: Sizes, groups: Sequence[int]) -> int:
        """Bytes of a GPU slot for what a tied group's first layer has left on the host; 0 = nothing waits there."""
        return 0

    def lends_accumulator(self, sizes: Sizes, streamed: Sequence[int]) -> bool:
        """Whether weights of a class that are streamed lie over its accumulator, as no training uses them."""
        return False

    def head_inputs(self, plan: Plan) -> int:
        """Slots for inputs of the head that wait while other rounds pass the last block."""
        return 0


class RelayPlaces(Alone):
    """Of ranks that take rounds in turn: stored gradients pass through the node's memory in pieces."""

    def check_home(self, home: GroupPlan, what: str) -> None:
        if home.trained and "gpu" in (home.weights, home.grads, home.states):
            raise ValueError(
                f"{what} is trained by several ranks, which share its weights, gradients and states on the host; the"
                " plan keeps some on one GPU"
            )

    def cut_gradient(self, sizes: Sizes, group: int, part: Part) -> tuple[Piece, ...]:
        stored = sizes.groups[group]
        return pieces_of(part, stored.element_bytes("grad")) if stored.plane_bytes["grad"] else (whole_piece(part),)

    def add_on_host(self, sizes: Sizes, own: Region, node: Region) -> None:
        node.add("norm_squares", norm_square_bytes(sizes.groups), "scalars")
        model, width = sizes.model, sizes.acc_bytes
        for spec, stored, use, parts in zip(model.groups, sizes.groups, group_uses(model), sizes.pieces, strict=True):
            if use.gradients > 1:
                [pieces] = parts
                own.add("spilled", stored.part_numel * width, "spilled gradients", spec.name)
                own.add_pieces((p.start, p.start * width, p.numel * width) for p in pieces)

    def spilled_slot_bytes(self, sizes: Sizes, groups: Sequence[int]) -> int:
        uses = group_uses(sizes.model)
        return max((sizes.spilled_piece_bytes(i) for i in groups if uses[i].gradients > 1), default=0)


class SplitPlaces(RelayPlaces):
    """Of ranks that walk the layers together: what arrives of accumulators, and the table of sums of squares."""

    accumulators = 2  # one is sent while the next layer adds to the other
    relays_pieces = False
    uses_peers = True

    def cut_gradient(self, sizes: Sizes, group: int, part: Part) -> tuple[Piece, ...]:
        if not sizes.groups[group].plane_bytes["grad"]:
            return (whole_piece(part),)
        home = sizes.plan.groups[group]
        return owned_pieces(part, sizes.plan.request.ranks, sizes.acc_bytes, in_sections=not home.sharded)

    def add_scalars(self, sizes: Sizes, region: Region) -> None:
        region.add("run_squares", run_square_bytes(sizes.groups), "scalars")

    def add_on_host(self, sizes: Sizes, own: Region, node: Region) -> None:
        for group, (spec, use) in enumerate(zip(sizes.model.groups, group_uses(sizes.model), strict=True)):
            if use.gradients > 1:
                width, count = sizes.received_bytes(group), len(sizes.sections(group, 0))
                own.add("spilled", width * count, "spilled gradients", spec.name)
                own.add_pieces(((n, n * width, width) for n in range(count)), "section")

    def add_gradient_ring(self, sizes: Sizes, region: Region, name: str, groups: Sequence[int], num_bytes: int) -> None:
        """Append slots for what arrives of accumulators, and for pieces of stored gradients that it is added to: one is
        added up while the next arrives."""
        parts = sum(len(sizes.groups[i].parts) for i in groups)
        sections = (len(sizes.sections(i, part)) for i in groups for part in range(len(sizes.pieces[i])))
        slots = range(min(2, max(sections, default=0) * parts))
        for k in slots:
            region.add("received", max(sizes.received_bytes(i) for i in groups), "gradient slots", name, k)
        streamed = [i for i in groups if not sizes.homes[i].sharded]
        for k in slots if streamed else ():
            region.add("grad", max(sizes.piece_bytes(i) for i in streamed), "gradient slots", name, k)

    def spilled_slot_bytes(self, sizes: Sizes, groups: Sequence[int]) -> int:
        uses = group_uses(sizes.model)
        tied = any(uses[i].gradients > 1 for i in groups)
        return max(sizes.received_bytes(i) for i in groups) if tied else 0


def why_no_shards(stored: GroupStorage, ranks: int, acc_bytes: int) -> str:
    """Why ranks cannot keep shards of a trained group; empty if they can. acc_bytes: of an element of accumulators."""
    part, *others = stored.parts
    if others:
        return "its experts cross the link in parts"
    if stored.on_gpu_only:
        return "whole matrices are updated at once"
    pieces = owned_pieces(part, ranks, acc_bytes, in_sections=False)
    for segment in stored.segments:
        block = 1 if segment.rule is None else segment.rule.block
        starts = (piece.start - segment.first_element for piece in pieces)
        if any(0 < start < segment.numel and start % block for start in starts):
            return f"its optimizer states lie in blocks of {block} elements, of which shards cut some"
    return ""


class ContextPlaces(RelayPlaces):
    """Of ranks that cut rounds: rows of each layer's window, of each slice, are left for later ranks; their gradients
    and accumulators for the rank before."""

    accumulators = 2  # one arrives or leaves while a layer adds to the other

    def add_on_host(self, sizes: Sizes, own: Region, node: Region) -> None:
        _add_squares(sizes, node)
        ranks, slices = sizes.plan.request.ranks, sizes.window_slices
        blocks = [i for i, layer in enumerate(sizes.model.layers) if layer.kind == "block"]
        windows = {layer: sizes.window_of(layer) for layer in blocks if sizes.window_rows}
        for layer, window in windows.items():
            num_bytes = slice_bytes(window, slices, sizes.compute_bytes, grads=False)
            for c in range(sizes.plan.num_chunks if num_bytes else 0):
                node.add("handed", num_bytes, "handed over", f"window {layer}", c)
        grads = {slice_bytes(window, slices, sizes.compute_bytes, grads=True) for window in windows.values()} - {0}
        for giver in range(ranks):
            for c in range(slices if giver and grads else 0):
                node.add("handed", max(grads), "handed over", f"grads {giver}", c)
                node.add_pieces(((num_bytes, 0, num_bytes) for num_bytes in sorted(grads)), "bytes")
            for name, lengths in self._accumulated(sizes).items():
                node.add("handed", max(lengths), "handed over", f"sums {giver} {name}")
                node.add_pieces(((num_bytes, 0, num_bytes) for num_bytes in sorted(lengths)), "bytes")

    def spilled_slot_bytes(self, sizes: Sizes, groups: Sequence[int]) -> int:
        """Head and embedding of a tied group store their gradients one after the other."""
        return 0

    def _accumulated(self, sizes: Sizes) -> dict[str, set[int]]:
        """By slot class, the lengths of accumulators that there are."""
        found: dict[str, set[int]] = {}
        for spec, stored in zip(sizes.model.groups, sizes.groups, strict=True):
            if not spec.frozen:
                found.setdefault(spec.slot_class, set()).add(stored.part_numel * sizes.acc_bytes)
        return found


class StagePlaces(RelayPlaces):
    """Of ranks that run blocks of their own: all planes have a place in the node's memory, and chunks are left there
    for the rank of the next layer."""

    def check_home(self, home: GroupPlan, what: str) -> None:
        """Its rank alone needs what a plan keeps of a block on its GPU."""

    def has_place(self, kind: PlaneKind, on_host: bool) -> bool:
        return True

    def add_on_host(self, sizes: Sizes, own: Region, node: Region) -> None:
        _add_squares(sizes, node)
        for layer in range(2, len(sizes.model.layers)):  # block 0 is with the embedding
            for c in range(sizes.plan.num_chunks):
                node.add("handed", sizes.either_hidden_bytes, "handed over", layer, c)

    def lends_accumulator(self, sizes: Sizes, streamed: Sequence[int]) -> bool:
        """A rank streams blocks of others to evaluate, while nothing is added up; but its own, if they are frozen."""
        return not any(sizes.homes[i].trained or sizes.model.groups[i].frozen for i in streamed)

    def head_inputs(self, plan: Plan) -> int:
        return plan.chunks_per_round


def _add_squares(sizes: Sizes, node: Region) -> None:
    """Append a slot for the sums of squares of all gradients, and within it one for each group's."""
    node.add("norm_squares", norm_square_bytes(sizes.groups), "scalars")
    lengths = [norm_square_bytes([stored]) for stored in sizes.groups]
    starts = accumulate(lengths[:-1], initial=0)
    node.add_pieces(zip(range(len(lengths)), starts, lengths, strict=True), "group")


PLACES: dict[str, type[Alone]] = {
    "relay": RelayPlaces, "split": SplitPlaces, "stages": StagePlaces, "context": ContextPlaces,
}  # fmt: skip


def places_of(plan: Plan) -> Alone:
    """The places of a plan."""
    return PLACES[plan.transport]() if plan.shares_node else Alone()
