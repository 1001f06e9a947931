"""Global batches: which sequences one optimizer step sees.

The composition of a batch depends on the data, the seed, --max-seq-len and --max-global-batch-tokens, never on the
plan, so the same command under another budget trains on the same batches.
"""

import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from flexengine.data.records import IGNORE, TokenizedRecord


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


@dataclass(frozen=True)
class PreparedSequences:
    """What the records became, and what was left out. Counts are in records."""

    sequences: list[TokenizedRecord]
    num_records: int
    num_too_long: int
    num_truncated: int
    num_without_targets: int

    def describe(self) -> str:
        """One line for people."""
        tokens = sum(len(s.input_ids) for s in self.sequences)
        parts = [f"{len(self.sequences)} of {self.num_records} records, {tokens} tokens"]
        parts += [f"{self.num_too_long} dropped as longer than --max-seq-len"] if self.num_too_long else []
        parts += [f"{self.num_truncated} truncated to --max-seq-len"] if self.num_truncated else []
        parts += [f"{self.num_without_targets} dropped without target tokens"] if self.num_without_targets else []
        return "; ".join(parts)


def num_targets(labels: list[int]) -> int:
    """Labels that give a loss after the shift by one: all but the first."""
    return sum(label != IGNORE for label in labels[1:])


def prepare_sequences(records: Iterable[TokenizedRecord], max_seq_len: int, truncate_long: bool) -> PreparedSequences:
    """Drops (or cuts) records longer than max_seq_len tokens and drops records that have no target token left.

    Raises ValueError when nothing is left, saying why.
    """
    sequences: list[TokenizedRecord] = []
    num_records = num_too_long = num_truncated = num_without_targets = longest = 0
    for ids, labels in records:
        num_records += 1
        longest = max(longest, len(ids))
        too_long = len(ids) > max_seq_len
        if too_long and not truncate_long:
            num_too_long += 1
        elif num_targets(labels[:max_seq_len]) == 0:
            num_without_targets += 1
        else:
            num_truncated += too_long
            sequences.append(TokenizedRecord(ids[:max_seq_len], labels[:max_seq_len]))
    if not sequences:
        remedy = f"\n  works with: --max-seq-len {longest}, or --truncate-long" if num_too_long else ""
        raise ValueError(
            f"no record is left to train on: of {num_records}, {num_too_long} are longer than --max-seq-len"
            f" {max_seq_len} tokens (longest: {longest}) and {num_without_targets} have no target token{remedy}"
        )
    return PreparedSequences(sequences, num_records, num_too_long, num_truncated, num_without_targets)


def split_epoch(lengths: list[int], max_tokens: int, order: list[int]) -> list[list[int]]:
    """Indices of each batch: sequences in the given order, a new batch where max_tokens would be exceeded.

    lengths in tokens, each <= max_tokens. The last batch may be short: an epoch is every sequence exactly once.
    """
    batches: list[list[int]] = []
    room = 0
    for i in order:
        if lengths[i] > room or not batches:
            batches.append([])
            room = max_tokens
        batches[-1].append(i)
        room -= lengths[i]
    return batches


class GlobalBatches:
    """Batches of a fixed list of sequences, shuffled anew in every epoch from the seed."""

    def __init__(self, sequences: list[TokenizedRecord], max_global_batch_tokens: int, seed: int) -> None:
        """Raises ValueError when a sequence is longer than a whole batch (max_global_batch_tokens)."""
        longest = max((len(s.input_ids) for s in sequences), default=0)
        if longest > max_global_batch_tokens:
            raise ValueError(
                f"a sequence of {longest} tokens exceeds --max-global-batch-tokens {max_global_batch_tokens}"
            )
        self.sequences, self.max_global_batch_tokens, self.seed = sequences, max_global_batch_tokens, seed

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
                yield Batch(
                    [self.sequences[i].input_ids for i in indices],
                    [self.sequences[i].labels for i in indices],
                )
                step += 1
            epoch += 1

    def _epoch(self, epoch: int) -> list[list[int]]:
        order = list(range(len(self.sequences)))
        random.Random(f"{self.seed}/{epoch}").shuffle(order)
        return split_epoch([len(s.input_ids) for s in self.sequences], self.max_global_batch_tokens, order)
