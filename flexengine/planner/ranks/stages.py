"""A plan of several ranks in stages: a rank's blocks are planned as a model of their own, all ranks priced together.

The search is given the work of a rank: its blocks, with a small embedding and head, for the chunks of all rounds that
ranks run together. It may keep weights, gradients and states of blocks on the GPU, as no other rank needs them. What it
does not know of is taken from its budgets: embedding and head, the places where chunks are handed over, and the places
in the node's memory of all that lies on GPUs. Where a layout then lacks room, the search is repeated with less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice, product
from typing import NamedTuple

from flexengine.hardware.nodes import rank_profile
from flexengine.hardware.profile import HardwareProfile
from flexengine.models.freezing import freeze_groups
from flexengine.models.registry import build_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, LayerPlan, Plan, Prediction, Request
from flexengine.planner.adapter_groups import resident_adapter_bytes
from flexengine.planner.cost.memory import gpu_required_bytes, host_categories, host_required_bytes
from flexengine.planner.problem import Problem, Room
from flexengine.planner.ranks.price import bytes_planned, priced_together
from flexengine.planner.sizes import check_sizes, filled, in_few_slices
from flexengine.planner.variants import LARGE_ADAPTERS, LEAST_ISSUE_SHARE, OF_WHOLE_EXPERTS, fastest, issue_seconds
from flexengine.schedule.group_storage import DTYPE_BYTES, group_storage
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.stages import Stage, why_no_stages
from flexengine.schedule.ranks.transports import layouts_of

SMALL_VOCABULARY = 1024
"""Of the models that blocks are planned as: their edges take next to nothing."""
CHUNK_TOKENS, WAVES, MOST_CHUNKS = (2048, 4096, 8192), (1, 2, 4), 8
"""Sizes that are tried, waves of a step, and chunks of a round: with more chunks a simulation takes a minute."""
MOST_BUSY = 0.9
"""Stages are tried by themselves where GPUs compute for less than this share of the step of another plan: they shorten
what GPUs wait for, and have GPUs wait for each other."""
NEAR = 1.05
"""The fastest that quick searches find is searched in full where it is within this factor of the best other plan. A
quick search takes a third of the time; what it finds is up to 3% slower, or faster, as a rank is searched alone."""
QUICK_SEARCHES, SAME_SPARE = 8, 2
"""Searches of a size for a layout that fits, where each is quick. What one that lacks memory is told to spare, the next
may take for something else: after so many, twice as much is spared each time."""


def may_stage(model: ModelSpec, request: Request, profile: HardwareProfile, best: Plan | None) -> bool:
    """Whether a plan in stages is to be tried beside `best`, the fastest of the other plans, or asked for."""
    if request.transport == "stages":
        return True
    if request.transport != "auto" or best is None or profile.device_type != "cuda":
        return False
    if why_not(model, request) or best.deals_states:
        return False
    return best.predicted.busy_s["compute"] < MOST_BUSY * best.predicted.step_s


def why_not(model: ModelSpec, request: Request) -> str:
    """Why ranks cannot do what is asked in stages, in words; empty where they can."""
    if request.ranks == 1:
        return "there is one GPU" if request.nodes == 1 else "each node has one GPU"
    return "there are several nodes" if request.nodes > 1 else why_no_stages(model, request.ranks)


def fastest_in_stages(
    model: ModelSpec, request: Request, profile: HardwareProfile, beside: Plan | None = None
) -> Plan | None:
    """The fastest plan in stages of those that are tried; None where none fits. Order: ranks can train so.

    Sizes and ways are searched quickly, the fastest of them in full: none where that is far from `beside`.
    """
    check_sizes(request)
    quick = sorted(_searched_quickly(_Search(model, request, profile, quick=True)), key=_step_s)
    if not quick or (beside is not None and _step_s(quick[0]) > NEAR * beside.predicted.step_s):
        return None
    best, size, way = quick[0]
    plans = (best, _Search(model, request, profile).planned(size, way))
    return min(filter(None, plans), key=lambda plan: plan.predicted.step_s)


def _searched_quickly(search: _Search) -> list[_Found]:
    """A plan of each size of chunks that fits, and those of the fastest one's size in other ways."""
    found = list[_Found]()
    for sizes in stage_sizes(search.request):
        if found and sizes[0].chunks_per_round == 1 and not search.issues_long(min(found, key=_step_s).plan):
            continue
        found += islice(search.found(sizes, search.first_ways), 1)  # others are not even searched
    if not found:
        return []
    _, size, way = min(found, key=_step_s)
    return [*found, *search.found([size], search.others(way))]


