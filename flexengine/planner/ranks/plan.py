"""A plan of several ranks: the planner plans one of them, with its tokens of a step and its share of the host's memory;
the plan that it finds is priced by simulating all ranks of a node together. Where the host is too small for the
optimizer states, ranks divide these over their GPUs.

What ranks share on the host counts once for the node: every rank counts an equal part of it. Nodes add up their
gradients after the last round, which is added to the step.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from flexengine.hardware.nodes import NETWORK_BYTES_PER_S, rank_profile
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes
from flexengine.models.in_parts import in_parts
from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Plan, PlanReason, Request
from flexengine.planner.collector import collector_paused
from flexengine.planner.cost.memory import (
    excess_bytes,
)
from flexengine.planner.feasibility.remedies import Remedy, bytes_of, gib_text, remedy_note
from flexengine.planner.feasibility.shortage import Feasibility, ShortageError, shortage, shortage_message
from flexengine.planner.planner import find_plan, make_plan
from flexengine.planner.ranks.price import bytes_planned, predicted_together, times
from flexengine.planner.ranks.split import as_split, may_split
from flexengine.planner.ranks.stages import fastest_in_stages, may_stage, plan_in_stages
from flexengine.planner.reproducible import with_sizes_of_rule
from flexengine.planner.speculation import FIRST_SHARES, LEAST_GAIN, speculating_plans
from flexengine.schedule.group_storage import group_storage
from flexengine.schedule.layer_program import align
from flexengine.schedule.layout import Layout
from flexengine.schedule.shares import DealtStates

DEALT_GROUPS = (1, 2)
"""Where host memory is short, ranks divide the optimizer states of every group, else of every other one. More choices
cost a search each, and leave more GPU memory to activations."""
CLEARLY_FASTER = 0.98
"""A split plan that takes less than this share of what one rank that relays is predicted to take is chosen without
simulating all ranks that relay, which would take seconds. They have been found 1.2% faster than one of them."""
WORTH_ALL_BY_CPU = 0.99
"""Updates by the CPU alone are planned where a step takes less than this share of the time with those of the search."""
BUSY_SHARE = 0.96
"""Where GPUs compute for more than this share of a step, other updates would gain little: they are not simulated."""
TOO_BUSY = 0.985
"""The same of updates before the norm is known, which also let forward begin at once."""
SMALLER_TILES = (1 << 20, 1 << 16)
"""Elements of a tile of the update, where those that the search took have no room beside the states."""


def plan_for_ranks(
    model: ModelSpec, request: Request, profile: HardwareProfile, network_bytes_per_s: float = NETWORK_BYTES_PER_S
) -> Plan:
    """Find the fastest plan for a request of one or of several ranks.

    max_gpu_bytes of the request is each rank's, max_host_bytes all ranks' of a node together; predicted bytes are told
    alike. profile: of the node, with the rates of one GPU. network_bytes_per_s: of a node, each way, where there are
    several. A reproducible request is planned twice, to tell what its sizes cost. Raises: PlanError when nothing fits.
    """
    pinned = with_sizes_of_rule(model, request)
    plan = _fastest(model, pinned, profile, network_bytes_per_s)
    if pinned == request:
        return plan
    free = replace(request, reproducible=False)
    of_rank = rank_profile(profile, request.ranks) if request.shares_node else profile
    predicted = replace(
        plan.predicted,
        free_step_s=_fastest(model, free, profile, network_bytes_per_s).predicted.step_s,
        least_gpu_bytes=Feasibility(in_parts(model), pinned.of_rank, of_rank).least_gpu().gpu_bytes,
    )
    return replace(plan, predicted=predicted)


def _fastest(model: ModelSpec, request: Request, profile: HardwareProfile, network_bytes_per_s: float) -> Plan:
    """The fastest plan of a request whose sizes are pinned or free."""
    if not request.shares_node:
        return make_plan(model, request, profile)
    with collector_paused():
        if request.transport == "stages":
            return plan_in_stages(model, request, profile)
        best = _relayed_or_split(model, request, profile, network_bytes_per_s)
        staged = fastest_in_stages(model, request, profile) if may_stage(model, request, profile, best) else None
        return best if staged is None else min(best, staged, key=lambda plan: plan.predicted.step_s)


def _relayed_or_split(model: ModelSpec, request: Request, profile: HardwareProfile, network_bytes_per_s: float) -> Plan:
    of_rank, splits = rank_profile(profile, request.ranks), may_split(request, profile)
    plan = find_plan(model, request.of_rank, of_rank) or _with_dealt_states(model, request.of_rank, of_rank)
    if plan is None:
        raise _for_all(model, shortage(in_parts(model), request.of_rank, of_rank), request, profile)
    split = as_split(model, plan, request.of_rank, of_rank) if splits else None
    if split is not None:
        predicted = bytes_planned(Layout(model, split), split.predicted, of_rank)
        split = _whole(model, request, replace(split, predicted=predicted), profile, network_bytes_per_s)
        split = _with_speculation(model, request, split, profile, network_bytes_per_s)
        clear = not plan.deals_states and split.predicted.step_s < CLEARLY_FASTER * plan.predicted.step_s
        if clear or request.transport == "split":
            return split
    relayed = _whole(model, request, plan, profile, network_bytes_per_s)
    return relayed if split is None else min(split, relayed, key=lambda plan: plan.predicted.step_s)


def _whole(
    model: ModelSpec, request: Request, plan: Plan, profile: HardwareProfile, network_bytes_per_s: float
) -> Plan:
    """The plan of all ranks, priced together, from that of one, or the same with all updates on the CPU."""
    found = _priced(model, request, plan, profile, network_bytes_per_s)
    if found.predicted.busy_s["compute"] > BUSY_SHARE * found.predicted.step_s:
        return found
    by_cpu = _updated_by_cpu(model, plan, rank_profile(profile, request.ranks))
    other = found if by_cpu is None else _priced(model, request, by_cpu, profile, network_bytes_per_s)
    return other if other.predicted.step_s < WORTH_ALL_BY_CPU * found.predicted.step_s else found


def _priced(
    model: ModelSpec, request: Request, of_one: Plan, profile: HardwareProfile, network_bytes_per_s: float
) -> Plan:
    """The plan of all ranks, priced together, from that of one."""
    plan = replace(of_one, request=request)
    predicted = predicted_together(Layout(model, plan), plan.predicted, profile, network_bytes_per_s)
    return replace(plan, predicted=predicted)


def _with_speculation(
    model: ModelSpec, request: Request, plan: Plan, profile: HardwareProfile, network_bytes_per_s: float
) -> Plan:
    """A split plan of all ranks in which the CPU updates before the norm is known, where that is faster.

    All groups that the CPU updates are tried, as far as host memory has second planes for them, and those that it would
    update if the GPU fetched nothing for that.
    """
    if not plan.may_speculate or plan.predicted.busy_s["compute"] > TOO_BUSY * plan.predicted.step_s:
        return plan
    of_rank, best, waits = rank_profile(profile, request.ranks), plan, plan
    alone = replace(plan, request=request.of_rank)
    by_cpu = _updated_by_cpu(model, alone, of_rank)
    for base in (alone,) if by_cpu is None else (alone, by_cpu):
        layout = Layout(model, base)
        spare_bytes = -excess_bytes(layout, request.of_rank, of_rank)[1] * request.ranks
        for bold in speculating_plans(layout, spare_bytes, FIRST_SHARES):
            told = bytes_planned(Layout(model, bold), base.predicted, of_rank)
            found = _priced(model, request, replace(bold, predicted=told), profile, network_bytes_per_s)
            if found.predicted.step_s < LEAST_GAIN * best.predicted.step_s:
                best, waits = found, plan if base is alone else base
    if best is plan:
        return plan
    if waits is not plan:
        waits = _priced(model, request, waits, profile, network_bytes_per_s)
    return replace(best, predicted=replace(best.predicted, after_clipping_s=waits.predicted.step_s))


def _updated_by_cpu(model: ModelSpec, plan: Plan, profile: HardwareProfile) -> Plan | None:
    """A plan of one rank that has the CPU update what the GPU would fetch for that; None where that is nothing.

    The search takes one rank to be alone with its share of the host, where the GPU's updates seem to cost less time
    than they do: all ranks wait for them, while the CPU works under the next forward pass.
    """
    layout = Layout(model, plan)
    if not plan.updates_on_cpu or plan.deals_states:
        return None
    groups = tuple(
        replace(home, update="cpu") if home.update == "gpu" and not stored.on_gpu_only else home
        for home, stored in zip(plan.groups, layout.groups, strict=True)
    )
    if groups == plan.groups:
        return None
    found = replace(plan, groups=groups)
    layout = Layout(model, found)
    if max(excess_bytes(layout, plan.request, profile)) > 0:
        return None
    return replace(found, predicted=bytes_planned(layout, plan.predicted, profile))


def _with_dealt_states(model: ModelSpec, request: Request, profile: HardwareProfile) -> Plan | None:
    """A plan of one rank whose optimizer states, or every other group's, ranks divide over their GPUs; None if none
    fits.

    The search knows nothing of it: it is given the host memory that this frees and lacks the GPU memory that it takes.
    """
    least = Feasibility(in_parts(model), request, profile).least_host()
    if least is None:
        return None
    for dealt, on_gpu, on_host in _dealt_groups(model, request):
        left = request.max_gpu_bytes - on_gpu, request.max_host_bytes + on_host
        if left[0] <= 0 or left[1] < least.host_bytes:
            continue
        found = find_plan(model, replace(request, max_gpu_bytes=left[0], max_host_bytes=left[1]), profile)
        if found is None:
            continue
        homes = [GroupPlan(states="dealt") if i in dealt else home for i, home in enumerate(found.groups)]
        for tile in dict.fromkeys((found.optimizer_tile, *SMALLER_TILES)):
            plan = replace(found, request=request, groups=tuple(homes), optimizer_tile=tile)
            layout = Layout(model, plan)
            if max(excess_bytes(layout, request, profile)) <= 0:
                return replace(plan, predicted=bytes_planned(layout, plan.predicted, profile))
    return None


def _dealt_groups(model: ModelSpec, request: Request) -> Iterator[tuple[list[int], int, int]]:
    """Groups whose states may be divided, with the bytes that a rank's GPU takes then and its host no longer has."""
    stored = [group_storage(group, request.numerics) for group in model.groups]
    sizes = [DealtStates(group, request.ranks, Plan.optimizer_tile) for group in stored]
    for every in DEALT_GROUPS:
        dealt = [i for i, group in enumerate(model.groups) if not group.frozen and i % every == 0]
        on_gpu = sum(align(sizes[i].num_bytes(kind)) for i in dealt for kind in stored[i].rule_states)
        on_host = sum(align(stored[i].plane_bytes[kind]) for i in dealt for kind in stored[i].rule_states)
        if dealt:
            yield dealt, on_gpu, on_host // request.ranks


