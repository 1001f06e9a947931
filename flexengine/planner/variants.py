"""The kinds of plans of one rank: when each is tried beside the best so far, and what it must gain.

One loop plans them in order and keeps the better; the kinds of several ranks (`planner/ranks/plan.py`) go through it,
too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Generic, Literal, NamedTuple, TypeVar

from flexengine.hardware.profile import HardwareProfile
from flexengine.models.in_parts import in_parts, may_be_in_parts
from flexengine.models.spec import ModelSpec
from flexengine.plan import Plan, Prediction, Request
from flexengine.planner.adapter_groups import resident_adapter_bytes
from flexengine.planner.bound.speed_of_light import size_bounds
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.cost.stream_loads import issue_s
from flexengine.planner.feasibility.shortage import Feasibility
from flexengine.planner.on_drive import memory_may_hold
from flexengine.planner.problem import Problem
from flexengine.planner.search import MOST_TOUCHED, Search
from flexengine.planner.sizes import chunk_sizes, hidden_on_host, may_wait_on_host, segment_lengths, ways_of
from flexengine.schedule.expert_fetch import least_touched_share
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.packing import full_round
from flexengine.schedule.replays import may_replay
from flexengine.schedule.segments import may_go_by_chunk

WHOLE_ENOUGH = 0.8
"""Experts in parts are tried where the plan with whole ones is further from the bound than this share: parts cost
recomputation, which they hardly win back otherwise."""
LEAST_ISSUE_SHARE, LEAST_GRAPHS_GAIN = 0.3, 0.03
"""Graphs are tried, which takes another search, where the host issues blocks' commands for this share of a step: larger
chunks may have been chosen for its sake alone. They must gain this share, as they take memory."""
LEAST_IN_ROUND_GAIN = 0.02
"""Updates by the GPU inside the last round are tried where their bound is this share below the best plan's seconds."""
LEAST_AGAIN_GAP = 0.1
"""Inputs are made again, or hidden states wait on the host, which takes more searches, where the best plan is this
share above the bound."""
LEAST_BY_CHUNK_GAP, LEAST_RECOMPUTED = 0.05, 0.1
"""Segments are walked chunk by chunk, which takes more searches, where the best plan is the first share above the bound
and recomputes for the second: they spare recomputation alone."""
FEWER_SEGMENTS = 5 / 6
"""Of segments that are walked so, this share is tried next."""
LARGE_ADAPTERS = 0.1
"""Plans with adapters on the host are searched where those on the GPU take more than this share of its budget, or where
no plan with them there fits: to stream small ones frees little, and searching takes as long again."""
LEAST_LEFT_GAIN = 0.02
"""Second planes are counted in a search where they have no room and would gain more than this share."""

LEAST_ALL_ON_DRIVE_GAIN = 0.05
"""Weights and gradients lie on a drive where optimizer states are enough, which wears it more, for this share alone;
kept activations, too, where these are enough."""


class Found(NamedTuple):
    """A plan with its prediction, and the search that it comes from."""

    plan: Plan
    search: Search

    @property
    def predicted(self) -> Prediction:
        """What is predicted of the plan."""
        return self.plan.predicted


P = TypeVar("P", bound=Problem)
T = TypeVar("T", Plan, Found)


@dataclass(frozen=True)
class Variant(Generic[P, T]):
    """A kind of plans: when it is tried beside the best so far (None before there is one), and how it is planned.

    gain: share of the best one's seconds that it must take less; -inf where `planned` gives what is better alone.
    """

    applies: Callable[[P, T | None], bool]
    planned: Callable[[P, T | None], T | None]
    gain: float = 0.0


def fastest(variants: Iterable[Variant[P, T]], problem: P) -> T | None:
    """Plan each variant that applies and keep the better; None where none fits."""
    best: T | None = None
    for variant in variants:
        found = variant.planned(problem, best) if variant.applies(problem, best) else None
        if found is None:
            continue
        if best is None or found.predicted.step_s < (1.0 - variant.gain) * best.predicted.step_s:
            best = found
    return best


# -- experts -----------------------------------------------------------------------------------------------------------


def _of_search(search: Search) -> Found | None:
    plan = search.plan()
    return None if plan is None else Found(plan, search)


def _parts_may_pay(problem: Problem, best: Found | None) -> bool:
    """Not where they can hardly improve a plan with whole experts, or would recompute where none was asked for."""
    if not may_be_in_parts(problem.model) or best is None:
        return may_be_in_parts(problem.model)
    plan = best.plan
    if plan.request.recompute == "none":
        return False
    near_bound = plan.predicted.speed_of_light_s / plan.predicted.step_s >= WHOLE_ENOUGH
    tokens = full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round).num_tokens
    return not near_bound or least_touched_share(in_parts(problem.model), tokens) < MOST_TOUCHED