def _step_s(found: _Found) -> float:
    return found.plan.predicted.step_s


class StageSize(NamedTuple):
    """Tokens of a chunk, and chunks of a round."""

    chunk_tokens: int
    chunks_per_round: int


def stage_sizes(request: Request) -> list[list[StageSize]]:
    """Sizes worth a look, which the request may pin: for each size of a chunk, those with the fewest waves first, of
    which the first that fits is taken. Those of which a round has one chunk come last."""
    found = [sizes for chunk in _chunks(request) if (sizes := _of_chunk(request, chunk))]
    return sorted(found, key=lambda sizes: sizes[0].chunks_per_round == 1)


def _of_chunk(request: Request, chunk: int) -> list[StageSize]:
    longest, slices = request.max_seq_len, request.slices(chunk)
    if request.round_tokens is not None:
        count, left = divmod(request.round_tokens, chunk)
        return [StageSize(chunk, count)] if not left and count >= slices else []
    used = chunk // longest * longest if longest <= chunk else -(-longest // slices)
    units = -(-request.max_global_batch_tokens // used)
    counts = (math.ceil(math.ceil(units / (request.ranks * waves)) / slices) * slices for waves in WAVES)
    return [StageSize(chunk, count) for count in dict.fromkeys(counts) if count <= max(MOST_CHUNKS, slices)]


def _chunks(request: Request) -> list[int]:
    if request.chunk_tokens is not None:
        return [request.chunk_tokens]
    most = request.round_tokens or -(-request.max_global_batch_tokens // request.ranks)
    large = {filled(chunk, request.max_seq_len) for chunk in CHUNK_TOKENS if chunk <= most}
    if request.whole_sequences:
        return sorted(chunk for chunk in large if chunk >= request.max_seq_len) or [max(most, request.max_seq_len)]
    return in_few_slices(request, sorted(large)) or sorted({min(request.max_seq_len, most), most})


class Way(NamedTuple):
    """Whether slots of embedding and head lie over those of blocks, whether adapters live on the host, and whether all
    is recomputed."""

    share_edges: bool = True
    streamed: bool = False
    in_full: bool = False


class _Found(NamedTuple):
    """A plan with its sizes and its way."""

    plan: Plan
    size: StageSize
    way: Way


class _Search:
    """Plans of one request. Searches of equal blocks are made once."""

    def __init__(self, model: ModelSpec, request: Request, profile: HardwareProfile, quick: bool = False) -> None:
        self._model, self.request, self._profile, self._size = model, request, profile, request.ranks
        self._small = _with_small_edges(model)
        rates = tuple((name, rate / self._size) for name, rate in profile.host.adamw_parameters_per_s)
        self._of_one = rank_profile(profile, self._size)
        self._of_rank = self._of_one.changed(cpu_adamw_parameters_per_s=rates)  # the search knows of one rank
        self._judge = Problem(model, request.of_rank, self._of_rank)
        if quick:
            self._judge = replace(self._judge, limits=replace(self._judge.limits.quick, searches=QUICK_SEARCHES))
        self._plans: dict[tuple, _Blocks | None] = {}
        self._reserved: dict[Way, tuple[int, int]] = {}  # what the last plan that fits left free
        adapters = resident_adapter_bytes(model, request) / self._size  # on a GPU, if they live there
        self._may_stream = adapters > LARGE_ADAPTERS * request.max_gpu_bytes
        stored = [group_storage(group, request.numerics) for group in model.groups]
        self._state_bytes = [sum(group.plane_bytes.values()) for group in stored]

    @property
    def first_ways(self) -> list[Way]:
        """Of which the first that fits is planned: large adapters go to the host where GPUs have no room for them."""
        return [Way(), Way(streamed=True)] if self._may_stream else [Way()]

    def others(self, way: Way) -> list[Way]:
        """What is worth a look with the best sizes, beside the way of their plan. Large adapters on GPUs leave little
        room for weights that are to come. What waits on the host crosses links that a rank is searched with alone."""
        in_full = [way._replace(in_full=True)] if self.request.recompute == "auto" else []
        streamed = (other for other in self.first_ways if other.streamed > way.streamed)
        return [way._replace(share_edges=False), *in_full, *streamed]

    def issues_long(self, plan: Plan) -> bool:
        """Whether a rank's host issues blocks' commands for so long that fewer, larger chunks may be worth idleness."""
        seconds = issue_seconds(self._model, plan, self._profile) / plan.request.ranks
        return seconds > LEAST_ISSUE_SHARE * plan.predicted.step_s

    def found(self, sizes: Sequence[StageSize], ways: Sequence[Way]) -> Iterator[_Found]:
        """The plans that fit with each of these sizes, in each of these ways."""
        for size, way in product(sizes, ways):
            plan = self.planned(size, way)
            if plan is not None:
                yield _Found(plan, size, way)

    def planned(self, size: StageSize, way: Way) -> Plan | None:
        """The plan of all ranks with these sizes, priced; None where none fits."""
        reserved = self._reserved.get(way, (0, 0))
        limits = self._judge.limits
        for number in range(limits.searches):  # the first one begins with what the size before needed
            plan = self._assembled(size, way, reserved)
            if plan is None:
                return None
            layouts = layouts_of(self._model, plan)
            room = Room(*map(min, zip(*map(self._judge.room, layouts), strict=True)))
            if room.fits:
                self._reserved[way] = reserved
                return self._priced(layouts)
            gpu, host = room.lacks(limits.spare_bytes << max(0, number - SAME_SPARE))
            reserved = reserved[0] + gpu, reserved[1] + host
        return None

    def _stage(self, rank: int) -> Stage:
        return Stage(rank, self._size, len(self._model.layers))

    def _blocks(self, rank: int) -> list[int]:
        return [layer for layer in range(1, len(self._model.layers) - 1) if self._stage(rank).owns(layer)]

    def _assembled(self, size: StageSize, way: Way, reserved: tuple[int, int]) -> Plan | None:
        """The plan of the whole model from those of all ranks' blocks, which share what is not of a block."""
        model, num_layers = self._model, len(self._model.layers)
        layers, homes, plans = [LayerPlan()] * num_layers, [GroupPlan()] * len(model.groups), list[Plan]()
        for rank in range(self._size):
            blocks = self._blocks(rank)
            found = self._plan_of(blocks, size, way, reserved)
            if found is None:
                return None
            plans.append(found.plan)
            for block, kept, of_block in zip(blocks, found.plan.layers[1:], found.homes, strict=False):
                layers[block] = kept
                for group, home in zip(model.layers[block].groups, of_block, strict=True):
                    homes[group] = home
        for group in (0, num_layers - 1):
            homes[group] = self._edge(group)
        return replace(
            plans[0],
            model=model.name,
            request=self.request,
            chunk_tokens=size.chunk_tokens,
            chunks_per_round=size.chunks_per_round,
            layers=tuple(layers),
            groups=tuple(homes),
            weight_slots=max(plan.weight_slots for plan in plans),
            grad_slots=max(plan.grad_slots for plan in plans),
            save_slots=max(plan.save_slots for plan in plans),
            optimizer_slots=max(plan.optimizer_slots for plan in plans),
            optimizer_tile=min(plan.optimizer_tile for plan in plans),
            share_edge_slots=way.share_edges,
            transport="stages",
        )

    def _edge(self, group: int) -> GroupPlan:
        """All ranks update their shares of an edge by the CPU, where one can: the GPU would wait for its link."""
        if self._model.groups[group].frozen:
            return GroupPlan(update="none")
        on_cpu = self._profile.device_type == "cuda"
        stored = group_storage(self._model.groups[group], self.request.numerics)
        return GroupPlan(update="cpu" if on_cpu and not stored.on_gpu_only else "gpu")

    def _plan_of(self, blocks: Sequence[int], size: StageSize, way: Way, reserved: tuple[int, int]) -> _Blocks | None:
        """Plan a rank's blocks, or those of the rank with most, if these begin alike: then one search does."""
        most = self._blocks(0)
        kinds = [[self._model.layers[layer].ops for layer in layers] for layers in (blocks, most)]
        if kinds[1][: len(blocks)] == kinds[0]:
            blocks = most
        request = self._request_of(blocks, size, reserved)
        if request is None:
            return None
        if way.in_full:
            request = replace(request, recompute="full")
        key = tuple(blocks), request, way.streamed
        if key not in self._plans:
            model = self._small.with_layers([0, *blocks, len(self._model.layers) - 1])
            problem = replace(self._judge, model=model, request=request, streams_adapters=way.streamed)
            found = fastest(OF_WHOLE_EXPERTS, problem)
            self._plans[key] = None if found is None else _Blocks.of(model, found.plan)
        return self._plans[key]

    def _request_of(self, blocks: Sequence[int], size: StageSize, reserved: tuple[int, int]) -> Request | None:
        """What a rank is asked: all tokens of a step for its blocks, within what its budgets leave for them."""
        request, width, model = self.request, DTYPE_BYTES[self.request.numerics.compute], self._model
        wave = self._size * size.chunks_per_round * size.chunk_tokens
        either = max(spec.num_bytes(wave, width) for spec in (model.hidden, model.hidden_rows))
        handed = (len(model.layers) - 2) * either
        # a rank's own state is counted once more, by the search, if it is on the host
        own = sum(self._state_bytes[group] for block in blocks for group in model.layers[block].groups)
        host = (request.max_host_bytes - sum(self._state_bytes) - handed) // self._size + own - reserved[1]
        gpu = request.max_gpu_bytes - reserved[0]
        if min(host, gpu) <= 0:
            return None
        return replace(
            request, max_gpu_bytes=gpu, max_host_bytes=host, chunk_tokens=size.chunk_tokens, round_tokens=wave, ranks=1,
            round_multiple=1, transport="auto",
            max_global_batch_tokens=max(request.max_global_batch_tokens, request.max_seq_len),
        )  # fmt: skip

    def _priced(self, layouts: Sequence[Layout]) -> Plan:
        """The plan of these layouts with what is predicted of all ranks together."""
        largest = max(layouts, key=lambda layout: layout.gpu_bytes)
        predicted, host = Prediction(), dict[str, int]()
        for layout in layouts:
            for name, num_bytes in host_categories(layout, self._of_rank).items():
                host[name] = host.get(name, 0) + num_bytes
        predicted = replace(
            bytes_planned(largest, predicted, self._of_rank),
            gpu_bytes=max(gpu_required_bytes(layout, self._of_rank) for layout in layouts),
            host_bytes=sum(host_required_bytes(layout, self._of_rank) for layout in layouts),
            host_categories=host,
            shared_host_bytes=largest.node_bytes,
        )
        plan = replace(largest.plan, predicted=priced_together(largest, predicted, self._profile))
        if not plan.speculates:
            return plan
        waits = self._priced(layouts_of(self._model, replace(plan, groups=plan.after_clipping().groups)))
        if waits.predicted.step_s <= plan.predicted.step_s:
            return waits
        return replace(plan, predicted=replace(plan.predicted, after_clipping_s=waits.predicted.step_s))


class _Blocks(NamedTuple):
    """A plan of a rank's blocks, and the homes of each block's groups."""

    plan: Plan
    homes: list[list[GroupPlan]]

    @staticmethod
    def of(model: ModelSpec, plan: Plan) -> _Blocks:
        """model: the rank's blocks between small edges."""
        return _Blocks(plan, [[plan.groups[group] for group in layer.groups] for layer in model.blocks])


def _with_small_edges(model: ModelSpec) -> ModelSpec:
    """The model with an embedding and a head of few tokens, if it has more."""
    if model.vocab_size <= SMALL_VOCABULARY:
        return model
    head = len(model.layers) - 1  # groups behind it are of adapters
    small = build_model(model.name, {**model.hf_config, "vocab_size": SMALL_VOCABULARY})
    edges = {0: model.groups[0], len(small.groups) - 1: model.groups[head]}
    small = freeze_groups(small, {number for number, group in edges.items() if group.frozen})
    last = replace(small.layers[-1], params=tuple((local, head, name) for local, _, name in small.layers[-1].params))
    layers = (small.layers[0], *model.layers[1:-1], last)
    groups = (small.groups[0], *model.groups[1:head], small.groups[-1], *model.groups[head + 1 :])
    return replace(model, vocab_size=SMALL_VOCABULARY, layers=layers, groups=groups)
