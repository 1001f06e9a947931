"""Ranks that train in stages: programs proven together, prices, the planner's choice, and what is refused.

`test_several_ranks` holds them to the bits of one rank.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from itertools import pairwise, product
from random import Random

import pytest
from rank_cases import projector
from thorough import cases

from flexengine import LoRA
from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.freezing import with_frozen
from flexengine.models.lora import with_lora
from flexengine.models.registry import build_model, open_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Numerics, Plan, PlanError, Request
from flexengine.planner import limits
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.problem import Problem
from flexengine.planner.ranks import stages
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.planner.ranks.stages import stage_sizes
from flexengine.planner.variants import Found, Variant, fastest
from flexengine.reports.picture import Picture
from flexengine.reports.plan_text import report
from flexengine.schedule import fixed_slots, pieces
from flexengine.schedule.checker import check_program
from flexengine.schedule.commands import Command, CopyRegion, FinishGradient, Signal
from flexengine.schedule.programs import lower_evaluation
from flexengine.schedule.ranks import checker as ranks_checker
from flexengine.schedule.ranks.checker import check_runs
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.runs import runs_of_ranks
from flexengine.schedule.ranks.simulator import simulate_ranks
from flexengine.schedule.ranks.stage_layout import StageLayout
from flexengine.schedule.ranks.stages import HandedOver, StageSemaphores
from flexengine.schedule.ranks.transports import layouts_of
from tests.parallel.test_ranks_checker import (
    Change,
    awaiting,
    is_rejected,
    signalling,
    without_awaits,
    without_signals,
)
from tests.parallel.test_split_transport import changed
from tests.schedule.small_plans import full_round, mixed_model, random_plan, small_model

# -- programs of all ranks -------------------------------------------------------------------------------------------


def in_stages(plan: Plan, size: int, update: str = "cpu") -> Plan:
    """The plan with blocks that have a rank, and edges whose shares are updated by one processor."""
    groups, request = list(plan.groups), replace(plan.request, ranks=size)
    for group in (0, len(plan.layers) - 1):
        groups[group] = GroupPlan(update=update) if groups[group].trained else GroupPlan(update="none")
    return replace(plan, transport="stages", groups=tuple(groups), request=request)


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_are_proven(seed, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 15)
    monkeypatch.setattr(fixed_slots, "SQUARED_ELEMENTS", 256)
    random, size = Random(seed), 2 + seed % 2
    model = small_model(blocks=3 + seed % 3) if seed % 3 else mixed_model(blocks=5)
    model = with_lora(model, LoRA(rank=2)) if seed in (2, 3) else model
    plan = in_stages(random_plan(random, model, seed % 4 == 1, segments=False), size, random.choice(["cpu", "gpu"]))
    layouts = layouts_of(model, plan)
    assert len({layout.node_bytes for layout in layouts}) == 1
    for num_rounds in (1, size, size + 1):
        runs = runs_of_ranks(layouts[0], full_round(layouts[0]), num_rounds)
        check_runs(layouts[0], runs, num_rounds)
    for layout, of_rank in zip(layouts, runs, strict=True):
        evaluation = lower_evaluation(layout, full_round(layout))
        for program in {run.program for run in of_rank} | {evaluation}:
            check_program(program, layout.gpu_bytes, layout.host_bytes, layout.node_bytes)


@pytest.mark.parametrize("ways", ranks_checker.WAYS, ids="-".join)
@pytest.mark.parametrize("seed", cases(range(3), range(1)))
def test_speculating_plans_are_proven_whatever_came_before(seed, ways, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 15)
    monkeypatch.setattr(fixed_slots, "SQUARED_ELEMENTS", 256)
    random, size, model = Random(seed), 2 + seed % 2, small_model(blocks=4)
    plan = in_stages(random_plan(random, model, seed == 1, segments=False), size, "gpu" if seed == 2 else "cpu")
    bold = GroupPlan(update="cpu", speculative=True)
    groups = (plan.groups[0], bold, *(random.choice([bold, home]) for home in plan.groups[2:-1]), plan.groups[-1])
    plan = replace(plan, groups=groups, request=replace(plan.request, clipping=True))
    layouts = layouts_of(model, plan)
    for num_rounds in (1, size + 1):
        runs = runs_of_ranks(layouts[0], full_round(layouts[0]), num_rounds, ways)
        check_runs(layouts[0], runs, num_rounds)
        for layout, of_rank in zip(layouts, runs, strict=True):
            for program in {run.program for run in of_rank}:
                check_program(program, layout.gpu_bytes, layout.host_bytes, layout.node_bytes)


def small_runs() -> tuple[StageLayout, list[list[RankRun]]]:
    """Four rounds on three ranks: a wave of three, and one of one."""
    model = small_model(blocks=4)
    layout = layouts_of(model, in_stages(random_plan(Random(1), model, sliced=False, segments=False), 3))[0]
    return layout, runs_of_ranks(layout, full_round(layout), 4)


def semaphores(layout: StageLayout) -> dict[str, int]:
    """One semaphore of each kind: those of a chunk of the second round that no later one of the round implies."""
    found: StageSemaphores = layout.semaphores
    chunk, last = layout.plan.chunks_per_round, 2 * layout.plan.chunks_per_round - 1
    return {
        "forward": found.handed(HandedOver(3, chunk, back=False, taken=False)).semaphore,
        "backward": found.handed(HandedOver(3, chunk, back=True, taken=False)).semaphore,
        "to the head": found.handed(HandedOver(5, chunk, back=False, taken=False)).semaphore,
        "from the head": found.handed(HandedOver(5, last, back=True, taken=False)).semaphore,
        "relay": found.relayed(0).semaphore,
        "embedding": found.updated(head=False).semaphore,
        "head": found.updated(head=True).semaphore,
        "norm": found.norm().semaphore,
    }


def test_cells_that_change_are_noticed():
    """Each signal dropped, raised late or in another semaphore; each wait dropped, or for another row or value."""
    layout, runs = small_runs()
    check_runs(layout, runs, 4)
    for name, semaphore in semaphores(layout).items():
        rows = {
            s.of
            for rank in runs
            for run in rank
            for c in run.program.commands
            for s in c.awaits
            if s.semaphore == semaphore
        }
        others = {0, 1, 2} - rows if rows != {"all"} else {"own"}
        changes = [
            without_signals(semaphore),
            without_awaits(semaphore),
            signalling(semaphore, lag=1),
            signalling(semaphore, semaphore=9999),
        ]
        changes += [awaiting(semaphore, semaphore=9999), awaiting(semaphore, lag=-1), awaiting(semaphore, lag=2)]
        changes += [awaiting(semaphore, of=other) for other in others]
        for number, change in enumerate(changes):
            assert is_rejected(layout, changed(runs, change)), (
                f"change {number} of semaphore {semaphore} ({name}): {rows}"
            )


def handed(change: Change, *, back: bool, taken: bool) -> Change:
    """Change one copy of a chunk that is handed over at a border between blocks."""

    def of_command(command: Command) -> Command:
        what = command.args
        if isinstance(what, HandedOver) and what == HandedOver(3, 1, back=back, taken=taken):
            return change(command)
        return command

    return of_command


def to_another_place(layout: StageLayout) -> Change:
    """The copy of one rank takes or leaves another chunk."""
    place, other = (layout.slot("handed", 3, c, "node") for c in (1, 2))

    def elsewhere(region: CopyRegion) -> CopyRegion:
        source, target = ((other if slot == place else slot) for slot in (region.source, region.target))
        return region._replace(source=source, target=target)

    return lambda command: replace(command, copies=tuple(map(elsewhere, command.copies)))


def without_layer(kind: str, layer: int) -> Change:
    """A rank leaves a layer out for a chunk."""

    def change(command: Command) -> Command | None:
        left_out = command.kind == kind and (command.args.layer, command.args.chunk) == (layer, 1)
        return None if left_out else command

    return change


def of_gradients(group: int, **values: object) -> Change:
    """Other values in the arguments of the commands that add a group's gradient up."""

    def change(command: Command) -> Command:
        args = command.args
        if not isinstance(args, FinishGradient) or args.group != group:
            return command
        return replace(command, args=args._replace(**values))

    return change


