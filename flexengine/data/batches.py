"""Global batches: which sequences one optimizer step sees.

The composition of a batch depends on the data, the seed, --max-seq-len and --max-global-batch-tokens, never on the
plan, so the same command under another budget trains on the same batches.
"""

from __future__ import annotations

import hashlib
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from flexengine.data.kept_images import KeptImage, PicturedRecord
from flexengine.data.prepare import Prepared
from flexengine.data.prompts import TokenizedPrompt
from flexengine.data.records import IGNORE, TokenizedRecord
from flexengine.data.store import StoredSequences, TokenTable
from flexengine.data.token_columns import TokenizedPair, ValuedRecord

if TYPE_CHECKING:
    from torch import Tensor

NUMBERS_AT_ONCE = 1 << 18
"""Numbers that are added up or written at once: more would take memory beside the budget, fewer are slower."""


@dataclass(frozen=True)
class Batch:
    """The whole sequences of one step, ragged: no padding. values: that of each record, None where all are 0."""

    input_ids: list[list[int]]
    labels: list[list[int]]
    values: Sequence[float] | None = None

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.input_ids))

    @property
    def num_target_tokens(self) -> int:
        """Tokens with a loss. The first token of a sequence has none: nothing comes before it to predict it."""
        return sum(num_targets(labels) for labels in self.labels)


@dataclass(frozen=True, kw_only=True)
class ImageBatch(Batch):
    """Sequences that may have images, in the order of their tokens. columns: their pixels, once these are decoded."""

    images: Sequence[KeptImage] = ()
    columns: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class PairBatch(ImageBatch):
    """The pairs of one step: the rows of each stand one behind the other.

    wanted: whether the first answer of each pair is a good one. reference: float64 [2 * pairs], the log-probability of
    each row's answer in the model before training; None where nothing compares with it.
    """

    wanted: Sequence[bool] = ()
    reference: np.ndarray | None = None


@dataclass(frozen=True, kw_only=True)
class TaughtBatch(ImageBatch):
    """Single answers, and what a teacher says of their target tokens, in their order.

    tokens: int32 [targets, k], the likeliest. log_probs: float32 [targets, k + 1], theirs and that of all others.
    """

    tokens: np.ndarray
    log_probs: np.ndarray


@dataclass(frozen=True, kw_only=True)
class PromptBatch(ImageBatch):
    """Prompts that the model answers itself, and all columns of the record of each.

    images: of each prompt as many times as it is answered, in the order of completions. asked: each prompt as it was
    read, with its images and turns.
    """

    records: list[dict[str, Any]]
    asked: Sequence[TokenizedPrompt] = ()


