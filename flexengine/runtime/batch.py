"""From sequences of tokens to the batch slot of a round: ids, shifted labels, positions and lengths."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.ops.base import ChunkContext, KernelName, Window
from flexengine.ops.cross_entropy import IGNORE_INDEX
from flexengine.plan import Request
from flexengine.runtime.arena import Arenas, wide_dtype
from flexengine.schedule.layout import Layout, batch_offsets
from flexengine.schedule.packing import PackedChunk


class Sequences(NamedTuple):
    """A batch: token ids and labels per sequence (int64, CPU). Labels are already shifted: labels[t] is what follows
    t.
    """

    input_ids: list[Tensor]
    labels: list[Tensor]

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        return [ids.numel() for ids in self.input_ids]

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return sum(self.lengths)

    @property
    def num_target_tokens(self) -> int:
        """Tokens with a loss."""
        return sum(int((labels != IGNORE_INDEX).sum()) for labels in self.labels)


def read_batch(
    input_ids: object, labels: object, attention_mask: object, vocab_size: int, max_seq_len: int
) -> Sequences:
    """Check and shift a batch as a person gives it: ragged lists or [B, S] tensors, labels unshifted as in Hugging
    Face.

    Without labels every token is a target of the one before it. An attention mask (right padding) cuts sequences.
    Raises ValueError naming the sequence, what was found and what is allowed.
    """
    ids = [_row(row, f"input_ids[{i}]") for i, row in enumerate(_rows(input_ids, "input_ids"))]
    targets = ids if labels is None else [_row(r, f"labels[{i}]") for i, r in enumerate(_rows(labels, "labels"))]
    if not ids:
        raise ValueError("the batch has no sequences; give at least one list of token ids")
    if len(targets) != len(ids):
        raise ValueError(
            f"the batch has {len(ids)} sequences of input_ids but {len(targets)} of labels; give one list of labels for"
            " every sequence"
        )
    if attention_mask is not None:
        ids, targets = _trim(ids, targets, attention_mask)
    for i, (row, target) in enumerate(zip(ids, targets, strict=True)):
        _check_row(i, row, target, vocab_size, max_seq_len)
    return Sequences(ids, [_shift(target) for target in targets])


def read_call(
    request: Request, vocab_size: int, batch: object, input_ids: object, labels: object, attention_mask: object
) -> Sequences:
    """The batch of one engine call, given as `batch` or as `input_ids` with labels.

    Raises ValueError as `read_batch`, and for more tokens than max_global_batch_tokens or no target token.
    """
    if (batch is None) == (input_ids is None):
        raise ValueError("give a batch of token lists, or input_ids=..., and not both")
    if batch is not None and labels is not None:
        raise ValueError("labels go with input_ids=...; a plain batch makes every token a target")
    given = batch if input_ids is None else input_ids
    sequences = read_batch(given, labels, attention_mask, vocab_size, request.max_seq_len)
    if sequences.num_tokens > request.max_global_batch_tokens:
        raise ValueError(
            f"the batch has {sequences.num_tokens} tokens, more than max_global_batch_tokens="
            f"{request.max_global_batch_tokens}; give it in several fwd_bwd calls before step()"
        )
    if sequences.num_target_tokens == 0:
        raise ValueError(
            f"the batch has no target token in {sequences.num_tokens} tokens: every label is -100, or every"
            " sequence has a single token; give a sequence of two tokens or more with a label other than -100"
        )
    return sequences


def _rows(value: object, name: str) -> list:
    if isinstance(value, Tensor):
        if value.dim() != 2:
            raise ValueError(f"{name} must have shape [batch, tokens], got {list(value.shape)}; reshape it")
        return list(value)
    if isinstance(value, (list, tuple)):
        if value and not isinstance(value[0], (list, tuple, Tensor)):
            raise ValueError(
                f"{name} must be a list of sequences, got a list of {type(value[0]).__name__}; write [[...]] for one"
            )
        return list(value)
    raise ValueError(f"{name} must be a list of token lists or a tensor, got {type(value).__name__}")


def _row(value: object, name: str) -> Tensor:
    row = _tensor(value, name)
    if row.dim() != 1 or row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        if row.numel() == 0:
            raise ValueError(f"{name} is empty; every sequence needs at least one token")
        raise ValueError(f"{name} must be a flat sequence of integers, got {row.dtype} of shape {list(row.shape)}")
    return row.to(device="cpu", dtype=torch.int64)


def _tensor(value: object, name: str) -> Tensor:
    """The value as torch holds it. Raises ValueError where it cannot: words, ragged lists, numbers beyond 64 bits."""
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        kind = type(value).__name__
        raise ValueError(f"{name} must be a flat sequence of integers of 64 bits, got a {kind}: {error}") from None


def _trim(ids: list[Tensor], labels: list[Tensor], mask: object) -> tuple[list[Tensor], list[Tensor]]:
    rows = _rows(mask, "attention_mask")
    masks = [_row(_tensor(row, f"attention_mask[{i}]").long(), f"attention_mask[{i}]") for i, row in enumerate(rows)]
    if [m.numel() for m in masks] != [r.numel() for r in ids]:
        found, wanted = ([row.numel() for row in some[:8]] for some in (masks, ids))
        raise ValueError(f"attention_mask must have the shape of input_ids: it has rows of {found}, they of {wanted}")
    lengths = [int(m.sum()) for m in masks]
    for i, (m, length) in enumerate(zip(masks, lengths, strict=True)):
        if not bool(m[:length].all()):
            raise ValueError(f"attention_mask[{i}] is not right padding; pad behind the tokens (ones, then zeros)")
    cut = zip(ids, labels, lengths, strict=True)
    ids_labels = [(row[:n], label[:n]) for row, label, n in cut]
    return [r for r, _ in ids_labels], [label for _, label in ids_labels]


def _check_row(i: int, row: Tensor, labels: Tensor, vocab_size: int, max_seq_len: int) -> None:
    if row.numel() == 0:
        raise ValueError(f"sequence {i} of the batch is empty; every sequence needs at least one token")
    if row.numel() > max_seq_len:
        raise ValueError(
            f"sequence {i} has {row.numel()} tokens, more than max_seq_len={max_seq_len}; cut it, or make the engine"
            f" for max_seq_len={row.numel()}"
        )
    if labels.numel() != row.numel():
        raise ValueError(
            f"sequence {i} has {row.numel()} input_ids but {labels.numel()} labels; give one label a token"
        )
    low, high = int(row.min()), int(row.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"sequence {i} has token ids {low}..{high}, outside the vocabulary 0..{vocab_size - 1}; use the tokenizer"
            " of this model"
        )
    active = labels[labels != IGNORE_INDEX]
    if active.numel() and (int(active.min()) < 0 or int(active.max()) >= vocab_size):
        raise ValueError(
            f"sequence {i} has labels {int(active.min())}..{int(active.max())}, outside 0..{vocab_size - 1}"
            f" and not {IGNORE_INDEX}; labels are the token ids themselves, unshifted, or {IGNORE_INDEX} for no loss"
        )


def _shift(labels: Tensor) -> Tensor:
    return torch.cat((labels[1:], labels.new_full((1,), IGNORE_INDEX)))


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

    def __init__(self, layout: Layout, arenas: Arenas, constants: dict[str, Tensor], attention: KernelName) -> None:
        self.layout, self.arenas, self.constants = layout, arenas, constants
        self.attention: KernelName = attention
        self.chunk_tokens = layout.plan.chunk_tokens
        self.offsets = batch_offsets(layout.plan.chunks_per_round, self.chunk_tokens)

    def _field(self, memory: str, name: str, chunk: int, count: int) -> Tensor:
        width = {"input_ids": 8, "labels": 8}.get(name, 4)
        rows = self.chunk_tokens + 2 if name == "cu_seqlens" else self.chunk_tokens
        slot = self.layout.slots[self.layout.slot(f"batch.{memory}")]
        dtype = torch.int64 if width == 8 else torch.int32
        return self.arenas.view(slot, self.offsets[name] + chunk * rows * width, (count,), dtype)

    def write(self, batch: Sequences, chunks: list[PackedChunk]) -> list[ChunkContext]:
        """Fill the host slot for one round; the previous round's copy from it must have finished."""
        return [self._write_chunk(batch, chunk, i) for i, chunk in enumerate(chunks)]

    def _write_chunk(self, batch: Sequences, chunk: PackedChunk, i: int) -> ChunkContext:
        tokens, lengths = chunk.tokens, [p.length for p in chunk.pieces]
        rows = {
            "input_ids": torch.cat([batch.input_ids[p.sequence][p.start : p.start + p.length] for p in chunk.pieces]),
            "labels": torch.cat([batch.labels[p.sequence][p.start : p.start + p.length] for p in chunk.pieces]),
            "positions": torch.cat([torch.arange(p.start, p.start + p.length) for p in chunk.pieces]),
            "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0),
        }
        start = chunk.pieces[0].start if chunk.first_slice >= 0 else 0
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
            input_ids=on_gpu["input_ids"],
            labels=on_gpu["labels"],
            positions=on_gpu["positions"],
            cu_seqlens=on_gpu["cu_seqlens"],
        )

    def losses(self, chunk: int, tokens: int) -> Tensor:
        """Per-token losses [tokens] of a chunk, float32 (float64 for float64 compute)."""
        dtype = wide_dtype(self.layout)
        slot = self.layout.slots[self.layout.slot("losses")]
        return self.arenas.view(slot, chunk * self.chunk_tokens * dtype.itemsize, (tokens,), dtype)
