"""Replays commands from CUDA graphs, blocks' and the rounding of gradients, so that the host issues each in one call.

A batch whose sequences have the lengths of the batch before is captured. What a command reads and writes lies in the
arenas, at addresses that the command and the chunk's size decide, so that later runs may launch the same kernels again.
Whatever cannot be replayed runs as it does without graphs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from functools import cache, partial
from typing import NamedTuple

import torch

from flexengine.hardware.memory_usage import hold_cublas_workspace
from flexengine.runtime.layer_runner import LayerRunner
from flexengine.schedule.commands import LayerCall
from flexengine.schedule.replays import (
    graph_bytes,
    may_replay,
    most_graph_bytes,
    most_rounding_bytes,
    workspace_bytes_of,
)

log = logging.getLogger("flexengine")

MOST_KNOWN = 16384
"""Commands whose keys are remembered."""
MOST_PATIENCE = 64
"""Most batches alike after which the next one is captured: one at first, and twice as many whenever graphs must go."""
REPLAYED_KINDS = ("forward", "recompute", "backward")
Launch = Callable[[], None]
Capture = Callable[[Launch], Launch]
"""Takes what launches kernels, which does so once without running them; returns what launches the same again."""


class _Known(NamedTuple):
    """A call, kept as the number by which it is found is its address, and what decides its kernels' operands."""

    call: LayerCall
    key: tuple


class GraphCapture:
    """Captures CUDA graphs on a stream of its own, with one pool of memory for what calls in them take.

    workspace_bytes: that the pool begins with in one block, so that calls' buffers of many sizes leave no gaps.
    """

    def __init__(self, device: torch.device, workspace_bytes: int) -> None:
        self._device, self._workspace_bytes = device, workspace_bytes
        self._stream, self._pool = _capture_stream(device), torch.cuda.graph_pool_handle()

    def __call__(self, run: Launch) -> Launch:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            # other threads copy and wait meanwhile, which is no part of the graph
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                if self._workspace_bytes:
                    torch.empty(self._workspace_bytes, dtype=torch.uint8, device=self._device)
                    self._workspace_bytes = 0
                run()
            finally:
                graph.capture_end()
        return graph.replay


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that graphs are captured on, with cuBLAS's workspace for it, which no pool of graphs then holds."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        hold_cublas_workspace(device)
    return stream


