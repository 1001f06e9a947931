"""The plan never changes the result: random models, batches and plans against the plan that keeps all on the GPU.

Every engine's memory is filled with NaN before its weights are loaded, and every program runs in a random order that
respects streams and waits, so a missing copy, a wait too few or a slot shared too early shows as different bits.
"""

import json
import os
import subprocess
import sys

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    FLOAT64,
    GIB,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    shuffled_order,
    spec_of,
    streamed_plan,
    tiny_config,
    worst_error,
)
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from thorough import cases

from flexengine.hardware.presets import preset
from flexengine.models.freezing import with_frozen
from flexengine.models.lora import with_lora
from flexengine.models.matmul_dtype import with_fp8_linears
from flexengine.models.registry import ModelSource
from flexengine.ops.fp8 import SCALINGS
from flexengine.optim import AdamW
from flexengine.options.lora import LoRA
from flexengine.plan import GroupPlan, LayerPlan, Numerics, PlanError
from flexengine.planner import planner
from flexengine.schedule.save_sets import savable_ops
from tests.schedule.small_plans import mixed_model

NUMERICS = {
    "float32": FLOAT32,
    "float64": FLOAT64,
    "bf16, exact master": Numerics("bfloat16", "split", "bfloat16", "float32"),
    "bf16, exact master, bf16 states": Numerics("bfloat16", "split", "bfloat16", "bfloat16"),
    "bf16, exact master, fp32 gradients": Numerics("bfloat16", "split", "float32", "float32"),
    "bf16, stochastic rounding": Numerics("bfloat16", "stochastic", "bfloat16", "bfloat16"),
    "float16": Numerics("float16", "beside", "float32", "bfloat16"),
}
FP8 = Numerics("bfloat16", "split", "bfloat16", "float32", "fp8")
ROPES = (None, {"rope_type": "linear", "factor": 2.0})
MAX_SEQ_LEN = 40


class Outcome(NamedTuple):
    """Everything a training run shows."""

    losses: list[float]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]


def train(engine, batches, num_steps=2) -> Outcome:
    """Optimizer steps of two fwd_bwd calls each, with an evaluation in between that must leave no trace."""
    losses = []
    for step in range(num_steps):
        losses.append(engine.fwd_bwd(batches[0]).loss)
        losses.append(engine.evaluate(batches[1]).loss)
        losses.append(engine.fwd_bwd(batches[1]).loss)
        gradients = engine.gradients()
        result = engine.step()
        losses.append(result.grad_norm)
        assume(not (result.skipped and engine.plan.request.numerics.scales_loss))  # the scale was too large
        assert not result.skipped, f"step {step} was skipped"
    outcome = Outcome(losses, gradients, engine.state_dict())
    engine.close()
    return outcome


def same_outcome(actual: Outcome, expected: Outcome) -> None:
    assert actual.losses == expected.losses
    same_bits(actual.gradients, expected.gradients)
    same_bits(actual.weights, expected.weights)


# -- drawing -----------------------------------------------------------------------------------------------------------


@st.composite
def models(draw):
    kv_heads, group = draw(st.sampled_from(((2, 2), (2, 1), (1, 3))))
    heads = kv_heads * group
    return tiny_config(
        hidden_size=draw(st.sampled_from((12, 18, 24))),
        intermediate_size=draw(st.sampled_from((10, 21, 32))),
        num_hidden_layers=draw(st.sampled_from((1, 2, 3, 5))),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=draw(st.sampled_from((2, 4, 6))),
        vocab_size=draw(st.sampled_from((31, 67))),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        rope_scaling=draw(st.sampled_from(ROPES)),
    )


@st.composite
def batches(draw):
    """Lengths of two batches; the first has a target token for sure."""
    lengths = st.lists(st.integers(1, MAX_SEQ_LEN), max_size=3)
    return [[draw(st.integers(2, MAX_SEQ_LEN)), *draw(lengths)] for _ in range(2)]


