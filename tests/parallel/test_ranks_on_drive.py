"""Ranks that share the drive of their node: proven together, and with the bits of one rank in memory."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from flexengine.models.freezing import with_frozen
from flexengine.plan import GroupPlan, Plan
from flexengine.schedule.checker import check_program
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.checker import check_runs
from flexengine.schedule.ranks.runs import runs_of_ranks
from tests.schedule.small_plans import full_round, random_plan, small_model


def on_drive(plan: Plan, random: Random | None = None, **changes: object) -> Plan:
    """The plan with what may lie there on a drive; random: of some groups only some planes, of others none."""

    def home(old: GroupPlan) -> GroupPlan:
        if random is not None and random.random() < 0.2:
            return old
        if not old.trained:
            return GroupPlan(weights="drive", update="none")
        weights = "host" if random is not None and random.random() < 0.4 else "drive"
        return GroupPlan(weights, "host", "drive", "cpu")

    return replace(plan, groups=tuple(map(home, plan.groups)), touched_only=False, **changes)


@pytest.mark.parametrize("transport", ["relay", "split"])
@pytest.mark.parametrize("seed", range(3))
def test_random_plans_are_proven(seed: int, transport: str):
    random = Random(seed)
    model = [small_model(), small_model(tied=True), with_frozen(small_model(), ["embed", "block.1"])][seed]
    plan = random_plan(random, model, sliced=seed == 1)
    plan = replace(plan, groups=tuple(GroupPlan(update="none" if g.frozen else "cpu") for g in model.groups))
    plan = replace(plan, request=replace(plan.request, ranks=2 + seed % 2), transport=transport)
    layout = Layout(model, on_drive(plan, random, drive_tile=4096, drive_slots=1 + seed))
    assert layout.drive_bytes > 0
    for num_rounds in (1, 2, 3):
        runs = runs_of_ranks(layout, full_round(layout), num_rounds)
        check_runs(layout, runs, num_rounds)
    for run in (run for rank in runs for run in rank):
        sizes = layout.gpu_bytes, layout.host_bytes, layout.node_bytes, layout.drive_bytes
        check_program(run.program, *sizes)
