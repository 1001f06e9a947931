"""When nothing fits: what the smallest plan needs, what takes most of it, and what would fit, checked by planning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product
from typing import NamedTuple

import numpy as np

from flexengine.metrics import format_bytes
from flexengine.models.keep_dtype import with_coded_inputs
from flexengine.plan import Plan, PlanError, PlanReason, Request
from flexengine.planner.candidates import CandidateMemory, Candidates
from flexengine.planner.cost.memory import process_bytes
from flexengine.planner.cost.save_sets import ever_smaller_sets
from flexengine.planner.cost.stream_loads import GPU_RESIDENCIES
from flexengine.planner.feasibility.remedies import Least, Remedy, Try, gib_text, remedies, remedy_note
from flexengine.planner.on_drive import bytes_for_drive
from flexengine.planner.problem import Problem
from flexengine.planner.seeds import LEAST_SLOTS, Seeder
from flexengine.planner.shared_buffers import SharedBuffers
from flexengine.planner.size_tables import SizeTables
from flexengine.planner.sizes import chunk_sizes, hidden_on_host, may_wait_on_host, segment_lengths, ways_of
from flexengine.planner.surrogate import Surrogate
from flexengine.schedule.layer_program import align

NUM_SHOWN = 4
OVER = 1.01
"""Candidates that take more than this factor of what is sought are not laid out: that takes long, and their bytes are
known to 0.01%."""
ADAPTERS = "adapters beside frozen weights take less: --mode lora, and --base-dtype nf4 for these weights in 4 bits"
FOUR_BITS = "the frozen layers take about a quarter in 4 bits: --base-dtype nf4"


class Needs(NamedTuple):
    """A plan's exact bytes in both memories and on a drive. advice: what takes less beside what was tried, or ""."""

    plan: Plan
    gpu_bytes: int
    host_bytes: int
    gpu_categories: dict[str, int]
    host_categories: dict[str, int]
    drive_bytes: int = 0
    advice: str = ""

    @staticmethod
    def of(problem: Problem, plan: Plan) -> Needs:
        """What a plan takes."""
        layout = problem.layout(plan)
        return Needs(plan, *process_bytes(layout, problem.profile), layout.drive_bytes, _advice(problem))

    def lacks_drive(self, request: Request) -> int:
        """Bytes that the drive of a request has too few."""
        return max(0, self.drive_bytes - request.max_drive_bytes)


def _advice(problem: Problem) -> str:
    """Adapters, where all weights of layers that take them are trained; or fewer bits for blocks that are frozen."""
    model, request = problem.model, problem.request
    if not any(group.frozen for group in model.groups):
        return "" if request.whole_sequences else ADAPTERS
    is_stored = request.numerics.base != "compute"
    return "" if is_stored or not any(model.groups[i].frozen for b in model.blocks for i in b.groups) else FOUR_BITS


class ShortageError(PlanError):
    """No plan fits. `needs` is the smallest plan, `remedies` are changes that were seen to fit."""

    def __init__(
        self, reason: PlanReason, message: str, request: Request, needs: Needs, remedies: tuple[Remedy, ...]
    ) -> None:
        required, budget = {
            PlanReason.INSUFFICIENT_DEVICE_MEMORY: (needs.gpu_bytes, request.max_gpu_bytes),
            PlanReason.INSUFFICIENT_DRIVE: (needs.drive_bytes, request.max_drive_bytes),
        }.get(reason, (needs.host_bytes, request.max_host_bytes))
        super().__init__(reason, message, required, budget)
        self.request, self.needs, self.remedies = request, needs, remedies


