"""Round-robin stages as a transport: what N ranks would run, SIMULATED together on presets; nothing here can train.

python -m bench.stages --gpu rtx4090 --gpus 4 --tokens 8192

Ranks walk the layers together, N rounds at a time, as in a split plan. But block b belongs to rank b % N, which runs it
for the chunks of all N rounds, so that its weights cross one link once and its state may lie on one GPU. Hidden states
and their gradients are handed over through the node's memory. The head is as heavy as two and a half blocks and would
hold all ranks up, so each round's head runs on a rank of its own and its gradient is relayed from round to round; the
embedding belongs to the rank of block 0. Gradients of blocks are rounded and added up at the ends of rounds, on the GPU:
so the order of sums would be that of relays with the same sizes of chunks and rounds.

Programs come from the package's own lowering, restricted to a rank's layers; the planner plans each rank's blocks as a
model of their own with a small vocabulary, and edges get the room that they need. Several sizes are tried.
"""

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from flexengine.hardware.nodes import rank_profile, with_gpus
from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB
from flexengine.models.registry import build_model, open_model
from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.ops.base import Work
from flexengine.plan import GroupPlan, Numerics, Plan, Request
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.cost.memory import gpu_required_bytes, host_required_bytes
from flexengine.planner.planner import find_plan
from flexengine.schedule.commands import Access, Command, CommandName, CopyRegion, Program, Signal, Stream
from flexengine.schedule.group_storage import GroupStorage, Segment
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape, lower_update
from flexengine.schedule.lowering.activations import ActivationLowering
from flexengine.schedule.lowering.context import StagePart
from flexengine.schedule.lowering.gradients import GradientLowering
from flexengine.schedule.lowering.round import _RoundLowering
from flexengine.schedule.lowering.stored_gradient import StoredPiece
from flexengine.schedule.packing import full_round
from flexengine.schedule.parts import Part
from flexengine.schedule.ranks_order import Event, Events, RankRun
from flexengine.schedule.ranks_simulator import _Simulation
from flexengine.schedule.relay_pieces import Piece, pieces_of
from flexengine.schedule.shares import Share
from flexengine.schedule.slots import Slot, SlotKey

