"""FP8 products in plans: what they cost, which rates count, what is refused; and a training run that uses them."""

import json
from dataclasses import replace

import pytest
import torch

import flexengine
from flexengine.cli import main
from flexengine.hardware.measure.gpu import _in_fp8
from flexengine.hardware.measure.matmul import Buffers, _work, fitting, scaling_shares
from flexengine.hardware.measure.timing import each_alone
from flexengine.hardware.presets import PRESETS, preset
from flexengine.models.matmul_dtype import with_fp8_linears
from flexengine.models.registry import open_model
from flexengine.ops.base import Work
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.fp8 import SCALINGS
from flexengine.ops.fp8_blocks import BlockScaling
from flexengine.ops.fp8_scaling import FORWARD_DTYPE, MULTIPLE
from flexengine.ops.linear_shape import LinearShape
from flexengine.plan import Numerics, Request
from flexengine.planner.bound.speed_of_light import speed_of_light_s
from flexengine.planner.correction import Factors, corrected_profile
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.planner import make_plan
from flexengine.schedule.layer_compiler import compile_layer
from flexengine.schedule.layout import Layout
from flexengine.schedule.packing import full_round
from flexengine.schedule.programs import lower_round
from flexengine.schedule.save_sets import savable_ops

GIB = 2**30
pytestmark = pytest.mark.usefixtures("quick_search")
FP8 = Numerics(state="bfloat16", matmul="fp8")
RATES = preset("h200").changed(
    matmul_flops_per_s=((1024, 500e12),), fp8_matmul_flops_per_s=((1024, 1000e12),), launch_s=1e-9
)


def llama():
    return with_fp8_linears(open_model("preset:llama-3.1-8b").spec)


def test_the_price_of_a_linear_layer_by_hand():
    op = next(op for op in llama().blocks[0].ops if op.name == "down_proj")
    tokens, d, f = 1024, 14336, 4096
    cost = CostModel(RATES, 2, tokens, 2048)
    flops_s, bytes_s = 2 * tokens * d * f / 1000e12, 1 / RATES.memory.bytes_per_s
    read, result = 2 * 2, 1  # bytes of an element: for the maximum and to be rounded, and of the result
    forward = (tokens * d + d * f) * (read + result) + 3 * 2 * tokens * f  # and the residual
    inputs = d * f * (read + result) + tokens * f * (read + 2 * result)
    weights = tokens * d * (read + result)
    for work, num_bytes in (
        (op.forward_work(tokens, 2048, 2), forward),
        (op.backward_input_work(tokens, 2048, 2), inputs),
        (op.backward_weight_work(tokens, 2048, 2), weights),
    ):
        assert cost.work_s(work) == pytest.approx(flops_s + num_bytes * bytes_s, rel=1e-3)
        assert work.flops == 2 * tokens * d * f


def test_chunks_after_the_first_pay_for_the_sum():
    model = llama()
    request = Request(2048, 8192, 80 * GIB, 100 * GIB, chunk_tokens=2048, round_tokens=8192, numerics=FP8)
    plan = make_plan(model, request, RATES)
    program = lower_round(Layout(model, plan), full_round(request, 2048, 4), first=True)
    backward = [c for c in program.commands if c.kind == "backward" and c.args.layer == 5]
    first, *others = [c.work.memory_bytes for c in backward]
    parameters = sum(p.numel for p in model.groups[model.layers[5].groups[0]].params if p.kind == "matrix")
    assert [other - first for other in others] == [16.0 * parameters] * 3


def test_fp8_rates_are_corrected_with_compute():
    assert corrected_profile(RATES, Factors(2.0, 1.0, 1.0)).matmul.fp8_rate(1024) == 500e12


OLD = {"t4", "v100-16", "v100-32", "rtx-2080-ti"}


