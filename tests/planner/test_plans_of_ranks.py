"""How fast plans of several GPUs are, all ranks simulated together."""

from __future__ import annotations

from dataclasses import replace

import pytest
from family_configs import CASES as FAMILIES

from flexengine import LoRA
from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.freezing import with_frozen
from flexengine.models.lora import with_lora
from flexengine.models.registry import build_model, open_model
from flexengine.plan import Numerics, PlanError, Request
from flexengine.planner.feasibility.shortage import ShortageError
from flexengine.planner.limits import LIMITS
from flexengine.planner.ranks.fewer import beside_fewer_gpus
from flexengine.planner.ranks.plan import (
    AGAIN,
    AS_RELAY,
    AS_SPLIT,
    KINDS,
    OTHER_SIZES,
    SPECULATION,
    NodeProblem,
    plan_for_ranks,
)
from flexengine.planner.ranks.price import priced_together
from flexengine.planner.ranks.split import laid_out_as_split
from flexengine.planner.variants import fastest
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round
from flexengine.schedule.ranks.checker import check_runs
from flexengine.schedule.ranks.runs import runs_of_ranks


@pytest.mark.long
def test_four_gpus_are_four_times_as_fast_as_one():
    spec, numerics = open_model("preset:llama-3.1-8b").spec, Numerics(state="bfloat16")
    one = Request(2048, 131072, 24 * GIB, 110 * GIB, 16384, 131072, numerics=numerics)
    four = replace(one, max_global_batch_tokens=4 * 131072, max_host_bytes=440 * GIB, ranks=4, transport="relay")
    alone, together = (plan_for_ranks(spec, r, with_gpus(preset("h200"), r.ranks)).predicted for r in (one, four))
    assert 4 * alone.step_s / together.step_s > 4.0


@pytest.mark.parametrize(("name", "gpu_gib"), [("llama-3.2-1b", 1.6), ("qwen3-30b-a3b", 2.5)])
def test_adapters_on_ranks_that_have_one_slot_or_parts(name, gpu_gib):
    """Budgets that leave blocks one slot for weights, or cut their experts."""
    spec = open_model(f"preset:{name}").spec
    spec = with_lora(spec.with_layers([0, 1, 2, len(spec.layers) - 1]), LoRA(modules_to_save="norm"))
    request = Request(1024, 4096, int(gpu_gib * GIB), 60 * GIB, ranks=2, transport="relay")
    plan = plan_for_ranks(spec, request, with_gpus(preset("h100"), 2))
    assert plan.in_parts if name.startswith("qwen3") else plan.weight_slots == 1
    layout = Layout(spec, plan)
    assert layout.gpu_bytes <= plan.predicted.gpu_bytes <= request.max_gpu_bytes
    shape = full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round)
    check_runs(layout, runs_of_ranks(layout, shape, 3), 3)


@pytest.mark.usefixtures("quick_search")
def test_ranks_without_a_share_of_a_gradient_gather_as_often_as_others():
    """The head's gradient is too small for three shares and takes the place of weights, of which all lose theirs."""
    spec = with_frozen(build_model("small", FAMILIES["deepseek_v2, groups, biases, scaled"]), ["embed", "block.0"])
    numerics = Numerics("float32", "full", "float32", "float32")
    request = Request(
        32, 192, GIB, 12 * GIB, chunk_tokens=16, round_tokens=48, recompute="full", numerics=numerics, clipping=False,
        ranks=3, round_multiple=6, transport="split",
    )  # fmt: skip
    plan = plan_for_ranks(spec, request, preset("cpu-test"))
    layout = Layout(spec, replace(plan, share_edge_slots=True))
    assert any(0 in section.counts for group in range(len(spec.groups)) for section in layout.sections(group, 0))
    runs = runs_of_ranks(layout, full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round), 3)
    check_runs(layout, runs, 3)


@pytest.mark.usefixtures("quick_search")
def test_updates_before_the_norm_are_tried_in_other_sizes():
    """What waits for its norm fastest, 4096 tokens a chunk, is 2% slower than 8192 where both update early."""
    spec = open_model("preset:llama-3.1-8b").spec
    spec = spec.with_layers([0, 1, 2, 3, 4, len(spec.layers) - 1])
    request = Request(2048, 16384, int(7.4 * GIB), 52 * GIB, round_tokens=8192, ranks=2, transport="split")
    node = NodeProblem(spec, request, with_gpus(preset("a100-40"), 2))
    plan = fastest((AS_SPLIT, SPECULATION, OTHER_SIZES), node)
    assert plan is not None
    assert (node.of_one.chunk_tokens, plan.chunk_tokens, plan.speculates) == (4096, 8192, True)


