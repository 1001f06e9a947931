"""Proves that ranks which cut rounds run all chunks in turn, hand on what they should, and add up all gradients once.

- layers: in every round each layer runs forward and backward once for each chunk; of each layer the ranks' accumulators
  pass through all ranks with chunks, one after the other, and nobody begins anew but the first;
- hand-overs: who takes something finds it at the place where its giver left it, of the same layer and round;
- gradients: each part is stored once a round by each layer that adds to it, on the rank where its accumulator ends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from flexengine.schedule.checker import ProgramError
from flexengine.schedule.commands import FinishGradient
from flexengine.schedule.group_uses import group_uses
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.context_semaphores import HandedOn
from flexengine.schedule.ranks.order import Event
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.stages_checker import check_layers


def check_context(layout: Layout, runs: Sequence[Sequence[RankRun]]) -> None:
    """Raise ProgramError unless ranks run every layer for every chunk, and store all gradients once a round."""
    rounds: dict[tuple[int, int], list[RankRun]] = defaultdict(list)
    for run in (run for of_rank in runs for run in of_rank if not run.updates):
        rounds[run.step, run.number].append(run)
    for (step, number), together in rounds.items():
        where = f"round {number} of step {step}"
        if len(together) != len(runs):
            raise ProgramError(f"not all ranks run {where}")
        check_layers(layout, together, where)
        _check_first(layout, together, where)
        _check_stored(layout, together, where)


def _check_first(layout: Layout, together: Sequence[RankRun], where: str) -> None:
    """Check that one command of each layer begins its accumulators, and that ranks take what their neighbours left."""
    begins, passed = Counter[int](), dict[tuple[int, int], Counter[str]]()
    for rank, run in enumerate(together):
        for command in run.program.commands:
            if command.kind == "backward" and command.args.accumulators:
                begins[command.args.layer] += command.args.first
            elif isinstance(command.args, HandedOn) and command.args.what == "sums":
                what: HandedOn = command.args
                if not what.taken and what.giver != rank:
                    raise ProgramError(f"{command.label} of rank {rank} leaves what is rank {what.giver}'s in {where}")
                passed.setdefault((what.layer, what.giver), Counter())["taken" if what.taken else "left"] += 1
    for layer, count in begins.items():
        if count != 1:
            raise ProgramError(f"{count} commands begin the sums of {layout.model.layers[layer].name} in {where}")
    for (layer, giver), counts in passed.items():
        if counts["taken"] != counts["left"]:
            name = layout.model.layers[layer].name
            raise ProgramError(f"not all sums of {name} that rank {giver} leaves are taken once in {where}")


def _check_stored(layout: Layout, together: Sequence[RankRun], where: str) -> None:
    """Check that each part of a gradient is stored as often as layers add to it, and what it is added to."""
    stored: dict[tuple[int, int, int, int], list[bool]] = defaultdict(list)
    number = together[0].number
    for run in together:
        for args in (c.args for c in run.program.commands if isinstance(c.args, FinishGradient)):
            for found in args.runs:
                stored[args.group, found.number, found.before, found.numel].append(args.has_previous)
    uses, elements = group_uses(layout.model), Counter[int]()
    for (group, _, before, numel), flags in stored.items():
        elements[group] += numel
        expected = [number > 0, *[True] * (uses[group].gradients - 1)]
        if flags != expected:
            name = layout.model.groups[group].name
            raise ProgramError(f"elements {before}..{before + numel} of {name} are stored {flags} in {where}")
    for group, (spec, storage) in enumerate(zip(layout.model.groups, layout.groups, strict=True)):
        whole = sum(run.numel for part in storage.parts for run in part.runs)
        if not spec.frozen and elements[group] != whole:
            raise ProgramError(f"{elements[group]} of {whole} elements of {spec.name} are stored in {where}")


def held_in_context(event: Event) -> tuple[int, ...]:
    """What a place for hand-overs holds where an event reads it, or has written it: of which step, round and layer."""
    return event.run.step, event.run.number, event.command.args.layer


def reads_what_head_stored(event: Event) -> bool:
    """Whether an event of a round fetches a tied gradient behind the head, which has stored it in the same round."""
    left = event.command.name._replace(verb="offload")
    return any(command.name == left for command in event.run.program.commands[: event.command.index])