@st.composite
def sizes(draw):
    """(chunk_tokens, chunks_per_round): whole sequences, or long ones cut into slices."""
    chunk = draw(st.sampled_from((11, 16, 40, 64)))
    return chunk, -(-MAX_SEQ_LEN // chunk) + draw(st.integers(0, 2))


HOMES = st.sampled_from(("gpu", "host"))


@st.composite
def layer_plans(draw, names, may_again=False):
    """Each savable op is kept on the GPU, kept on the host, or recomputed; inputs are kept or made again."""
    where = {name: draw(st.sampled_from(("gpu", "host", "recompute"))) for name in names}
    kept = {home: tuple(n for n in names if where[n] == home) for home in ("gpu", "host")}
    return LayerPlan(kept["gpu"], kept["host"], draw(HOMES), may_again and draw(st.booleans()))


@st.composite
def group_plans(draw, frozen):
    if frozen:
        return GroupPlan(weights=draw(st.sampled_from(("gpu", "host", "drive"))), update="none")
    weights, grads = draw(HOMES), draw(HOMES)
    if weights == grads == "host" and draw(st.booleans()):
        states = draw(st.sampled_from(("host", "drive")))
        others = st.sampled_from(("host", states))
        return GroupPlan(draw(others), draw(others), states, update="cpu")
    return GroupPlan(weights, grads, draw(HOMES) if weights == "gpu" else "host")


@st.composite
def plan_decisions(draw, spec):
    """Everything that a plan decides besides chunk and round sizes."""
    below = [False, *(block.keeps for block in spec.blocks)]
    slots = {f"{kind}_slots": draw(st.integers(1, 4)) for kind in ("weight", "grad", "save", "optimizer", "drive")}
    return {
        "blocks": [
            draw(layer_plans(savable_ops(block.ops), may_again))
            for block, may_again in zip(spec.blocks, below, strict=False)
        ],
        "groups": [draw(group_plans(group.frozen)) for group in spec.groups],
        "drive_tile": draw(st.sampled_from((1, 5000))),
        "optimizer_tile": draw(st.sampled_from((257, 1000, 1 << 14))),
        "share_edge_slots": draw(st.booleans()),
        "grads_over_weights": draw(st.booleans()),
        "hidden_home": draw(st.sampled_from(("auto", "host"))),
        **slots,
    }


@st.composite
def triples(draw):
    source = random_weights(draw(models()))
    return source, draw(batches()), draw(sizes()), draw(plan_decisions(source.spec)), draw(st.integers(0, 99))


def tokens_of(lengths, spec):
    return [random_batch(i, row, spec.vocab_size) for i, row in enumerate(lengths)]


def size_options(size, numerics):
    return {"chunk_tokens": size[0], "chunks_per_round": size[1], "max_seq_len": MAX_SEQ_LEN, "numerics": numerics}


SETTINGS = settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)


# -- the promise -------------------------------------------------------------------------------------------------------


@pytest.mark.long
@SETTINGS
@given(triple=triples(), numerics=st.sampled_from(list(NUMERICS)))
def test_any_plan_gives_the_bits_of_the_resident_plan(triple, numerics):
    source, lengths, size, decisions, seed = triple
    tokens, options = tokens_of(lengths, source.spec), size_options(size, NUMERICS[numerics])
    resident = build_engine(source, make_plan(source.spec, **options))
    plan = make_plan(source.spec, **options, **decisions)
    streamed = build_engine(source, plan, order=shuffled_order(seed))
    same_outcome(train(streamed, tokens), train(resident, tokens))


@settings(SETTINGS, max_examples=3)
@given(
    matmul=st.sampled_from(tuple(SCALINGS)), lengths=batches(), size=sizes(), data=st.data(), seed=st.integers(0, 99)
)
def test_any_plan_gives_the_bits_of_the_resident_plan_with_fp8_products(matmul, lengths, size, data, seed):
    widths = {"hidden_size": 32, "intermediate_size": 96, "head_dim": 8}
    source = random_weights(tiny_config(attention_bias=True, mlp_bias=True, **widths))
    source = source._replace(spec=with_fp8_linears(source.spec, matmul))
    decisions = data.draw(plan_decisions(source.spec))
    tokens, options = tokens_of(lengths, source.spec), size_options(size, replace(FP8, matmul=matmul))
    resident = build_engine(source, make_plan(source.spec, **options))
    streamed = build_engine(source, make_plan(source.spec, **options, **decisions), order=shuffled_order(seed))
    same_outcome(train(streamed, tokens), train(resident, tokens))


def check_planned_and_drawn(source, numerics, tokens, size, data, share, seed):
    """A plan for a share of the resident plan's memory, and one drawn at random, give the resident plan's bits."""
    options = size_options(size, numerics)
    resident = build_engine(source, make_plan(source.spec, **options))
    planned = smallest_plan(source.spec, resident.plan, int(share * resident.layout.gpu_bytes))
    drawn = make_plan(source.spec, **options, **data.draw(plan_decisions(source.spec)))
    expected = train(resident, tokens)
    for plan in (planned, drawn):
        same_outcome(train(build_engine(source, plan, order=shuffled_order(seed)), tokens), expected)


