"""The calls of an engine that leave adapters out, or make them a part of the weights and take them out again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from flexengine.models.lora import adapters
from flexengine.models.saved_modules import saved_tensors
from flexengine.runtime.engine_parts import EngineParts
from flexengine.runtime.one_caller import one_caller
from flexengine.runtime.weights.adapters import Begin, base_values, changed

HALF_MERGED = "merging adapters was interrupted, so some weights have them and others not"


class AdapterCalls(EngineParts):
    """The part of an engine that switches adapters; what is trained stays as it is."""

    @one_caller
    def merge(self) -> None:
        """Add the adapters to the weights beneath, in place, so that passes run without them until `unmerge`.

        The sums are computed in float32 (float64) and rounded once, as those of an export. Meanwhile the engine
        evaluates and generates alone. Takes next to no memory. Of several ranks, all call it.
        Raises ValueError where there are no adapters, gradients that are not stepped with, weights in fewer bytes than
        a sum has, or adapters that are a part of the base (PiSSA).
        """
        self.state.require_usable()
        self._check_adapters("merge()")
        found = list(adapters(self.model))
        if any(self.weights.runs[one.weight.name].in_fewer_bytes for one in found):
            raise ValueError("merge() into weights in fewer bytes would round the sum to these; export a merged model")
        if self.state.has_gradients:
            raise ValueError("merge() between fwd_bwd and step: call step() first")
        assert self.model.lora is not None
        scale = self.model.lora.scale
        self._rewrite("merge()", {one.weight.name: changed(self.weights, one, scale) for one in found})
        self.state.merged, self.layers.adapters = True, False

    @one_caller
    def unmerge(self) -> None:
        """Undo `merge`: the weights beneath are read again from where they were loaded, with the bits that they had.

        Raises ValueError where nothing is merged, CheckpointError where the checkpoint is no longer there.
        """
        self.state.require_usable(merged=True)
        if not self.state.merged:
            raise ValueError("unmerge() without merge(): the adapters are beside the weights")
        names = [one.weight.name for one in adapters(self.model)]
        with base_values(self.weights, Begin(self.source.weights_folder, self.seed)) as values:
            self._rewrite("unmerge()", {name: values(name) for name in names})
        self.state.merged, self.layers.adapters = False, True

    def _rewrite(self, call: str, values: dict) -> None:
        """Give weights new values, each rank those that it fills. call: what a refusal names."""
        self._show_masters(call)
        self.planes.write_back()
        self.state.unusable = HALF_MERGED
        with self.context.together():
            for name in values.keys() & self.weights.own().keys():
                self.weights.write_pieces(name, values[name])
        self.planes.fetch()
        self.state.unusable = ""

    @contextmanager
    def _using_adapters(self, used: bool) -> Iterator[None]:
        """Run passes with the adapters or without. Raises ValueError where the base would not be what was loaded."""
        if not used:
            self._check_adapters("adapters=False")
            if self.state.merged:
                raise ValueError("adapters=False after merge(): they are in the weights; call unmerge() first")
            if next(saved_tensors(self.model), None) is not None:
                raise ValueError("adapters=False beside modules_to_save: what these were before is not kept")
        before, self.layers.adapters = self.layers.adapters, used and self.layers.adapters
        try:
            yield
        finally:
            self.layers.adapters = before

    def _check_adapters(self, what: str) -> None:
        lora = self.model.lora
        if lora is None:
            raise ValueError(f"{what}: {self.model.name} has no adapters; leave it out")
        if lora.changes_base:
            raise ValueError(f"{what}: adapters with lora_init={lora.init} took their beginning out of the base")
