"""Programs of ranks under round-robin stages, from the package's own lowering; `bench/stages.py` prices them.

A wave is `size` rounds that ranks walk through the layers together. A rank runs its own blocks for the chunks of all of
them, the head for those of one round; the rank of block 0 runs the embedding.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import Work
from flexengine.plan import Plan
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Program, Signal, Stream
from flexengine.schedule.group_storage import GroupStorage, Segment
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape, lower_update
from flexengine.schedule.lowering.activations import ActivationLowering
from flexengine.schedule.lowering.context import StagePart
from flexengine.schedule.lowering.gradients import GradientLowering
from flexengine.schedule.lowering.round import _RoundLowering
from flexengine.schedule.lowering.stored_gradient import StoredPiece
from flexengine.schedule.parts import Part
from flexengine.schedule.ranks_order import Event, Events
from flexengine.schedule.relay_pieces import Piece, pieces_of
from flexengine.schedule.shares import Share
from flexengine.schedule.slots import Slot, SlotKey


class Stage(NamedTuple):
    """What one of `size` ranks runs of a model with so many layers, in waves of `size` rounds of so many chunks."""

    rank: int
    size: int
    num_layers: int
    chunks_per_round: int

    @property
    def head(self) -> int:
        """The layer that is divided by rounds."""
        return self.num_layers - 1

    @property
    def layers(self) -> list[int]:
        """The layers whose parameters the rank knows: its blocks, and the edges, of which all update a share."""
        return [i for i in range(self.num_layers) if i in (0, self.head) or self.owner(i, 0) == self.rank]

    def owner(self, layer: int, chunk: int) -> int:
        """The rank that runs a layer for a chunk of the wave."""
        if layer == self.head:
            return chunk // self.chunks_per_round
        return max(0, layer - 1) % self.size


class Cells:
    """Numbers of the cells that ranks raise; all of them are told by their rank."""

    def __init__(self, num_layers: int, num_chunks: int) -> None:
        self._layers, self._chunks = num_layers, num_chunks
        self.norm = 2 * num_layers * num_chunks
        self._updated = self.norm + 1

    def handed(self, layer: int, chunk: int, back: bool) -> int:
        """A chunk's input of a layer lies in the node's memory, or the gradient of that."""
        return 2 * (layer * self._chunks + chunk) + back

    def updated(self, layer: int) -> int:
        """A rank has updated its share of the embedding or the head."""
        return self._updated + (layer > 0)

    def relayed(self, piece: int) -> int:
        """A piece of the head's gradient is stored."""
        return self._updated + 2 + piece


class StageLayout(Layout):
    """The slots of a rank: those of a plan of its layers alone, and where chunks are handed over in the node's memory.

    One place serves a chunk's input of a layer, and then its gradient, which the reader of the input writes.
    """

    def __init__(self, model: ModelSpec, plan: Plan, stage: Stage) -> None:
        super().__init__(model, plan)
        self.stage, self.cells = stage, Cells(stage.num_layers, plan.chunks_per_round)
        places = [(b, c) for b in range(1, stage.num_layers) for c in range(plan.chunks_per_round)]
        self.handed_bytes = len(places) * self.hidden_bytes
        self.slots = (
            *self.slots,
            *(
                Slot(SlotKey("handed", b, c, "node"), number * self.hidden_bytes, self.hidden_bytes, "handed over")
                for number, (b, c) in enumerate(places)
            ),
        )
        self._index = {slot.key: i for i, slot in enumerate(self.slots)}

    @property
    def head_group(self) -> int:
        """The group whose gradient is relayed."""
        return len(self.groups) - 1

    def _pieces_of(self, group: GroupStorage, part: Part) -> tuple[Piece, ...]:
        if group is self.groups[self.head_group]:
            return pieces_of(part, group.element_bytes("grad"))
        return super()._pieces_of(group, part)

    def piece_places(self, group: int, piece: Piece) -> list[tuple[int, int]]:
        """As of a layout: all pieces of the head's gradient lie in its plane."""
        if group == self.head_group:
            plane = self.plane_slot("grad", group)
            return [(plane, run.first) for run in piece.runs]
        return super().piece_places(group, piece)

    @property
    def host_input_bytes(self) -> int:
        """Bytes of layers' inputs that the plan keeps on the host: they lie where they were handed over."""
        return sum(slot.num_bytes for slot in self.slots if slot.key.role == "input" and slot.memory == "host")


