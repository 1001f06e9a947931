"""Products of experts with a gated unit behind their sums, against float64 and against two kernels in turn."""

import pytest
import torch
from kernels.test_experts_kernel import low_rank, route

from flexengine.kernels import glu, grouped
from flexengine.kernels import grouped_glu as kernel
from flexengine.ops.glu import ClampedSwiGLU
from flexengine.ops.glu import glu_backward as plain_backward

UNITS = ["silu", "gelu_tanh", ClampedSwiGLU(1.5, 1.7)]
SHAPES = [(7, 2, 5, 33, 20), (9, 1, 1, 3, 17)]


def operands(checks, device, dtype, shape, transposed, adapted):
    """(x, weight, bounds, bias, weights of rows, adapter, sums in float64) of a product into 2F columns."""
    tokens, count, experts, inner, width = shape
    _, bounds, expert = route("random", tokens, count, experts, device)
    rows, columns = tokens * count, 2 * width
    x = checks.normal(rows, inner, dtype=dtype, device=device)
    weight = checks.normal(experts, *((inner, columns) if transposed else (columns, inner)), dtype=dtype, device=device)
    bias = checks.normal(experts, columns, dtype=dtype, device=device)
    own = (weight if transposed else weight.mT).double().cpu()[expert]
    sums = torch.einsum("rd,rdf->rf", x.double().cpu(), own) + bias.double().cpu()[expert]
    adapter = None
    if adapted:
        adapter, added = low_rank(checks, device, dtype, (rows, 3, experts, columns), expert, transposed)
        sums += added
    return x, weight, bounds, bias, torch.rand(rows, device=device), adapter, sums


def check_forward(checks, device, dtype, unit, shape, transposed, adapted):
    x, weight, bounds, bias, row_weight, adapter, sums = operands(checks, device, dtype, shape, transposed, adapted)
    gate_up = checks.empty(*sums.shape, dtype=dtype, device=device)
    out = checks.empty(len(x), shape[4], dtype=dtype, device=device)
    kernel.gated_product(x, weight, bounds, gate_up, out, row_weight, transposed, unit, bias, adapter)
    checks.assert_close(gate_up, sums, checks.TOLERANCE[dtype], "gate_up")
    product, alone = torch.full_like(gate_up, float("nan")), torch.full_like(out, float("nan"))
    grouped.grouped_product(x, weight, bounds, product, transposed, bias, adapter=adapter)
    glu.glu_forward(product, alone, unit, row_weight)
    assert torch.equal(gate_up, product)
    assert torch.equal(out, alone)


def check_backward(checks, device, dtype, unit, shape, transposed, adapted):
    tokens, count, experts, inner, width = shape
    _, bounds, expert = route("random", tokens, count, experts, device)
    rows, row_weight = tokens * count, torch.rand(tokens * count, device=device)
    grad_y = checks.normal(rows, inner, dtype=dtype, device=device)
    gate_up = checks.normal(rows, 2 * width, dtype=dtype, device=device)
    weight = checks.normal(experts, *((width, inner) if transposed else (inner, width)), dtype=dtype, device=device)
    own = (weight.mT if transposed else weight).double().cpu()[expert]
    grad = torch.einsum("rd,rdf->rf", grad_y.double().cpu(), own)
    adapter = None
    if adapted:
        adapter, added = low_rank(checks, device, dtype, (rows, 3, experts, width), expert, transposed)
        grad += added
    wanted, of_weight = gate_up.double().cpu(), torch.empty(rows, dtype=torch.float64)
    plain_backward(grad, wanted, wanted, unit, row_weight.double().cpu(), of_weight)
    partials = checks.empty(rows, kernel.tiles_of(width), dtype=torch.float32, device=device)
    kernel.gated_gradient(grad_y, weight, bounds, gate_up, gate_up, row_weight, partials, transposed, unit, adapter)
    checks.assert_close(gate_up, wanted, checks.TOLERANCE[dtype], "grad_gate_up")
    found = checks.empty(rows, dtype=torch.float32, device=device)
    for accumulate in (False, True):
        kernel.sum_tiles(partials, bounds, found, accumulate)
        checks.assert_close(found, of_weight * (1 + accumulate), checks.TOLERANCE[torch.float32], "grad_row_weight")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("unit", UNITS, ids=str)
@pytest.mark.parametrize(("transposed", "adapted"), [(False, True), (True, False)])
def test_sums_go_through_the_unit(checks, device, dtype, unit, transposed, adapted):
    for shape in SHAPES:
        check_forward(checks, device, dtype, unit, shape, transposed, adapted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("unit", UNITS, ids=str)
@pytest.mark.parametrize(("transposed", "adapted"), [(False, True), (True, False)])
def test_gradients_go_back_through_the_unit(checks, device, dtype, unit, transposed, adapted):
    for shape in SHAPES:
        check_backward(checks, device, dtype, unit, shape, transposed, adapted)


def test_other_experts_rows_stay(checks, device):
    """Of bounds that begin and end within the rows, only those between are read and written."""
    x, weight, bounds, bias, row_weight, _, _ = operands(
        checks, device, torch.float32, (6, 2, 4, 8, 20), transposed=False, adapted=False
    )
    part, first, end = bounds[1:4].contiguous(), int(bounds[1]), int(bounds[3])
    outside = torch.arange(len(x), device=device).sub(first).remainder(len(x)) >= end - first
    x[outside] = float("nan")
    gate_up, out = (torch.full((len(x), n), 7.0, device=device) for n in (40, 20))
    kernel.gated_product(x, weight[1:3], part, gate_up, out, row_weight, False, "silu", bias[1:3])
    partials, found = torch.zeros(len(x), kernel.tiles_of(20), device=device), torch.full((len(x),), 7.0, device=device)
    kernel.sum_tiles(partials, part, found, False)
    assert all(bool((t[outside] == 7.0).all()) for t in (gate_up, out, found))
    assert bool(torch.isfinite(out).all())
    assert bool((found[~outside] == 0.0).all())


@pytest.mark.gpu
@pytest.mark.parametrize("unit", UNITS, ids=str)
@pytest.mark.parametrize("adapted", [False, True])
def test_large_tiles(checks, gpu, unit, adapted):
    for shape in ((515, 4, 9, 256, 264), (300, 2, 8, 192, 1000)):
        check_forward(checks, gpu, torch.bfloat16, unit, shape, False, adapted)
        check_backward(checks, gpu, torch.bfloat16, unit, shape, False, adapted)
