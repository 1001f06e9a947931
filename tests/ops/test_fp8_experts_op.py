"""Products of experts with FP8 operands: against products of the rounded operands, and near those of the operands."""

import pytest
import torch
from thorough import cases

from flexengine.models.lora_layers import with_adapters
from flexengine.ops.adapters.low_rank import Adapters, OfExperts
from flexengine.ops.experts.experts import GroupedLinear
from flexengine.ops.fp8_scaling import FORWARD_DTYPE as CODES
from flexengine.ops.fp8_scaling import LARGEST, round_columns, round_rows
from tests.adapter_ops import run_ops

EXPERTS, D, F = 4, 48, 80
ROUNDING = 4.4e-3  # of a result in bf16
NEARNESS = 0.1  # an operand of 3 bits of mantissa is 2.6% off on average
OPTIONS = {"plain": {}, "input by output": {"transposed": True}, "biases": {"bias": "b", "row_weight": "weight"}}


def rounded(x):
    """What FP8 keeps of the rows of x, in float64."""
    x = x.float().cpu()
    absmax = x.abs().amax(-1, keepdim=True).clamp(min=1e-30)
    return (x * (torch.full_like(absmax, LARGEST) / absmax)).clamp(-LARGEST, LARGEST).to(CODES).double() * (
        absmax / LARGEST
    ).double()


def in_blocks(x, rows):
    """The same with a scale for so many rows and 128 columns of each matrix."""
    kept = torch.empty(x.shape, dtype=torch.float64)
    for matrix, own in zip(x.view(-1, *x.shape[-2:]), kept.view(-1, *x.shape[-2:]), strict=True):
        for row in range(0, len(matrix), rows):
            for column in range(0, matrix.shape[1], 128):
                place = slice(row, row + rows), slice(column, column + 128)
                part = matrix[place]
                own[place] = rounded(part.reshape(1, -1)).view(part.shape)
    return kept


def operands(h, options, tokens, counts, matmul="fp8"):
    d, f = sizes_of(matmul)
    op = GroupedLinear("experts", "x", "bounds", "y", d, f, EXPERTS, 2, "w", **options).with_fp8(matmul)
    bounds = torch.tensor((0, *torch.tensor(counts).cumsum(0)), dtype=torch.int32, device=h.device)
    inputs = {"x": h.randn(tokens, 2 * d), "bounds": bounds}
    params = {"w": h.randn(EXPERTS, *((d, f) if op.transposed else (f, d)), scale=d**-0.5)}
    if op.bias is not None:
        inputs["weight"] = torch.rand(tokens, 2, device=h.device)
        params["b"] = h.randn(EXPERTS, f)
    return op, inputs, params, h.randn(tokens, 2 * f, scale=1e-3)


def sizes_of(matmul):
    return (D, F) if matmul == "fp8" else (144, 176)  # more than a block, and no multiple of one


def check(h, checks, options, tokens=13, counts=(9, 0, 16, 1), matmul="fp8"):
    op, inputs, params, grad_y = operands(h, options, tokens, counts, matmul)
    d, f = sizes_of(matmul)
    expert = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor(counts))
    result = h.run(op, h.chunk((tokens,)), inputs, params, {"y": grad_y})
    weight = params["w"].mT if op.transposed else params["w"]
    x, g = inputs["x"].view(-1, d), grad_y.view(-1, f)
    bias = 0.0
    if op.bias is not None:
        bias = params["b"].double().cpu()[expert] * inputs["weight"].double().cpu().view(-1, 1)
    wide, (rows, weights) = (lambda t: t.double().cpu()), (rounded, rounded)
    if matmul != "fp8":
        rows, weights = (lambda t: in_blocks(t, 1)), (lambda t: in_blocks(t, 128))
    for keep, keep_weight, tolerance in ((rows, weights, ROUNDING), (wide, wide, NEARNESS)):
        y = torch.einsum("rd,rfd->rf", keep(x), keep_weight(weight)[expert]) + bias
        grad_x = torch.einsum("rf,rdf->rd", keep(g), keep_weight(weight.mT)[expert])
        checks.close(result.outputs["y"].view(-1, f), y, tolerance, name="y")
        checks.close(result.grads["x"].view(-1, d), grad_x, tolerance, name="grad_x")
    outs, ins = (x, g) if op.transposed else (g, x)
    terms = torch.einsum("rf,rd->rfd", outs.double().cpu(), ins.double().cpu())
    wanted = torch.zeros(params["w"].shape, dtype=torch.float64).index_add_(0, expert, terms)
    checks.close(result.param_grads["w"], wanted, 1e-5, name="grad_w")


