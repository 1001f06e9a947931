"""The story of a round: all layers forward, the head with its loss, all layers backward.

A round is layer-major: every layer's weights cross the link once forward and once backward for all chunks of the round,
part by part where they come in parts. Then all chunks pass through a stage of the layer before the next begins.
"""

from __future__ import annotations

from collections.abc import Sequence

from flexengine.models.spec import LayerSpec
from flexengine.schedule.commands import Access, CommandName, CopyRegion, Program, Stream
from flexengine.schedule.fixed_slots import batch_offsets
from flexengine.schedule.layer_program import LayerProgram
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.activations import ActivationLowering
from flexengine.schedule.lowering.compute import ComputeCall, ComputeLowering
from flexengine.schedule.lowering.context import RoundContext, StagePart, stage_parts
from flexengine.schedule.lowering.cpu_update import cpu_lanes
from flexengine.schedule.lowering.gradients import GradientLowering, InRound, in_round, nothing_in_round
from flexengine.schedule.lowering.kinds import RoundKind
from flexengine.schedule.lowering.shape import RoundShape
from flexengine.schedule.lowering.weights import WeightLowering
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.slots import overlapping_slots


class LayerWalk:
    """What training and evaluation share. Each subject (weights, activations, compute) appends its commands."""

    def __init__(self, layout: Layout, shape: RoundShape, builder: ProgramBuilder) -> None:
        self.layout, self.model, self.shape, self.builder = layout, layout.model, shape, builder
        self.context = self.make_context()
        self.weights = self.make_weights()
        self.activations = ActivationLowering(self.context)
        self.compute = ComputeLowering(self.context, self.weights)

    def make_context(self) -> RoundContext:
        """What the subjects share."""
        return RoundContext(self.layout, self.shape, self.builder)

    def make_weights(self) -> WeightLowering:
        """What brings weights."""
        return WeightLowering(self.context)

    def _fetch_batch(self) -> None:
        source, target, plan = self.layout.slot("batch", memory="host"), self.layout.slot("batch"), self.layout.plan
        size = batch_offsets(plan.num_chunks, plan.chunk_tokens, self.layout.model.num_axes)["end"]
        self.builder.holds(source, "batch")
        self.builder.copy(CommandName("fetch", "batch"), Stream.H2D, "batch", [CopyRegion(source, 0, target, 0, size)])


class EvaluationLowering(LayerWalk):
    """Forward and loss of one round, which keeps nothing. Each of several ranks runs it by itself."""

    def __init__(self, layout: Layout, shape: RoundShape) -> None:
        super().__init__(layout, shape, ProgramBuilder("round", layout.slots, layout.overlaps))

    def lower(self) -> Program:
        """All layers forward; the head writes losses."""
        self._fetch_batch()
        for index, layer in enumerate(self.model.layers):
            for at in stage_parts(self.layout.evaluation_program(index).forward_stages):
                weights = self.weights.acquire(layer, at)
                for c in self.context.chunks:
                    self._evaluate_chunk(index, c, at, weights)
        return self.builder.build()

    def _evaluate_chunk(self, index: int, c: int, at: StagePart, weights: dict[int, int]) -> None:
        areas, reads = self.activations.input_of(index, c) if at.opens else ({}, [])
        program = self.layout.evaluation_program(index)
        call = ComputeCall("evaluate", index, c, at, program, weights, areas, reads)
        if self.model.layers[index].kind == "head":
            call.writes.append(Access(self.layout.slot("losses"), f"losses {c}"))
        elif "output" in at.stage.areas:
            call.writes_area("output", self.activations.output_of(index, c, keeps=False))
        self.compute.add(call)
        if "output" in at.stage.areas and self.model.layers[index].kind != "head":
            self.activations.send_output(index, c, keeps=False)