@pytest.mark.usefixtures("quick_search")
def test_ranks_update_early_what_the_search_has_the_cpu_update_where_the_host_lacks_room_for_more():
    """It has second planes for blocks, not for embedding and head, which the CPU would update first."""
    spec = open_model("preset:llama-3.1-8b").spec
    spec = spec.with_layers([0, 1, 2, 3, 4, len(spec.layers) - 1])
    request = Request(2048, 16384, int(7.4 * GIB), 36 * GIB, round_tokens=8192, ranks=2, transport="split")
    node = NodeProblem(spec, replace(request, recompute="full"), with_gpus(preset("a100-40"), 2))
    waits = AS_SPLIT.planned(node, None)
    early = OTHER_SIZES.planned(node, waits)
    assert waits is not None
    assert early is not None
    assert early.speculates
    assert {home.update for home in early.groups} == {"cpu", "gpu"}
    assert early.predicted.step_s < waits.predicted.step_s


@pytest.mark.usefixtures("quick_search")
def test_ranks_that_reach_each_other_through_the_host_keep_adapters_in_shards():
    spec = open_model("preset:llama-3.2-1b").spec
    spec = with_lora(spec.with_layers([0, 1, 2, len(spec.layers) - 1]), LoRA())
    request = Request(2048, 4096, 3 * GIB, 60 * GIB, ranks=2)
    node = NodeProblem(spec, request, with_gpus(preset("rtx-4090"), 2))
    plan, relayed = plan_for_ranks(spec, request, node.profile), KINDS["relay"].planned(node, None)
    assert plan.transport == "split"
    assert relayed is not None
    assert [home.sharded for home in plan.groups] == [group.adapter for group in spec.groups]
    assert plan.predicted.step_s < 0.8 * relayed.predicted.step_s


@pytest.mark.parametrize(("gpu_gib", "relayed"), [(4.0, True), (2.6, False)])
def test_ranks_that_split_keep_what_is_slower_with_relays(gpu_gib, relayed):
    """With relays links are full of weights, so that the search recomputes; ranks that split send outputs meanwhile.
    In 2.6 GiB what the search chooses for relays has no room for the slots of a split."""
    spec = open_model("preset:llama-3.1-8b").spec
    spec = with_lora(spec.with_layers([0, 1, 2, 3, 4, len(spec.layers) - 1]), LoRA())
    sizes = {"chunk_tokens": 2048, "ranks": 4, "transport": "split", "clipping": False}
    request = Request(2048, 8192, int(gpu_gib * GIB), 60 * GIB, **sizes)
    node = NodeProblem(spec, request, with_gpus(preset("a100-40"), 4), limits=LIMITS.quick)
    first, again = (fastest(kinds, node) for kinds in ((AS_SPLIT,), (AS_SPLIT, AGAIN)))
    assert again is not None
    assert node.of_rank.fits(node.of_rank.layout(replace(again, request=node.of_rank.request)))
    assert (first is not None) == relayed
    assert first is None or again.predicted.step_s < 0.95 * first.predicted.step_s


@pytest.mark.usefixtures("quick_search")
def test_fewer_gpus_are_told_of_where_they_take_the_same_step_faster():
    """Of four ranks whose step is said to take long, as where the host is their limit: two, or one where two lack."""
    spec, profile = build_model("small", FAMILIES["qwen2"]), preset("cpu-test")
    sizes = {"chunk_tokens": 16, "round_tokens": 32, "numerics": Numerics("float32", "full", "float32", "float32")}
    request = Request(16, 64, GIB, 12 * GIB, ranks=4, transport="relay", **sizes)
    plan = plan_for_ranks(spec, request, profile)
    alone = {n: plan_for_ranks(spec, replace(request, ranks=n), profile).predicted.step_s for n in (1, 2)}
    least_s = min(alone.values())
    for step_s, share in ((1.01 * least_s, 1.0), (1e3, 0.0)):
        slow = replace(plan.predicted, step_s=step_s, busy_s={"compute": step_s}, recompute_share=1.0 - share)
        told = beside_fewer_gpus(spec, replace(plan, predicted=slow), profile).predicted
        tried = {1: alone[1]} if share else alone  # two cannot compute in its time what four are busy with
        fastest_s = min(tried.values())
        found = (told.fewer_gpus, told.fewer_gpus_step_s)
        assert found == ((min(tried, key=tried.__getitem__), fastest_s) if fastest_s < step_s else (0, 0.0))
    busy = replace(plan.predicted, step_s=1e-9)
    assert not beside_fewer_gpus(spec, replace(plan, predicted=busy), profile).predicted.fewer_gpus
    # of two sequences two ranks compute nothing that counts: two can do in their time what four are busy with
    two = plan_for_ranks(spec, replace(request, max_global_batch_tokens=32, round_tokens=16, ranks=2), profile)
    slow = replace(plan.predicted, step_s=1e3, busy_s={"compute": 900.0}, recompute_share=0.0)
    short = replace(plan, request=replace(two.request, ranks=4), predicted=slow)
    told = beside_fewer_gpus(spec, short, profile).predicted
    assert (told.fewer_gpus, told.fewer_gpus_step_s) == (2, two.predicted.step_s)


