"""Why no plan of several ranks was found: what the planner says of one rank, told of all of a node."""

from __future__ import annotations

import re
from dataclasses import replace

from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes
from flexengine.models.in_parts import in_parts
from flexengine.models.spec import ModelSpec
from flexengine.plan import PlanError, PlanReason, Request
from flexengine.planner.feasibility.remedies import Remedy, bytes_of, gib_text, remedy_note
from flexengine.planner.feasibility.shortage import Judge, Needs, ShortageError, shortage_message
from flexengine.planner.problem import Problem
from flexengine.planner.ranks.dealt import dealt_groups, with_dealt_states
from flexengine.planner.ranks.over_nodes import states_of_nodes, with_node_states
from flexengine.planner.ranks.price import times


def refusal(of_rank: Problem, request: Request, profile: HardwareProfile, error: ShortageError) -> ShortageError:
    """Tell of all ranks what the planner says of one: totals of the node, and remedies for the whole command, of which
    one GPU with all of the node's host memory comes first where that is enough."""
    ranks, needs = request.ranks, error.needs
    remedies = tuple(_remedy_for_all(remedy, error.request, request, profile) for remedy in error.remedies)
    on_host = error.reason is PlanReason.INSUFFICIENT_HOST_MEMORY
    divided = _with_states_divided(of_rank, request, profile, error) if on_host else None
    if divided is not None:  # takes less host memory than what the search of one rank found
        needs, remedy = divided
        remedies = (remedy, *(each for each in remedies if each.request.max_host_bytes == request.max_host_bytes))
    remedies = (*_on_one_gpu(of_rank.model, request, profile), *remedies)
    needs = needs._replace(
        plan=replace(needs.plan, request=request),
        host_bytes=ranks * needs.host_bytes,
        host_categories=times(ranks, needs.host_categories),
    )
    asked = f"{ranks} GPUs" + (f" on each of {request.nodes} nodes" if request.nodes > 1 else "")
    budgets = f"{format_bytes(request.max_gpu_bytes)} of GPU memory each and {format_bytes(request.max_host_bytes)}"
    by_nodes = bool(states_of_nodes(of_rank.model, request)[0])
    beside = ", also with optimizer states divided over the nodes" if by_nodes else ""
    found = f"found no plan of {asked} with {budgets} of host memory for all{beside}\n"
    return ShortageError(error.reason, found + shortage_message(request, needs, remedies), request, needs, remedies)


def pinned_refusal(model: ModelSpec, request: Request, reason: str, auto_fits: bool) -> PlanError:
    """Tell of a transport that is asked for, and that ranks cannot have. reason: "" where nothing fits."""
    how = "in stages" if request.transport == "stages" else f"with --transport {request.transport}"
    advice = "works with: --transport auto"
    if reason:
        return PlanError(PlanReason.INVALID_REQUEST, f"{model.name} cannot be trained {how}: {reason}\n  {advice}")
    if not auto_fits:
        advice = "nor does --transport auto fit, which says what would"
    found = f"found no plan {how} of {model.name} on {request.ranks} GPUs within these budgets\n  {advice}"
    return PlanError(PlanReason.INSUFFICIENT_DEVICE_MEMORY, found)


def _on_one_gpu(model: ModelSpec, request: Request, profile: HardwareProfile) -> list[Remedy]:
    """The same steps on one GPU of a node, which need not share what it keeps, and may keep less than ranks do."""
    if request.nodes > 1:
        return []
    alone = request.on_one_gpu
    flags = "--gpus 1" if request.transport == "auto" else "--gpus 1 --transport auto"
    note = f"torchrun --nproc-per-node 1; with all {format_bytes(request.max_host_bytes)} of host memory"
    return [Remedy(flags, alone, note)] if Judge(Problem(in_parts(model), alone, profile)).fits(alone) else []


def _with_states_divided(
    of_rank: Problem, request: Request, profile: HardwareProfile, error: ShortageError
) -> tuple[Needs, Remedy] | None:
    """The host memory that suffices where nodes or GPUs divide the optimizer states, and a rank's plan with it.

    One budget is tried for each; None where none suffices.
    """
    dealt = dealt_groups(of_rank.model, request.of_rank)
    ways = [(states_of_nodes(of_rank.model, request)[1], with_node_states)]
    ways += [(on_host, with_dealt_states) for _, on_gpu, on_host in dealt if on_gpu < request.max_gpu_bytes]
    for spared, divided in sorted(ways, key=lambda way: -way[0]):  # what needs the least comes first
        if spared >= error.required_bytes:  # the smallest plan has states on the GPU: nothing is left to divide
            continue
        gib = gib_text(request.ranks * (error.required_bytes - spared))
        changed = replace(request, max_host_bytes=bytes_of(gib))
        changed_rank = replace(of_rank, request=changed.of_rank)
        plan = divided(changed_rank) if spared else None
        if plan is not None:
            remedy = Remedy(f"--max-host-mem-gib {gib}", changed, remedy_note(changed, request, profile))
            return Needs.of(changed_rank, plan), remedy
    return None


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