SMALL_VOCABULARY = 1024
CHUNK_TOKENS = (2048, 4096, 8192, 16384)
MOST_WAVES = 64
MOST_CHUNK_LAYERS = 1200
"""Chunks times layers of a wave: more take minutes to simulate."""
SIMULATED_WAVES = 3
MOST_SEARCHES = 5
SPARE_BYTES = 128 * 2**20


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
    """The slots of a rank: a plan of its layers alone, and the places in the node's memory where chunks are handed over.

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


class HeadShare(Share):
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
            name = self.model.layers[-1 if layer else 0].name
            group = self.model.groups[-1 if layer else 0].name
            fetches = (c.index for c in commands if str(c.name) in (f"fetch weights {group}", f"fetch weights {name}"))
            fetch = next(fetches, None)
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
    stage, share = layout.stage, HeadShare(layout.stage.rank, layout.stage.size)
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


class Priced(NamedTuple):
    """A step of stages as it was simulated."""

    step_s: float
    layouts: Sequence[StageLayout]
    waves: int
    host_bytes: int
    compute_s: float

    @property
    def shown(self) -> dict[str, object]:
        """What a row tells of it. homes: groups of rank 1 by where their weights lie and what updates them."""
        plan = self.layouts[1].plan
        homes = Counter(f"weights {g.weights}, update {g.update}" for g in plan.groups[1:-1])
        return {
            "step_s": round(self.step_s, 3),
            "round": f"{self.layouts[0].stage.chunks_per_round} x {plan.chunk_tokens}",
            "waves": self.waves,
            "compute_s": round(self.compute_s, 3),
            "blocks_of_rank_1": dict(homes),
            "gpu_gib": round(max(layout.gpu_bytes for layout in self.layouts) / GIB, 1),
            "host_gib": round(self.host_bytes / GIB, 1),
        }


class Stages:
    """Prices stages for a step of `tokens` per GPU under budgets in bytes: of each GPU, of the node's host."""

    def __init__(
        self, spec: ModelSpec, profile: HardwareProfile, gpus: int, tokens: int, seq_len: int, budgets: tuple[int, int]
    ) -> None:
        self.spec, self.profile, self.gpus, self.tokens, self.seq_len = spec, profile, gpus, gpus * tokens, seq_len
        self.budgets, self.numerics = budgets, Numerics(state="bfloat16")
        small = build_model(spec.name, {**spec.hf_config, "vocab_size": SMALL_VOCABULARY})
        self._small, self._plans = small, dict[tuple, Plan | None]()
        rates = tuple((dtype, rate / gpus) for dtype, rate in profile.cpu_adamw_parameters_per_s)
        self._of_rank = replace(rank_profile(profile, gpus), cpu_adamw_parameters_per_s=rates)

    def best(self) -> Priced | None:
        """The fastest of all sizes that are tried."""
        sizes = [
            (chunk, waves)
            for chunk in CHUNK_TOKENS
            for waves in (2**k for k in range(MOST_WAVES.bit_length()))
            if self.tokens % (self.gpus * waves * chunk) == 0
            and self.tokens // (waves * chunk) * len(self.spec.layers) <= MOST_CHUNK_LAYERS
        ]
        found = [(priced, size) for size in sizes if (priced := self.priced(*size)) is not None]
        found.sort(key=lambda pair: pair[0].step_s)
        others = [self.priced(*size, lies, shares) for _, size in found[:2] for lies, shares in OTHER_CHOICES]
        return min((p for p in (*(p for p, _ in found), *others) if p), key=lambda p: p.step_s, default=None)

    def priced(self, chunk: int, waves: int, resident: bool = True, share_edges: bool = True) -> Priced | None:
        """A step of so many waves; None where no plan is found.

        resident: ranks may keep weights, gradients and states of their blocks on their GPUs. share_edges: slots of
        embedding and head lie over those of blocks.
        """
        reserved = 0
        for _ in range(MOST_SEARCHES):
            layouts = self._layouts(chunk, waves, resident, share_edges, reserved)
            if layouts is None:
                return None
            excess = max(gpu_required_bytes(layout, self._of_rank) for layout in layouts) - self.budgets[0]
            if excess <= 0:
                break
            reserved += excess + SPARE_BYTES
        else:
            return None
        host_bytes = self._host_bytes(layouts)
        return None if host_bytes > self.budgets[1] else self._simulated(layouts, waves, host_bytes)

    @property
    def _edge_state_bytes(self) -> int:
        """Bytes of all planes of embedding and head: two each of weights, remainder, gradient and both moments."""
        return 10 * (self.spec.groups[0].numel + self.spec.groups[-1].numel)

    def _layouts(
        self, chunk: int, waves: int, resident: bool, share_edges: bool, reserved: int
    ) -> list[StageLayout] | None:
        num_layers, num_chunks = len(self.spec.layers), self.tokens // (waves * chunk)
        handed = num_layers * num_chunks * chunk * self.spec.hidden_size * 2
        # a rank's own inputs on the host are counted twice: where they are handed over, and by the search
        host = (self.budgets[1] - self._edge_state_bytes - handed) // self.gpus
        request = Request(
            self.seq_len, self.tokens, self.budgets[0] - reserved, host, numerics=self.numerics, chunk_tokens=chunk,
            round_tokens=num_chunks * chunk,
        )  # fmt: skip
        if min(request.max_gpu_bytes, host) <= 0:
            return None
        found = []
        for rank in range(self.gpus):
            stage = Stage(rank, self.gpus, num_layers, num_chunks // self.gpus)
            plan = self._plan_of_blocks(stage, request, resident)
            if plan is None:
                return None
            edge = GroupPlan(update="cpu")
            homes = (edge, *(replace(home, speculative=False) for home in plan.groups[1:-1]), edge)
            plan = replace(plan, request=replace(plan.request, ranks=1), groups=homes, share_edge_slots=share_edges)
            found.append(StageLayout(self.spec.with_layers(stage.layers), plan, stage))
        return found

    def _plan_of_blocks(self, stage: Stage, request: Request, resident: bool) -> Plan | None:
        """Plan a rank's blocks. Plans of one of several ranks keep no state on the GPU."""
        blocks = len(stage.layers) - 2
        if not resident:  # what is shared then counts by equal parts, and is the rank's own here
            state = 10 * self.spec.groups[1].numel * blocks * (self.gpus - 1) // self.gpus
            request = replace(request, ranks=self.gpus, max_host_bytes=max(1, request.max_host_bytes - state))
        key = blocks, request
        if key not in self._plans:
            model = self._small.with_layers([0, *range(1, 1 + blocks), stage.head])
            self._plans[key] = find_plan(model, request, self._of_rank)
        return self._plans[key]

    def _host_bytes(self, layouts: Sequence[StageLayout]) -> int:
        """Bytes of the host with what is handed over, and the edges' state once."""
        own = sum(host_required_bytes(layout, self._of_rank) - layout.host_input_bytes for layout in layouts)
        return own + layouts[0].handed_bytes - (self.gpus - 1) * self._edge_state_bytes

    def _simulated(self, layouts: Sequence[StageLayout], waves: int, host_bytes: int) -> Priced:
        plan = layouts[0].plan
        shape = full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round)
        cost = CostModel.of(replace(plan.request, ranks=self.gpus), self.profile, plan.chunk_tokens)
        drawn, runs = min(waves, SIMULATED_WAVES), []
        for layout in layouts:
            update, first = update_of(layout), StageRound(layout, shape, first=True).train()
            runs.append([RankRun(update, 0, drawn - 1, updates=True), RankRun(first, 1, 0, updates=False)])
            if drawn > 1:
                later = StageRound(layout, shape, first=False).train()
                runs[-1] += [RankRun(later, 1, number, updates=False) for number in range(1, drawn)]
        simulation = _Simulation(StageEvents(runs, drawn), cost.rates())
        simulation.run()
        ends, compute_s = [0.0] * (drawn + 1), 0.0  # when the GPUs have ended the update, and each wave
        for event, start, end in zip(simulation.events.all, simulation.start, simulation.end, strict=True):
            place = 0 if event.run.updates else 1 + event.run.number
            if event.command.stream is not Stream.CPU:
                ends[place] = max(ends[place], end)
            if event.command.stream is Stream.COMPUTE:
                compute_s += (end - start) / len(layouts)
        step_s = ends[-1] + (waves - drawn) * (ends[-1] - ends[-2])
        return Priced(step_s, layouts, waves, host_bytes, compute_s)


OTHER_CHOICES = ((True, False), (False, True), (False, False))
"""What the best sizes are tried with as well: `resident` and `share_edges` of `Stages.priced`."""


def main() -> None:
    """Price stages for one card, number of GPUs and size of a step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="preset:llama-3.1-8b")
    parser.add_argument("--gpu", default="rtx4090", help="a preset")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=8192, help="of each GPU and step")
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--gpu-gib", type=float, default=23.0, help="memory of each GPU")
    parser.add_argument("--host-gib", type=float, default=110.0, help="host memory for each GPU")
    args = parser.parse_args()
    budgets = int(args.gpu_gib * GIB), int(args.gpus * args.host_gib * GIB)
    profile = with_gpus(preset(args.gpu), args.gpus)
    found = Stages(open_model(args.model).spec, profile, args.gpus, args.tokens, args.seq_len, budgets).best()
    print("found no plan" if found is None else found.shown)


if __name__ == "__main__":
    main()
