"""Validation data: records held out of the training data, and batches in the order of the records."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Sequence

import numpy as np

from flexengine.data.batches import (
    JUST_ITSELF,
    Batch,
    ImageRoom,
    Pixels,
    Reference,
    Room,
    Sequenced,
    batch_of,
    room_for_images,
    split_epoch,
)
from flexengine.data.prepare import Prepared
from flexengine.data.store import StoredSequences


def hold_out(part: Prepared, fraction: float, seed: int) -> tuple[Prepared, Prepared]:
    """Split a source in what is trained and what is evaluated: whole records, drawn from the seed.

    A long text that was split into several sequences goes to one side whole, as do pairs with the same prompt. Where
    there are fewer of these than one of them can be held out of, as in a shard that is one text, the last sequences are
    held out instead.
    Raises: ValueError when only one sequence is left.
    """
    of_pairs = part.cut.splits is not None
    records = _prompts(part) if of_pairs else np.searchsorted(part.table.ends, part.cut.starts, side="right")
    known = np.unique(records)
    count = round(fraction * len(known))
    if 0 < count < len(known):
        drawn = random.Random(f"{seed}/validation/{part.place}").sample(range(len(known)), count)
        held = np.isin(records, known[drawn])
    elif len(records) > 1:
        held = np.arange(len(records)) >= len(records) - min(len(records) - 1, max(1, round(fraction * len(records))))
    else:
        where = f"{part.place}: " if part.place else ""
        raise ValueError(
            f"{where}--val-fraction {fraction} of 1 sequence would leave nothing to train on; give --val-dataset"
        )
    return _chosen(part, ~held), _chosen(part, held)


def _prompts(part: Prepared) -> np.ndarray:
    """Number the prompts of pairs in the order in which they come first; a ranking has one, and many pairs."""
    numbers, found = dict[bytes, int](), np.empty(len(part.cut.lengths), np.int64)
    first_targets = part.table.first_targets[np.searchsorted(part.table.ends, part.cut.starts, side="right")]
    for i, (start, length) in enumerate(zip(part.cut.starts.tolist(), first_targets.tolist(), strict=True)):
        prompt = np.array(part.table.file.read(start, max(length, 1)).input_ids, np.int32).tobytes()
        if part.cut.behind is not None:  # its images, too
            prompt += part.table.file.numbers(start + int(part.cut.lengths[i]), int(part.cut.behind[i])).tobytes()
        found[i] = numbers.setdefault(hashlib.sha256(prompt).digest(), len(numbers))
    return found


def _chosen(part: Prepared, chosen: np.ndarray) -> Prepared:
    columns = {name: getattr(part.cut, name) for name in ("starts", "lengths", "splits", "behind", "values", "placed")}
    cut = part.cut._replace(**{name: None if column is None else column[chosen] for name, column in columns.items()})
    return Prepared(part.table, cut, part.place, part.weight)


class ValidationBatches:
    """All sequences of the validation data, each once, in their order."""

    def __init__(
        self,
        sequences: Sequence[Sequenced],
        lengths: np.ndarray,
        max_tokens: int,
        images: ImageRoom | None = None,
        copies: int = 1,
    ) -> None:
        self.sequences, self.num_tokens = sequences, int(lengths.sum())
        self.reference: Reference | None = None
        self.pixels: Pixels | None = None
        self.images, self._copies = images, copies
        self._batches = split_epoch(lengths, max_tokens, range(len(lengths)), images)

    @classmethod
    def of_parts(
        cls, parts: Sequence[Prepared], max_tokens: int, room: Room = JUST_ITSELF, max_image_tokens: int = 0
    ) -> ValidationBatches:
        """Make the batches of several sources; their weights do not count."""
        stored = StoredSequences([(part.table.file, part.cut) for part in parts])
        images = room_for_images(stored, max_image_tokens, room.copies)
        return cls(stored, room.of(stored.lengths), max_tokens, images, room.copies)

    def __iter__(self) -> Iterator[Batch]:
        made = (batch_of(self.sequences, indices, self.reference, self._copies) for indices in self._batches)
        yield from made if self.pixels is None else self.pixels.filled(made)
