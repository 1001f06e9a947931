"""Random tokens of full length: the batch shape a speed measurement wants, from a seed and without any file."""

import random
from collections.abc import Iterator

from flexengine.data.batches import Batch

DEFAULT_STEPS = 10
"""Steps of a run on synthetic data when --steps is not given: there is no epoch to end it."""


class SyntheticBatches:
    """Every batch holds max_global_batch_tokens // max_seq_len sequences of exactly max_seq_len tokens, all targets.

    Tokens are uniform over the vocabulary, from (seed, step) alone. With repeat=True every step sees the first batch
    again, so that a falling loss can be checked on data without structure.
    """

    def __init__(
        self, vocab_size: int, max_seq_len: int, max_global_batch_tokens: int, seed: int, repeat: bool = False
    ) -> None:
        """Raises ValueError when one sequence exceeds the batch; both in tokens."""
        if max_seq_len > max_global_batch_tokens:
            raise ValueError(f"--max-seq-len {max_seq_len} exceeds --max-global-batch-tokens {max_global_batch_tokens}")
        self.vocab_size, self.max_seq_len, self.seed, self.repeat = vocab_size, max_seq_len, seed, repeat
        self.num_sequences = max_global_batch_tokens // max_seq_len

    def num_steps(self, steps: int | None, epochs: float | None) -> int:
        """steps, or DEFAULT_STEPS. Raises ValueError for epochs: random data has none."""
        if steps is None and epochs is not None:
            raise ValueError("--epochs has no meaning for --data-source synthetic, which never ends; give --steps")
        return DEFAULT_STEPS if steps is None else steps

    def begin(self, start: int = 0) -> None:
        """Do nothing: random tokens are drawn batch by batch."""

    def batches(self, num_steps: int, start: int = 0) -> Iterator[Batch]:
        """The first num_steps batches, from number `start` on."""
        for step in range(start, num_steps):
            yield self.batch(0 if self.repeat else step)

    def cursor(self, step: int) -> tuple[int, int]:
        """The epoch and the position of the batch after `step` batches: random data is one epoch without end."""
        return 0, step

    def fingerprint(self) -> str:
        """What decides the batches, in words."""
        return f"{self.num_sequences} x {self.max_seq_len} of {self.vocab_size}, seed {self.seed}, {self.repeat}"

    def batch(self, step: int) -> Batch:
        """The batch of one step."""
        rng = random.Random(f"{self.seed}/{step}")
        tokens = range(self.vocab_size)
        ids = [rng.choices(tokens, k=self.max_seq_len) for _ in range(self.num_sequences)]
        return Batch(ids, [list(row) for row in ids])
