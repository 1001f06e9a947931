"""A wave of rounds on one of several ranks that train in stages, and what they tell each other before an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from flexengine.models.spec import LayerSpec
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Signal, Stream
from flexengine.schedule.fixed_slots import norm_square_bytes
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.activations import ActivationLowering
from flexengine.schedule.lowering.context import RoundContext, StagePart
from flexengine.schedule.lowering.gradients import GradientLowering, InRound, nothing_in_round
from flexengine.schedule.lowering.kinds import RoundKind
from flexengine.schedule.lowering.round import RoundLowering
from flexengine.schedule.lowering.shape import RoundShape
from flexengine.schedule.lowering.stored_gradient import StoredPiece, stored_pieces
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.ranks.relay_lowering import RanksUpdate
from flexengine.schedule.ranks.stage_layout import StageLayout
from flexengine.schedule.ranks.stages import HandedOver


class StageContext(RoundContext):
    """A wave of rounds of a rank that trains in stages."""

    layout: StageLayout

    def updated_before(self, group: int) -> tuple[Signal, ...]:
        if self.model.groups[group].frozen or not self.layout.is_edge(group):
            return ()
        return (self.layout.semaphores.updated_before(head=group == self.layout.head_group),)


class StageActivations(ActivationLowering):
    """Hands chunks over where the layer before or after belongs to another rank."""

    def __init__(self, context: StageContext, round_of: list[int]) -> None:
        super().__init__(context)
        self._stages, self._stage, self._round_of = context.layout, context.layout.stage, round_of
        self._sent: dict[int, Access] = {}  # by chunk, the output that leaves for another rank

    def _input_slot(self, index: int, c: int) -> int:
        """As on one rank. The head's inputs wait there while other rounds pass the last block, so none is of a ring."""
        if index != self._stage.head:
            return super()._input_slot(index, c)
        return self._layout.slot("head_input", index=c - self._round_of.index(self._round_of[c]))

    def _owner(self, layer: int, c: int) -> int:
        return self._stage.owner(layer, self._round_of[c])

    def _giver(self, layer: int, c: int) -> int | None:
        """The other rank that a chunk's input of a layer comes from, and its gradient goes to."""
        giver = self._owner(max(0, layer - 1), c)
        return None if giver == self._stage.rank else giver

    def _taker(self, layer: int, c: int) -> int | None:
        """The other rank that a chunk's output of a layer goes to, and its gradient comes from."""
        return None if self._owner(layer + 1, c) == self._stage.rank else self._owner(layer + 1, c)

    # -- forward -----------------------------------------------------------------------------------------------------

    def receive(self, layer: int, c: int) -> None:
        """Fetch a chunk's input of a layer where another rank gives it."""
        giver = self._giver(layer, c)
        if giver is not None:
            slot = self._inputs[layer, c] = self._input_slot(layer, c)
            self._take(HandedOver(layer, c, back=False, taken=True), Access(slot, f"input {layer} {c}"), giver)

    def send(self, layer: int, c: int) -> None:
        """Leave a chunk's output of a layer where another rank takes it."""
        if c in self._sent:
            self._leave(HandedOver(layer + 1, c, back=False, taken=False), self._sent.pop(c))

    def output_of(self, index: int, c: int, keeps: bool) -> Access:
        """As on one rank, or a slot of the ring that is sent. Evaluation sends nothing."""
        if not keeps or self._taker(index, c) is None:
            return super().output_of(index, c, keeps)
        if c not in self._sent:
            self._sent[c] = Access(self._hidden.take(), f"input {index + 1} {c}")
        return self._sent[c]

    def offload(self, index: int, c: int, areas: dict[str, int]) -> None:
        """As on one rank, but for an input that lies in the node's memory already."""
        if self._lies_in_node(index):
            self.offload_saved(index, c, areas)
        else:
            super().offload(index, c, areas)

    # -- backward ----------------------------------------------------------------------------------------------------

    def receive_grad(self, layer: int, c: int) -> None:
        """Fetch the gradient of a chunk's output of a layer where another rank gives it."""
        giver = None if layer == self._stage.head else self._taker(layer, c)
        if giver is not None:
            access = Access(self._layout.slot("grad_hidden", index=c), f"grad {layer + 1} {c}")
            self._take(HandedOver(layer + 1, c, back=True, taken=True), access, giver)

    def send_grad(self, layer: int, c: int) -> None:
        """Leave the gradient of a chunk's input of a layer where another rank takes it."""
        if self._giver(layer, c) is not None:
            access = Access(self._layout.slot("grad_hidden", index=c), f"grad {layer} {c}")
            self._leave(HandedOver(layer, c, back=True, taken=False), access)

    def _fetch_input(self, index: int, c: int) -> int:
        if not self._lies_in_node(index):
            return super()._fetch_input(index, c)
        slot, place, content = self._hidden.take(), self._place(index, c), f"input {index} {c}"
        regions = [CopyRegion(place, 0, slot, 0, self._hidden_bytes(c, "input"))]
        self._builder.copy(self._name("fetch", "input", index, c), Stream.H2D, content, regions)
        return slot

    def _lies_in_node(self, layer: int) -> bool:
        on_host = self._context.plan.layers[layer].input_home == "host"
        return self._context.model.layers[layer].keeps and on_host and self._stages.is_handed(layer)

    # -- between ranks -----------------------------------------------------------------------------------------------

    def _place(self, layer: int, c: int) -> int:
        return self._layout.slot("handed", layer, c, "node")

    def _leave(self, what: HandedOver, access: Access) -> None:
        """Copy a chunk to its place in the node's memory, and say so."""
        name = self._name("offload", "grad" if what.back else "input", *what[:2])
        region = CopyRegion(access.slot, 0, self._place(*what[:2]), 0, self._hidden_bytes(what.chunk, name.subject))
        target = [Access(region.target, access.content)]
        self._builder.add_copy(name, Stream.RELAY_OUT, [access], target, (region,), args=what)
        self._builder.between_ranks(-1, signals=(self._stages.semaphores.handed(what),))

    def _take(self, what: HandedOver, access: Access, giver: int) -> None:
        """Fetch a chunk from its place when another rank has left it there."""
        name = self._name("fetch", "grad" if what.back else "input", *what[:2])
        region = CopyRegion(self._place(*what[:2]), 0, access.slot, 0, self._hidden_bytes(what.chunk, name.subject))
        # told as a write of the place, too: another rank has changed what it holds
        writes = [access, Access(region.source, access.content)]
        self._builder.add_copy(name, Stream.RELAY_IN, [], writes, (region,), args=what)
        self._builder.between_ranks(-1, awaits=(self._stages.semaphores.taken(what, giver),))


