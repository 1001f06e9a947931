"""Decides whether a plan with CUDA graphs is worth a search: graphs take memory, and save the host's time to issue."""

from __future__ import annotations

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.cost.stream_loads import issue_s
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.replays import may_replay

LEAST_ISSUE_SHARE = 0.3
"""Graphs are tried, which takes a second search, where the host issues blocks' commands for this share of a step. Then
larger chunks may have been chosen for its sake alone."""
GAIN = 0.97
"""A plan with graphs must take at most this share of the other's step."""


def graphs_may_pay(model: ModelSpec, plan: Plan, profile: HardwareProfile) -> bool:
    """Whether the host spends so much of a plan's step on blocks' commands that a plan which replays them may win."""
    if plan.request.shares_node or profile.device_type != "cuda" or plan.slices_sequences or not may_replay(model):
        return False
    return _issue_s(model, plan, profile) >= LEAST_ISSUE_SHARE * plan.predicted.step_s


def _issue_s(model: ModelSpec, plan: Plan, profile: HardwareProfile) -> float:
    """Host seconds to issue all blocks' commands of a step."""
    cost, seconds = CostModel.of(plan.request, profile, plan.chunk_tokens), 0.0
    for layer, kept in zip(model.layers, plan.layers, strict=True):
        if layer.kind == "block":
            program = compile_layer(layer, kept.keep_gpu, kept.keep_host, plan.chunk_tokens, cost.compute_bytes)
            seconds += sum(issue_s(cost, kind, program) for kind in ("forward", "backward"))
    return seconds * plan.chunks_per_round * plan.num_rounds