@settings(SETTINGS, max_examples=3)
@given(lengths=batches(), size=sizes(), data=st.data(), share=st.floats(0.3, 1.1), seed=st.integers(0, 99))
def test_any_plan_and_budget_gives_the_bits_of_the_resident_plan_for_blocks_of_several_kinds(
    lengths, size, data, share, seed
):
    source = ModelSource(mixed_model(blocks=3, hidden=32), None, None)
    check_planned_and_drawn(source, FLOAT32, tokens_of(lengths, source.spec), size, data, share, seed)


FROZEN = (("embed", "block.0"), ("embed", "blocks"), ("block.1-2", "head"), ("blocks", "head"))


@settings(SETTINGS, max_examples=4)
@given(
    kind=st.sampled_from(("tied", "mixed", "fp8", "adapters")),
    names=st.sampled_from(FROZEN),
    lengths=batches(),
    size=sizes(),
    data=st.data(),
    share=st.floats(0.3, 1.1),
    seed=st.integers(0, 99),
)
def test_any_plan_and_budget_gives_the_bits_of_the_resident_plan_with_frozen_layers(
    kind, names, lengths, size, data, share, seed
):
    spec, numerics = mixed_model(blocks=3, hidden=32), FLOAT32
    if kind == "tied":
        spec = spec_of(tiny_config(num_hidden_layers=3, tie_word_embeddings=True))
    elif kind == "fp8":
        config = tiny_config(num_hidden_layers=3, hidden_size=32, intermediate_size=48, head_dim=8)
        spec, numerics = with_fp8_linears(spec_of(config)), FP8
    frozen = with_lora(spec, LoRA(rank=3)) if kind == "adapters" else with_frozen(spec, names)
    source = ModelSource(frozen, None, None)
    check_planned_and_drawn(source, numerics, tokens_of(lengths, source.spec), size, data, share, seed)


@settings(SETTINGS, max_examples=4)
@given(
    config=models(),
    lengths=batches(),
    size=sizes(),
    share=st.floats(0.3, 1.1),
    seed=st.integers(0, 99),
    numerics=st.sampled_from(list(NUMERICS)),
)
def test_any_budget_gives_the_bits_of_the_resident_plan(config, lengths, size, share, seed, numerics):
    """The planner's own plans, for a share of the device memory that the resident plan takes."""
    source = random_weights(config)
    tokens, options = tokens_of(lengths, source.spec), size_options(size, NUMERICS[numerics])
    resident = build_engine(source, make_plan(source.spec, **options))
    plan = smallest_plan(source.spec, resident.plan, int(share * resident.layout.gpu_bytes))
    assert (plan.chunk_tokens, plan.chunks_per_round) == size
    planned = build_engine(source, plan, order=shuffled_order(seed))
    same_outcome(train(planned, tokens), train(resident, tokens))


def smallest_plan(spec, resident, gpu_bytes):
    """A plan for the chunk and round sizes of `resident` within a budget, raised until something fits."""
    sizes = {"chunk_tokens": resident.chunk_tokens, "round_tokens": resident.round_tokens}
    while True:
        request = replace(
            resident.request, **sizes, max_global_batch_tokens=400, max_gpu_bytes=gpu_bytes, max_host_bytes=8 * GIB
        )
        try:
            return planner.make_plan(spec, request, preset("cpu-test"))
        except PlanError:
            gpu_bytes = int(1.5 * gpu_bytes)


@pytest.mark.parametrize("seed", range(3))
def test_an_order_that_ignores_waits_is_noticed(seed):
    """The tests above can fail: the same programs without their waits give other bits, or NaN."""
    source = random_weights(tiny_config())
    tokens, options = tokens_of([[40, 3, 17], [9, 30]], source.spec), size_options((16, 3), FLOAT32)
    plan = streamed_plan(source.spec, **options)
    expected = train(build_engine(source, plan), tokens)
    broken = build_engine(source, plan, order=shuffled_order(seed, respect_waits=False))
    with pytest.raises((AssertionError, IndexError)):  # other bits, NaN, or token ids of 0xFF bytes
        same_outcome(train(broken, tokens), expected)


SLICED, PACKED = (16, 3), (64, 2)
STREAMED_CASES = [
    (numerics, size, tied)
    for i, numerics in enumerate(NUMERICS)
    for size, tied in (((SLICED, True), (PACKED, False)), ((SLICED, False), (PACKED, True)))[i % 2]
]
"""Every pair of two of the three occurs."""


