"""The planner's parts: dynamic programme against brute force, bytes against layouts, surrogate against simulator."""

from itertools import combinations_with_replacement
from random import Random
from typing import Any

import numpy as np
import pytest
from thorough import cases

from flexengine.hardware.presets import preset
from flexengine.models.blocks import PART_ELEMENTS
from flexengine.models.freezing import with_frozen
from flexengine.models.in_parts import in_parts
from flexengine.models.lora import with_lora
from flexengine.models.registry import build_model, open_model
from flexengine.native import rounds
from flexengine.ops.base import Work
from flexengine.options.lora import LoRA
from flexengine.plan import GroupPlan, Numerics, Request
from flexengine.planner.candidates import CandidateMemory, Candidates
from flexengine.planner.cost.cost_model import GROUPED_SHARE, CostModel, price, step_seconds
from flexengine.planner.cost.memory import gpu_required_bytes, host_required_bytes
from flexengine.planner.cost.save_sets import ever_smaller_sets, frontier, recompute_s
from flexengine.planner.cost.stream_loads import STREAMED
from flexengine.planner.dynamic_program import frontier_of
from flexengine.planner.planner import make_plan
from flexengine.planner.problem import Problem
from flexengine.planner.search import Search
from flexengine.planner.shared_buffers import SharedBuffers
from flexengine.planner.size_tables import SizeTables
from flexengine.planner.surrogate import Surrogate
from flexengine.reports.plan_text import describe
from flexengine.schedule.group_storage import group_storage
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round
from flexengine.schedule.programs import lower_round
from flexengine.schedule.save_sets import save_sets
from tests.family_configs import CASES
from tests.planner.oracle import slow_link
from tests.schedule.small_plans import FLOAT32, divided_model, mixed_model, small_model


@pytest.mark.parametrize("seed", range(5))
def test_the_dynamic_programme_finds_the_best_multiset(seed):
    random = np.random.default_rng(seed)
    num_bytes, cost = random.integers(0, 100, 6), random.random(6)
    frontier = frontier_of(num_bytes[None], cost[None], np.arange(6), [5], 10_000, 48)
    assert frontier is not None
    for budget in (0, 100, 200, 300, 500):
        fitting = [c for c in combinations_with_replacement(range(6), 5) if num_bytes[list(c)].sum() <= budget]
        best = min((cost[list(c)].sum() for c in fitting), default=None)
        point = int(frontier.best_within(np.array([budget]))[0])
        assert (point < 0) == (best is None)
        if point >= 0:
            assert frontier.cost[point] == pytest.approx(best, rel=0.02)
            counts = frontier.counts(point)
            assert sum(counts.values()) == 5
            assert sum(int(num_bytes[o]) * n for o, n in counts.items()) <= budget


def test_the_dynamic_programme_of_two_kinds_is_that_of_all_blocks():
    random = np.random.default_rng(7)
    num_bytes, cost = random.integers(0, 50, (2, 4)), random.random((2, 4))
    frontier = frontier_of(num_bytes, cost, np.arange(4), [2, 3], 10_000, 48)
    assert frontier is not None
    for budget in (60, 100, 150):
        best = min(
            (
                cost[0, list(a)].sum() + cost[1, list(b)].sum()
                for a in combinations_with_replacement(range(4), 2)
                for b in combinations_with_replacement(range(4), 3)
                if num_bytes[0, list(a)].sum() + num_bytes[1, list(b)].sum() <= budget
            ),
            default=None,
        )
        point = int(frontier.best_within(np.array([budget]))[0])
        assert (point < 0) == (best is None)
        assert best is None or frontier.cost[point] == pytest.approx(best, rel=0.02)
    assert frontier_of(num_bytes, cost, np.arange(4), [2, 3], -1, 48) is None


def memory_of(
    model, profile, seq_len=32, chunk=64, chunks=2, numerics=FLOAT32, streams_adapters=False, **request
) -> CandidateMemory:
    asked = Request(seq_len, 512, 1 << 40, 1 << 40, numerics=numerics, **request)
    buffers = SharedBuffers(Problem(model, asked, profile, streams_adapters=streams_adapters))
    return CandidateMemory(
        SizeTables(buffers, chunk, chunks, ever_smaller_sets([kind.layer for kind in buffers.kinds]))
    )


