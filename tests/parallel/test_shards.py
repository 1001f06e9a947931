"""Ranks that keep shards on their GPUs: programs proven together, what is noticed, where shards lie, and the choice.

`test_several_ranks` holds them to the bits of one rank.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from rank_cases import SHARD

from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.freezing import with_frozen
from flexengine.models.in_parts import in_parts
from flexengine.models.llama import build
from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Numerics, Plan, Request
from flexengine.planner.problem import Problem
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.planner.ranks.shards import plans_with_shards
from flexengine.reports.plan_text import describe
from flexengine.schedule import fixed_slots
from flexengine.schedule.checker import check_program
from flexengine.schedule.commands import Command, SlotOffset, StoredRun, UpdateTile
from flexengine.schedule.group_storage import group_storage
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.checker import check_runs
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.runs import runs_of_ranks
from flexengine.schedule.ranks.split_commands import FoldParts, GatherOwned
from tests.parallel.test_ranks_checker import is_rejected
from tests.parallel.test_split_transport import Change, args, changed, split_plan, without
from tests.schedule.small_plans import divided_model, full_round, mixed_model, random_plan, small_model


def sharded(model: ModelSpec, random: Random, size: int, share: float = 0.7) -> Layout:
    plan = split_plan(random_plan(random, model, sliced=random.random() < 0.3), size)
    kept = [SHARD if home.trained else SHARD.of_frozen() for home in plan.groups]
    homes = [new if random.random() < share else old for old, new in zip(plan.groups, kept, strict=True)]
    homes[-1] = SHARD
    return Layout(model, replace(plan, groups=tuple(homes), weight_slots=random.randint(2, 5)))


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_are_proven(seed, monkeypatch):
    monkeypatch.setattr(fixed_slots, "SQUARED_ELEMENTS", 256)
    random, size = Random(seed), 2 + seed % 3
    models = [small_model(tied=True), mixed_model(), with_frozen(small_model(), ["embed", "block.1"]), small_model()]
    layout = sharded(models[seed % 4], random, size)
    for num_rounds in (1, size + 1):
        runs = runs_of_ranks(layout, full_round(layout), num_rounds)
        check_runs(layout, runs, num_rounds)
        for program in {run.program for rank in runs for run in rank}:
            check_program(program, layout.gpu_bytes, layout.host_bytes, layout.node_bytes)


def moved(kind: str) -> Change:
    """Updates that take a plane from 64 bytes further on."""

    def change(command: Command) -> Command:
        if not isinstance(command.args, UpdateTile):
            return command
        slot, offset = command.args.planes[kind]
        planes = {**command.args.planes, kind: SlotOffset(slot, offset + 64)}
        return replace(command, args=command.args._replace(planes=planes))

    return change


def elsewhere(run: StoredRun) -> StoredRun:
    return run._replace(stored_start=run.stored_start + 64)


CHANGES: dict[str, tuple[Change, tuple[int, ...]]] = {
    "a gather less": (without("gather_owned"), (1,)),
    "shards of other sizes": (args(GatherOwned, counts=lambda counts: counts[::-1]), (0, 1, 2)),
    "shards of other sizes on one rank": (args(GatherOwned, counts=lambda counts: (counts[0] - 64, *counts[1:])), (0,)),
    "the shard of another rank": (args(GatherOwned, rank=lambda rank: (rank + 1) % 3), (0, 1, 2)),
    "the shard of another group": (args(GatherOwned, source=lambda slot: slot + 5), (0, 1, 2)),
    "a gather into another slot": (args(GatherOwned, slot=lambda slot: slot + 1), (1,)),
    "sums elsewhere": (args(FoldParts, runs=lambda runs: tuple(map(elsewhere, runs))), (2,)),
    "no fold": (without("fold"), (1,)),
    "no update": (without("update"), (0,)),
    "nothing stored before": (args(FoldParts, has_previous=lambda _: False), (2,)),
    "gradients of other elements": (moved("grad"), (1,)),
    "weights of other elements": (moved("weights"), (0,)),
    "states of other elements": (moved("exp_avg"), (2,)),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_changes_are_noticed(tied, monkeypatch):
    monkeypatch.setattr(fixed_slots, "SQUARED_ELEMENTS", 256)
    layout = sharded(small_model(blocks=2, tied=tied), Random(2), 3, share=1.0)
    runs: list[list[RankRun]] = runs_of_ranks(layout, full_round(layout), 4)
    check_runs(layout, runs, 4)
    for what, (change, ranks) in CHANGES.items():
        assert is_rejected(layout, changed(runs, change, ranks)), what


def test_sums_of_shards_follow_the_backward_of_the_layer_below():
    """They need multiprocessors, so they take turns with products; those that no block comes after do not wait."""
    layout = sharded(small_model(blocks=3), Random(1), 2, share=1.0)
    layout = Layout(layout.model, replace(layout.plan, share_edge_slots=False))
    first = runs_of_ranks(layout, full_round(layout), 2)[0][0].program.commands
    before, found = "", list[tuple[str, str, str]]()
    for command in first:
        if command.kind == "backward":
            before = str(layout.model.layers[command.args.layer].name)
        if isinstance(command.args, FoldParts):
            found.append((layout.model.groups[command.args.group].name, command.stream.value, before))
    assert found == [
        ("head", "compute", "block.2"),
        ("block.2", "compute", "block.1"),
        ("block.1", "compute", "block.0"),
        ("block.0", "comm", "block.0"),
        ("embed", "comm", "embedding"),
    ]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_shards_are_all_of_each_plane_once(size, monkeypatch):
    monkeypatch.setattr(fixed_slots, "SQUARED_ELEMENTS", 256)
    layout = sharded(mixed_model(), Random(size), size, share=1.0)
    rows = [row for rank in range(size) for row in layout.own_planes(rank)]
    for group, stored in enumerate(layout.groups):
        for kind, num_bytes in stored.plane_bytes.items():
            owner = layout.model.groups[group].name
            own = sorted(row for row in rows if row.kind == kind and row.in_node.key.owner == owner)
            found = sorted((row.node_start, row.num_bytes) for row in own)
            ends = [start + count for start, count in found]
            padding = [start - end for (start, _), end in zip(found[1:], ends, strict=False)]
            assert found[0][0] == 0
            assert ends[-1] == num_bytes
            assert all(0 <= gap < 256 for gap in padding), "segments begin at aligned places"
            assert sum(padding) < 256 * len(stored.segments)
            assert all(row.start + row.num_bytes <= row.on_gpu.num_bytes for row in own)


def test_plans_that_cannot_have_shards_are_refused():
    model = small_model()
    plan = split_plan(random_plan(Random(1), model, sliced=False), 2)
    homes = (SHARD,) * len(plan.groups)
    with pytest.raises(ValueError, match="ranks of one node keep shards, with transport=split"):
        replace(plan, groups=homes, transport="relay")
    with pytest.raises(ValueError, match="ranks of one node keep shards, with transport=split"):
        replace(plan, groups=homes, request=replace(plan.request, nodes=2))
    with pytest.raises(ValueError, match="weights, gradients and states alike"):
        GroupPlan(weights="shard")
    parts = divided_model()
    cut = split_plan(random_plan(Random(1), in_parts(parts), sliced=False), 2)
    with pytest.raises(ValueError, match="cannot lie in shards: its experts cross the link in parts"):
        Layout(parts, replace(cut, in_parts=True, groups=(SHARD,) * len(cut.groups)))
    muon = replace(plan.request, numerics=replace(plan.request.numerics, optimizer="muon"))
    with pytest.raises(ValueError, match="cannot lie in shards: whole matrices are updated at once"):
        Layout(model, replace(plan, groups=homes, request=muon))


def wide_model() -> ModelSpec:
    """A few blocks of Llama 3.1 8B, and a small vocabulary."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 6, "num_attention_heads": 32}
    return build("wide", {"model_type": "llama", "num_key_value_heads": 8, "vocab_size": 32000, **sizes})