@pytest.mark.parametrize(("numerics", "size", "tied"), STREAMED_CASES, ids=str)
def test_a_fully_streamed_plan_gives_the_bits_of_the_resident_plan(numerics, size, tied):
    source = random_weights(tiny_config(tie_word_embeddings=tied, attention_bias=True))
    tokens, options = tokens_of([[40, 3, 17], [9, 30]], source.spec), size_options(size, NUMERICS[numerics])
    resident = build_engine(source, make_plan(source.spec, **options))
    edges = {"share_edge_slots": True, "grads_over_weights": True}
    plan = streamed_plan(source.spec, **options, **edges, optimizer_tile=999, weight_slots=1)
    same_outcome(train(build_engine(source, plan, order=shuffled_order(3)), tokens), train(resident, tokens))


@pytest.mark.parametrize("seed", cases(range(4), range(2)))
def test_any_order_that_respects_waits_gives_the_same_bits(seed):
    source = random_weights(tiny_config(num_hidden_layers=4, tie_word_embeddings=True))
    tokens, names = tokens_of([[40, 3, 17], [9, 30]], source.spec), savable_ops(source.spec.blocks[0].ops)
    blocks = [LayerPlan((), names[i::2], "host") for i in range(4)]
    plan = make_plan(
        source.spec,
        **size_options((16, 3), FLOAT32),
        blocks=blocks,
        groups=[GroupPlan()] * 6,
        weight_slots=2,
        save_slots=2,
        share_edge_slots=True,
        optimizer_tile=999,
    )
    shuffled = build_engine(source, plan, order=shuffled_order(seed))
    same_outcome(train(shuffled, tokens), train(build_engine(source, plan), tokens))


SIZES = [(64, 1), (64, 3), (40, 2), (16, 5), (11, 4), (1, 40)]


@pytest.mark.parametrize(
    ("numerics", "tolerance"), cases([("float32", 2e-5), ("float64", 1e-11)], [("float64", 1e-11)])
)
def test_chunk_and_round_sizes_change_the_rounding_only(numerics, tolerance):
    """AdamW would amplify the rounding of small gradients, so its eps is large; no clipping: its factor is float32."""
    source = random_weights(tiny_config())
    tokens = tokens_of([[40, 3, 17, 22], [9, 30, 1]], source.spec)
    outcomes = []
    for size in SIZES:
        plan = streamed_plan(source.spec, **size_options(size, NUMERICS[numerics]))
        optimizer = AdamW(lr=1e-2, eps=1e-3)
        outcomes.append(train(build_engine(source, plan, optimizer, max_grad_norm=None), tokens, num_steps=1))
    for size, outcome in zip(SIZES[1:], outcomes[1:], strict=True):
        assert outcome.losses == pytest.approx(outcomes[0].losses, rel=tolerance), size
        for actual, expected in ((outcome.gradients, outcomes[0].gradients), (outcome.weights, outcomes[0].weights)):
            error, name = worst_error(actual, expected)
            assert error <= tolerance, f"chunks {size}: {name} has relative error {error:.1e}"


# -- on a GPU ----------------------------------------------------------------------------------------------------------

GPU_MODELS = {
    "64-wide heads": {"hidden_size": 256, "num_attention_heads": 4, "head_dim": 64, "intermediate_size": 700},
    "128-wide heads, tied": {
        "hidden_size": 384,
        "num_attention_heads": 4,
        "head_dim": 128,
        "intermediate_size": 1024,
        "tie_word_embeddings": True,
    },
}
GPU_NUMERICS = ["float32", "bf16, exact master, bf16 states", "bf16, stochastic rounding"]


def gpu_plans(spec, options):
    """Everything on the GPU, nothing on the GPU, and mixtures of both."""
    names, count = savable_ops(spec.blocks[0].ops), len(spec.blocks)
    offloaded = [LayerPlan((), names, "host")] * count
    segments = [replace(offloaded[0], input_again=i % 2 > 0) for i in range(count)]
    mixed = [LayerPlan(names[i::3], names[(i + 1) % 3 :: 3], ("gpu", "host")[i % 2]) for i in range(count)]
    groups = [GroupPlan("gpu", "host", "gpu"), GroupPlan("gpu", "gpu", "host"), GroupPlan(), GroupPlan(update="cpu")]
    groups = [groups[i % 4] for i in range(len(spec.groups))]
    return {
        "resident": make_plan(spec, **options),
        "streamed": streamed_plan(spec, **options),
        "streamed, one slot each": streamed_plan(
            spec,
            **options,
            weight_slots=1,
            grad_slots=1,
            save_slots=1,
            optimizer_slots=1,
            share_edge_slots=True,
            grads_over_weights=True,
        ),
        "offloaded": make_plan(spec, **options, blocks=offloaded, groups=[GroupPlan()] * (count + 2)),
        "hidden states on the host": make_plan(spec, **options, blocks=segments, hidden_home="host"),
        "updated by the CPU": make_plan(
            spec, **options, blocks=offloaded, groups=[GroupPlan(update="cpu")] * len(spec.groups)
        ),
        "mixed": make_plan(spec, **options, blocks=mixed, groups=groups, optimizer_tile=10_001, weight_slots=3),
    }