class RoundLowering(LayerWalk):
    """Forward, loss and backward of one round of one rank. Those of several override what they do otherwise."""

    def __init__(self, layout: Layout, shape: RoundShape, kind: RoundKind) -> None:
        updated, overlaps = nothing_in_round(layout), layout.overlaps
        if kind.updates in ("in_round", "clipped") and layout.plan.updates_without_norm:
            updated = in_round(layout)
            overlaps = overlapping_slots(updated.slots)
        self.kind = kind
        super().__init__(layout, shape, ProgramBuilder("round", updated.slots, overlaps, cpu_lanes(layout)))
        self.gradients = self.make_gradients(updated)

    def make_gradients(self, updated: InRound) -> GradientLowering:
        """What finishes gradients."""
        return GradientLowering(self.context, self.kind, updated)

    def lower(self) -> Program:
        """All layers forward, the head with its loss, all layers backward."""
        self._fetch_batch()
        for index, layer in enumerate(self.model.layers):
            if layer.kind != "head":  # the head's one command is forward, loss and backward
                self._forward_layer(index, layer)
        for index in reversed(range(len(self.model.layers))):
            if self.model.layers[index].has_backward:
                self._backward(index)
        self.gradients.end_waiting()
        if self.kind.updates in ("speculative", "norm"):
            self.gradients.lower_norm()
        return self.builder.build()

    # -- forward -----------------------------------------------------------------------------------------------------

    def _forward_layer(self, index: int, layer: LayerSpec) -> None:
        for at in stage_parts(self._forward_program(index).forward_stages):
            weights = self.weights.acquire(layer, at)
            for c in self.context.chunks:
                self._forward_chunk(index, c, at, weights)

    def _forward_program(self, index: int) -> LayerProgram:
        """A block that runs again keeps what it keeps only then."""
        again = self.layout.segments.runs_again(index)
        return self.layout.evaluation_program(index) if again else self.layout.programs[index]

    def _forward_chunk(self, index: int, c: int, at: StagePart, weights: dict[int, int]) -> None:
        areas, reads = self.activations.input_of(index, c) if at.opens else ({}, [])
        call = ComputeCall("forward", index, c, at, self._forward_program(index), weights, areas, reads)
        if "output" in at.stage.areas:
            call.writes_area("output", self.activations.output_of(index, c, keeps=True))
        if at.opens and not self.layout.segments.runs_again(index):
            for area, access in self.activations.kept_by(index, c).items():
                call.writes_area(area, access)
        self.compute.add(call)
        if "output" in at.stage.areas:
            self.activations.send_output(index, c, keeps=True)
        if at.opens:
            self.activations.offload(index, c, call.areas)

    def _losses(self, c: int) -> Access:
        return Access(self.layout.slot("losses"), f"losses {c}")

    # -- forward again -----------------------------------------------------------------------------------------------

    def _run_again(self, index: int, layer: LayerSpec) -> None:
        """Run all chunks of a block forward once more, for the next one's input and for what the block itself keeps."""
        for at in stage_parts(self.layout.programs[index].forward_stages):
            weights = self.weights.acquire(layer, at)
            for c in self.context.chunks:
                self._run_chunk_again(index, c, at, weights)

    def _run_chunk_again(self, index: int, c: int, at: StagePart, weights: dict[int, int]) -> None:
        areas, reads = self.activations.fetch_input(index, c) if at.opens else ({}, [])
        call = ComputeCall("forward_again", index, c, at, self.layout.programs[index], weights, areas, reads)
        if "output" in at.stage.areas:
            call.writes_area("output", self.activations.output_again(index, c))
        if at.opens:
            for area, access in self.activations.kept_by(index, c).items():
                call.writes_area(area, access)
        self.compute.add(call)
        if at.opens:
            self.activations.offload_saved(index, c, call.areas)
        if at.closes:
            self.activations.offload_again(index, c)

    # -- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, index: int) -> None:
        """Backward of a layer, and what runs again before it; of all of a segment with its last where that goes chunk
        by chunk."""
        segments = self.layout.segments
        if segments.by_chunk and segments.runs_again(index):
            return
        if together := segments.together(index):
            self._backward_together(together)
            return
        for earlier in segments.to_run_again(index):
            self._run_again(earlier, self.model.layers[earlier])
        self._backward_layer(index, self.model.layers[index])

    def _backward_together(self, blocks: range) -> None:
        """Run one chunk after the other through all blocks of a segment, forward again and backward."""
        layers = self.model.layers
        beside = tuple(group for index in blocks for group in layers[index].groups)
        stages = {index: self._stages_of(index)[0] for index in blocks}
        weights = dict[int, dict[int, int]]()  # fetched when they are first needed, inputs of blocks below before them

        def weights_of(index: int) -> dict[int, int]:
            if index not in weights:
                weights[index] = self.weights.acquire(layers[index], stages[index], beside=beside)
            return weights[index]

        accumulators = {index: self.gradients.accumulators(layers[index], begun=False) for index in blocks}
        order = self.context.chunks[::-1]
        for number, c in enumerate(order):
            if number or len(order) == 1:  # tiles arrive behind weights, which have slots when the last segment ends
                self.gradients.update_waiting(turns=len(order) - number)
            for index in blocks[:-1]:
                [at] = stage_parts(self.layout.programs[index].forward_stages)
                self._run_chunk_again(index, c, at, weights_of(index))
            for index in reversed(blocks):
                of_block = (stages[index], weights_of(index), accumulators[index])
                self._backward_chunk(index, c, *of_block, number == 0, False)
        for left, index in enumerate(reversed(blocks)):
            if not self.gradients.has_room(layers[index], left):
                self.gradients.update_waiting()
            for group, slot in accumulators[index].items():
                self.gradients.finish(group, 0, slot)
            self.gradients.update_complete_groups(index, layers[index])

    def _backward_layer(self, index: int, layer: LayerSpec) -> None:
        """Run all chunks of a layer through every stage; then its gradients leave."""
        begun, over_blocks = False, layer.kind != "block" and self.context.plan.share_edge_slots
        if over_blocks:
            self.gradients.end_waiting()  # in slots that this layer's lie over
        for at in self._stages_of(index):
            weights = self.weights.acquire(layer, at, layer.backward_groups)
            if at.stage.recomputes and not at.closes:
                self._use_kept("recompute", index, self.context.chunks, at, weights)
            else:
                self._backward_stage(index, layer, at, weights, begun)
                begun = True
        self.gradients.update_complete_groups(index, layer)
        if over_blocks:
            self.gradients.end_waiting()

    def _backward_stage(
        self, index: int, layer: LayerSpec, at: StagePart, weights: dict[int, int], begun: bool
    ) -> None:
        """Run all chunks and store their gradients.

        begun: an earlier stage of the layer made gradients. Groups that stay whole beside one in parts, as adapters of
        attention alone do, add up over all stages.
        """
        accumulators = self.gradients.accumulators(layer, begun)
        self._backward_chunks(index, layer, at, weights, accumulators, begun, self.context.chunks)
        self._before_gradients_leave(index, layer, at)
        for group, slot in accumulators.items():
            if self.context.is_in_parts(group) or at.closes:
                self.gradients.finish(group, at.part if self.context.is_in_parts(group) else 0, slot)

    def _backward_chunks(
        self, index: int, layer: LayerSpec, at: StagePart, weights: dict[int, int], accumulators: dict[int, int],
        begun: bool, chunks: Sequence[int],
    ) -> None:  # fmt: skip
        """Run the chunks of a round in reverse order, which is that of a sliced sequence's gradients."""
        order = chunks[::-1]
        for number, c in enumerate(order):
            self.gradients.update_waiting(turns=len(order) - number)
            chunk = self.context.shape.chunks[c]
            here = self.context.slices_here(chunk)
            if layer.kind == "block" and not at.in_parts and chunk.is_slice and c == here[-1]:
                self._refill_window(index, here, weights)
            self._backward_chunk(index, c, at, weights, accumulators, c == order[0], begun)

    def _stages_of(self, index: int) -> list[StagePart]:
        return stage_parts(self.layout.programs[index].backward_stages)

    def _before_gradients_leave(self, index: int, layer: LayerSpec, at: StagePart) -> None:
        """What has to be at work before a stage's accumulators leave."""

    def _refill_window(self, index: int, slices: range, weights: dict[int, int]) -> None:
        """Rebuild the keys and values of a sliced sequence, first slice to last; a layer may carry nothing."""
        for at in stage_parts(self.layout.programs[index].window_stages):
            self._use_kept("fill_window", index, slices, at, weights)

    def _use_kept(self, kind: str, index: int, chunks: range, at: StagePart, weights: dict[int, int]) -> None:
        """Append commands that read only what a layer kept, for each of some chunks."""
        for c in chunks:
            areas, reads = self.activations.fetch_kept(index, c)
            self.compute.add(ComputeCall(kind, index, c, at, self.layout.programs[index], weights, areas, reads))

    def _backward_chunk(
        self, index: int, c: int, at: StagePart, weights: dict[int, int], accumulators: dict[int, int], first: bool,
        begun: bool,
    ) -> None:  # fmt: skip
        call = ComputeCall("backward", index, c, at, self.layout.programs[index], weights)
        call.accumulators, call.first = accumulators, first
        self._bind_activations(call)
        for group, slot in accumulators.items():
            access = Access(slot, f"accumulator {self.context.part_name(group, at.part)}")
            if not first or (begun and not self.context.is_in_parts(group)):
                call.reads.append(access)
            call.writes.append(access)
        self.compute.add(call)
        self.activations.send_gradient(index, c, call.areas["grad"])

    def _bind_activations(self, call: ComputeCall) -> None:
        """Bind the gradient of a layer's output, which its input's replaces, and what the layer kept."""
        index, c, kind = call.layer, call.chunk, self.model.layers[call.layer].kind
        grad = self.activations.gradient(index, c)
        grad_read, grad_write = Access(grad, f"grad {index + 1} {c}"), Access(grad, f"grad {index} {c}")
        if kind == "head":
            call.areas, call.reads = self.activations.input_of(index, c)
            call.writes += [grad_write, self._losses(c)]
        elif kind == "embedding" or call.at.in_parts:
            call.reads.append(grad_read)
        else:
            call.areas, call.reads = self.activations.fetch_kept(index, c)
            call.reads.append(grad_read)
            call.writes.append(grad_write)
            # backward may overwrite what was kept: it is the last to read it
            kept = [area for area in ("save_gpu", "save_host") if area in call.areas]
            call.writes += [Access(call.areas[area], f"spent {area} {index} {c}") for area in kept]
        call.areas["grad"] = grad
