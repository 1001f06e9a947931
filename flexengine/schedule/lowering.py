"""From a plan and the shape of a round to a program: the story of forward, turn and backward, layer by layer.

A round is layer-major: every layer's weights cross the link once forward and once backward for all chunks of the
round, part by part where they come in parts: then all chunks pass through a stage of the layer before the next. Copies
are issued just before the command that needs them; the streams run them as early as slots allow.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from flexengine.models.spec import LayerSpec
from flexengine.ops.base import Work
from flexengine.schedule.commands import (
    Access,
    CopyRegion,
    FinishGradient,
    GroupScale,
    LayerCall,
    Program,
    ProgramBuilder,
    Slot,
    StoredRun,
    Stream,
    overlapping_slots,
)
from flexengine.schedule.expert_fetch import fetch_of_experts
from flexengine.schedule.layer_program import LayerProgram, Stage
from flexengine.schedule.layout import HOST_SCALES, SCALE_BYTES, Layout, batch_offsets
from flexengine.schedule.update_lowering import cpu_groups, lower_cpu_update


class ChunkShape(NamedTuple):
    """Size of one chunk: tokens, mean sequence length (for costs), and for a slice of a long sequence the first and
    last chunk of that sequence in the round and the position of its first token."""

    tokens: int
    seq_len: int
    first_slice: int = -1
    last_slice: int = -1
    start: int = 0

    @property
    def is_slice(self) -> bool:
        """True when the chunk is a part of a sequence that is longer than a chunk."""
        return self.first_slice >= 0


class RoundShape(NamedTuple):
    """The chunks of one round. Programs depend on nothing else of a batch, so they are lowered once per shape."""

    chunks: tuple[ChunkShape, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all chunks."""
        return sum(chunk.tokens for chunk in self.chunks)


def lower_round(layout: Layout, shape: RoundShape, first: bool, updates: bool = False) -> Program:
    """Forward, loss and backward of one round. `first`: no gradients are stored yet in this step.

    updates: what the CPU updates, it updates here as soon as its gradient has reached the host, so this is the last
    round of a step whose gradients are not clipped.
    """
    return _RoundLowering(layout, shape, first, updates).train()


def lower_evaluation(layout: Layout, shape: RoundShape) -> Program:
    """Forward and loss of one round; keeps nothing."""
    return _RoundLowering(layout, shape, first=True).evaluate()


class _ScaleSlots(NamedTuple):
    """Where the factor on one group's gradient lies on both sides."""

    device: int
    host: int


def _scale_slots(layout: Layout) -> tuple[dict[int, _ScaleSlots], tuple[Slot, ...]]:
    """Slots of their own for the factors that the CPU needs, within those of all, so that none waits for another's use;
    and the layout's slots with these behind them."""
    slots, found = list(layout.slots), {}
    device, host = layout.slots[layout.slot("scales")], layout.slots[layout.slot("scalars.host")]
    for group in cpu_groups(layout):
        found[group] = _ScaleSlots(len(slots), len(slots) + 1)
        for whole, start in ((device, 0), (host, HOST_SCALES)):
            offset = whole.offset + start + SCALE_BYTES * group
            slots.append(Slot(f"{whole.name}@{group}", whole.memory, offset, SCALE_BYTES, "scalars"))
    return found, tuple(slots)


@dataclass
class _Ring:
    """Slots of one kind handed out in turn."""

    slots: list[int]
    next: int = 0

    def take(self) -> int:
        slot = self.slots[self.next % len(self.slots)]
        self.next += 1
        return slot


class _Turn(NamedTuple):
    """A stage of a layer with one of its parts. opens, closes: the layer's first or last; in_parts: one of several
    stages that runs with parts beyond the first."""

    stage: Stage
    number: int
    part: int
    opens: bool
    closes: bool

    @property
    def in_parts(self) -> bool:
        return self.part > 0


