"""Rows of experts and grouped products against float64, with experts that have no rows and one that has all."""

import itertools

import pytest
import torch

from flexengine.kernels import expert_biases, grouped_gradient_tma, grouped_tma, grouped_walk
from flexengine.kernels import experts as rows_kernel
from flexengine.kernels import grouped as kernel

DTYPES = [torch.float32, torch.bfloat16]
ROUTINGS = ["random", "all to one", "last alone"]


def route(routing, tokens, count, num_experts, device):
    """(place, bounds, expert of each row)."""
    chosen = torch.stack([torch.randperm(num_experts)[:count] for _ in range(tokens)])
    if routing == "all to one":
        chosen = torch.full((tokens, count), num_experts // 2)
    elif routing == "last alone":
        chosen = torch.full((tokens, count), num_experts - 1)
    expert, order = chosen.flatten().sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    bounds = torch.searchsorted(expert, torch.arange(num_experts + 1))
    return place.view(tokens, count).int().to(device), bounds.int().to(device), expert


def check_rows(checks, device, dtype, tokens, count, width):
    place, _, _ = route("random", tokens, count, 8, device)
    x = checks.normal(tokens, width, dtype=dtype, device=device)
    rows = checks.empty(tokens * count, width, dtype=dtype, device=device)
    rows_kernel.dispatch(x, place, rows)
    assert torch.equal(rows[place.flatten().long()], x.repeat_interleave(count, dim=0))
    rows = checks.normal(tokens * count, width, dtype=dtype, device=device)
    added, out = (checks.normal(tokens, width, dtype=dtype, device=device) for _ in range(2))
    out.fill_(float("nan"))
    total = rows.double()[place.long()].sum(1)
    rows_kernel.combine(rows, place, out, None)
    checks.assert_close(out, total, checks.TOLERANCE[dtype], "sum")
    total += added.double()
    rows_kernel.combine(rows, place, added, added)
    checks.assert_close(added, total, checks.TOLERANCE[dtype], "sum on top")


def low_rank(checks, device, dtype, sizes, expert, transposed):
    """An adapter, and what it adds in float64."""
    count, width, num_experts, columns = sizes
    low = checks.normal(count, width, dtype=dtype, device=device)
    shape = (num_experts, width, columns) if transposed else (num_experts, columns, width)
    up = checks.normal(*shape, dtype=dtype, device=device)
    own = (up.mT if transposed else up).double().cpu()[expert]
    return kernel.LowRank(low, up, transposed), torch.einsum("rw,rfw->rf", low.double().cpu(), own)


def check_products(checks, device, dtype, routing, shape, width=3):
    tokens, count, num_experts, inner, columns = shape
    _, bounds, expert = route(routing, tokens, count, num_experts, device)
    x = checks.normal(tokens * count, inner, dtype=dtype, device=device)
    weight = checks.normal(num_experts, columns, inner, dtype=dtype, device=device)
    out = checks.empty(tokens * count, columns, dtype=dtype, device=device)
    kernel.grouped_product(x, weight, bounds, out, transposed=False)
    own = weight.double().cpu()[expert]
    checks.assert_close(out.cpu(), torch.einsum("rd,rfd->rf", x.double().cpu(), own), checks.TOLERANCE[dtype], "y")
    gains = 1.0 + 0.01 * torch.randn(num_experts, columns, device=device)
    adapter, added = low_rank(checks, device, dtype, (len(x), width, num_experts, columns), expert, width == 3)
    kernel.grouped_product(x, weight, bounds, out.fill_(float("nan")), transposed=False, adapter=adapter, gains=gains)
    wanted = (torch.einsum("rd,rfd->rf", x.double().cpu(), own) + added) * gains.double().cpu()[expert]
    checks.assert_close(out.cpu(), wanted, checks.TOLERANCE[dtype], "y with adapters and gains")
    grad_y = checks.normal(tokens * count, columns, dtype=dtype, device=device)
    grad_x = checks.empty(tokens * count, inner, dtype=dtype, device=device)
    kernel.grouped_product(grad_y, weight, bounds, grad_x, transposed=True)
    wanted = torch.einsum("rf,rfd->rd", grad_y.double().cpu(), own)
    checks.assert_close(grad_x.cpu(), wanted, checks.TOLERANCE[dtype], "grad_x")
    acc = checks.empty(num_experts, columns, inner, dtype=torch.float32, device=device)
    kernel.grouped_weight_gradient(grad_y, x, bounds, acc, accumulate=False)
    terms = torch.einsum("rf,rd->rfd", grad_y.double().cpu(), x.double().cpu())
    wanted = torch.zeros(num_experts, columns, inner, dtype=torch.float64).index_add_(0, expert, terms)
    checks.assert_close(acc.cpu(), wanted, 1e-5, "grad_weight")
    kernel.grouped_weight_gradient(grad_y, x, bounds, acc, accumulate=True)
    checks.assert_close(acc.cpu(), 2 * wanted, 1e-5, "twice")


def check_biases(checks, device, dtype, routing, shape, weighted):
    """Rows are multiplied by weights of their own, or not; sums over NaN and on top of what is there."""
    tokens, count, num_experts, inner, columns = shape
    _, bounds, expert = route(routing, tokens, count, num_experts, device)
    x = checks.normal(tokens * count, inner, dtype=dtype, device=device)
    weight = checks.normal(num_experts, inner, columns, dtype=dtype, device=device)
    bias = checks.normal(num_experts, columns, dtype=dtype, device=device)
    row_weight = torch.rand(tokens * count, device=device) if weighted else None
    out = checks.empty(tokens * count, columns, dtype=dtype, device=device)
    kernel.grouped_product(x, weight, bounds, out, True, bias, row_weight)
    scale = torch.ones(tokens * count, 1).double() if row_weight is None else row_weight.double().cpu()[:, None]
    own = torch.einsum("rd,rdf->rf", x.double().cpu(), weight.double().cpu()[expert])
    checks.assert_close(out, own + scale * bias.double().cpu()[expert], checks.TOLERANCE[dtype], "y")
    grad_y = checks.normal(tokens * count, columns, dtype=dtype, device=device)
    wanted = torch.zeros(num_experts, columns).double().index_add_(0, expert, scale * grad_y.double().cpu())
    acc = checks.empty(num_experts, columns, dtype=torch.float32, device=device)
    expert_biases.bias_gradient(grad_y, bounds, row_weight, acc, accumulate=False)
    checks.assert_close(acc, wanted, 1e-5, "grad_bias")
    expert_biases.bias_gradient(grad_y, bounds, row_weight, acc, accumulate=True)
    checks.assert_close(acc, 2 * wanted, 1e-5, "twice")
    wanted = (grad_y.double().cpu() * bias.double().cpu()[expert]).sum(1)
    found = checks.empty(tokens * count, dtype=torch.float32, device=device)
    expert_biases.row_weight_gradient(grad_y, bias, bounds, found, accumulate=False)
    checks.assert_close(found, wanted, 1e-5, "grad_row_weight")
    expert_biases.row_weight_gradient(grad_y, bias, bounds, found, accumulate=True)
    checks.assert_close(found, 2 * wanted, 1e-5, "twice")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "count", "width"), [(1, 1, 5), (7, 2, 33), (5, 3, 2500)])
