"""Random legal plans for `bench.random_runs`: any placement of planes and activations, good or bad.

What decides bits stays: the sizes of chunks and rounds, and what is asked for.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random
from typing import Any

from flexengine.api import PlannedRun
from flexengine.plan import GroupPlan, LayerPlan, Plan, Request
from flexengine.schedule.group_storage import GroupStorage
from flexengine.schedule.layout import Layout
from flexengine.schedule.save_sets import savable_ops
from flexengine.schedule.second_planes import may_speculate

ATTEMPTS = 20


def redrawn(planned: PlannedRun, random: Random) -> PlannedRun:
    """The run under a random plan that is legal, or under its own where ATTEMPTS draws find none; ranks keep their
    transport."""
    for _ in range(ATTEMPTS):
        try:
            plan = _drawn(Layout(planned.source.spec, planned.plan), random)
            return replace(planned, plan=promised(plan, Layout(planned.source.spec, plan)))
        except ValueError:  # what plans and layouts refuse of a draw
            continue
    return planned


def promised(plan: Plan, layout: Layout) -> Plan:
    """The plan with its layout's bytes as prediction and as budgets."""
    request = replace(plan.request, max_gpu_bytes=layout.gpu_bytes, max_host_bytes=layout.host_bytes)
    found = replace(plan.predicted, gpu_bytes=layout.gpu_bytes, host_bytes=layout.host_bytes)
    return replace(plan, request=request, predicted=found)


def _drawn(layout: Layout, random: Random) -> Plan:
    plan = layout.plan
    request = _request(plan, random)
    slots: dict[str, Any] = {f"{kind}_slots": random.randint(1, 3) for kind in ("weight", "grad", "save", "optimizer")}
    if request.segments_by_chunk:
        slots["weight_slots"] = 2
    edges = {flag: random.random() < 0.5 for flag in ("share_edge_slots", "grads_over_weights")}
    tile = random.choice((64, 1000, 1 << 16))
    changed = replace(plan, request=request, optimizer_tile=tile, **slots, **edges)
    homes = tuple(_home(changed, *pair, random) for pair in zip(plan.groups, layout.groups, strict=True))
    return replace(changed, groups=homes, layers=_layers(layout, request, random))


def _request(plan: Plan, random: Random) -> Request:
    """With decisions of the planner about updates inside the last round, segments and hidden states."""
    request = plan.request
    if request.shares_node:
        return request
    one_round = request.whole_steps and plan.num_rounds == 1 and (request.round_multiple or 1) == 1
    ways = ["auto", *([] if request.clipping else ["in_round"]), *(["unstored"] * 2 if one_round else [])]
    by_chunk = request.may_make_inputs_again and random.random() < 0.2
    segments = {"segment_blocks": 2, "segment_order": "chunks"} if by_chunk else {}
    hidden = "host" if not by_chunk and random.random() < 0.3 else "auto"
    return replace(request, gpu_updates=random.choice(ways), hidden_home=hidden, **segments)


def _home(plan: Plan, home: GroupPlan, stored: GroupStorage, random: Random) -> GroupPlan:
    """Where a group lives, and who updates it."""
    if plan.request.shares_node:
        return _home_of_ranks(plan, home, stored, random)
    if not home.trained:
        return replace(home, weights=random.choice(("gpu", "host")))
    if stored.on_gpu_only:
        return home
    unstored = plan.request.gpu_updates == "unstored" and random.random() < 0.7
    weights = random.choice(("gpu", "host"))
    grads = "none" if unstored else random.choice(("gpu", "host"))
    if weights == grads == "host" and random.random() < 0.6:
        return _by_cpu(plan, stored, random)
    return GroupPlan(weights, grads, random.choice(("gpu", "host")) if weights == "gpu" else "host")


def _home_of_ranks(plan: Plan, home: GroupPlan, stored: GroupStorage, random: Random) -> GroupPlan:
    """The same of a group that ranks share: on the host, in shards where they split, or as the planner has it."""
    shard = plan.transport == "split" and random.random() < 0.4
    if not home.trained:
        return replace(home, weights="shard") if shard else home
    if shard:
        return GroupPlan("shard", "shard", "shard")
    if stored.on_gpu_only or random.random() < 0.3:
        return home
    return _by_cpu(plan, stored, random) if random.random() < 0.6 else GroupPlan()


def _by_cpu(plan: Plan, stored: GroupStorage, random: Random) -> GroupPlan:
    """On the host, and updated there, sometimes before the norm is known."""
    home = GroupPlan(update="cpu")
    bold = plan.request.clipping and plan.may_speculate and may_speculate(stored, home) and random.random() < 0.5
    return replace(home, speculative=bold)


def _layers(layout: Layout, request: Request, random: Random) -> tuple[LayerPlan, ...]:
    """What every block keeps, and where; its input may be made again from the block before it."""
    layers = layout.model.layers
    found = [LayerPlan() for _ in layers]
    may_make = request.may_make_inputs_again and (request.segments_by_chunk or random.random() < 0.7)
    for index, (before, layer) in enumerate(pairwise(layers), start=1):
        if layer.kind != "block":
            continue
        again, homes, input_home = random.random() < 0.5, ("gpu", "host", "recompute"), random.choice(("gpu", "host"))
        if request.segments_by_chunk:
            again, homes, input_home = index % 2 == 0, ("gpu", "recompute"), "gpu"
        where = {name: random.choice(homes) for name in savable_ops(layer.ops)}
        kept = [tuple(name for name in where if where[name] == home) for home in ("gpu", "host")]
        found[index] = LayerPlan(*kept, input_home, again and may_make and before.kind == "block")
    return tuple(found)