def test_what_is_handed_over_or_added_up_otherwise_is_noticed():
    layout, runs = small_runs()
    for layout_of_rank in layouts_of(layout.given, layout.plan)[1:]:
        ranks = (layout_of_rank.stage.rank,)
        for back, taken in product((False, True), repeat=2):
            if (ranks[0] == 2) == (back != taken):  # block 1 is on rank 1, block 2 on rank 2
                change = handed(to_another_place(layout_of_rank), back=back, taken=taken)
                assert is_rejected(layout, changed(runs, change, ranks)), (back, taken)
    changes = {
        "a layer less forward": without_layer("forward", 2),
        "a layer less backward": without_layer("backward", 2),
        "a head less": without_layer("backward", 5),
        "blocks that forget": of_gradients(2, has_previous=False),
        "blocks that remember": of_gradients(2, has_previous=True),
        "a head that forgets": of_gradients(5, has_previous=False),
        "a gradient less": lambda c: None if c.kind == "finish_gradient" and c.args.group == 3 else c,
    }
    for what, change in changes.items():
        assert is_rejected(layout, changed(runs, change)), what
    waves = [runs[0], [run if run.updates else run._replace(program=runs[0][0].program) for run in runs[1]], runs[2]]
    assert is_rejected(layout, waves), "the blocks of another rank"
    assert is_rejected(layout, [[*runs[0][:1], *runs[0][2:]], *runs[1:]]), "a wave less on one rank"


