"""What people give as a batch, read as sequences: token lists, tensors, NumPy arrays, batches of a collator.

Rows may be padded on either side, and several sequences may share a row where position_ids begin again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flexengine.models.spec import ModelSpec
from flexengine.ops.custom_loss import IGNORE_INDEX, LossFunction
from flexengine.plan import Request
from flexengine.runtime.given_rows import GivenInput, given_input, split_columns, without_targets


@dataclass(frozen=True)
class Sequences:
    """A batch: token ids and labels per sequence (int64, CPU). Labels are shifted: labels[t] is of token t + shift.

    shift: 1 where tokens are predicted, 0 where they have labels of their own. weights: factors on the losses of labels
    (float64, CPU), shifted with them; None = 1. loss: takes the place of the cross-entropy. given: the sequences that
    this process was given, where others gave the rest. rows: of images, in the place of tokens.
    """

    input_ids: list[Tensor]
    labels: list[Tensor]
    weights: list[Tensor] | None = None
    loss: LossFunction | None = None
    given: slice = field(default_factory=lambda: slice(None))
    shift: int = 1
    rows: GivenInput | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of every sequence."""
        return [ids.numel() for ids in self.input_ids]

    @property
    def num_tokens(self) -> int:
        """Tokens of the batch."""
        return sum(self.lengths)

    @cached_property
    def num_target_tokens(self) -> int:
        """Tokens with a loss."""
        return int((torch.cat(self.labels) != IGNORE_INDEX).sum()) if self.labels else 0

    @cached_property
    def loss_weight(self) -> float:
        """What the sum of the losses is divided by: the tokens with a loss, or the sum of their weights' sizes."""
        if self.weights is None:
            return self.num_target_tokens
        return sum(
            float(weights[labels != IGNORE_INDEX].abs().sum())
            for weights, labels in zip(self.weights, self.labels, strict=True)
        )

    def weighted(self, token_losses: list[Tensor]) -> float:
        """The sum of the losses of all tokens, each multiplied by its weight."""
        assert self.weights is not None, "the batch has no weights"
        return sum(float((row * losses).sum()) for row, losses in zip(self.weights, token_losses, strict=True))


READ_COLUMNS = ("input_ids", "labels", "attention_mask", "position_ids", "weights")
INSTEAD = {
    "loss_fn": "give loss=, a function of blocks of logits",
    "loss_mask": "give labels with -100 where there is no loss, or weights",
    "targets": "give labels, which are not shifted",
    "loss_scale_factor": "give step(divisor=...)",
    "total_tokens_per_step": "give step(divisor=...)",
}
"""What others call what is read here by another name."""
IMAGE_COLUMNS = ("pixel_values", "image_grid_thw", "image_sizes", "pixel_attention_mask")
IMPLIED_COLUMNS = ("token_type_ids", "special_tokens_mask", "length", "seq_idx", "num_items_in_batch")
IMPLIED_COLUMNS += ("mm_token_type_ids", "num_soft_tokens_per_image")
IMPLIED_COLUMNS += ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
"""What collators add that says nothing more: sequences follow from position_ids, and losses are summed over targets."""


