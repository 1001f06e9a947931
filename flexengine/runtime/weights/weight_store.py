"""Stores parameters in the arenas: reads checkpoints, draws random initial weights, and reads masters back out.

A parameter is its Hugging Face sources stacked by rows, so every source is a contiguous run of elements of its
group's planes.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.checkpoint.quantised import DECODERS
from flexengine.checkpoint.reader import CheckpointReader
from flexengine.models.checkpoints import check_fits, open_checkpoint
from flexengine.models.spec import ModelSpec, ParamSpec, WeightSource
from flexengine.models.task_heads import with_new_head
from flexengine.optim.rounding import join_fp32, split_fp32
from flexengine.runtime.arena import DTYPES, Arenas, wide_dtype
from flexengine.runtime.weights.stored_matrices import Span, StoredMatrices, read_pieces
from flexengine.schedule.group_storage import Segment, is_split
from flexengine.schedule.layout import Layout
from flexengine.schedule.shares import ALONE, Share
from flexengine.schedule.slots import PlaneKind

SAMPLED_ELEMENTS = 1024
PIECE_ELEMENTS = 1 << 22
"""Elements converted at a time, which bounds what exporting takes beside the arenas to tens of MiB.

Random initial weights are drawn in pieces of this size: changing it changes the weights that a seed gives.
"""


class SourceRun(NamedTuple):
    """Where a Hugging Face tensor lies: `count` elements from `start` of a group's segment.

    split: its weights are the upper halves of float32 masters; of what is frozen nobody keeps the lower ones. spans:
    where it lies in a group with matrices in fewer bytes.
    """

    source: WeightSource
    param: ParamSpec
    group: int
    segment: Segment
    start: int
    count: int
    frozen: bool
    split: bool
    spans: tuple[Span, ...] = ()

    @property
    def in_fewer_bytes(self) -> bool:
        """Whether it is stored in a format that must be decoded."""
        return self.param.storage != "compute"

    @property
    def whole(self) -> bool:
        """Whether its elements lie one behind the other in the planes, as they are."""
        return not self.spans


def check_checkpoint(model: ModelSpec, folder: Path) -> ModelSpec:
    """Describe the model with its tensors stored as in a checkpoint folder, checked before memory is taken.

    Reads headers only, but for a tied head that is stored beside the embedding. Raises ValueError unless the folder is
    whole and fits the model.
    """
    with open_checkpoint(model, folder) as reader:
        named = with_new_head(model.named_as(reader.tensors), reader.tensors)
        check_fits(named, reader)
        if named.tie_word_embeddings and named.head_source in reader.tensors:
            _check_tied(named, reader)
    return named


def _check_tied(model: ModelSpec, reader: CheckpointReader) -> None:
    """Raise ValueError unless a tied model's head equals its embedding; only the embedding is loaded."""
    head, embedding = model.head_source, model.embedding_source
    if not _equal_values(reader, head, embedding):
        raise ValueError(
            f"{reader.folder}: config.json ties the head to the embedding (tie_word_embeddings), but the checkpoint has"
            f" {head} that differs from {embedding}. Set tie_word_embeddings to false to train both, or remove {head} "
            "from the checkpoint"
        )


