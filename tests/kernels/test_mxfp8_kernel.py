"""MXFP8: the kernel against the plain path bit for bit, and both against the format's definition in float64."""

import pytest
import torch

from flexengine.kernels import mxfp8 as kernel
from flexengine.ops import mxfp8 as plain
from flexengine.ops.fp8_scaling import Operand
from flexengine.ops.scale_tiles import scale_shape

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes with numpy
E4M3 = torch.float8_e4m3fn


def empty(shape, device):
    """An operand whose codes and scales are NaN until they are written."""
    codes = torch.full(shape, 0x7F, dtype=torch.uint8, device=device).view(E4M3)
    return Operand(codes, torch.full(scale_shape(shape, 32), 255, dtype=torch.uint8, device=device), "tiles")


def values(x):
    """What x is in MXFP8 by the definition, in float64, and the bytes of the scales."""
    x = x.double().cpu()
    blocks = torch.nn.functional.pad(x, (0, -x.shape[1] % 32)).view(len(x), -1, 32)
    largest = blocks.abs().nan_to_num(0.0, torch.inf).amax(2)
    exponents = torch.ceil(torch.log2(largest / 448)).clamp(min=-126)
    scales = torch.where(largest.isinf(), torch.nan, torch.exp2(exponents))
    codes = (blocks / scales[:, :, None]).float().to(E4M3)
    bytes_ = torch.where(largest.isinf(), 255, (exponents.nan_to_num(0.0, 0.0, 0.0) + 127)).to(torch.uint8)
    return (codes.double() * scales[:, :, None]).view(len(x), -1)[:, : x.shape[1]], bytes_


def at(side, row, block):
    """A scale by the formula of its place."""
    byte = block // 4 * 512 + 16 * (row % 32) + 4 * (row % 128 // 32) + block % 4
    return side.scales[row // 128, byte]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(1, 32), (37, 288), (130, 96)])
def test_rounding_matches_the_definition(device, rows, columns, dtype):
    x = (torch.randn(rows, columns) * torch.exp(8 * torch.randn(rows, columns))).to(device, dtype)
    x[rows // 2, columns // 3], x[0, 0], x[rows - 1, 40 % columns :] = float("nan"), float("inf"), 0.0
    x[-1, -32:], x[-1, -7] = 0.0, 448.0 if columns > 64 else 450.0  # what needs a scale of 1, and of 2
    padded = -(-rows // 32) * 32
    by_rows, by_columns = empty((rows, columns), device), empty((columns, padded), device)
    kernel.round_blocks(x, by_rows[:2], by_columns[:2])
    for side, matrix in ((by_rows, x), (by_columns, x.t())):
        wanted, scales = values(matrix)
        found = plain.decoded(Operand(side.codes.cpu(), side.scales.cpu(), "tiles"))[:, : matrix.shape[1]]
        assert torch.equal(found.double().nan_to_num(-1e9), wanted.nan_to_num(-1e9))
        places = [(row, block) for row in range(len(matrix)) for block in range(scales.shape[1])]
        assert all(at(side, *place) == scales[place] for place in places)
        assert (side.scales == 255).sum() == (scales == 255).sum()  # what fills tiles up is finite
        alone, own = empty(side.codes.shape, device), empty(side.codes.shape, "cpu")
        for path, one in ((kernel, alone[:2]), (plain, own)):
            path.round_blocks(x.to(one[0].device), *((one, None) if side is by_rows else (None, one)))
        for other in (alone, own):
            assert torch.equal(other.codes.float().cpu().nan_to_num(-1e9), side.codes.float().cpu().nan_to_num(-1e9))
    assert not by_columns.codes[columns - 1 :, rows:].view(torch.uint8).any()


def test_other_shapes_are_refused(device):
    side = empty((4, 48), device)
    with pytest.raises(ValueError, match=r"x must have shape \[4, 64\], got \[4, 48\]"):
        kernel.round_blocks(torch.zeros(4, 48, device=device), side[:2], None)
    with pytest.raises(ValueError, match=r"scales of rows must have shape \[1, 512\], got \[1, 4\]"):
        kernel.round_blocks(torch.zeros(4, 32, device=device), (empty((4, 32), device).codes, side.scales[:, :4]), None)
