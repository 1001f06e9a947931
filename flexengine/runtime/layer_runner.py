"""Runs a layer call: binds every tensor of its op steps to arena views and calls the ops in order."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import ChunkContext, OpEnv
from flexengine.runtime.arena import Arenas, wide_dtype
from flexengine.runtime.decoding import Decoder
from flexengine.schedule.commands import LayerCall
from flexengine.schedule.layer_program import OpStep, Place
from flexengine.schedule.layout import Layout
from flexengine.schedule.parts import Part
from flexengine.schedule.stored_pieces import Piece

MOST_BOUND, MOST_VIEWS = 1024, 16384
"""Commands whose views are kept for the next run of their program, and different views: about 8 KiB and 0.6 KiB each.
Commands share most of them, as they take turns in the same slots."""
MOST_LENGTHS = 32
"""Numbers of tokens of chunks whose views are kept: most batches of ragged sequences have new ones."""

_View = tuple[int, int, tuple[int, ...], torch.dtype]  # slot, offset, shape and dtype


class BoundStep(NamedTuple):
    """An op step with views of its tensors and gradients, by name."""

    step: OpStep
    tensors: dict[str, Tensor]
    grads: dict[str, Tensor]


class BoundCall(NamedTuple):
    """A command's views for a chunk of so many tokens. call: kept, as the number by which it is found is its address.

    accumulators: of parameters' gradients; none but in backward.
    """

    call: LayerCall
    params: dict[str, Tensor]
    accumulators: dict[str, Tensor]
    tokens: int
    steps: tuple[BoundStep, ...]


class LayerRunner:
    """Executes the layer calls of one layout.

    Views of a command are made once and kept, as making them takes the host longer than small kernels take the GPU.
    chunks: the contexts of the round that is running. buffers: the model's buffers by name.
    decoder: runs some ops in its own way while tokens are generated; None in training. adapters: whether forward uses
    them.
    """

    def __init__(self, layout: Layout, arenas: Arenas, buffers: dict[str, Tensor]) -> None:
        self.layout, self.arenas, self.buffers = layout, arenas, buffers
        self.compute = getattr(torch, layout.plan.request.numerics.compute)
        self.wide = wide_dtype(layout)
        self.dtypes = {"compute": self.compute, "float32": self.wide, "int32": torch.int32, "uint8": torch.uint8}
        self.chunks: list[ChunkContext] = []
        self.decoder: Decoder | None = None
        self.adapters = True
        self._bound: dict[tuple[int, str], BoundCall] = {}
        self._views: dict[int, dict[_View, Tensor]] = {}  # by tokens of the chunk, those used last at the end
        self._lasting: dict[_View, Tensor] = {}  # of parameters

    def run(self, kind: str, call: LayerCall) -> None:
        """Run one command of kind forward, forward_again, evaluate, recompute, backward or fill_window on the current
        stream."""
        chunk, bound = self._in_window(call, self.chunks[call.chunk]), self._bind_call(kind, call)
        if kind == "backward":
            self._open_grads(call, chunk)
            if call.first:
                self._clear_unused(call)
        for step, tensors, grads in bound.steps:
            env = OpEnv(
                t=tensors,
                p=bound.params,
                g=grads,
                gp=bound.accumulators,
                chunk=chunk,
                accumulate=step.accumulate,
                first=call.first,
                again=kind in ("backward", "recompute", "forward_again"),
                part=max(0, call.part - 1),
                layer=call.layer,
                adapters=self.adapters,
            )
            if self.decoder is None or not self.decoder.runs(step.op, env, call):
                _call(step, env)

    def _bind_call(self, kind: str, call: LayerCall) -> BoundCall:
        """The views of a command for the tokens that its chunk has now; those of parameters stay as they are."""
        key, tokens = (id(call), kind), self.chunks[call.chunk].tokens
        bound = self._bound.get(key)
        if bound is not None and bound.tokens == tokens:
            return bound
        if len(self._bound) >= MOST_BOUND or sum(map(len, (self._lasting, *self._views.values()))) >= MOST_VIEWS:
            self._bound.clear()
            self._views.clear()
            self._lasting.clear()
            bound = None
        steps = tuple(
            BoundStep(step, self.bind(call, step.tensors, tokens), self.bind(call, step.grads, tokens))
            for step in call.program.stages(kind)[call.stage].steps
        )
        if bound is None:
            accumulators = self._accumulators(call) if kind == "backward" else {}
            bound = BoundCall(call, self._params_and_buffers(call), accumulators, tokens, steps)
        else:
            bound = bound._replace(tokens=tokens, steps=steps)
        self._bound[key] = bound
        return bound

    def bind(self, call: LayerCall, places: tuple[tuple[str, Place], ...], tokens: int) -> dict[str, Tensor]:
        """Views of places by name, for a chunk of `tokens` tokens."""
        views, known = {}, self._views_for(tokens)
        for name, place in places:
            spec = place.spec
            shape = (spec.height(tokens), *spec.shape)
            views[name] = self._at(known, call.areas[place.area], place.offset, shape, self.dtypes[spec.dtype])
        return views

    def _views_for(self, tokens: int) -> dict[_View, Tensor]:
        """The views that are kept for chunks of so many tokens; those of other numbers go when there are too many."""
        known = self._views[tokens] = self._views.pop(tokens, {})
        if len(self._views) > MOST_LENGTHS:
            del self._views[next(iter(self._views))]
        return known

    def params_of(self, call: LayerCall) -> dict[str, Tensor]:
        """The layer's parameters as views of its weight slots."""
        return self._params(call)

    def _params(self, call: LayerCall) -> dict[str, Tensor]:
        homes, groups = self.layout.homes, self.layout.groups
        resident = {g for g in call.weights if homes[g].weights == "gpu" and groups[g].decoded is None}
        return self._param_views(call, call.weights, self.compute, resident)

    def _params_and_buffers(self, call: LayerCall) -> dict[str, Tensor]:
        buffers = self.layout.model.layers[call.layer].buffers
        return self._params(call) | {local: self.buffers[source.name] for local, source in buffers}

    def _accumulators(self, call: LayerCall) -> dict[str, Tensor]:
        return self._param_views(call, call.accumulators, self.wide)

    def _param_views(
        self, call: LayerCall, slots: dict[int, int], dtype: torch.dtype, at_home: Container[int] = ()
    ) -> dict[str, Tensor]:
        """Views of the parameters of the call's part. at_home: groups whose slot holds the whole plane."""
        views = {}
        stored = {g: {p.name: p for p in self._part(g, call.part).params} for g in slots}
        for local, group, name in self.layout.model.layers[call.layer].params:
            param = stored.get(group, {}).get(name)
            if param is None:
                continue
            bytes_ = self.layout.groups[group].stored
            if bytes_ is not None and not bytes_.decoded:
                views[local] = self._stored_view(slots[group], *bytes_.place_of(param.first), param.shape)
            else:
                start = param.first if group in at_home else param.start
                views[local] = self._view(slots[group], start, param.shape, dtype)
        return views

    def _stored_view(self, slot: int, piece: Piece, start: int, shape: tuple[int, ...]) -> Tensor:
        """A parameter as it is stored: the bytes of a matrix in a format, or elements."""
        if piece.storage == "compute":
            return self._at(self._lasting, slot, start, shape, self.compute)
        return self._at(self._lasting, slot, start, (piece.num_bytes,), torch.uint8)

    def _clear_unused(self, call: LayerCall) -> None:
        """Zero those parts of accumulators that this layer never writes: a tied head leaves learned positions alone."""
        used = {(group, name) for _, group, name in self.layout.model.layers[call.layer].params}
        for group, slot in call.accumulators.items():
            for param in self._part(group, call.part).params:
                if (group, param.name) not in used:
                    self._view(slot, param.start, param.shape, self.wide).zero_()

    def _part(self, group: int, part: int) -> Part:
        """A part of a group; adapters of experts in one tensor stay whole beside a group in parts."""
        parts = self.layout.groups[group].parts
        return parts[part if len(parts) > 1 else 0]

    def _view(self, slot: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self._at(self._lasting, slot, start * dtype.itemsize, shape, dtype)

    def _at(
        self, known: dict[_View, Tensor], slot: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor:
        """A view of a slot, which all who ask for the same one share."""
        key = slot, offset, shape, dtype
        if key not in known:
            known[key] = self.arenas.view(self.layout.slots[slot], offset, shape, dtype)
        return known[key]

    def _in_window(self, call: LayerCall, chunk: ChunkContext) -> ChunkContext:
        """Add views of what the layer carries along a sequence to the context of a slice; others stay as they are."""
        if chunk.window is None or "window" not in call.areas:
            return chunk
        places = self.layout.window_of(call.layer).places
        window = replace(chunk.window, carried={}, grads={})
        for spec, offset, grad_offset in places:
            shape = (spec.height(0), *spec.shape)
            slot = self.layout.slots[call.areas["window"]]
            window.carried[spec.name] = self.arenas.view(slot, offset, shape, self.dtypes[spec.dtype])
            if "grad_window" in call.areas:
                slot = self.layout.slots[call.areas["grad_window"]]
                window.grads[spec.name] = self.arenas.view(slot, grad_offset, shape, self.wide)
        return replace(chunk, window=window)

    def _open_grads(self, call: LayerCall, chunk: ChunkContext) -> None:
        """Zero the gradients of all that the layer carries, where the chunk is the last slice of its sequence."""
        window, following = chunk.window, call.chunk + 1
        if window is None or (following < len(self.chunks) and self._start(following) > window.start):
            return
        for grad in window.grads.values():
            grad.zero_()

    def _start(self, chunk: int) -> int:
        window = self.chunks[chunk].window
        return -1 if window is None else window.start


def _call(step: OpStep, env: OpEnv) -> None:
    if step.half == "forward":
        step.op.forward(env)
    elif step.half == "input":
        step.op.backward_input(env)
    elif step.half == "weight":
        step.op.backward_weight(env)
    else:
        step.op.fill_window(env)