def _equal_values(reader: CheckpointReader, *names: str) -> bool:
    """Whether two matrices of a checkpoint hold the same values; reads them in pieces, up to the first difference."""
    (rows, width), shape = (reader.tensors[name].shape for name in names)
    if shape != (rows, width):
        return False
    step = max(1, PIECE_ELEMENTS // width)
    pieces = torch.empty(2, step, width)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        for name, piece in zip(names, pieces, strict=True):
            reader.read_into(name, piece[:count], first, count)
        if not torch.equal(*pieces[:, :count]):
            return False
    return True


def _exact(weight: Tensor, remainder: Tensor) -> Tensor:
    """The float32 of weights and what lies beside them: their lower halves, or beside float16 the masters in whole."""
    return join_fp32(weight, remainder) if remainder.dtype == torch.int16 else remainder


def empty_buffers(layout: Layout, device: torch.device) -> dict[str, Tensor]:
    """The model's buffers by name, with what they hold where there is no checkpoint."""
    dtype, sources = wide_dtype(layout), layout.model.buffers
    return {name: torch.full(s.shape, s.filled, dtype=dtype, device=device) for name, s in sources.items()}


class WeightStore:
    """Reads and writes the stored planes of all parameter groups, on whichever side they live.

    share: which of the tensors that several ranks share this one fills.
    """

    def __init__(self, layout: Layout, arenas: Arenas, share: Share = ALONE) -> None:
        self.share = share
        self.layout, self.arenas, self.stored = layout, arenas, StoredMatrices(layout, arenas)
        self.runs = {run.source.name: run for run in self._all_runs()}

    def _all_runs(self) -> Iterator[SourceRun]:
        for index, group in enumerate(self.layout.model.groups):
            stored = self.layout.groups[index]
            for param in group.params:
                segment = stored.segment_of(param.name)
                start = stored.offsets[param.name] - segment.first_element
                split = is_split(segment.name, self.layout.plan.request.numerics)
                for source in param.sources:
                    count = torch.Size(source.shape).numel()
                    run = SourceRun(source, param, index, segment, start, count, group.frozen, split)
                    if stored.stored is not None:
                        spans = self.stored.spans(index, segment.first_element + start, count)
                        run = run._replace(spans=tuple(spans))
                    yield run
                    start += count

    def own(self) -> dict[str, SourceRun]:
        """The tensors that this rank fills: every `size`-th of those that ranks share, and all that it has alone."""
        groups, (rank, size) = range(len(self.layout.groups)), self.share[:2]
        places = (self.layout.slots[self.layout.stored_slot("weights", group)].memory for group in groups)
        shared = [memory in ("node", "drive") for memory in places]
        numbered = enumerate(self.runs.items())
        return {name: run for number, (name, run) in numbered if not shared[run.group] or number % size == rank}

    def is_linked(self, run: SourceRun) -> bool:
        """Whether a source's weights lie in the checkpoint's files alone, which are only read."""
        slot, linked = self.layout.slots[self.layout.stored_slot("weights", run.group)], self.arenas.linked
        return slot.memory == "drive" and linked is not None and linked.holds(slot.offset)

    def plane(self, kind: PlaneKind, run: SourceRun) -> Tensor | None:
        """Flat view of one plane of a source's elements, or None when the format has no such plane.

        Lower halves of masters that nodes divide: where `show_masters` of the context has them, or `keep_masters` takes
        them from.
        """
        assert run.whole, "what lies in spans is written and read span by span"
        in_gradient = kind == "remainder" and run.group in self.layout.node_states
        divided = self.layout.is_divided(kind, run.group) and not in_gradient
        assert not divided, "a rank has only its share of what ranks divide"
        plane = next((p for p in run.segment.planes if p.kind == kind), None)
        if plane is None:
            return None
        slot = self.layout.slots[self.layout.stored_slot("grad" if in_gradient else kind, run.group)]
        dtype, start = DTYPES[plane.dtype], self.layout.plane_start(run.group, run.segment, plane, ALONE)[0]
        if in_gradient:
            start = run.segment.first_element * dtype.itemsize
        return self.arenas.view(slot, start + run.start * dtype.itemsize, (run.count,), dtype)

    # -- in ----------------------------------------------------------------------------------------------------------

    def store_spans(self, run: SourceRun, values: Iterable[Tensor]) -> None:
        """Store a source that lies in spans. Raises: ValueError naming a tensor with NaN or infinity."""
        try:
            self.stored.write(run.spans, values, run.split)
        except ValueError as error:
            raise ValueError(
                f"{run.source.name}: {error}. Fetch the checkpoint again, or leave --base-dtype out"
            ) from None

    def values(self, reader: CheckpointReader, name: str) -> Iterator[Tensor]:
        """The values of a source in the checkpoint, flat, some at a time; the next may overwrite those before."""
        run = self.runs[name]
        shape = run.source.shape_in_file
        if run.source.decode is None:
            yield from read_pieces(reader, name, math.prod(shape))
            return
        decoder = DECODERS[run.source.decode]
        step = decoder.slab_rows(shape)
        for row in range(0, shape[0], step):
            yield decoder.decode(reader, name, shape, row, min(step, shape[0] - row)).flatten()

    def master(self, run: SourceRun) -> tuple[Tensor, Tensor | None]:
        """The planes that a source's values are kept in."""
        weight = self.plane("weights", run)
        assert weight is not None
        return weight, self.plane("remainder", run)

    def initialize(self, seed: int) -> None:
        """Random initial weights: normal with the config's initializer_range, norms one, biases zero; states zero.

        Every tensor draws from a generator of its own, seeded by its name, on the engine's device: the values depend on
        seed, name and kind of device only.
        """
        self.clear_states()
        self._draw_all(seed, self.own())

    def initialize_added(self, seed: int) -> None:
        """The same for parameters that no checkpoint has yet, such as new adapters."""
        self._draw_all(seed, [name for name, run in self.own().items() if run.param.absent])

    def _draw_all(self, seed: int, names: Iterable[str]) -> None:
        for name in names:
            self.write_pieces(name, self.drawn(name, seed))

    def drawn(self, name: str, seed: int) -> Iterator[Tensor]:
        """The random initial values of a tensor, flat, PIECE_ELEMENTS at a time."""
        run = self.runs[name]
        generator = torch.Generator(self.arenas.device).manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        for start in range(0, run.count, PIECE_ELEMENTS):
            yield self._draw(run.param, min(PIECE_ELEMENTS, run.count - start), generator)

    def _draw(self, param: ParamSpec, count: int, generator: torch.Generator) -> Tensor:
        device = self.arenas.device
        if param.init == "kaiming":  # uniform, as torch.nn.Linear and PEFT begin
            bound = param.shape[-1] ** -0.5
            return torch.empty(count, device=device).uniform_(-bound, bound, generator=generator)
        if param.init == "normal":
            std = self.layout.model.initializer_range
            return torch.empty(count, device=device).normal_(0.0, std, generator=generator)
        return torch.full((count,), 1.0 if param.init == "ones" else 0.0, device=device)

    def write(self, name: str, values: Tensor) -> None:
        """Give a parameter the values of a tensor of its shape on the CPU."""
        flat = values.reshape(-1)
        whole = self.runs[name].whole
        self.write_pieces(name, flat.to(self.arenas.device).split(PIECE_ELEMENTS) if whole else [flat])

    def write_pieces(self, name: str, pieces: Iterable[Tensor]) -> None:
        """Give a parameter the values of pieces of any shapes, one behind the other."""
        run, start = self.runs[name], 0
        if not run.whole:
            self.store_spans(run, pieces)
            return
        weight, remainder = self.master(run)
        for piece in pieces:
            self.write_master(weight, remainder, start, piece.reshape(-1), run.split)
            start += piece.numel()

    def as_stored(self, name: str, values: Tensor) -> Tensor:
        """What `read` gives for a trained parameter that was written with these values."""
        weight, remainder = self.master(self.runs[name])
        return values if remainder is not None else values.to(weight.dtype).to(values.dtype)

    def write_master(self, weight: Tensor, remainder: Tensor | None, start: int, piece: Tensor, split: bool) -> None:
        """Write a piece of a source's values from element `start` on; split: into both halves of a float32."""
        target = weight[start : start + piece.numel()]
        if not split:
            target.copy_(piece)
            if remainder is not None:  # a float32 master in whole
                remainder[start : start + piece.numel()].copy_(piece)
            return
        piece = piece.float()
        halves = torch.empty_like(piece, dtype=torch.bfloat16), torch.empty_like(piece, dtype=torch.int16)
        split_fp32(piece, *halves)
        target.copy_(halves[0])
        if remainder is not None:
            remainder[start : start + piece.numel()].copy_(halves[1])

    def round_masters(self, run: SourceRun) -> None:
        """Give the weights of a tensor the values of masters that lie beside them in whole."""
        weight, remainder = self.master(run)
        if remainder is not None and remainder.dtype == torch.float32:
            weight.copy_(remainder)

    def clear_states(self) -> None:
        """Zero the optimizer states of every parameter."""
        for index, stored in enumerate(self.layout.groups):
            for kind in stored.rule_states:
                dealt = self.layout.is_dealt(kind, index)
                if not dealt and index % self.share.size != self.share.rank:
                    continue
                slot = self.layout.slots[self.layout.stored_slot(kind, index)]
                self.arenas.clear(slot)

    def sampled_digest(self) -> bytes:
        """A digest of the first and last elements of every tensor, by which copies of other models are told apart."""
        digest = hashlib.blake2b(digest_size=16)
        for run in (run for run in self.runs.values() if run.whole):
            weight = self.master(run)[0]
            for sample in (weight[:SAMPLED_ELEMENTS], weight[-SAMPLED_ELEMENTS:]):
                digest.update(sample.cpu().view(torch.uint8).numpy().data)
        return digest.digest()

    # -- out ---------------------------------------------------------------------------------------------------------

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The master value of a Hugging Face tensor on the CPU, exact in float32 (float64), or cast to `dtype`.

        A frozen tensor has no master; its value is the one that is computed with, decoded where it is in fewer bytes.
        """
        run = self.runs[name]
        out = torch.empty(run.count, dtype=dtype or self._exact_dtype(run))
        start = 0
        for piece in self.pieces(name, out.dtype):
            out[start : start + piece.numel()].copy_(piece)
            start += piece.numel()
        return out.view(run.source.shape)

    def pieces(self, name: str, dtype: torch.dtype | None = None, first: int = 0) -> Iterator[Tensor]:
        """The values of `read` from element `first` on, flat, so many at a time that they take next to no memory."""
        run = self.runs[name]
        if not run.whole:
            assert not first, "what lies in spans is read from its start"
            for values in self.stored.values(run.spans):
                yield values.cpu().to(dtype or self._exact_dtype(run))
            return
        weight, remainder = self.master(run)
        for start in range(first, run.count, PIECE_ELEMENTS):
            piece = slice(start, min(start + PIECE_ELEMENTS, run.count))
            value = weight[piece].cpu()  # weight and remainder may live on different sides
            exact = value if remainder is None else _exact(value, remainder[piece].cpu())
            yield exact.to(dtype or self._exact_dtype(run))

    def _exact_dtype(self, run: SourceRun) -> torch.dtype:
        """The dtype that holds the values of a tensor exactly, float32 at least."""
        if not run.whole:
            compute = DTYPES[self.layout.plan.request.numerics.compute]
            return torch.float32 if compute.itemsize == 2 else compute
        weight, remainder = self.master(run)
        return torch.float32 if remainder is not None or weight.dtype.itemsize == 2 else weight.dtype

    def read_gradient(self, name: str, scale: float) -> Tensor:
        """The stored gradient of a Hugging Face tensor times `scale`, float32 (float64) on the CPU."""
        run = self.runs[name]
        grad = self.plane("grad", run)
        assert grad is not None
        return (grad.to(device="cpu", dtype=wide_dtype(self.layout)) * scale).view(run.source.shape)

    def read_gradients(self, scale: float) -> dict[str, Tensor]:
        """Every stored gradient times `scale`, by Hugging Face name; frozen parameters have none."""
        return {name: self.read_gradient(name, scale) for name, run in self.runs.items() if not run.frozen}