@pytest.mark.gpu
@pytest.mark.parametrize("numerics", GPU_NUMERICS)
@pytest.mark.parametrize("size", [(1024, 2), (256, 4)], ids=["packed", "sliced"])
@pytest.mark.parametrize("changes", GPU_MODELS.values(), ids=GPU_MODELS.keys())
def test_cuda_plans_give_the_same_bits(changes, size, numerics):
    config = tiny_config(**changes, num_hidden_layers=4, vocab_size=2003, initializer_range=0.05)
    source = random_weights(config)
    options = {
        "chunk_tokens": size[0],
        "chunks_per_round": size[1],
        "max_seq_len": 1000,
        "numerics": NUMERICS[numerics],
    }
    tokens = [random_batch(i, n, 2003) for i, n in enumerate([(700, 130, 1000, 65), (300, 513, 90)])]
    outcomes = {
        name: train(build_engine(source, plan, device="cuda", deterministic=True), tokens)
        for name, plan in gpu_plans(source.spec, options).items()
    }
    for outcome in outcomes.values():
        same_outcome(outcome, outcomes["resident"])


@pytest.mark.gpu
def test_cuda_follows_the_cpu():
    """The same plan on both devices in float32: one rounding apart at every sum."""
    source = random_weights(tiny_config(**GPU_MODELS["64-wide heads"], vocab_size=1001, initializer_range=0.05))
    tokens = [random_batch(i, n, 1001) for i, n in enumerate([(200, 65, 300), (120, 31)])]
    plan = streamed_plan(source.spec, chunk_tokens=128, chunks_per_round=3, max_seq_len=300)
    optimizer = AdamW(lr=1e-3, eps=1e-3)
    engines = [build_engine(source, plan, optimizer, device=d) for d in ("cpu", "cuda")]
    # initial weights depend on the kind of device, so the GPU's engine starts from the CPU's
    for name in engines[0].weights.runs:
        planes = [e.weights.plane("weights", e.weights.runs[name]) for e in engines]
        planes[1].copy_(planes[0])
    cpu, cuda = (train(engine, tokens) for engine in engines)
    assert cuda.losses == pytest.approx(cpu.losses, rel=1e-4)
    error, name = worst_error(cuda.weights, cpu.weights)
    assert error < 1e-4, f"{name}: relative error {error:.1e}"


TRAIN_UNDER_A_BUDGET = """
import json, random, sys
from flexengine import from_pretrained
engine = from_pretrained("preset:tiny-llama3-50m", max_seq_len=512, max_global_batch_tokens=8192, device="cuda",
                         max_gpu_mem_gib=float(sys.argv[1]), max_host_mem_gib=float(sys.argv[2]))
rng = random.Random(0)
batch = [[rng.randrange(engine.model.vocab_size) for _ in range(512)] for _ in range(16)]
losses, skipped = [engine.fwd_bwd(batch).loss], []
for _ in range(3):
    skipped.append(engine.step(lr=1e-3).skipped)
    losses.append(engine.fwd_bwd(batch).loss)
peaks = engine.memory_peaks()
print(json.dumps({"losses": losses, "skipped": skipped, "gpu": peaks.gpu_bytes, "host": peaks.host_bytes}))
"""


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize("gpu_gib", [1.5, 3.0])
def test_cuda_budgets_are_kept(gpu_gib):
    """A 50M-parameter model trains within its budgets as NVML and the kernel count them, in a process of its own."""
    host_gib = 12
    command = [sys.executable, "-c", TRAIN_UNDER_A_BUDGET, str(gpu_gib), str(host_gib)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert not any(result["skipped"])
    assert result["losses"][-1] < result["losses"][0]
    assert result["gpu"] <= gpu_gib * GIB
    assert result["host"] <= host_gib * GIB
