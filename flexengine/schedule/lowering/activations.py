"""Activations of a round: where each layer's input, output and kept outputs lie, and copies to the host and back."""

from __future__ import annotations

from flexengine.schedule.commands import Access, CommandName, CopyRegion, Stream, Subject
from flexengine.schedule.lowering.context import RoundContext, SlotRing

Bound = tuple[dict[str, int], list[Access]]
"""Areas of a layer call with their slots, and what a command that uses them reads."""


class ActivationLowering:
    """Places the tensors between layers and those that layers keep for backward."""

    def __init__(self, context: RoundContext) -> None:
        self._context, self._builder, self._layout = context, context.builder, context.layout
        self._hidden = SlotRing(self._layout.ring("hidden"))
        self._staging = SlotRing(self._layout.ring("save_host"))
        self._inputs: dict[tuple[int, int], int] = {}  # (layer, chunk) -> slot

    # -- forward -----------------------------------------------------------------------------------------------------

    def input_of(self, index: int, c: int) -> Bound:
        """The input of layer `index` for chunk c where the layer before wrote it; the embedding has none."""
        if self._context.model.layers[index].input is None:
            return {}, []
        slot = self._inputs[index, c]
        return {"input": slot}, [Access(slot, f"input {index} {c}")]

    def output_of(self, index: int, c: int, keeps: bool) -> Access:
        """Where layer `index` writes chunk c. keeps: the next layer's input may stay on the GPU for its backward."""
        following = index + 1
        if (following, c) not in self._inputs:
            self._inputs[following, c] = self._input_slot(following, c) if keeps else self._hidden.take()
        return Access(self._inputs[following, c], f"input {following} {c}")

    def _input_slot(self, index: int, c: int) -> int:
        """The slot that keeps a layer's input, or the next of the ring where it is not kept on the GPU."""
        kept = self._context.model.layers[index].keeps and self._context.plan.layers[index].input_home == "gpu"
        return self._layout.slot("input", index, c) if kept else self._hidden.take()

    def kept_by(self, index: int, c: int) -> dict[str, Access]:
        """Where forward of a layer writes the outputs that it keeps, by area."""
        program, kept = self._layout.programs[index], {}
        if program.save_gpu_bytes:
            kept["save_gpu"] = Access(self._layout.slot("save_gpu", index, c), f"save_gpu {index} {c}")
        if program.save_host_bytes:
            kept["save_host"] = Access(self._staging.take(), f"save_host {index} {c}")
        return kept

    def offload(self, index: int, c: int, areas: dict[str, int]) -> None:
        """Send a chunk's input and kept outputs to the host where the plan says so."""
        layer, content = self._context.model.layers[index], f"input {index} {c}"
        if layer.keeps and self._context.plan.layers[index].input_home == "host":
            regions = [
                CopyRegion(areas["input"], 0, self._layout.slot("input", index, c, "host"), 0, self._hidden_bytes(c))
            ]
            self._builder.copy(self._name("offload", "input", index, c), Stream.D2H, content, regions)
        self._offload_saved(index, c, areas)

    def _offload_saved(self, index: int, c: int, areas: dict[str, int]) -> None:
        """Send a chunk's kept outputs to the host where the plan says so."""
        if "save_host" in areas:
            regions = self._save_regions(index, c, areas["save_host"], self._layout.slot("save", index, c, "host"))
            self._builder.copy(self._name("offload", "save", index, c), Stream.D2H, f"save_host {index} {c}", regions)

    # -- backward ----------------------------------------------------------------------------------------------------

    def fetch_kept(self, index: int, c: int) -> Bound:
        """Bring a block's input and kept outputs of one chunk back to the GPU, for a command that uses them."""
        program, areas = self._layout.programs[index], {"input": self._fetch_input(index, c)}
        reads = [Access(areas["input"], f"input {index} {c}")]
        if program.save_gpu_bytes:
            areas["save_gpu"] = self._layout.slot("save_gpu", index, c)
            reads.append(Access(areas["save_gpu"], f"save_gpu {index} {c}"))
        if program.save_host_bytes:
            areas["save_host"] = self._staging.take()
            regions = self._save_regions(index, c, self._layout.slot("save", index, c, "host"), areas["save_host"])
            self._builder.copy(self._name("fetch", "save", index, c), Stream.H2D, f"save_host {index} {c}", regions)
            reads.append(Access(areas["save_host"], f"save_host {index} {c}"))
        return areas, reads

    def _fetch_input(self, index: int, c: int) -> int:
        if self._context.plan.layers[index].input_home == "gpu":
            return self._layout.slot("input", index, c)
        slot, content = self._hidden.take(), f"input {index} {c}"
        regions = [CopyRegion(self._layout.slot("input", index, c, "host"), 0, slot, 0, self._hidden_bytes(c))]
        self._builder.copy(self._name("fetch", "input", index, c), Stream.H2D, content, regions)
        return slot

    def _name(self, verb: str, subject: Subject, index: int, c: int) -> CommandName:
        return CommandName(verb, subject, self._context.model.layers[index].name, c)

    # -- sizes and places --------------------------------------------------------------------------------------------

    def _hidden_bytes(self, c: int) -> int:
        return self._context.shape.chunks[c].tokens * self._context.model.hidden_size * self._layout.compute_bytes

    def _save_regions(self, index: int, c: int, source: int, target: int) -> list[CopyRegion]:
        """One region per kept tensor: the rows that the chunk really has."""
        tokens, width = self._context.shape.chunks[c].tokens, self._layout.compute_bytes
        places = self._layout.programs[index].saved_host
        return [CopyRegion(source, p.offset, target, p.offset, p.spec.num_bytes(tokens, width)) for p in places]
