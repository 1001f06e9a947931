"""A plan of several ranks: the planner plans one of them, with its tokens of a step and its share of the host's memory;
the plan that it finds is priced by simulating all ranks of a node together. Where the host is too small for the
optimizer states, several nodes divide these, or ranks over their GPUs.

What ranks share on the host counts once for the node: every rank counts an equal part of it. Nodes add up their
gradients while the last round goes on, and a step ends when both have ended.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from flexengine.hardware.nodes import NETWORK_BYTES_PER_S, rank_profile
from flexengine.hardware.profile import HardwareProfile
from flexengine.models.in_parts import in_parts
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, PlanError, Request
from flexengine.plan.request import TransportName
from flexengine.planner.collector import collector_paused
from flexengine.planner.feasibility.shortage import Feasibility, ShortageError, shortage
from flexengine.planner.planner import find_plan, make_plan
from flexengine.planner.problem import Problem
from flexengine.planner.ranks import context, stages
from flexengine.planner.ranks.context import may_cut, plans_in_context
from flexengine.planner.ranks.dealt import with_dealt_states
from flexengine.planner.ranks.kept import keeping_none
from flexengine.planner.ranks.over_nodes import with_node_states
from flexengine.planner.ranks.price import bytes_planned, if_it_fits, predicted_together
from flexengine.planner.ranks.refusal import pinned_refusal, refusal
from flexengine.planner.ranks.shards import Sharded, has_adapters, plans_with_shards, searched_in_full
from flexengine.planner.ranks.split import as_split, laid_out_as_split, may_split
from flexengine.planner.ranks.split_again import best_again
from flexengine.planner.ranks.stages import fastest_in_stages, may_stage
from flexengine.planner.reproducible import with_sizes_of_rule
from flexengine.planner.speculation import FIRST_SHARES, LEAST_GAIN, has_second_planes, speculating_plans
from flexengine.planner.variants import OF_ONE_RANK, Found, Variant, fastest
from flexengine.schedule.layout import Layout

CLEARLY_FASTER = 0.98
"""A split plan that takes less than this share of what one rank that relays is predicted to take is chosen without
simulating all ranks that relay, which would take seconds. They have been found 1.2% faster than one of them."""
BY_CPU_GAIN = 0.01
"""Updates by the CPU alone must spare this share of a step with those of the search."""
FEWER_GAIN = 0.01
"""Shards of fewer groups must spare this share of a step with those of more, which leave the host alone."""
NEAR = 1.02
"""Shards are searched in full where a quick search finds no more than this factor of the best so far."""
BUSY_SHARE = 0.96
"""Where GPUs compute for more than this share of a step, other updates would gain little: they are not simulated."""
BUSY_WITHOUT_PEERS = 0.9
"""The same of split plans of GPUs that reach each other through the host alone, which move more bytes over links. Where
adapters are trained, which may be shards, it is TOO_BUSY."""
TOO_BUSY = 0.985
"""The same of updates before the norm is known, which also let forward begin at once."""


@dataclass(frozen=True, eq=False)
class NodeProblem(Problem):
    """What all ranks of a node do together. profile: of the node, with the rates of one GPU."""

    network_bytes_per_s: float = NETWORK_BYTES_PER_S

    @cached_property
    def of_rank(self) -> Problem:
        """What one of its ranks does."""
        profile = rank_profile(self.profile, self.request.ranks) if self.request.shares_node else self.profile
        return Problem(self.model, self.request.of_rank, profile, self.limits)

    @cached_property
    def searched(self) -> Found | None:
        """The fastest plan of one rank that relays with whole states, and its search; None where none fits."""
        return fastest(OF_ONE_RANK, self.of_rank.without_drive)

    @cached_property
    def of_one(self) -> Plan:
        """The fastest plan of one rank that relays, on a drive where nothing fits without. Raises: ShortageError, of
        all ranks, when nothing fits."""
        alone = self.of_rank.without_drive
        plan = None if self.searched is None else self.searched.plan
        plan = plan or with_node_states(alone) or with_dealt_states(alone)
        plan = plan or (find_plan(self.of_rank) if self.request.max_drive_bytes else None)
        if plan is None:
            error = shortage(replace(self.of_rank, model=in_parts(self.model)))
            raise refusal(self.of_rank, self.request, self.profile, error)
        return plan

    def auto_fits(self) -> bool:
        """Whether a plan fits where no transport is asked for."""
        try:
            return bool(_fastest(replace(self, request=replace(self.request, transport="auto"))))
        except PlanError:
            return False

    @cached_property
    def split_again(self) -> Plan | None:
        """The split plan of one rank that is best by estimates of a split; None where none fits, or links move no less
        than with relays."""
        plan = None if self.searched is None else best_again(self.of_rank, self.searched.search)
        return None if plan is None else replace(plan, predicted=self.of_one.predicted)

    @cached_property
    def split(self) -> Plan | None:
        """The fastest plan of one rank as a priced split of all; None where none fits, but another search may."""
        try:
            split = as_split(self.of_rank, self.of_one)
        except PlanError:
            if self.split_again is None:
                raise
            return None
        return None if split is None else _priced_split(self, split)

    def priced(self, of_one: Plan) -> Plan:
        """The plan of all ranks, priced together, from that of one."""
        plan = replace(of_one, request=self.request)
        layout = self.layout(plan)
        return replace(
            plan, predicted=predicted_together(layout, plan.predicted, self.profile, self.network_bytes_per_s)
        )


def plan_for_ranks(
    model: ModelSpec, request: Request, profile: HardwareProfile, network_bytes_per_s: float = NETWORK_BYTES_PER_S
) -> Plan:
    """Find the fastest plan for a request of one or of several ranks.

    max_gpu_bytes of the request is each rank's, max_host_bytes all ranks' of a node together; predicted bytes are told
    alike. profile: of the node, with the rates of one GPU. network_bytes_per_s: of a node, each way, where there are
    several. A reproducible request is planned twice, to tell what its sizes cost. Raises: PlanError when nothing fits.
    """
    node = NodeProblem(model, with_sizes_of_rule(model, request), profile, network_bytes_per_s=network_bytes_per_s)
    plan = _fastest(node)
    if node.request == request:
        return plan
    free = replace(node, request=replace(request, reproducible=False))
    predicted = replace(
        plan.predicted,
        free_step_s=_fastest(free).predicted.step_s,
        least_gpu_bytes=Feasibility(replace(node.of_rank, model=in_parts(model))).least_gpu().gpu_bytes,
    )
    return replace(plan, predicted=predicted)


def _fastest(node: NodeProblem) -> Plan:
    """The fastest plan of a request whose sizes are pinned or free."""
    if not node.request.shares_node:
        return make_plan(node.model, node.request, node.profile)
    with collector_paused():
        if node.request.transport in ("stages", "context"):
            return _pinned(node)
        try:
            plan = fastest(KINDS.values(), node)
        except ShortageError:  # of whole rounds on every rank
            plan = fastest((CONTEXT,), node) if may_cut(node.model, node.request, None) else None
            if plan is None:
                raise
    assert plan is not None, "that of ranks which relay fits, or an error was raised"
    return plan


def _pinned(node: NodeProblem) -> Plan:
    """The fastest plan of the transport that is asked for, which not all models and ranks can have."""
    why_not, kind = (stages.why_not, STAGES) if node.request.transport == "stages" else (context.why_not, CONTEXT)
    reason = why_not(node.model, node.request)
    plan = None if reason else fastest((kind,), node)
    if plan is None:
        raise pinned_refusal(node.model, node.request, reason, auto_fits=not reason and node.auto_fits())
    return plan


# -- kinds of plans of all ranks ---------------------------------------------------------------------------------------


def _busy(plan: Plan | None, share: float) -> bool:
    """Whether GPUs compute for more than a share of a step."""
    return plan is not None and plan.predicted.busy_s["compute"] > share * plan.predicted.step_s


def _may_gain_early(plan: Plan | None) -> bool:
    """Whether updates before the norm is known may make a step shorter."""
    return plan is not None and plan.may_speculate and not _busy(plan, TOO_BUSY)


def _priced_split(node: NodeProblem, split: Plan) -> Plan:
    """The priced plan of all ranks from a split plan of one."""
    layout = node.of_rank.layout(split)
    return node.priced(replace(split, predicted=bytes_planned(layout, split.predicted, node.of_rank.profile)))


def _may_move_more(_: NodeProblem, best: Plan | None) -> bool:
    """Whether links may have time for more: not where GPUs hardly wait and compute next to nothing twice."""
    return best is None or best.predicted.once_s < BUSY_SHARE * best.predicted.step_s


def _again(node: NodeProblem, best: Plan | None) -> Plan | None:
    """What is best by estimates of a split, with updates before the norm is known where that is faster; None where none
    fits, or one share of groups tells that it is far slower than `best`."""
    plan = node.split_again
    if plan is None:
        return None
    near_s = node.limits.far * best.predicted.step_s if best is not None and best.speculates else inf
    return _updating_early(node, plan) if near_s == inf or _speculating_s(node, plan) <= near_s else None


def _with_shards(node: NodeProblem, beside: Plan | None) -> Plan | None:
    """The fastest split plan with shards, of ever fewer groups while that is faster; None where none fits.

    What is far from `beside` is not searched in full.
    """
    best: tuple[Plan, Sharded] | None = None
    for quick in plans_with_shards(node.of_rank, adapters_only=not _shards_all(node)):
        found = _updating_early(node, quick.plan)
        if best is not None and found.predicted.step_s > (1.0 - FEWER_GAIN) * best[0].predicted.step_s:
            break
        best = found, quick
    if best is None or (beside is not None and best[0].predicted.step_s > NEAR * beside.predicted.step_s):
        return None
    full = searched_in_full(node.of_rank, best[1])
    plans = [best[0], *([] if full is None else [_updating_early(node, full)])]
    return min(plans, key=lambda plan: plan.predicted.step_s)


def _updating_early(node: NodeProblem, plan: Plan) -> Plan:
    """The priced plan of all ranks from a split plan of one, with updates before the norm is known where that is
    faster."""
    found = _priced_split(node, plan)
    if not found.may_speculate or not found.updates_on_cpu:
        return found
    return _with_speculation(node, found) or found


def _of_other_sizes(node: NodeProblem, best: Plan | None) -> Plan | None:
    """The fastest plan of another size than what waits for its norm fastest, with updates before that is known.

    One share of groups tells which size is worth all of them. None where none is faster than `best`.
    """
    assert best is not None, "there is a plan to be faster than"
    found, of_rank = list[tuple[float, Plan]](), node.of_rank
    for plan in [] if node.searched is None else node.searched.search.of_other_sizes:
        split = laid_out_as_split(of_rank, plan)
        if of_rank.fits(of_rank.layout(split)):
            found.append((_speculating_s(node, split), split))
    least_s, split = min(found, key=lambda pair: pair[0], default=(inf, None))
    if split is None or least_s >= LEAST_GAIN * best.predicted.step_s:
        return None
    return _updating_early(node, split)


def _speculating_s(node: NodeProblem, split: Plan) -> float:
    """Seconds of a split plan of one rank with the first share of groups updated before the norm is known; infinite
    where there is none. The CPU updates all, or less where the host has no second planes for all of that."""
    least_s = inf
    for plan in (_updated_by_cpu(node.of_rank, split), split):
        if plan is not None:
            layout = node.of_rank.layout(plan)
            bold = _speculating(node, layout, FIRST_SHARES[:1])
            least_s = min((least_s, *(found.predicted.step_s for found in bold)))
            if has_second_planes(layout, _spare_bytes(node, layout)):
                break
    return least_s


def _speculating(node: NodeProblem, layout: Layout, shares: Sequence[float]) -> Iterator[Plan]:
    """Priced plans of all ranks that update shares of the groups of one rank's layout before the norm is known."""
    of_rank = node.of_rank
    for bold in speculating_plans(layout, _spare_bytes(node, layout), shares):
        told = bytes_planned(of_rank.layout(bold), layout.plan.predicted, of_rank.profile)
        yield node.priced(replace(bold, predicted=told))


