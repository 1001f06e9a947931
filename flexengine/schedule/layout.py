"""Where everything lies: the slots of both arenas that a plan implies, with offsets, before anything runs.

Planner (does it fit?), lowering (which slot?), runtime (how large is the arena?) and reports (which category?) all
read this one layout. Optimizer tiles lie over the slots of forward and backward, which are idle then; an untied
embedding's and head's slots lie over each other, with `share_edge_slots` over the blocks' as well, and with
`grads_over_weights` their gradients lie over their weights, which nobody reads once the gradient is made. Overlap is
safe: hazards follow addresses, not names.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate

from flexengine.models.in_parts import in_parts, may_be_in_parts
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan
from flexengine.schedule.commands import Memory, Slot, overlapping_slots
from flexengine.schedule.group_layout import DTYPE_BYTES, PLANE_KINDS, GroupLayout, element_bytes, group_layout
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layer_program import LayerProgram, align
from flexengine.schedule.parts import Run
from flexengine.schedule.window import WindowLayout, window_layout

SCALAR_BYTES = 8
NORM_SQUARE_BYTES = 8
"""Of one run's sum of squares."""
SCALE_BYTES = 4
"""Of the factor on one group's gradient."""
HOST_GRAD_NORM, HOST_SCALES = 0, SCALAR_BYTES
"""What the host wants to know of an update that it takes part in: offsets in their slot there, in bytes."""
RUN = "run"
"""Category of slots within planes, which take no bytes of their own."""
PARTIAL_SQUARES = 1024
"""Partial sums of squares per gradient: fixed, so that the order of the sum depends on the group's size alone."""


def norm_square_bytes(groups: Iterable[GroupLayout]) -> int:
    """Bytes of the slot for the sums of squares of all gradients, run by run."""
    return NORM_SQUARE_BYTES * sum(group.num_runs for group in groups)


def host_scalar_bytes(num_groups: int) -> int:
    """Bytes of the slot that tells the host the gradients' norm and the factor on each."""
    return HOST_SCALES + SCALE_BYTES * num_groups


class _Region:
    """Lays slots one after the other in one memory."""

    def __init__(self, slots: list[Slot], memory: Memory, start: int) -> None:
        self.slots, self.end = slots, align(start)
        self.memory: Memory = memory

    def add(self, name: str, num_bytes: int, category: str) -> None:
        self.slots.append(Slot(name, self.memory, self.end, num_bytes, category))
        self.end += align(num_bytes)

    def add_runs(self, group: GroupLayout, kind: str) -> None:
        """Slots within the last one, a plane of weights or gradients, one for each run of a group that is cut."""
        if len(group.parts) == 1 or kind not in ("weights", "grad"):
            return
        whole, width = self.slots[-1], group.element_bytes(kind)
        for run in (run for part in group.parts for run in part.runs):
            place = (whole.offset + run.first * width, run.numel * width)
            self.slots.append(Slot(run_name(whole.name, run), self.memory, *place, RUN))


def run_name(plane: str, run: Run) -> str:
    """The slot of a run within a plane's."""
    return f"{plane}@{run.number}"


