"""Frozen groups: losses and the gradients of the others as without, weights that never move, in every kind of step."""

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    saved_model,
    shuffled_order,
    spec_of,
    streamed_plan,
    tiny_config,
)
from thorough import cases

from flexengine import from_pretrained
from flexengine.checkpoint.reader import CheckpointReader
from flexengine.models.freezing import with_frozen
from flexengine.models.matmul_dtype import with_fp8_linears
from flexengine.models.registry import ModelSource, open_model
from flexengine.optim.rounding import round_bf16_ties_away
from flexengine.plan import GroupPlan, LayerPlan, Numerics
from flexengine.schedule.save_sets import savable_ops
from tests.schedule.small_plans import mixed_model

SPLIT = Numerics("bfloat16", "split", "bfloat16", "float32")
STOCHASTIC = Numerics("bfloat16", "stochastic", "bfloat16", "bfloat16")
FP8 = Numerics("bfloat16", "split", "bfloat16", "float32", "fp8")
SIZES = {"chunk_tokens": 24, "chunks_per_round": 3}


def model_of(kind: str):
    if kind == "mixed":
        return mixed_model(3, hidden=32)
    spec = spec_of(tiny_config(num_hidden_layers=3, hidden_size=32, intermediate_size=48, head_dim=8,
                               tie_word_embeddings=kind == "tied"))  # fmt: skip
    return with_fp8_linears(spec) if kind == "fp8" else spec


def source_of(spec, *names: str) -> ModelSource:
    return ModelSource(with_frozen(spec, names), None, None)


def names_of(spec, frozen: bool) -> set[str]:
    """Tensors of groups that are frozen, or of the others."""
    return {s.name for g in spec.groups if g.frozen == frozen for param in g.params for s in param.sources}


FROZEN_MODELS = [
    ("plain", FLOAT32, ("embed", "block.0-1")),
    ("plain", SPLIT, ("embed", "block.0", "block.2", "head")),
    ("plain", STOCHASTIC, ("blocks",)),
    ("tied", FLOAT32, ("embed",)),
    ("tied", SPLIT, ("head", "block.1")),
    ("tied", SPLIT, ("embed", "blocks")),
    ("mixed", FLOAT32, ("block.1", "head")),
    ("mixed", SPLIT, ("embed", "block.0-1")),
    ("fp8", FP8, ("blocks", "head")),
    ("fp8", FP8, ("block.1-2",)),
]


@pytest.mark.parametrize(
    ("kind", "numerics", "names"), cases(FROZEN_MODELS, [FROZEN_MODELS[i] for i in (1, 2, 4, 6, 9)]), ids=str
)
def test_losses_and_gradients_are_those_of_a_model_without_frozen_layers(kind, numerics, names):
    whole, frozen = source_of(model_of(kind)), source_of(model_of(kind), *names)
    tokens = random_batch(1, (40, 7, 33, 20), 60)
    trained = names_of(frozen.spec, frozen=False)
    plans = [make_plan(whole.spec, **SIZES, numerics=numerics), make_plan(frozen.spec, **SIZES, numerics=numerics)]
    plans.append(streamed_plan(frozen.spec, **SIZES, numerics=numerics))
    engines = [
        build_engine(source, plan, order=shuffled_order(3))
        for source, plan in zip((whole, frozen, frozen), plans, strict=True)
    ]
    before = engines[0].state_dict()
    losses = [[engine.fwd_bwd(tokens).loss for _ in range(2)] for engine in engines]
    assert losses[0] == losses[1] == losses[2]
    expected = {name: grad for name, grad in engines[0].gradients().items() if name in trained}
    for engine in engines[1:]:
        same_bits(engine.gradients(), expected)
        norm = torch.stack([grad.double().square().sum() for grad in expected.values()]).sum().sqrt()
        assert engine.step().grad_norm == pytest.approx(float(norm), rel=1e-5)
        for name, value in engine.state_dict().items():
            used = before[name] if numerics.compute == "float32" else round_bf16_ties_away(before[name]).float()
            assert torch.equal(value, used) == (name not in trained), name