class EdgeShare(Share):
    """A share of the edges' segments, and the whole of all others."""

    edges: tuple[Segment, ...] = ()

    def _is_edge(self, segment: Segment) -> bool:
        return any(segment is edge for edge in self.edges)

    def of(self, segment: Segment) -> tuple[int, int]:
        """(start, elements) of a segment that this rank updates."""
        return super().of(segment) if self._is_edge(segment) else (0, segment.numel)

    def tiles(self, segment: Segment, most: int) -> list[tuple[int, int]]:
        """The same in tiles."""
        return super().tiles(segment, most) if self._is_edge(segment) else segment.tiles(most)


class StageActivations(ActivationLowering):
    """Hands chunks over where the layer before or after belongs to another rank."""

    _output = Access(-1, "")
    _layout: StageLayout

    @property
    def _stage(self) -> Stage:
        return self._layout.stage

    def _layer(self, index: int) -> int:
        """The number in the whole model of one of the rank's layers."""
        return self._stage.layers[index]

    def giver(self, index: int, c: int) -> int | None:
        """The other rank that a chunk's input of a layer comes from, and its gradient goes to."""
        layer = self._layer(index)
        giver = self._stage.owner(layer - 1, c) if layer > 0 else self._stage.rank
        return None if giver == self._stage.rank else giver

    def taker(self, index: int, c: int) -> int | None:
        """The other rank that a chunk's output of a layer goes to, and its gradient comes from."""
        layer = self._layer(index)
        taker = self._stage.owner(layer + 1, c) if layer < self._stage.head else self._stage.rank
        return None if taker == self._stage.rank else taker

    def _hand(self, verb: str, index: int, c: int, access: Access, border: int, back: bool, giver: int | None) -> None:
        """Copy a chunk to the place of a layer's input in the node's memory and say so, or fetch it from a giver."""
        place, cell = self._layout.slot("handed", border, c, "node"), self._layout.cells.handed(border, c, back)
        region = CopyRegion(access.slot, 0, place, 0, self._hidden_bytes(c))
        name = self._name(verb, "grad" if back else "input", index, c)
        if giver is None:
            self._builder.copy(name, Stream.RELAY_OUT, access.content, [region])
            self._builder.between_ranks(-1, signals=(Signal(cell, "own", "round"),))
        else:
            self._builder.copy(name, Stream.RELAY_IN, access.content, [region.reversed])
            self._builder.between_ranks(-1, awaits=(of_rank(Signal(cell, "own", "round"), giver),))

    def receive(self, index: int, c: int) -> None:
        """Fetch a chunk's input of a layer that another rank gives."""
        giver = self.giver(index, c)
        if giver is not None:
            slot = self._inputs[index, c] = self._input_slot(index, c)
            self._hand("fetch", index, c, Access(slot, f"input {index} {c}"), self._layer(index), False, giver)

    def send(self, index: int, c: int) -> None:
        """Leave a chunk's output of a layer for another rank."""
        if self.taker(index, c) is not None:
            self._hand("offload", index, c, self._output, self._layer(index) + 1, False, None)

    def receive_grad(self, index: int, c: int) -> None:
        """Fetch the gradient of a chunk's output of a layer that another rank gives."""
        giver = self.taker(index, c)
        if giver is not None:
            access = Access(self._layout.slot("grad_hidden", index=c), f"grad {index + 1} {c}")
            self._hand("fetch", index, c, access, self._layer(index) + 1, True, giver)

    def send_grad(self, index: int, c: int) -> None:
        """Leave the gradient of a chunk's input of a layer for another rank."""
        if self.giver(index, c) is not None:
            access = Access(self._layout.slot("grad_hidden", index=c), f"grad {index} {c}")
            self._hand("offload", index, c, access, self._layer(index), True, None)

    def output_of(self, index: int, c: int, keeps: bool) -> Access:
        """As on one GPU, or a slot of the ring that is sent."""
        if self.taker(index, c) is None:
            return super().output_of(index, c, keeps)
        self._output = Access(self._hidden.take(), f"output {index} {c}")
        return self._output

    def _lies_in_node(self, index: int, c: int) -> bool:
        kept_on_host = self._context.plan.layers[index].input_home == "host"
        return self._context.model.layers[index].keeps and kept_on_host and self.giver(index, c) is not None

    def offload(self, index: int, c: int, areas: dict[str, int]) -> None:
        """As on one GPU, but for an input that lies in the node's memory already."""
        if not self._lies_in_node(index, c):
            super().offload(index, c, areas)
        elif "save_host" in areas:
            regions = self._save_regions(index, c, areas["save_host"], self._layout.slot("save", index, c, "host"))
            self._builder.copy(self._name("offload", "save", index, c), Stream.D2H, f"save_host {index} {c}", regions)

    def _fetch_input(self, index: int, c: int) -> int:
        if not self._lies_in_node(index, c):
            return super()._fetch_input(index, c)
        slot, place = self._hidden.take(), self._layout.slot("handed", self._layer(index), c, "node")
        regions = [CopyRegion(place, 0, slot, 0, self._hidden_bytes(c))]
        self._builder.copy(self._name("fetch", "input", index, c), Stream.H2D, f"input {index} {c}", regions)
        return slot


