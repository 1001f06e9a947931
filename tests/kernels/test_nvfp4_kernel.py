"""NVFP4: the kernel against the plain path bit for bit, and rounding at random, which is right on average."""

import pytest
import torch

from flexengine.kernels import nvfp4 as kernel
from flexengine.ops import nvfp4 as plain
from flexengine.ops.fp8_scaling import PARTIALS, Operand
from flexengine.ops.scale_tiles import scale_shape
from flexengine.random_bits import stream_keys

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes with numpy
DRAWS = plain.Draws(seed=3, step=2**20, stream=2**40 + 5, first_row=1 << 30)


def empty(shape, device):
    """An operand whose codes, scales and factor are no numbers until they are written."""
    codes = torch.full((shape[0], shape[1] // 2), 0xDD, dtype=torch.uint8, device=device)
    scales = torch.full(scale_shape(shape, 16), 0x7F, dtype=torch.uint8, device=device)
    return Operand(codes, scales, "tiles", torch.full((1,), float("nan"), device=device))


def parts(side):
    assert side.factor is not None
    return side.codes, side.scales, side.factor


def values(side):
    """What an operand stands for."""
    return plain.decoded(side) * parts(side)[2]


def rounded_by_the_kernel(x, squares, transposed, draws):
    side = empty((x.t() if transposed else x).shape, x.device)
    partials = torch.zeros(PARTIALS, device=x.device)
    partials[7] = x.float().abs().nan_to_num(0.0, torch.inf).max()
    drawn = None
    if draws is not None:
        drawn = stream_keys(draws.seed, draws.step, draws.stream), draws.first_row * x.shape[1]
    kernel.round_fours(x, parts(side), partials, plain.LIMITS, squares, transposed, drawn)
    return side


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "squares", "transposed", "draws"),
    [
        (1, 32, False, False, None), (37, 288, False, False, None), (130, 96, False, False, DRAWS),
        (160, 96, True, False, None), (96, 160, True, True, None), (32, 192, True, True, None),
    ],
)  # fmt: skip
def test_the_kernel_matches_the_plain_path(device, rows, columns, squares, transposed, draws, dtype):
    x = (torch.randn(rows, columns) * torch.exp(3 * torch.randn(rows, columns))).to(device, dtype)
    x[0, :20], x[rows // 2, columns // 3] = 0.0, float("nan")
    matrix = x.t() if transposed else x
    for special in (1.0, float("inf")):
        x[-1, 1] = special
        found, own = rounded_by_the_kernel(x, squares, transposed, draws), empty(matrix.shape, "cpu")
        plain.round_fours(x.cpu(), own, torch.empty(PARTIALS), squares, transposed, draws)
        assert torch.equal(parts(found)[2].cpu(), parts(own)[2])
        assert torch.equal(found.codes.cpu(), own.codes)
        blocks = own.codes.shape[1] // 8
        scales = [plain.in_rows(side.scales.cpu(), len(own.codes), blocks) for side in (found, own)]
        assert torch.equal(scales[0], scales[1])
        nans = 16 if squares else 1
        assert special > 1 or (scales[0] == 0x7F).sum() == (found.scales == 0x7F).sum() == nans
        kept = values(own).isfinite()
        assert (~kept).sum() == (kept.numel() if special > 1 else 16 * nans)
        exact = matrix.float().cpu()[kept]
        assert special > 1 or (values(own)[kept] - exact).norm() < 0.25 * exact.norm()


def test_rounding_at_random_is_right_on_average():
    x = torch.randn(32, 64)
    mean, one, steps = torch.zeros_like(x), empty((32, 64), "cpu"), 400
    for step in range(steps):
        plain.round_fours(x, one, torch.empty(PARTIALS), draws=DRAWS._replace(step=step))
        mean += values(one) / steps
    single = (values(one) - x).norm()
    below_six = x.abs() < 5.6 / 6 * x.view(32, 4, 16).abs().amax(2).repeat_interleave(16, 1)  # a scale may be too small
    assert (mean - x)[below_six].norm() < 1.2 * single / steps**0.5
    other = empty((32, 64), "cpu")
    plain.round_fours(x, other, torch.empty(PARTIALS), draws=DRAWS._replace(stream=1, step=steps - 1))
    assert not torch.equal(one.codes, other.codes)


def test_rows_draw_by_their_number_in_the_step():
    x, whole, half = torch.randn(64, 32), empty((64, 32), "cpu"), empty((32, 32), "cpu")
    x[40, 3] = x[3, 3] = 9.0  # both have one factor
    plain.round_fours(x, whole, torch.empty(PARTIALS), draws=DRAWS)
    plain.round_fours(x[32:], half, torch.empty(PARTIALS), draws=DRAWS._replace(first_row=DRAWS.first_row + 32))
    assert torch.equal(whole.codes[32:], half.codes)


def test_other_shapes_are_refused(device):
    side, partials = empty((4, 64), device), torch.zeros(PARTIALS, device=device)
    with pytest.raises(ValueError, match=r"codes must have shape \[4, 16\], got \[4, 32\]"):
        kernel.round_fours(torch.zeros(4, 32, device=device), parts(side), partials, plain.LIMITS, False, False)
