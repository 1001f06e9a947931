"""Seconds of a command, a round and a step on a machine described by its profile.

Costs come from the work that the ops declare and the rates that were measured; where commands overlap and who waits for
whom is the simulator's answer on the real program.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from flexengine.hardware.profile import HardwareProfile
from flexengine.ops.base import Work
from flexengine.plan import Request
from flexengine.schedule.commands import Command, LayerCall, Program, Stream
from flexengine.schedule.following import followed
from flexengine.schedule.layer_program import Stage
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import ChunkShape, RoundShape, lower_round, lower_update
from flexengine.schedule.simulator import Rates, Timing, simulate

GROUPED_SHARE = 0.77
"""Rate of the products of experts over that of linear layers of as many tokens, on an H200: 0.72 with 128 narrow
experts, 0.76 with 64, 0.81 with 8 wide ones (bench/results/h200_block_*.json)."""


@dataclass(frozen=True)
class StepEstimate:
    """Predicted seconds of a full step, busy seconds per stream, and the compute seconds spent on recomputation.

    stalls_s: seconds that compute waits, by (stream waited for or "issue", phase): see `stalls`.
    """

    step_s: float
    busy_s: dict[str, float]
    recompute_s: float
    stalls_s: dict[tuple[str, str], float]


@dataclass(frozen=True)
class CostModel:
    """Prices commands of chunks of `chunk_tokens` tokens; `compute_bytes` is the size of a compute element.

    seq_len: tokens of a sequence, which attention's rates depend on. state_dtype: of the optimizer, for the CPU's rate.
    """

    profile: HardwareProfile
    compute_bytes: int
    chunk_tokens: int
    seq_len: int
    state_dtype: str = "float32"

    @cached_property
    def matmul_rate(self) -> float:
        """FLOP/s of linear layers at this chunk size."""
        return self.profile.matmul_rate(self.chunk_tokens)

    @cached_property
    def fp8_rate(self) -> float:
        """The same with FP8 operands."""
        return self.profile.fp8_matmul_rate(self.chunk_tokens)

    @cached_property
    def attention_rates(self) -> tuple[float, float]:
        """FLOP/s of causal attention, forward and backward, at this sequence length."""
        return self.profile.attention_forward_rate(self.seq_len), self.profile.attention_backward_rate(self.seq_len)

    def work_s(self, work: Work) -> float:
        """Seconds of work that runs alone on the compute stream: kernels follow each other, nothing overlaps."""
        p = self.profile
        forward_rate, backward_rate = self.attention_rates
        return (
            (work.matmul_flops + work.grouped_flops / GROUPED_SHARE) / self.matmul_rate
            + (work.fp8_flops / self.fp8_rate if work.fp8_flops else 0.0)
            + work.attention_forward_flops / forward_rate
            + work.attention_backward_flops / backward_rate
            + work.memory_bytes / p.memory_bytes_per_s
            + work.kernels * p.launch_s
        )

    def command_s(self, command: Command) -> float:
        """Seconds of a compute command."""
        return self.work_s(command.work)

    def rates(self) -> Rates:
        """The same machine, for the simulator."""
        p = self.profile
        return Rates(
            compute_s=self.command_s,
            alone_bytes_per_s={Stream.H2D: p.h2d_bytes_per_s, Stream.D2H: p.d2h_bytes_per_s},
            duplex_bytes_per_s={Stream.H2D: p.h2d_duplex_bytes_per_s, Stream.D2H: p.d2h_duplex_bytes_per_s},
            copy_latency_s=p.copy_latency_s,
            issue_s=self.issue_s,
            cpu_s=self.cpu_s,
            host_bytes_per_s=p.host_rate(self.state_dtype),
            beside_cpu_bytes_per_s={Stream.H2D: p.h2d_beside_cpu_bytes_per_s, Stream.D2H: p.d2h_beside_cpu_bytes_per_s},
        )

    def cpu_s(self, command: Command) -> float:
        """Seconds of an update by the CPU while the link is idle: it is bound by host memory."""
        return command.work.memory_bytes / self.profile.cpu_adamw_bytes_per_s(self.state_dtype)

    def issue_s(self, command: Command) -> float:
        """Host seconds to issue a command: its op calls, each with its views, one after another."""
        return self.profile.issue_s * issue_calls(command)


COPY_ISSUE_CALLS = 0.25
"""Copies between two compute commands are one native call, bound once per program."""
OTHER_ISSUE_CALLS = 6
"""The update of a tile and the rounding of a gradient: about as many views."""


def issue_calls(command: Command) -> float:
    """What the host does for a command, in bindings of a view or launches: one per op and one per tensor of it."""
    if command.copies:
        return COPY_ISSUE_CALLS
    if not isinstance(command.args, LayerCall):
        return OTHER_ISSUE_CALLS
    return stage_calls(command.args.program.stages(command.kind)[command.args.stage])


def stage_calls(stage: Stage) -> int:
    """The same for a stage of a layer."""
    return sum(1 + len(step.tensors) + len(step.grads) for step in stage.steps)


def full_round(
    request: Request, chunk_tokens: int, chunks_per_round: int, left_tokens: int | None = None
) -> RoundShape:
    """A full round of sequences of max_seq_len tokens, as `schedule.packing` packs them: a chunk takes whole sequences,
    and one longer than a chunk is cut into slices. left_tokens: of the batch, where it is not all.

    A slice's seq_len is the one whose causal cost per token is that of its queries over all keys before them:
    2 * start + tokens.
    """
    longest = request.max_seq_len
    batch = request.max_global_batch_tokens if left_tokens is None else left_tokens
    if longest <= chunk_tokens:
        counts = _full_chunks(batch, chunk_tokens // longest * longest, chunks_per_round)
        return RoundShape(tuple(ChunkShape(count, min(longest, count)) for count in counts))
    slices = -(-longest // chunk_tokens)
    sequences = max(1, min(chunks_per_round // slices, -(-batch // longest)))
    chunks = []
    for first in range(0, sequences * slices, slices):
        for i in range(slices):
            start = i * chunk_tokens
            tokens = min(chunk_tokens, longest - start)
            chunks.append(ChunkShape(tokens, 2 * start + tokens, first, first + slices - 1, start))
    return RoundShape(tuple(chunks))


def _full_chunks(batch_tokens: int, tokens_per_chunk: int, chunks_per_round: int) -> list[int]:
    """Tokens per chunk when a round takes as much of the batch as it can."""
    left = min(batch_tokens, tokens_per_chunk * chunks_per_round)
    counts = []
    while left > 0:
        counts.append(min(tokens_per_chunk, left))
        left -= counts[-1]
    return counts


def rounds_per_step(request: Request, shape: RoundShape) -> int:
    """Rounds of a full step made of such rounds."""
    return max(1, math.ceil(full_rounds(request, shape)))


def full_rounds(request: Request, shape: RoundShape) -> float:
    """The same as a fraction: the last one may be short."""
    return request.max_global_batch_tokens / sum(c.tokens for c in shape.chunks)


class StepPart(NamedTuple):
    """A program of a step, how often it runs there, what it is in words, and its times until the GPU has ended it."""

    name: str
    repeats: int
    program: Program
    timing: Timing


def simulated_rounds(layout: Layout, cost: CostModel) -> list[StepPart]:
    """The rounds of a full step in order: the first, and those that add to its gradients.

    Where the CPU updates, it goes on under the next step's first round, so the update comes before that: with all of
    its work, or without clipping with what is left when the last round, in which it began, has ended on the GPU.
    """
    plan = layout.plan
    sizes = (plan.request, plan.chunk_tokens, plan.chunks_per_round)
    full, later = full_round(*sizes), later_rounds(*sizes)
    rates, alone, last, left = cost.rates(), not later, None, None
    if plan.updates_in_backward:
        shape, count = (full, 1) if alone else later.pop()
        later += [(shape, count - 1)] if count > 1 else []
        last = lower_round(layout, shape, first=alone, updates=True)
    rounds = []
    for shape, count in later:
        label = "accumulating round" if shape == full else "shorter last round"
        rounds.append(_simulated(label, count, lower_round(layout, shape, first=False), rates))
    if last is None or not alone:
        first, name = lower_round(layout, full, first=True), "the round" if alone else "first round"
    else:
        first, name = last, "the round with updates by the CPU"
    if last is not None:
        timing = simulate(last, rates)
        left = unfinished_updates(last, timing)
        if not alone:
            rounds.append(StepPart("last round with updates by the CPU", 1, last, until_gpu_ends(last, timing)))
    if plan.updates_on_cpu:
        update = "update" if last is None else "rest of the update"
        first, name = followed(lower_update(layout, left), first), f"{update} of the step before, then {name}"
    return [_simulated(name, 1, first, rates), *rounds]


def _simulated(name: str, repeats: int, program: Program, rates: Rates) -> StepPart:
    return StepPart(name, repeats, program, until_gpu_ends(program, simulate(program, rates)))


def unfinished_updates(program: Program, timing: Timing) -> dict[int, float]:
    """Groups whose update by the CPU has not ended when the GPU has ended a program, with the part that is left."""
    cut, left_s, all_s = until_gpu_ends(program, timing), dict[int, float](), dict[int, float]()
    for command in program.commands:
        if command.stream is Stream.CPU:
            group, seconds = command.args.group, timing.end_s[command.index] - timing.start_s[command.index]
            ended_s = cut.end_s[command.index] - cut.start_s[command.index]
            all_s[group] = all_s.get(group, 0.0) + seconds
            left_s[group] = left_s.get(group, 0.0) + seconds - ended_s
    return {group: seconds / all_s[group] for group, seconds in sorted(left_s.items()) if seconds > 0}


def until_gpu_ends(program: Program, timing: Timing) -> Timing:
    """A program's times cut off when all streams but the CPU's have ended it; what comes later takes no time."""
    end_s = max((timing.end_s[c.index] for c in program.commands if c.stream is not Stream.CPU), default=0.0)
    if end_s >= timing.total_s:
        return timing
    starts, ends = ([min(end_s, at_s) for at_s in times] for times in (timing.start_s, timing.end_s))
    cpu_s = sum(ends[c.index] - starts[c.index] for c in program.commands if c.stream is Stream.CPU)
    return Timing(starts, ends, end_s, {**timing.busy_s, Stream.CPU: cpu_s})


def later_rounds(request: Request, chunk_tokens: int, chunks_per_round: int) -> list[tuple[RoundShape, int]]:
    """The rounds of a full step after its first, as shapes and how many there are of each: full ones, and a shorter one
    where the batch ends within a round."""
    full = full_round(request, chunk_tokens, chunks_per_round)
    tokens = sum(c.tokens for c in full.chunks)
    count = rounds_per_step(request, full) - 1
    last = full_round(request, chunk_tokens, chunks_per_round, request.max_global_batch_tokens - count * tokens)
    rounds = [(full, count)] if last == full else [(full, count - 1), (last, 1)]
    return [(shape, number) for shape, number in rounds if number]


@dataclass(frozen=True)
class PricedProgram:
    """Makespan, busy seconds per stream, recompute seconds and stalls of one program."""

    total_s: float
    busy_s: dict[str, float]
    recompute_s: float
    stalls_s: dict[tuple[str, str], float]


def price(program: Program, cost: CostModel, timing: Timing | None = None) -> PricedProgram:
    """What a program takes, by its simulated times; None simulates it."""
    timing = simulate(program, cost.rates()) if timing is None else timing
    recompute_s, known = 0.0, {}
    head = max((c.args.layer for c in program.commands if c.kind == "backward"), default=-1)
    for command in program.commands:
        if command.kind == "backward" and command.args.layer != head:  # the head's forward runs in its backward alone
            chunk = (command.args.program, command.args.stage, command.work)
            if chunk not in known:
                known[chunk] = _recompute_s(command, cost)
            recompute_s += known[chunk]
        elif command.kind in ("fill_window", "recompute"):
            recompute_s += cost.work_s(command.work)
    busy_s = {s.value: t for s, t in timing.busy_s.items()}
    return PricedProgram(timing.total_s, busy_s, recompute_s, stalls(program, timing))


PHASES = dict.fromkeys(("finish_gradient", "scale", "fill_window", "recompute"), "backward") | {"clip": "update"}
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
                found[program.commands[last].stream.value, phase] += ready - free
            if start > ready:
                found[ISSUE, phase] += start - ready
            free = timing.end_s[command.index]
    if timing.total_s > free:
        # where the times are cut off, the CPU's end with the last of the GPU's
        last = max(program.commands, key=lambda c: (timing.end_s[c.index], c.stream is not Stream.CPU))
        found[last.stream.value, phase] += timing.total_s - free
    return dict(found)


def _recompute_s(command: Command, cost: CostModel) -> float:
    """Seconds that a backward command spends on recomputation: its cost less what its other steps would take."""
    stage = command.args.program.stages(command.kind)[command.args.stage]
    full = stage.work(cost.chunk_tokens, cost.chunk_tokens, cost.compute_bytes)
    again = stage.recompute_work(cost.chunk_tokens, cost.chunk_tokens, cost.compute_bytes)
    share = cost.work_s(again) / max(cost.work_s(full), 1e-30)
    return share * cost.command_s(command)


class StepPricer:
    """Prices plans of one model by simulation; updates are remembered, as many plans share one."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.profile = profile
        self.updates: dict[tuple, PricedProgram] = {}
        self.simulated_commands = 0

    def cost(self, layout: Layout) -> CostModel:
        """The cost model at the chunk size of a layout's plan."""
        request = layout.plan.request
        sizes = (layout.compute_bytes, layout.plan.chunk_tokens, request.max_seq_len)
        return CostModel(self.profile, *sizes, request.numerics.state)

    def step(self, layout: Layout) -> StepEstimate:
        """One first round, accumulating rounds for the rest of the batch, and the update: one after the other, but for
        what the CPU updates."""
        cost, parts = self.cost(layout), []
        for _, count, program, timing in simulated_rounds(layout, cost):
            self.simulated_commands += len(program.commands)
            parts.append((price(program, cost, timing), count))
        if not layout.plan.updates_on_cpu:
            parts.append((self.update(layout, cost), 1))
        return StepEstimate(
            step_s=sum(count * part.total_s for part, count in parts),
            busy_s={s.value: sum(count * part.busy_s[s.value] for part, count in parts) for s in Stream},
            recompute_s=sum(count * part.recompute_s for part, count in parts),
            stalls_s=_weighted_stalls(parts),
        )

    def update(self, layout: Layout, cost: CostModel) -> PricedProgram:
        """The optimizer's update; it depends on the groups' homes and the tiles alone."""
        plan = layout.plan
        key = (plan.groups, plan.optimizer_tile, plan.optimizer_slots)
        if key not in self.updates:
            program = lower_update(layout)
            self.simulated_commands += len(program.commands)
            self.updates[key] = price(program, cost)
        return self.updates[key]


def _weighted_stalls(parts: list[tuple[PricedProgram, int]]) -> dict[tuple[str, str], float]:
    total: dict[tuple[str, str], float] = {}
    for program, count in parts:
        for key, seconds in program.stalls_s.items():
            total[key] = total.get(key, 0.0) + count * seconds
    return total


def step_seconds(layout: Layout, profile: HardwareProfile) -> StepEstimate:
    """Predicted time of a full step under a layout's plan."""
    return StepPricer(profile).step(layout)
