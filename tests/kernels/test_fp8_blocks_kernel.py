"""FP8 with scales for blocks: kernels against torch's own casts bit for bit, products against float64."""

import pytest
import torch

from flexengine.kernels import fp8_block_product, fp8_blocks

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes with numpy
E4M3, LARGEST, LEAST = torch.float8_e4m3fn, 448.0, 1e-30


def nan_codes(*shape, device):
    return torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(E4M3)


def nan(*shape, device):
    return torch.full(shape, float("nan"), device=device)


def expected(x, rows, columns):
    """(codes, scales) of x with a scale for so many rows and columns, by torch's cast."""
    x = x.float().cpu()
    codes, scales = torch.empty(x.shape, dtype=E4M3), torch.empty(-(-len(x) // rows), -(-x.shape[1] // columns))
    for i, row in enumerate(range(0, len(x), rows)):
        for j, column in enumerate(range(0, x.shape[1], columns)):
            place = slice(row, row + rows), slice(column, column + columns)
            absmax = x[place].abs().nan_to_num(0.0, torch.inf).max().clamp(min=LEAST)
            codes[place] = (x[place] * (torch.tensor(LARGEST) / absmax)).clamp(-LARGEST, LARGEST).to(E4M3)
            scales[i, j] = absmax / LARGEST
    return codes, scales


def wide(codes, scales, rows):
    """What codes and scales of so many rows and 128 columns stand for, in float64."""
    whole = scales.double().repeat_interleave(rows, 0).repeat_interleave(128, 1)
    return codes.double() * whole[: len(codes), : codes.shape[1]]


def same(actual, wanted):
    return torch.equal(actual.float().cpu().nan_to_num(-1e9), wanted.float().nan_to_num(-1e9))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 16), (37, 304), (130, 128)])
def test_rounding_matches_torchs_casts(device, rows, columns, dtype):
    x = (torch.randn(rows, columns) * torch.exp(4 * torch.randn(rows, columns))).to(device, dtype)
    x[rows // 2, columns // 3], x[0, 0] = float("nan"), float("inf")
    padded = -(-rows // 128) * 128
    by_rows = nan_codes(rows, columns, device=device), nan(-(-columns // 128), rows, device=device)
    by_columns = nan_codes(columns, padded, device=device), nan(padded // 128, columns, device=device)
    fp8_blocks.round_vectors(x, LARGEST, LEAST, by_rows, by_columns)
    codes, scales = expected(x, 1, 128)
    assert same(by_rows[0], codes)
    assert same(by_rows[1], scales.t())
    codes, scales = expected(x, 128, 1)
    assert same(by_columns[0][:, :rows], codes.t())
    assert same(by_columns[1], scales)
    assert not by_columns[0][:, rows:].view(torch.uint8).any()
    alone = nan_codes(columns, padded, device=device), nan(padded // 128, columns, device=device)
    fp8_blocks.round_vectors(x, LARGEST, LEAST, None, alone)
    assert same(alone[0], by_columns[0].float().cpu())
    codes, scales = expected(x, 128, 128)
    for transposed, width in ((False, columns), (True, rows), (True, padded)):
        shape = (columns, width) if transposed else (rows, width)
        squares = nan_codes(*shape, device=device), nan(-(-shape[0] // 128), 4, device=device)
        fp8_blocks.round_squares(x, LARGEST, LEAST, *squares, transposed)
        inner = rows if transposed else columns
        assert same(squares[0][:, :inner], codes.t() if transposed else codes)
        assert same(squares[1][:, : -(-shape[1] // 128)], scales.t() if transposed else scales)
        assert not squares[0][:, inner:].view(torch.uint8).any()


@pytest.mark.parametrize("square", [False, True], ids=["terms", "squares"])
@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 16, 16), (37, 144, 304), (130, 48, 128)])
def test_products_match_float64(device, rows, columns, inner, square):
    """Also of some rows of the scales, and added to what is there."""
    a, scales_a = expected(torch.randn(rows, inner) * torch.exp(2 * torch.randn(rows, inner)), 1, 128)
    b, scales_b = expected(torch.randn(columns, inner), 128 if square else 1, 128)
    wide_a, wide_b = wide(a, scales_a, 1), wide(b, scales_b, 128 if square else 1)
    bias, start = torch.randn(columns), torch.randn(rows, columns)
    padded = nan(len(scales_b), 4, device=device)
    padded[:, : scales_b.shape[1]] = scales_b
    scales = (scales_a.t().contiguous().to(device), padded if square else scales_b.t().contiguous().to(device))
    for first, accumulate in ((0, False), (rows // 2, True)):
        out = start[first:].clone().to(device)
        given = (a[first:].to(device), b.to(device), scales[0][:, first:], scales[1], square, out)
        fp8_block_product.block_product(*given, bias.to(device), accumulate)
        wanted = wide_a[first:] @ wide_b.t() + bias.double() + (start[first:].double() if accumulate else 0.0)
        error = (out.double().cpu() - wanted).norm() / wanted.norm()
        assert error <= (2e-3 if out.is_cuda else 1e-6)


@pytest.mark.parametrize(("rows", "columns"), [(16, 48), (304, 130), (128, 640)])
def test_stored_codes_and_scales_are_transposed(device, rows, columns):
    codes = torch.arange(rows * columns, dtype=torch.int32).to(torch.uint8).view(rows, columns).to(device)
    down, across = -(-rows // 128), -(-columns // 128)
    scales = torch.randn(down, across, device=device)
    codes_t, scales_t = nan_codes(columns, rows, device=device), nan(across, 4, device=device)
    fp8_blocks.transpose_squares(codes.view(E4M3), scales, codes_t, scales_t)
    assert torch.equal(codes_t.view(torch.uint8), codes.t())
    assert torch.equal(scales_t[:, :down], scales.t())
    assert scales_t[:, down:].isnan().all()


def test_other_shapes_are_refused(device):
    x, scales = torch.zeros(4, 16, device=device), torch.zeros(1, 4, device=device)
    with pytest.raises(ValueError, match=r"codes of columns must have shape \[16, 128\], got \[16, 4\]"):
        fp8_blocks.round_vectors(x, LARGEST, LEAST, None, (nan_codes(16, 4, device=device), scales))
    codes = nan_codes(4, 16, device=device)
    with pytest.raises(ValueError, match=r"scales of b must be float32 of shape \[1, 4\].*got .* of \[4, 1\]"):
        fp8_block_product.block_product(codes, codes, scales, scales.t(), False, torch.zeros(4, 4), None, False)