class Feasibility:
    """Smallest plans of one model and request, without regard to speed.

    as_given: with adapters where the problem has them, on the GPU or on the host; else on either.
    """

    def __init__(self, problem: Problem, as_given: bool = False) -> None:
        self.problem, self.request, self._as_given = problem, problem.request, as_given
        sizes = chunk_sizes(problem.request)  # the shortest rounds of a chunk size take the least of both memories
        self.sizes = sorted({chunk: min(n for c, n in sizes if c == chunk) for chunk, _ in sizes}.items())
        self._memories: list[CandidateMemory] = []
        self._least_host: list[_LeastHost | None] = []  # of these

    @cached_property
    def _buffers(self) -> list[SharedBuffers]:
        """With adapters as the problem has them, and else on the host."""
        as_given = SharedBuffers(self.problem)
        if self._as_given or as_given.streams_adapters or not as_given.adapters.members:
            return [as_given]
        return [as_given, SharedBuffers(replace(self.problem, streams_adapters=True))]

    def memories(self) -> Iterator[CandidateMemory]:
        """Bytes of candidates at every chunk size, smallest first, made when first asked for."""
        for i, ((chunk, chunks), buffers) in enumerate(product(self.sizes, self._buffers)):
            if i == len(self._memories):
                sets = ever_smaller_sets([kind.layer for kind in buffers.kinds])
                self._memories.append(CandidateMemory(SizeTables(buffers, chunk, chunks, sets)))
            yield self._memories[i]

    def least_gpu(self) -> Needs:
        """Find the plan that takes the least GPU memory, whatever it takes on the host."""
        found = []
        for number, memory in enumerate(self.memories()):
            candidates = _uniform(memory)
            num_bytes = memory.gpu_bytes(candidates)
            best = int(num_bytes.argmin())
            found.append((int(num_bytes[best]), number, candidates.take(np.array([best]))))
        _, number, one = min(found, key=lambda entry: entry[:2])
        return Needs.of(self.problem, self._memories[number].plan(one, 0))

    def least_host(self) -> Needs | None:
        """Find a plan within the GPU budget that takes the least host memory; None when none is within it."""
        least_bytes = min((found.host_bytes for found in self._least_host_plans()), default=0)
        near = [self._needs(found) for found in self._least_host_plans() if found.host_bytes <= OVER * least_bytes]
        return min(near, key=lambda n: n.host_bytes, default=None)

    def fits(self) -> bool:
        """Whether there is a plan within the budgets of both memories."""
        return next(self.within(), None) is not None

    def fitting(self) -> Iterator[Plan]:
        """Plans within the budgets of both memories, those of small chunks first."""
        return (needs.plan for needs in self.within())

    def within(self) -> Iterator[Needs]:
        """What they take."""
        most_bytes = self.request.max_host_bytes
        near = (self._needs(found) for found in self._least_host_plans() if found.host_bytes <= OVER * most_bytes)
        return (needs for needs in near if needs.host_bytes <= most_bytes)

    def _needs(self, found: _LeastHost) -> Needs:
        return Needs.of(self.problem, found.memory.plan(found.one, 0))

    def _least_host_plans(self) -> Iterator[_LeastHost]:
        """For every chunk size and home of adapters what takes the least host memory within the GPU budget, found when
        first asked for."""
        for i, memory in enumerate(self.memories()):
            if i == len(self._least_host):
                self._least_host.append(_least_host(memory, self.request))
            found = self._least_host[i]
            if found is not None:
                yield found


class _LeastHost(NamedTuple):
    """What takes the least host memory of one size, nearly `host_bytes`."""

    host_bytes: float
    memory: CandidateMemory
    one: Candidates


def _least_host(memory: CandidateMemory, request: Request) -> _LeastHost | None:
    """What takes the least host memory within the GPU budget; None where nothing is within it."""
    seeds = list(Seeder(Surrogate(memory)).least_memory())
    if not seeds:
        return None
    candidates = Candidates.of(seeds).distinct()
    host = memory.host_bytes(candidates) * 1.0
    host[memory.gpu_bytes(candidates) > request.max_gpu_bytes] = np.inf
    best = int(host.argmin())
    return _LeastHost(float(host[best]), memory, candidates.take(np.array([best]))) if np.isfinite(host[best]) else None


def _uniform(memory: CandidateMemory) -> Candidates:
    """Treat all blocks alike, with the fewest slots: every residency with its smallest option, under all edges."""
    tables = memory.tables
    floor = tables.activations.scratch_floor
    shared = np.array([align(max(floor, int(b))) for b in tables.choice_scratch])
    shared += np.array([align(int(b)) for b in tables.choice_staged])
    totals = tables.choice_gpu.total + shared
    made = []
    for home in np.intersect1d(tables.buffers.residencies, GPU_RESIDENCIES):
        alike = np.flatnonzero(tables.choice_residency == home)
        choice = int(alike[totals[alike].argmin()])
        made += [(np.full(tables.num_blocks, choice), e, LEAST_SLOTS) for e in range(len(memory.edge_choices))]
    return Candidates.of(made)


# ---- the error -------------------------------------------------------------------------------------------------


