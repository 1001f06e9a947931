"""Segments: runs of blocks of which the first one's input is kept alone, and backward makes the others' again.

Memory for inputs then grows with the number of segments plus their length, instead of with the number of blocks, for
one more forward of all blocks of a segment but its last (T. Chen et al., Training Deep Nets with Sublinear Memory Cost,
2016). Blocks that run again keep the outputs of their save sets only then: what is made again waits no longer than a
segment's backward, so that all segments take turns in the same slots.
"""

from __future__ import annotations

from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan
from flexengine.schedule.slots import Memory, Role, SlotKey


class Segments:
    """Which inputs are made again, by which blocks, and whose slots segments share.

    Raises ValueError where a plan makes an input again that no block below can make.
    """

    def __init__(self, model: ModelSpec, plan: Plan) -> None:
        self._again = [kept.input_again for kept in plan.layers]
        self._places = [0] * len(self._again)
        for layer, again in enumerate(self._again):
            if again and not (model.layers[layer].keeps and model.layers[layer - 1].keeps):
                raise ValueError(
                    f"the plan makes the input of {model.layers[layer].name} of {model.name} again, and that is for"
                    " blocks with a backward pass whose layer before is such a block, too"
                )
            self._places[layer] = self._places[layer - 1] + 1 if again else 0

    def runs_again(self, layer: int) -> bool:
        """Whether a block runs again in backward, for the next one's input."""
        return layer + 1 < len(self._again) and self._again[layer + 1]

    def to_run_again(self, layer: int) -> range:
        """Blocks that run again, first to last, just before the backward of a layer: of a segment before its last."""
        if self.runs_again(layer):
            return range(0)
        return range(layer - self._places[layer], layer)

    def owner_of_input(self, layer: int) -> int | str:
        """Whose slots a layer's input waits in: its own, or those of all at its place of a segment."""
        return f"again {self._places[layer]}" if self._again[layer] else layer

    def owner_of_saved(self, layer: int) -> int | str:
        """Whose slots a layer's kept outputs wait in: its own, or those of all that run again at its place."""
        return f"again {self._places[layer]}" if self.runs_again(layer) else layer

    def key_of_saved(self, role: Role, layer: int, chunk: int, memory: Memory, num_bytes: int) -> SlotKey:
        """The slot of so many bytes of a layer's kept outputs: whole, or within one that the largest layer fills."""
        within = (num_bytes,) if self.runs_again(layer) else ()
        return SlotKey(role, self.owner_of_saved(layer), chunk, memory, within)
