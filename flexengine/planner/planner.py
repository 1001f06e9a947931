"""Chooses a plan: the fastest of all kinds (`variants.py`) that fits a request. docs/planner.md explains how."""

from __future__ import annotations

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.in_parts import in_parts
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Request
from flexengine.planner.collector import collector_paused
from flexengine.planner.feasibility.shortage import shortage
from flexengine.planner.problem import Problem
from flexengine.planner.variants import OF_ONE_RANK, fastest


def make_plan(model: ModelSpec, request: Request, profile: HardwareProfile) -> Plan:
    """Find the fastest plan for a request on a machine.

    Experts in parts are tried only where whole experts do not fit or are far from the bound, or where rounds are so
    short that they touch only some experts. Deterministic; takes seconds, needs no GPU.
    Of several ranks it plans one: the request has its tokens, and its share of the host's memory.
    Raises: PlanError when nothing fits, saying what would; ValueError for products that the model cannot do in FP8.
    """
    plan = find_plan(Problem(model, request, profile))
    if plan is None:
        with collector_paused():
            raise shortage(Problem(in_parts(model), request, profile))
    return plan


def find_plan(problem: Problem) -> Plan | None:
    """The same; None when nothing fits, without looking for what would."""
    with collector_paused():
        found = fastest(OF_ONE_RANK, problem)
        return None if found is None else found.plan