def random_candidate(memory: CandidateMemory, random: Random) -> Candidates:
    tables = memory.tables
    edge = random.choice([e for e in memory.edge_choices if e.share_slots or min(e.residencies) > STREAMED])
    slots = (random.randint(1, 3), random.randint(1, 2), random.randint(1, 3))
    choices = np.array([random.randrange(len(tables.choice_option)) for _ in range(tables.num_blocks)])
    return Candidates.of([(choices, memory.edge_choices.index(edge), slots)])


def check_bytes(memory: CandidateMemory, candidate: Candidates) -> None:
    """The bytes of one candidate by formula are those of its layout."""
    model, profile = memory.buffers.model, memory.buffers.profile
    layout = Layout(model, memory.plan(candidate, 0))
    assert memory.gpu_bytes(candidate)[0] == gpu_required_bytes(layout, profile)
    host = host_required_bytes(layout, profile)
    assert memory.host_bytes(candidate)[0] == pytest.approx(host, abs=256 * 8 * len(model.groups) * 3)


def check_surrogate(memory: CandidateMemory, candidate: Candidates) -> None:
    """A round of one candidate by the surrogate takes about as long as its program."""
    profile, blocks = memory.buffers.profile, memory.tables.num_blocks
    layout = Layout(memory.buffers.model, memory.plan(candidate, 0))
    cost = CostModel(profile, layout.compute_bytes, memory.tables.chunk_tokens, layout.plan.request.max_seq_len)
    simulated_s = price(lower_round(layout, memory.tables.shape, first=False), cost).step_s
    accumulating, updating, nothing_left = np.array([True]), np.array([False]), (np.zeros((blocks, 1)), np.zeros(1))
    estimated_s, _ = Surrogate(memory).round_s(candidate, accumulating, updating, *nothing_left)
    assert estimated_s[0] == pytest.approx(simulated_s, rel=0.25)


SEGMENTS = (1, 2, None, 3, 4)


def segments_of(seed: int, frozen: tuple[str, ...]) -> dict[str, Any]:
    """Segments of a request; with whole sequences and all trained, of some seeds chunk by chunk, and of some a few."""
    found: dict[str, Any] = {"segment_blocks": SEGMENTS[seed % 5]}
    if seed % 3 and not frozen and (SEGMENTS[seed % 5] or 1) > 1:
        found |= {"segment_order": "chunks", "segments": None if seed % 2 else 1}
    return found


FROZEN = ((), ("embed", "block.0"), ("embed", "blocks"), ("block.1", "head"), ("blocks", "head"))


@pytest.mark.pairs
@pytest.mark.parametrize("seed", cases(range(12), range(6)))
@pytest.mark.parametrize("name", ["cpu-test", "rtx-4090"])
@pytest.mark.parametrize("frozen", FROZEN, ids=" ".join)
def test_bytes_by_formula_are_those_of_the_layout(seed, name, frozen):
    random = Random(seed)
    profile, numerics = preset(name), random.choice([FLOAT32, Numerics()])
    count = random.randint(2, 6)
    model = mixed_model(count) if seed % 4 == 3 else small_model(count, tied=seed % 2 == 0, hidden=256)
    model = with_frozen(model, frozen)
    segments = segments_of(seed, frozen)
    memory = memory_of(model, profile, seq_len=32 if seed % 3 else 128, numerics=numerics, **segments)
    check_bytes(memory, random_candidate(memory, random))


@pytest.mark.parametrize("seed", cases(range(12), range(6)))
@pytest.mark.parametrize("frozen", [(), ("embed", "block.0-3"), ("block.1-6",), ("block.0", "head")], ids=" ".join)
def test_the_surrogate_is_near_the_simulator(seed, frozen):
    random = Random(seed)
    profile = slow_link(random.choice([1e9, 4e9, 1e10]))
    model = with_frozen(mixed_model(8) if seed % 4 == 3 else small_model(8, hidden=256), frozen)
    size = {"seq_len": 32 if seed % 3 else 128, "chunk": 256 if seed % 3 else 64}
    memory = memory_of(model, profile, **size, **segments_of(seed, frozen))
    check_surrogate(memory, random_candidate(memory, random))


