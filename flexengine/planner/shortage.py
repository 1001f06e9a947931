"""When nothing fits: what the smallest plan needs, what takes most of it, and what would fit, checked by planning."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB, format_bytes
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, PlanError, PlanReason, Request
from flexengine.planner import loads
from flexengine.planner.memory import (
    gpu_categories,
    gpu_required_bytes,
    host_categories,
    host_required_bytes,
)
from flexengine.planner.sizes import chunk_sizes
from flexengine.planner.solver import Caps, Goal, Placement, RoundProblem
from flexengine.planner.templates import SlotCounts, Templates
from flexengine.schedule.layer_program import savable_ops
from flexengine.schedule.layout import Layout

LEAST_SLOTS = SlotCounts(1, 1, 1, 1)
LEAST_HOST = Goal(weights=(0.0,) * loads.NUM_LOADS, host_s_per_byte=1.0)
SMALLEST_CHUNK_TOKENS = 32
"""No smaller chunk is advised."""
UNLIMITED_BYTES = 1 << 60
NUM_SHOWN = 3


class Needs(NamedTuple):
    """A plan's exact bytes in both memories."""

    plan: Plan
    gpu_bytes: int
    host_bytes: int
    gpu_categories: dict[str, int]
    host_categories: dict[str, int]


class Feasibility:
    """Smallest plans of one model and request, without regard to speed."""

    def __init__(self, model: ModelSpec, request: Request, profile: HardwareProfile) -> None:
        self.model, self.request, self.profile = model, request, profile
        templates = Templates(model, request, profile)
        ops = model.blocks[0].ops
        names = savable_ops(ops)
        sets = tuple(names[i:] for i in range(len(names), -1, -1))
        self.problems = [RoundProblem(templates, c, n, sets) for c, n in _shortest_rounds(chunk_sizes(request))]

    def least_gpu(self) -> Needs:
        """The plan that takes the least GPU memory, whatever it takes on the host."""
        found = [(problem.gpu_bytes(p), i, p) for i, problem in enumerate(self.problems) for p in _uniform(problem)]
        _, index, placement = min(found, key=lambda x: (x[0], x[1]))
        return self._needs(self.problems[index].plan(placement))

    def least_host(self) -> Needs | None:
        """Of the plans within the GPU budget one that takes the least host memory; None when none is."""
        found = []
        for problem in self.problems:
            for caps in (Caps(0, problem.widest_caps.scratch_bytes), problem.widest_caps):
                solution = problem.solve(LEAST_HOST, LEAST_SLOTS, self.request.max_gpu_bytes, caps)
                if solution is not None:
                    rows = tuple(sorted(solution.counts.elements()))
                    placement = problem.normalised(Placement(solution.structure, solution.slots, rows))
                    needs = self._needs(problem.plan(placement))
                    if needs.gpu_bytes <= self.request.max_gpu_bytes:
                        found.append(needs)
        return min(found, key=lambda n: n.host_bytes, default=None)

    def fits(self) -> bool:
        """Whether there is a plan within both budgets."""
        needs = self.least_host()
        return needs is not None and needs.host_bytes <= self.request.max_host_bytes

    def _needs(self, plan: Plan) -> Needs:
        layout = Layout(self.model, plan)
        return Needs(
            plan,
            gpu_required_bytes(layout, self.profile),
            host_required_bytes(layout, self.profile),
            gpu_categories(layout, self.profile),
            host_categories(layout, self.profile),
        )


