"""Kernels that decode weights give the torch path's bits: every format, sizes that fill no block, large matrices."""

import pytest
import torch

from flexengine.kernels.decode_weights import decode_mxfp4, decode_scaled
from flexengine.ops.formats.weight_formats import FORMATS


def stored(name, units, rows, columns, device):
    """Random bytes, with scales that are numbers: whatever the codes, both paths must agree."""
    rows += -rows % 32 if name == "mxfp4" else 0
    layout = FORMATS[name].layout(rows, columns)
    found = torch.randint(0, 256, (units, layout.num_bytes), dtype=torch.uint8, device=device)
    for matrix in found:
        for field, values in layout.views(matrix).items():
            if field == "offset" or values.dtype == torch.float32:
                values.copy_(torch.rand(values.shape, device=device) + 0.5)
            elif field == "scales":
                values.clamp_(min=2)  # the interpreter has no subnormal bf16
    return layout, found


def check(name, units, rows, columns, dtype, device, monkeypatch):
    layout, matrices = stored(name, units, rows, columns, device)
    out = torch.full((units, layout.numel), -1.0, dtype=dtype, device=device)
    FORMATS[name].decode(matrices, layout, out)
    monkeypatch.setattr("flexengine.ops.formats.weight_format.use_kernel", lambda tensor: False)
    expected = torch.empty_like(out)
    FORMATS[name].decode(matrices, layout, expected)
    monkeypatch.undo()
    assert torch.equal(out.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (3, 130), (17, 1026), (130, 66)], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_the_kernel_gives_the_bits_of_the_torch_path(name, shape, dtype, device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setenv("FLEXENGINE_INTERPRET_KERNELS", "1")
    check(name, 3, *shape, dtype, device, monkeypatch)


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_without_rows_are_left_out(name, device, monkeypatch):
    if device.type == "cpu":
        monkeypatch.setenv("FLEXENGINE_INTERPRET_KERNELS", "1")
    layout, matrices = stored(name, 4, 6, 70, device)
    whole, chosen = (torch.full((4, layout.numel), -1.0, dtype=torch.float32, device=device) for _ in range(2))
    FORMATS[name].decode(matrices, layout, whole)
    rows = torch.tensor([3, 0, 0, 1], dtype=torch.int32, device=device)
    FORMATS[name].decode(matrices, layout, chosen, rows)
    left_out = torch.full_like(whole, -1.0)
    expected = torch.where(rows[:, None] > 0, whole, left_out)
    assert torch.equal(chosen.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))
    monkeypatch.setattr("flexengine.ops.formats.weight_format.use_kernel", lambda tensor: False)
    FORMATS[name].decode(matrices, layout, left_out, rows)
    assert torch.equal(left_out.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))


def test_wrong_shapes_are_refused(device):
    out = torch.zeros(2, 32, device=device)
    matrices = torch.zeros(2, 64, dtype=torch.uint8, device=device)
    with pytest.raises(ValueError, match="stored"):
        decode_scaled(matrices.int(), torch.int8, 32, (1, 8), (4, 8), out)
    with pytest.raises(ValueError, match="codes"):
        decode_scaled(matrices, torch.int16, 32, (1, 8), (4, 8), out)
    with pytest.raises(ValueError, match="codes of MXFP4"):
        decode_mxfp4(matrices, 32, (16, 2), out)
    with pytest.raises(ValueError, match="multiples of 16"):
        decode_scaled(matrices[:, 8:], torch.int8, 32, (1, 8), (4, 8), out)


@pytest.mark.gpu
@pytest.mark.parametrize("mib", [64, 165, 166, 512, 1024])
@pytest.mark.parametrize("name", FORMATS)
def test_large_matrices(name, mib, gpu, monkeypatch):
    """Matrices of 64 MiB to 1 GiB in bf16; the last elements are where narrow indices would wrap."""
    columns = 8192
    check(name, 1, mib * 2**20 // 2 // columns, columns, torch.bfloat16, gpu, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
def test_stacks_of_more_than_2_to_the_31_elements(name, gpu, monkeypatch):
    check(name, 5, 65536, 8192, torch.bfloat16, gpu, monkeypatch)


@pytest.mark.parametrize("name", FORMATS)
def test_matrices_that_lie_beyond_2_to_the_31_bytes(name, device, monkeypatch):
    """Rows of a stack may be far apart: 32 bits hold the stride, but not where the third matrix begins.

    Pages between the matrices are never touched, so they take no memory.
    """
    if device.type == "cpu":
        monkeypatch.setenv("FLEXENGINE_INTERPRET_KERNELS", "1")
    layout, matrices = stored(name, 3, 32, 66, device)
    stride = 2**30 + 4096
    far = torch.empty(2 * stride + layout.num_bytes, dtype=torch.uint8, device=device)
    apart = far.as_strided((3, layout.num_bytes), (stride, 1))
    apart.copy_(matrices)
    out = torch.full((3, layout.numel), -1.0, device=device)
    FORMATS[name].decode(apart, layout, out)
    monkeypatch.setattr("flexengine.ops.formats.weight_format.use_kernel", lambda tensor: False)
    expected = torch.empty_like(out)
    FORMATS[name].decode(matrices, layout, expected)
    assert torch.equal(out.nan_to_num(nan=12345.0), expected.nan_to_num(nan=12345.0))
