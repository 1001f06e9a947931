"""Inputs of layers kept in FP8: forward and backward of a model that rounds between layers, the same under any plan."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    FLOAT64,
    build_engine,
    chunk_by_chunk,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    saved_model,
    shuffled_order,
    streamed_plan,
    tiny_config,
    worst_error,
)
from family_checks import reference_loss
from family_configs import CASES
from thorough import cases

from flexengine import LoRA
from flexengine.api import prepare
from flexengine.models import blocks
from flexengine.models.freezing import with_frozen
from flexengine.models.in_parts import may_be_in_parts
from flexengine.models.keep_dtype import check_keep_dtype, with_coded_inputs
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.options.job import Job
from flexengine.plan import Numerics
from flexengine.request import described
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.save_sets import savable_ops
from tests.schedule.small_plans import small_model

LENGTHS = [[48, 3, 17], [21]]
SIZES: dict[str, Any] = {"chunk_tokens": 20, "chunks_per_round": 3, "max_seq_len": 48}


def coded(spec):
    return with_coded_inputs(spec, "fp8-inputs")


class Straight(torch.autograd.Function):
    """Rounds to e4m3 times a float32 scale for every 128 columns; the gradient passes through."""

    @staticmethod
    def forward(ctx, x):
        parts = []
        for part in x.split(128, dim=-1):
            most = part.abs().amax(-1, keepdim=True)
            scale = (most / 448).float().double()
            parts.append((part * (448 / most)).to(torch.float8_e4m3fn).double() * scale)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, grad):
        return grad


def test_equals_transformers_with_rounding_between_layers(tmp_path):
    """Two blocks of columns, of which the second is not full; float64, where no sum rounds across a code's border."""
    config = tiny_config(hidden_size=144, num_attention_heads=6, head_dim=24, num_hidden_layers=3)
    model = saved_model(tmp_path, config).double()
    for module in (model.model.embed_tokens, *model.model.layers):
        module.register_forward_hook(lambda _, __, out: Straight.apply(out))
    ids = random_batch(1, [31, 9], config["vocab_size"])
    loss = torch.as_tensor(reference_loss(model, ids, ids))
    loss.backward()
    source = open_model(tmp_path)
    spec = coded(source.spec)
    plan = streamed_plan(spec, **SIZES, numerics=replace(FLOAT64, keep="fp8-inputs"))
    engine = build_engine(source._replace(spec=spec), plan)
    assert engine.fwd_bwd(ids).loss == pytest.approx(loss.item(), rel=1e-6)
    error, name = worst_error(engine.gradients(), {n: p.grad for n, p in model.named_parameters()})
    assert error < 1e-5, name  # transformers' norms and rotations are float32
    engine.close()


BF16 = Numerics("bfloat16", "split", "bfloat16", "float32")
FAMILIES = {
    "llama": (tiny_config(num_hidden_layers=4), BF16, None),
    "adapters": (tiny_config(num_hidden_layers=4), FLOAT32, LoRA(rank=4, init="orthogonal", dropout=0.1)),
    **{name: (CASES[name], FLOAT32, None) for name in (
        "gpt2", "gemma3", "phi3", "bamba", "qwen3_next", "gpt_oss", "deepseek_v3", "granitemoehybrid", "cohere2",
        "olmoe", "mixtral", "qwen3_5_text",
    )},
}  # fmt: skip


def plans(spec, numerics):
    """Everything on the GPU, everything streamed, experts also in parts, and every third input kept: on the host or
    chunk by chunk."""
    sizes = {**SIZES, "numerics": numerics}
    resident, streamed = make_plan(spec, **sizes), streamed_plan(spec, **sizes)
    yield from (resident, streamed)
    if may_be_in_parts(spec):
        yield replace(streamed, in_parts=True)
        yield replace(streamed, in_parts=True, touched_only=True)
    either = [(resident if i % 2 else streamed).layers[i + 1] for i in range(len(spec.blocks))]
    segments = [replace(kept, input_again=i % 3 > 0) for i, kept in enumerate(either)]
    yield make_plan(spec, blocks=segments, hidden_home="host", **sizes)
    if spec.lora is None and "experts" not in repr(savable_ops(spec.blocks[0].ops)):
        whole = {**sizes, "chunk_tokens": 48, "chunks_per_round": 2}
        yield make_plan(spec, **whole)
        yield chunk_by_chunk(make_plan(spec, blocks=segments, **whole))