@pytest.mark.parametrize("matmul", ["fp8", "fp8-blockwise"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_matches_the_product_of_rounded_operands(make_harness, checks, options, matmul):
    check(make_harness("cpu", torch.bfloat16), checks, options, matmul=matmul)


KERNELS = [(options, matmul) for options in OPTIONS for matmul in ("fp8", "fp8-blockwise")]


@pytest.mark.parametrize(("options", "matmul"), cases(KERNELS, [KERNELS[i] for i in (1, 2, 4)]))
@pytest.mark.usefixtures("interpreted")
def test_kernels_match_the_product_of_rounded_operands(make_harness, checks, options, matmul):
    check(make_harness("cpu", torch.bfloat16), checks, OPTIONS[options], matmul=matmul)


@pytest.mark.gpu
@pytest.mark.parametrize("matmul", ["fp8", "fp8-blockwise"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_matches_the_product_of_rounded_operands_on_cuda(make_harness, checks, options, matmul):
    check(make_harness("cuda", torch.bfloat16), checks, options, 400, (300, 0, 499, 1), matmul)


def check_codes(device, experts, inner, columns):
    """Kernels and torch's casts, bit for bit, over many powers of two; one row is zero."""
    weight = torch.randn(experts, inner, columns) * torch.exp(4 * torch.randn(experts, inner, columns))
    weight[0, 0] = 0.0
    weight = weight.to(device, torch.bfloat16)
    for source, rounds in ((weight, round_rows), (weight.mT, round_columns)):
        rows = source.reshape(-1, source.shape[2]).float().cpu()
        absmax = rows.abs().amax(-1).clamp(min=1e-30)
        wanted = (rows * (torch.full_like(absmax, LARGEST) / absmax)[:, None]).clamp(-LARGEST, LARGEST).to(CODES)
        codes = torch.full(source.shape, 0x7F, dtype=torch.uint8, device=device).view(CODES)
        scales = torch.full(source.shape[:2], float("nan"), device=device)
        if rounds is round_rows:
            round_rows(weight.view(-1, columns), codes.view(-1, columns), scales.view(-1))
        else:
            round_columns(weight, codes, scales)
        assert torch.equal(codes.view(torch.uint8).cpu().view(wanted.shape), wanted.view(torch.uint8))
        assert torch.equal(scales.cpu().flatten(), absmax / LARGEST)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes with numpy
@pytest.mark.parametrize("sizes", [(1, 1, 16), (3, 130, 70)], ids=str)
def test_kernels_round_as_torch(sizes):
    check_codes("cpu", *sizes)


@pytest.mark.gpu
def test_kernels_round_as_torch_on_cuda():
    check_codes("cuda", 5, 1030, 4100)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_adapters_stay_in_the_compute_dtype(make_harness, checks, transposed):
    """Results are those of the frozen FP8 product plus those of the adapters alone."""
    h = make_harness("cpu", torch.bfloat16)
    base, inputs, params, grad_y = operands(h, {"transposed": transposed}, 13, (9, 0, 16, 1))
    experts = OfExperts(EXPERTS, 2, "bounds")
    adapters = Adapters(base.name, "w", D, F, 4, 0.5, (range(F),), transposed, experts=experts)
    added = {adapters.down: h.randn(EXPERTS, 4, D, scale=D**-0.5), adapters.up: h.randn(EXPERTS, F, 4)}
    frozen, results = (base.untrained(),), []
    for ops in (with_adapters(frozen, (adapters,), 0.0), frozen):
        outputs, grads, _ = run_ops(ops, {**params, **added}, inputs, {"y": grad_y})
        results.append((outputs["y"].view(-1, F), grads["x"].view(-1, D)))
    (found, found_grad), (frozen, frozen_grad) = results
    expert = torch.repeat_interleave(torch.arange(EXPERTS), torch.tensor((9, 0, 16, 1)))
    low = torch.einsum("rd,rwd->rw", inputs["x"].view(-1, D).double(), added[adapters.down].double()[expert])
    y = frozen.double() + 0.5 * torch.einsum("rw,rfw->rf", low, added[adapters.up].double()[expert])
    checks.close(found, y, 2e-2, name="y")
    grad_low = torch.einsum("rf,rfw->rw", grad_y.view(-1, F).double(), 0.5 * added[adapters.up].double()[expert])
    grad_x = torch.einsum("rw,rwd->rd", grad_low, added[adapters.down].double()[expert]) + frozen_grad
    checks.close(found_grad, grad_x, 2e-2, name="grad_x")


def test_sizes_that_tensor_cores_do_not_take_are_refused():
    op = GroupedLinear("experts.down", "x", "bounds", "y", 48, 24, EXPERTS, 2, "w")
    with pytest.raises(ValueError, match=r"experts.down has 48 input and 24 output features of each expert"):
        op.with_fp8()
