"""A round on one of several ranks that cut it, each with some of its chunks, and their update: see `chunk_shares`."""

from __future__ import annotations

from typing import NamedTuple

from flexengine.models.spec import LayerSpec
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Signal, Stream
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.context import SlotRing, StagePart
from flexengine.schedule.lowering.gradients import GradientLowering, nothing_in_round
from flexengine.schedule.lowering.kinds import RoundKind, Wave
from flexengine.schedule.lowering.round import RoundLowering
from flexengine.schedule.lowering.shape import ChunkShape, RoundShape
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.ranks.chunk_shares import shares_of
from flexengine.schedule.ranks.context_semaphores import ContextSemaphores, HandedOn
from flexengine.schedule.ranks.relay_lowering import SharedContext, SharedUpdate
from flexengine.schedule.ranks.stage_lowering import exchange_squares
from flexengine.schedule.slots import SlotKey
from flexengine.schedule.window import slice_bytes, slice_pieces


class Moved(NamedTuple):
    """What is copied to places in the node's memory, along `regions`, or back. number: of the layer's accumulators."""

    name: CommandName
    content: str
    regions: list[CopyRegion]
    what: HandedOn
    number: int = 0


class ChunksContext(SharedContext):
    """A round of which a rank runs some chunks. shares: those of each rank; part: of the last rank with some."""

    semaphores: ContextSemaphores

    def __init__(self, layout: Layout, shape: RoundShape, builder: ProgramBuilder, wave: Wave) -> None:
        super().__init__(layout, shape, builder)
        self.semaphores, self.rank, self.size = ContextSemaphores(layout), wave.rank, wave.size
        self.shares = shares_of(layout, shape.chunks)
        self.chunks = self.shares[self.rank]
        self._begins = True  # nothing has been left in this round
        self._places: dict[int, Signal] = {}  # by where a place begins, who has taken what was left there last

    def slices_here(self, chunk: ChunkShape) -> range:
        return range(max(chunk.first_slice, self.chunks.start), min(chunk.last_slice + 1, self.chunks.stop))

    def number_kept(self, c: int) -> int:
        return c - self.chunks.start

    @property
    def order(self) -> list[int]:
        """The ranks that add to a layer's gradient, in turn; the last one, which is the first rank, stores it."""
        return [rank for rank in range(self.size) if self.shares[rank]][::-1]

    # -- between neighbours --------------------------------------------------------------------------------------------

    def leave(self, moved: Moved, source: Access, ends: bool = True, taken: Signal | None = None) -> None:
        """Copy to places in the node's memory. ends: all that is left of the layer is. taken: raised by who takes it.

        The places are free: the first thing that is left in a round awaits that no rank is still in the one before.
        """
        awaits = [self.semaphores.all_have_begun()] if self._begins else []
        self._begins = False
        places = list(dict.fromkeys(region.target for region in moved.regions))
        offsets = [self.layout.slots[place].offset for place in places]
        awaits += dict.fromkeys(self._places[offset] for offset in offsets if offset in self._places)
        if taken is not None:
            self._places |= dict.fromkeys(offsets, taken)
        writes = [Access(place, moved.content) for place in places]
        copies, what = tuple(moved.regions), moved.what
        self.builder.add_copy(moved.name, Stream.RELAY_OUT, [source], writes, copies, what)
        signals = (self.semaphores.handed(what, moved.number),) if ends else ()
        self.builder.between_ranks(-1, awaits=tuple(awaits), signals=signals)

    def take(self, moved: Moved, target: Access, again: bool = False) -> None:
        """Copy from places in the node's memory when another rank has left all of it there, and say so.

        Told as a write of the places, too: another rank has changed what they hold. again: it has come before in this
        round, so that nothing is awaited; the stream of relays may be waiting for what is yet to be left.
        """
        back, what = tuple(region.reversed for region in moved.regions), moved.what
        stream = Stream.H2D if again else Stream.RELAY_IN
        writes = [target, *(Access(place, moved.content) for place in dict.fromkeys(region.source for region in back))]
        self.builder.add_copy(moved.name, stream, [], writes, back, what)
        if not again:
            awaits = self.semaphores.handed(what._replace(taken=False), moved.number)._replace(of=what.giver)
            signals = () if what.what == "window" else (self.semaphores.handed(what, moved.number),)
            self.builder.between_ranks(-1, awaits=(awaits,), signals=signals)


