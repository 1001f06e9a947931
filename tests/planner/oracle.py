"""The exhaustive oracle: every placement of a small model from a short list of options, judged by the simulator."""

from collections.abc import Iterator
from itertools import product

from flexengine.hardware.presets import preset
from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, LayerPlan, Plan, Request
from flexengine.planner.cost.cost_model import StepPricer
from flexengine.planner.problem import Problem
from flexengine.schedule.layout import Layout
from flexengine.schedule.save_sets import savable_ops
from tests.schedule.small_plans import homes_of

LEVELS = (GroupPlan(), GroupPlan("gpu", "gpu"), GroupPlan("gpu", "gpu", "gpu"))
SLOTS = ((1, 1, 1), (2, 2, 2))


def slow_link(bytes_per_s: float) -> HardwareProfile:
    """A machine whose link decides: one direction at `bytes_per_s`, both at once at 80% of it each."""
    both = 0.8 * bytes_per_s
    return preset("cpu-test").changed(
        h2d_bytes_per_s=bytes_per_s,
        d2h_bytes_per_s=bytes_per_s,
        h2d_duplex_bytes_per_s=both,
        d2h_duplex_bytes_per_s=both,
    )


def all_plans(model: ModelSpec, request: Request, chunk: int, chunks: int) -> Iterator[Plan]:
    """Blocks keep nothing, all on the GPU or all on the host; groups at three levels; few and more slots."""
    choices = [list(product(_keeps(savable_ops(block.ops)), LEVELS)) for block in model.blocks]
    for rows in product(*choices):
        layers = (LayerPlan(), *(keep for keep, _ in rows), LayerPlan())
        for edge, share, (weight, grad, save) in product(LEVELS, (False, True), SLOTS):
            groups = homes_of(model, (edge, *(level for _, level in rows), edge))
            yield Plan(model.name, request, chunk, chunks, layers, groups, weight, grad, save, 2, 1 << 12, share)


def _keeps(everything: tuple[str, ...]) -> tuple[LayerPlan, ...]:
    return LayerPlan(), LayerPlan(everything), LayerPlan((), everything), LayerPlan((), (), "host")


def best_step_s(model: ModelSpec, request: Request, profile: HardwareProfile, chunk: int, chunks: int) -> float | None:
    """Seconds of the fastest of all plans that fit; None when none does."""
    pricer, best = StepPricer(profile), None
    for plan in all_plans(model, request, chunk, chunks):
        layout = Layout(model, plan)
        if Problem(model, request, profile).fits(layout):
            step_s = pricer.step(layout).step_s
            best = step_s if best is None else min(best, step_s)
    return best