class StageGradients(GradientLowering):
    """Adds blocks' gradients up over the rounds of a wave on the GPU, and relays the head's from rank to rank."""

    _layout: StageLayout

    def end_round(self, group: int, part: int, accumulator: int, has_previous: bool) -> None:
        """Round an accumulator into the stored gradient, which stays on the GPU until the wave's last round."""
        storage, name = self._layout.groups[group], self._context.model.groups[group].name
        element_bytes = self._layout.acc_bytes + storage.element_bytes("grad") * (1 + has_previous)
        work = Work(memory_bytes=float(storage.parts[part].numel * element_bytes), kernels=2)
        reads = [Access(accumulator, self._accumulated(group, part))]
        writes = [Access(self._layout.slot("partial_squares"), "partial squares")]
        self._builder.add("finish_gradient", CommandName("add", "grad", name), Stream.COMPUTE, reads, writes, work)

    def finish(self, group: int, part: int, accumulator: int) -> None:
        """As on one GPU; ranks but the first find what the round before stored of the head's."""
        stored_none = self._first
        self._first = stored_none and not (group == self._layout.head_group and self._layout.stage.rank)
        super().finish(group, part, accumulator)
        self._first = stored_none

    def _fetch_stored(self, stored: StoredPiece, has_previous: bool) -> int | None:
        if stored.group != self._layout.head_group:
            return super()._fetch_stored(stored, has_previous)
        staging, stage = self._staging_slot(stored.group), self._layout.stage
        if has_previous:
            for home, _ in stored.homes:
                self._builder.holds(home, stored.content)
            back = [region.reversed for region in stored.regions_home(staging)]
            self._builder.copy(CommandName("fetch", "grad", stored.name), Stream.RELAY_IN, stored.content, back)
            signal = Signal(self._layout.cells.relayed(stored.number), "own", "round", lag=int(stage.rank == 0))
            self._builder.between_ranks(-1, awaits=(of_rank(signal, (stage.rank - 1) % stage.size),))
        return staging

    def _send_home(self, stored: StoredPiece, staging: int) -> None:
        if stored.group != self._layout.head_group:
            super()._send_home(stored, staging)
            return
        name = CommandName("offload", "grad", stored.name)
        self._builder.copy(name, Stream.RELAY_OUT, stored.content, stored.regions_home(staging))
        self._builder.between_ranks(-1, signals=(Signal(self._layout.cells.relayed(stored.number), "own", "round"),))


