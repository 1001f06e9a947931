"""Semaphores that rise: how a rank tells the others of its node that a piece is written, or that it gives up.

The table has a row for each rank of a node and is written by that rank alone. Behind the semaphores a row has a word
and text by which its rank aborts the run.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from flexengine.native.signals import open_words
from flexengine.parallel.control import RankError

RAISED = 2**31 - 1
"""What semaphores hold after an abort: above every value, also as GPUs compare, by the sign of the difference."""
_LINE_WORDS = 16  # a cache line of 64 bytes: rows share none
_TEXT_BYTES = 508
_ABORT_WORDS = 1 + _TEXT_BYTES // 4
_INTERRUPTIBLE_S = 0.05  # how long native code waits before Python looks for Ctrl-C


class RankLost(RankError):  # noqa: N818, says what happened
    """A rank has ended, hangs or has given up; the run cannot go on."""


class Signals:
    """A row of semaphores for each rank of a node. Their values only rise, from 1 to `RAISED` - 1; they begin at 0."""

    def __init__(self, table: Tensor, row: int) -> None:
        """table: uint32 [ranks of the node, Signals.columns(semaphores)], zeroed. row: this rank's."""
        self.table = table
        self.row = row
        self.num_rows, columns = table.shape
        self.num_semaphores = columns - _ABORT_WORDS
        if self.num_semaphores < 0 or not 0 <= row < self.num_rows:
            raise ValueError(f"row {row} of a table {list(table.shape)}; ask Signals.columns how wide it is")
        self.gone: dict[int, str] = {}
        """Rows whose ranks signal no more, and what to tell who waits for them."""
        self._words = open_words(table)

    @staticmethod
    def columns(num_semaphores: int) -> int:
        """The width of a table with at least so many semaphores."""
        return -(-(num_semaphores + _ABORT_WORDS) // _LINE_WORDS) * _LINE_WORDS

    @staticmethod
    def num_bytes(num_rows: int, num_semaphores: int) -> int:
        """The bytes of a table with at least so many semaphores."""
        return 4 * num_rows * Signals.columns(num_semaphores)

    @staticmethod
    def over(memory: Tensor, num_rows: int, num_semaphores: int, row: int) -> Signals:
        """Signals in the first `num_bytes` of uint8 `memory`, which all ranks of a node map and which is zeroed."""
        table = memory[: Signals.num_bytes(num_rows, num_semaphores)].view(torch.uint32)
        return Signals(table.view(num_rows, Signals.columns(num_semaphores)), row)

    def signal(self, semaphore: int, value: int) -> None:
        """Raise this rank's semaphore to `value`: whoever sees it sees everything that this rank wrote before."""
        self._check(semaphore, value)
        self._words.store(self.row, semaphore, value)
        if self.aborted:
            self._words.store(self.row, semaphore, RAISED)

    def value(self, semaphore: int, row: int | None = None) -> int:
        """What a semaphore holds in a row, by default this rank's."""
        return self._words.load(self.row if row is None else row, semaphore)

    def addresses(self, semaphore: int, row: int | None) -> list[int]:
        """Where a semaphore lies in a row, or with None in every row."""
        rows = range(self.num_rows) if row is None else (row,)
        return [self.table.data_ptr() + 4 * (index * self.table.shape[1] + semaphore) for index in rows]

    def wait(self, semaphore: int, row: int | None, value: int, timeout_s: float | None = None) -> None:
        """Wait until `semaphore` has reached `value` in `row`, or with None in every row.

        Raises: RankLost when a rank aborts, TimeoutError after timeout_s. The interpreter lock is free meanwhile.
        """
        self._check(semaphore, value)
        rows = range(self.num_rows) if row is None else range(row, row + 1)
        end_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left_s = end_s - time.monotonic()
            result = self._words.wait(semaphore, rows, value, self.num_semaphores, min(left_s, _INTERRUPTIBLE_S))
            if result == "reached":
                return
            self.check()
            for index in rows:
                if index in self.gone and self.value(semaphore, index) < value:
                    raise RankLost(self.gone[index])
            if left_s <= _INTERRUPTIBLE_S:
                raise TimeoutError(f"semaphore {semaphore} did not reach {value} within {timeout_s} s")

    def abort(self, message: str) -> None:
        """End all waits on all ranks: those of a CPU raise RankLost(message), those of GPUs go on.

        Only the first message of a row counts. What is computed from now on is worth nothing.
        """
        if self._words.load(self.row, self.num_semaphores) == 0:
            text = message.encode()[:_TEXT_BYTES].decode(errors="ignore").encode()
            words = self.table[self.row, self.num_semaphores + 1 :].view(torch.uint8)
            words[: len(text)] = torch.frombuffer(bytearray(text or b" "), dtype=torch.uint8)[: len(text)]
            self._words.store(self.row, self.num_semaphores, 1)
        self.raise_all()

    def raise_all(self) -> None:
        """Raise every semaphore of every row, so that no stream waits for a rank that is gone."""
        self.table[:, : self.num_semaphores].view(torch.int32).fill_(RAISED)

    def lower_own(self) -> None:
        """Set all of this row to 0 again, unless a rank has aborted. Order: no rank waits for one or signals."""
        self.table[self.row, : self.num_semaphores].view(torch.int32).fill_(0)
        if self.aborted:  # whoever aborts later raises all semaphores after this
            self.raise_all()

    @property
    def aborted(self) -> bool:
        """Whether a rank has aborted."""
        return any(self._words.load(row, self.num_semaphores) for row in range(self.num_rows))

    def check(self) -> None:
        """Raise RankLost, with the message, when a rank has aborted."""
        for row in range(self.num_rows):
            if self._words.load(row, self.num_semaphores):
                raise RankLost(self._message(row))

    def _message(self, row: int) -> str:
        text = self.table[row, self.num_semaphores + 1 :].contiguous().view(torch.uint8)
        return bytes(text.tolist()).split(b"\0")[0].decode(errors="replace")

    def _check(self, semaphore: int, value: int) -> None:
        if not (0 <= semaphore < self.num_semaphores and 0 < value < RAISED):
            raise ValueError(f"semaphore {semaphore} of {self.num_semaphores} cannot have the value {value}")