def read_batch(columns: Mapping[str, object], model: ModelSpec, max_seq_len: int) -> Sequences:
    """Check and shift a batch as a person gives it: rows of ids, of labels unshifted as in Hugging Face, of masks.

    Without labels every token is a target of the one before it; those of a head that labels tokens must be given, and
    are not shifted. Padding, on either side, is where attention_mask is 0;
    a row that is nothing else is a sequence of no tokens.
    A row in which position_ids begin again holds several sequences. weights[t] is the factor on the loss of token t.
    Raises ValueError naming the sequence, what was found and what is allowed.
    """
    columns, of_tower = split_columns(model, columns)
    ids = [_row(row, f"input_ids[{i}]") for i, row in enumerate(_rows(columns["input_ids"], "input_ids"))]
    if not ids:
        raise ValueError("the batch has no sequences; give at least one list of token ids")
    targets, masks, positions, weights = (_beside(ids, columns.get(name), name) for name in READ_COLUMNS[1:])
    if masks is not None:
        bounds = [_unpadded(i, mask) for i, mask in enumerate(masks)]
        ids, targets, positions, weights = (
            None if rows is None else [row[start:end] for row, (start, end) in zip(rows, bounds, strict=True)]
            for rows in (ids, targets, positions, weights)
        )
    if positions is not None:
        lengths = [_lengths_within(i, row) for i, row in enumerate(positions)]
        ids, targets, weights = (
            None if rows is None else [part for row, cut in zip(rows, lengths, strict=True) for part in row.split(cut)]
            for rows in (ids, targets, weights)
        )
    assert ids is not None, "there are input_ids"
    if targets is None and model.num_labels is not None:
        raise ValueError("the batch has no labels, which a head for labels learns; give labels=..., one a token")
    targets = without_targets(model, ids) if targets is None else targets
    for i, row in enumerate(ids):
        _check_length(i, row, max_seq_len, may_be_empty=masks is not None)
    # all rows at once, as GPUs wait; without labels the targets are the tokens
    most = model.vocab_size if model.num_labels is None else model.num_labels
    if _has_unknown(ids, model.vocab_size) or (targets is not ids and _has_unknown(targets, most, IGNORE_INDEX)):
        for i, (row, target) in enumerate(zip(ids, targets, strict=True)):
            _check_tokens(i, row, target, model)
    rows = given_input(model, ids, of_tower)
    if model.num_labels is not None:
        return Sequences(ids, targets, weights, shift=0, rows=rows)
    shifted = None if weights is None else [_shift(row, 0) for row in weights]
    return Sequences(ids, [_shift(target, IGNORE_INDEX) for target in targets], shifted, rows=rows)


def read_call(request: Request, model: ModelSpec, batch: object, columns: Mapping[str, object]) -> Sequences:
    """The batch of one engine call, given as `batch` (rows, or a mapping of columns) or as `columns`.

    Raises ValueError as `read_part` and `checked_batch`.
    """
    return checked_batch(request, read_part(request, model, batch, columns))


def read_part(request: Request, model: ModelSpec, batch: object, columns: Mapping[str, object]) -> Sequences:
    """Read a batch, or a rank's part of one, whose sizes are checked when it is whole.

    Raises ValueError as `read_batch`, and for columns that are not read.
    """
    of_tower = () if model.given is None else model.given.tower.columns
    columns = _columns_of(batch, {name: value for name, value in columns.items() if value is not None}, of_tower)
    return read_batch(columns, model, request.max_seq_len)


def checked_batch(request: Request, sequences: Sequences) -> Sequences:
    """Return a whole batch. Raises ValueError for more tokens than max_global_batch_tokens, or no target token."""
    if sequences.num_tokens > request.max_global_batch_tokens:
        raise ValueError(
            f"the batch has {sequences.num_tokens} tokens, more than max_global_batch_tokens="
            f"{request.max_global_batch_tokens}; plan for max_global_batch_tokens={sequences.num_tokens} or, where the"
            " plan stores gradients, give it in several fwd_bwd calls before step()"
        )
    if sequences.num_target_tokens == 0:
        raise ValueError(
            f"the batch has no target token in {sequences.num_tokens} tokens: every label is -100, or every sequence"
            " has a single token or is padding; give a sequence of two tokens or more with a label other than -100"
        )
    if not sequences.loss_weight:
        raise ValueError("every token with a loss has weight 0, so that nothing would be trained; leave the batch out")
    return sequences