def _turns(stages: tuple[Stage, ...]) -> list[_Turn]:
    """Stages with their parts, in order."""
    pairs = [(stage, number, part) for number, stage in enumerate(stages) for part in stage.parts]
    return [_Turn(*pair, opens=i == 0, closes=i == len(pairs) - 1) for i, pair in enumerate(pairs)]


class _RoundLowering:
    def __init__(self, layout: Layout, shape: RoundShape, first: bool, updates: bool = False) -> None:
        self.layout, self.plan, self.model, self.shape = layout, layout.plan, layout.model, shape
        self.scales: dict[int, _ScaleSlots] = {}
        slots, overlaps = layout.slots, layout.overlaps
        if updates and self.plan.updates_on_cpu:
            self.scales, slots = _scale_slots(layout)
            overlaps = overlapping_slots(slots)
        self.builder = ProgramBuilder("round", slots, overlaps)
        self.chunks = range(len(shape.chunks))
        self.hidden = _Ring([layout.slot(f"hidden[{k}]") for k in range(layout.num_hidden_slots)])
        self.staging = _Ring(self._numbered("save_host"))
        self.weight_pools: dict[str, dict[int, tuple[int, int] | None]] = {}
        self.grad_rings: dict[str, _Ring] = {}
        self.first, self.stored = first, set[tuple[int, int]]()
        self.inputs: dict[tuple[int, int], int] = {}
        self.carried: dict[int, str] = {}
        self.routed: dict[int, str] = {}

    def _numbered(self, prefix: str) -> list[int]:
        found = []
        while self.layout.has(f"{prefix}[{len(found)}]"):
            found.append(self.layout.slot(f"{prefix}[{len(found)}]"))
        return found

    # -- the story ---------------------------------------------------------------------------------------------------

    def train(self) -> Program:
        """All layers forward, the head with its loss, all layers backward."""
        self._fetch_batch()
        for index, layer in enumerate(self.model.layers):
            if layer.kind != "head":
                self._forward_layer(index, layer)
        for index in reversed(range(len(self.model.layers))):
            if self.model.layers[index].has_backward:
                self._backward_layer(index, self.model.layers[index])
        return self.builder.build()

    def evaluate(self) -> Program:
        """All layers forward, keeping nothing; the head writes losses."""
        self._fetch_batch()
        for index, layer in enumerate(self.model.layers):
            for at in _turns(self.layout.evaluation_program(index).forward_stages):
                weights = self._acquire_weights(layer, at)
                for c in self.chunks:
                    self._evaluate_chunk(index, layer, c, at, weights)
        return self.builder.build()

    # -- batch -------------------------------------------------------------------------------------------------------

    def _fetch_batch(self) -> None:
        source, target = self.layout.slot("batch.host"), self.layout.slot("batch.gpu")
        size = batch_offsets(self.plan.chunks_per_round, self.plan.chunk_tokens)["end"]
        self.builder.holds(source, "batch")
        self.builder.copy("fetch batch", Stream.H2D, "batch", [CopyRegion(source, 0, target, 0, size)])

    # -- weights -----------------------------------------------------------------------------------------------------

    def _acquire_weights(self, layer: LayerSpec, at: _Turn) -> dict[int, int]:
        """Slots that hold this turn's part of the layer's groups, fetching what is not on the GPU."""
        return {group: self._acquire_part(group, at, keep=layer.groups) for group in layer.groups}

    def _acquire_part(self, group: int, at: _Turn, keep: tuple[int, ...]) -> int:
        spec, part = self.model.groups[group], at.part
        if self.plan.groups[group].weights == "gpu":
            slot = self.layout.slot(f"weights.{spec.name}")
            self.builder.holds(slot, self._weights_content(group, part))
            return slot
        if spec.slot_class not in self.weight_pools:
            slots = self._numbered(f"weights.{spec.slot_class}")
            self.weight_pools[spec.slot_class] = dict.fromkeys(slots)
        pool, wanted, used = self.weight_pools[spec.slot_class], (group, part), {(g, part) for g in keep}
        slot = next((s for s, held in pool.items() if held == wanted and self._still_held(s)), None)
        if slot is None:
            slot = next(s for s, held in pool.items() if held not in used or not self._still_held(s))
            self._fetch_weights(group, at, slot)
        pool.pop(slot)
        pool[slot] = wanted  # most recently used last
        return slot

    def _part_name(self, group: int, part: int) -> str:
        name = self.model.groups[group].name
        return f"{name}/{part}" if len(self.layout.groups[group].parts) > 1 else name

    def _weights_content(self, group: int, part: int) -> str:
        """What a slot with weights holds; in their home on the GPU all parts lie together."""
        resident = self.plan.groups[group].weights == "gpu"
        return f"weights {self.model.groups[group].name if resident else self._part_name(group, part)}"

    def _still_held(self, slot: int) -> bool:
        """False when an overlapping slot was written since the weights arrived."""
        writer = self.builder.last_writer(slot)
        return all(self.builder.last_writer(o) <= writer for o in self.layout.overlaps[slot] if o != slot)

    def _fetch_weights(self, group: int, at: _Turn, slot: int) -> None:
        content, layout = f"weights {self._part_name(group, at.part)}", self.layout.groups[group]
        width, regions = layout.element_bytes("weights"), []
        for run in layout.parts[at.part].runs:
            source, first = self.layout.run_place("weights", group, run)
            self.builder.holds(source, content)
            regions.append(CopyRegion(source, first * width, slot, run.start * width, run.numel * width))
        if at.in_parts and self.plan.touched_only:
            self._fetch_experts(content, regions, at)
        else:
            self.builder.copy(f"fetch {content}", Stream.H2D, content, regions)

    def _fetch_experts(self, content: str, regions: list[CopyRegion], at: _Turn) -> None:
        """Of a part's weights, those of experts that have rows in some chunk."""
        bounds = [self._bounds_slot(c) for c in self.chunks]
        args = fetch_of_experts(at.stage, at.part, regions, bounds, self.shape.num_tokens)
        reads = [Access(region.source, content) for region in regions]
        reads += [Access(self._bounds_slot(c), self.routed[c]) for c in self.chunks]
        writes = [Access(slot, content) for slot in dict.fromkeys(region.target for region in regions)]
        self.builder.add("fetch_experts", f"fetch {content}", Stream.H2D, reads, writes, args=args)

    def _bounds_slot(self, c: int) -> int:
        return self.layout.slot(f"bounds[{c}]")

    def _weight_reads(self, weights: dict[int, int], part: int) -> list[Access]:
        return [Access(slot, self._weights_content(g, part)) for g, slot in weights.items()]

    # -- forward -----------------------------------------------------------------------------------------------------

    def _forward_layer(self, index: int, layer: LayerSpec) -> None:
        for at in _turns(self.layout.programs[index].forward_stages):
            weights = self._acquire_weights(layer, at)
            for c in self.chunks:
                self._forward_chunk(index, layer, c, at, weights)

    def _output_slot(self, index: int, c: int) -> int:
        """Where layer `index` writes chunk c: the next layer's kept input, or the ring of hidden states."""
        following = index + 1
        if (following, c) not in self.inputs:
            kept_on_gpu = self.model.layers[following].keeps and self.plan.layers[following].input_home == "gpu"
            slot = self.layout.slot(f"input.{following}[{c}]") if kept_on_gpu else self.hidden.take()
            self.inputs[following, c] = slot
        return self.inputs[following, c]

    def _forward_chunk(self, index: int, layer: LayerSpec, c: int, at: _Turn, weights: dict[int, int]) -> None:
        program = self.layout.programs[index]
        areas, reads = self._input_area(index, layer, c) if at.opens else ({}, [])
        writes = []
        if "output" in at.stage.areas:
            areas["output"] = self._output_slot(index, c)
            writes.append(Access(areas["output"], f"input {index + 1} {c}"))
        if program.save_gpu_bytes and at.opens:
            areas["save_gpu"] = self.layout.slot(f"save_gpu.{index}[{c}]")
            writes.append(Access(areas["save_gpu"], f"save_gpu {index} {c}"))
        if program.save_host_bytes and at.opens:
            areas["save_host"] = self.staging.take()
            writes.append(Access(areas["save_host"], f"save_host {index} {c}"))
        self._compute("forward", index, c, at, areas, weights, reads, writes, program=program)
        if at.opens:
            self._offload(index, c, areas)

    def _input_area(self, index: int, layer: LayerSpec, c: int) -> tuple[dict[str, int], list[Access]]:
        if layer.input is None:
            return {}, []
        slot = self.inputs[index, c]
        return {"input": slot}, [Access(slot, f"input {index} {c}")]

    def _compute(
        self,
        kind: str,
        index: int,
        c: int,
        at: _Turn,
        areas: dict[str, int],
        weights: dict[int, int],
        reads: list[Access],
        writes: list[Access],
        accumulators: dict[int, int] | None = None,
        first: bool = True,
        program: LayerProgram | None = None,
    ) -> None:
        """Append a compute command with batch, weights and scratch, for slices the key/value window, and what stages
        carry."""
        chunk, program = self.shape.chunks[c], program or self.layout.programs[index]
        reads = [*reads, Access(self.layout.slot("batch.gpu"), "batch"), *self._weight_reads(weights, at.part)]
        areas["scratch"] = self.layout.slot("scratch")
        writes = [*writes, Access(areas["scratch"], "scratch")]
        if "carry" in at.stage.areas:
            self._bind_carry(kind, index, c, at, areas, reads, writes)
        if "bounds" in at.stage.areas:
            self._bind_bounds(kind, index, c, at, areas, reads, writes)
        if chunk.is_slice and self.model.layers[index].kind == "block" and not at.in_parts:
            self._bind_window(kind, index, c, areas, reads, writes)
        work = at.stage.work(chunk.tokens, chunk.seq_len, self.layout.compute_bytes)
        if not first:
            work = work.plus(at.stage.accumulation_work(self.layout.compute_bytes))
        call = LayerCall(index, c, program, areas, weights, accumulators or {}, first, at.number, at.part)
        part = f" part {at.part}" if at.in_parts else ""
        label = f"{kind} {self.model.layers[index].name}{part} chunk {c}"
        self.builder.add(kind, label, Stream.COMPUTE, reads, writes, work, args=call)

    def _bind_carry(
        self, kind: str, index: int, c: int, at: _Turn, areas: dict[str, int], reads: list[Access],
        writes: list[Access],
    ) -> None:  # fmt: skip
        """What a chunk's earlier stages left, and this one adds to."""
        areas["carry"] = self.layout.slot(f"carry[{c}]")
        if not at.opens:
            reads.append(Access(areas["carry"], self.carried[c]))
        self.carried[c] = f"carry {index} {c} after {kind} stage {at.number} part {at.part}"
        writes.append(Access(areas["carry"], self.carried[c]))

    def _bind_bounds(
        self, kind: str, index: int, c: int, at: _Turn, areas: dict[str, int], reads: list[Access],
        writes: list[Access],
    ) -> None:  # fmt: skip
        """Which rows are whose expert's: the first stage says, the others read."""
        areas["bounds"] = self._bounds_slot(c)
        if at.opens:
            self.routed[c] = f"bounds {index} {c} by {kind}"
        (writes if at.opens else reads).append(Access(areas["bounds"], self.routed[c]))

    def _bind_window(
        self, kind: str, index: int, c: int, areas: dict[str, int], reads: list[Access], writes: list[Access]
    ) -> None:
        chunk = self.shape.chunks[c]
        areas["window"] = self.layout.slot("window")
        sequence = f"window {index} {chunk.first_slice}"
        if kind == "backward":
            areas["grad_window"] = self.layout.slot("grad_window")
            reads.append(Access(areas["window"], f"{sequence} to {chunk.last_slice}"))
            if c != chunk.last_slice:
                reads.append(Access(areas["grad_window"], f"grad {sequence} from {c + 1}"))
            writes.append(Access(areas["grad_window"], f"grad {sequence} from {c}"))
            return
        if c != chunk.first_slice:
            reads.append(Access(areas["window"], f"{sequence} to {c - 1}"))
        writes.append(Access(areas["window"], f"{sequence} to {c}"))

    def _evaluate_chunk(self, index: int, layer: LayerSpec, c: int, at: _Turn, weights: dict[int, int]) -> None:
        areas, reads = self._input_area(index, layer, c) if at.opens else ({}, [])
        writes = []
        if layer.kind == "head":
            writes.append(Access(self.layout.slot("losses"), f"losses {c}"))
        elif "output" in at.stage.areas:
            if (index + 1, c) not in self.inputs:
                self.inputs[index + 1, c] = self.hidden.take()
            areas["output"] = self.inputs[index + 1, c]
            writes.append(Access(areas["output"], f"input {index + 1} {c}"))
        program = self.layout.evaluation_program(index)
        self._compute("evaluate", index, c, at, areas, weights, reads, writes, program=program)

    # -- activations to and from the host ----------------------------------------------------------------------------

    def _offload(self, index: int, c: int, areas: dict[str, int]) -> None:
        """Send a chunk's input and kept outputs to the host where the plan says so."""
        if self.model.layers[index].keeps and self.plan.layers[index].input_home == "host":
            regions = [CopyRegion(areas["input"], 0, self._host("input", index, c), 0, self._hidden_bytes(c))]
            self.builder.copy(f"offload input {index} {c}", Stream.D2H, f"input {index} {c}", regions)
        if "save_host" in areas:
            regions = self._save_regions(index, c, areas["save_host"], self._host("save", index, c))
            self.builder.copy(f"offload save {index} {c}", Stream.D2H, f"save_host {index} {c}", regions)

    def _host(self, kind: str, index: int, c: int) -> int:
        return self.layout.slot(f"host.{kind}.{index}[{c}]")

    def _hidden_bytes(self, c: int) -> int:
        return self.shape.chunks[c].tokens * self.model.hidden_size * self.layout.compute_bytes

    def _save_regions(self, index: int, c: int, source: int, target: int) -> list[CopyRegion]:
        """One region per kept tensor: the rows that the chunk really has."""
        tokens, width = self.shape.chunks[c].tokens, self.layout.compute_bytes
        places = self.layout.programs[index].saved_host
        return [CopyRegion(source, p.offset, target, p.offset, p.spec.num_bytes(tokens, width)) for p in places]

    def _fetch_saved(self, index: int, c: int) -> tuple[dict[str, int], list[Access]]:
        """Bring a block's input and kept outputs of one chunk back; areas and reads for the command that uses them."""
        program, areas, reads = self.layout.programs[index], {}, []
        areas["input"] = self._fetch_input(index, c)
        reads.append(Access(areas["input"], f"input {index} {c}"))
        if program.save_gpu_bytes:
            areas["save_gpu"] = self.layout.slot(f"save_gpu.{index}[{c}]")
            reads.append(Access(areas["save_gpu"], f"save_gpu {index} {c}"))
        if program.save_host_bytes:
            areas["save_host"] = self.staging.take()
            regions = self._save_regions(index, c, self._host("save", index, c), areas["save_host"])
            self.builder.copy(f"fetch save {index} {c}", Stream.H2D, f"save_host {index} {c}", regions)
            reads.append(Access(areas["save_host"], f"save_host {index} {c}"))
        return areas, reads

    def _fetch_input(self, index: int, c: int) -> int:
        if self.plan.layers[index].input_home == "gpu":
            return self.layout.slot(f"input.{index}[{c}]")
        slot = self.hidden.take()
        regions = [CopyRegion(self._host("input", index, c), 0, slot, 0, self._hidden_bytes(c))]
        self.builder.copy(f"fetch input {index} {c}", Stream.H2D, f"input {index} {c}", regions)
        return slot

    # -- backward ----------------------------------------------------------------------------------------------------

    def _backward_layer(self, index: int, layer: LayerSpec) -> None:
        """All chunks of a layer in reverse order, then its gradients leave. The head goes in forward order: its chunks
        arrive that way, and it starts the backward pass."""
        for at in _turns(self.layout.programs[index].backward_stages):
            weights = self._acquire_weights(layer, at) if layer.input is not None else {}
            if at.stage.recomputes and not at.closes:
                for c in self.chunks:
                    areas, reads = self._fetch_saved(index, c)
                    self._compute("recompute", index, c, at, areas, weights, reads, [])
            else:
                self._backward_stage(index, layer, at, weights)
        for group in self._trained(layer):
            if group in self.scales and not any(group in below.groups for below in self.model.layers[:index]):
                self._update_by_cpu(group)

    def _trained(self, layer: LayerSpec) -> list[int]:
        return [g for g in layer.groups if not self.model.groups[g].frozen]

    def _backward_stage(self, index: int, layer: LayerSpec, at: _Turn, weights: dict[int, int]) -> None:
        names = {g: self.model.groups[g].slot_class for g in self._trained(layer)}
        accumulators = {g: self.layout.slot(f"accumulator.{name}") for g, name in names.items()}
        order = list(self.chunks) if layer.kind == "head" else list(reversed(self.chunks))
        for c in order:
            chunk = self.shape.chunks[c]
            if layer.kind == "block" and not at.in_parts and chunk.is_slice and c == chunk.last_slice:
                self._refill_window(index, c, weights)
            self._backward_chunk(index, layer, c, at, weights, accumulators, first=c == order[0])
        for group, slot in accumulators.items():
            self._finish_gradient(group, at.part, slot)

    def _refill_window(self, index: int, last: int, weights: dict[int, int]) -> None:
        """Rebuild the keys and values of a sliced sequence, first slice to last."""
        [at] = _turns(self.layout.programs[index].window_stages)
        for c in range(self.shape.chunks[last].first_slice, last + 1):
            areas, reads = self._fetch_saved(index, c)
            self._compute("fill_window", index, c, at, areas, weights, reads, [])

    def _backward_chunk(
        self, index: int, layer: LayerSpec, c: int, at: _Turn, weights: dict[int, int], accumulators: dict[int, int],
        first: bool,
    ) -> None:  # fmt: skip
        if at.in_parts:
            grad = self.layout.slot(f"grad_hidden[{c}]")
            areas, reads, writes = {"grad": grad}, [Access(grad, f"grad {index + 1} {c}")], []
        else:
            areas, reads, writes = self._backward_areas(index, layer, c)
        for group, slot in accumulators.items():
            name = self._part_name(group, at.part)
            if not first:
                reads.append(Access(slot, f"accumulator {name}"))
            writes.append(Access(slot, f"accumulator {name}"))
        self._compute("backward", index, c, at, areas, weights, reads, writes, accumulators, first)

    def _backward_areas(
        self, index: int, layer: LayerSpec, c: int
    ) -> tuple[dict[str, int], list[Access], list[Access]]:
        grad = self.layout.slot(f"grad_hidden[{c}]")
        if layer.kind == "head":
            slot = self.inputs[index, c]
            writes = [Access(grad, f"grad {index} {c}"), Access(self.layout.slot("losses"), f"losses {c}")]
            return {"input": slot, "grad": grad}, [Access(slot, f"input {index} {c}")], writes
        grad_read = Access(grad, f"grad {index + 1} {c}")
        if layer.kind == "embedding":
            return {"grad": grad}, [grad_read], []
        areas, reads = self._fetch_saved(index, c)
        areas["grad"] = grad
        # backward may overwrite what was kept: it is the last to read it
        spent = [Access(areas[a], f"spent {a} {index} {c}") for a in ("save_gpu", "save_host") if a in areas]
        return areas, [*reads, grad_read], [Access(grad, f"grad {index} {c}"), *spent]

    def _finish_gradient(self, group: int, part: int, accumulator: int) -> None:
        """Round the accumulator into the stored gradient, adding what earlier rounds stored, and send it home."""
        has_previous = not self.first or (group, part) in self.stored
        self.stored.add((group, part))
        content = f"grad of {self._part_name(group, part)}"
        runs, width = self.layout.groups[group].parts[part].runs, self.layout.groups[group].element_bytes("grad")
        pairs = [(self.layout.run_place("grad", group, run), run) for run in runs]
        if has_previous:
            for (home, _), _ in pairs:
                self.builder.holds(home, content)
        staging = None if self.plan.groups[group].grads == "gpu" else self._grad_slot(group)
        if has_previous and staging is not None:
            regions = [
                CopyRegion(home, at * width, staging, r.start * width, r.numel * width) for (home, at), r in pairs
            ]
            self.builder.copy(f"fetch {content}", Stream.H2D, content, regions)
        first = self.layout.first_run(group)
        stored = tuple(
            StoredRun(r.start, *(home if staging is None else (staging, r.start)), r.numel, first + r.number)
            for home, r in pairs
        )
        self._round_gradient(FinishGradient(group, accumulator, stored, has_previous), self._part_name(group, part))
        if staging is not None:
            regions = [
                CopyRegion(staging, r.start * width, home, at * width, r.numel * width) for (home, at), r in pairs
            ]
            self.builder.copy(f"offload {content}", Stream.D2H, content, regions)

    def _round_gradient(self, args: FinishGradient, name: str) -> None:
        content, numel = f"grad of {name}", sum(run.numel for run in args.runs)
        targets = [Access(slot, content) for slot in dict.fromkeys(run.slot for run in args.runs)]
        reads = [Access(args.accumulator, f"accumulator {name}"), *(targets if args.has_previous else [])]
        scalars = [
            Access(self.layout.slot("partial_squares"), "partial squares"),
            Access(self.layout.slot("norm_squares"), "norm squares"),
        ]
        width = self.layout.groups[args.group].element_bytes("grad")
        moved = float(numel * (self.layout.acc_bytes + width * (1 + args.has_previous)))
        work, label = Work(memory_bytes=moved, kernels=2 * len(args.runs)), f"finish {content}"
        self.builder.add("finish_gradient", label, Stream.COMPUTE, reads, [*targets, *scalars], work, args=args)

    def _update_by_cpu(self, group: int) -> None:
        """The factor on a gradient that is complete, told to the host, and AdamW there."""
        name, (device, host) = self.model.groups[group].name, self.scales[group]
        norms, content = Access(self.layout.slot("norm_squares"), "norm squares"), f"scale of {name}"
        args, work = GroupScale(group), Work(kernels=6)
        self.builder.add("scale", content, Stream.COMPUTE, [norms], [Access(device, content)], work, args=args)
        self.builder.copy(f"{content} to the host", Stream.D2H, content, [CopyRegion(device, 0, host, 0, SCALE_BYTES)])
        parts = self.layout.groups[group].parts
        grads = [
            Access(self.layout.run_place("grad", group, run)[0], f"grad of {self._part_name(group, number)}")
            for number, part in enumerate(parts)
            for run in part.runs
        ]
        lower_cpu_update(self.builder, self.layout, group, Access(host, content), grads=list(dict.fromkeys(grads)))

    def _grad_slot(self, group: int) -> int:
        name = self.model.groups[group].slot_class
        if name not in self.grad_rings:
            self.grad_rings[name] = _Ring(self._numbered(f"grad.{name}"))
        return self.grad_rings[name].take()
