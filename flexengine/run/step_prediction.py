"""Predicts a step from its own batch: real tokens in real sequences take less than the full step of the plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import groupby

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import CACHES, Plan
from flexengine.planner.cost.cost_model import CostModel, StepPricer
from flexengine.runtime.decoding import ops_by_sequence
from flexengine.schedule.commands import Command, LayerCall, Program, RowCopy
from flexengine.schedule.decoding_cache import free_ranges, sequence_cache_bytes
from flexengine.schedule.layer_program import Stage
from flexengine.schedule.lowering import ChunkShape, RoundShape
from flexengine.schedule.packing import PackedChunk, pack, packed_shape
from flexengine.schedule.programs import lower_evaluation, lower_round
from flexengine.schedule.ranks.transports import layout_of, transport_of
from flexengine.schedule.simulator import Rates, simulate
from flexengine.schedule.step_parts import full_step, lower_last_round, simulated_rounds

GRID = 8
"""Steps are simulated with compute at multiples of this fraction of full chunks', and interpolated between them. A
finer grid makes more simulations, of 20 to 100 ms each, before all that a run needs are known."""
MOST_AT_A_TIME = 2**20  # where nothing is cached
MOST_SIMULATED = 512
"""Simulated steps that are remembered; a run of some thousand steps needs a few dozen."""

Rounds = tuple[tuple[RoundShape, int], ...]
"""Shapes of a step's rounds and how many of each follow one another; the first stands alone."""


