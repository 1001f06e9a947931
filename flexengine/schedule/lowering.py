"""From a plan and the shape of a round to a program: the story of forward, turn and backward, layer by layer.

A round is layer-major: every layer's weights cross the link once forward and once backward for all chunks of the
round. Copies are issued just before the command that needs them; the streams run them as early as slots allow.
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
    Stream,
    overlapping_slots,
)
from flexengine.schedule.layer_program import LayerProgram
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


WORK_OF = {
    "forward": LayerProgram.forward_work,
    "evaluate": LayerProgram.forward_work,
    "backward": LayerProgram.backward_work,
    "fill_window": LayerProgram.window_work,
}
"""What a compute command costs, by its kind."""


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
        self.weight_pools: dict[str, dict[int, int | None]] = {}
        self.grad_rings: dict[str, _Ring] = {}
        self.has_gradient = set() if first else set(range(len(self.model.groups)))
        self.inputs: dict[tuple[int, int], int] = {}

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
            weights = self._acquire_weights(layer)
            for c in self.chunks:
                self._evaluate_chunk(index, layer, c, weights)
        return self.builder.build()

    # -- batch -------------------------------------------------------------------------------------------------------

    def _fetch_batch(self) -> None:
        source, target = self.layout.slot("batch.host"), self.layout.slot("batch.gpu")
        size = batch_offsets(self.plan.chunks_per_round, self.plan.chunk_tokens)["end"]
        self.builder.holds(source, "batch")
        self.builder.copy("fetch batch", Stream.H2D, "batch", [CopyRegion(source, 0, target, 0, size)])

    # -- weights -----------------------------------------------------------------------------------------------------

    def _acquire_weights(self, layer: LayerSpec) -> dict[int, int]:
        """Slots that hold the weights of the layer's groups, fetching what is not on the GPU."""
        return {group: self._acquire_group(group, keep=layer.groups) for group in layer.groups}

    def _acquire_group(self, group: int, keep: tuple[int, ...]) -> int:
        spec = self.model.groups[group]
        if self.plan.groups[group].weights == "gpu":
            slot = self.layout.slot(f"weights.{spec.name}")
            self.builder.holds(slot, f"weights {spec.name}")
            return slot
        if spec.slot_class not in self.weight_pools:
            slots = self._numbered(f"weights.{spec.slot_class}")
            self.weight_pools[spec.slot_class] = dict.fromkeys(slots)
        pool = self.weight_pools[spec.slot_class]
        slot = next((s for s, held in pool.items() if held == group and self._still_held(s)), None)
        if slot is None:
            slot = next(s for s, held in pool.items() if held not in keep or not self._still_held(s))
            self._fetch_weights(group, slot)
        pool.pop(slot)
        pool[slot] = group  # most recently used last
        return slot

    def _still_held(self, slot: int) -> bool:
        """False when an overlapping slot was written since the weights arrived."""
        writer = self.builder.last_writer(slot)
        return all(self.builder.last_writer(o) <= writer for o in self.layout.overlaps[slot] if o != slot)

    def _fetch_weights(self, group: int, slot: int) -> None:
        name, num_bytes = self.model.groups[group].name, self.layout.groups[group].plane_bytes["weights"]
        source, content = self.layout.plane_slot("weights", group), f"weights {name}"
        self.builder.holds(source, content)
        self.builder.copy(f"fetch {content}", Stream.H2D, content, [CopyRegion(source, 0, slot, 0, num_bytes)])

    def _weight_reads(self, weights: dict[int, int]) -> list[Access]:
        return [Access(slot, f"weights {self.model.groups[g].name}") for g, slot in weights.items()]

    # -- forward -----------------------------------------------------------------------------------------------------

    def _forward_layer(self, index: int, layer: LayerSpec) -> None:
        weights = self._acquire_weights(layer)
        for c in self.chunks:
            self._forward_chunk(index, layer, c, weights)

    def _output_slot(self, index: int, c: int) -> int:
        """Where layer `index` writes chunk c: the next layer's kept input, or the ring of hidden states."""
        following = index + 1
        kept_on_gpu = self.model.layers[following].keeps and self.plan.layers[following].input_home == "gpu"
        slot = self.layout.slot(f"input.{following}[{c}]") if kept_on_gpu else self.hidden.take()
        self.inputs[following, c] = slot
        return slot

    def _forward_chunk(self, index: int, layer: LayerSpec, c: int, weights: dict[int, int]) -> None:
        program = self.layout.programs[index]
        areas, reads = self._input_area(index, layer, c)
        reads += self._weight_reads(weights)
        areas["output"] = self._output_slot(index, c)
        writes = [Access(areas["output"], f"input {index + 1} {c}")]
        if program.save_gpu_bytes:
            areas["save_gpu"] = self.layout.slot(f"save_gpu.{index}[{c}]")
            writes.append(Access(areas["save_gpu"], f"save_gpu {index} {c}"))
        if program.save_host_bytes:
            areas["save_host"] = self.staging.take()
            writes.append(Access(areas["save_host"], f"save_host {index} {c}"))
        self._compute("forward", index, c, program, areas, weights, reads, writes)
        self._offload(index, c, areas)

    def _input_area(self, index: int, layer: LayerSpec, c: int) -> tuple[dict[str, int], list[Access]]:
        reads = [Access(self.layout.slot("batch.gpu"), "batch")]
        if layer.input is None:
            return {}, reads
        slot = self.inputs[index, c]
        return {"input": slot}, [*reads, Access(slot, f"input {index} {c}")]

    def _compute(
        self,
        kind: str,
        index: int,
        c: int,
        program: LayerProgram,
        areas: dict[str, int],
        weights: dict[int, int],
        reads: list[Access],
        writes: list[Access],
        accumulators: dict[int, int] | None = None,
        first: bool = True,
    ) -> None:
        """Append a compute command with its scratch and, for slices, the key/value window."""
        chunk = self.shape.chunks[c]
        areas["scratch"] = self.layout.slot("scratch")
        writes.append(Access(areas["scratch"], "scratch"))
        if chunk.is_slice and self.model.layers[index].kind == "block":
            self._bind_window(kind, index, c, areas, reads, writes)
        cost = WORK_OF[kind]
        work = cost(program, chunk.tokens, chunk.seq_len, self.layout.compute_bytes)
        if not first:
            work = work.plus(program.accumulation_work(self.layout.compute_bytes))
        call = LayerCall(index, c, program, areas, weights, accumulators or {}, first)
        label = f"{kind} {self.model.layers[index].name} chunk {c}"
        self.builder.add(kind, label, Stream.COMPUTE, reads, writes, work, args=call)

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

    def _evaluate_chunk(self, index: int, layer: LayerSpec, c: int, weights: dict[int, int]) -> None:
        areas, reads = self._input_area(index, layer, c)
        reads += self._weight_reads(weights)
        writes = []
        if layer.kind == "head":
            writes.append(Access(self.layout.slot("losses"), f"losses {c}"))
        else:
            areas["output"] = self.inputs[index + 1, c] = self.hidden.take()
            writes.append(Access(areas["output"], f"input {index + 1} {c}"))
        self._compute("evaluate", index, c, self.layout.evaluation_program(index), areas, weights, reads, writes)

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
        weights = self._acquire_weights(layer) if layer.input is not None else {}
        trained = [g for g in layer.groups if not self.model.groups[g].frozen]
        accumulators = {g: self.layout.slot(f"accumulator.{self.model.groups[g].slot_class}") for g in trained}
        order = list(self.chunks) if layer.kind == "head" else list(reversed(self.chunks))
        for c in order:
            if layer.kind == "block" and self.shape.chunks[c].is_slice and c == self.shape.chunks[c].last_slice:
                self._refill_window(index, c, weights)
            self._backward_chunk(index, layer, c, weights, accumulators, first=c == order[0])
        for group, slot in accumulators.items():
            self._finish_gradient(group, slot)
            if group in self.scales and not any(group in below.groups for below in self.model.layers[:index]):
                self._update_by_cpu(group)

    def _refill_window(self, index: int, last: int, weights: dict[int, int]) -> None:
        """Rebuild the keys and values of a sliced sequence, first slice to last."""
        for c in range(self.shape.chunks[last].first_slice, last + 1):
            areas, reads = self._fetch_saved(index, c)
            reads += [Access(self.layout.slot("batch.gpu"), "batch"), *self._weight_reads(weights)]
            self._compute("fill_window", index, c, self.layout.programs[index], areas, weights, reads, [])

    def _backward_chunk(
        self, index: int, layer: LayerSpec, c: int, weights: dict[int, int], accumulators: dict[int, int], first: bool
    ) -> None:
        areas, reads, writes = self._backward_areas(index, layer, c)
        reads += [Access(self.layout.slot("batch.gpu"), "batch"), *self._weight_reads(weights)]
        for group, slot in accumulators.items():
            name = self.model.groups[group].name
            if not first:
                reads.append(Access(slot, f"accumulator {name}"))
            writes.append(Access(slot, f"accumulator {name}"))
        program = self.layout.programs[index]
        self._compute("backward", index, c, program, areas, weights, reads, writes, accumulators, first)

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

    def _finish_gradient(self, group: int, accumulator: int) -> None:
        """Round the accumulator into the stored gradient, adding what earlier rounds stored, and send it home."""
        name, has_previous = self.model.groups[group].name, group in self.has_gradient
        self.has_gradient.add(group)
        on_gpu, content = self.plan.groups[group].grads == "gpu", f"grad of {name}"
        home, num_bytes = self.layout.plane_slot("grad", group), self.layout.groups[group].plane_bytes["grad"]
        if has_previous:
            self.builder.holds(home, content)
        stored = home if on_gpu else self._grad_slot(group)
        if has_previous and not on_gpu:
            regions = [CopyRegion(home, 0, stored, 0, num_bytes)]
            self.builder.copy(f"fetch {content}", Stream.H2D, content, regions)
        reads = [Access(accumulator, f"accumulator {name}")]
        if has_previous:
            reads.append(Access(stored, content))
        scalars = [
            Access(self.layout.slot("partial_squares"), "partial squares"),
            Access(self.layout.slot("norm_squares"), "norm squares"),
        ]
        numel = self.layout.groups[group].numel
        work = Work(memory_bytes=float(numel * self.layout.acc_bytes + num_bytes * (1 + has_previous)), kernels=2)
        args = FinishGradient(group, accumulator, stored, has_previous)
        writes = [Access(stored, content), *scalars]
        self.builder.add("finish_gradient", f"finish {content}", Stream.COMPUTE, reads, writes, work, args=args)
        if not on_gpu:
            regions = [CopyRegion(stored, 0, home, 0, num_bytes)]
            self.builder.copy(f"offload {content}", Stream.D2H, content, regions)

    def _update_by_cpu(self, group: int) -> None:
        """The factor on a gradient that is complete, told to the host, and AdamW there."""
        name, (device, host) = self.model.groups[group].name, self.scales[group]
        norms, content = Access(self.layout.slot("norm_squares"), "norm squares"), f"scale of {name}"
        args, work = GroupScale(group), Work(kernels=6)
        self.builder.add("scale", content, Stream.COMPUTE, [norms], [Access(device, content)], work, args=args)
        self.builder.copy(f"{content} to the host", Stream.D2H, content, [CopyRegion(device, 0, host, 0, SCALE_BYTES)])
        lower_cpu_update(self.builder, self.layout, group, Access(host, content))

    def _grad_slot(self, group: int) -> int:
        name = self.model.groups[group].slot_class
        if name not in self.grad_rings:
            self.grad_rings[name] = _Ring(self._numbered(f"grad.{name}"))
        return self.grad_rings[name].take()