def test_presets_multiply_fp8_where_the_card_does():
    without = {name for name, profile in PRESETS.items() if not profile.matmul.fp8_flops_per_s}
    assert without == {"rtx-3060", "rtx-3080", "rtx-3090", "rtx-a6000", "a10", "a100-40", "a100-80", *OLD}
    for name in set(PRESETS) - without - {"cpu-test"}:
        assert PRESETS[name].matmul.fp8_rate(16384) == pytest.approx(1.8 * PRESETS[name].matmul.rate(16384), rel=0.03)
    blackwell = {name for name, profile in PRESETS.items() if profile.matmul.mxfp8_shares}
    assert blackwell == {"b200", "rtx-5090", "rtx-pro-6000", "dgx-spark"}
    for name in blackwell:
        assert PRESETS[name].matmul.fp8_rate(16384, "mxfp8") == PRESETS[name].matmul.fp8_rate(16384)
        fp4 = 4 if name == "rtx-5090" else 2  # FP4's sums are as fast in float32 there, FP8's half as fast
        assert PRESETS[name].matmul.fp8_rate(16384, "nvfp4-gw-hp", by_weights=True) == pytest.approx(
            fp4 * PRESETS[name].matmul.fp8_rate(16384), rel=0.02
        )


def test_plans_are_faster_and_no_faster_than_the_bound():
    requests = [
        Request(2048, 32768, 6 * GIB, 60 * GIB, 8192, 16384, numerics=replace(FP8, matmul=matmul), graphs="never")
        for matmul in ("compute", "fp8")
    ]
    model = open_model("preset:llama-3.2-1b").spec
    models = model, with_fp8_linears(model)
    plain, fp8 = (make_plan(model, one, preset("h200")) for model, one in zip(models, requests, strict=True))
    # after a step that was clipped: speculative updates, which may help either more, are added to what the search finds
    assert fp8.after_clipping().predicted.step_s < plain.after_clipping().predicted.step_s
    assert fp8.predicted.speed_of_light_s <= fp8.predicted.step_s
    assert speed_of_light_s(models[1], requests[1], preset("h200")) == fp8.predicted.speed_of_light_s


def test_a_model_and_numerics_that_disagree_are_refused():
    request = Request(512, 512, 80 * GIB, 100 * GIB, numerics=FP8)
    with pytest.raises(ValueError, match="linear layers that multiply in compute, but numerics ask for fp8"):
        make_plan(open_model("preset:llama-3.2-1b").spec, request, RATES)
    with pytest.raises(ValueError, match="linear layers that multiply in fp8, but numerics ask for compute"):
        make_plan(llama(), replace(request, numerics=Numerics()), RATES)


def test_the_command_plans_with_fp8(capsys):
    flags = ["--model", "preset:llama-3.2-1b", "--gpu", "rtx4090", "--max-global-batch-tokens", "16384"]
    flags += ["--chunk-tokens", "8192", "--round-tokens", "16384"]
    found = []
    for matmul in ("compute", "fp8"):
        assert main(["plan", *flags, "--json", "--matmul-dtype", matmul]) == 0
        values = json.loads(capsys.readouterr().out)
        assert values["request"]["numerics"]["matmul"] == matmul
        found.append(values["predicted"]["step_s"])
    assert found[1] < found[0]
    assert main(["plan", *flags, "--matmul-dtype", "fp8"]) == 0
    assert "with FP8 operands" in capsys.readouterr().out
    flags[3] = "rtx5090"
    assert main(["plan", *flags, "--matmul-dtype", "mxfp8"]) == 0
    assert " TFLOP/s with mxfp8 operands, by its data sheet: never timed)" in capsys.readouterr().out


def test_training_through_from_pretrained_stays_near_bf16(quick_search):
    ids, losses = torch.randint(0, 512, (2, 64), generator=torch.Generator().manual_seed(0)), {}
    sizes = {"max_seq_len": 64, "max_global_batch_tokens": 128, "max_gpu_mem_bytes": 2**28, "max_host_mem_gib": 4}
    for matmul in ("compute", "fp8", "fp8-blockwise", "mxfp8", "nvfp4-gw-hp"):
        engine = flexengine.from_pretrained(
            "preset:demo", device="cpu", hardware="cpu-test", matmul_dtype=matmul, **sizes
        )
        losses[matmul] = []
        for _ in range(2):
            losses[matmul].append(engine.fwd_bwd(input_ids=ids, labels=ids).loss)
            engine.step(lr=1e-3)
        engine.close()
    exact = losses.pop("compute")
    assert len({tuple(found) for found in losses.values()}) == 4
    for matmul, found in losses.items():
        assert found != exact
        assert found == pytest.approx(exact, rel=2e-2 if matmul == "nvfp4-gw-hp" else 5e-3)
        assert found[-1] < found[0] - 0.3