class Taught(Protocol):
    """What a teacher says of the sequences of a data set."""

    def rows(self, numbers: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """The columns of `TaughtBatch` for some sequences."""
        ...


class Pixels(Protocol):
    """Decodes the images of batches."""

    def filled(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Batches with the columns of their images."""
        ...


class ImageRoom(NamedTuple):
    """Tokens of each sequence that stand for images, and how many of them a batch may have."""

    tokens: np.ndarray
    most: int


def _add_numbers(digest: hashlib._Hash, numbers: Sequence[int]) -> None:
    """Add the repr of a list of numbers to a digest, some at a time: that of a long document is many times its size."""
    digest.update(b"[")
    for start in range(0, len(numbers), NUMBERS_AT_ONCE):
        digest.update(b", " if start else b"")
        digest.update(repr(list(numbers[start : start + NUMBERS_AT_ONCE]))[1:-1].encode())
    digest.update(b"]")


Reference = np.ndarray | Taught
"""What a data set's sequences are compared with: log-probabilities [pairs, 2] in float64, or a teacher's."""
Sequenced = TokenizedRecord | ValuedRecord | TokenizedPair | TokenizedPrompt | PicturedRecord
"""What batches are made of."""


def batch_of(
    sequences: Sequence[Sequenced], numbers: Sequence[int], reference: Reference | None = None, copies: int = 1
) -> Batch:
    """The batch of some sequences or pairs. reference: of all of them. copies: how often each prompt is answered."""
    found = [sequences[i] for i in numbers]
    pairs = [pair for pair in found if isinstance(pair, TokenizedPair)]
    prompts = [prompt for prompt in found if isinstance(prompt, TokenizedPrompt)]
    pictured = [row for row in found if isinstance(row, PicturedRecord)]
    shown = [image for row in pictured for image in row.images]
    if prompts:
        texts = [p.input_ids for p in prompts], [p.labels for p in prompts]
        images = [image for p in prompts for _ in range(copies) for image in p.images]
        return PromptBatch(*texts, records=[p.columns for p in prompts], asked=prompts, images=images)
    if not pairs:
        columns = [row.input_ids for row in found], [row.labels for row in found]
        if reference is not None and not isinstance(reference, np.ndarray):
            tokens, log_probs = reference.rows(numbers)
            return TaughtBatch(*columns, tokens=tokens, log_probs=log_probs, images=shown)
        values = [row.value if isinstance(row, (ValuedRecord, PicturedRecord)) else 0.0 for row in found]
        values = values if any(values) else None
        return ImageBatch(*columns, values, images=shown) if pictured else Batch(*columns, values)
    assert reference is None or isinstance(reference, np.ndarray), "pairs have no teacher"
    rows = [row for pair in pairs for row in (pair.first, pair.second)]
    chosen = None if reference is None else reference[np.asarray(numbers, np.int64)].reshape(-1)
    images = [image for p in pairs for _ in range(2) for image in p.images]
    beside = [p.value for p in pairs], [p.wanted for p in pairs], chosen
    return PairBatch([row.input_ids for row in rows], [row.labels for row in rows], *beside, images=images)


class Room(NamedTuple):
    """What a sequence takes of a batch: `copies` of it, each with `more` tokens behind it."""

    copies: int = 1
    more: int = 0

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """Tokens that sequences of these lengths take."""
        return self.copies * (lengths + self.more)


JUST_ITSELF = Room()


def num_targets(labels: list[int]) -> int:
    """Labels that give a loss after the shift by one: all but the first."""
    return sum(label != IGNORE for label in labels[1:])


def room_for_images(sequences: StoredSequences, most: int, copies: int = 1) -> ImageRoom | None:
    """What batches may have of images; None where there are none. copies: of each sequence, as `Room` has them.

    Raises: ValueError for a record of more.
    """
    tokens = sequences.image_tokens
    if tokens is None:
        return None
    tokens, behind = copies * tokens, f" in {copies} completions" if copies > 1 else ""
    if len(tokens) and int(tokens.max()) > most:
        over = int((tokens > most).sum())
        raise ValueError(
            f"{over} of {len(tokens)} records have more tokens of images{behind} than --max-image-tokens {most}, the"
            f" most {int(tokens.max())}\n  works with: --max-image-tokens {int(tokens.max())}, or smaller images"
        )
    return ImageRoom(tokens, most)


def batch_ends(
    lengths: Sequence[int] | np.ndarray, max_tokens: int, order: Sequence[int], images: ImageRoom | None = None
) -> array[int]:
    """Where in the order each batch ends: a new one begins where max_tokens, or the room of images, would be exceeded.

    lengths in tokens, each <= max_tokens. The last batch may be short: an epoch is every sequence exactly once.
    """
    if images is not None:
        return _ends_with_images(lengths, max_tokens, order, images)
    lengths, ends, used_tokens = np.asarray(lengths), array("I"), 0
    for start in range(0, len(order), NUMBERS_AT_ONCE):
        tokens = np.cumsum(lengths[np.asarray(order[start : start + NUMBERS_AT_ONCE])], dtype=np.int64)
        tokens_before = -used_tokens
        while (end := int(np.searchsorted(tokens, tokens_before + max_tokens, side="right"))) < len(tokens):
            ends.append(start + end)
            tokens_before = int(tokens[end - 1]) if end else 0
        used_tokens = int(tokens[-1]) - tokens_before
    if len(order):
        ends.append(len(order))
    return ends


def _ends_with_images(
    lengths: Sequence[int] | np.ndarray, max_tokens: int, order: Sequence[int], images: ImageRoom
) -> array[int]:
    ends, used, shown = array("I"), 0, 0
    for place, i in enumerate(order):
        used, shown = used + int(lengths[i]), shown + int(images.tokens[i])
        if used > max_tokens or shown > images.most:
            ends.append(place)
            used, shown = int(lengths[i]), int(images.tokens[i])
    if len(order):
        ends.append(len(order))
    return ends


def split_epoch(
    lengths: Sequence[int] | np.ndarray, max_tokens: int, order: Sequence[int], images: ImageRoom | None = None
) -> list[Sequence[int]]:
    """Indices of the sequences of each batch."""
    return [order[first:last] for first, last in pairwise([0, *batch_ends(lengths, max_tokens, order, images)])]


class GlobalBatches:
    """Batches of a fixed set of sequences, shuffled again in every epoch from the seed."""

    def __init__(
        self,
        sequences: Sequence[Sequenced],
        max_global_batch_tokens: int,
        seed: int,
        weights: Sequence[tuple[int, float]] = (),
        tables: Sequence[TokenTable] = (),
        room: Room = JUST_ITSELF,
        images: ImageRoom | None = None,
    ) -> None:
        """weights: (number of sequences, times that an epoch sees each) of consecutive parts; default: all once.

        tables: where the sequences come from, as far as their contents count in the fingerprint.

        Raises ValueError when a sequence is longer than a whole batch (max_global_batch_tokens).
        """
        known = getattr(sequences, "lengths", None)
        lengths = np.array([len(s.input_ids) for s in sequences], np.int64) if known is None else known
        self._lengths = room.of(lengths) if room != JUST_ITSELF else lengths
        longest = int(self._lengths.max(initial=0))
        if longest > max_global_batch_tokens:
            what = "pair" if isinstance(sequences[0], TokenizedPair) else "sequence"
            what = "prompt with its completions" if room != JUST_ITSELF else what
            raise ValueError(
                f"a {what} of {longest} tokens exceeds --max-global-batch-tokens {max_global_batch_tokens}"
            )
        self.sequences, self.max_global_batch_tokens, self.seed = sequences, max_global_batch_tokens, seed
        self._tables, self.images, self._copies = tables, images, room.copies
        self.pixels: Pixels | None = None
        self.reference: Reference | None = None
        self._weights = weights or [(len(sequences), 1.0)]
        self._batches_of: dict[int, int] = {}  # number by epoch; shuffling millions of sequences again takes seconds
        self._begun: tuple[int, array[int], array[int]] | None = None  # an epoch, its order, where its batches end

    @classmethod
    def of_parts(
        cls,
        parts: Sequence[Prepared],
        max_global_batch_tokens: int,
        seed: int,
        room: Room = JUST_ITSELF,
        max_image_tokens: int = 0,
    ) -> GlobalBatches:
        """Batches of several sources, mixed by their weights."""
        sequences = StoredSequences([(part.table.file, part.cut) for part in parts])
        weights = [(len(part.cut.lengths), part.weight) for part in parts]
        images = room_for_images(sequences, max_image_tokens, room.copies)
        return cls(sequences, max_global_batch_tokens, seed, weights, [part.table for part in parts], room, images)

    def num_steps(self, steps: int | None, epochs: float | None) -> int:
        """steps if given (epochs follow one another as needed), else the batches of that many epochs (default 1).

        A fraction of an epoch counts the batches of the epoch it falls in, rounded up.
        """
        if steps is not None:
            return steps
        whole, part = divmod(1.0 if epochs is None else epochs, 1.0)
        steps_of_part = math.ceil(part * self._num_batches(int(whole))) if part else 0
        return sum(map(self._num_batches, range(int(whole)))) + steps_of_part

    def begin(self, start: int = 0) -> None:
        """Order the epoch of the batch after `start` batches, so that its memory is taken before a plan is made."""
        self._epoch(self.cursor(start)[0])

    def batches(self, num_steps: int, start: int = 0) -> Iterator[Batch]:
        """The first num_steps batches, from number `start` on; the iterator may be restarted and gives the same."""
        made = self._made(num_steps, start)
        return made if self.pixels is None else self.pixels.filled(made)

    def _made(self, num_steps: int, start: int) -> Iterator[Batch]:
        epoch, position = self.cursor(start)
        step = start
        while step < num_steps:
            order, ends = self._epoch(epoch)
            for first, last in islice(pairwise(chain([0], ends)), position, position + num_steps - step):
                yield batch_of(self.sequences, order[first:last], self.reference, self._copies)
                step += 1
            del order, ends  # before those of the next epoch are made
            epoch, position = epoch + 1, 0

    def cursor(self, step: int) -> tuple[int, int]:
        """The epoch that the batch after `step` batches is in, and its position there."""
        epoch = 0
        while step and step >= self._num_batches(epoch):
            step -= self._num_batches(epoch)
            epoch += 1
        return epoch, step

    def fingerprint(self) -> str:
        """What decides the batches, in 16 hex digits: tokens and labels, lengths of sequences, sizes and seed."""
        digest = hashlib.sha256()
        for start in range(0, len(self._lengths), NUMBERS_AT_ONCE):
            digest.update(np.ascontiguousarray(self._lengths[start : start + NUMBERS_AT_ONCE], np.int64).data)
        last = len(self._lengths) - 1
        for place, i in enumerate((0, last // 2, last) if last >= 0 else ()):
            row = self.sequences[i]
            digest.update(b", (" if place else b"[(")
            _add_numbers(digest, row.input_ids)
            digest.update(b", ")
            _add_numbers(digest, row.labels)
            digest.update(b")")
        digest.update(b"]" if last >= 0 else b"[]")
        digest.update(repr([table.sha256 for table in self._tables]).encode())
        digest.update(repr((self.max_global_batch_tokens, self.seed, list(self._weights))).encode())
        digest.update(b"" if self.images is None else f"images {self.images.most}".encode())
        return digest.hexdigest()[:16]

    def _num_batches(self, epoch: int) -> int:
        if epoch not in self._batches_of:
            self._epoch(epoch)
        return self._batches_of[epoch]

    def _epoch(self, epoch: int) -> tuple[array[int], array[int]]:
        """The order of an epoch's sequences, and where its batches end. Those of one epoch are kept."""
        if self._begun is None or self._begun[0] != epoch:
            self._begun = None  # before the next ones are made
            order = self._order(epoch)
            ends = batch_ends(self._lengths, self.max_global_batch_tokens, order, self.images)
            self._begun, self._batches_of[epoch] = (epoch, order, ends), len(ends)
        return self._begun[1:]

    def _order(self, epoch: int) -> array[int]:
        """Indices of all sequences that an epoch sees, shuffled."""
        order = array("I")
        rng = random.Random(f"{self.seed}/{epoch}")
        first = 0
        for count, weight in self._weights:
            times, part = divmod(weight, 1.0)
            for _ in range(int(times)):
                order.extend(range(first, first + count))
            if part:
                order.extend(
                    random.Random(f"{self.seed}/{epoch}/{first}").sample(
                        range(first, first + count), round(part * count)
                    )
                )
            first += count
        rng.shuffle(order)
        return order
