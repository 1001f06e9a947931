"""Runs forward on pieces of sequences whose earlier tokens are in a cache: prompts, and then token by token.

All sequences share one chunk. Ops that carry nothing along a sequence see the chunk as in training, and so does
attention where prompts begin in it, one behind the other. The others run once for each sequence, with a window that is
the sequence's own cache; where our kernels of attention run, once for all new tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, takewhile
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.models.spec import ModelSpec
from flexengine.ops.attention.attention import CausalAttention
from flexengine.ops.base import ChunkContext, Op, OpEnv, Window
from flexengine.ops.custom_loss import call_tokens
from flexengine.runtime.arena import Arenas
from flexengine.schedule.commands import LayerCall
from flexengine.schedule.decoding_cache import CachedTensor, place_in
from flexengine.schedule.relocation import ByteRange

Cache = dict[int, dict[str, Tensor]]
"""What one sequence left: layer -> name -> tensor."""
Choose = Callable[[Tensor, Sequence[torch.Generator]], list[int]]


class Piece(NamedTuple):
    """Tokens [start, start + length) of a sequence in a chunk. number: of the pieces of the sequence before it.

    generator: of what its sequence draws; None where more pieces follow.
    """

    cache: Cache
    start: int
    length: int
    number: int
    generator: torch.Generator | None


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
    """Runs the ops of one chunk of pieces. tokens: those that follow every last piece, in order.

    choose: takes logits [N, V] in float32 and the sequences' generators, and returns the next tokens.
    """

    def __init__(self, pieces: list[Piece], chunk_tokens: int, choose: Choose) -> None:
        self._pieces, self._chunk_tokens, self._choose = pieces, chunk_tokens, choose
        self.tokens: list[int] = []
        self._parts: list[tuple[slice, ChunkContext]] = []
        self._new_tokens: tuple[Tensor, Tensor] | None = None
        self._prompts: tuple[range, tuple[slice, ChunkContext]] | None = None

    def runs(self, op: Op, env: OpEnv, call: LayerCall) -> bool:
        """Run an op that is not run as in training; returns False for others."""
        if hasattr(op, "logits_of"):
            self._choose_tokens(op, env)
        elif isinstance(op, CausalAttention):
            decodes = op.decodes(env)
            if decodes:
                self._decode_together(op, env, call.layer)
            together = [] if len(self._pieces) == 1 else self._attend_to_prompts(op, env, call.layer)
            rest = [not (decodes and piece.length == 1) and i not in together for i, piece in enumerate(self._pieces)]
            if any(rest):
                self._run_by_sequence(op, env, call.layer, rest)
        elif op.carried:
            self._run_by_sequence(op, env, call.layer, [True] * len(self._pieces))
        else:
            return False
        return True

    def _decode_together(self, op: CausalAttention, env: OpEnv, layer: int) -> None:
        """Run attention of all pieces of one token."""
        starts = [piece.start for piece in self._pieces if piece.length == 1]
        if not starts:
            return
        if self._new_tokens is None:
            ends = accumulate(piece.length for piece in self._pieces)
            rows = [end - 1 for end, piece in zip(ends, self._pieces, strict=True) if piece.length == 1]
            rows, starts = (torch.tensor(x, dtype=torch.int32).to(env.chunk.positions.device) for x in (rows, starts))
            self._new_tokens = rows, starts
        caches = [piece.cache[layer] for piece in self._pieces if piece.length == 1]
        op.decode(env, *self._new_tokens, [[cache[part.name] for cache in caches] for part in op.carried])

    def _choose_tokens(self, op: Op, env: OpEnv) -> None:
        """Choose the next tokens by the logits of a few pieces at a time, as however many never fill the memory."""
        ends = accumulate(piece.length for piece in self._pieces)
        last = [(end - 1, piece.generator) for end, piece in zip(ends, self._pieces, strict=True) if piece.generator]
        hidden, most = env.t[op.inputs[0]], call_tokens(op.vocab_size)  # type: ignore[attr-defined]
        for first in range(0, len(last), most):
            rows, generators = zip(*last[first : first + most], strict=True)
            taken = hidden[torch.tensor(rows, device=hidden.device)]
            self.tokens += self._choose(op.logits_of(taken, env.p).float(), generators)  # type: ignore[attr-defined]

    def _attend_to_prompts(self, op: CausalAttention, env: OpEnv, layer: int) -> range:
        """Run attention of prompts that begin here, one behind the other, as in training; returns their pieces.

        New ones enter behind all others, so that there is one such run, the last in the chunk.
        """
        if self._prompts is None:  # once for all layers, as in `_run_by_sequence`
            count = sum(1 for _ in takewhile(lambda piece: not piece.start and piece.length > 1, self._pieces[::-1]))
            pieces = range(len(self._pieces) - count, len(self._pieces))
            lengths = [piece.length for piece in self._pieces]
            self._prompts = pieces, _part(env.chunk, sum(lengths[: pieces.start]), lengths[pieces.start :])
        pieces, (rows, chunk) = self._prompts
        if len(pieces) > 1:
            own = replace(env, t=_rows_of(op, env, rows), chunk=chunk)
            op.forward(own)
            caches = [self._pieces[i].cache[layer] for i in pieces]
            op.fill_caches(own, [[cache[part.name] for cache in caches] for part in op.carried])
            return pieces
        return range(0)

    def _run_by_sequence(self, op: Op, env: OpEnv, layer: int, takes: list[bool]) -> None:
        if not self._parts:  # once for all layers: it makes tensors on the device
            ends = accumulate(piece.length for piece in self._pieces)
            lengths = (piece.length for piece in self._pieces)
            self._parts = [_part(env.chunk, end - length, [length]) for end, length in zip(ends, lengths, strict=True)]
        for piece, (rows, chunk), is_taken in zip(self._pieces, self._parts, takes, strict=True):
            if is_taken:
                window = DecodingWindow(piece.start, piece.number, self._chunk_tokens, piece.cache[layer])
                op.forward(replace(env, t=_rows_of(op, env, rows), chunk=replace(chunk, window=window)))


def _rows_of(op: Op, env: OpEnv, rows: slice) -> dict[str, Tensor]:
    """The tensors of a call of an op on some rows."""
    names = {*op.inputs, *(spec.name for spec in op.outputs)}
    return {name: tensor[rows] if name in names else tensor for name, tensor in env.t.items()}


def _part(chunk: ChunkContext, first: int, lengths: Sequence[int]) -> tuple[slice, ChunkContext]:
    """The rows of pieces of these lengths from row `first` on, and the context of these alone."""
    rows, bounds = slice(first, first + sum(lengths)), [0, *accumulate(lengths)]
    own = replace(
        chunk,
        tokens=bounds[-1],
        input_ids=chunk.input_ids[rows],
        labels=chunk.labels[rows],
        positions=chunk.positions[rows],
        cu_seqlens=torch.tensor(bounds, dtype=chunk.cu_seqlens.dtype, device=chunk.cu_seqlens.device),
        seq_lens=tuple(lengths),
        losses=chunk.losses[rows],
        blocks=None if chunk.blocks is None else chunk.blocks.within(rows),
    )
    return rows, own


def ops_by_sequence(model: ModelSpec, own_kernels: bool) -> int:
    """How many ops of a model run for each sequence alone. own_kernels: our kernels of attention run."""
    ops = (op for layer in model.layers for op in layer.ops if op.carried)
    return sum(not (own_kernels and isinstance(op, CausalAttention)) for op in ops)


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