WHOLE = Variant[Problem, Found](lambda _, best: best is None, lambda problem, _: _of_search(Search(problem)))
IN_PARTS = Variant[Problem, Found](
    _parts_may_pay, lambda problem, _: _of_search(Search(problem, in_parts(problem.model)))
)


# -- CUDA graphs -------------------------------------------------------------------------------------------------------


def graphs_may_pay(model: ModelSpec, plan: Plan, profile: HardwareProfile) -> bool:
    """Whether the host spends so much of a plan's step on blocks' commands that a plan which replays them may win."""
    if plan.request.shares_node or profile.device_type != "cuda" or plan.slices_sequences or not may_replay(model):
        return False
    return issue_seconds(model, plan, profile) >= LEAST_ISSUE_SHARE * plan.predicted.step_s


def issue_seconds(model: ModelSpec, plan: Plan, profile: HardwareProfile) -> float:
    """Host seconds to issue all blocks' commands of a step."""
    cost, seconds = CostModel.of(plan.request, profile, plan.chunk_tokens), 0.0
    for layer, kept in zip(model.layers, plan.layers, strict=True):
        if layer.kind == "block":
            program = compile_layer(layer, kept.keep_gpu, kept.keep_host, plan.chunk_tokens, cost.compute_bytes)
            seconds += sum(issue_s(cost, kind, program) for kind in ("forward", "backward"))
    return seconds * plan.chunks_per_round * plan.num_rounds


def _graphs_apply(problem: Problem, best: Found | None) -> bool:
    if best is None or problem.request.graphs != "auto":
        return False
    return graphs_may_pay(best.search.model, best.plan, problem.profile)


def _with_graphs(problem: Problem, _: Found | None) -> Found | None:
    """The fastest plan with whole experts or in parts where graphs are asked for."""
    always = replace(problem, request=replace(problem.request, graphs="always"))
    return fastest((WHOLE, IN_PARTS), always)


GRAPHS = Variant[Problem, Found](_graphs_apply, _with_graphs, LEAST_GRAPHS_GAIN)


# -- updates inside backward -------------------------------------------------------------------------------------------


def _without_clipping(best: Found | None, second_planes: bool) -> Found | None:
    plan = best and best.search.without_clipping(second_planes)
    return best._replace(plan=plan) if best and plan else None


def _second_planes_lack(_: Problem, best: Found | None) -> bool:
    """Whether what was found without clipping would gain by second planes for which it leaves no room."""
    if best is None or best.search.bold is None or not best.search.unclipped.plans:
        return False
    bold, unclipped = best.search.bold, best.search.unclipped
    return unclipped.least_s < (1.0 - LEAST_LEFT_GAIN) * bold.mean_s and not bold.has_room(unclipped.plans[0])


NO_CLIPPING = Variant[Problem, Found](
    lambda _, best: best is not None and best.search.may_gain_in_backward,
    lambda _, best: _without_clipping(best, second_planes=False),
    -inf,
)
"""Speculation on what is found as if nothing were clipped. It compares the mean of steps that are clipped and not."""
SECOND_PLANES = Variant[Problem, Found](
    _second_planes_lack, lambda _, best: _without_clipping(best, second_planes=True), -inf
)

# -- updates by the GPU inside the last round --------------------------------------------------------------------------


def _in_round_applies(problem: Problem, best: Found | None) -> bool:
    """Where nothing is clipped, and what trains is more than adapters on the GPU, whose updates are short."""
    asked = problem.request
    groups = (group for group in problem.model.groups if problem.streams_adapters or not group.adapter)
    return not all(group.frozen for group in groups) and asked.may_update_in_round and not asked.updates_in_round


def _in_round(problem: Problem, best: Found | None, way: Literal["in_round", "unstored"]) -> Found | None:
    """The fastest plan whose GPU updates inside the last round; None where its bound is no faster."""
    graphs = problem.request.graphs if best is None else best.plan.request.graphs
    asked = replace(problem, request=replace(problem.request, gpu_updates=way, graphs=graphs))
    if not chunk_sizes(asked.request):
        return None
    if best is not None:
        bound = next((b for _, b in size_bounds(asked.model, asked.request, asked.profile).ascending()), None)
        if bound is None or bound.seconds > (1.0 - LEAST_IN_ROUND_GAIN) * best.predicted.step_s:
            return None
    return fastest((WHOLE, IN_PARTS), asked)


