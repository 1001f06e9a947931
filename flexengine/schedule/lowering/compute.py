"""Compute commands of a round: a layer's stage on one chunk, with all that it reads and writes bound to slots."""

from __future__ import annotations

from dataclasses import dataclass, field

from flexengine.schedule.commands import Access, CommandName, LayerCall, Stream
from flexengine.schedule.layer_program import LayerProgram
from flexengine.schedule.lowering.context import RoundContext, StagePart
from flexengine.schedule.lowering.weights import WeightLowering


@dataclass(eq=False)
class ComputeCall:
    """A compute command in the making: what its caller binds. `ComputeLowering.add` binds the rest.

    first: the accumulators hold nothing yet.
    """

    kind: str
    layer: int
    chunk: int
    at: StagePart
    program: LayerProgram
    weights: dict[int, int]
    areas: dict[str, int] = field(default_factory=dict)
    reads: list[Access] = field(default_factory=list)
    writes: list[Access] = field(default_factory=list)
    accumulators: dict[int, int] = field(default_factory=dict)
    first: bool = True

    def writes_area(self, area: str, access: Access) -> None:
        """Bind an area to the slot that the command writes."""
        self.areas[area] = access.slot
        self.writes.append(access)


class ComputeLowering:
    """Appends compute commands with batch, weights, scratch, and what stages and slices of a sequence leave."""

    def __init__(self, context: RoundContext, weights: WeightLowering) -> None:
        self._context, self._layout, self._weights = context, context.layout, weights
        self._carried: dict[int, str] = {}  # by chunk, what its slot `carry` holds
        self._batch = Access(self._layout.slot("batch"), "batch")
        self._scratch = Access(self._layout.slot("scratch"), "scratch")

    def add(self, call: ComputeCall) -> None:
        """Append a command."""
        at, chunk, layer = call.at, self._context.shape.chunks[call.chunk], self._context.model.layers[call.layer]
        call.reads += [self._batch, *self._weights.reads(call.weights, at.part)]
        call.writes_area("scratch", self._scratch)
        if "carry" in at.stage.areas:
            self._bind_carry(call)
        if "bounds" in at.stage.areas:
            self._bind_bounds(call)
        carries = self._layout.programs[call.layer].window_stages
        if carries and chunk.is_slice and layer.kind == "block" and not at.in_parts:
            self._bind_window(call)
        work = at.stage.work(chunk.tokens, chunk.seq_len, self._layout.compute_bytes)
        if not call.first:
            work = work.plus(at.stage.accumulation_work(self._layout.compute_bytes))
        owner = f"{layer.name} part {at.part}" if at.in_parts else layer.name
        name = CommandName(call.kind, owner=owner, chunk=call.chunk)
        self._context.builder.add(
            call.kind, name, Stream.COMPUTE, call.reads, call.writes, work, args=_layer_call(call)
        )

    def _bind_carry(self, call: ComputeCall) -> None:
        """Bind what a chunk's earlier stages left, and this one adds to."""
        slot, c = self._layout.slot("carry", index=call.chunk), call.chunk
        if not call.at.opens:
            call.reads.append(Access(slot, self._carried[c]))
        self._carried[c] = f"carry {call.layer} {c} after {call.kind} stage {call.at.number} part {call.at.part}"
        call.writes_area("carry", Access(slot, self._carried[c]))

    def _bind_bounds(self, call: ComputeCall) -> None:
        """Bind which rows are whose expert's: the first stage says, the others read."""
        slot, routed = self._layout.slot("bounds", index=call.chunk), self._context.routed
        call.areas["bounds"] = slot
        if call.at.opens:
            routed[call.chunk] = f"bounds {call.layer} {call.chunk} by {call.kind}"
        (call.writes if call.at.opens else call.reads).append(Access(slot, routed[call.chunk]))

    def _bind_window(self, call: ComputeCall) -> None:
        """Bind the keys and values of a sliced sequence: forward adds a slice, backward reads all up to its own."""
        c, chunk = call.chunk, self._context.shape.chunks[call.chunk]
        window = self._layout.window("window", call.layer)
        call.areas["window"] = window
        sequence = f"window {call.layer} {chunk.first_slice}"
        if call.kind == "backward":
            grad_window = self._layout.window("grad_window", call.layer)
            call.reads.append(Access(window, f"{sequence} to {self._context.slices_here(chunk)[-1]}"))
            if c != chunk.last_slice:
                call.reads.append(Access(grad_window, f"grad {sequence} from {c + 1}"))
            call.writes_area("grad_window", Access(grad_window, f"grad {sequence} from {c}"))
            return
        if c != chunk.first_slice:
            call.reads.append(Access(window, f"{sequence} to {c - 1}"))
        call.writes.append(Access(window, f"{sequence} to {c}"))


def _layer_call(call: ComputeCall) -> LayerCall:
    operands = call.program, call.areas, call.weights, call.accumulators
    return LayerCall(call.layer, call.chunk, *operands, call.first, call.at.number, call.at.part)
