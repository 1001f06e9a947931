"""Split plans whose ranks keep shards of weights, gradients and optimizer states on their GPUs.

The host has a place for all of these as ever, so a split plan may have shards of any groups, as far as GPUs have room.
One GPU alone is searched, with so much more memory as if it had all that several keep in shards. Who comes first in
forward is first kept in shards: its gradient comes last, and a step that begins waits for its update. What is not in
shards is updated by the CPU.
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, LayerPlan, Plan, Request
from flexengine.planner.problem import Problem
from flexengine.planner.ranks.fitted import fitted
from flexengine.planner.variants import WHOLE, fastest
from flexengine.schedule.group_storage import DTYPE_BYTES, GroupStorage, group_storage
from flexengine.schedule.ranks.places import why_no_shards
from flexengine.schedule.save_sets import savable_ops

SHARD = GroupPlan("shard", "shard", "shard")
MOST_OF_GPU = (0.8, 0.6, 0.4, 0.2)
"""Shares of a GPU's budget that shards may take, each tried unless the one before was faster; a quick search each. What
they leave keeps activations."""


class Sharded(NamedTuple):
    """A split plan of one rank with shards of some groups, and what was searched for it: one GPU alone."""

    plan: Plan
    groups: tuple[int, ...]
    num_bytes: int
    asked: Request


def has_adapters(model: ModelSpec) -> bool:
    """Whether what is trained are adapters."""
    return all(group.frozen or group.adapter for group in model.groups)


def plans_with_shards(of_rank: Problem, adapters_only: bool = False) -> Iterator[Sharded]:
    """Plans of one rank that keep shards of ever fewer groups; of a model with frozen groups, also of these. They are
    searched quickly: see `searched_in_full`."""
    request, specs = of_rank.request, of_rank.model.groups
    stored = [group_storage(group, request.numerics) for group in specs]
    able = [i for i, spec in enumerate(specs) if (spec.adapter or not adapters_only) and _may_shard(stored[i], request)]
    quick, tried = replace(of_rank, limits=of_rank.limits.quick), set[tuple[int, ...]]()
    for share in MOST_OF_GPU:
        for chosen in (able, [i for i in able if not specs[i].frozen]):
            taken = list(accumulate(sum(stored[i].plane_bytes.values()) // request.ranks for i in chosen))
            count = sum(end <= share * request.max_gpu_bytes for end in taken)
            groups = tuple(chosen[:count])
            found = _with_shards(quick, groups, taken[count - 1]) if groups and groups not in tried else None
            tried.add(groups)
            if found is not None:
                yield found


def searched_in_full(of_rank: Problem, quick: Sharded) -> Plan | None:
    """The plan with the same shards that a search in full finds; None where none fits."""
    found = _with_shards(of_rank, quick.groups, quick.num_bytes, quick.asked)
    return None if found is None else found.plan


def _may_shard(stored: GroupStorage, request: Request) -> bool:
    acc_bytes = DTYPE_BYTES["float64" if request.numerics.compute == "float64" else "float32"]
    return not why_no_shards(stored, request.ranks, acc_bytes)


def _with_shards(
    of_rank: Problem, groups: tuple[int, ...], num_bytes: int, asked: Request | None = None
) -> Sharded | None:
    """The plan with shards of these groups, which take about so many bytes of a GPU; None where none fits.

    asked: what is searched first, unless all that shards leave.
    """
    request = of_rank.request
    on_gpu_only = [group_storage(group, request.numerics).on_gpu_only for group in of_rank.model.groups]

    def find(asked: Request) -> Plan | None:
        gpu_bytes = asked.max_gpu_bytes + num_bytes * request.ranks
        alone = replace(asked, ranks=1, transport="auto", max_gpu_bytes=gpu_bytes, max_drive_bytes=0)
        found = fastest((WHOLE,), replace(of_rank, request=alone))
        return None if found is None else found.plan

    def home(group: int, found: GroupPlan) -> GroupPlan:
        if group in groups:
            return SHARD if found.trained else SHARD.of_frozen()
        by_cpu = of_rank.may_update_by_cpu and not on_gpu_only[group]
        return GroupPlan(update="cpu" if by_cpu else "gpu") if found.trained else found

    def made(found: Plan) -> Plan:
        homes = tuple(home(group, kept) for group, kept in enumerate(found.groups))
        return replace(found, request=request, transport="split", touched_only=False, groups=homes)

    first = asked or replace(request, max_gpu_bytes=request.max_gpu_bytes - num_bytes)
    plan, _, asked = fitted(of_rank, first, find, made)
    if plan is None:
        return None
    plan = _with_less_offloaded(of_rank, plan)
    gathered_once = replace(plan, weight_slots=len(of_rank.model.blocks))
    if of_rank.fits(of_rank.layout(gathered_once)):
        plan = gathered_once
    return Sharded(plan, groups, num_bytes, asked)


def _with_less_offloaded(of_rank: Problem, plan: Plan) -> Plan:
    """The plan with what it keeps on the host kept on the GPU, of as many last layers as have room.

    The GPU that was searched may stream what shards hold, and so has other memory left than ranks have.
    """
    offloaded = [i for i, kept in enumerate(plan.layers) if kept.keep_host or kept.input_home == "host"]

    def moved(count: int) -> Plan:
        chosen = offloaded[len(offloaded) - count :]
        layers = (_on_gpu(of_rank, i, kept) if i in chosen else kept for i, kept in enumerate(plan.layers))
        return replace(plan, layers=tuple(layers))

    counts = range(1, len(offloaded) + 1)
    return moved(bisect(counts, False, key=lambda count: not of_rank.fits(of_rank.layout(moved(count)))))


def _on_gpu(of_rank: Problem, layer: int, kept: LayerPlan) -> LayerPlan:
    names = {*kept.keep_gpu, *kept.keep_host}
    in_order = tuple(name for name in savable_ops(of_rank.model.layers[layer].ops) if name in names)
    return replace(kept, keep_gpu=in_order, keep_host=(), input_home="gpu")