def _for_all(model: ModelSpec, error: ShortageError, request: Request, profile: HardwareProfile) -> ShortageError:
    """Tell of all ranks what the planner says of one: totals of the node, and remedies for the whole command."""
    ranks, needs = request.ranks, error.needs
    remedies = tuple(_remedy_for_all(remedy, error.request, request, profile) for remedy in error.remedies)
    if error.reason is PlanReason.INSUFFICIENT_HOST_MEMORY:
        remedies = (*_with_states_divided(model, error, request, profile), *remedies)
    needs = needs._replace(
        plan=replace(needs.plan, request=request),
        host_bytes=ranks * needs.host_bytes,
        host_categories=times(ranks, needs.host_categories),
    )
    asked = f"{ranks} GPUs" + (f" on each of {request.nodes} nodes" if request.nodes > 1 else "")
    budgets = f"{format_bytes(request.max_gpu_bytes)} of GPU memory each and {format_bytes(request.max_host_bytes)}"
    found = f"found no plan of {asked} with {budgets} of host memory for all\n"
    return ShortageError(error.reason, found + shortage_message(request, needs, remedies), request, needs, remedies)


def _with_states_divided(
    model: ModelSpec, error: ShortageError, request: Request, profile: HardwareProfile
) -> Iterator[Remedy]:
    """The host memory that suffices where GPUs divide the optimizer states; one budget is tried."""
    of_rank = rank_profile(profile, request.ranks)
    choices = _dealt_groups(model, request.of_rank)
    spared = max((on_host for _, on_gpu, on_host in choices if on_gpu < request.max_gpu_bytes), default=0)
    if spared:
        gib = gib_text(request.ranks * (error.required_bytes - spared))
        changed = replace(request, max_host_bytes=bytes_of(gib))
        if _with_dealt_states(model, changed.of_rank, of_rank) is not None:
            yield Remedy(f"--max-host-mem-gib {gib}", changed, remedy_note(changed, request, profile))


def _remedy_for_all(remedy: Remedy, of_rank: Request, request: Request, profile: HardwareProfile) -> Remedy:
    """A remedy of one rank's request as one of all ranks'."""
    factors = {"--max-host-mem-gib": request.ranks, "--max-global-batch-tokens": request.ranks * request.nodes}

    def whole(found: re.Match[str]) -> str:
        flag, number = found.groups()
        decimals = len(number.partition(".")[2])
        return f"{flag} {float(number) * factors[flag]:.{decimals}f}"

    changed = replace(
        remedy.request,
        max_host_bytes=request.max_host_bytes,
        max_global_batch_tokens=request.max_global_batch_tokens,
    )
    if remedy.request.max_host_bytes != of_rank.max_host_bytes:
        changed = replace(changed, max_host_bytes=request.ranks * remedy.request.max_host_bytes)
    if remedy.request.max_global_batch_tokens != of_rank.max_global_batch_tokens:
        tokens = request.ranks * request.nodes * remedy.request.max_global_batch_tokens
        changed = replace(changed, max_global_batch_tokens=tokens)
    flags = re.sub(rf"({'|'.join(factors)}) ([0-9.]*[0-9])", whole, remedy.flags)
    return Remedy(flags, changed, remedy_note(changed, request, profile))