class Layout:
    """Slots of both arenas for a plan. `slot(name)` gives an index into `slots`.

    model: as the plan streams it, with experts whole or in parts; given: as it was given.
    """

    def __init__(self, model: ModelSpec, plan: Plan) -> None:
        self.given, self.plan = model, plan
        self.model = model = in_parts(model) if plan.in_parts and may_be_in_parts(model) else model
        check_frozen(model, plan)
        numerics = plan.request.numerics
        self.compute_bytes = DTYPE_BYTES[numerics.compute]
        self.acc_bytes = 8 if numerics.compute == "float64" else 4
        self.groups = tuple(group_layout(g, numerics) for g in model.groups)
        self.programs = tuple(self.layer_program(i) for i in range(len(model.layers)))
        slots: list[Slot] = []
        self.gpu_bytes = self._lay_out_gpu(slots)
        self.host_bytes = self._lay_out_host(slots)
        self.slots = tuple(slots)
        self._index = {slot.name: i for i, slot in enumerate(slots)}

    @cached_property
    def overlaps(self) -> list[tuple[int, ...]]:
        """Overlapping slots, by slot index."""
        return overlapping_slots(self.slots)

    def slot(self, name: str) -> int:
        """Index of a slot by name."""
        return self._index[name]

    def has(self, name: str) -> bool:
        """Whether the plan gives such a slot."""
        return name in self._index

    def layer_program(self, layer: int) -> LayerProgram:
        """The compiled program of a layer under its save set."""
        kept = self.plan.layers[layer]
        return compile_layer(
            self.model.layers[layer], kept.keep_gpu, kept.keep_host, self.plan.chunk_tokens, self.compute_bytes
        )

    def evaluation_program(self, layer: int) -> LayerProgram:
        """The compiled program of a layer that keeps nothing."""
        return compile_layer(self.model.layers[layer], (), (), self.plan.chunk_tokens, self.compute_bytes)

    @property
    def hidden_bytes(self) -> int:
        """Bytes of one chunk of the tensor between layers."""
        return self.plan.chunk_tokens * self.model.hidden_size * self.compute_bytes

    @property
    def window_rows(self) -> int:
        """Rows of the key/value window: the longest sequence in whole chunks; 0 when no sequence is sliced."""
        if not self.plan.slices_sequences:
            return 0
        return -(-self.plan.request.max_seq_len // self.plan.chunk_tokens) * self.plan.chunk_tokens

    @property
    def num_hidden_slots(self) -> int:
        """Slots of the ring that carries hidden states: a round's chunks and two in transit."""
        return self.plan.chunks_per_round + 2

    @property
    def workspace_bytes(self) -> int:
        """What the calls of ops may take from the device allocator at one moment."""
        sliced = self.plan.slices_sequences
        return max(p.workspace_bytes + sliced * p.window_workspace_bytes for p in self.programs)

    def categories(self, memory: Memory) -> dict[str, int]:
        """Bytes by category, overlapping slots counted once (the later ones count only what reaches beyond; optimizer
        tiles, which lie over the slots of a round, come last)."""
        totals: dict[str, int] = {}
        reached = 0
        slots = (s for s in self.slots if s.memory == memory)
        for slot in sorted(slots, key=lambda s: (s.category == "optimizer slots", s.offset, -s.num_bytes)):
            fresh = max(0, align(slot.end) - max(reached, slot.offset))
            if fresh:
                totals[slot.category] = totals.get(slot.category, 0) + fresh
            reached = max(reached, align(slot.end))
        return totals

    # -- GPU ---------------------------------------------------------------------------------------------------------

    def _lay_out_gpu(self, slots: list[Slot]) -> int:
        region = _Region(slots, "gpu", 0)
        self._batch_slots(region, "gpu")
        region.add("norm_squares", norm_square_bytes(self.groups), "scalars")
        region.add("partial_squares", 4 * PARTIAL_SQUARES, "scalars")
        region.add("scales", SCALE_BYTES * len(self.groups), "scalars")
        region.add("grad_norm", SCALAR_BYTES, "scalars")
        self._resident_slots(region)
        start = region.end
        return max(self._round_slots(slots, start), self._optimizer_slots(slots, start))

    def _batch_slots(self, region: _Region, prefix: Memory) -> None:
        """Token ids, labels, positions and lengths of one round's chunks, and on the GPU their losses."""
        region.add(f"batch.{prefix}", batch_offsets(self.plan.chunks_per_round, self.plan.chunk_tokens)["end"], "batch")
        if prefix == "gpu":
            region.add("losses", 8 * self.plan.round_tokens, "batch")

    def _resident_slots(self, region: _Region) -> None:
        for group, layout, home in zip(self.model.groups, self.groups, self.plan.groups, strict=True):
            if home.weights == "gpu":
                region.add(f"weights.{group.name}", layout.plane_bytes["weights"], "resident weights")
            if home.grads == "gpu":
                region.add(f"grad.{group.name}", layout.plane_bytes["grad"], "resident gradients")
                region.add_runs(layout, "grad")
            if home.states == "gpu":
                for kind in ("remainder", "exp_avg", "exp_avg_sq"):
                    region.add(f"{kind}.{group.name}", layout.plane_bytes[kind], "resident optimizer states")

    def _round_slots(self, slots: list[Slot], start: int) -> int:
        """Slots of forward and backward; returns where they end."""
        region = _Region(slots, "gpu", start)
        block_start = region.end
        self._parameter_slots(region, {"block"}, grads_over_weights=False)
        edge_start = block_start if self.plan.share_edge_slots else region.end
        for classes in self._edge_classes():
            edge = _Region(slots, "gpu", edge_start)
            self._parameter_slots(edge, classes, self.plan.grads_over_weights)
            region.end = max(region.end, edge.end)
        self._activation_slots(region)
        return region.end

    def _edge_classes(self) -> list[set[str]]:
        """Slot classes of embedding and head, those that one layer uses together in one set.

        An untied embedding and head are never at work at the same time, so their slots lie over each other.
        """
        found: list[set[str]] = []
        for layer in self.model.layers:
            used = {self.model.groups[g].slot_class for g in layer.groups} - {"block"}
            together = [classes for classes in found if classes & used]
            found = [classes for classes in found if not classes & used]
            if used:
                found.append(used.union(*together))
        return found

    def _parameter_slots(self, region: _Region, slot_classes: set[str], grads_over_weights: bool) -> None:
        """Weight, accumulator and gradient staging slots of the given slot classes."""
        classes: dict[str, list[int]] = {}
        for i, group in enumerate(self.model.groups):
            if group.slot_class in slot_classes:
                classes.setdefault(group.slot_class, []).append(i)
        for name, members in classes.items():
            streamed = [i for i in members if self.plan.groups[i].weights == "host"]
            trained = [i for i in members if not self.model.groups[i].frozen]
            staged = [i for i in trained if self.plan.groups[i].grads == "host"]
            start, largest = region.end, self._largest("weights", streamed)
            for k in range(min(self._num_parts(streamed), self.plan.weight_slots)):
                region.add(f"weights.{name}[{k}]", largest, "weight slots")
            end, largest = region.end, self._largest("grad", staged)
            num_grads = min(self._num_parts(staged), self.plan.grad_slots)
            if grads_over_weights:
                region.end = start
                for k in range(num_grads):
                    region.add(f"grad.{name}[{k}]", largest, "gradient slots")
                region.end = max(end, region.end)
            numel = max((self.groups[i].part_numel for i in trained), default=0)
            region.add(f"accumulator.{name}", numel * self.acc_bytes, "gradient accumulators")
            for k in range(0 if grads_over_weights else num_grads):
                region.add(f"grad.{name}[{k}]", largest, "gradient slots")

    def _largest(self, kind: str, groups: list[int]) -> int:
        return max((self.groups[i].part_bytes(kind) for i in groups), default=0)

    def _num_parts(self, groups: list[int]) -> int:
        return sum(len(self.groups[i].parts) for i in groups)

    def _activation_slots(self, region: _Region) -> None:
        plan = self.plan
        for k in range(self.num_hidden_slots):
            region.add(f"hidden[{k}]", self.hidden_bytes, "hidden states")
        programs = (*self.programs, *(self.evaluation_program(i) for i in range(len(self.programs))))
        carried = max(p.carry_bytes for p in programs)
        for c in range(plan.chunks_per_round):
            region.add(f"grad_hidden[{c}]", self.hidden_bytes, "hidden states")
            if carried:
                region.add(f"carry[{c}]", carried, "hidden states")
        bounds = max(p.bounds_bytes for p in programs)
        for c in range(plan.chunks_per_round if bounds else 0):
            region.add(f"bounds[{c}]", bounds, "hidden states")
        staged = max(p.save_host_bytes for p in self.programs)
        for k in range(plan.save_slots if staged else 0):
            region.add(f"save_host[{k}]", staged, "offload slots")
        for layer, (kept, program) in enumerate(zip(plan.layers, self.programs, strict=True)):
            if not self.model.layers[layer].keeps:
                continue
            for c in range(plan.chunks_per_round):
                if kept.input_home == "gpu":
                    region.add(f"input.{layer}[{c}]", self.hidden_bytes, "kept activations")
                if program.save_gpu_bytes:
                    region.add(f"save_gpu.{layer}[{c}]", program.save_gpu_bytes, "kept activations")
        self._window_slots(region)
        region.add("scratch", self._scratch_bytes(), "scratch")

    def _window_slots(self, region: _Region) -> None:
        """Slots for what the layer in work carries along a sliced sequence, as large as the largest layer's."""
        if self.window_rows:
            found = [self.window_of(i) for i, layer in enumerate(self.model.layers) if layer.kind == "block"]
            region.add("window", max(w.num_bytes for w in found), "key/value window")
            region.add("grad_window", max(w.grad_bytes for w in found), "key/value window")

    def window_of(self, layer: int) -> WindowLayout:
        """Places of what a layer carries."""
        sizes = (self.window_rows, self.plan.chunk_tokens, self.compute_bytes)
        return window_layout(self.model.layers[layer].ops, *sizes)

    def _scratch_bytes(self) -> int:
        evaluation = {self.evaluation_program(i) for i in range(len(self.programs))}
        needs = [max(p.forward_scratch_bytes, p.backward_scratch_bytes, p.window_scratch_bytes) for p in self.programs]
        return max(*needs, *(p.forward_scratch_bytes for p in evaluation))

    def _optimizer_slots(self, slots: list[Slot], start: int) -> int:
        """Tiles of the update, over the same bytes as the round's slots; returns where they end."""
        region = _Region(slots, "gpu", start)
        if not self.plan.uses_tiles:
            return region.end
        for k in range(self.plan.optimizer_slots):
            region.add(f"tile[{k}]", self.tile_bytes, "optimizer slots")
        return region.end

    @cached_property
    def tile_offsets(self) -> dict[str, int]:
        """Byte offset of every plane kind within an optimizer tile."""
        offsets, end = {}, 0
        for kind in PLANE_KINDS:
            offsets[kind] = end
            widths = [
                element_bytes(p.dtype) for g in self.groups for s in g.segments for p in s.planes if p.kind == kind
            ]
            end += align(self.plan.optimizer_tile * max(widths, default=0))
        offsets["end"] = end
        return offsets

    @property
    def tile_bytes(self) -> int:
        """Bytes of one optimizer tile slot."""
        return self.tile_offsets["end"]

    # -- host --------------------------------------------------------------------------------------------------------

    def _lay_out_host(self, slots: list[Slot]) -> int:
        region = _Region(slots, "host", 0)
        self._batch_slots(region, "host")
        if self.plan.updates_on_cpu:
            region.add("scalars.host", host_scalar_bytes(len(self.groups)), "scalars")
        for group, layout, home in zip(self.model.groups, self.groups, self.plan.groups, strict=True):
            homes = {"weights": home.weights, "grad": home.grads}
            for kind in PLANE_KINDS:
                if homes.get(kind, home.states) == "host" and layout.plane_bytes[kind]:
                    category = {"weights": "weights", "grad": "gradients"}.get(kind, "optimizer states")
                    region.add(f"host.{kind}.{group.name}", layout.plane_bytes[kind], category)
                    region.add_runs(layout, kind)
        for layer, (kept, program) in enumerate(zip(self.plan.layers, self.programs, strict=True)):
            if not self.model.layers[layer].keeps:
                continue
            for c in range(self.plan.chunks_per_round):
                if kept.input_home == "host":
                    region.add(f"host.input.{layer}[{c}]", self.hidden_bytes, "offloaded activations")
                if program.save_host_bytes:
                    region.add(f"host.save.{layer}[{c}]", program.save_host_bytes, "offloaded activations")
        return region.end

    def run_place(self, kind: str, group: int, run: Run) -> tuple[int, int]:
        """The slot of a run within a plane, and its first element there: of a group in one part, the plane's."""
        whole = self.plane_slot(kind, group)
        if len(self.groups[group].parts) == 1:
            return whole, run.first
        return self._index[run_name(self.slots[whole].name, run)], 0

    def first_run(self, group: int) -> int:
        """The number of a group's first run among those of all groups."""
        return self._first_runs[group]

    @cached_property
    def _first_runs(self) -> list[int]:
        return [0, *accumulate(group.num_runs for group in self.groups)]

    def plane_slot(self, kind: str, group: int) -> int:
        """The persistent slot that holds a plane of a group, on whichever side the plan puts it."""
        name = self.model.groups[group].name
        for candidate in (f"{kind}.{name}", f"host.{kind}.{name}"):
            if candidate in self._index:
                return self._index[candidate]
        raise KeyError(f"no slot for plane {kind} of {name}")


def check_frozen(model: ModelSpec, plan: Plan) -> None:
    """Raise ValueError unless a plan updates what the model trains, and nothing else."""
    for group, home in zip(model.groups, plan.groups, strict=True):
        if home.trained == group.frozen:
            state = "frozen" if group.frozen else "trained"
            raise ValueError(f"{group.name} of {model.name} is {state}, but the plan has update={home.update} for it")


def batch_offsets(chunks_per_round: int, chunk_tokens: int) -> dict[str, int]:
    """Byte offsets inside a batch slot, and its `end`: ids and labels (int64), positions and cumulative lengths
    (int32).

    Rows are per chunk: chunk_tokens for the first three, chunk_tokens + 2 for cu_seqlens.
    """
    tokens, offsets, end = chunks_per_round * chunk_tokens, {}, 0
    sizes = {
        "input_ids": 8 * tokens,
        "labels": 8 * tokens,
        "positions": 4 * tokens,
        "cu_seqlens": 4 * chunks_per_round * (chunk_tokens + 2),
    }
    for name, size in sizes.items():
        offsets[name] = end
        end += align(size)
    return {**offsets, "end": end}
