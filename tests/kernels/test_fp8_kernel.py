"""Quantisation to FP8: the kernels against torch's own casts, bit for bit."""

import pytest
import torch

from flexengine.kernels import fp8

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes with numpy
DTYPES = [torch.float32, torch.bfloat16]
PARTIALS = 256 if torch.cuda.is_available() else 16
LEAST = 1e-30


def reference(x, fp8_dtype):
    """(x / scale in FP8 as uint8, scale)."""
    largest = torch.tensor(torch.finfo(fp8_dtype).max)
    absmax = x.float().cpu().abs().nan_to_num(0.0, torch.inf).max().clamp(min=LEAST)
    scaled = (x.float().cpu() * (largest / absmax)).clamp(-largest, largest)
    return scaled.to(fp8_dtype).view(torch.uint8), absmax / largest


def quantized(x, fp8_dtype, padded=None):
    """(rows, columns, scale) by the kernels, over buffers filled with NaN."""
    partials = torch.full((PARTIALS,), float("nan"), device=x.device)
    scale = torch.full((1,), float("nan"), device=x.device)
    buffers = [
        torch.full(shape, 0x7F, dtype=torch.uint8, device=x.device).view(fp8_dtype)
        for shape in (x.shape, (x.shape[1], padded or x.shape[0]))
    ]
    fp8.absmax_partials(x, partials)
    fp8.quantize(x, partials, torch.finfo(fp8_dtype).max, LEAST, scale, *buffers)
    return *(buffer.view(torch.uint8).cpu() for buffer in buffers), scale.cpu()


def check(x, fp8_dtype, padded=None):
    rows, columns, scale = quantized(x, fp8_dtype, padded)
    expected, expected_scale = reference(x, fp8_dtype)
    assert torch.equal(rows, expected)
    assert torch.equal(columns[:, : len(rows)], expected.t())
    assert not columns[:, len(rows) :].any()
    assert scale.item() == expected_scale.item()


@pytest.mark.pairs
@pytest.mark.parametrize("fp8_dtype", fp8.FP8, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("rows", "columns", "padded"), [(1, 16, 16), (37, 70, 48), (64, 64, 64), (130, 65, 144)])
def test_matches_torchs_casts(device, rows, columns, padded, dtype, fp8_dtype):
    """Magnitudes over many powers of two, so that normal numbers, subnormal ones and zeros come out."""
    x = (torch.randn(rows, columns) * torch.exp(4 * torch.randn(rows, columns))).to(device, dtype)
    check(x, fp8_dtype, padded)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8_dtype", fp8.FP8, ids=str)
@pytest.mark.parametrize(("rows", "columns", "padded"), [(4099, 5000, 4112), (16384, 14336, 16384)])
def test_matches_torchs_casts_on_gpu(gpu, rows, columns, padded, fp8_dtype):
    check(
        (torch.randn(rows, columns) * torch.exp(4 * torch.randn(rows, columns))).to(gpu, torch.bfloat16),
        fp8_dtype,
        padded,
    )


@pytest.mark.gpu
def test_more_than_two_to_the_31_elements_on_gpu(gpu):
    x = torch.zeros(32768, 66000, dtype=torch.bfloat16, device=gpu)
    x[-1] = torch.randn(66000, device=gpu)
    rows, columns, _ = quantized(x, torch.float8_e5m2)
    expected, _ = reference(x[-1:], torch.float8_e5m2)
    assert torch.equal(rows[-1:], expected)
    assert torch.equal(columns[:, -1], expected[0])
    assert not rows[:-1].any()


@pytest.mark.parametrize("fp8_dtype", fp8.FP8, ids=str)
def test_ties_go_to_the_even_neighbour(device, fp8_dtype):
    """All numbers half way between two that FP8 holds, with a largest one that makes the scale 1."""
    patterns = torch.arange(0x7B if fp8_dtype == torch.float8_e5m2 else 0x7E, dtype=torch.uint8)
    held = patterns.view(fp8_dtype).float()
    largest = torch.finfo(fp8_dtype).max
    between = torch.cat([(held[1:] + held[:-1]) / 2, torch.tensor([largest, 0.0, -largest])])
    check(between.repeat(2, 1).to(device), fp8_dtype)


@pytest.mark.parametrize("fp8_dtype", fp8.FP8, ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1e30])
def test_zeros_and_extreme_magnitudes_have_a_scale(device, fp8_dtype, scale):
    check((torch.randn(5, 17) * scale).to(device), fp8_dtype)


@pytest.mark.parametrize("fp8_dtype", fp8.FP8, ids=str)
def test_nan_stays_and_infinity_becomes_nan(device, fp8_dtype):
    """What overflowed before must show in the gradient norm, not be clamped to a number."""
    x = torch.randn(8, 16, device=device)
    x[3, 4] = float("nan")
    rows, _, scale = quantized(x, fp8_dtype)
    wrong = rows.view(fp8_dtype).float().isnan()
    assert wrong[3, 4]
    assert int(wrong.sum()) == 1
    assert scale.isfinite().all()
    x[5, 6] = float("-inf")
    rows, _, scale = quantized(x, fp8_dtype)
    assert rows.view(fp8_dtype).float()[5, 6].isnan()
    assert (rows.view(fp8_dtype).float() * scale).isnan().all()  # zero times infinity


def test_refuses_other_shapes(device):
    x, partials, scale = torch.zeros(4, 8, device=device), torch.zeros(4, device=device), torch.zeros(1, device=device)
    narrow = torch.zeros(4, 7, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"rows must have shape \[4, 8\], got \[4, 7\]"):
        fp8.quantize(x, partials, 448.0, LEAST, scale, narrow, None)
    with pytest.raises(ValueError, match=r"columns must have shape \[8, 7\], got \[4, 7\]"):
        fp8.quantize(x, partials, 448.0, LEAST, scale, None, narrow)
    with pytest.raises(ValueError, match=r"x must be torch\.bfloat16 or torch\.float16 or torch\.float32"):
        fp8.absmax_partials(x.double(), partials)
