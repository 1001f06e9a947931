"""Activations of a round: where each layer's input, output and kept outputs lie, and copies to the host and back."""

from __future__ import annotations

from flexengine.ops.base import TensorSpec
from flexengine.plan import Home
from flexengine.schedule.commands import Access, CommandName, CopyRegion, RowCopy, Stream, Subject
from flexengine.schedule.kept_on_drive import keeps_input, keeps_saved
from flexengine.schedule.lowering.context import RoundContext, SlotRing
from flexengine.schedule.lowering.drive import DriveKept
from flexengine.schedule.program_builder import merge_regions
from flexengine.schedule.slots import Memory

Bound = tuple[dict[str, int], list[Access]]
"""Areas of a layer call with their slots, and what a command that uses them reads."""


class ActivationLowering:
    """Places the tensors between layers and those that layers keep for backward."""

    def __init__(self, context: RoundContext) -> None:
        self._context, self._builder, self._layout = context, context.builder, context.layout
        self._hidden = SlotRing(self._layout.ring("hidden"))
        self._staging = SlotRing(self._layout.ring("save_host"))
        self._gradients = SlotRing(self._layout.ring("grad_hidden"))
        self._drive = DriveKept(context)
        self._over_hidden: dict[int, int] = {}  # chunk -> slot of a hidden state that its gradient lies in
        self._inputs: dict[tuple[int, int], int] = {}  # (layer, chunk) -> slot
        self._waiting: dict[tuple[int, int], int] = {}  # the same of inputs that wait on the host
        self._made_again: dict[tuple[int, int], int] = {}  # the same of inputs that backward has made again

    # -- forward -----------------------------------------------------------------------------------------------------

    def input_of(self, index: int, c: int) -> Bound:
        """The input of layer `index` for chunk c where the layer before wrote it; the embedding has none."""
        if self._context.model.layers[index].input is None:
            return {}, []
        waiting = self._waiting.get((index, c))
        slot = self._inputs[index, c] if waiting is None else self._fetch_from(waiting, index, c)
        return {"input": slot}, [Access(slot, f"input {index} {c}")]

    def output_of(self, index: int, c: int, keeps: bool) -> Access:
        """Where layer `index` writes chunk c. keeps: the next layer's input may stay on the GPU for its backward."""
        following = index + 1
        if (following, c) not in self._inputs:
            self._inputs[following, c] = self._input_slot(following, c) if keeps else self._hidden.take()
        return Access(self._inputs[following, c], f"input {following} {c}")

    def _input_slot(self, index: int, c: int) -> int:
        """The slot that keeps a layer's input, or the next of the ring where it is not kept on the GPU."""
        return self._place_of_input(index, c) if self._keeps_input(index, "gpu") else self._hidden.take()

    def _keeps_input(self, index: int, home: Home) -> bool:
        """Whether a layer's input is kept there from forward to backward."""
        kept = self._context.plan.layers[index]
        return self._context.model.layers[index].keeps and kept.input_home == home and not kept.input_again

    def send_output(self, index: int, c: int, keeps: bool) -> None:
        """Send what layer `index` wrote to the host where it waits there for the next one. keeps: as of `output_of`."""
        following = index + 1
        if not self._context.plan.request.hidden_on_host or (keeps and self._keeps_input(following, "gpu")):
            return
        if keeps and self._keeps_input(following, "host") and not keeps_input(self._layout, following):
            place = self._place_of_input(following, c, "host")
        else:
            place = self._layout.slot("hidden", index=c, memory="host")
        self._waiting[following, c] = place
        self._offload_to(place, "input", following, c, self._inputs[following, c])

    def kept_by(self, index: int, c: int) -> dict[str, Access]:
        """Where forward of a layer writes the outputs that it keeps, by area."""
        program, kept = self._layout.programs[index], {}
        if program.save_gpu_bytes:
            kept["save_gpu"] = Access(self._place_on_gpu(index, c), f"save_gpu {index} {c}")
        if program.save_host_bytes:
            kept["save_host"] = Access(self._staging.take(), f"save_host {index} {c}")
        return kept

    def offload(self, index: int, c: int, areas: dict[str, int]) -> None:
        """Send a chunk's input and kept outputs to the host, or a drive, where the plan says so, unless they wait there
        already."""
        if keeps_input(self._layout, index):
            self._input_to_drive(index, c, areas["input"])
        elif self._keeps_input(index, "host") and (index, c) not in self._waiting:
            self._offload_to(self._place_of_input(index, c, "host"), "input", index, c, areas["input"])
        self.offload_saved(index, c, areas)

    def _input_to_drive(self, index: int, c: int, slot: int) -> None:
        at, content = self._drive.place(self._layout.hidden_bytes), f"input {index} {c}"
        name, beside = self._name("offload", "input", index, c), (Access(at.staging, content),)
        self._copy_hidden(name, Stream.D2H, content, slot, at.place, beside)
        home = self._place_of_input(index, c, "drive")
        self._drive.write(self._name("write", "input", index, c), content, at, home)

    def _offload_to(self, place: int, subject: Subject, index: int, c: int, slot: int) -> None:
        name = self._name("offload", subject, index, c)
        self._copy_hidden(name, Stream.D2H, f"{subject} {index} {c}", slot, place)

    def offload_saved(self, index: int, c: int, areas: dict[str, int]) -> None:
        """Send a chunk's kept outputs to the host, or a drive, where the plan says so."""
        if "save_host" not in areas:
            return
        name, source = self._name("offload", "save", index, c), areas["save_host"]
        if not keeps_saved(self._layout, index):
            self._copy_saved(name, Stream.D2H, index, source, self._place_of_saved(index, c))
            return
        at, content = self._drive.place(self._layout.programs[index].save_host_bytes), f"save_host {index} {c}"
        self._copy_saved(name, Stream.D2H, index, source, at.place, (Access(at.staging, content),))
        self._drive.write(self._name("write", "save", index, c), content, at, self._place_of_saved(index, c, "drive"))

    # -- forward again -----------------------------------------------------------------------------------------------

    def fetch_input(self, index: int, c: int) -> Bound:
        """Bring the input of a block that runs again to the GPU."""
        slot = self._fetch_input(index, c)
        return {"input": slot}, [Access(slot, f"input {index} {c}")]

    def output_again(self, index: int, c: int) -> Access:
        """Where block `index` writes chunk c when it runs again: the next one's input waits there, or goes to the
        host."""
        following = index + 1
        if (following, c) not in self._made_again:
            on_gpu = self._context.plan.layers[following].input_home == "gpu"
            slot = self._place_of_input(following, c) if on_gpu else self._hidden.take()
            self._made_again[following, c] = slot
        return Access(self._made_again[following, c], f"input {following} {c}")

    def offload_again(self, index: int, c: int) -> None:
        """Send what block `index` wrote when it ran again to the host where the plan says so."""
        if self._context.plan.layers[index + 1].input_home == "host":
            place = self._place_of_input(index + 1, c, "host")
            self._offload_to(place, "input", index + 1, c, self._made_again[index + 1, c])

    # -- backward ----------------------------------------------------------------------------------------------------

    def fetch_kept(self, index: int, c: int) -> Bound:
        """Bring a block's input and kept outputs of one chunk back to the GPU, for a command that uses them."""
        program, areas = self._layout.programs[index], {"input": self._fetch_input(index, c)}
        reads = [Access(areas["input"], f"input {index} {c}")]
        if program.save_gpu_bytes:
            areas["save_gpu"] = self._place_on_gpu(index, c)
            reads.append(Access(areas["save_gpu"], f"save_gpu {index} {c}"))
        if program.save_host_bytes:
            areas["save_host"] = self._staging.take()
            name, source = self._name("fetch", "save", index, c), self._saved_on_host(index, c)
            self._copy_saved(name, Stream.H2D, index, source, areas["save_host"])
            reads.append(Access(areas["save_host"], f"save_host {index} {c}"))
        return areas, reads

    def _fetch_input(self, index: int, c: int) -> int:
        if self._context.plan.layers[index].input_home == "gpu":
            return self._place_of_input(index, c)
        if not keeps_input(self._layout, index):
            return self._fetch_from(self._place_of_input(index, c, "host"), index, c)
        name, home = self._name("read", "input", index, c), self._place_of_input(index, c, "drive")
        return self._fetch_from(self._drive.read(name, f"input {index} {c}", home, self._layout.hidden_bytes), index, c)

    def _saved_on_host(self, index: int, c: int) -> int:
        """Where a chunk's kept outputs are found on the host; from a drive they are read before."""
        if not keeps_saved(self._layout, index):
            return self._place_of_saved(index, c)
        name, home = self._name("read", "save", index, c), self._place_of_saved(index, c, "drive")
        num_bytes = self._layout.programs[index].save_host_bytes
        return self._drive.read(name, f"save_host {index} {c}", home, num_bytes)

    def _fetch_from(self, place: int, index: int, c: int) -> int:
        slot = self._hidden.take()
        self._copy_hidden(self._name("fetch", "input", index, c), Stream.H2D, f"input {index} {c}", place, slot)
        return slot

    def gradient(self, index: int, c: int) -> int:
        """The slot of the gradient of layer `index`'s output, which its input's replaces; the head makes the first."""
        if self._layout.segments.by_chunk:
            return self._gradient_over_hidden(index, c)
        if not self._context.plan.request.hidden_on_host:
            return self._layout.slot("grad_hidden", index=c)
        slot = self._gradients.take()
        if self._context.model.layers[index].kind != "head":
            place = self._layout.slot("hidden", index=c, memory="host")
            self._copy_hidden(self._name("fetch", "grad", index, c), Stream.H2D, f"grad {index + 1} {c}", place, slot)
        return slot

    def _gradient_over_hidden(self, index: int, c: int) -> int:
        """The slot of a chunk's gradient among those of hidden states: one that is free when the head makes it. What
        the head has read is free, and blocks' inputs arrive in what is left."""
        if c not in self._over_hidden:
            if not self._over_hidden:
                read = {self._inputs[index, chunk] for chunk in self._context.chunks}
                self._hidden = SlotRing([slot for slot in self._hidden.slots if slot not in read])
            slot, *free = self._hidden.slots
            self._over_hidden[c], self._hidden = slot, SlotRing([*free, self._inputs[index, c]])
        return self._over_hidden[c]

    def send_gradient(self, index: int, c: int, slot: int) -> None:
        """Send the gradient of layer `index`'s input to the host where it waits there for the layer below."""
        if self._context.plan.request.hidden_on_host and self._context.model.layers[index].kind != "embedding":
            self._offload_to(self._layout.slot("hidden", index=c, memory="host"), "grad", index, c, slot)

    def _name(self, verb: str, subject: Subject, index: int, c: int) -> CommandName:
        return CommandName(verb, subject, self._context.model.layers[index].name, c)

    # -- sizes and places --------------------------------------------------------------------------------------------

    def _place_of_input(self, index: int, c: int, memory: Memory = "gpu") -> int:
        number = self._context.number_kept(c)
        return self._layout.slot_of(self._layout.segments.key_of_input(index, number, memory))

    def _place_on_gpu(self, index: int, c: int) -> int:
        num_bytes = self._layout.programs[index].save_gpu_bytes
        number = self._context.number_kept(c)
        return self._layout.slot_of(self._layout.segments.key_of_saved("save_gpu", index, number, "gpu", num_bytes))

    def _place_of_saved(self, index: int, c: int, memory: Memory = "host") -> int:
        num_bytes = self._layout.programs[index].save_host_bytes
        number = self._context.number_kept(c)
        return self._layout.slot_of(self._layout.segments.key_of_saved("save", index, number, memory, num_bytes))

    def _hidden_bytes(self, c: int, subject: str) -> int:
        """Bytes of a chunk's hidden state, or of its gradient."""
        return self._hidden_spec(subject).num_bytes(self._context.shape.chunks[c].tokens, self._layout.compute_bytes)

    def _hidden_spec(self, subject: str) -> TensorSpec:
        return self._context.model.hidden_rows if subject == "grad" else self._context.model.hidden

    # -- copies of the rows that a chunk really has ------------------------------------------------------------------

    def _copy_hidden(
        self, name: CommandName, stream: Stream, content: str, source: int, target: int,
        beside: tuple[Access, ...] = (),
    ) -> None:  # fmt: skip
        """Append a copy of a chunk's hidden state, or of its gradient. beside: what it writes with its target."""
        region = CopyRegion(source, 0, target, 0, self._hidden_bytes(name.chunk, name.subject))
        rows = RowCopy(name.chunk, ((region, self._hidden_spec(name.subject)),), self._layout.compute_bytes)
        self._append(name, stream, content, [region], rows, beside)

    def _copy_saved(
        self, name: CommandName, stream: Stream, index: int, source: int, target: int, beside: tuple[Access, ...] = ()
    ) -> None:
        """Append a copy of what a layer keeps of a chunk on the host: one region per tensor."""
        tokens, width = self._context.shape.chunks[name.chunk].tokens, self._layout.compute_bytes
        tensors = tuple(
            (CopyRegion(source, place.offset, target, place.offset, place.spec.num_bytes(tokens, width)), place.spec)
            for place in self._layout.programs[index].saved_host
        )
        rows, content = RowCopy(name.chunk, tensors, width), f"save_host {index} {name.chunk}"
        self._append(name, stream, content, [region for region, _ in tensors], rows, beside)

    def _append(
        self, name: CommandName, stream: Stream, content: str, regions: list[CopyRegion], rows: RowCopy,
        beside: tuple[Access, ...],
    ) -> None:  # fmt: skip
        source, target = Access(regions[0].source, content), Access(regions[0].target, content)
        self._builder.add_copy(name, stream, [source], [*beside, target], merge_regions(regions), rows)
