"""Carries out the commands of a split plan: collectives of all ranks of a node, and sums of what they bring."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import torch
from torch import Tensor

from flexengine.parallel.collectives import Collectives
from flexengine.runtime.arena import DTYPES, Arenas, wide_dtype
from flexengine.runtime.gradients import RunSquares, fold_parts, sum_parts
from flexengine.runtime.update import UpdateRunner, UpdateSettings
from flexengine.schedule.commands import Command, Program
from flexengine.schedule.fixed_slots import PARTIAL_SQUARES
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.split_commands import ExchangeParts, FoldParts, GatherOwned, GatherShares

CommandHandler = Callable[[Command, Program, UpdateSettings | None], None]
"""Launches a command of a program. The settings are None in a program that updates nothing."""


class SplitHandlers:
    """The handlers of one layout, by kind of command."""

    def __init__(self, layout: Layout, arenas: Arenas, updates: UpdateRunner, collectives: Collectives) -> None:
        self._layout, self._arenas, self._updates, self._collectives = layout, arenas, updates, collectives
        self._wide = wide_dtype(layout)
        self.by_kind: dict[str, CommandHandler] = {
            "gather": self._gather,
            "gather_owned": self._gather_owned,
            "exchange": self._exchange,
            "fold": self._fold,
            "clear_squares": self._clear_squares,
            "add_squares": self._add_squares,
            "sum_squares": self._sum_squares,
        }

    def _gather(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        args: GatherShares = command.args
        shares = self._arenas.view(program.slots[args.slot], 0, (args.size * args.share_bytes,), torch.uint8)
        self._collectives.gather(shares, shares[args.rank * args.share_bytes :][: args.share_bytes])

    def _gather_owned(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        args: GatherOwned = command.args
        own = self._arenas.view(program.slots[args.source], 0, (args.counts[args.rank],), torch.uint8)
        whole = self._arenas.view(program.slots[args.slot], 0, (sum(args.counts),), torch.uint8)
        self._collectives.gather_owned(whole, own, args.counts)

    def _exchange(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        args: ExchangeParts = command.args
        sent = self._elements(args.accumulator, args.first, sum(args.counts))
        own = args.counts[args.rank]
        received = self._elements(args.received, 0, len(args.counts) * own)
        self._collectives.exchange(received, sent, args.counts, own, args.brings_own)

    def _fold(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        args: FoldParts = command.args
        slots, stored = self._layout.slots, DTYPES[self._layout.plan.request.numerics.grad]
        partial = self._arenas.view(self._layout.place("partial_squares"), 0, (PARTIAL_SQUARES,), torch.float32)
        arrived = [
            self._elements(slot, 0, args.rounds * numel).view(args.rounds, numel) for slot, numel in args.received
        ]
        for run in args.runs:
            piece, own = args.own, None
            if piece is not None:
                own = piece.rank, self._elements(piece.slot, piece.first + run.start, run.numel)
            fold_parts(
                [parts[:, run.start : run.start + run.numel] for parts in arrived],
                own,
                self._arenas.view(slots[run.slot], run.stored_start * stored.itemsize, (run.numel,), stored),
                args.has_previous,
                RunSquares(partial, self._table[run.number], run.before, run.whole),
            )

    def _elements(self, slot: int, first: int, count: int) -> Tensor:
        """Elements of a slot with accumulators."""
        return self._arenas.view(self._layout.slots[slot], first * self._wide.itemsize, (count,), self._wide)

    # -- sums of squares ---------------------------------------------------------------------------------------------

    @cached_property
    def _table(self) -> Tensor:
        """Partial sums of squares, float64 [runs, PARTIAL_SQUARES]."""
        shape = self._layout.first_run(len(self._layout.groups)), PARTIAL_SQUARES
        return self._arenas.view(self._layout.place("run_squares"), 0, shape, torch.float64)

    def _clear_squares(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        self._table.zero_()

    def _add_squares(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        self._collectives.add(self._table)

    def _sum_squares(self, command: Command, program: Program, settings: UpdateSettings | None) -> None:
        sum_parts(self._table, self._updates.norm_squares(), self._run_elements, self._wide)

    @cached_property
    def _run_elements(self) -> list[int]:
        """Elements of every run."""
        found = []
        for group in self._layout.groups:
            runs = (run for part in group.parts for run in part.runs)
            found += [run.numel for run in sorted(runs, key=lambda run: run.number)]
        return found