def _shortest_rounds(sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """For every chunk size its shortest round, which takes the least of both memories."""
    return sorted({chunk: min(n for c, n in sizes if c == chunk) for chunk, _ in sizes}.items())


def _uniform(problem: RoundProblem) -> Iterator[Placement]:
    """Placements that treat all blocks alike, with the fewest slots."""
    for row in range(len(problem.row_pairs)):
        rows = (row,) * problem.num_blocks
        for structure in problem.templates.structures(len(problem.edge_host), loads.STREAMED):
            yield problem.normalised(Placement(structure, LEAST_SLOTS, rows))


def shortage(model: ModelSpec, request: Request, profile: HardwareProfile) -> PlanError:
    """The error that explains why there is no plan."""
    feasibility = Feasibility(model, request, profile)
    least = feasibility.least_gpu()
    if least.gpu_bytes > request.max_gpu_bytes:
        reason, flag, budget = PlanReason.INSUFFICIENT_DEVICE_MEMORY, "--max-gpu-mem-gib", request.max_gpu_bytes
        required, categories, wanted = least.gpu_bytes, least.gpu_categories, "max_gpu_bytes"
    else:
        least = feasibility.least_host() or least
        reason, flag, budget = PlanReason.INSUFFICIENT_HOST_MEMORY, "--max-host-mem-gib", request.max_host_bytes
        required, categories, wanted = least.host_bytes, least.host_categories, "max_host_bytes"
    place = "GPU" if wanted == "max_gpu_bytes" else "host"
    remedies = list(_remedies(model, request, profile, flag, wanted, required))
    lines = [f"smallest plan needs {_gib(required)} GiB of {place} memory, budget is {_gib(budget)} GiB."]
    lines.append(f"  largest: {_largest(categories)}")
    lines.append(f"  fits with: {', or '.join(remedies)}" if remedies else "  no single change makes it fit")
    return PlanError(reason, "\n".join(lines), required, budget)


def _gib(num_bytes: int) -> str:
    """GiB rounded up to three significant digits, so that following the advice works."""
    digits = 1 if num_bytes >= 10 * GIB else 2
    while digits < 6 and num_bytes * 10 ** (digits - 2) < GIB:
        digits += 1
    return f"{-(-num_bytes * 10**digits // GIB) / 10**digits:.{digits}f}"


def _largest(categories: dict[str, int]) -> str:
    shown = sorted(categories.items(), key=lambda item: -item[1])[:NUM_SHOWN]
    return ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in shown)


def _remedies(
    model: ModelSpec, request: Request, profile: HardwareProfile, flag: str, wanted: str, required: int
) -> Iterator[str]:
    """Changes that were checked to make a plan fit, as flags."""
    raised = _raised_budget(model, request, profile, wanted, required)
    if raised is not None:
        yield f"{flag} {raised}"
    else:
        both = _raised_both(model, request, profile)
        if both is not None:
            yield both
    chunks = (c for c in _smaller_chunks(request) if _fits(model, replace(request, chunk_tokens=c), profile))
    yield from (f"--chunk-tokens {chunk}" for chunk in islice(chunks, 1))
    for text, changed in _smaller_requests(request):
        if _fits(model, changed, profile):
            yield text


def _raised_budget(
    model: ModelSpec, request: Request, profile: HardwareProfile, wanted: str, required: int
) -> str | None:
    """The smallest budget of one memory, in printed GiB, that was seen to fit; the other budget stays."""
    gib = _gib(required)
    for _ in range(3):
        changed = replace(request, **{wanted: int(float(gib) * GIB)})
        if _fits(model, changed, profile):
            return gib
        gib = _gib(int(float(gib) * GIB * 1.01) + 1)
    return None


def _raised_both(model: ModelSpec, request: Request, profile: HardwareProfile) -> str | None:
    """Both budgets raised: the least GPU memory, and the host memory that a plan within it takes."""
    gpu = _gib(Feasibility(model, request, profile).least_gpu().gpu_bytes)
    gpu_bytes = max(request.max_gpu_bytes, int(float(gpu) * GIB))
    open_host = replace(request, max_gpu_bytes=gpu_bytes, max_host_bytes=UNLIMITED_BYTES)
    needs = Feasibility(model, open_host, profile).least_host()
    if needs is None:
        return None
    host = _gib(needs.host_bytes)
    if not _fits(model, replace(open_host, max_host_bytes=int(float(host) * GIB)), profile):
        return None
    return f"--max-gpu-mem-gib {gpu} and --max-host-mem-gib {host}"


def _fits(model: ModelSpec, request: Request, profile: HardwareProfile) -> bool:
    return Feasibility(model, request, profile).fits()


def _smaller_chunks(request: Request) -> Iterator[int]:
    """Chunk sizes below those that were tried, largest first, that the pinned round and the batch allow."""
    chunk = min(c for c, _ in chunk_sizes(request)) // 2
    while chunk >= SMALLEST_CHUNK_TOKENS:
        if (request.round_tokens or 0) % chunk == 0:
            yield chunk
        chunk //= 2


def _smaller_requests(request: Request) -> Iterator[tuple[str, Request]]:
    """Shorter or narrower requests, each with its flags."""
    if request.max_seq_len >= 2 * SMALLEST_CHUNK_TOKENS:
        shorter = request.max_seq_len // 2
        yield f"--max-seq-len {shorter}", replace(request, max_seq_len=shorter)
    numerics = request.numerics
    if numerics.state == "float32" and numerics.compute != "float64":
        changed = replace(request, numerics=replace(numerics, state="bfloat16"))
        yield "--optimizer-state-dtype bfloat16", changed
    if numerics.grad == "float32" and numerics.compute == "bfloat16":
        yield "--grad-dtype bfloat16", replace(request, numerics=replace(numerics, grad="bfloat16"))
    if request.recompute == "none":
        yield "--recompute auto", replace(request, recompute="auto")