class WindowsHandedOn:
    """Hands on what layers carry along sequences that ranks cut, and the gradients of that."""

    def __init__(self, context: ChunksContext) -> None:
        self._context, self._layout = context, context.layout

    def carries(self, layer: int) -> bool:
        """Whether a layer hands anything on from slice to slice."""
        return bool(self._layout.programs[layer].window_stages)

    def comes_from_before(self, c: int) -> bool:
        """Whether slices of a chunk's sequence are with ranks before this one."""
        chunk = self._context.shape.chunks[c]
        return chunk.is_slice and chunk.first_slice < self._context.chunks.start

    def goes_on(self, c: int) -> bool:
        """Whether slices of a chunk's sequence are with ranks after this one."""
        chunk = self._context.shape.chunks[c]
        return chunk.is_slice and chunk.last_slice >= self._context.chunks.stop

    def take_rows(self, layer: int, again: bool = False) -> None:
        """Fetch the rows of the slices that ranks before this one run."""
        own = self._context.chunks
        first = self._context.shape.chunks[own.start].first_slice
        for giver, share in enumerate(self._context.shares[: self._context.rank]):
            slices = range(max(first, share.start), share.stop)
            if slices:
                regions = [r for c in slices for r in self._regions(layer, c, c - first)]
                target = Access(self._layout.window("window", layer), f"window {layer} {first} to {slices[-1]}")
                what = HandedOn("window", layer, giver, taken=True)
                name = CommandName("fetch", "window", self._owner(layer), giver)
                self._context.take(Moved(name, f"rows {layer} {giver}", regions, what), target, again)

    def leave_rows(self, layer: int, c: int) -> None:
        """Leave the rows of a slice for later ranks."""
        first, own = self._context.shape.chunks[c].first_slice, self._context.chunks
        source = Access(self._layout.window("window", layer), f"window {layer} {first} to {c}")
        what = HandedOn("window", layer, self._context.rank, taken=False)
        name, regions = CommandName("offload", "window", self._owner(layer), c), self._regions(layer, c, c - first)
        self._context.leave(Moved(name, f"rows {layer} {c}", regions, what), source, ends=c + 1 == own.stop)

    def take_grads(self, layer: int) -> None:
        """Fetch the gradients of rows of this rank and those before it, from the next."""
        own, giver = self._context.chunks, self._context.rank + 1
        first = self._context.shape.chunks[own[-1]].first_slice
        regions = [r for c in range(first, own.stop) for r in self._grad_regions(layer, c - first, giver)]
        target = Access(self._layout.window("grad_window", layer), f"grad window {layer} {first} from {own.stop}")
        what, name = HandedOn("grads", layer, giver, taken=True), CommandName("fetch", "window", self._owner(layer))
        self._context.take(Moved(name, f"grads {layer} {giver}", regions, what), target)

    def leave_grads(self, layer: int) -> None:
        """Leave the gradients of rows of ranks before this one."""
        own, rank = self._context.chunks, self._context.rank
        first = self._context.shape.chunks[own.start].first_slice
        source = Access(self._layout.window("grad_window", layer), f"grad window {layer} {first} from {own.start}")
        regions = [r for c in range(first, own.start) for r in self._grad_regions(layer, c - first, rank)]
        what, name = HandedOn("grads", layer, rank, taken=False), CommandName("offload", "window", self._owner(layer))
        taken = self._context.semaphores.handed(what._replace(taken=True))._replace(of=rank - 1)
        self._context.leave(Moved(name, f"grads {layer} {rank}", regions, what), source, taken=taken)

    def _owner(self, layer: int) -> str:
        return self._context.model.layers[layer].name

    def _regions(self, layer: int, c: int, number: int) -> list[CopyRegion]:
        """From the window to the place of chunk c, the `number`-th slice of its sequence."""
        layout, place = self._layout, self._layout.slot("handed", f"window {layer}", c, "node")
        pieces = slice_pieces(layout.window_of(layer), layout.window_slices, number, layout.compute_bytes, grads=False)
        window = layout.window("window", layer)
        return [CopyRegion(window, piece.first, place, piece.packed, piece.num_bytes) for piece in pieces]

    def _grad_regions(self, layer: int, number: int, giver: int) -> list[CopyRegion]:
        layout = self._layout
        of_layer = layout.window_of(layer), layout.window_slices
        num_bytes = slice_bytes(*of_layer, layout.compute_bytes, grads=True)
        whole = SlotKey("handed", f"grads {giver}", number, "node")
        place, window = layout.slot_of(whole._replace(within=("bytes", num_bytes))), layout.window("grad_window", layer)
        pieces = slice_pieces(*of_layer, number, layout.compute_bytes, grads=True)
        return [CopyRegion(window, piece.first, place, piece.packed, piece.num_bytes) for piece in pieces]