class StageRound(_RoundLowering):
    """A wave of rounds on one rank."""

    layout: StageLayout

    def __init__(self, layout: StageLayout, shape: RoundShape, first: bool) -> None:
        super().__init__(layout, shape, first)
        self.activations = StageActivations(self.context)
        self.gradients = StageGradients(self.context, first, {})

    def _rounds_of(self, index: int) -> list[list[int]]:
        """The chunks of each round that the rank runs a layer for."""
        stage, chunks = self.layout.stage, list(self.context.chunks)
        rounds = [chunks[c : c + stage.chunks_per_round] for c in chunks[:: stage.chunks_per_round]]
        return [found for found in rounds if stage.owner(stage.layers[index], found[0]) == stage.rank]

    def _forward_layer(self, index: int, layer: LayerSpec) -> None:
        if self._rounds_of(index):
            super()._forward_layer(index, layer)

    def _forward_chunk(self, index: int, c: int, at: StagePart, weights: dict[int, int]) -> None:
        self.activations.receive(index, c)
        super()._forward_chunk(index, c, at, weights)
        self.activations.send(index, c)

    def _backward_layer(self, index: int, layer: LayerSpec) -> None:
        if not self._rounds_of(index):
            return
        if layer.kind == "head":
            for c in self._rounds_of(index)[0]:
                self.activations.receive(index, c)
        super()._backward_layer(index, layer)

    def _backward_stage(
        self, index: int, layer: LayerSpec, at: StagePart, weights: dict[int, int], begun: bool
    ) -> None:
        accumulators, rounds = self.gradients.accumulators(layer, begun), self._rounds_of(index)
        for number, chunks in enumerate(rounds):
            order = chunks if layer.kind == "head" else chunks[::-1]
            for c in order:
                self.activations.receive_grad(index, c)
                self._backward_chunk(index, c, at, weights, accumulators, c == order[0], begun)
                self.activations.send_grad(index, c)
            for group, slot in accumulators.items():
                if number + 1 < len(rounds):
                    self.gradients.end_round(group, at.part, slot, has_previous=number > 0)
                else:
                    self.gradients.finish(group, at.part, slot)

    def train(self) -> Program:
        """The wave's program. The last command tells that all squares are known; edges wait for all shares of them."""
        program, cells = super().train(), self.layout.cells
        commands = list(program.commands)
        last = max(command.index for command in commands if command.stream is Stream.COMPUTE)
        commands[last] = replace(commands[last], signals=(Signal(cells.norm, "own", "round"),))
        for layer in (0, self.layout.stage.head):
            name = CommandName("fetch", "weights", self.model.groups[-1 if layer else 0].name)
            fetch = next((command.index for command in commands if command.name == name), None)
            if fetch is not None:
                awaits = Signal(cells.updated(layer), "all", "update", lag=1)
                commands[fetch] = replace(commands[fetch], awaits=(*commands[fetch].awaits, awaits))
        return replace(program, commands=tuple(commands))


def of_rank(signal: Signal, rank: int) -> Signal:
    """A signal of the row of a rank, which the package knows no name for."""
    row: Any = rank
    return signal._replace(of=row)


def update_of(layout: StageLayout) -> Program:
    """The update of a rank's blocks, and of its shares of embedding and head."""
    stage, share = layout.stage, EdgeShare(layout.stage.rank, layout.stage.size)
    share.edges = (*layout.groups[0].segments, *layout.groups[-1].segments)
    program = lower_update(layout, share=share)
    commands = list(program.commands)
    for layer, group in ((0, 0), (stage.head, layout.head_group)):
        last = max(c.index for c in commands if c.kind == "update" and c.args.group == group)
        signal = Signal(layout.cells.updated(layer), "own", "update")
        commands[last] = replace(commands[last], signals=(*commands[last].signals, signal))
    return replace(program, commands=tuple(commands))


class StageEvents(Events):
    """Events whose signals may name the rank. All runs begin with the update of the step before, when all are ready."""

    def _awaited(self, event: Event) -> Iterator[int]:
        for signal in event.command.awaits:
            value = self._value(event.run, signal.clock) - signal.lag
            for row in range(self._size) if signal.of == "all" else (signal.of,):
                if value > 0:
                    yield next(i for reached, i in self._raised[signal.cell, int(row)] if reached >= value)
