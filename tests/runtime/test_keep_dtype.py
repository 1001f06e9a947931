"""Gate and up kept in FP8: backward reads the same rounded values under any plan, and forward the exact ones."""

from dataclasses import replace

import pytest
from engine_helpers import (
    FLOAT32,
    ON_GPU,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    shuffled_order,
    streamed_plan,
    tiny_config,
)
from family_configs import CASES, gemma2, gpt2
from thorough import cases

from flexengine import LoRA
from flexengine.api import prepare
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.freezing import with_frozen
from flexengine.models.keep_dtype import check_keep_dtype, with_keep_dtype
from flexengine.models.lora import with_lora
from flexengine.models.matmul_dtype import with_matmul_dtype
from flexengine.models.registry import ModelSource
from flexengine.ops.base import Work
from flexengine.options.job import Job
from flexengine.plan import GroupPlan, LayerPlan, Numerics
from flexengine.request import described
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layer_program import align
from flexengine.schedule.save_sets import savable_ops
from tests.schedule.small_plans import small_model

BF16 = Numerics("bfloat16", "split", "bfloat16", "float32")
WIDTHS = {"hidden_size": 32, "intermediate_size": 272, "head_dim": 8, "num_hidden_layers": 2}
LENGTHS = [[33, 3], [9, 20]]


def kept_in(dtype: str, source: ModelSource, numerics: Numerics, lora: LoRA | None = None) -> ModelSource:
    spec = with_keep_dtype(with_matmul_dtype(source.spec, numerics.matmul), dtype)
    spec = with_base_dtype(spec if lora is None else with_lora(spec, lora), numerics.base)
    return source._replace(spec=spec)


def trained(source: ModelSource, plan, order=None, steps=2):
    """(losses and gradient norms, gradients of the last step, weights)."""
    engine = build_engine(source, plan, order=order)
    shown = []
    for _ in range(steps):
        for number, lengths in enumerate(LENGTHS):
            shown.append(engine.fwd_bwd(random_batch(number, lengths, source.spec.vocab_size)).loss)
        gradients = engine.gradients()
        shown.append(engine.step().grad_norm)
    weights = engine.state_dict()
    engine.close()
    return shown, gradients, weights


def plans(spec, numerics):
    """By hand: codes on the GPU, on the host, recomputed beside much or nothing else, and mixed; slices among them."""
    names = savable_ops(spec.blocks[0].ops)
    others = tuple(name for name in names if not name.endswith("_fp8"))
    codes = tuple(name for name in names if name.endswith("_fp8"))
    assert len(codes) == 1
    options = {"numerics": numerics, "chunk_tokens": 16, "chunks_per_round": 4}
    yield make_plan(spec, **options)
    groups = [ON_GPU if group.adapter else GroupPlan() for group in spec.groups]
    for blocks in (
        [LayerPlan((), codes, "host"), LayerPlan(others, (), "gpu")],
        [LayerPlan(codes, others[:2], "host"), LayerPlan((), names, "host")],
    ):
        yield make_plan(spec, blocks=blocks, groups=groups, **options)
    yield streamed_plan(spec, **options)


ADAPTERS = LoRA(rank=4, init="orthogonal")  # neither A nor B is zero
CASES_OF_UNITS = {
    "silu, bf16, biases": (tiny_config(**WIDTHS, mlp_bias=True), BF16, None),
    "silu, FP8 products": (tiny_config(**WIDTHS), replace(BF16, matmul="fp8"), None),
    "gelu, norms behind": (gemma2(**WIDTHS), FLOAT32, None),
    "adapters": (tiny_config(**WIDTHS), FLOAT32, ADAPTERS),
    "adapters, NF4 base, FP8 products": (
        tiny_config(**WIDTHS | {"hidden_size": 64}), replace(BF16, base="nf4", matmul="fp8"), ADAPTERS,
    ),
    "DoRA, dropout": (tiny_config(**WIDTHS), FLOAT32, replace(ADAPTERS, use_dora=True, dropout=0.1)),
}  # fmt: skip


@pytest.mark.parametrize("case", cases(CASES_OF_UNITS, ("adapters, NF4 base, FP8 products", "DoRA, dropout")))
def test_no_plan_changes_a_bit(case):
    config, numerics, lora = CASES_OF_UNITS[case]
    source = kept_in("fp8", random_weights(config), numerics, lora)
    first, *rest = (
        trained(source, plan, shuffled_order(number) if number else None)
        for number, plan in enumerate(plans(source.spec, replace(numerics, keep="fp8")))
    )
    for other in rest:
        assert other[0] == first[0]
        same_bits(other[1], first[1])
        same_bits(other[2], first[2])