class StageGradients(GradientLowering):
    """Adds blocks' gradients up over the rounds of a wave on the GPU, and relays the head's from rank to rank."""

    def __init__(self, context: StageContext, kind: RoundKind) -> None:
        super().__init__(context, kind, nothing_in_round(context.layout))
        self._stages, self._last_before = context.layout, kind.wave.last_before if kind.wave else 0
        self._kept: dict[int, int | None] = {}  # by group, the staging slot of the wave's rounds

    def finish_round(self, group: int, accumulator: int, number: int, count: int) -> None:
        """Round a block's or the embedding's accumulator of one of the wave's rounds into the stored gradient.

        What is stored stays on the GPU until the last of `count` rounds, and then goes home.
        """
        [stored] = stored_pieces(self._context, group, 0)
        if number == 0:
            self._kept[group] = self._fetch_stored(stored, not self._first)
        staging, has_previous = self._kept[group], not self._first or number > 0
        self._round(stored, Access(accumulator, self._accumulated(group, 0)), has_previous, staging)
        if number + 1 == count and staging is not None:
            self._send_home(stored, staging)

    def relay(self, group: int, accumulator: int) -> None:
        """Add the head's accumulator of this rank's round to what the round before has stored."""
        has_previous = not self._first or self._stages.stage.rank > 0
        for stored in stored_pieces(self._context, group, 0):
            staging = self._staging_slot(group)
            if has_previous:
                self._fetch_relayed(stored, staging)
            self._round(stored, Access(accumulator, self._accumulated(group, 0)), has_previous, staging)
            name = CommandName("offload", "grad", stored.name)
            self._builder.copy(name, Stream.RELAY_OUT, stored.content, stored.regions_home(staging))
            self._builder.between_ranks(-1, signals=(self._stages.semaphores.relayed(stored.number),))

    def _have_squares(self) -> None:
        last = self._stages.stage.rank == len(self._context.shape.counts) - 1  # it ran the wave's last round
        _exchange_squares(self._builder, self._stages, last)

    def _fetch_relayed(self, stored: StoredPiece, staging: int) -> None:
        for home, _ in stored.homes:
            self._builder.holds(home, stored.content)
        back = [region.reversed for region in stored.regions_home(staging)]
        self._builder.copy(CommandName("fetch", "grad", stored.name), Stream.RELAY_IN, stored.content, back)
        rank = self._stages.stage.rank
        awaits = self._stages.semaphores.relayed_before(stored.number, rank, self._last_before)
        self._builder.between_ranks(-1, awaits=(awaits,))