def trained(source, plan, number):
    engine = build_engine(source, plan, order=shuffled_order(number) if number else None)
    losses = [engine.train_step(random_batch(i, row, source.spec.vocab_size))[0].loss for i, row in enumerate(LENGTHS)]
    weights = engine.state_dict()
    engine.close()
    return losses, weights


@pytest.mark.parametrize("case", cases(FAMILIES, ("llama", "adapters", "gpt2", "gpt_oss")))
def test_no_plan_changes_a_bit(case, monkeypatch):
    monkeypatch.setattr(blocks, "PART_ELEMENTS", 1)
    config, numerics, lora = FAMILIES[case]
    source = random_weights(config)
    source = source._replace(spec=coded(source.spec if lora is None else with_lora(source.spec, lora)))
    found = {}
    for number, plan in enumerate(plans(source.spec, replace(numerics, keep="fp8-inputs"))):
        losses, weights = trained(source, plan, number)
        first = found.setdefault(plan.chunk_tokens, (losses, weights))
        assert losses == first[0]
        same_bits(weights, first[1])


def test_what_lies_between_layers_by_hand():
    """Width 128 in float32: 4 bytes of scale, filled up to 16, and 128 values; gradients stay rows of floats."""
    exact, spec = small_model(), coded(small_model())
    width = exact.hidden_size
    assert (spec.hidden.num_bytes(1, 4), spec.hidden_rows.num_bytes(1, 4)) == (16 * -(-width // 512) + width, 4 * width)
    block = spec.blocks[0]
    assert savable_ops(block.ops) == savable_ops(exact.blocks[0].ops)
    program = compile_layer(block, (), (), 64, 4)
    names = [step.op.name for step in program.forward]
    assert (names[0], names[-1]) == ("read_codes", "write_codes")
    again = [step.op.name for step in program.backward if step.recompute]
    assert again[0] == "read_codes"
    assert "write_codes" not in again
    added = program.forward_work(64, 64, 4).memory_bytes
    added -= compile_layer(exact.blocks[0], (), (), 64, 4).forward_work(64, 64, 4).memory_bytes
    assert added == 2 * 64 * (4 * width + width + 4 * -(-width // 128))
    below = coded(with_frozen(small_model(), ["embed", "block.0"])).blocks[0]
    assert not below.has_backward
    assert compile_layer(below, (), (), 64, 4).backward == ()


def test_losses_are_near_those_of_exact_inputs():
    source = random_weights(tiny_config(num_hidden_layers=4))
    exact, _ = trained(source, make_plan(source.spec, **SIZES), 0)
    spec, numerics = coded(source.spec), replace(FLOAT32, keep="fp8-inputs")
    near, _ = trained(source._replace(spec=spec), make_plan(spec, **SIZES, numerics=numerics), 0)
    assert near != exact
    assert near == pytest.approx(exact, rel=0.02)


@pytest.mark.thorough
def test_the_planner_keeps_more_inputs_in_the_same_memory():
    sizes = {"max_gpu_mem_gib": 6, "max_host_mem_gib": 16, "optimizer_state_dtype": "int8", "max_seq_len": 65536}
    sizes |= {"max_global_batch_tokens": 65536, "chunk_tokens": 8192, "round_tokens": 65536}
    kinds = ("compute", "fp8-inputs")
    found = [prepare("preset:llama-3.2-1b", hardware="h200", keep_dtype=k, **sizes).plan for k in kinds]
    assert found[1].predicted.step_s < found[0].predicted.step_s
    assert all(plan.predicted.speed_of_light_s <= plan.predicted.step_s for plan in found)


def test_a_job_says_what_is_kept():
    source = random_weights(tiny_config())
    for keep in ("fp8-inputs", "fp8-all"):
        spec = described(source.spec, Job(keep_dtype=keep))
        check_keep_dtype(spec, keep)
        with pytest.raises(ValueError, match=f"what keep_dtype={keep} says, but numerics ask for compute"):
            check_keep_dtype(spec, "compute")
    experts = random_weights(CASES["olmoe, many experts"]).spec
    check_keep_dtype(described(experts, Job(keep_dtype="fp8-inputs")), "fp8-inputs")
    with pytest.raises(ValueError, match="keep_dtype=fp8-all is for dense gated FFNs, and tiny has experts; leave it"):
        described(experts, Job(keep_dtype="fp8-all"))
