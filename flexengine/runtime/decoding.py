"""Runs forward on pieces of sequences whose earlier tokens are in a cache: prompts, and then token by token.

All sequences share one chunk. Ops that carry nothing along a sequence see the chunk as in training. The others run once
for each sequence, with a window that is the sequence's own cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import ChunkContext, Op, OpEnv, Window
from flexengine.ops.custom_loss import call_tokens
from flexengine.runtime.arena import Arenas
from flexengine.schedule.commands import LayerCall
from flexengine.schedule.decoding_cache import CachedTensor, place_in
from flexengine.schedule.relocation import ByteRange

Cache = dict[int, dict[str, Tensor]]
"""What one sequence left: layer -> name -> tensor."""


class Piece(NamedTuple):
    """Tokens [start, start + length) of a sequence in a chunk. number: of the pieces of the sequence before it.

    choose: takes the logits [V] after its last token, float32, and returns the next one; None where more pieces follow.
    """

    cache: Cache
    start: int
    length: int
    number: int
    choose: Callable[[Tensor], int] | None


@dataclass
class DecodingWindow(Window):
    """A window whose states alternate between two rows, however many pieces a sequence has."""

    def before(self, name: str, grad: bool = False) -> Tensor | None:
        """What the piece before left; None for the first."""
        return self.carried[name][(self.chunk - 1) % 2] if self.chunk else None

    def left(self, name: str, grad: bool = False) -> Tensor:
        """Where this piece leaves its own."""
        return self.carried[name][self.chunk % 2]


class Decoder:
    """Runs the ops of one chunk of pieces. tokens: those that follow every last piece, in order."""

    def __init__(self, pieces: list[Piece], chunk_tokens: int) -> None:
        self._pieces, self._chunk_tokens = pieces, chunk_tokens
        self.tokens: list[int] = []
        self._parts: list[tuple[slice, ChunkContext]] = []

    def runs(self, op: Op, env: OpEnv, call: LayerCall) -> bool:
        """Run an op that is not run as in training; returns False for others."""
        if hasattr(op, "logits_of"):
            self._choose_tokens(op, env)
        elif op.carried:
            self._run_by_sequence(op, env, call.layer)
        else:
            return False
        return True

    def _choose_tokens(self, op: Op, env: OpEnv) -> None:
        """Choose the next tokens by the logits of a few pieces at a time, as however many never fill the memory."""
        ends = accumulate(piece.length for piece in self._pieces)
        last = [(end - 1, piece.choose) for end, piece in zip(ends, self._pieces, strict=True) if piece.choose]
        hidden, most = env.t[op.inputs[0]], call_tokens(op.vocab_size)  # type: ignore[attr-defined]

        def chosen(few: list[tuple[int, Callable[[Tensor], int]]]) -> list[int]:
            rows = hidden[torch.tensor([row for row, _ in few], device=hidden.device)]
            logits = op.logits_of(rows, env.p).float()  # type: ignore[attr-defined]
            return [choose(row) for (_, choose), row in zip(few, logits, strict=True)]

        for first in range(0, len(last), most):
            self.tokens += chosen(last[first : first + most])

    def _run_by_sequence(self, op: Op, env: OpEnv, layer: int) -> None:
        self._parts = self._parts or self._cut(env.chunk)  # once for all layers: it makes tensors on the device
        names = {*op.inputs, *(spec.name for spec in op.outputs)}
        for piece, (rows, chunk) in zip(self._pieces, self._parts, strict=True):
            tensors = {name: tensor[rows] if name in names else tensor for name, tensor in env.t.items()}
            window = DecodingWindow(piece.start, piece.number, self._chunk_tokens, piece.cache[layer])
            op.forward(replace(env, t=tensors, chunk=replace(chunk, window=window)))

    def _cut(self, chunk: ChunkContext) -> list[tuple[slice, ChunkContext]]:
        """The rows of each piece, and the context of the piece alone."""
        parts, first = [], 0
        for piece in self._pieces:
            rows = slice(first, first + piece.length)
            ends = torch.tensor([0, piece.length], dtype=chunk.cu_seqlens.dtype, device=chunk.cu_seqlens.device)
            own = replace(
                chunk,
                tokens=piece.length,
                input_ids=chunk.input_ids[rows],
                labels=chunk.labels[rows],
                positions=chunk.positions[rows],
                cu_seqlens=ends,
                seq_lens=(piece.length,),
                losses=chunk.losses[rows],
            )
            parts.append((rows, own))
            first = rows.stop
        return parts


class CacheRoom(NamedTuple):
    """Where caches may lie, and what a sequence leaves: the free parts of the GPU arena, and the tensors of a cache."""

    arenas: Arenas
    ranges: list[ByteRange]
    tensors: list[CachedTensor]
    compute: torch.dtype

    def caches(self, most: int) -> list[Cache]:
        """Make the caches of as many sequences as there is room for, at most `most`."""
        sizes = [tensor.spec.num_bytes(0, self.compute.itemsize) for tensor in self.tensors]
        count = most
        while count and (places := place_in(self.ranges, sizes * count)) is None:
            count -= 1
        if not count:
            return []
        assert places is not None
        step = len(sizes)
        return [self._cache(places[i * step : (i + 1) * step]) for i in range(count)]

    def _cache(self, places: list[ByteRange]) -> Cache:
        cache: Cache = {}
        wide = torch.float64 if self.compute == torch.float64 else torch.float32
        for tensor, place in zip(self.tensors, places, strict=True):
            dtype = self.compute if tensor.spec.dtype == "compute" else wide
            raw = self.arenas.bytes_view("gpu", place.offset, place.num_bytes)
            shape = (tensor.spec.height(0), *tensor.spec.shape)
            cache.setdefault(tensor.layer, {})[tensor.carried.name] = raw.view(dtype).view(shape)
        return cache
