"""Segments: runs of blocks of which the first one's input is kept alone, and backward makes the others' again.

Memory for inputs then grows with the number of segments plus their length, instead of with the number of blocks, for
one more forward of all blocks of a segment but its last (T. Chen et al., Training Deep Nets with Sublinear Memory Cost,
2016). Blocks that run again keep the outputs of their save sets only then: what is made again waits no longer than a
segment's backward, so that all segments take turns in the same slots.

By layers, a block of a segment runs again, or backward, for all chunks before the next one does. By chunks, a chunk
passes all blocks of a segment, forward again and backward, before the next chunk does: what runs again is of one chunk,
so that it may all be kept, while weights and accumulators of all blocks of a segment are there at once.
"""

from __future__ import annotations

from flexengine.models.spec import LayerSpec, ModelSpec
from flexengine.plan import Plan
from flexengine.schedule.slots import Memory, Role, SlotKey


class Segments:
    """Which inputs are made again, by which blocks, and whose slots segments share.

    Raises ValueError where a plan makes an input again that no block below can make.
    """

    def __init__(self, model: ModelSpec, plan: Plan) -> None:
        self.by_chunk = plan.request.segments_by_chunk
        self._again = [kept.input_again for kept in plan.layers]
        self._places = [0] * len(self._again)
        for layer, again in enumerate(self._again):
            if again and not (model.layers[layer].keeps and model.layers[layer - 1].keeps):
                raise ValueError(
                    f"the plan makes the input of {model.layers[layer].name} of {model.name} again, and that is for"
                    " blocks with a backward pass whose layer before is such a block, too"
                )
            self._places[layer] = self._places[layer - 1] + 1 if again else 0
        self._numbers = {layer.name: place for layer, place in zip(model.layers, self._places, strict=True)}
        self.accumulators = plan.request.segment_blocks or 1 if self.by_chunk else 1
        if self.by_chunk:
            self._check_chunks(model, plan)

    def _check_chunks(self, model: ModelSpec, plan: Plan) -> None:
        """Raise ValueError where a plan cannot walk chunks one by one through segments."""
        in_parts = any(group.num_parts > 1 for group in model.groups)
        if plan.slices_sequences or in_parts or not may_go_by_chunk(model):
            raise ValueError(
                f"segments of {model.name} walk chunks one by one, and that is for chunks of whole sequences, and for"
                " blocks that are trained in full and not in parts"
            )
        longest = max(self._places) + 1
        if longest > min(self.accumulators, plan.weight_slots):
            raise ValueError(
                f"the plan has a segment of {longest} blocks, whose weights and accumulators are there at once chunk by"
                f" chunk, with weight_slots={plan.weight_slots} and segment_blocks={self.accumulators}"
            )
        for layer, kept in enumerate(plan.layers):
            if (kept.input_again and kept.input_home != "gpu") or (kept.keep_host and self.runs_again(layer)):
                raise ValueError(
                    f"the plan keeps on the host what {model.layers[layer].name} makes again or keeps then; chunk by"
                    " chunk that stays on the GPU"
                )

    def runs_again(self, layer: int) -> bool:
        """Whether a block runs again in backward, for the next one's input."""
        return layer + 1 < len(self._again) and self._again[layer + 1]

    def to_run_again(self, layer: int) -> range:
        """Blocks that run again, first to last, just before the backward of a layer: of a segment before its last."""
        if self.runs_again(layer):
            return range(0)
        return range(layer - self._places[layer], layer)

    def together(self, layer: int) -> range:
        """Blocks that a chunk passes before the next one does, first to last: those of a segment at its last."""
        last = self.by_chunk and self._again[layer] and not self.runs_again(layer)
        return range(layer - self._places[layer], layer + 1) if last else range(0)

    def accumulator_of(self, layer: LayerSpec) -> int:
        """The number of a layer's accumulators, of those of a segment that are there at once; -1 for the only ones."""
        return self._numbers[layer.name] if self.by_chunk and layer.kind == "block" else -1

    def key_of_input(self, layer: int, chunk: int, memory: Memory = "gpu") -> SlotKey:
        """The slot that a chunk's input of a layer waits in."""
        number = 0 if self.by_chunk and self._again[layer] else chunk
        return SlotKey("input", self.owner_of_input(layer), number, memory)

    def owner_of_input(self, layer: int) -> int | str:
        """Whose slots a layer's input waits in: its own, or those of all at its place of a segment."""
        return f"again {self._places[layer]}" if self._again[layer] else layer

    def owner_of_saved(self, layer: int) -> int | str:
        """Whose slots a layer's kept outputs wait in: its own, or those of all that run again at its place."""
        return f"again {self._places[layer]}" if self.runs_again(layer) else layer

    def key_of_saved(self, role: Role, layer: int, chunk: int, memory: Memory, num_bytes: int) -> SlotKey:
        """The slot of so many bytes of a layer's kept outputs: whole, or within one that the largest layer fills."""
        within = (num_bytes,) if self.runs_again(layer) else ()
        number = 0 if self.by_chunk and self.runs_again(layer) else chunk
        return SlotKey(role, self.owner_of_saved(layer), number, memory, within)


def may_go_by_chunk(model: ModelSpec) -> bool:
    """Whether chunks may pass a segment's blocks one by one: each has one group, which is trained as it is stored."""
    groups = [model.groups[group] for layer in model.blocks for group in layer.groups]
    alone = all(len(layer.groups) == 1 and layer.keeps for layer in model.blocks)
    return alone and not any(group.frozen for group in groups)