# -- the probe ---------------------------------------------------------------------------------------------------------


def test_operands_are_rounded_where_they_lie(monkeypatch):
    monkeypatch.setattr("flexengine.hardware.measure.gpu.FP8_PIECE", 1000)
    operands = torch.randn(10_500, dtype=torch.bfloat16)
    wanted = operands.to(FORWARD_DTYPE).view(torch.uint8).clone()
    buffers = _in_fp8(Buffers(operands, torch.empty(0)))
    assert torch.equal(buffers.operands.view(torch.uint8), wanted)
    assert buffers.operands.data_ptr() == operands.data_ptr()


@pytest.mark.parametrize("matmul", SCALINGS)
@pytest.mark.parametrize("name", ["forward", "input gradient", "weight gradient"])
def test_products_of_the_probe_take_fp8_operands(name, matmul):
    operands = torch.randn(1 << 20).to(FORWARD_DTYPE)
    buffers = Buffers(operands, torch.empty(1 << 20, dtype=torch.uint8), matmul)
    _work(LinearShape("proj", 96, 160), 64, name, FORWARD_DTYPE, buffers)()
    assert buffers.results.any()


def test_the_probe_multiplies_gradients_by_squares_as_training_does(monkeypatch):
    kinds = []
    monkeypatch.setattr(BlockScaling, "multiply", lambda _, a, b, *rest, **named: kinds.append((a.kind, b.kind)))
    for matmul in ("fp8-blockwise", "fp8-blockwise-gw-squares"):
        buffers = Buffers(torch.randn(1 << 17).to(FORWARD_DTYPE), torch.empty(1 << 17, dtype=torch.uint8), matmul)
        _work(LinearShape("proj", 96, 160), 64, "weight gradient", FORWARD_DTYPE, buffers)()
    assert kinds == [("terms", "terms"), ("terms", "squares")]


def test_shares_of_the_fp8_rate_are_measured_by_the_passes_that_take_fp8():
    layer, calls = LinearShape("proj", 96, 160, count=2), []
    buffers = Buffers(torch.randn(1 << 20).to(FORWARD_DTYPE), torch.empty(1 << 20, dtype=torch.uint8))

    def timer(work, least_s):
        calls.append(work())
        return len(calls)

    for matmul, whole, by_weights in (
        ("fp8-blockwise", (1 + 2 + 3) / (4 + 5 + 6), (1 + 2) / (4 + 5)),
        ("fp8-rowwise-gw-hp", (1 + 2) / (3 + 4), (1 + 2) / (3 + 4)),
    ):
        calls.clear()
        assert scaling_shares([layer], [64], matmul, buffers, each_alone(timer), 0.0) == (
            ((64, whole),),
            ((64, by_weights),),
        )