class StageRound(RoundLowering):
    """Walks the layers for a wave of rounds, and runs those that belong to the rank.

    The shape is of all rounds, with the number of chunks of each.
    """

    layout: StageLayout
    context: StageContext
    gradients: StageGradients

    def __init__(self, layout: StageLayout, shape: RoundShape, kind: RoundKind) -> None:
        super().__init__(layout, shape, kind)
        self._stage = layout.stage
        round_of = [number for number, count in enumerate(shape.counts) for _ in range(count)]
        chunks = range(len(shape.chunks))
        self._rounds = [[c for c in chunks if round_of[c] == number] for number in range(len(shape.counts))]
        self.handed = self.activations = StageActivations(self.context, round_of)

    def make_context(self) -> StageContext:
        return StageContext(self.layout, self.shape, self.builder)

    def make_gradients(self, updated: InRound) -> StageGradients:
        return StageGradients(self.context, self.kind)

    def _rounds_of(self, layer: int) -> list[list[int]]:
        """The chunks of each round that the rank runs a layer for."""
        rounds = enumerate(self._rounds)
        return [chunks for number, chunks in rounds if self._stage.owner(layer, number) == self._stage.rank]

    def _forward_layer(self, index: int, layer: LayerSpec) -> None:
        if self._rounds_of(index):
            super()._forward_layer(index, layer)

    def _forward_chunk(self, index: int, c: int, at: StagePart, weights: dict[int, int]) -> None:
        self.handed.receive(index, c)
        super()._forward_chunk(index, c, at, weights)
        self.handed.send(index, c)

    def _backward_layer(self, index: int, layer: LayerSpec) -> None:
        rounds = self._rounds_of(index)
        if not rounds:
            return
        if layer.kind == "head":
            for c in rounds[0]:
                self.handed.receive(index, c)
        super()._backward_layer(index, layer)

    def _backward_stage(
        self, index: int, layer: LayerSpec, at: StagePart, weights: dict[int, int], begun: bool
    ) -> None:
        assert not begun, "layers that run in several steps have experts in parts"
        accumulators, rounds = self.gradients.accumulators(layer, begun), self._rounds_of(index)
        for number, chunks in enumerate(rounds):
            self._backward_chunks(index, layer, at, weights, accumulators, begun, chunks)
            for group, slot in accumulators.items():
                if layer.kind == "head":
                    self.gradients.relay(group, slot)
                else:
                    self.gradients.finish_round(group, slot, number, len(rounds))

    def _backward_chunk(
        self, index: int, c: int, at: StagePart, weights: dict[int, int], accumulators: dict[int, int], first: bool,
        begun: bool,
    ) -> None:  # fmt: skip
        self.handed.receive_grad(index, c)
        super()._backward_chunk(index, c, at, weights, accumulators, first, begun)
        self.handed.send_grad(index, c)


class StageUpdate(RanksUpdate):
    """An update of a rank's own blocks, and of its share of embedding and head."""

    layout: StageLayout

    def sums_of_squares(self) -> Access:
        """Exchange them through the node's memory, unless the last round did."""
        if self.kind.norm_known:
            return super().sums_of_squares()
        _exchange_squares(self.builder, self.layout, self.kind.last)
        return Access(self.layout.slot("norm_squares"), "norm squares")

    def signal_updates(self) -> None:
        """Tell of the updates that all ranks make together: their shares of embedding and head."""
        for head, group in enumerate(self.layout.edges):
            end = self.ends.get(group, self.before_updates)
            self.builder.between_ranks(end, signals=(self.layout.semaphores.updated(head > 0),))


def _exchange_squares(builder: ProgramBuilder, layout: StageLayout, last: bool) -> None:
    """As `exchange_squares`. last: this rank ran the step's last round, so that it has the sum of the head's
    gradient."""
    trained = [group for group, spec in enumerate(layout.model.groups) if not spec.frozen]
    own = [g for g in trained if (last if g == layout.head_group else layout.owns_group(g))]
    exchange_squares(builder, layout, own, layout.semaphores, layout.semaphores.updated_before(head=True))


class NormSemaphores(Protocol):
    """By which ranks tell that they have stored sums of squares."""

    def norm(self) -> Signal: ...
    def all_norms(self) -> tuple[Signal, ...]: ...


def exchange_squares(
    builder: ProgramBuilder, layout: Layout, own: Sequence[int], semaphores: NormSemaphores, *before: Signal
) -> None:
    """Leave the sums of squares of this rank's gradients in the node's memory, and fetch those of all ranks.

    own: groups whose gradients end on this rank. before: by which the others have told that they have fetched those of
    the step before.
    """
    here, whole, content = layout.slot("norm_squares"), layout.place("norm_squares", memory="node"), "norm squares"
    found: dict[int, CopyRegion] = {}
    start = 0
    for group, stored in enumerate(layout.groups):
        num_bytes = norm_square_bytes([stored])
        if not layout.model.groups[group].frozen:
            place = layout.slot_of(whole.key._replace(within=("group", group)))
            found[group] = CopyRegion(here, start, place, 0, num_bytes)
            builder.holds(place, content)
        start += num_bytes
    if builder.last_writer(here) < 0:
        builder.holds(here, content)
    regions = tuple(found[group] for group in own)
    if regions:
        reads, writes = [Access(here, content)], [Access(region.target, content) for region in regions]
        builder.add_copy(CommandName("offload", "norm"), Stream.D2H, reads, writes, regions)
        builder.between_ranks(-1, awaits=before, signals=(semaphores.norm(),))
    back = tuple(region.reversed for region in found.values())
    places = [Access(region.source, content) for region in back]
    builder.add_copy(CommandName("fetch", "norm"), Stream.H2D, places, [Access(here, content)], back)
    builder.between_ranks(-1, awaits=semaphores.all_norms())
