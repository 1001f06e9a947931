"""The programs of a whole step, simulated: when each part ends, and what its compute stream waits for.

Where the CPU updates, that goes on under the next step's first round, so the update comes first; without clipping, or
where a plan says that it speculates, it begins in the last round, and what is left of it comes first. The GPU's updates
end with their round, or with a program of their own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexengine.plan import Plan
from flexengine.schedule.commands import DRIVE_STREAMS, HOST_STREAMS, STREAMS, Command, Program, Stream
from flexengine.schedule.following import followed
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape
from flexengine.schedule.lowering.kinds import RoundUpdates, UpdateKind, UpdateWay
from flexengine.schedule.packing import even_rounds, full_round, later_rounds
from flexengine.schedule.programs import lower_round, lower_update
from flexengine.schedule.shares import Share
from flexengine.schedule.simulator import Rates, Timing, simulate


class StepPart(NamedTuple):
    """A program of a step, how often it runs there, what it is in words, and its times until the GPU has ended it.

    shape: of the round that it is.
    """

    name: str
    repeats: int
    program: Program
    timing: Timing
    shape: RoundShape | None = None


def full_step(plan: Plan) -> list[tuple[RoundShape, int]]:
    """The rounds of a full step in order, as shapes and how many there are of each; the first stands alone.

    A plan of one of several ranks has those of that rank, and where ranks cut rounds all.
    """
    sizes = (plan.request, plan.chunk_tokens, plan.chunks_per_round)
    if plan.round_multiple > 1:
        ranks = 1 if plan.cuts_rounds else plan.request.ranks * plan.request.nodes
        (opening, count), *later = even_rounds(*sizes, max(1, plan.round_multiple // ranks))
        return [(opening, 1), *([(opening, count - 1)] if count > 1 else []), *later]
    return [(full_round(*sizes), 1), *later_rounds(*sizes)]


def simulated_rounds(
    layout: Layout, rates: Rates, rounds: Sequence[tuple[RoundShape, int]] | None = None
) -> list[StepPart]:
    """The rounds of a step in order: the first, and those that add to its gradients.

    rounds: their shapes and how many there are of each, the first alone; None: those of a full step.
    Where the CPU updates, it goes on under the next step's first round, so the update comes before that: with all of
    its work, or with what is left when the last round, in which it began, has ended on the GPU. That is so without
    clipping, and with it for what is updated speculatively, of which a full step is expected to hold.
    """
    plan = layout.plan
    (opening, _), *later = full_step(plan) if rounds is None else rounds
    if plan.request.norm_first:
        later = [(opening, 1)]  # the same once more
    alone, last, left = not later, None, None
    last_shape = opening
    if plan.updates_in_backward or plan.speculates:
        last_shape, count = (opening, 1) if alone else later.pop()
        later += [(last_shape, count - 1)] if count > 1 else []
        last = lower_last_round(layout, last_shape, first=alone or plan.request.norm_first)
    found = []
    for shape, count in later:
        label = "accumulating round" if shape == opening else "shorter last round"
        found.append(_simulated(label, count, lower_round(layout, shape, first=False), rates, shape))
    if plan.request.norm_first:
        first, name = lower_round(layout, opening, first=True, updates="norm"), "the round for its norm"
    elif last is None or not alone:
        first, name = lower_round(layout, opening, first=True), "the round" if alone else "first round"
    else:
        first, name = last, f"the round with updates by the {updater(plan)}"
    if last is not None:
        timing = simulate(last, rates)
        left = unfinished_updates(last, timing)
        if not alone:
            timing = until_gpu_ends(last, timing)
            found.append(StepPart(f"last round with updates by the {updater(plan)}", 1, last, timing, last_shape))
    begins = after_a_batch(rates)
    if plan.updates_on_cpu:
        update = "update" if last is None else "rest of the update"
        own = lower_update(layout, UpdateKind(way_of(plan), Share(0, plan.request.ranks), left=left))
        first, name = followed(own, first), f"{update} of the step before, then {name}"
        begins = after_a_round(begins)
    return [_simulated(name, 1, first, begins, opening), *found]


def simulated_update(layout: Layout, rates: Rates) -> StepPart:
    """The update of a plan whose CPU updates nothing, after the rounds."""
    program = lower_update(layout, UpdateKind(way_of(layout.plan), Share(0, layout.plan.request.ranks)))
    return StepPart("update", 1, program, simulate(program, after_a_round(rates)))


def after_a_batch(rates: Rates) -> Rates:
    """Rates for the first round of a step, which begins when the host has prepared the batch; later ones find it ahead
    of the GPU."""

    def issue_s(command: Command) -> float:
        is_batch = command.kind == "copy" and command.name.subject == "batch"
        return rates.issue_s(command) + (rates.batch_s if is_batch else 0.0)

    return rates._replace(issue_s=issue_s)


def after_a_round(rates: Rates) -> Rates:
    """Rates for an update, whose first command the host issues when it has read the loss of the step."""

    def issue_s(command: Command) -> float:
        return rates.issue_s(command) + (0.0 if command.index else rates.settle_s)

    return rates._replace(issue_s=issue_s)


def lower_last_round(layout: Layout, shape: RoundShape, first: bool) -> Program:
    """The last round of a step, in which updates may begin."""
    in_round: RoundUpdates = "clipped" if layout.plan.request.norm_first else "in_round"
    updates: dict[UpdateWay, RoundUpdates] = {"in_round": in_round, "committed": "speculative"}
    return lower_round(layout, shape, first, updates.get(way_of(layout.plan), "none"))


def updater(plan: Plan) -> str:
    """Who updates inside the last round, in words."""
    by = ["GPU"] * plan.gpu_updates_in_round + ["CPU"] * plan.updates_on_cpu
    return " and the ".join(by)


def way_of(plan: Plan) -> UpdateWay:
    """How a full step is expected to update: what is speculative holds."""
    return "in_round" if plan.updates_in_backward else "committed" if plan.speculates else "after_norm"


def _simulated(name: str, repeats: int, program: Program, rates: Rates, shape: RoundShape) -> StepPart:
    return StepPart(name, repeats, program, until_gpu_ends(program, simulate(program, rates)), shape)


def unfinished_updates(program: Program, timing: Timing, least_s: float = 0.0) -> dict[int, float]:
    """Groups whose update by the CPU has not ended when the GPU has ended a program, with the part that is left.

    least_s: of the program, where something else ends later.
    """
    cut, left_s, all_s = until_gpu_ends(program, timing, least_s), dict[int, float](), dict[int, float]()
    for command in program.commands:
        if command.stream in HOST_STREAMS:
            group, seconds = command.args.group, timing.end_s[command.index] - timing.start_s[command.index]
            ended_s = cut.end_s[command.index] - cut.start_s[command.index]
            all_s[group] = all_s.get(group, 0.0) + seconds
            left_s[group] = left_s.get(group, 0.0) + seconds - ended_s
    return {group: seconds / all_s[group] for group, seconds in sorted(left_s.items()) if seconds > 0}


def until_gpu_ends(program: Program, timing: Timing, least_s: float = 0.0) -> Timing:
    """A program's times cut off when all streams but the host's have ended it, after `least_s` at the soonest; what
    comes later takes no time."""
    ends_s = (timing.end_s[c.index] for c in program.commands if c.stream not in HOST_STREAMS)
    end_s = max(least_s, max(ends_s, default=0.0))
    if end_s >= timing.total_s:
        return timing
    starts, ends = ([min(end_s, at_s) for at_s in times] for times in (timing.start_s, timing.end_s))
    busy_s = dict(timing.busy_s)
    for stream in (stream for stream in HOST_STREAMS if stream in busy_s):
        busy_s[stream] = sum(ends[c.index] - starts[c.index] for c in program.commands if c.stream is stream)
    return Timing(starts, ends, end_s, busy_s)


PHASES = dict.fromkeys(("finish_gradient", "scale", "fill_window", "recompute", "forward_again"), "backward") | {
    "clip": "update",
    "sum_squares": "update",
}
"""Command kinds that belong to a phase of another name."""
ISSUE = "issue"
"""What compute waits for when nothing but the host holds it back."""


def stalls(program: Program, timing: Timing) -> dict[tuple[str, str], float]:
    """Seconds that the compute stream waits, by what it waits for and by phase.

    It waits for the stream whose command ends last of those it needs; when all of them have ended, for the host to
    issue the next command: "issue".
    """
    found: dict[tuple[str, str], float] = defaultdict(float)
    free, phase = 0.0, "forward"
    for command in program.commands:
        if command.stream is Stream.COMPUTE:
            if command.kind != "decode":  # of the weights for the phase that it lies in
                phase = PHASES.get(command.kind, command.kind)
            start = timing.start_s[command.index]
            ready = max([free, *(timing.end_s[w] for w in command.waits)])
            if ready > free:
                last = max(command.waits, key=lambda w: timing.end_s[w])
                found[_held_back_by(program.commands[last], program, timing).value, phase] += ready - free
            if start > ready:
                found[ISSUE, phase] += start - ready
            free = timing.end_s[command.index]
    if timing.total_s > free:
        # where the times are cut off, the CPU's end with the last of the GPU's
        last = max(program.commands, key=lambda c: (timing.end_s[c.index], c.stream not in HOST_STREAMS))
        found[last.stream.value, phase] += timing.total_s - free
    return dict(found)


def _held_back_by(command: Command, program: Program, timing: Timing) -> Stream:
    """The stream that a command's end waits for: of a drive where it waits for what a drive brings or takes, or for
    an update by the CPU that waited so."""
    found = at = command
    while True:
        last = max(at.waits, key=lambda w: timing.end_s[w], default=-1)
        earlier = (c.index for c in reversed(program.commands[: at.index]) if c.stream is at.stream)
        before = next(earlier, None)
        if last < 0 or (before is not None and timing.end_s[before] > timing.end_s[last]):
            return found.stream
        at = program.commands[last]
        if at.stream in DRIVE_STREAMS:
            found = at
        elif at.stream is not Stream.CPU:
            return found.stream


@dataclass(frozen=True)
class StepEstimate:
    """Predicted seconds of a step or of one program, busy seconds per stream, and compute seconds of recomputation.

    stalls_s: seconds that compute waits, by (stream waited for or "issue", phase): see `stalls`.
    """

    step_s: float
    busy_s: dict[str, float]
    recompute_s: float
    stalls_s: dict[tuple[str, str], float]


def summed(parts: list[tuple[StepEstimate, int]]) -> StepEstimate:
    """The sum of programs that run so many times."""
    stalls_s: dict[tuple[str, str], float] = {}
    for program, count in parts:
        for key, seconds in program.stalls_s.items():
            stalls_s[key] = stalls_s.get(key, 0.0) + count * seconds
    return StepEstimate(
        step_s=sum(count * part.step_s for part, count in parts),
        busy_s={s: sum(count * part.busy_s.get(s, 0.0) for part, count in parts) for s in _streams_of(parts)},
        recompute_s=sum(count * part.recompute_s for part, count in parts),
        stalls_s=stalls_s,
    )


def _streams_of(parts: list[tuple[StepEstimate, int]]) -> list[str]:
    used = {stream for part, _ in parts for stream in part.busy_s}
    return [stream.value for stream in STREAMS if stream.value in used]


LIMIT_WORDS = {
    "h2d": "host-to-device link",
    "d2h": "device-to-host link",
    "compute": "compute",
    "cpu": "CPU",
    "relay_in": "what other ranks hand over",
    "relay_out": "what is handed to other ranks",
    "comm": "exchange between GPUs",
    "drive_in": "the drive, which is read,",
    "drive_out": "the drive, which is written,",
    "drive_fetch": "the drive, which is read for the GPU,",
    "drive_store": "the drive, which takes what the GPU leaves,",
    ISSUE: "the host, which issues commands,",
}
COMPUTE_BOUND_SHARE = 0.9
"""With compute busy for this share of a step, compute limits it."""


def limiter(estimate: StepEstimate) -> str:
    """What limits a step, in words: compute, or what and in which phase compute waits for longest."""
    busy_share = estimate.busy_s["compute"] / max(estimate.step_s, 1e-30)
    if busy_share >= COMPUTE_BOUND_SHARE or not estimate.stalls_s:
        again = estimate.recompute_s / max(estimate.busy_s["compute"], 1e-30)
        return f"compute (busy {100 * busy_share:.0f}% of the step, {100 * again:.0f}% of it recomputation)"
    (cause, phase), seconds = max(estimate.stalls_s.items(), key=lambda item: item[1])
    share = f"{100 * seconds / estimate.step_s:.0f}% of the step"
    return f"{LIMIT_WORDS[cause]} during {phase} (compute waits for it {share})"