def test_ranks_that_take_before_they_leave_wait_in_a_circle():
    """The forward pass of a rank would await the gradient that follows from it."""
    layout, runs = small_runs()
    forward, backward = (
        layout.semaphores.handed(HandedOver(3, 1, back=back, taken=False)).semaphore for back in (False, True)
    )

    def swapped(signal: Signal) -> Signal:
        return signal._replace(semaphore=backward, of=(1 + signal.of) % 3) if signal.semaphore == forward else signal

    with pytest.raises(AssertionError, match="circle"):
        check_runs(layout, changed(runs, lambda c: replace(c, awaits=tuple(map(swapped, c.awaits)))), 4)


# -- prices ----------------------------------------------------------------------------------------------------------


def request(gpus: int, tokens: int, **more: object) -> Request:
    numerics = Numerics(state="bfloat16")
    return Request(2048, gpus * tokens, 23 * GIB, gpus * 110 * GIB, numerics=numerics, ranks=gpus, **more)


def pinned(transport: str) -> Request:
    """Sizes are those that the search finds, which takes as long as the rest of a plan."""
    return request(2, 4096, transport=transport, chunk_tokens=2048, round_tokens=4096)


@pytest.fixture(scope="module")
def planned() -> tuple[ModelSpec, Plan]:
    """A short step on two cards without a fast link between them."""
    spec = open_model("preset:llama-3.2-3b-untied").spec
    return spec, plan_for_ranks(spec, pinned("auto"), with_gpus(preset("rtx4090"), 2))


def test_short_steps_are_trained_in_stages(planned):
    spec, plan = planned
    assert plan.transport == "stages"
    assert Plan.from_json(plan.to_json()) == plan
    relay = plan_for_ranks(spec, pinned("relay"), with_gpus(preset("rtx4090"), 2))
    assert plan.predicted.step_s < 0.8 * relay.predicted.step_s
    assert plan.predicted.gpu_bytes <= 23 * GIB
    assert any(home.states == "gpu" for home in plan.groups)
    told = report(Picture(plan, spec, with_gpus(preset("rtx4090"), 2)))
    assert "GPU 0 has 0, 2, 4, ...; GPU 1 has 1, 3, 5, ..." in told
    assert "handed over" in told