class Judge:
    """What fits of a request, and of others of the same model: tried with inputs made again, hidden states on the host
    and gradients that are not stored, where each may be."""

    def __init__(self, problem: Problem) -> None:
        self._problem, self._known = problem, dict[Request, Feasibility]()
        self.drive_bytes = bytes_for_drive(problem)

    def fits(self, request: Request) -> bool:
        """Whether a plan fits that puts all it may on the drive, or nothing."""
        drives = (replace(request, max_drive_bytes=drive) for drive in {request.max_drive_bytes, 0})
        ways = (way for each in drives for way in self._ways(each))
        return any(not needs.lacks_drive(way) for way in ways for needs in self._feasibility(way).within())

    def smallest(self, request: Request) -> tuple[Needs, Needs | None]:
        """The plan that takes the least GPU memory, and of those within its budget that of the least host memory."""
        found = [self._feasibility(way) for way in self._ways(request)]
        on_host = [needs for each in found if (needs := each.least_host()) is not None]
        least_gpu = min((each.least_gpu() for each in found), key=lambda needs: needs.gpu_bytes)
        return least_gpu, min(on_host, key=lambda needs: needs.host_bytes, default=None)

    def least(self, request: Request) -> Least:
        """What these take."""
        on_gpu, on_host = self.smallest(request)
        return Least(on_gpu.gpu_bytes, None if on_host is None else on_host.host_bytes)

    def _feasibility(self, request: Request) -> Feasibility:
        if request not in self._known:
            problem, there = self._problem, request.max_drive_bytes > 0
            model = with_coded_inputs(problem.model, request.numerics.keep)
            kept = there and request.max_drive_bytes >= self.drive_bytes[-1] and not request.shares_node
            other = replace(problem, model=model, request=request)
            self._known[request] = Feasibility(replace(other, on_drive=there, all_on_drive=there, kept_on_drive=kept))
        return self._known[request]

    def _ways(self, request: Request) -> Iterator[Request]:
        model, lengths = self._problem.model, [request]
        if request.may_make_inputs_again and request.segment_blocks is None:
            lengths += [replace(request, segment_blocks=blocks) for blocks in segment_lengths(model)[-1:]]
        for each in lengths:
            yield from ways_of(each)
        if may_wait_on_host(model, request):
            yield from ways_of(hidden_on_host(lengths[-1]))


def shortage(problem: Problem) -> ShortageError:
    """The error that explains why there is no plan."""
    request, profile, judge = problem.request, problem.profile, Judge(problem)
    least_gpu, least_host = judge.smallest(request)
    needs = least_host or least_gpu
    least = judge.least(replace(request, max_drive_bytes=0) if needs.lacks_drive(request) else request)
    fitting = remedies(request, least, Try(judge.fits, judge.least, (needs.drive_bytes, *judge.drive_bytes)))
    found = tuple(r._replace(note=r.note or remedy_note(r.request, request, profile)) for r in fitting)
    reason = PlanReason.INSUFFICIENT_DEVICE_MEMORY if least_host is None else PlanReason.INSUFFICIENT_HOST_MEMORY
    if least_host is not None and least_host.host_bytes <= request.max_host_bytes and needs.lacks_drive(request):
        reason = PlanReason.INSUFFICIENT_DRIVE
    return ShortageError(reason, shortage_message(request, needs, found), request, needs, found)


def shortage_message(request: Request, needs: Needs, found: tuple[Remedy, ...]) -> str:
    places = [
        ("of GPU memory", needs.gpu_bytes, request.max_gpu_bytes, needs.gpu_categories),
        ("of host memory", needs.host_bytes, request.max_host_bytes, needs.host_categories),
        ("on the drive", needs.drive_bytes, request.max_drive_bytes, {}),
    ]
    lines = []
    for place, required, budget, categories in places:
        if required > budget:
            start = "  and" if lines else "smallest plan needs"
            missing = f"budget is {gib_text(budget)} GiB, {gib_text(required - budget)} GiB are missing."
            lines.append(f"{start} {gib_text(required)} GiB {place}, {missing}")
            shown = sorted(categories.items(), key=lambda item: -item[1])[:NUM_SHOWN]
            largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in shown)
            lines += [f"  largest: {largest}"] if shown else []
    lines.append(f"  fits with: {', or '.join(map(str, found))}" if found else "  no change that was tried fits")
    lines += [f"  {needs.advice}"] if needs.advice else []
    return "\n".join(lines)