@pytest.mark.usefixtures("quick_search")
def test_shards_are_chosen_where_steps_are_short_and_gpus_have_room():
    spec, card = wide_model(), with_gpus(preset("h200"), 4)
    asked = Request(
        2048, 4 * 4096, 60 * GIB, 120 * GIB, ranks=4, chunk_tokens=4096, round_tokens=4096, transport="split"
    )
    plan = plan_for_ranks(spec, asked, card)
    assert plan.shards
    assert plan.predicted.gpu_bytes <= asked.max_gpu_bytes
    assert plan.predicted.host_bytes <= asked.max_host_bytes
    state_bytes = sum(sum(group_storage(g, asked.numerics).plane_bytes.values()) for g in spec.groups)
    assert state_bytes / 4 <= plan.predicted.gpu_categories["shards"] < 1.05 * state_bytes / 4
    assert plan.predicted.busy_s["compute"] > 0.8 * plan.predicted.step_s
    assert Plan.from_json(plan.to_json()) == plan
    assert "in shards on all GPUs" in describe(plan, spec)


@pytest.mark.usefixtures("quick_search")
def test_what_cannot_have_shards_stays_on_the_host():
    """Muon updates whole matrices of blocks, by the GPU."""
    spec, card = small_model(), with_gpus(preset("h200"), 2)
    asked = Request(64, 256, 2 * GIB, 8 * GIB, ranks=2, numerics=Numerics(optimizer="muon"))
    problem = Problem(spec, asked.of_rank, card)
    [plan] = [found.plan for found in plans_with_shards(problem)]
    assert plan.groups == (SHARD, *[GroupPlan(update="gpu")] * len(spec.blocks), SHARD)
    assert problem.fits(problem.layout(plan))


@pytest.mark.usefixtures("quick_search")
def test_shards_leave_the_budget_to_activations():
    """Of the groups that come first in forward as many as have room are kept in shards."""
    spec, card = wide_model(), with_gpus(preset("h200"), 4)
    asked = Request(2048, 4 * 4096, 11 * GIB, 120 * GIB, ranks=4, chunk_tokens=4096, round_tokens=4096)
    problem = Problem(spec, asked.of_rank, card)
    found = [sharded.plan for sharded in plans_with_shards(problem)]
    counts = [sum(home.sharded for home in plan.groups) for plan in found]
    assert counts == sorted(counts, reverse=True)
    assert 0 < counts[-1] < len(spec.groups)
    for plan, count in zip(found, counts, strict=True):
        assert problem.fits(problem.layout(plan))
        assert all(home.sharded for home in plan.groups[:count])
        assert all(home == GroupPlan(update="cpu") for home in plan.groups[count:])