class StepPredictor:
    """Predicts steps under one plan and profile.

    A round runs the program of full chunks however few tokens these hold: copies of weights stay as they are, those of
    activations move the rows that chunks have, compute shrinks. So a batch takes what the programs of its rounds take
    with all compute shortened to what the batch needs of it, and with the rows that it has on average.
    """

    def __init__(self, plan: Plan, model: ModelSpec, profile: HardwareProfile) -> None:
        self.plan, self.model, self.profile = plan, model, profile
        self._layout = layout_of(model, plan)
        self._cost = CostModel.of(plan.request, profile, plan.chunk_tokens)
        self._full_chunks = [chunk for shape, count in full_step(plan) for _ in range(count) for chunk in shape.chunks]
        self._stages = Counter(_stages(self._first_round(full_step(plan)[0][0])))
        self._seconds: dict[tuple[Rounds, int, int], float] = {}
        self._after_clipping = StepPredictor(plan.after_clipping(), model, profile) if plan.speculates else None
        self._one_by_one = StepPredictor(_without_graphs(plan), model, profile) if plan.replays else None

    def _first_round(self, shape: RoundShape) -> Program:
        """A round with all layers, or in stages the layers of one rank, whose chunks compare as those of all do."""
        whole = transport_of(self.plan).full_wave(shape, self.plan.request.ranks)
        lower = lower_last_round if len(self._full_chunks) == len(shape.chunks) else lower_round
        return lower(self._layout, whole, first=True)

    def step_s(self, lengths: Sequence[int], after_clipping: bool = False) -> float:
        """Predict the seconds of a step on sequences of these lengths; those of the plan for a full batch, and for
        several ranks, which share a batch. after_clipping: the step before was clipped."""
        if after_clipping and self._after_clipping is not None:
            return self._after_clipping.step_s(lengths)
        rounds = self._packed(lengths)
        chunks = [_real_shape(chunk) for found in rounds for chunk in found]
        if self.plan.request.shares_node or _sizes(chunks) == _sizes(self._full_chunks):
            return self.plan.predicted.step_s
        if self._one_by_one is not None:  # batches of other lengths are seldom followed by one of the same
            return self._one_by_one.step_s(lengths)
        shapes = [packed_shape(found, self.plan.chunk_tokens) for found in rounds]
        later = tuple((shape, len(list(run))) for shape, run in groupby(shapes[1:]))
        lowered = [chunk for shape in shapes for chunk in shape.chunks]
        share = self._total_s(chunks, self._chunk_s) / self._total_s(lowered, self._program_s)
        rows = sum(chunk.tokens for chunk in chunks) / sum(chunk.tokens for chunk in lowered)
        return self._interpolated(((shapes[0], 1), *later), GRID * share, GRID * rows)

    def forward_s(self, lengths: Sequence[int]) -> float:
        """Predict the seconds of a forward pass alone, whose rounds several ranks share."""
        rounds = self._packed(lengths)
        shapes = [packed_shape(found, self.plan.chunk_tokens) for found in rounds]
        real_s = self._total_s([_real_shape(chunk) for found in rounds for chunk in found], self._chunk_s)
        lowered = [chunk for shape in shapes for chunk in shape.chunks]
        rows = sum(lengths) / sum(chunk.tokens for chunk in lowered)
        rates = self._rates_at(real_s / self._total_s(lowered, self._program_s), rows)
        seconds = {shape: simulate(lower_evaluation(self._layout, shape), rates).total_s for shape in set(shapes)}
        request = self.plan.request
        own_rounds = math.ceil(len(shapes) / (request.ranks * request.nodes))
        return sum(seconds[shape] for shape in shapes) * own_rounds / len(shapes)

    def chunk_forward_s(self, tokens: int) -> float:
        """Predict the seconds of a forward pass of one chunk that holds so many tokens of as many sequences."""
        program = self._one_chunk
        stages = Counter(_stages(program))
        cost = replace(self._cost, chunk_tokens=tokens, seq_len=1)
        of_tokens = self._priced_s(cost, tokens, 1, stages)
        full = self.plan.chunk_tokens
        share = of_tokens / self._priced_s(self._cost, full, full, stages)
        return simulate(program, self._rates_at(share, tokens / full)).total_s

    @property
    def arena_bytes(self) -> int:
        """GPU bytes of the plan's arena, with what is counted for caches beside its slots."""
        return self._layout.gpu_bytes + self.plan.predicted.gpu_categories.get(CACHES, 0)

    def cache_bytes(self, tokens: int) -> int:
        """Bytes that the cache of a sequence of so many tokens takes."""
        return sequence_cache_bytes(self.model, tokens, self._cost.compute_bytes)

    def num_caches(self, tokens: int, gpu_bytes: int) -> int:
        """How many sequences of so many tokens have room for their caches in a GPU arena of this size."""
        ranges = free_ranges(self._layout, self._one_chunk, gpu_bytes)
        needed = self.cache_bytes(tokens)
        return sum(place.num_bytes // needed for place in ranges) if needed else MOST_AT_A_TIME

    @cached_property
    def _one_chunk(self) -> Program:
        full = self.plan.chunk_tokens
        return lower_evaluation(self._layout, RoundShape((ChunkShape(full, full),)))

    @property
    def num_ops_by_sequence(self) -> int:
        """How many ops run for each sequence alone where tokens are generated."""
        return ops_by_sequence(self.model, self.profile.device_type == "cuda" and self._cost.compute_bytes == 2)

    @property
    def cache_bytes_per_token(self) -> int:
        """Bytes that one more token takes in the caches of all layers."""
        return (self.cache_bytes(8192) - self.cache_bytes(4096)) // 4096

    def chunk_share(self, lengths: Sequence[int]) -> float:
        """The compute of a batch's chunks over that of a full step's, both on average."""
        chunks = [_real_shape(chunk) for found in self._packed(lengths) for chunk in found]
        full_s = self._total_s(self._full_chunks, self._chunk_s) / len(self._full_chunks)
        return self._total_s(chunks, self._chunk_s) / len(chunks) / full_s

    def _packed(self, lengths: Sequence[int]) -> list[list[PackedChunk]]:
        plan = self.plan
        return pack(list(lengths), plan.chunk_tokens, plan.chunks_per_round, plan.round_multiple)

    def _total_s(self, chunks: Iterable[ChunkShape], price: Callable[[int, int], float]) -> float:
        """Seconds of all layers' compute on chunks. price: of a chunk by its tokens and length of sequence."""
        return sum(count * price(*size) for size, count in sorted(Counter(_sizes(chunks)).items()))

    def _chunk_s(self, tokens: int, seq_len: int) -> float:
        """Seconds at the rates for these sizes."""
        return self._priced_s(replace(self._cost, chunk_tokens=tokens, seq_len=seq_len), tokens, seq_len)

    def _program_s(self, tokens: int, seq_len: int) -> float:
        """Seconds that programs price a chunk at: at the rates for full ones of the plan's sequences."""
        return self._priced_s(self._cost, tokens, seq_len)

    def _priced_s(self, cost: CostModel, tokens: int, seq_len: int, stages: Counter[Stage] | None = None) -> float:
        found = (self._stages if stages is None else stages).items()
        works = ((count, stage.work(tokens, seq_len, cost.compute_bytes)) for stage, count in found)
        return sum(count * cost.work_s(work) for count, work in works)

    def _interpolated(self, rounds: Rounds, place: float, rows: float) -> float:
        """Seconds of a step between places of the grid, by compute and by rows."""

        def at_rows(at: int) -> float:
            return _between(place, lambda by_compute: self._simulated(rounds, by_compute, at))

        return _between(rows, at_rows)

    def _simulated(self, rounds: Rounds, place: int, rows: int) -> float:
        """Seconds of a step whose compute has this many `GRID`ths of its full length, and whose chunks so many of
        their rows."""
        key = rounds, place, rows
        if key not in self._seconds:
            if len(self._seconds) >= MOST_SIMULATED:
                self._seconds.clear()
            self._seconds[key] = self._simulate(rounds, place / GRID, rows / GRID)
        return self._seconds[key]

    def _rates_at(self, share: float, rows: float) -> Rates:
        """The rates where layers' compute takes this share of that of full chunks, and copies of rows move that."""
        rates = self._cost.rates()

        def compute_s(command: Command) -> float:
            return rates.compute_s(command) * (share if isinstance(command.args, LayerCall) else 1.0)

        def copy_bytes(command: Command) -> float:
            return command.copy_bytes * (rows if isinstance(command.args, RowCopy) else 1.0)

        return rates._replace(compute_s=compute_s, copy_bytes=copy_bytes)

    def _simulate(self, rounds: Rounds, share: float, rows: float) -> float:
        parts = simulated_rounds(self._layout, self._rates_at(share, rows), rounds)
        seconds = sum(part.repeats * part.timing.total_s for part in parts)
        if self.plan.updates_on_cpu:
            return seconds
        return seconds + StepPricer(self.profile).update(self._layout, self._cost).step_s


def _between(place: float, value_at: Callable[[int], float]) -> float:
    """The value at a place between two of a grid, on the line through theirs; on one of them its own."""
    below = math.floor(place)
    low, more = value_at(below), place - below
    return low + more * (value_at(below + 1) - low) if more else low


def _without_graphs(plan: Plan) -> Plan:
    """The plan as it runs batches whose lengths change: the host issues its commands one by one."""
    return replace(plan, request=replace(plan.request, graphs="never"))


def _stages(program: Program) -> Iterable[Stage]:
    """What a round runs of all layers on its first chunk."""
    for command in program.commands:
        if isinstance(command.args, LayerCall) and command.args.chunk == 0:
            yield command.args.program.stages(command.kind)[command.args.stage]


def _real_shape(chunk: PackedChunk) -> ChunkShape:
    """The tokens of a chunk, and the length of sequence at which so many tokens have its attention's cost."""
    if chunk.first_slice >= 0:
        start = chunk.ranges[0].start
        return ChunkShape(chunk.tokens, 2 * start + chunk.tokens, chunk.first_slice, chunk.last_slice, start)
    squares = sum(part.length**2 for part in chunk.ranges)
    return ChunkShape(chunk.tokens, max(1, round(squares / chunk.tokens)))


def _sizes(chunks: Iterable[ChunkShape]) -> list[tuple[int, int]]:
    return [(chunk.tokens, chunk.seq_len) for chunk in chunks]