def _columns_of(batch: object, columns: dict[str, object], of_tower: tuple[str, ...]) -> Mapping[str, object]:
    """The columns of a call; weights may stand beside a batch that has columns of its own.

    Raises ValueError where it is not said once which they are.
    """
    beside = {"weights": columns.pop("weights")} if "weights" in columns else {}
    if (batch is None) == ("input_ids" not in columns):
        raise ValueError("give a batch of token lists, or input_ids=..., and not both")
    if isinstance(batch, Mapping):  # a dict, or the BatchEncoding of a tokenizer
        if columns:
            raise ValueError(f"{', '.join(columns)} stand beside a batch that has columns of its own; put them into it")
        if "input_ids" not in batch:
            raise ValueError(
                f"the batch has no input_ids, only {', '.join(map(str, batch)) or 'no columns'}; tokenize it"
            )
        columns = {name: value for name, value in batch.items() if value is not None}
        if beside and "weights" in columns:
            raise ValueError("weights stand in the batch and beside it; give them once")
    elif batch is not None:
        if "labels" in columns:
            raise ValueError("labels go with input_ids=...; a plain batch makes every token a target")
        columns = {**columns, "input_ids": batch}
    columns = {**columns, **beside}
    unread = [name for name in columns if name not in (*READ_COLUMNS, *IMPLIED_COLUMNS, *of_tower)]
    if images := [name for name in unread if str(name) in IMAGE_COLUMNS]:
        raise ValueError(
            f"the batch has {', '.join(images)}, but this engine trains the text alone; make it with"
            " max_image_tokens=..., the most tokens of images in a batch, where the model's images are trained"
        )
    if unread:
        raise ValueError(
            f"the batch has {', '.join(map(str, unread))}, which would be ignored; leave it out (read are"
            f" {', '.join(READ_COLUMNS)})"
            + "".join(f"; for {name} {INSTEAD[name]}" for name in unread if name in INSTEAD)
        )
    return columns


# ---- rows ------------------------------------------------------------------------------------------------------


def _check_has_elements(value: object, name: str) -> None:
    """Raise ValueError for a tensor that does not hold its elements one behind the other."""
    if isinstance(value, Tensor) and (value.is_meta or value.is_nested or value.layout != torch.strided):
        kind = "meta" if value.is_meta else "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise ValueError(f"{name} is a {kind} tensor; give a dense one with values, or lists of integers")


def _rows(value: object, name: str) -> list[Any]:
    """The rows of a column: of a matrix, or of anything that lists its rows (a `datasets.Column`, say)."""
    _check_has_elements(value, name)
    shape = getattr(value, "shape", None)
    is_ragged = getattr(value, "dtype", None) == np.dtype(object)  # an array of rows of their own
    if shape is not None and len(shape) != 2 and not is_ragged:
        raise ValueError(f"{name} must have shape [batch, tokens], got {list(shape)}; reshape it")
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        raise ValueError(f"{name} must be a list of token lists or a tensor, got {type(value).__name__}")
    rows = list(value)
    if rows and not hasattr(rows[0], "__len__"):
        raise ValueError(
            f"{name} must be a list of sequences, got a list of {type(rows[0]).__name__}; write [[...]] for one"
        )
    return rows