@pytest.mark.parametrize("case", ["gelu, norms behind", "adapters", "DoRA, dropout"])
def test_forward_is_exact_and_backward_near(case):
    config, numerics, lora = CASES_OF_UNITS[case]
    found = []
    for dtype in ("compute", "fp8"):
        source = kept_in(dtype, random_weights(config), numerics, lora)
        found.append(trained(source, make_plan(source.spec, numerics=replace(numerics, keep=dtype)), steps=1))
    exact, near = found
    assert near[0][:2] == exact[0][:2]  # losses
    differences = {
        name: float((near[1][name] - grad).norm() / grad.norm().clamp(min=1e-12)) for name, grad in exact[1].items()
    }
    assert 1e-4 < max(differences.values()) < 0.1


def test_what_a_plan_keeps_by_hand():
    """FFN 192, float32: 384 codes and 2 * 2 scales a token instead of 384 floats; forward writes them in one pass."""
    tokens, block = 64, with_keep_dtype(small_model(), "fp8").blocks[0]
    names = savable_ops(block.ops)
    assert names == ("attn_norm", "rope", "attention", "o_proj", "mlp_norm", "gate_up_fp8")
    program = compile_layer(block, ("rope",), ("gate_up_fp8",), tokens, 4)
    assert program.save_host_bytes == align(tokens * 384) + align(tokens * 4 * 4)
    assert [p.spec.name for p in program.saved_host] == ["gate_up_codes", "gate_up_scales"]
    forward = [step.op.name for step in program.forward]
    assert forward[-3:] == ["gate_up_proj", "swiglu", "down_proj"]
    kept = program.forward[-2].work(tokens, tokens, 4)
    assert kept == Work(memory_bytes=tokens * 3 * 192 * 4 + tokens * (384 + 16), kernels=1)
    again = [step.op.name for step in program.backward if step.recompute]
    assert "swiglu_again" in again
    assert not {"gate_up_proj", "gate_up_fp8", "swiglu"} & set(again)
    nothing = compile_layer(block, (), (), tokens, 4)
    assert [step.op.name for step in nothing.forward] == [step.op.name for step in program.forward]
    assert nothing.forward[-2].work(tokens, tokens, 4) == Work(memory_bytes=tokens * 3 * 192 * 4, kernels=1)
    again = [step.op.name for step in nothing.backward if step.recompute]
    assert again[-3:] == ["gate_up_proj", "gate_up_fp8", "swiglu_again"]


def test_frozen_blocks_below_everything_trained_round_nothing():
    spec = with_frozen(with_keep_dtype(small_model(), "fp8"), ["embed", "block.0"])
    program = compile_layer(spec.blocks[0], (), (), 64, 4)
    assert not {"gate_up_fp8", "swiglu_again"} & {step.op.name for step in (*program.forward, *program.backward)}
    assert savable_ops(spec.blocks[0].ops) == ()


@pytest.mark.thorough
def test_the_planner_keeps_codes_and_predicts_less_time():
    sizes = {"max_gpu_mem_gib": 24, "max_host_mem_gib": 110, "optimizer_state_dtype": "bfloat16"}
    sizes |= {"chunk_tokens": 4096, "round_tokens": 32768}
    found = [prepare("preset:llama-3.1-8b", hardware="h200", keep_dtype=k, **sizes).plan for k in ("compute", "fp8")]
    assert found[1].predicted.step_s < found[0].predicted.step_s
    assert any("gate_up_fp8" in (*layer.keep_gpu, *layer.keep_host) for layer in found[1].layers)
    assert all(plan.predicted.speed_of_light_s <= plan.predicted.step_s for plan in found)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (CASES["olmoe, many experts"], "keep_dtype=fp8 is for dense gated FFNs, and tiny has experts; leave --keep-"),
        (gpt2(), "keep_dtype=fp8 is for gated FFNs, and tiny has none"),
    ],
    ids=["experts", "no gate"],
)
def test_refuses_what_has_no_dense_gated_units(config, message):
    with pytest.raises(ValueError, match=message):
        described(random_weights(config).spec, Job(keep_dtype="fp8"))


def test_refuses_plans_for_another_dtype():
    assert Job(dtype="float32", keep_dtype="fp8").numerics == Numerics("float32", "full", "float32", keep="fp8")
    with pytest.raises(ValueError, match="what keep_dtype=compute says, but numerics ask for fp8"):
        check_keep_dtype(small_model(), "fp8")
    with pytest.raises(ValueError, match="what keep_dtype=fp8 says, but numerics ask for compute"):
        check_keep_dtype(with_keep_dtype(small_model(), "fp8"), "compute")