@pytest.mark.usefixtures("quick_search")
def test_one_gpu_is_advised_where_more_would_need_more_host_memory():
    """Each rank's process takes 3 GiB. What is pinned does not work, and no other transport would."""
    spec, node = open_model("preset:tiny-llama3-150m").spec, with_gpus(preset("h100"), 4)
    request = Request(32768, 32768, int(1.6 * GIB), 6 * GIB, ranks=4)
    with pytest.raises(
        ShortageError, match=r"fits with: --gpus 1 \(.* all 6.00 GiB of host memory\), or --max-host-mem"
    ) as refused:
        plan_for_ranks(spec, request, node)
    alone = plan_for_ranks(spec, refused.value.remedies[0].request, node)
    assert alone.request.ranks == 1
    assert alone.predicted.host_bytes <= request.max_host_bytes
    with pytest.raises(PlanError, match=r"with --transport context .* 4 GPUs .*\n  nor does --transport auto fit"):
        plan_for_ranks(spec, replace(request, transport="context"), node)
    relayed = Request(16384, 16384, int(1.4 * GIB), 16 * GIB, ranks=4, transport="stages")
    with pytest.raises(PlanError, match=r"found no plan in stages .*\n  works with: --transport auto"):
        plan_for_ranks(spec, relayed, node)


@pytest.mark.usefixtures("quick_search")
def test_the_cpu_makes_all_updates_where_ranks_would_wait_for_those_of_gpus():
    """The search of one rank has the GPU update embedding and head, for which all ranks together would wait longer."""
    spec, profile = open_model("preset:llama-3.1-8b").spec, with_gpus(preset("h200"), 2)
    request = Request(
        2048, 65536, 24 * GIB, 220 * GIB, numerics=Numerics(state="bfloat16"), graphs="never", segment_blocks=1,
        ranks=2, transport="relay",
    )  # fmt: skip
    plan = plan_for_ranks(spec, request, profile)
    assert {home.update for home in plan.groups} == {"cpu"}
    edges = (replace(plan.groups[0], update="gpu"), *plan.groups[1:-1], replace(plan.groups[-1], update="gpu"))
    with_gpu = priced_together(Layout(spec, replace(plan, groups=edges)), plan.predicted, profile)
    assert plan.predicted.step_s < 0.99 * with_gpu.step_s


@pytest.mark.usefixtures("quick_search")
def test_ranks_make_again_what_would_wait_on_the_host_that_all_of_them_copy_through():
    """The search of one rank has the link to itself, and sends outputs of attention to the host."""
    spec, sizes = open_model("preset:olmoe-1b-7b").spec, (2048, 65536, int(8.1 * GIB), 256 * GIB)
    request = Request(*sizes, numerics=Numerics(state="float32"), ranks=4, transport="relay", whole_steps=True)
    node = NodeProblem(spec, request, with_gpus(preset("rtx-4090"), 4))
    plan, searched = plan_for_ranks(spec, request, node.profile), AS_RELAY.planned(node, None)
    assert searched is not None
    assert any(layer.keep_host for layer in searched.layers)
    assert not any(layer.keep_host for layer in plan.layers)
    assert plan.predicted.step_s < 0.95 * searched.predicted.step_s


def test_ranks_that_deal_states_split_with_less_memory_where_slots_need_it():
    """A step of dealt states is found for ranks that relay; one that splits has larger slots than that leaves room."""
    spec, profile = open_model("preset:qwen3-0.6b", needs_weights=False).spec, with_gpus(preset("h100-80"), 4)
    request = Request(1024, 65536, 5 * GIB, 21 * GIB, ranks=4, chunk_tokens=4096, round_tokens=16384)
    node = NodeProblem(spec, request, profile)
    as_found = laid_out_as_split(node.of_rank, node.of_one)
    assert not node.of_rank.fits(node.of_rank.layout(as_found))
    plan = plan_for_ranks(spec, request, profile)
    assert (plan.transport, plan.deals_states) == ("split", True)
    layout = Layout(spec, plan)
    check_runs(layout, runs_of_ranks(layout, full_round(plan.request, plan.chunk_tokens, plan.chunks_per_round), 4), 4)
    assert plan.predicted.step_s < node.priced(node.of_one).predicted.step_s


@pytest.mark.usefixtures("quick_search")
def test_host_memory_is_advised_for_as_many_dealt_states_as_gpus_have_room_for():
    """A GPU of 17 GiB holds a quarter of every other group's states, not of all."""
    spec, profile = open_model("preset:llama-3.1-8b", needs_weights=False).spec, with_gpus(preset("h100-80"), 4)
    request = Request(1024, 65536, 17 * GIB, 40 * GIB, ranks=4, chunk_tokens=4096, round_tokens=16384)
    with pytest.raises(ShortageError) as refused:
        plan_for_ranks(spec, request, profile)
    remedy = refused.value.remedies[0].request
    plan = plan_for_ranks(spec, remedy, profile)
    assert {home.states for home in plan.groups} == {"dealt", "host"}
    assert plan.predicted.host_bytes <= remedy.max_host_bytes
