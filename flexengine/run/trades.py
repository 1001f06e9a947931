"""What would make a job faster, and what it would change: each option is bounded, and planned once on request."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from flexengine.api import PlannedRun, open_source
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import GIB
from flexengine.models.spec import ModelSpec
from flexengine.options.job import Job
from flexengine.options.train_config import TrainConfig
from flexengine.plan import Plan, PlanError, Request
from flexengine.planner.bound.speed_of_light import speed_of_light_s
from flexengine.planner.feasibility.remedies import gib_text
from flexengine.request import described, make_request

LEAST_GAIN = 0.02
"""Of the tokens per second: predictions of less say nothing, and nobody gives up bits for it."""
LEAST_BOUND_GAIN = 0.1
"""The same of a bound, which plans come near to but do not reach."""
LARGER = 1.5
"""Times the budget that a larger one has, where the machine has so much."""
ROUNDED = "rounds the optimizer's moments"


_GATE_UP, _INPUTS = "rounds what backward reads of gate and up", "rounds inputs of layers, also in forward"
_KEPT = {
    "compute": [("fp8", _GATE_UP), ("fp8-inputs", _INPUTS)],
    "fp8": [("fp8-all", _INPUTS)],
    "fp8-inputs": [("fp8-all", _GATE_UP)],
}
"""By what is kept in FP8 already, what else might be, and what that changes."""


class Change(NamedTuple):
    """Other values of a job's options, the same as flags, and what they change of the result or ask of the machine."""

    flags: str
    options: dict[str, Any]
    changes: str


class Trade(NamedTuple):
    """A change with what it gains: the share of tokens per second by which a step is faster."""

    flags: str
    gain: float
    changes: str

    def describe(self) -> str:
        """The trade in one line."""
        return f"`{self.flags}`: {self.gain:.0%} faster, {self.changes}"


Case = tuple[ModelSpec, Request]
"""A job as the planner sees it."""


def changes_of(job: Job, profile: HardwareProfile, largest: Request) -> Iterator[Change]:
    """List what a job might give up, by what it has not given up yet. largest: the request of all free memory."""
    numerics = job.numerics
    if numerics.compute == "bfloat16":
        for keep, changes in _KEPT.get(numerics.keep, ()):
            yield Change(f"--keep-dtype {keep}", {"keep_dtype": keep}, changes)
        if numerics.delta == "float32":
            changes = "rounds what delta rules store between their kernels"
            yield Change("--delta-dtype bfloat16", {"delta_dtype": "bfloat16"}, changes)
    if profile.matmul.fp8_flops_per_s and numerics.matmul == "compute":
        changes = "multiplies the blocks' linear layers in FP8, scaled per tensor"
        yield Change("--matmul-dtype fp8", {"matmul_dtype": "fp8"}, changes)
    if numerics.state == "float32" and numerics.compute != "float64":
        flags = "--optimizer-state-dtype bfloat16"
        yield Change(flags, {"optimizer_state_dtype": "bfloat16"}, f"{ROUNDED} to bfloat16")
    if numerics.state in ("float32", "bfloat16") and numerics.optimizer in ("adamw", "muon"):
        yield Change("--optimizer-state-dtype int8", {"optimizer_state_dtype": "int8"}, f"{ROUNDED} to 8-bit codes")
    if numerics.master == "split":
        changes = "rounds weights to bfloat16 by chance after every update"
        yield Change("--master-dtype bfloat16", {"master_dtype": "bfloat16"}, changes)
    if job.max_grad_norm is not None and not numerics.scales_loss:  # which waits for all gradients in any case
        yield Change("--max-grad-norm 0", {"max_grad_norm": None}, "clips no gradients")
    for place, name, free in (
        ("GPU", "max_gpu_mem_gib", largest.max_gpu_bytes),
        ("host", "max_host_mem_gib", largest.max_host_bytes),
    ):
        yield from _larger_budget(place, name, getattr(job, name), free)