@pytest.mark.parametrize("streamed", [False, True], ids=["on the GPU", "on the host"])
@pytest.mark.parametrize("seed", range(4))
def test_bytes_and_seconds_with_adapters(seed, streamed):
    """As above; of experts' adapters, too, whose blocks are whole or come in parts."""
    random = Random(seed)
    profile, model = slow_link(random.choice([1e9, 4e9, 1e10])), divided_model(6) if seed % 2 else small_model(6)
    model = with_lora(model, LoRA("all", rank=8))
    model = in_parts(model) if seed % 4 == 3 else model
    cut = {group.slot_class for group in model.groups if group.num_parts > 1}
    assert cut == ({"block", "adapter"} if seed % 4 == 3 else set())
    memory = memory_of(model, profile, chunk=256, streams_adapters=streamed)
    candidate = random_candidate(memory, random)
    check_bytes(memory, candidate)
    check_surrogate(memory, candidate)
    homes = [home for home, group in zip(memory.plan(candidate, 0).groups, model.groups, strict=True) if group.adapter]
    assert homes == [GroupPlan() if streamed else GroupPlan("gpu", "gpu", "gpu")] * 6


@pytest.mark.parametrize("gpu_updates", ["auto", "in_round"])
@pytest.mark.parametrize("seed", range(6))
def test_the_native_library_gives_the_bits_of_numpy(seed, gpu_updates, monkeypatch):
    """Bytes and seconds of many candidates, alone and together, with updates by CPU and GPU, first rounds and later."""
    if rounds.estimator() is None:
        pytest.skip("the native library is not built")
    random, frozen = Random(seed), ((), ("embed", "block.0-1"))[seed // 3]
    model = (mixed_model(6), small_model(6, tied=seed % 2 == 0, hidden=256), divided_model(6))[seed % 3]
    model = with_frozen(in_parts(model) if seed == 5 else model, frozen)
    sizes = {"seq_len": 32 if seed % 3 else 128, "clipping": False, "gpu_updates": gpu_updates}
    segments = {} if seed == 5 else segments_of(seed, frozen)
    memory = memory_of(model, slow_link(random.choice([1e9, 1e10])), **sizes, **segments)
    surrogate, generator = Surrogate(memory), np.random.default_rng(seed)
    for count in (1, 2, 9):
        made = Candidates.joined([random_candidate(memory, random) for _ in range(count)])
        pending_s = generator.random((memory.tables.num_blocks, count)) * 1e-3 * (seed % 2)
        updating, accumulating = np.full(count, bool(seed & 1)), generator.random(count) < 0.5
        call = (made, accumulating, updating, pending_s, generator.random(count) * 1e-3)
        found = memory.num_bytes(made), *surrogate.round_s(*call)
        with monkeypatch.context() as without:
            without.setattr("flexengine.planner.round_seconds.estimator", lambda: None)
            without.setattr(rounds, "_reducer", lambda: None)
            expected = memory.num_bytes(made), *surrogate.round_s(*call)
        for mine, theirs in zip(found, expected, strict=True):
            assert np.array_equal(mine, theirs)
        assert np.isfinite(found[1]).all()
        assert found[1].min() > 0


@pytest.mark.parametrize("clipping", [True, False], ids=["clipped", "updates in backward"])
@pytest.mark.parametrize("gib", [10, 16, 24])
def test_the_surrogate_knows_updates_by_the_cpu(gib, clipping):
    """Whole steps of the planner's own plans, in which the CPU updates most blocks while the link is busy."""
    model, profile = open_model("preset:llama-3.1-8b").spec, preset("h200")
    numerics = Numerics(state="bfloat16")
    request = Request(2048, 16384, gib << 30, 110 << 30, 8192, 16384, numerics=numerics, clipping=clipping)
    size = next(Search(Problem(model, request, profile)).bounded())
    size.start()
    size.search.run(1, 1)
    plan = size.search.memory.plan(size.search.found, 0)
    assert plan.updates_on_cpu
    assert size.best_s == pytest.approx(step_seconds(Layout(model, plan), profile).step_s, rel=0.05)


def test_frontier_is_a_frontier():
    model = open_model("preset:llama-3.1-8b").spec
    cost = CostModel(preset("h200"), 2, 8192, 2048)
    shape = full_round(Request(2048, 131072, 1, 1), 8192, 2)
    sets = frontier(model.blocks[0], shape, cost)
    sizes, seconds = [s.num_bytes for s in sets], [s.recompute_s for s in sets]
    assert sizes == sorted(sizes)
    assert seconds == sorted(seconds, reverse=True)
    assert (sets[0].ops, sets[-1].recompute_s) == ((), 0)


@pytest.mark.parametrize(("case", "chunk"), [("gemma2", 48), ("olmoe", 20)], ids=["whole sequences", "slices"])
def test_frontier_is_that_of_all_sets(case, chunk):
    layer, cost = build_model(case, CASES[case]).blocks[0], CostModel(preset("cpu-test"), 4, chunk, 48)
    shape = full_round(Request(48, 96, 1, 1), chunk, 3)
    programs = {ops: compile_layer(layer, ops, (), chunk, 4) for ops in save_sets(layer.ops)}
    compiled = {ops: (p.save_gpu_bytes, recompute_s(p, shape, cost)) for ops, p in programs.items()}
    best: list[tuple[int, float]] = []
    for num_bytes, seconds in sorted(compiled.values()):
        if not best or seconds < best[-1][1] - 1e-12:
            best.append((num_bytes, seconds))
    found = frontier(layer, shape, cost)
    filling_s = best[0][1] - found[0].recompute_s  # a key/value window, whatever is kept
    assert [(s.num_bytes, s.recompute_s + filling_s) for s in found] == [pytest.approx(pair) for pair in best]
    assert [compiled[s.ops] for s in found] == [pytest.approx(pair) for pair in best]


def test_products_of_experts_run_at_a_share_of_the_rate_of_one_product():
    profile, layer = preset("h200"), open_model("preset:olmoe-1b-7b").spec.blocks[0]
    cost = CostModel(profile, 2, 8192, 2048)
    work = next(op for op in layer.ops if op.name == "experts_down").forward_work(8192, 2048, 2)
    assert work.flops == 2 * 8192 * 8 * 1024 * 2048
    seconds = work.flops / (GROUPED_SHARE * profile.matmul.rate(8192)) + profile.host.launch_s
    assert cost.work_s(work) == cost.work_s(work.plus(Work())) == pytest.approx(seconds)
    assert cost.work_s(work.shared(4)) == pytest.approx((seconds - profile.host.launch_s) / 4)


def test_products_of_the_head_run_at_a_share_of_the_rate_of_linear_layers():
    profile = preset("h200").changed(head_shares=((1024, 1.25),))
    head = next(op for op in open_model("preset:llama-3.2-1b").spec.layers[-1].ops if op.name == "lm_head")
    work = head.backward_input_work(8192, 2048, 2)
    assert work.flops == work.head_flops == 6 * 8192 * 2048 * 128256
    seconds = work.flops / (1.25 * profile.matmul.rate(8192)) + work.memory_bytes / profile.memory.bytes_per_s
    assert CostModel(profile, 2, 8192, 2048).work_s(work) == pytest.approx(
        seconds + work.kernels * profile.host.launch_s
    )
    assert work.plus(work).head_flops == 2 * work.head_flops == 8 * work.shared(4).head_flops


def test_parts_of_experts_are_as_large_as_a_dense_block():
    """Where there is one: slots hold it in any case."""
    sizes = {}
    for name in ("deepseek-v3", "qwen3-235b-a22b"):
        layouts = [group_storage(group, Numerics()) for group in in_parts(open_model(f"preset:{name}").spec).groups]
        sizes[name] = {(len(layout.parts) - 1, layout.part_numel) for layout in layouts[1:-1]}
    assert sizes["qwen3-235b-a22b"] == {(16, 8 * 3 * 4096 * 1536)}
    (_, dense), (count, part) = sorted(sizes["deepseek-v3"])
    assert (count, part) == (32, 8 * 3 * 7168 * 2048)
    assert PART_ELEMENTS < part < dense < 2 * part


def test_slices_cover_the_sequence():
    shape = full_round(Request(250, 1000, 1, 1), 64, 8)
    assert [c.tokens for c in shape.chunks] == [64, 64, 64, 58] * 2
    assert [c.first_slice for c in shape.chunks] == [0] * 4 + [4] * 4
    # causal pairs of all slices together are those of the whole sequence
    assert sum(c.tokens * c.seq_len for c in shape.chunks[:4]) == 250 * 250


@pytest.mark.usefixtures("quick_search")
def test_description_names_what_matters():
    model = small_model()
    request = Request(32, 256, 2 << 20, 1 << 40, numerics=FLOAT32)
    text = describe(make_plan(model, request, slow_link(1e9)), model)
    for word in (
        "round",
        "weights:",
        "gradients:",
        "optimizer states:",
        "block",
        "predicted:",
        "limited by",
        "GPU memory",
    ):
        assert word in text