def _spare_bytes(node: NodeProblem, layout: Layout) -> int:
    """What the layout of one rank leaves of the node's host memory."""
    return node.of_rank.room(layout).host_bytes * node.request.ranks


def _all_by_cpu(node: NodeProblem, best: Plan | None) -> Plan | None:
    """The plan with all updates on the CPU."""
    by_cpu = None if best is None else _updated_by_cpu(node.of_rank, replace(best, request=node.of_rank.request))
    return None if by_cpu is None else node.priced(by_cpu)


def _updated_by_cpu(problem: Problem, plan: Plan) -> Plan | None:
    """A plan of one rank that has the CPU update what the GPU would fetch for that; None where that is nothing.

    The search takes one rank to be alone with its share of the host, where the GPU's updates seem to cost less time
    than they do: all ranks wait for them, while the CPU works under the next forward pass.
    """
    if not plan.updates_on_cpu or plan.deals_states:
        return None
    groups = tuple(
        replace(home, update="cpu") if home.update == "gpu" and not (stored.on_gpu_only or home.sharded) else home
        for home, stored in zip(plan.groups, problem.layout(plan).groups, strict=True)
    )
    return None if groups == plan.groups else if_it_fits(problem, replace(plan, groups=groups))


def _keeping_none(node: NodeProblem, best: Plan | None) -> Plan | None:
    """The plan, or that of the search, with what would wait on the host made again; None where that is no faster."""
    assert best is not None, "there is a plan that may keep less"
    plans, found = [best.after_clipping()], list[Plan]()
    if best.transport == "split" and node.split is not None and node.split.layers != best.layers:
        plans.append(node.split)
    for plan in plans:
        kept = keeping_none(node.of_rank, plan)
        made_again = None if kept is None else node.priced(kept)
        if made_again is not None and made_again.predicted.step_s < plan.predicted.step_s:
            early = _with_speculation(node, made_again) if _may_gain_early(made_again) else None
            found.append(early or made_again)
    return min(found, key=lambda plan: plan.predicted.step_s, default=None)