def _larger_budget(place: str, name: str, given_gib: float | None, free_bytes: int) -> Iterator[Change]:
    if given_gib is None or given_gib * GIB >= 0.95 * free_bytes:
        return
    gib = float(gib_text(int(min(LARGER * given_gib * GIB, free_bytes))))
    flag = f"--{name.replace('_', '-')}"
    changes = f"takes more {place} memory, and rounds differently unless chunk and round sizes are pinned"
    yield Change(f"{flag} {gib:g}", {name: gib}, changes)


class Trades:
    """Finds the trades of a job. case: a job as the planner sees it, which raises ValueError where it cannot be.

    Only changes whose bound is faster than the plan are looked at, which takes a tenth of a second each.
    """

    def __init__(self, job: Job, plan: Plan, profile: HardwareProfile, case: Callable[[Job], Case]) -> None:
        self._job, self._plan, self._profile, self._case = job, plan, profile, case

    def bounded(self) -> list[Trade]:
        """Changes that raise the bound, by how much they do; no plan is made."""
        light_s = self._plan.predicted.speed_of_light_s
        found = [Trade(change.flags, light_s / bound_s - 1, change.changes) for change, _, bound_s in self._faster()]
        return _largest_first(found, LEAST_BOUND_GAIN) if light_s else []

    def planned(self, make: Callable[[ModelSpec, Request], Plan]) -> list[Trade]:
        """Plan every change that may gain something, and return those that do. Takes as long as so many plans."""
        found = []
        for change, (model, request), _ in self._faster():
            try:
                step_s = make(model, request).predicted.step_s
            except (PlanError, ValueError):  # advice that cannot be planned is none, and ends nothing
                continue
            found.append(Trade(change.flags, self._plan.predicted.step_s / step_s - 1, change.changes))
        return _largest_first(found, LEAST_GAIN)

    def _faster(self) -> Iterator[tuple[Change, Case, float]]:
        """Yield the changes that can be, whose bound is faster than the plan, with the bound."""
        without = replace(self._job, max_gpu_mem_gib=None, max_host_mem_gib=None)
        with _quiet():
            largest = self._case(without)[1]
        for change in changes_of(self._job, self._profile, largest):
            try:
                with _quiet():  # what is said of the model was said of the job
                    case = self._case(replace(self._job, **change.options))
                bound_s = speed_of_light_s(*case, self._profile)
            except (PlanError, ValueError):  # a model without gated units, a card without FP8
                continue
            if 0 < bound_s < self._plan.predicted.step_s / (1 + LEAST_GAIN):
                yield change, case, bound_s


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings of the package back."""
    logger = logging.getLogger("flexengine")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _largest_first(found: list[Trade], least_gain: float) -> list[Trade]:
    return sorted((trade for trade in found if trade.gain >= least_gain), key=lambda trade: -trade.gain)


def trade_lines(config: TrainConfig, planned: PlannedRun) -> list[str]:
    """Name in one line what raises the bound of a run on one GPU, and how to have it planned; none where nothing does.

    A run does not wait for further plans.
    """
    job, profile, device = config.as_job(), planned.profile, planned.device.type
    if device != "cuda" or planned.plan.request.ranks > 1:
        return []

    source = open_source(config.model, job, needs_weights=False)  # once: no change is about the model itself

    def case(job: Job) -> Case:
        spec = described(source.spec, job)
        request = make_request(job, profile, device, whole_sequences=spec.whole_sequences, whole_steps=True)
        return spec, request

    found = Trades(job, planned.plan, profile, case).bounded()
    if not found:
        return []
    told = "; ".join(f"{trade.flags} ({trade.gain:.0%}, {trade.changes})" for trade in found[:3])
    return [f"faster at a price: the bound rises with {told}; flexengine plan --trades plans them"]


def trades_report(trades: list[Trade]) -> str:
    """Describe planned trades, a line each."""
    if not trades:
        return "trades: no option of this job makes a step 2% faster"
    return "\n".join(["trades, each planned by itself:", *(f"  {trade.describe()}" for trade in trades)])
