"""Fills the batch slot of a round from sequences: token ids, shifted labels, positions and lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexengine.ops.attention.choice import AttentionChoice, KernelName
from flexengine.ops.base import ChunkContext, Window
from flexengine.ops.custom_loss import CustomLoss, LossFunction
from flexengine.runtime.arena import Arenas, wide_dtype
from flexengine.runtime.batch_input import Sequences
from flexengine.runtime.given_rows import RowMaker, axes_of, blocks_of
from flexengine.schedule.fixed_slots import batch_offsets
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import PackedChunk
from flexengine.schedule.slots import Memory


def constant_tables(layout: Layout, device: torch.device) -> dict[str, Tensor]:
    """Tensors that all chunks share by name: the model's tables, and the attention kernels' random state of zeros."""
    longest, wide = layout.plan.request.max_seq_len, wide_dtype(layout)
    tables = layout.model.tables
    return {
        **{table.name: torch.tensor(table.values_for(longest), dtype=wide, device=device) for table in tables},
        "attention_rng": torch.zeros(2, dtype=torch.int64, device=device),
    }


class BatchWriter:
    """Fills the host batch slot of a round and makes the chunk contexts that point into the GPU slot."""

    def __init__(
        self, layout: Layout, arenas: Arenas, constants: dict[str, Tensor], attention: KernelName,
        attention_choices: tuple[AttentionChoice, ...] = (),
    ) -> None:  # fmt: skip
        self.layout, self.arenas, self.constants = layout, arenas, constants
        self.attention: KernelName = attention
        self.attention_choices = attention_choices
        self._given = None if layout.model.given is None else RowMaker(layout, arenas)
        self.chunk_tokens = layout.plan.chunk_tokens
        self.offsets = batch_offsets(layout.plan.num_chunks, self.chunk_tokens, layout.model.num_axes)

    def _field(self, memory: Memory, name: str, chunk: int, count: int) -> Tensor:
        width = {"input_ids": 8, "labels": 8}.get(name, 4)
        rows = {"cu_seqlens": self.chunk_tokens + 2, "axes": self.layout.model.num_axes * self.chunk_tokens}
        slot = self.layout.place("batch", memory=memory)
        dtype = torch.int64 if width == 8 else torch.int32
        return self.arenas.view(
            slot, self.offsets[name] + chunk * rows.get(name, self.chunk_tokens) * width, (count,), dtype
        )

    def begin_rows(self, batch: Sequences, rounds: Sequence[Sequence[PackedChunk]] = ()) -> None:
        """Take what a tower gives rows for, before a batch's first round. rounds: of all ranks.

        Raises: ValueError unless it gives as many as there are tokens for them.
        """
        if batch.rows is not None and self._given is not None:
            self._given.begin(batch.rows, rounds)

    def write(self, batch: Sequences, chunks: list[PackedChunk]) -> list[ChunkContext]:
        """Fill the host slot for one round. Order: the copy of the round before must have left it."""
        return [self._write_chunk(batch, chunk, i) for i, chunk in enumerate(chunks)]

    def _write_chunk(self, batch: Sequences, chunk: PackedChunk, i: int) -> ChunkContext:
        tokens, lengths = chunk.tokens, [p.length for p in chunk.ranges]
        rows = {
            "input_ids": torch.cat([batch.input_ids[p.sequence][p.start : p.start + p.length] for p in chunk.ranges]),
            "labels": torch.cat([batch.labels[p.sequence][p.start : p.start + p.length] for p in chunk.ranges]),
            "positions": torch.cat([torch.arange(p.start, p.start + p.length) for p in chunk.ranges]),
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        }
        if (num_axes := self.layout.model.num_axes) > 1:
            rows["axes"] = axes_of(batch.rows, chunk, num_axes).flatten()
        start = chunk.ranges[0].start if chunk.first_slice >= 0 else 0
        for name, row in rows.items():
            self._field("host", name, i, row.numel()).copy_(row)
        on_gpu = {name: self._field("gpu", name, i, row.numel()) for name, row in rows.items()}
        return ChunkContext(
            tokens=tokens,
            seq_lens=tuple(lengths),
            losses=self.losses(i, tokens),
            constants=self.constants,
            window=Window(start, i - chunk.first_slice, self.chunk_tokens) if chunk.first_slice >= 0 else None,
            attention=self.attention,
            attention_choices=self.attention_choices,
            input_ids=on_gpu["input_ids"],
            labels=on_gpu["labels"],
            positions=on_gpu["positions"],
            cu_seqlens=on_gpu["cu_seqlens"],
            axes=on_gpu["axes"].view(num_axes, tokens) if "axes" in on_gpu else None,
            weights=None if batch.weights is None else self._weights(batch.weights, chunk),
            custom_loss=None if batch.loss is None else self._custom_loss(batch.loss, batch.shift, chunk),
            given=None if batch.rows is None or self._given is None else self._given.of_chunk(batch.rows, chunk),
            blocks=blocks_of(self.layout.model, batch.rows, chunk, self.arenas.device),
        )

    def _weights(self, weights: list[Tensor], chunk: PackedChunk) -> Tensor:
        """Weights [T] of a chunk's labels on the device. Few batches have any, so no plan keeps a slot for them."""
        row = torch.cat([weights[p.sequence][p.start : p.start + p.length] for p in chunk.ranges])
        return row.to(self.arenas.device, wide_dtype(self.layout))

    def _custom_loss(self, function: LossFunction, shift: int, chunk: PackedChunk) -> CustomLoss:
        sequences = torch.cat([torch.full((p.length,), p.sequence) for p in chunk.ranges])
        positions = torch.cat([torch.arange(p.start, p.start + p.length) + shift for p in chunk.ranges])
        return CustomLoss(function, sequences.to(self.arenas.device), positions.to(self.arenas.device))

    def losses(self, chunk: int, tokens: int) -> Tensor:
        """Per-token losses [tokens] of a chunk, float32 (float64 for float64 compute)."""
        dtype = wide_dtype(self.layout)
        slot = self.layout.place("losses")
        return self.arenas.view(slot, chunk * self.chunk_tokens * dtype.itemsize, (tokens,), dtype)
