"""Rows as FP8 codes: kernels bit for bit against the plain path of the op, whose rounding others check."""

from typing import Any

import pytest
import torch

from flexengine.kernels import coded_rows
from flexengine.ops.base import OpEnv, TensorSpec
from flexengine.ops.coded_rows import ReadCodes, WriteCodes

NO_CHUNK: Any = None


def both(x, monkeypatch, kernels):
    """(codes, what they stand for) of x, in buffers that were filled before."""
    monkeypatch.setenv("FLEXENGINE_INTERPRET_KERNELS", str(int(kernels)))
    rows = TensorSpec("x", (x.shape[1],))
    write, read = WriteCodes("write", rows, "codes"), ReadCodes("read", rows, "codes")
    codes = torch.full((len(x), *write.codes.shape), 0x7F, dtype=torch.uint8, device=x.device)
    again = torch.full_like(x, float("nan"))
    write.forward(OpEnv({"x": x, "codes": codes}, {}, {}, {}, NO_CHUNK))
    read.forward(OpEnv({"x": again, "codes": codes}, {}, {}, {}, NO_CHUNK))
    return codes, again


def check(x, monkeypatch):
    codes, again = both(x, monkeypatch, True)
    plain_codes, plain = both(x.cpu(), monkeypatch, False)
    assert torch.equal(codes.cpu() & 0x7F, plain_codes & 0x7F)  # a NaN may have either sign
    assert torch.equal(again.cpu().nan_to_num(7.0), plain.nan_to_num(7.0))
    return plain


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(1, 8), (5, 257), (3, 2500)])
def test_has_the_bits_of_the_plain_path(checks, device, monkeypatch, tokens, width, dtype):
    x = 3 * checks.normal(tokens, width, dtype=dtype, device=device)
    x[0, : width // 2] *= 1e-5  # beside large ones: subnormals
    x[-1, :3] = 0.0
    near = check(x, monkeypatch)
    assert ((near.float() - x.cpu().float()).abs() <= x.cpu().float().abs() / 15 + 1e-4).all()


@pytest.mark.filterwarnings("ignore:invalid value encountered in")  # the interpreter computes with numpy
def test_what_is_not_finite_stays_within_its_block(checks, device, monkeypatch):
    x = checks.normal(2, 300, dtype=torch.bfloat16, device=device)
    x[0, 130], x[1, 5] = float("inf"), float("nan")
    found = check(x, monkeypatch).isnan()
    assert found[0].nonzero().flatten().tolist() == list(range(128, 256))
    assert found[1].nonzero().flatten().tolist() == [5]


@pytest.mark.gpu
@pytest.mark.parametrize("width", [4096, 2880])
def test_has_the_bits_of_the_plain_path_on_gpu(checks, gpu, monkeypatch, width):
    check(checks.normal(4097, width, dtype=torch.bfloat16, device=gpu), monkeypatch)


def test_refuses_operands_of_other_shapes(checks, device):
    x, codes = checks.normal(2, 200, dtype=torch.float32, device=device), torch.zeros(2, 200, dtype=torch.uint8)
    with pytest.raises(ValueError, match=r"scales must have shape \[2, 2\]"):
        coded_rows.write_codes(x, codes.to(device), torch.zeros(2, 1, device=device), 448.0, 1e-30)