def test_experts_with_adapters_cross_one_link_once_in_each_pass():
    """Ranks that relay fetch all experts each, and wait for one host memory; in stages each fetches its blocks'."""
    spec = open_model("preset:qwen3-30b-a3b").spec
    spec = with_lora(spec.with_layers([0, 1, 2, len(spec.layers) - 1]), LoRA(["all-linear", "all-experts"]))
    asked = Request(
        1024, 4096, 6 * GIB, 60 * GIB, chunk_tokens=1024, round_tokens=2048, ranks=2, transport="stages"
    )  # fmt: skip
    plan = plan_for_ranks(spec, asked, with_gpus(preset("rtx5090"), 2))
    layouts = layouts_of(spec, plan)
    runs = runs_of_ranks(layouts[0], full_round(layouts[0]), 2)
    check_runs(layouts[0], runs, 2)
    for rank, (layout, (wave, *_)) in enumerate(zip(layouts, runs, strict=True)):
        fetched = (layout.slots[region.source].key for command in wave.program.commands for region in command.regions)
        blocks = {key.owner for key in fetched if key.role == "weights" and key.owner not in ("embed", "head")}
        assert blocks <= {f"block.{rank}", f"adapter.{rank}"}
        assert {group for group, home in enumerate(layout.homes) if home.trained} == {len(spec.layers) + rank}


def test_adapters_that_gpus_have_no_room_for_live_on_the_host():
    spec = open_model("preset:qwen3-30b-a3b").spec
    spec = with_lora(spec.with_layers([0, 1, 2, 3, 4, len(spec.layers) - 1]), LoRA("all-experts", rank=64))
    asked = Request(
        1024, 4096, 4 * GIB, 60 * GIB, chunk_tokens=1024, round_tokens=2048, ranks=2, transport="stages"
    )  # fmt: skip
    plan = plan_for_ranks(spec, asked, with_gpus(preset("rtx5090"), 2))
    assert {home.weights for home in plan.groups[len(spec.layers) :]} == {"host"}
    assert plan.predicted.gpu_bytes <= 4 * GIB


def test_rounds_of_one_chunk_spare_the_host_that_issues_many_commands():
    """Blocks of many experts compute for less time than their commands take to issue."""
    config = open_model("preset:qwen3-30b-a3b").spec.hf_config
    spec = build_model("few blocks", {**config, "num_hidden_layers": 6, "vocab_size": 1024})
    asked = Request(2048, 8192, 100 * GIB, 200 * GIB, ranks=2, transport="stages")
    plan = plan_for_ranks(spec, asked, with_gpus(preset("h200"), 2))
    assert (plan.chunk_tokens, plan.chunks_per_round) == (4096, 1)
    of_two = plan_for_ranks(spec, replace(asked, chunk_tokens=2048), with_gpus(preset("h200"), 2))
    assert plan.predicted.step_s < of_two.predicted.step_s


def test_stages_far_slower_than_another_plan_are_searched_quickly_in_the_first_size_that_fits(planned, monkeypatch):
    spec, plan = planned
    searched = list[Problem]()

    def noted(kinds: tuple[Variant[Problem, Found], ...], problem: Problem) -> Found | None:
        searched.append(problem)
        return fastest(kinds, problem)

    monkeypatch.setattr(stages, "fastest", noted)
    faster = replace(plan, predicted=replace(plan.predicted, step_s=plan.predicted.step_s / 2))
    asked = request(2, 4096, transport="stages", chunk_tokens=2048)  # in rounds of two chunks, else of one
    assert stages.fastest_in_stages(spec, asked, with_gpus(preset("rtx4090"), 2), faster) is None
    assert {problem.limits.finalists for problem in searched} == {limits.LIMITS.quick.finalists}
    assert {problem.request.round_tokens for problem in searched} == {2 * 4096}
    assert [problem.request.recompute for problem in searched].count("full") > 0
    searched.clear()
    stages.fastest_in_stages(spec, replace(asked, recompute="none"), with_gpus(preset("rtx4090"), 2), faster)
    assert {problem.request.recompute for problem in searched} == {"none"}


def test_ranks_may_make_again_all_that_would_wait_on_their_one_host(planned):
    spec, _ = planned
    search = stages._Search(spec, pinned("stages"), with_gpus(preset("rtx4090"), 2), quick=True)
    plan = search.planned(stages.StageSize(2048, 2), stages.Way(in_full=True))
    assert plan is not None
    assert not any(layer.keep_gpu or layer.keep_host for layer in plan.layers)
    assert plan.request.recompute == "auto", "nobody asked for it"


