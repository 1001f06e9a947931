"""Proves that ranks which train in stages hand over what they should, and add up every round once: see `ranks.checker`.

- layers: in every wave each layer runs forward and backward once for each chunk, on one of the ranks;
- hand-overs: who leaves or takes a chunk does so at its place, and finds what was left there in the same wave;
- gradients: each element of each group is added up once a round, to what earlier rounds stored and to nothing in the
  first round of a step; the head's by the rank of the round.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from flexengine.schedule.checker import ProgramError
from flexengine.schedule.commands import Command, FinishGradient, LayerCall, UpdateTile
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.order import Event
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.stages import HandedOver, head_group

Wave = tuple[int, int]
"""A step, and the number of the wave in it."""


def check_stages(layout: Layout, runs: Sequence[Sequence[RankRun]]) -> None:
    """Raise ProgramError unless ranks run every layer for every chunk, and store all gradients once a round."""
    waves: dict[Wave, list[RankRun]] = defaultdict(list)
    for run in (run for of_rank in runs for run in of_rank if not run.updates):
        waves[run.step, run.number].append(run)
    for (step, number), together in waves.items():
        if len(together) != len(runs) or len({run.rounds for run in together}) > 1:
            raise ProgramError(f"not all ranks run wave {number} of step {step} with the same rounds")
        check_layers(layout, together, f"wave {number} of step {step}")
        _check_rounds(layout, together, f"wave {number} of step {step}")
        for run in together:
            for command in (c for c in run.program.commands if isinstance(c.args, HandedOver)):
                _check_place(run, command)


def check_layers(layout: Layout, together: Sequence[RankRun], wave: str) -> None:
    """Check that each layer runs once for every chunk, on one of the ranks."""
    counts, chunks = Counter[tuple[str, int, int]](), set[int]()
    for command in (c for run in together for c in run.program.commands if c.kind in ("forward", "backward")):
        call: LayerCall = command.args
        counts[command.kind, call.layer, call.chunk] += 1
        chunks.add(call.chunk)
    for layer, spec in enumerate(layout.model.layers):
        kinds = [*(["forward"] if spec.kind != "head" else []), *(["backward"] if spec.has_backward else [])]
        for kind in kinds:
            for chunk in chunks:
                if counts[kind, layer, chunk] != 1:
                    times = counts[kind, layer, chunk]
                    raise ProgramError(f"{kind} of {spec.name} runs {times} times for chunk {chunk} in {wave}")


def _check_rounds(layout: Layout, together: Sequence[RankRun], wave: str) -> None:
    """Check how often each part of a gradient is stored in a wave, and whether it is added to what is stored."""
    rounds, head = together[0].rounds, head_group(layout.model)
    stored: dict[tuple[int, int, int], list[bool]] = defaultdict(list)  # (number, before, elements) of a run, in order
    for rank, run in enumerate(together):
        finished = (c.args for c in run.program.commands if isinstance(c.args, FinishGradient))
        for args in finished:
            if args.group == head and rank >= len(rounds):
                raise ProgramError(f"rank {rank} adds to the head's gradient in {wave}, of which no round is its own")
            for found in args.runs:
                stored[found.number, found.before, found.numel].append(args.has_previous)
    for (number, before, numel), flags in stored.items():
        if flags != [place > 0 for place in rounds]:
            raise ProgramError(
                f"elements {before}..{before + numel} of run {number} are stored {len(flags)} times in {wave}, of"
                f" rounds {rounds.start}..{rounds.stop}, added to what was there: {flags}"
            )
    for group, storage in enumerate(layout.groups):
        if layout.model.groups[group].frozen:
            continue
        for run in (run for part in storage.parts for run in part.runs):
            number = layout.first_run(group) + run.number
            covered = sum(numel for of_run, _, numel in stored if of_run == number)
            if covered != run.numel:
                raise ProgramError(f"{covered} of {run.numel} elements of run {number} are stored in {wave}")


def _check_place(run: RankRun, command: Command) -> None:
    """Check that a chunk is left at, or taken from, the place of its layer's input."""
    what: HandedOver = command.args
    for region in command.copies:
        key = run.program.slots[region.source if what.taken else region.target].key
        if (key.role, key.memory, key.owner, key.index) != ("handed", "node", what.layer, what.chunk):
            raise ProgramError(f"{command.label} is handed over at {key}")


def held_in_stages(layout: Layout, event: Event, role: str, owner: str, writes: bool) -> tuple[int, ...]:
    """What bytes of the node's memory hold where an event reads them, or has written them.

    Of a gradient: the sum up to which round of which step. Of a place of chunks: of which step and wave, and whether
    input or gradient.
    """
    run, rounds = event.run, event.run.rounds
    if role == "handed":
        what = event.command.args
        return run.step, run.number, int(isinstance(what, HandedOver) and what.back)
    if run.updates or isinstance(event.command.args, UpdateTile):  # speculative ones read what their wave has left
        return run.step, rounds.stop - 1
    if owner == layout.model.groups[head_group(layout.model)].name:
        return run.step, rounds.start + event.rank - (not writes)
    return run.step, rounds.stop - 1 if writes else rounds.start - 1
