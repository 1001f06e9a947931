"""Linear layers with FP8 operands: against products of the rounded operands, and near those of the operands."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch

from flexengine.ops.base import DropoutDraws
from flexengine.ops.fp8 import SCALINGS, Fp8Linear
from flexengine.ops.fp8_scaling import quantize, scale_buffer, scale_of
from flexengine.ops.linear import Linear

VARIANTS = [(bias, residual) for bias in (False, True) for residual in (False, True)]
IDS = [f"bias={b}-residual={r}" for b, r in VARIANTS]
ROUNDING = 2.2e-3  # of a result in bf16; with a residual two of them
NEARNESS = 0.1  # an operand of 3 bits of mantissa is 2.6% off on average, one of 2 bits 5.2%
NEARNESS_OF_FOUR_BITS = 0.2


def operands(h, tokens, d, f, bias, residual, scaling="fp8"):
    linear = Linear("proj", "x", "y", d, f, "w", "b" if bias else None, "r" if residual else None)
    op = Fp8Linear(linear, scaling=SCALINGS[scaling])
    inputs = {"x": h.randn(tokens, d)} | ({"r": h.randn(tokens, f)} if residual else {})
    params = {"w": h.randn(f, d, scale=d**-0.5)} | ({"b": h.randn(f)} if bias else {})
    return op, h.chunk((tokens,)), inputs, params, h.randn(tokens, f, scale=1e-3)


def wide(x):
    return x.double().cpu()


def rounded(x, dtype=torch.float8_e4m3fn, rows=None, columns=None):
    """What FP8 keeps of x, in float64, with a scale for so many rows and columns (all of them)."""
    x, largest = x.float().cpu(), torch.finfo(dtype).max
    (height, width), (rows, columns) = x.shape, (rows or len(x), columns or x.shape[1])
    padded = torch.nn.functional.pad(x, (0, -width % columns, 0, -height % rows))
    blocks = padded.view(-1, rows, padded.shape[1] // columns, columns)
    absmax = blocks.abs().amax((1, 3), keepdim=True).clamp(min=1e-30)
    codes = (blocks * (torch.full_like(absmax, largest) / absmax)).clamp(-largest, largest).to(dtype)
    kept = (codes.double() * (absmax / largest).double()).view(padded.shape)[:height, :width]
    return kept


class Rounding(NamedTuple):
    """How operands are rounded: rows of forward and of the gradient of x, weights, and columns of those of weights."""

    x: Callable = wide
    w: Callable = wide
    w_t: Callable = wide
    g: Callable = wide
    x_t: Callable = wide
    g_t: Callable = wide


E5M2 = torch.float8_e5m2
ROUNDINGS = {
    "fp8": Rounding(rounded, rounded, rounded, lambda g: rounded(g, E5M2), rounded, lambda g: rounded(g, E5M2)),
    "fp8-rowwise-gw-hp": Rounding(
        lambda x: rounded(x, rows=1), lambda w: rounded(w, rows=1), lambda w: rounded(w, columns=1),
        lambda g: rounded(g, rows=1),
    ),
    "fp8-blockwise-gw-hp": Rounding(*[BY_BLOCKS := lambda x: rounded(x, rows=1, columns=128)],
        *[SQUARES := lambda w: rounded(w, rows=128, columns=128)] * 2, BY_BLOCKS),
}  # fmt: skip
ROUNDINGS["fp8-blockwise"] = ROUNDINGS["fp8-blockwise-gw-hp"]._replace(
    **dict.fromkeys(("x_t", "g_t"), lambda x: rounded(x, rows=128, columns=1))
)


def in_mxfp8(x):
    """What MXFP8 keeps of x, in float64, with the least power of two for 32 columns that keeps all within range."""
    blocks = torch.nn.functional.pad(wide(x), (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    scales = torch.exp2(torch.ceil(torch.log2(blocks.abs().amax(2, keepdim=True).clamp(min=2.0**-100) / 448)))
    codes = (blocks / scales).float().to(torch.float8_e4m3fn)
    return (codes.double() * scales).view(len(x), -1)[:, : x.shape[1]]


def in_nvfp4(x, height=1):
    """What NVFP4 keeps of x, in float64, with a scale for 16 columns of so many rows. It is found in float32, whose
    rounding decides which of two numbers as near is taken: bf16 numbers often lie in the middle."""
    x, table = x.float().cpu(), torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    factor, blocks = x.abs().amax().clamp(min=1e-30) / 2688, x.reshape(len(x) // height, height, -1, 16)
    scales = (blocks.abs().amax((1, 3), keepdim=True) / (6 * factor)).to(torch.float8_e4m3fn).float()
    sizes = torch.where(scales > 0, blocks.abs() * (torch.ones_like(scales) / (scales * factor)), 0.0)
    apart = (sizes[..., None].double() - table).abs() + 1e-9 * (torch.arange(8) % 2)  # else the even code
    return table[apart.argmin(-1)].mul(blocks.sign()).double().mul(scales).mul(factor.double()).view(x.shape)


def by_columns(rounding):
    return lambda x: rounding(x.t()).t()


ROUNDINGS["mxfp8"] = Rounding(*[in_mxfp8] * 2, by_columns(in_mxfp8), in_mxfp8, *[by_columns(in_mxfp8)] * 2)
ROUNDINGS["nvfp4-gw-hp"] = Rounding(in_nvfp4, *[lambda w: in_nvfp4(w, 16)] * 2, in_nvfp4)
ROUNDINGS["fp8-blockwise-gw-squares"] = ROUNDINGS["fp8-blockwise"]._replace(x_t=SQUARES)


def definition(inputs, params, grad_y, by=Rounding()):  # noqa: B008 - a value
    """(y, grad_x, grad_w, grad_b) of rounded operands, in float64."""
    y = by.x(inputs["x"]) @ by.w(params["w"]).t()
    if "b" in params:
        y = y + params["b"].double().cpu()
    if "r" in inputs:
        y = y + inputs["r"].double().cpu()
    return y, by.g(grad_y) @ by.w_t(params["w"]), by.g_t(grad_y).t() @ by.x_t(inputs["x"]), wide(grad_y).sum(0)


def check(h, checks, tokens, d, f, bias, residual, scaling="fp8"):
    multiple = SCALINGS[scaling].feature_multiple
    d, f = (-(-size // multiple) * multiple for size in (d, f))
    op, chunk, inputs, params, grad_y = operands(h, tokens, d, f, bias, residual, scaling)
    before = {name: h.randn(*p.shape, scale=1e-2).float() for name, p in params.items()}
    first = h.run(op, chunk, inputs, params, {"y": grad_y})
    added = h.run(op, chunk, inputs, params, {"y": grad_y}, previous_params=before)
    exact = definition(inputs, params, grad_y, ROUNDINGS[scaling])
    y, grad_x, grad_w, grad_b = exact
    checks.close(first.outputs["y"], y, 2 * ROUNDING, name="y")
    checks.close(first.grads["x"], grad_x, 2 * ROUNDING, name="grad_x")
    checks.close(first.param_grads["w"], grad_w, 1e-3, name="grad_w")  # cards sum in a little less than float32
    checks.close(added.param_grads["w"], grad_w + before["w"].double().cpu(), 1e-3, name="grad_w, added")
    if bias:
        checks.close(first.param_grads["b"], grad_b, 1e-5, name="grad_b")
        checks.close(added.param_grads["b"], grad_b + before["b"].double().cpu(), 1e-5, name="grad_b, added")
    if residual:
        assert torch.equal(first.grads["r"], grad_y)
    wanted = definition(inputs, params, grad_y)
    found = (first.outputs["y"], first.grads["x"], first.param_grads["w"])
    for name, actual, expected in zip(("y", "grad_x", "grad_w"), found, wanted, strict=False):
        checks.close(actual, expected, NEARNESS_OF_FOUR_BITS if scaling.startswith("nvfp4") else NEARNESS, name=name)
    checks.same_bits(first, h.run(op, chunk, inputs, params, {"y": grad_y}))


@pytest.mark.parametrize(("bias", "residual"), VARIANTS, ids=IDS)
@pytest.mark.parametrize(("tokens", "d", "f"), [(1, 16, 32), (37, 48, 80), (64, 80, 16)])
def test_matches_the_product_of_rounded_operands(make_harness, checks, tokens, d, f, bias, residual):
    check(make_harness("cpu", torch.bfloat16), checks, tokens, d, f, bias, residual)


@pytest.mark.parametrize("scaling", [name for name in SCALINGS if name != "fp8"])
@pytest.mark.parametrize(("tokens", "d", "f"), [(1, 16, 32), (37, 304, 80), (130, 80, 144)])
def test_matches_the_product_of_operands_rounded_by_rows_and_blocks(make_harness, checks, tokens, d, f, scaling):
    check(make_harness("cpu", torch.bfloat16), checks, tokens, d, f, True, True, scaling)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("bias", "residual"), VARIANTS, ids=IDS)
@pytest.mark.parametrize(("tokens", "d", "f"), [(1, 16, 32), (1027, 512, 992), (300, 640, 896), (2048, 2048, 3072)])
def test_matches_the_product_of_rounded_operands_on_cuda(make_harness, checks, tokens, d, f, bias, residual, scaling):
    if why := SCALINGS[scaling].refusal(torch.device("cuda")):
        pytest.skip(why)
    check(make_harness("cuda", torch.bfloat16), checks, tokens, d, f, bias, residual, scaling)


@pytest.mark.gpu
@pytest.mark.parametrize("scaling", SCALINGS)
def test_stays_within_its_workspace_on_cuda(make_harness, scaling):
    if why := SCALINGS[scaling].refusal(torch.device("cuda")):
        pytest.skip(why)
    h = make_harness("cuda", torch.bfloat16)
    op, chunk, inputs, params, grad_y = operands(h, 4099, 4096, 6144, True, True, scaling)
    env = h.env(op, chunk, inputs, params, {"y": grad_y})
    calls = (op.forward, op.backward_input, op.backward_weight)
    for call in calls:
        call(env)
    torch.cuda.synchronize()
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for call in calls:
        call(env)
    assert torch.cuda.max_memory_allocated() - held <= op.workspace_bytes(4099, 2)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_gradients_of_x_are_added_some_rows_at_a_time(make_harness, checks, monkeypatch, scaling):
    monkeypatch.setattr("flexengine.ops.fp8.PRODUCT_ELEMENTS", 1)
    h = make_harness("cpu", torch.bfloat16)
    op, chunk, inputs, params, grad_y = operands(h, 137, 288, 96, False, False, scaling)
    written, before = h.run(op, chunk, inputs, params, {"y": grad_y}).grads["x"], h.randn(137, 288, scale=1e-3)
    added = Fp8Linear(Linear("proj", "x", "y", 288, 96, "w"), adds=True, scaling=op.scaling)
    found = h.run(added, chunk, inputs, params, {"y": grad_y}, previous={"x": before}).grads["x"]
    assert torch.equal(found, before + written)


def test_weight_gradients_are_made_in_parts_that_fit_their_buffer(make_harness, checks, monkeypatch):
    monkeypatch.setattr("flexengine.ops.fp8.PRODUCT_ELEMENTS", 48 * 20)  # 16 of 80 rows at a time
    check(make_harness("cpu", torch.bfloat16), checks, 37, 48, 80, True, False)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_nan_and_infinity_reach_the_results(make_harness, scaling):
    h = make_harness("cpu", torch.bfloat16)
    op, chunk, inputs, params, grad_y = operands(h, 8, 32, 64, False, False, scaling)
    params["w"][3, 5] = float("nan")
    assert h.run(op, chunk, inputs, params, {"y": grad_y}).outputs["y"].isnan().any()
    params["w"][3, 5], grad_y[2, 2] = 1.0, float("inf")
    assert not h.run(op, chunk, inputs, params, {"y": grad_y}).param_grads["w"].isfinite().all()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("scaling", ["mxfp8", "nvfp4-gw-hp"])
def test_kernels_of_blackwell_operands_give_the_bits_of_the_plain_path(make_harness, checks, monkeypatch, scaling):
    for module in ("fp8_scaling", "nvfp4"):  # a program of the interpreter for each partial maximum takes long
        monkeypatch.setattr(f"flexengine.ops.{module}.PARTIALS", 8)
    h = make_harness("cpu", torch.bfloat16)
    op, chunk, inputs, params, grad_y = operands(h, 137, 96, 160, False, False, scaling)
    chunk.dropout = DropoutDraws(seed=5, step=1, first_row=4096)
    by_kernels = h.run(op, chunk, inputs, params, {"y": grad_y})
    monkeypatch.setenv("FLEXENGINE_INTERPRET_KERNELS", "0")
    checks.same_bits(by_kernels, h.run(op, chunk, inputs, params, {"y": grad_y}))


def test_gradients_in_nvfp4_are_rounded_by_the_draws_of_their_step(make_harness):
    h = make_harness("cpu", torch.bfloat16)
    op, chunk, inputs, params, grad_y = operands(h, 37, 64, 96, True, False, "nvfp4-gw-hp")
    runs = []
    for step in (1, 1, 2):
        chunk.dropout = DropoutDraws(seed=5, step=step, first_row=0)
        runs.append(h.run(op, chunk, inputs, params, {"y": grad_y}))
    first, again, later = runs
    assert torch.equal(first.grads["x"], again.grads["x"])
    assert not torch.equal(first.grads["x"], later.grads["x"])
    assert torch.equal(first.outputs["y"], later.outputs["y"])
    assert torch.equal(first.param_grads["w"], later.param_grads["w"])
    assert not op.replays  # a CUDA graph would draw the same again


def test_quantising_transposed_fills_up_with_zeros():
    x = torch.randn(5, 3)
    rows = torch.empty(5, 3, dtype=torch.float8_e4m3fn)
    columns = torch.full((3, 16), 0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn)
    scales = torch.full((scale_buffer("proj").height(5),), float("nan"))
    scale = quantize(x, scales, 1, rows, columns)
    assert scale.data_ptr() == scale_of(scales, 1).data_ptr()
    assert (scale.data_ptr() - scales.data_ptr()) % 16 == 0  # or cuBLAS refuses it
    assert torch.equal(columns.float()[:, :5], rows.float().t())
    assert not columns.float()[:, 5:].any()
    torch.testing.assert_close(rows.float() * scale, x, rtol=0.0625, atol=float(scale) * 2**-10)


def test_features_that_fp8_cannot_take_are_refused():
    with pytest.raises(ValueError, match=r"proj has 24 input and 32 output features.*multiples of 16"):
        Fp8Linear(Linear("proj", "x", "y", 24, 32, "w"))
    with pytest.raises(ValueError, match=r"proj has 48 input.*; mxfp8 products need multiples of 32"):
        Fp8Linear(Linear("proj", "x", "y", 48, 32, "w"), scaling=SCALINGS["mxfp8"])