def test_rates_of_other_scales_are_shares_of_that_with_one():
    rates = RATES.changed(fp8_block_shares=((1024, 0.5),)).matmul
    assert rates.fp8_rate(1024, "fp8-blockwise") == rates.fp8_rate(1024, "fp8-blockwise-gw-hp") == 500e12
    assert rates.fp8_rate(1024) == rates.fp8_rate(1024, "fp8") == 1000e12
    assert RATES.matmul.fp8_rate(1024, "fp8-rowwise-gw-hp") == 950e12
    assert RATES.matmul.fp8_rate(1024, "fp8-blockwise-gw-squares") == 900e12
    weights = RATES.changed(fp8_block_shares=((1024, 0.5),), fp8_block_weight_shares=((1024, 0.6),)).matmul
    found = [each.fp8_rate(1024, "fp8-blockwise", by_weights=True) for each in (RATES.matmul, rates, weights)]
    assert found == [890e12, 500e12, 600e12]
    assert weights.fp8_rate(1024, "fp8-blockwise") == 500e12
    squares = RATES.changed(fp8_block_shares=((1024, 0.5),), fp8_square_shares=((1024, 0.7),)).matmul
    found = [each.fp8_rate(1024, "fp8-blockwise-gw-squares") for each in (rates, squares)]
    assert found == [500e12, 700e12]
    assert squares.fp8_rate(1024, "fp8-blockwise") == squares.fp8_rate(1024, "fp8-blockwise-gw-squares", True) == 500e12
    assert weights.fp8_rate(1024, by_weights=True) == 1000e12
    spec = with_fp8_linears(open_model("preset:llama-3.1-8b").spec, "fp8-blockwise")
    op = next(op for op in spec.blocks[0].ops if op.name == "down_proj")
    request = Request(2048, 65536, 24 * GIB, 110 * GIB, numerics=replace(FP8, matmul="fp8-blockwise"))
    cost = CostModel.of(request, RATES.changed(fp8_block_shares=((1024, 0.5),)), 1024)
    tokens, d, f = 1024, 14336, 4096
    work = op.backward_weight_work(tokens, 2048, 2)
    assert work.fp8_flops == 2 * tokens * d * f
    rounding_s = tokens * d * (2 + 1 + 4 / 128) / RATES.memory.bytes_per_s  # x is read once, scales are written, too
    assert cost.work_s(work) == pytest.approx(work.fp8_flops / 500e12 + rounding_s, rel=1e-3)
    frozen = op.untrained().forward_work(tokens, 2048, 2)
    assert (frozen.fp8_flops, frozen.fp8_weight_flops) == (0.0, 2 * tokens * d * f)
    cost = CostModel.of(request, RATES.changed(fp8_block_weight_shares=((1024, 0.6),)), 1024)
    assert cost.work_s(frozen) - cost.work_s(frozen._replace(fp8_weight_flops=0.0)) == pytest.approx(
        frozen.fp8_weight_flops / 600e12
    )


@pytest.mark.parametrize("half", ["forward", "input", "weight"])
def test_each_pass_of_experts_has_the_rate_of_what_it_multiplies(half):
    """Forward and the gradient of their rows that of FP8 products by weights, and gradients of weights none of FP8."""
    spec = with_fp8_linears(open_model("preset:olmoe-1b-7b").spec, "fp8-blockwise")
    op = next(op for op in spec.blocks[0].ops if isinstance(op, GroupedLinear))
    work, flops = op.half_work(half, 1024, 2), 2.0 * 1024 * op.per_token * op.in_features * op.out_features
    wanted = Work(grouped_flops=flops) if half == "weight" else Work(fp8_weight_flops=flops)
    assert work == wanted._replace(memory_bytes=work.memory_bytes, kernels=work.kernels)


@pytest.mark.parametrize("features", [12_816, 16_400, 28_672])
def test_halved_products_keep_sizes_that_fp8_takes(features):
    meta = {"dtype": torch.uint8, "device": "meta"}
    buffers = Buffers(torch.empty(64 << 20, **meta).view(FORWARD_DTYPE), torch.empty(96 << 20, **meta))
    part = fitting(LinearShape("gate_up", 4096, 2 * features), 2048, FORWARD_DTYPE, buffers)
    assert part is not None
    assert part.out_features < 2 * features
    assert part.out_features % MULTIPLE == part.in_features % MULTIPLE == 0


def test_a_block_keeps_all_of_the_same_ops():
    blocks = open_model("preset:llama-3.1-8b").spec.blocks, llama().blocks
    assert savable_ops(blocks[0][0].ops) == savable_ops(blocks[1][0].ops)
    programs = [compile_layer(layers[0], (), ("rope",), 1024, 2) for layers in blocks]
    assert programs[0].save_host_bytes == programs[1].save_host_bytes