IN_ROUND = Variant[Problem, Found](_in_round_applies, lambda problem, best: _in_round(problem, best, "in_round"))
UNSTORED = Variant[Problem, Found](
    lambda problem, best: problem.request.whole_steps and _in_round_applies(problem, best),
    lambda problem, best: _in_round(problem, best, "unstored"),
)

OF_WHOLE_EXPERTS = (WHOLE, NO_CLIPPING, SECOND_PLANES)
OF_KEPT_INPUTS = (WHOLE, IN_PARTS, GRAPHS, NO_CLIPPING, SECOND_PLANES, UNSTORED, IN_ROUND)

# -- inputs that are made again ----------------------------------------------------------------------------------------


def _far_from_bound(best: Found) -> bool:
    """Whether less memory for activations may make the best plan so far much faster."""
    return best.predicted.speed_of_light_s <= (1.0 - LEAST_AGAIN_GAP) * best.predicted.step_s


def _in_segments_applies(problem: Problem, best: Found | None) -> bool:
    """Where nothing fits, or the best is far from a bound that makes inputs again: their memory may be what lacks."""
    if problem.request.segment_blocks is not None or not problem.request.may_make_inputs_again:
        return False
    if best is None:
        return True
    if not _far_from_bound(best):
        return False
    request = replace(problem.request, gpu_updates=best.plan.request.gpu_updates)
    bound = next((b for _, b in size_bounds(problem.model, request, problem.profile).ascending()), None)
    return bound is not None and bound.again > 0


def _in_segments(problem: Problem, _: Found | None) -> Found | None:
    """The fastest plan in segments, tried from short ones on until longer ones are slower; None where none fits."""
    found: Found | None = None
    for asked in _that_fit(problem):
        longer = fastest(OF_SEGMENTS, asked)
        if found is not None and (longer is None or longer.predicted.step_s >= found.predicted.step_s):
            break
        found = longer
    return found


def _that_fit(problem: Problem) -> Iterator[Problem]:
    """The problem in segments of ever more blocks, from the shortest that fit."""
    model = in_parts(problem.model) if may_be_in_parts(problem.model) else problem.model
    requests = [
        replace(problem.request, segment_blocks=blocks, graphs="never") for blocks in segment_lengths(problem.model)
    ]
    if not requests or not _fits(model, requests[-1], problem):  # the last takes the least memory
        return
    first = next((i for i, request in enumerate(requests[:-1]) if _fits(model, request, problem)), -1)
    yield from (replace(problem, request=request) for request in requests[first:])


def _fits(model: ModelSpec, request: Request, problem: Problem) -> bool:
    return any(
        Feasibility(replace(problem, model=model, request=way), as_given=True).fits() for way in ways_of(request)
    )


def _by_chunk_applies(problem: Problem, best: Found | None) -> bool:
    """Where the best plan is far from the bound as it recomputes, and chunks may take sequences whole."""
    request = problem.request
    if best is None or request.segment_blocks is not None or not request.may_make_inputs_again:
        return False
    if not may_go_by_chunk(problem.model) or may_be_in_parts(problem.model) or request.hidden_on_host:
        return False
    found = best.predicted
    far = found.speed_of_light_s <= (1.0 - LEAST_BY_CHUNK_GAP) * found.step_s
    takes_whole = any(chunk >= request.max_seq_len for chunk, _ in chunk_sizes(request))
    return far and takes_whole and found.recompute_share >= LEAST_RECOMPUTED


def _by_chunk(problem: Problem, best: Found | None) -> Found | None:
    """The fastest plan in segments of two blocks that backward walks chunk by chunk: all blocks in segments, then fewer
    of the first ones until that does not fit or is slower. Gradients are not stored where they need not be."""
    assert best is not None, "there is a plan to be faster than"
    way = ways_of(problem.request)[-1].gpu_updates
    way = best.plan.request.gpu_updates if way == "auto" else way
    asked = replace(problem.request, gpu_updates=way, segment_blocks=2, segment_order="chunks", graphs="never")
    count, found = len(problem.model.blocks) // 2, best
    while count:
        fewer = replace(problem, request=replace(asked, segments=count))
        one = fastest(OF_WHOLE_EXPERTS, fewer) if _fits(problem.model, fewer.request, problem) else None
        if one is None or one.predicted.step_s >= found.predicted.step_s:
            break
        found, count = one, int(count * FEWER_SEGMENTS)
    return None if found is best else found


