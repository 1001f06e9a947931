"""Global batches: which sequences one optimizer step sees.

The composition of a batch depends on the data, the seed, --max-seq-len and --max-global-batch-tokens, never on the
plan, so the same command under another budget trains on the same batches.
"""

import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from flexengine.data.prepare import Prepared
from flexengine.data.records import IGNORE, TokenizedRecord
from flexengine.data.store import StoredSequences


@dataclass(frozen=True)
class Batch:
    """The whole sequences of one step, ragged: no padding."""

    input_ids: list[list[int]]
    labels: list[list[int]]

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.input_ids))

    @property
    def num_target_tokens(self) -> int:
        """Tokens with a loss. The first token of a sequence has none: nothing comes before it to predict it."""
        return sum(num_targets(labels) for labels in self.labels)


def num_targets(labels: list[int]) -> int:
    """Labels that give a loss after the shift by one: all but the first."""
    return sum(label != IGNORE for label in labels[1:])


def split_epoch(lengths: Sequence[int] | np.ndarray, max_tokens: int, order: Sequence[int]) -> list[Sequence[int]]:
    """Indices of each batch: sequences in the given order, a new batch where max_tokens would be exceeded.

    lengths in tokens, each <= max_tokens. The last batch may be short: an epoch is every sequence exactly once.
    """
    ends = np.cumsum(np.asarray(lengths, np.int64)[np.asarray(order, np.int64)])
    batches: list[Sequence[int]] = []
    first, tokens_before = 0, 0
    while first < len(order):
        last = int(np.searchsorted(ends, tokens_before + max_tokens, side="right"))
        batches.append(order[first:last])
        first, tokens_before = last, int(ends[last - 1])
    return batches


class GlobalBatches:
    """Batches of a fixed set of sequences, shuffled again in every epoch from the seed."""

    def __init__(
        self,
        sequences: Sequence[TokenizedRecord],
        max_global_batch_tokens: int,
        seed: int,
        weights: Sequence[tuple[int, float]] = (),
    ) -> None:
        """weights: (number of sequences, times that an epoch sees each) of consecutive parts; default: all once.

        Raises ValueError when a sequence is longer than a whole batch (max_global_batch_tokens).
        """
        known = getattr(sequences, "lengths", None)
        self._lengths = np.array([len(s.input_ids) for s in sequences], np.int64) if known is None else known
        longest = int(self._lengths.max(initial=0))
        if longest > max_global_batch_tokens:
            raise ValueError(
                f"a sequence of {longest} tokens exceeds --max-global-batch-tokens {max_global_batch_tokens}"
            )
        self.sequences, self.max_global_batch_tokens, self.seed = sequences, max_global_batch_tokens, seed
        self._weights = weights or [(len(sequences), 1.0)]

    @classmethod
    def of_parts(cls, parts: Sequence[Prepared], max_global_batch_tokens: int, seed: int) -> "GlobalBatches":
        """Batches of several sources, mixed by their weights."""
        sequences = StoredSequences([(part.table.file, part.cut) for part in parts])
        weights = [(len(part.cut.lengths), part.weight) for part in parts]
        return cls(sequences, max_global_batch_tokens, seed, weights)

    def num_steps(self, steps: int | None, epochs: float | None) -> int:
        """steps if given (epochs follow one another as needed), else the batches of that many epochs (default 1).

        A fraction of an epoch counts the batches of the epoch it falls in, rounded up.
        """
        if steps is not None:
            return steps
        whole, part = divmod(1.0 if epochs is None else epochs, 1.0)
        steps_of_part = math.ceil(part * len(self._epoch(int(whole)))) if part else 0
        return sum(len(self._epoch(e)) for e in range(int(whole))) + steps_of_part

    def batches(self, num_steps: int) -> Iterator[Batch]:
        """The first num_steps batches; the iterator may be restarted and gives the same again."""
        step = epoch = 0
        while step < num_steps:
            for indices in self._epoch(epoch)[: num_steps - step]:
                rows = [self.sequences[i] for i in indices]
                yield Batch([row.input_ids for row in rows], [row.labels for row in rows])
                step += 1
            epoch += 1

    def _epoch(self, epoch: int) -> list[Sequence[int]]:
        order = array("q")
        rng = random.Random(f"{self.seed}/{epoch}")
        first = 0
        for count, weight in self._weights:
            times, part = divmod(weight, 1.0)
            order.extend(array("q", range(first, first + count)) * int(times))
            if part:
                order.extend(
                    random.Random(f"{self.seed}/{epoch}/{first}").sample(
                        range(first, first + count), round(part * count)
                    )
                )
            first += count
        rng.shuffle(order)
        return split_epoch(self._lengths, self.max_global_batch_tokens, order)
