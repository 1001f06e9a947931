"""Choice of experts, places of rows and the logits' gradient against plain torch, in any routing."""

import pytest
import torch

from flexengine.kernels import routing

SHAPES = [(1, 1, 1), (7, 8, 2), (65, 60, 6), (300, 128, 8), (33, 5, 5)]


def chosen_experts(routing_kind, tokens, experts, count, device):
    if routing_kind == "random":
        return torch.stack([torch.randperm(experts)[:count] for _ in range(tokens)]).int().to(device)
    return torch.full((tokens, count), experts - 1, dtype=torch.int32, device=device)


def check_places(checks, device, shape, routing_kind):
    """Rows are sorted by expert, and of one expert by token: as a stable sort places them."""
    tokens, experts, count = shape
    expert = chosen_experts(routing_kind, tokens, experts, count, device)
    weight = checks.normal(tokens, count, dtype=torch.float32, device=device)
    place = torch.full((tokens, count), -1, dtype=torch.int32, device=device)
    bounds = torch.full((experts + 1,), -1, dtype=torch.int32, device=device)
    blocks = routing.num_blocks(tokens * count, experts)
    counts = torch.full((1 + blocks, experts), -7, dtype=torch.int32, device=device)
    row_weight = checks.empty(tokens * count, dtype=torch.float32, device=device)
    routing.place_rows(expert, weight, counts, place, bounds, row_weight)
    sorted_experts, order = expert.flatten().sort(stable=True)
    wanted = torch.empty_like(order)
    wanted[order] = torch.arange(len(order), device=device)
    assert torch.equal(place.flatten().long(), wanted)
    starts = torch.searchsorted(sorted_experts, torch.arange(experts + 1, device=device, dtype=torch.int32))
    assert torch.equal(bounds.long(), starts)
    assert torch.equal(row_weight, weight.flatten()[order])


def check_choice(checks, device, shape, normalised, softmax):
    """The choice and the gradient of its weights, against float64 autograd."""
    tokens, experts, count = shape
    logits = checks.normal(tokens, experts, dtype=torch.float64, device=device).requires_grad_()
    probabilities = torch.softmax(logits, -1) if softmax else logits.sigmoid()
    top = probabilities.topk(count, dim=-1)
    least = 0.0 if softmax else 1e-20
    wanted = 2.5 * (top.values / (top.values.sum(-1, keepdim=True) + least) if normalised else top.values)
    p = probabilities.detach().float()
    expert = torch.full((tokens, count), -1, dtype=torch.int32, device=device)
    chosen = checks.empty(tokens, count, dtype=torch.float32, device=device)
    routing.choose(p, p, expert, chosen, 2.5, normalised, least)
    assert torch.equal(expert.long(), top.indices)
    checks.assert_close(chosen, wanted.detach(), 1e-6, "weights")
    place = torch.randperm(tokens * count, device=device).int().view(tokens, count)
    grad = checks.normal(tokens * count, dtype=torch.float32, device=device)
    added = checks.normal(experts, dtype=torch.float32, device=device)
    loss = (wanted * grad.double()[place.long()]).sum() + (probabilities * added.double()).sum()
    (wanted_grad,) = torch.autograd.grad(loss, logits)
    grad_logits = checks.empty(tokens, experts, dtype=torch.float32, device=device)
    routing.logits_gradient(p, expert, place, grad, added, grad_logits, 2.5, softmax, normalised, least)
    if experts > 1 or not softmax:
        checks.assert_close(grad_logits, wanted_grad, 1e-5, "gradient of logits")
    else:  # the softmax over one expert is 1, whatever its logit
        assert grad_logits.abs().max() < 1e-5


@pytest.mark.parametrize("kind", ["random", "all to one"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_are_placed_as_by_a_stable_sort(checks, device, shape, kind):
    check_places(checks, device, shape, kind)


@pytest.mark.pairs
@pytest.mark.parametrize("softmax", [True, False], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("normalised", [True, False], ids=["normalised", "as they are"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_choice_and_gradient_match_float64(checks, device, shape, normalised, softmax):
    check_choice(checks, device, shape, normalised, softmax)


def test_equal_scores_choose_the_lowest_and_bad_ones_stay_in_bounds(device):
    scores = torch.tensor([[0.0, 1.0, 1.0, 0.0, 1.0], [float("nan")] * 5, [float("-inf")] * 5], device=device)
    expert = torch.full((3, 3), 99, dtype=torch.int32, device=device)
    chosen = torch.empty(3, 3, device=device)
    routing.choose(scores, torch.zeros_like(scores), expert, chosen, 1.0, False, 0.0)
    assert expert[0].tolist() == [1, 2, 4]
    assert expert[1].tolist() == [0, 1, 2]
    assert ((expert >= 0) & (expert < 5)).all()


def test_no_tokens_have_no_rows(device):
    empty = torch.empty(0, 2, dtype=torch.int32, device=device)
    bounds = torch.full((5,), -1, dtype=torch.int32, device=device)
    counts = torch.full((1, 4), -1, dtype=torch.int32, device=device)
    weight = torch.empty(0, 2, device=device)
    routing.place_rows(empty, weight, counts, empty.clone(), bounds, torch.empty(0, device=device))
    assert bounds.tolist() == [0] * 5


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(16384, 64, 8), (4099, 128, 8), (2049, 256, 8), (5000, 8, 2)], ids=str)
def test_large_routings_on_gpu(checks, gpu, shape):
    check_places(checks, gpu, shape, "random")
    check_places(checks, gpu, shape, "all to one")
    check_choice(checks, gpu, shape, True, True)
    check_choice(checks, gpu, shape, False, False)
