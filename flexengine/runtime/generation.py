"""Generates tokens after prompts, many prompts at a time, each token's forward pass reading a cache of those before.

A prompt enters as soon as a cache is free, so that its first pass goes together with the next token of others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.models.spec import ModelSpec
from flexengine.ops.custom_loss import IGNORE_INDEX
from flexengine.ops.given_rows import Columns
from flexengine.runtime.batch_input import Sequences
from flexengine.runtime.decoding import Cache, CacheRoom, Choose, Decoder, Piece
from flexengine.runtime.given_rows import GivenInput, given_input
from flexengine.runtime.layer_runner import LayerRunner
from flexengine.runtime.rounds import RoundRunner
from flexengine.schedule.decoding_cache import cached_tensors, free_ranges, sequence_cache_bytes
from flexengine.schedule.packing import PackedChunk, SequenceRange

BLOCK = 512
"""Probabilities that are added up at once where tokens are drawn."""


class Sampling(NamedTuple):
    """How the next token is chosen: the likeliest at temperature 0, else drawn from the likeliest that sum to top_p.

    seed: of the draws; each prompt has its own, so that they do not depend on what else is generated.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def check(self) -> None:
        """Raise ValueError for values that mean nothing."""
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a finite number of at least 0, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if self.top_p < 1.0 and not self.temperature:
            raise ValueError(
                f"top_p={self.top_p} is about drawing tokens, got temperature=0; raise it, or leave it out"
            )

    def choose(self, logits: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
        """Choose a token by each row of logits [N, V], float32, with draws of its own generator, on the CPU."""
        if self.temperature == 0.0:
            return logits.argmax(dim=1).tolist()
        logits = logits.cpu() if self.top_p < 1.0 else logits
        probabilities, tokens = torch.softmax(logits.double() / self.temperature, dim=1), None
        if self.top_p < 1.0:  # sorting a large vocabulary takes ten times what drawing does
            probabilities, tokens = probabilities.sort(dim=1, descending=True)
            probabilities[probabilities.cumsum(1) - probabilities >= self.top_p] = 0.0
        draws = torch.cat([torch.rand(1, dtype=torch.float64, generator=one) for one in generators])
        found = _drawn(probabilities, draws)
        return found if tokens is None else [int(row[index]) for row, index in zip(tokens, found, strict=True)]


GREEDY = Sampling()


def _drawn(probabilities: Tensor, draws: Tensor) -> list[int]:
    """The index in each row of probabilities [N, V] at which running sums pass draws [N], of what a row sums to.

    The block in which that is comes first, then its place there, so that a GPU hands over few numbers and adds none up
    in an order of its own, as its running sums of a whole row do.
    """
    rows = torch.nn.functional.pad(probabilities, (0, -probabilities.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    sums = rows.sum(dim=2).cpu()
    running = sums.cumsum(1)
    places = draws[:, None] * running[:, -1:]
    blocks = _passed(running, places)
    rest = places - (running - sums).gather(1, blocks)
    inside = rows[torch.arange(len(rows), device=rows.device), blocks[:, 0].to(rows.device)].cpu()
    return (blocks * BLOCK + _passed(inside.cumsum(1), rest))[:, 0].tolist()


def _passed(running: Tensor, places: Tensor) -> Tensor:
    """Where running sums [N, K] first pass places [N, 1]; where rounding has these at or behind the end, the last place
    at which a sum grew."""
    last = torch.searchsorted(running, running[:, -1:].contiguous())
    return torch.searchsorted(running, places.contiguous(), right=True).minimum(last)


@dataclass
class _Sequence:
    """A sequence that is generated. done: how many of its tokens are in the cache; pieces: in how many passes."""

    index: int
    ids: list[int]
    most_tokens: int
    cache: Cache
    generator: torch.Generator
    done: int = 0
    pieces: int = 0
    new: list[int] = field(default_factory=list)


Tell = Callable[[int, int], bool | None]
"""Takes the number of a prompt and its next token; True ends that answer."""


class GenerationRequest(NamedTuple):
    """What to generate: at most max_new_tokens after every prompt, up to one of stop_ids.

    tell: called with each new token as soon as it is known. keep_stop: whether the stop token that ends an answer is
    part of it. images: columns of pixels, of all prompts.
    """

    prompts: Sequence[Sequence[int]]
    max_new_tokens: int
    stop_ids: Collection[int]
    sampling: Sampling
    tell: Tell | None = None
    keep_stop: bool = False
    images: Columns | None = None

    def check(self, model: ModelSpec, max_seq_len: int) -> None:
        """Raise ValueError naming the prompt, what was found and what is allowed; or a head that predicts no tokens."""
        self.sampling.check()
        if model.task is not None:
            raise ValueError(
                f"{model.name} has a head for labels ({model.head_source}), which predicts no tokens; give a model that"
                " does (...ForCausalLM)"
            )
        vocab_size = model.vocab_size
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        for i, prompt in enumerate(self.prompts):
            if not len(prompt):
                raise ValueError(f"prompt {i} is empty; give at least one token")
            if len(prompt) >= max_seq_len:
                raise ValueError(
                    f"prompt {i} has {len(prompt)} tokens, which leaves none of max_seq_len={max_seq_len} for an"
                    " answer; shorten it, or raise max_seq_len"
                )
            if not all(0 <= token < vocab_size for token in prompt):
                raise ValueError(f"prompt {i} has token ids outside of 0..{vocab_size - 1}; use the model's tokenizer")

    def cached_tokens(self, max_seq_len: int) -> int:
        """Tokens that the longest sequence leaves in its cache: all but the last, which nothing follows."""
        longest = max(len(prompt) for prompt in self.prompts)
        return min(longest + self.max_new_tokens, max_seq_len) - 1


class Generator:
    """Generates under one layout. Order: nothing else may run on the device, before, in between and after."""

    def __init__(self, rounds: RoundRunner, layers: LayerRunner) -> None:
        self._rounds, self._layers, self._layout = rounds, layers, layers.layout
        self._chunk_tokens = layers.layout.plan.chunk_tokens
        model = layers.layout.model
        self._whole_prompts = model.whole_sequences
        self._cached = any(op.carried for layer in model.layers for op in layer.ops)

    def generate(self, request: GenerationRequest) -> list[list[int]]:
        """Return the new tokens after each prompt. Raises ValueError where no cache of one sequence fits."""
        rows = self._given(request)
        self._rounds.begin_rows(Sequences([], [], rows=rows))
        waiting = list(enumerate(request.prompts))[::-1]
        answers: list[list[int]] = [[] for _ in waiting]
        caches = self._caches(request)
        active: list[_Sequence] = []
        while waiting or active:
            while waiting and caches:
                active.append(self._admitted(*waiting.pop(), caches.pop(), request))
            found = self._forward(active, request, rows)
            for sequence, token in zip(active, found, strict=True):
                self._extend(sequence, token, request)
            for sequence in [s for s in active if len(s.ids) >= s.most_tokens or s.ids[-1] in request.stop_ids]:
                active.remove(sequence)
                caches.append(sequence.cache)
                answers[sequence.index] = sequence.new
        return answers

    def _given(self, request: GenerationRequest) -> GivenInput | None:
        """What the prompts say of given rows, with positions in several axes for the tokens that follow, too."""
        ids = [torch.tensor(prompt) for prompt in request.prompts]
        rows = given_input(self._layout.model, ids, dict(request.images or {}))
        if rows is None:
            return None
        after = [axes.max() + 1 + torch.arange(request.max_new_tokens) for axes in rows.axes]
        pairs = zip(rows.axes, after, strict=True)
        return rows._replace(axes=tuple(torch.cat((own, n.expand(len(own), -1)), 1) for own, n in pairs))

    def _caches(self, request: GenerationRequest) -> list[Cache]:
        layout, arenas = self._layout, self._layers.arenas
        tokens = request.cached_tokens(layout.plan.request.max_seq_len)
        ranges = free_ranges(layout, self._rounds.forward_program(), arenas.capacity["gpu"])
        room = CacheRoom(arenas, ranges, cached_tensors(layout.model, tokens), self._layers.compute)
        caches = room.caches(len(request.prompts))
        if not caches:
            needed = sequence_cache_bytes(layout.model, tokens, self._layers.compute.itemsize)
            free = sum(place.num_bytes for place in ranges)
            raise ValueError(
                f"the cache of one sequence of {tokens} tokens takes {needed} bytes, and {free} bytes of the GPU memory"
                " of this plan are free between steps; give fewer new tokens, a shorter prompt, or a larger GPU budget"
            )
        return caches

    @staticmethod
    def _admitted(index: int, prompt: Sequence[int], cache: Cache, request: GenerationRequest) -> _Sequence:
        most = len(prompt) + request.max_new_tokens
        generator = torch.Generator().manual_seed((request.sampling.seed << 20) + index)
        return _Sequence(index, list(prompt), most, cache, generator)

    def _extend(self, sequence: _Sequence, token: int, request: GenerationRequest) -> None:
        """Append the next token; a stop token ends the sequence and is not part of the answer."""
        max_seq_len = self._layout.plan.request.max_seq_len
        sequence.ids.append(token)
        sequence.most_tokens = min(sequence.most_tokens, max_seq_len)
        if token not in request.stop_ids:
            sequence.new.append(token)
            if request.tell is not None and request.tell(sequence.index, token):
                sequence.most_tokens = len(sequence.ids)
        elif request.keep_stop:
            sequence.new.append(token)

    # -- passes ------------------------------------------------------------------------------------------------------

    def _forward(self, active: list[_Sequence], request: GenerationRequest, rows: GivenInput | None) -> list[int]:
        """Run forward of all tokens that are not cached; returns the one that follows each sequence.

        rows: given ones of all prompts, over which they are counted.
        """
        ids, running = [torch.empty(0, dtype=torch.int64)] * len(request.prompts), {s.index: s for s in active}
        for sequence in active:
            ids[sequence.index] = torch.tensor(sequence.ids)
        batch = Sequences(ids, [torch.full_like(row, IGNORE_INDEX) for row in ids], rows=rows)
        found: list[int] = []
        for ranges in self._chunks(active):
            pieces = [self._piece(running[r.sequence], r) for r in ranges]
            self._layers.decoder = decoder = Decoder(pieces, self._chunk_tokens, self._chooser(request.sampling))
            try:
                self._rounds.forward_chunk(batch, PackedChunk(tuple(ranges)))
            finally:
                self._layers.decoder = None
            found += decoder.tokens
        return found

    def _chooser(self, sampling: Sampling) -> Choose:
        """How tokens are chosen: never one that stands for an image, as no image would go with it."""
        given = self._layout.model.given
        if given is None:
            return sampling.choose

        def choose(logits: Tensor, generators: Sequence[torch.Generator]) -> list[int]:
            logits[:, given.token_id] = float("-inf")
            return sampling.choose(logits, generators)

        return choose

    @staticmethod
    def _piece(sequence: _Sequence, taken: SequenceRange) -> Piece:
        number, end = sequence.pieces, taken.start + taken.length
        sequence.pieces, sequence.done = number + 1, end
        generator = sequence.generator if end == len(sequence.ids) else None
        return Piece(sequence.cache, taken.start, taken.length, number, generator)

    def _chunks(self, active: list[_Sequence]) -> list[list[SequenceRange]]:
        """Fill chunks with the tokens that are not cached, sequence after sequence; long prompts are cut.

        Layers that take sequences whole get prompts whole. Where they cache nothing, all tokens of a sequence pass
        again for every new one.
        """
        chunks: list[list[SequenceRange]] = [[]]
        room = self._chunk_tokens
        for sequence in active:
            start = sequence.done if self._cached else 0
            if self._whole_prompts and len(sequence.ids) - start > room:
                chunks.append([])
                room = self._chunk_tokens
            while start < len(sequence.ids):
                if not room:
                    chunks.append([])
                    room = self._chunk_tokens
                length = min(room, len(sequence.ids) - start)
                chunks[-1].append(SequenceRange(sequence.index, start, length))
                start, room = start + length, room - length
        return chunks
