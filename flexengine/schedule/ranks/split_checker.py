"""Proves that ranks which walk the layers together add up their gradients right: see `ranks.checker`.

- folds: in every wave the owners store each element of every trained group once, each adds as many rounds' parts as
  the wave has, to what earlier waves stored and to nothing in the first, and takes them from where they arrived;
- squares: a step begins with an empty table of sums of squares;
- shards: each rank sends its own, of the group that is wanted, and adds up gradients where it keeps theirs.
`ranks.order` sees to it that all ranks make the same collectives in the same order.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from flexengine.schedule.checker import ProgramError
from flexengine.schedule.commands import Command
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.split_commands import ExchangeParts, FoldParts, GatherOwned, ShareOfFetch, ShareOfRead


def check_folds(layout: Layout, runs: Sequence[Sequence[RankRun]]) -> None:
    """Raise ProgramError unless each wave's gradients are added up by their owners, every element once."""
    stored: dict[tuple[int, int, int], list[tuple[int, int]]] = defaultdict(list)
    waves = set[tuple[int, int]]()
    for rank, run in (
        (rank, run) for rank, of_rank in enumerate(runs) for run in of_rank if not (run.updates or run.exchanges)
    ):
        waves.add((run.step, run.number))
        _check_run(rank, run)
        _check_shards(layout, rank, run)
        for command in (c for c in run.program.commands if isinstance(c.args, FoldParts)):
            for found in command.args.runs:
                stored[run.step, run.number, found.number].append((found.before, found.before + found.numel))
    for step, number in sorted(waves):
        for group, spec in enumerate(layout.model.groups):
            runs_of_group = [run for part in layout.groups[group].parts for run in part.runs]
            for run in () if spec.frozen else runs_of_group:
                spans = stored[step, number, layout.first_run(group) + run.number]
                _check_covered(f"{spec.name} run {run.number} in wave {number}", spans, run.numel)


def _check_covered(what: str, spans: list[tuple[int, int]], numel: int) -> None:
    reached = 0
    for start, end in [*sorted(spans), (numel, numel)]:
        if start != reached:
            twice = "twice" if start < reached else "by no rank"
            raise ProgramError(f"elements {start}..{reached} of {what} are stored {twice}")
        reached = end


def _check_run(rank: int, run: RankRun) -> None:
    arrived: dict[int, ExchangeParts] = {}
    spilled: dict[int, ExchangeParts] = {}  # by slot on the host
    if run.number == 0 and not any(command.kind == "clear_squares" for command in run.program.commands):
        raise ProgramError(f"rank {rank} adds squares of step {run.step} to those of the step before")
    for command in run.program.commands:
        if isinstance(command.args, ShareOfFetch | ShareOfRead) and command.args.rank != rank:
            raise ProgramError(f"{command.label} (rank {rank}) copies the share of rank {command.args.rank}")
        if isinstance(command.args, ExchangeParts):
            arrived[command.args.received] = command.args
        elif command.name.subject == "spilled" and command.name.verb == "fetch":
            arrived[command.copies[0].target] = spilled[command.copies[0].source]
        elif command.name.subject == "spilled":
            spilled[command.copies[0].target] = arrived[command.copies[0].source]
        elif isinstance(command.args, FoldParts):
            _check_fold(rank, run, command, arrived)


def _check_shards(layout: Layout, rank: int, run: RankRun) -> None:
    groups = {layout.model.groups[group].name: group for group, home in enumerate(layout.homes) if home.sharded}
    for command in run.program.commands:
        args = command.args
        if isinstance(args, GatherOwned):
            group = groups[str(run.program.slots[args.source].key.owner)]
            right = args._replace(
                rank=rank,
                source=layout.plane_slot("weights", group),
                counts=layout.shards(group).bytes_of_ranks("weights"),
            )
            if args != right or command.writes[0].content != f"weights {layout.model.groups[group].name}":
                raise ProgramError(f"{command.label} (rank {rank}) sends other bytes than the rank's shard")
        elif isinstance(args, FoldParts) and layout.homes[args.group].sharded:
            _check_fold_of_shard(layout, rank, command)


def _check_fold_of_shard(layout: Layout, rank: int, command: Command) -> None:
    group = command.args.group
    home, first = layout.plane_slot("grad", group), layout.trained_shards(group).cuts[rank]
    of_group = {layout.first_run(group) + run.number: run for part in layout.groups[group].parts for run in part.runs}
    for run in command.args.runs:
        if (run.slot, run.stored_start) != (home, of_group[run.number].first + run.before - first):
            raise ProgramError(f"{command.label} (rank {rank}) stores elements elsewhere than in the rank's shard")


def _check_fold(rank: int, run: RankRun, command: Command, arrived: dict[int, ExchangeParts]) -> None:
    args = command.args
    if args.rounds != len(run.rounds):
        raise ProgramError(f"{command.label} (rank {rank}) adds {args.rounds} rounds, of a wave of {len(run.rounds)}")
    if args.has_previous != (run.number > 0):
        raise ProgramError(f"{command.label} (rank {rank}) does not add to what the waves before have stored")
    for parts in args.received:
        exchange = arrived.get(parts.slot)
        if exchange is None or exchange.counts[rank] != parts.numel:
            raise ProgramError(f"{command.label} (rank {rank}) takes other pieces than those that arrived")
        wanted = None if exchange.brings_own or rank >= args.rounds else exchange.own
        if args.own != wanted:
            raise ProgramError(f"{command.label} (rank {rank}) takes another piece for its own than it has kept")