def _weights(value: object, name: str) -> Tensor:
    try:
        row = torch.as_tensor(value, device="cpu", dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        row = torch.tensor(torch.nan)
    if row.dim() != 1 or not bool(row.isfinite().all()):
        raise ValueError(f"{name} must be a flat sequence of finite numbers, one a token")
    return row


def _row(value: object, name: str) -> Tensor:
    row = _tensor(value, name)
    if row.dim() != 1 or row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
        if row.numel() == 0:
            raise ValueError(f"{name} is empty; every sequence needs at least one token")
        raise ValueError(f"{name} must be a flat sequence of integers, got {row.dtype} of shape {list(row.shape)}")
    return row.to(device="cpu", dtype=torch.int64)


def _tensor(value: object, name: str) -> Tensor:
    """The value as torch holds it.

    Raises ValueError where it cannot (words, ragged lists, numbers beyond 64 bits), and for truth values among numbers.
    """
    _check_has_elements(value, name)
    kinds = set(map(type, value)) if isinstance(value, (list, tuple)) else set[type]()
    if bool in kinds and name.startswith("input_ids"):
        raise ValueError(f"{name} must be a flat sequence of integers, got True or False among them; tokenize again")
    try:
        if kinds == {int}:  # GPUs wait meanwhile, and torch takes five times as long
            return torch.from_numpy(np.array(value, np.int64))
        if isinstance(value, np.ndarray) and not value.flags.writeable:
            value = value.copy()  # torch warns of sharing it
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        kind = type(value).__name__
        raise ValueError(f"{name} must be a flat sequence of integers of 64 bits, got a {kind}: {error}") from None


def _beside(ids: list[Tensor], value: object, name: str) -> list[Tensor] | None:
    """Rows of another column, None where it is absent. Raises ValueError unless they are as many and as long."""
    if value is None:
        return None
    rows = _rows(value, name)
    if name == "attention_mask":
        rows = [_tensor(row, f"{name}[{i}]").long() for i, row in enumerate(rows)]
    read = _weights if name == "weights" else _row
    found = [read(row, f"{name}[{i}]") for i, row in enumerate(rows)]
    if len(found) != len(ids):
        raise ValueError(
            f"the batch has {len(ids)} sequences of input_ids but {len(found)} of {name}; give one list of {name} for"
            " every sequence"
        )
    uneven = next((i for i, row in enumerate(ids) if row.numel() != found[i].numel()), None)
    if name == "labels" and uneven is not None:
        raise ValueError(
            f"sequence {uneven} has {ids[uneven].numel()} input_ids but {found[uneven].numel()} labels; give one label"
            " a token"
        )
    if uneven is not None:
        lengths, wanted = ([row.numel() for row in some[:8]] for some in (found, ids))
        raise ValueError(f"{name} must have the shape of input_ids: it has rows of {lengths}, they of {wanted}")
    return found


def _unpadded(i: int, mask: Tensor) -> tuple[int, int]:
    """Where the tokens of a row begin and end. Raises ValueError for a mask with holes."""
    ones = mask.nonzero().flatten()
    start, end = (int(ones[0]), int(ones[-1]) + 1) if ones.numel() else (0, 0)
    if end - start != ones.numel():
        raise ValueError(
            f"attention_mask[{i}] is 0 between tokens; it may be so before or behind them, as padding: set labels to"
            f" {IGNORE_INDEX} for tokens without loss"
        )
    return start, end


def _lengths_within(i: int, positions: Tensor) -> list[int]:
    """Lengths of the sequences of a row, of which each begins where position_ids are 0.

    Raises ValueError unless they count up by one from there.
    """
    starts = [*(positions == 0).nonzero().flatten().tolist(), positions.numel()]
    lengths = [end - start for start, end in pairwise(starts)] or [0]
    counted = torch.cat([torch.arange(0), *(torch.arange(n) for n in lengths)])
    if not torch.equal(counted, positions):
        raise ValueError(
            f"position_ids[{i}] must count 0, 1, 2, ... and begin again at 0 with every sequence of the row; leave"
            " position_ids out where each row is one sequence"
        )
    return lengths


def _check_length(i: int, row: Tensor, max_seq_len: int, may_be_empty: bool) -> None:
    if row.numel() == 0 and not may_be_empty:
        raise ValueError(f"sequence {i} of the batch is empty; every sequence needs at least one token")
    if row.numel() > max_seq_len:
        raise ValueError(
            f"sequence {i} has {row.numel()} tokens, more than max_seq_len={max_seq_len}; cut it, or make the engine"
            f" for max_seq_len={row.numel()}"
        )


def _has_unknown(rows: list[Tensor], vocab_size: int, ignored: int | None = None) -> bool:
    """Whether any token of any row is outside the vocabulary, and is not the ignored one."""
    tokens = torch.cat(rows)
    if not tokens.numel():
        return False
    low, high = (tokens if ignored is None else torch.where(tokens == ignored, 0, tokens)).aminmax()
    return bool(low < 0) or bool(high >= vocab_size)


def _check_tokens(i: int, row: Tensor, labels: Tensor, model: ModelSpec) -> None:
    vocab_size, num_labels = model.vocab_size, model.num_labels
    low, high = int(row.min()), int(row.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"sequence {i} has token ids {low}..{high}, outside the vocabulary 0..{vocab_size - 1}; use the tokenizer"
            " of this model"
        )
    active = labels[labels != IGNORE_INDEX]
    most = vocab_size if num_labels is None else num_labels
    if active.numel() and (int(active.min()) < 0 or int(active.max()) >= most):
        what = "the token ids themselves, unshifted," if num_labels is None else "the numbers of classes"
        raise ValueError(
            f"sequence {i} has labels {int(active.min())}..{int(active.max())}, outside 0..{most - 1}"
            f" and not {IGNORE_INDEX}; labels are {what} or {IGNORE_INDEX} for no loss"
        )


def _shift(row: Tensor, last: int) -> Tensor:
    return torch.cat((row[1:], row.new_full((1,), last)))[: len(row)]