def test_rows_are_dispatched_and_combined(checks, device, dtype, tokens, count, width):
    check_rows(checks, device, dtype, tokens, count, width)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("shape", [(3, 1, 2, 8, 16), (20, 2, 5, 33, 17), (70, 2, 3, 65, 130)], ids=str)
def test_products_match_float64(checks, device, dtype, routing, shape):
    check_products(checks, device, dtype, routing, shape)


@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_tiles_that_the_card_loads_match_float64(checks, device, routing, transposed):
    """Rows of other experts, columns of the next and terms beyond the matrix come into tiles, and not into results."""
    check_descriptors(checks, device, routing, transposed, (35, 2, 5, 128, 136), 32, kernel.Tiling(16, 32, 64, 8, 4, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("width", [16, 32, 128])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_tiles_that_the_card_loads_match_float64_on_gpu(checks, gpu, routing, width, transposed):
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a card that loads tiles")
    check_descriptors(checks, gpu, routing, transposed, (300, 4, 24, 192, 328), width)


def test_walks_take_no_more_shared_memory_than_there_is():
    """Where an adapter's operands are too many, a program takes a tile."""
    beside = {
        width: grouped_walk.walk_beside(kernel.LowRank(torch.empty(1, width), torch.empty(1, 8, width)))
        for width in (16, 64, 80, 128)
    }
    found = {width: walk and walk.parts for width, walk in beside.items()}
    assert found == {16: 2, 64: 2, 80: 4, 128: None}
    assert grouped_walk.walk_beside(None) == grouped_walk.PRODUCT


COUNTS = {
    "odd": (33, 7, 65),
    "empty": (0, 40, 0, 0, 31, 0),
    "one row": (1, 1, 16, 1),
    "whole tiles": (16, 32, 48),
    "none": (0, 0, 0),
}
GRADIENT_TILINGS = {
    "wide": grouped_gradient_tma.GradientTiling(kernel.Tiling(32, 64, 16, 2, 4, 3)),
    "high, in 4 parts, a program each": grouped_gradient_tma.GradientTiling(kernel.Tiling(64, 32, 16, 8, 4, 3), 4, 0),
    "whole, two programs": grouped_gradient_tma.GradientTiling(kernel.Tiling(128, 128, 64, 8, 4, 3), 1, 2),
}


def gradient_operands(checks, device, counts, columns, inner, before=5, behind=70):
    """(grad_y, x, bounds, gradient in float64); rows before the first expert and behind the last are NaN."""
    bounds = torch.tensor((before, *counts)).cumsum(0)
    shape = int(bounds[-1]) + behind
    grad_y, x = (checks.normal(shape, width, dtype=torch.bfloat16, device=device) for width in (columns, inner))
    for matrix in (grad_y, x):
        matrix[:before] = matrix[shape - behind :] = float("nan")
    pieces = [slice(start, end) for start, end in itertools.pairwise(bounds.tolist())]
    wanted = torch.stack([grad_y[rows].double().t() @ x[rows].double() for rows in pieces])
    return grad_y, x, bounds.int().to(device), wanted


@pytest.mark.parametrize("tiling", GRADIENT_TILINGS.values(), ids=GRADIENT_TILINGS)
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_gradients_of_tiles_that_the_card_moves_match_float64(checks, device, counts, tiling):
    """Tiles end within the matrix and beyond it; a program has some, or none."""
    grad_y, x, bounds, wanted = gradient_operands(checks, device, counts, 136, 72)
    acc = checks.empty(len(counts), 136, 72, dtype=torch.float32, device=device)
    grouped_gradient_tma.launch(grad_y, x, bounds, acc, False, tiling)
    checks.assert_close(acc, wanted, 1e-5, "grad_weight")
    grouped_gradient_tma.launch(grad_y, x, bounds, acc, True, tiling)
    checks.assert_close(acc, 2 * wanted, 1e-5, "twice")


@pytest.mark.gpu
@pytest.mark.parametrize("counts", [*COUNTS.values(), (300, 0, 1, 1031)], ids=[*COUNTS, "many"])
def test_gradients_of_tiles_that_the_card_moves_match_float64_on_gpu(checks, gpu, counts):
    """Sums that the engine adds have the bits of those that programs load, add to and store; so has every run."""
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("needs a card that loads tiles")
    grad_y, x, bounds, wanted = gradient_operands(checks, gpu, counts, 328, 584)
    assert kernel.gradient_takes_descriptors(grad_y, x)
    acc = checks.empty(len(counts), 328, 584, dtype=torch.float32, device=gpu)
    kernel.grouped_weight_gradient(grad_y, x, bounds, acc, accumulate=False)
    checks.assert_close(acc, wanted, 1e-5, "grad_weight")
    kernel.grouped_weight_gradient(grad_y, x, bounds, acc, accumulate=False)
    start = torch.randn_like(acc)
    once = start + acc
    for programs, parts, adds in ((1, 2, True), (0, 2, True), (1, 4, False)):
        tiling = grouped_gradient_tma.WRITTEN._replace(programs=programs, parts=parts, adds=adds)
        acc.copy_(start)
        grouped_gradient_tma.launch(grad_y, x, bounds, acc, True, tiling)
        assert torch.equal(acc, once)


def check_descriptors(checks, device, routing, transposed, shape, width, tiling=None):
    tokens, count, num_experts, inner, columns = shape
    _, bounds, expert = route(routing, tokens, count, num_experts, device)
    x = checks.normal(tokens * count, inner, dtype=torch.bfloat16, device=device)
    sizes = (num_experts, inner, columns) if transposed else (num_experts, columns, inner)
    weight = checks.normal(*sizes, dtype=torch.bfloat16, device=device)
    bias = checks.normal(num_experts, columns, dtype=torch.bfloat16, device=device)
    out = checks.empty(tokens * count, columns, dtype=torch.bfloat16, device=device)
    adapter, added = low_rank(checks, device, torch.bfloat16, (len(x), width, num_experts, columns), expert, transposed)
    operands = (x, weight, bounds, out, transposed, bias, None, adapter)
    if tiling is None:
        assert kernel.takes_descriptors(x, out, adapter)
        kernel.grouped_product(*operands)
    else:
        grouped_tma.launch(*operands, None, tiling)
    by_tile = out.clone()
    walk = grouped_walk.PRODUCT if tiling is None else grouped_walk.Walk(tiling)
    grouped_walk.launch(*operands[:3], out.fill_(float("nan")), *operands[4:], None, walk)
    assert torch.equal(out, by_tile)
    own = (weight.mT if transposed else weight).double().cpu()[expert]
    wanted = torch.einsum("rd,rfd->rf", x.double().cpu(), own) + added + bias.double().cpu()[expert]
    checks.assert_close(out.cpu(), wanted, checks.TOLERANCE[torch.bfloat16], "y")


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("weighted", [False, True], ids=["as they are", "weighted"])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_biases_match_float64(checks, device, dtype, routing, weighted):
    check_biases(checks, device, dtype, routing, (20, 2, 5, 33, 70), weighted)


@pytest.mark.parametrize(("dtype", "weighted"), zip(DTYPES, (False, True), strict=True), ids=str)
def test_biases_of_more_columns_than_a_block_match_float64(checks, device, dtype, weighted):
    check_biases(checks, device, dtype, "random", (7, 2, 3, 9, 2100), weighted)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_products_match_float64_on_gpu(checks, gpu, dtype, routing):
    check_rows(checks, gpu, dtype, 515, 8, 2048)
    check_products(checks, gpu, dtype, routing, (300, 4, 64, 136, 96), width=24)
    check_biases(checks, gpu, dtype, routing, (300, 4, 64, 136, 96), weighted=True)