class Replay:
    """Runs commands of layers as `LayerRunner` does, from graphs where it has them.

    Each graph is of one command and one tuple of sequence lengths. What calls in graphs take of the workspace is theirs
    alone, so that there is no room for calls outside: either all blocks run from graphs, or there are no graphs.
    """

    def __init__(self, layers: LayerRunner, open_capture: Callable[[], Capture] | None = None) -> None:
        """open_capture: begins a set of graphs that go together; None: of CUDA."""
        layout = layers.layout
        self._layers, self._model = layers, layout.model
        self._most_bytes = most_graph_bytes(layout.model, layout.plan) if may_replay(layout.model) else 0
        self._most_for_others = most_rounding_bytes(layout.model, layout.plan)
        self._left_bytes, self._left_for_others, self._patience = self._most_bytes, self._most_for_others, 1
        workspace_bytes = workspace_bytes_of("block", layout.model, layout.plan)
        self._open_capture = open_capture or partial(GraphCapture, layers.arenas.device, workspace_bytes)
        self._capture: Capture | None = None
        self._known: dict[tuple[int, str], _Known] = {}
        self._batch: object = None
        self._times, self._replays = 0, False
        self._graphs: dict[Hashable, Launch] = {}
        self._launched: set[Hashable] = set()  # of what is no layer's

    @property
    def num_graphs(self) -> int:
        """Graphs that there are now."""
        return len(self._graphs)

    def begin_batch(self, lengths: object) -> None:
        """Decide whether a batch runs from graphs. lengths: of the sequences of all chunks of its rounds."""
        self._times = self._times + 1 if lengths == self._batch else 1
        self._batch = lengths
        self._replays = self._times > self._patience and self._most_bytes > 0
        if self._graphs and not self._replays:  # if that happens often, capturing does not pay
            self._patience = min(2 * self._patience, MOST_PATIENCE)

    def run(self, kind: str, call: LayerCall) -> None:
        """Run one command as `LayerRunner.run`, on the current stream."""
        if self._model.layers[call.layer].kind != "block":
            self._layers.run(kind, call)
            return
        graph = self._graph_of_block(kind, call) if self._replays and self._may_replay(kind, call) else None
        if graph is not None:
            graph()
            return
        self._drop()
        self._layers.run(kind, call)

    def run_other(self, key: Hashable, label: str, num_kernels: float, launch: Launch) -> None:
        """Run what is no layer's on the current stream, from a graph where blocks are and there is room for it.

        key: decides what is launched. The first time it is launched as it is: kernels must be loaded to be captured.
        """
        graph, num_bytes = self._graphs.get(key), graph_bytes(num_kernels)
        if graph is None and key not in self._launched:
            self._launched.add(key)
        elif graph is None and self._replays and num_bytes <= self._left_for_others:
            graph = self._captured(key, label, launch)
            self._left_for_others -= num_bytes
        (graph or launch)()

    def _may_replay(self, kind: str, call: LayerCall) -> bool:
        chunk = self._layers.chunks[call.chunk]
        return kind in REPLAYED_KINDS and chunk.window is None and chunk.balance is None and chunk.adapters

    def _graph_of_block(self, kind: str, call: LayerCall) -> Launch | None:
        chunk = self._layers.chunks[call.chunk]
        key = self._key(kind, call), chunk.seq_lens
        graph = self._graphs.get(key)
        if graph is not None:
            return graph
        stage = call.program.stages(kind)[call.stage]
        num_bytes = graph_bytes(stage.work(chunk.tokens, max(chunk.seq_lens), 2).kernels)
        if num_bytes > self._left_bytes:
            self._give_up(f"the plan has {self._most_bytes / 2**20:.0f} MiB for graphs, and this batch needs more")
            return None
        self._left_bytes -= num_bytes
        return self._captured(key, f"{kind} of layer {call.layer}", partial(self._layers.run, kind, call))

    def _captured(self, key: Hashable, label: str, launch: Launch) -> Launch | None:
        """A new graph; None, and graphs no more, where it cannot be captured."""
        if self._capture is None:
            self._reserve(0)  # or what the stream keeps would hold a part of the block that calls had
            self._capture = self._open_capture()
            self._reserve(workspace_bytes_of("edge", self._model, self._layers.layout.plan))
        try:
            graph = self._capture(launch)
        except RuntimeError as error:
            self._give_up(f"{label} cannot be captured: {str(error).splitlines()[0]}")
            return None
        self._graphs[key] = graph
        return graph

    def _give_up(self, why: str) -> None:
        """Run from graphs no longer."""
        log.warning("CUDA graphs are left out, so steps may take longer than predicted: %s", why)
        self._replays, self._most_bytes = False, 0

    def _drop(self) -> None:
        """Forget all graphs, so that blocks have the whole workspace again."""
        if self._graphs:
            if self._layers.arenas.device.type == "cuda":  # what runs may not lose its graph
                torch.cuda.synchronize(self._layers.arenas.device)
            self.close()
            self._left_bytes, self._left_for_others = self._most_bytes, self._most_for_others
            self._reserve(self._layers.layout.workspace_bytes)

    def _reserve(self, num_bytes: int) -> None:
        """Give back what torch's allocator keeps for calls, and have it keep so many bytes in one block."""
        self._layers.arenas.reserve_workspace(num_bytes)

    def close(self) -> None:
        """Give the graphs' memory back. Order: none of them runs any more."""
        self._graphs.clear()
        self._capture = None

    def _key(self, kind: str, call: LayerCall) -> tuple:
        """What decides a command's operands: rounds of one step have commands of their own with the same slots."""
        known = self._known.get((id(call), kind))
        if known is None:
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            slots = (tuple(sorted(found.items())) for found in (call.areas, call.weights, call.accumulators))
            place = call.layer, call.chunk, call.stage, call.part, call.first
            known = self._known[id(call), kind] = _Known(call, (kind, call.program, *place, *slots))
        return known.key