def test_a_simulated_step_runs_every_layer_once_for_every_chunk_in_order(planned):
    spec, plan = planned
    layouts = layouts_of(spec, plan)
    rates = CostModel.of(plan.request, with_gpus(preset("rtx4090"), 2), plan.chunk_tokens).rates()
    seconds: dict[tuple[str, int, int], list[tuple[float, float]]] = defaultdict(list)
    relayed: dict[str, list[tuple[float, int]]] = defaultdict(list)
    for rank, (_, timed) in enumerate(simulate_ranks(layouts[0], rates).ranks):
        for command, start, end in zip(timed.run.program.commands, *timed.timing[:2], strict=True):
            if command.kind in ("forward", "backward"):
                key = command.kind, command.args.layer, command.args.chunk
                seconds[key].append((timed.start_s + start, timed.start_s + end))
            elif str(command.name).startswith("offload grad head piece"):
                relayed[str(command.name)].append((timed.start_s + end, rank))
    head = layouts[0].stage.head
    order = [("forward", layer) for layer in range(head)] + [("backward", layer) for layer in range(head, -1, -1)]
    for chunk in range(plan.num_chunks):
        times = [seconds.pop((kind, layer, chunk)) for kind, layer in order]
        assert [len(found) for found in times] == [1] * len(order)
        assert all(before[0][1] <= after[0][0] for before, after in pairwise(times))
    assert not seconds
    assert relayed
    assert all([rank for _, rank in sorted(found)] == [0, 1] for found in relayed.values())


# -- what is asked for -----------------------------------------------------------------------------------------------


def test_sizes_are_those_that_are_pinned():
    asked = request(2, 4096, transport="stages")
    assert stage_sizes(asked) == [[(2048, 2), (2048, 1)], [(4096, 1)]]
    assert stage_sizes(replace(asked, chunk_tokens=1024)) == [[(1024, 4), (1024, 2)]]
    assert stage_sizes(replace(asked, chunk_tokens=2048, round_tokens=2048)) == [[(2048, 1)]]
    with pytest.raises(PlanError, match="not a multiple"):
        plan_for_ranks(small_model(), replace(asked, chunk_tokens=1500, round_tokens=2048), preset("rtx4090"))


REFUSED = {
    "tied": (small_model(tied=True), {}, "its head is tied to the embedding"),
    "modules": (with_lora(small_model(), LoRA(modules_to_save="norm")), {}, "a part of its embedding or head is"),
    "frozen": (with_frozen(small_model(), ["block.1"]), {}, "nothing is trained of some block"),
    "few blocks": (small_model(blocks=1), {}, "it has 1 block.s. for 2 ranks"),
    "images": (projector().source.spec, {}, "it has a tower, whose rows come with the embedding"),
    "nodes": (small_model(), {"nodes": 2}, "there are several nodes"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_trained_in_stages_is_refused(what):
    model, more, reason = REFUSED[what]
    asked = replace(request(2, 4096, transport="stages"), **more)
    with pytest.raises(PlanError, match=f"cannot be trained in stages: {reason}.*\n  works with: --transport auto"):
        plan_for_ranks(model, asked, with_gpus(preset("rtx4090"), 2))


def test_plans_that_cannot_be_are_refused():
    model = small_model()
    plan = in_stages(random_plan(Random(1), model, sliced=False, segments=False), 2)
    with pytest.raises(ValueError, match="of several ranks of a node"):
        replace(plan, request=replace(plan.request, ranks=1))
    with pytest.raises(ValueError, match="which lie on the host"):
        replace(plan, groups=(GroupPlan("gpu", "gpu", "gpu"), *plan.groups[1:]))
    with pytest.raises(ValueError, match="experts are streamed whole"):
        replace(plan, in_parts=True)
    with pytest.raises(ValueError, match="tied to the embedding"):
        layouts_of(small_model(tied=True), plan)