class ChunksGradients(GradientLowering):
    """Goes on from the accumulators that the rank before left, and hands them on; the last rank stores them."""

    def __init__(self, context: ChunksContext, kind: RoundKind) -> None:
        super().__init__(context, kind, nothing_in_round(context.layout))
        self._chunks = context
        self._at_work: LayerSpec | None = None
        self._accumulators: dict[str, SlotRing] = {}
        self._slots: dict[int, int] = {}  # by group, its accumulator

    def accumulators(self, layer: LayerSpec, begun: bool) -> dict[int, int]:
        """As on one rank; the next of the ring, as others may still leave, with what the rank before has added up."""
        if begun:
            return {group: self._slots[group] for group in self._trained(layer)}
        self._at_work, found = layer, self._slots
        for group in self._trained(layer):
            name = self._class(group)
            if name not in self._accumulators:
                self._accumulators[name] = SlotRing(self._layout.ring("accumulator", name))
            found[group] = self._accumulators[name].take()
        order = self._chunks.order
        place = order.index(self._chunks.rank)
        for group in self._trained(layer) if place else ():
            slot = found[group]
            target = Access(slot, self._accumulated(group, 0))
            what = HandedOn("sums", self._number(layer), order[place - 1], taken=True)
            self._chunks.take(self._moved("fetch", group, slot, what, layer.groups.index(group)), target)
        return {group: found[group] for group in self._trained(layer)}

    def finish(self, group: int, part: int, accumulator: int) -> None:
        """Hand an accumulator on, or store the gradient where all chunks have been added."""
        layer, rank = self._at_work, self._chunks.rank
        assert layer is not None, "accumulators come first"
        order = self._chunks.order
        following = order[order.index(rank) + 1 :][:1]
        if not following:
            super().finish(group, part, accumulator)
            return
        what, number = HandedOn("sums", self._number(layer), rank, taken=False), layer.groups.index(group)
        taken = self._chunks.semaphores.handed(what._replace(taken=True), number)._replace(of=following[0])
        source = Access(accumulator, self._accumulated(group, part))
        self._chunks.leave(self._moved("offload", group, accumulator, what, number), source, taken=taken)

    def _moved(self, verb: str, group: int, slot: int, what: HandedOn, number: int) -> Moved:
        name, content = CommandName(verb, "sums", self._name(group)), f"sums {what.layer} {group} {what.giver}"
        return Moved(name, content, [self._region(group, slot, what.giver)], what, number)

    def _name(self, group: int) -> str:
        return self._context.model.groups[group].name

    def _class(self, group: int) -> str:
        return self._context.model.groups[group].slot_class

    def _number(self, layer: LayerSpec) -> int:
        return self._context.model.layers.index(layer)

    def _region(self, group: int, slot: int, giver: int) -> CopyRegion:
        num_bytes = self._layout.groups[group].part_numel * self._layout.acc_bytes
        whole = SlotKey("handed", f"sums {giver} {self._class(group)}", memory="node")
        return CopyRegion(slot, 0, self._layout.slot_of(whole._replace(within=("bytes", num_bytes))), 0, num_bytes)


class ContextRound(RoundLowering):
    """A round of which this rank runs some chunks."""

    context: ChunksContext
    gradients: ChunksGradients

    def __init__(self, layout: Layout, shape: RoundShape, kind: RoundKind) -> None:
        ranks = layout.plan.request.ranks
        self._wave = kind.wave or Wave(0, ranks, 1)
        super().__init__(layout, shape, kind)
        self._windows = WindowsHandedOn(self.context)

    def make_context(self) -> ChunksContext:
        return ChunksContext(self.layout, self.shape, self.builder, self._wave)

    def make_gradients(self, updated: object) -> ChunksGradients:
        return ChunksGradients(self.context, self.kind)

    def _fetch_batch(self) -> None:
        super()._fetch_batch()
        self.builder.between_ranks(-1, signals=(self.context.semaphores.begun(),))

    def _forward_layer(self, index: int, layer: LayerSpec) -> None:
        if self.context.chunks:
            super()._forward_layer(index, layer)

    def _forward_chunk(self, index: int, c: int, at: StagePart, weights: dict[int, int]) -> None:
        carries = self.model.layers[index].kind == "block" and self._windows.carries(index)
        if carries and c == self.context.chunks.start and self._windows.comes_from_before(c):
            self._windows.take_rows(index)
        super()._forward_chunk(index, c, at, weights)
        if carries and self._windows.goes_on(c):
            self._windows.leave_rows(index, c)

    def _backward_layer(self, index: int, layer: LayerSpec) -> None:
        if self.context.chunks:
            super()._backward_layer(index, layer)

    def _refill_window(self, index: int, slices: range, weights: dict[int, int]) -> None:
        """As on one rank, from what ranks before this one have left in forward, and with gradients of the next."""
        carries = self._windows.carries(index)
        if carries and self._windows.comes_from_before(slices.start):
            self._windows.take_rows(index, again=True)
        super()._refill_window(index, slices, weights)
        if carries and self._windows.goes_on(slices[-1]):
            self._windows.take_grads(index)

    def _backward_chunk(
        self, index: int, c: int, at: StagePart, weights: dict[int, int], accumulators: dict[int, int], first: bool,
        begun: bool,
    ) -> None:  # fmt: skip
        layer = self.model.layers[index]
        first = first and self.context.order[0] == self.context.rank
        super()._backward_chunk(index, c, at, weights, accumulators, first, begun)
        carries = layer.kind == "block" and self._windows.carries(index)
        if carries and c == self.context.chunks.start and self._windows.comes_from_before(c):
            self._windows.leave_grads(index)


class ContextUpdate(SharedUpdate):
    """An update before which the first rank, which stores gradients, tells all of their sums of squares."""

    def sums_of_squares(self) -> Access:
        layout, semaphores = self.layout, ContextSemaphores(self.layout)
        trained = [g for g, spec in enumerate(layout.model.groups) if not spec.frozen]
        own = trained if self.kind.share.rank == 0 else []
        before = (signal for group in trained[:1] for signal in semaphores.updated_before(group))
        exchange_squares(self.builder, layout, own, semaphores, *before)
        return Access(layout.slot("norm_squares"), "norm squares")