@pytest.mark.parametrize("names", [("embed", "block.0"), ("block.1", "head")], ids=" ".join)
def test_updates_by_the_cpu_inside_backward(names):
    """Without clipping: in the last round, on the CPU, or afterwards on the GPU, with the same bits."""
    source = source_of(model_of("plain"), *names)
    groups = [GroupPlan(update="cpu")] * len(source.spec.groups)
    plans = [streamed_plan(source.spec, **SIZES, numerics=SPLIT)]
    plans += [make_plan(source.spec, **SIZES, numerics=SPLIT, groups=groups)]
    outcomes = []
    for plan in plans:
        engine = build_engine(source, plan, max_grad_norm=None)
        losses = [engine.train_step(random_batch(step, (40, 33), 60))[0].loss for step in range(3)]
        outcomes.append((losses, engine.state_dict()))
        engine.close()
    assert outcomes[0][0] == outcomes[1][0]
    same_bits(outcomes[1][1], outcomes[0][1])


def test_a_change_of_plan_moves_weights_alone():
    source = source_of(model_of("plain"), "embed", "block.1")
    tokens = [random_batch(step, (40, 33), 60) for step in range(3)]
    resident, streamed = (make(source.spec, **SIZES, numerics=SPLIT) for make in (make_plan, streamed_plan))
    groups = [GroupPlan(weights="gpu" if group.frozen else "host") for group in source.spec.groups]
    blocks = [LayerPlan((), savable_ops(block.ops), "host") for block in source.spec.blocks]
    other = make_plan(source.spec, **SIZES, numerics=SPLIT, groups=groups, blocks=blocks)
    changing, fixed = build_engine(source, other), build_engine(source, resident)
    for step, batch in enumerate(tokens):
        assert changing.train_step(batch)[0].loss == fixed.train_step(batch)[0].loss
        if step == 0:
            changing.adopt(streamed)
    same_bits(changing.state_dict(), fixed.state_dict())


def test_a_frozen_tensor_is_rounded_as_a_trained_one(tmp_path):
    """Numbers halfway between two of bf16, where torch rounds to even and exact masters away from zero."""
    config = tiny_config(num_hidden_layers=2)
    model = saved_model(tmp_path / "first", config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.view(torch.int32) & -65536 | 0x8000).view(torch.float32))
    model.save_pretrained(tmp_path / "source")
    source = open_model(tmp_path / "source")
    frozen = source._replace(spec=with_frozen(source.spec, ["blocks", "embed"]))
    tokens = random_batch(1, (40, 33), 67)
    for make in (make_plan, streamed_plan):
        engines = [build_engine(s, make(s.spec, **SIZES, numerics=SPLIT)) for s in (source, frozen)]
        assert engines[0].fwd_bwd(tokens).loss == engines[1].fwd_bwd(tokens).loss
        gradients = engines[0].gradients()
        same_bits(engines[1].gradients(), {name: gradients[name] for name in engines[1].gradients()})
        engines[1].step()
        engines[1].save_pretrained(tmp_path / "export")
        for engine in engines:
            engine.close()
    with CheckpointReader.open(tmp_path / "export") as reader:
        for name, parameter in model.named_parameters():
            written = torch.empty_like(parameter, requires_grad=False)
            reader.read_into(name, written)
            assert torch.equal(written, parameter) == (name in names_of(frozen.spec, frozen=True)), name


def test_from_pretrained_freezes(tmp_path):
    saved_model(tmp_path, tiny_config(num_hidden_layers=3))
    options = {"max_seq_len": 32, "max_global_batch_tokens": 64, "device": "cpu", "hardware": "cpu-test"}
    engine = from_pretrained(tmp_path, freeze=["embed", "block.0-1"], dtype="float32", max_host_mem_gib=8, **options)
    assert [group.trained for group in engine.plan.groups] == [False, False, False, True, True]
    assert "frozen: 3 of 5 groups" in engine.describe()
    out, _ = engine.train_step(random_batch(0, (32, 20), 67))
    assert out.model_flops == engine.model.model_flops((32, 20)) <= out.hardware_flops
    assert set(engine.state_dict()) > names_of(engine.model, frozen=True)
    engine.close()
    with pytest.raises(ValueError, match=r"freeze='block.3'"):
        from_pretrained(tmp_path, freeze=["block.3"], **options)


def test_random_weights_of_a_seed_are_the_same_frozen_or_not():
    whole, frozen = random_weights(tiny_config()), source_of(spec_of(tiny_config()), "embed")
    weights = [build_engine(s, make_plan(s.spec, numerics=SPLIT)).state_dict() for s in (whole, frozen)]
    name = frozen.spec.embedding_source
    assert torch.equal(weights[1][name], round_bf16_ties_away(weights[0][name]).float())
    del weights[0][name], weights[1][name]
    same_bits(weights[1], weights[0])