OF_SEGMENTS = (WHOLE, IN_PARTS, NO_CLIPPING, SECOND_PLANES, UNSTORED, IN_ROUND)
IN_SEGMENTS = Variant[Problem, Found](_in_segments_applies, _in_segments)
BY_CHUNK = Variant[Problem, Found](_by_chunk_applies, _by_chunk)

# -- hidden states that wait on the host -------------------------------------------------------------------------------


def _hidden_on_host_applies(problem: Problem, best: Found | None) -> bool:
    """Where nothing fits, or the best is far from its bound, and sequences are so long that hidden states of a round
    take much of the GPU."""
    return may_wait_on_host(problem.model, problem.request) and (best is None or _far_from_bound(best))


def _hidden_on_host(problem: Problem, _: Found | None) -> Found | None:
    return fastest((*OF_KEPT_INPUTS, IN_SEGMENTS), replace(problem, request=hidden_on_host(problem.request)))


HIDDEN_ON_HOST = Variant[Problem, Found](_hidden_on_host_applies, _hidden_on_host)
OF_ONE_HOME = (*OF_KEPT_INPUTS, IN_SEGMENTS, BY_CHUNK, HIDDEN_ON_HOST)
"""With all adapters on the GPU, or all on the host."""

# -- where adapters live -----------------------------------------------------------------------------------------------


def _adapters_take(problem: Problem) -> float:
    """The share of the GPU's budget that adapters take with their gradients and states, if they live there."""
    if problem.request.shares_node:
        return 0.0
    return resident_adapter_bytes(problem.model, problem.request) / problem.request.max_gpu_bytes


def _streamed_may_pay(problem: Problem, best: Found | None) -> bool:
    share = _adapters_take(problem)
    return share > 0 and (best is None or share > LARGE_ADAPTERS) and memory_may_hold(problem)


ADAPTERS_ON_GPU = Variant[Problem, Found](
    lambda problem, _: _adapters_take(problem) < 1 and memory_may_hold(problem),
    lambda problem, _: fastest(OF_ONE_HOME, problem),
)
ADAPTERS_ON_HOST = Variant[Problem, Found](
    _streamed_may_pay, lambda problem, _: fastest(OF_ONE_HOME, replace(problem, streams_adapters=True))
)

OF_STORED = (ADAPTERS_ON_GPU, ADAPTERS_ON_HOST)

# -- a drive -----------------------------------------------------------------------------------------------------------


def _on_drive_applies(problem: Problem, best: Found | None) -> bool:
    """Where nothing fits without it: it is no faster, and wears out."""
    return best is None and problem.request.max_drive_bytes > 0 and not problem.on_drive


ON_DRIVE = Variant[Problem, Found](
    _on_drive_applies, lambda problem, _: fastest(OF_STORED, replace(problem, on_drive=True))
)


def _all_on_drive_applies(problem: Problem, best: Found | None) -> bool:
    """Where nothing fits with optimizer states there, or that is far from its bound: the host may then have room for
    fewer rounds, of which each reads all weights."""
    if best is None:
        return _on_drive_applies(problem, best)
    return any(home.states == "drive" for home in best.plan.groups) and _far_from_bound(best)


ALL_ON_DRIVE = Variant[Problem, Found](
    _all_on_drive_applies,
    lambda problem, _: fastest(OF_STORED, replace(problem, on_drive=True, all_on_drive=True)),
    LEAST_ALL_ON_DRIVE_GAIN,
)
KEPT_ON_DRIVE = Variant[Problem, Found](
    lambda problem, best: not problem.request.shares_node and _all_on_drive_applies(problem, best),
    lambda problem, _: fastest(OF_STORED, replace(problem, on_drive=True, all_on_drive=True, kept_on_drive=True)),
    LEAST_ALL_ON_DRIVE_GAIN,
)
"""The same of kept activations."""

# -- clipped gradients that are not stored -----------------------------------------------------------------------------


def _norm_first_applies(problem: Problem, best: Found | None) -> bool:
    """Where nothing else fits: it takes nearly twice the time."""
    request = problem.request
    return best is None and request.clipping and request.whole_steps and not request.shares_node


def _norm_first(problem: Problem, _: Found | None) -> Found | None:
    asked = replace(problem, request=replace(problem.request, gpu_updates="unstored"))
    return fastest(OF_STORED, asked) if chunk_sizes(asked.request) else None


NORM_FIRST = Variant[Problem, Found](_norm_first_applies, _norm_first)
OF_ONE_RANK = (*OF_STORED, ON_DRIVE, ALL_ON_DRIVE, KEPT_ON_DRIVE, NORM_FIRST)