def _with_speculation(node: NodeProblem, plan: Plan | None) -> Plan | None:
    """A split plan of all ranks in which the CPU updates before the norm is known; None where none is faster.

    All groups that the CPU updates are tried, as far as host memory has second planes for them, and those that it would
    update if the GPU fetched nothing for that.
    """
    if plan is None:
        return None
    of_rank, best, waits = node.of_rank, plan, plan
    alone = replace(plan, request=of_rank.request)
    by_cpu = _updated_by_cpu(of_rank, alone)
    for base in (alone,) if by_cpu is None else (alone, by_cpu):
        for found in _speculating(node, of_rank.layout(base), FIRST_SHARES):
            if found.predicted.step_s < LEAST_GAIN * best.predicted.step_s:
                best, waits = found, plan if base is alone else base
    if best is plan:
        return None
    if waits is not plan:
        waits = node.priced(waits)
    return replace(best, predicted=replace(best.predicted, after_clipping_s=waits.predicted.step_s))


def _may_split(node: NodeProblem) -> bool:
    """Where GPUs reach each other through the host alone, ranks split what they would wait for otherwise."""
    if may_split(node.request, node.profile):
        return True
    asked, on_gpus = node.request, node.profile.device_type == "cuda"
    through_host = asked.transport == "auto" and asked.ranks > 1 and on_gpus
    return through_host and not _busy(node.of_one, TOO_BUSY if has_adapters(node.model) else BUSY_WITHOUT_PEERS)


