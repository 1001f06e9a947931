"""Sums over tokens against float64."""

import pytest
import torch

from flexengine.kernels.column_sum import column_sum
from flexengine.ops.linear import accumulate_bias_grad, bias_grad_bytes, bias_grad_partials

DTYPES = [torch.float32, torch.bfloat16]


def check(checks, tokens, width, dtype, device, groups):
    x = checks.strided(tokens, width, dtype=dtype, device=device)
    x.copy_(checks.normal(tokens, width, dtype=dtype, device=device))
    expected, sums = x.double().sum(0), []
    for _ in range(2):
        total, partials = (checks.empty(*n, width, dtype=torch.float32, device=device) for n in ((), (groups,)))
        column_sum(x, total, partials, accumulate=False)
        checks.assert_close(total, expected, 1e-6)
        sums.append(total.clone())
        column_sum(x, total, partials, accumulate=True)
        checks.assert_close(total, 2 * expected, 1e-6)
    assert torch.equal(*sums)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width", "groups"), [(1, 1, 1), (77, 257, 2), (140, 48, 3), (33, 5, 7)])
def test_matches_float64(checks, device, tokens, width, groups, dtype):
    """Also where groups find no rows left."""
    check(checks, tokens, width, dtype, device, groups)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "width"), [(16384, 768), (16384, 14336), (1001, 2304), (50000, 32)])
def test_matches_float64_on_gpu(checks, gpu, tokens, width, dtype):
    check(checks, tokens, width, dtype, gpu, bias_grad_partials(tokens, width))


def test_no_rows_add_nothing(device):
    nothing, partials = torch.zeros(0, 5, device=device), torch.full((2, 5), float("nan"), device=device)
    total = torch.arange(5.0, device=device)
    column_sum(nothing, total, partials, accumulate=True)
    assert total.tolist() == [0, 1, 2, 3, 4]
    column_sum(nothing, total, partials, accumulate=False)
    assert total.tolist() == [0] * 5


def test_a_bias_gets_its_gradient_from_the_kernel(checks, device, monkeypatch):
    """A sum of many bf16 values keeps what one in bf16 would lose; float64 stays with torch."""
    monkeypatch.setenv("FLEXENGINE_INTERPRET_KERNELS", "1")
    for dtype, wide in ((torch.bfloat16, torch.float32), (torch.float64, torch.float64)):
        acc, grad_y = torch.ones(3, dtype=wide, device=device), torch.ones(300, 3, dtype=dtype, device=device)
        accumulate_bias_grad(acc, grad_y, first=False)
        assert acc.tolist() == [301.0] * 3
        accumulate_bias_grad(acc, grad_y, first=True)
        assert acc.tolist() == [300.0] * 3


@pytest.mark.parametrize("width", [1, 768, 3000, 14336, 1 << 20])
@pytest.mark.parametrize("tokens", [0, 1, 100, 16384, 1 << 20])
def test_partial_sums_take_what_is_declared(tokens, width):
    taken = 4 * width * bias_grad_partials(tokens, width)
    assert taken <= bias_grad_bytes(tokens, width, 2)
    assert bias_grad_bytes(tokens, width, 2) <= max(2 * 2**20, 4 * width)


def test_refuses_a_wrong_shape(device):
    x, total = torch.zeros(4, 8, device=device), torch.zeros(8, device=device)
    with pytest.raises(ValueError, match=r"total must have shape \[8\], got \[7\]"):
        column_sum(x, total[:7], torch.zeros(1, 8, device=device), accumulate=False)
    with pytest.raises(ValueError, match="at least one row"):
        column_sum(x, total, torch.zeros(0, 8, device=device), accumulate=False)