def _shards_all(node: NodeProblem) -> bool:
    """Not where GPUs would gather shards through the host, which has all of them, unless ranks are asked to split."""
    return node.request.transport == "split" or node.profile.link.peer_bytes_per_s > 0


def _may_shard(node: NodeProblem, best: Plan | None) -> bool:
    """Adapters are few bytes to gather, also through the host, and their updates need no link."""
    if best is None or node.request.nodes > 1 or _busy(best, TOO_BUSY):
        return False
    return _shards_all(node) or has_adapters(node.model)


def _may_relay(node: NodeProblem, split: Plan | None) -> bool:
    if split is None:
        return True
    clear = not node.of_one.deals_states and split.predicted.step_s < CLEARLY_FASTER * node.of_one.predicted.step_s
    return not clear and node.request.transport != "split"


def _in_context(node: NodeProblem) -> Plan | None:
    """The fastest plan of ranks that cut rounds, without a drive; None where none fits."""
    node = node.without_drive
    if context.why_not(node.model, node.request):
        return None
    plans = [node.priced(plan) for plan in plans_in_context(node.of_rank, node.request)]
    return min(plans, key=lambda plan: plan.predicted.step_s, default=None)


BY_CPU = Variant[NodeProblem, Plan](lambda _, best: not _busy(best, BUSY_SHARE), _all_by_cpu, BY_CPU_GAIN)
NONE_KEPT = Variant[NodeProblem, Plan](lambda _, best: best is not None, _keeping_none)
SPECULATION = Variant[NodeProblem, Plan](lambda _, best: _may_gain_early(best), _with_speculation, -inf)
OTHER_SIZES = Variant[NodeProblem, Plan](lambda _, best: _may_gain_early(best), _of_other_sizes)
AGAIN = Variant[NodeProblem, Plan](_may_move_more, _again)
SHARDS = Variant[NodeProblem, Plan](_may_shard, _with_shards)
AS_SPLIT = Variant[NodeProblem, Plan](lambda _, best: best is None, lambda node, _: node.split)
AS_RELAY = Variant[NodeProblem, Plan](lambda _, best: best is None, lambda node, _: node.priced(node.of_one))
SPLIT = Variant[NodeProblem, Plan](
    lambda node, _: _may_split(node),
    lambda node, _: fastest((AS_SPLIT, BY_CPU, SPECULATION, OTHER_SIZES, AGAIN, SHARDS, NONE_KEPT), node),
)
RELAY = Variant[NodeProblem, Plan](_may_relay, lambda node, _: fastest((AS_RELAY, BY_CPU, NONE_KEPT), node))
CONTEXT = Variant[NodeProblem, Plan](
    lambda node, best: may_cut(node.model, node.request, best), lambda node, _: _in_context(node)
)
STAGES = Variant[NodeProblem, Plan](
    lambda node, best: may_stage(node.model, node.request, node.profile, best),
    lambda node, best: fastest_in_stages(node.model, node.without_drive.request, node.profile, best),
)
KINDS: dict[TransportName, Variant[NodeProblem, Plan]] = {
    "split": SPLIT,
    "relay": RELAY,
    "stages": STAGES,
    "context": CONTEXT,
}
"""What `auto` tries, in this order. The plan of a transport that is asked for is what its kind plans."""
