"""Lion and SGD against their formulas in float64 and, where torch has them, against torch."""

import pytest
import torch

from flexengine.optim import OPTIMIZERS, SGD, Lion, name_of
from flexengine.optim.rule import Update
from flexengine.optim.rules import rule_of


def steps_of(settings, weights, gradients, state="float64", compute="float64"):
    """Weights after a step on every gradient."""
    rule = rule_of(name_of(settings), "matrix", state, compute)
    dtype = getattr(torch, compute)
    planes = {"weights": weights.to(dtype).clone(), "momentum": torch.zeros(len(weights), dtype=dtype)}
    for step, grad in enumerate(gradients, start=1):
        planes["grad"] = grad.to(dtype)
        scale = torch.full((1,), 0.5, dtype=dtype)
        rule.update(Update(planes, scale, settings, settings.lr, settings.weight_decay, step, 0, 0))
    return planes["weights"]


@pytest.fixture
def problem():
    torch.manual_seed(0)
    return torch.randn(1000, dtype=torch.float64), [torch.randn(1000, dtype=torch.float64) for _ in range(5)]


@pytest.mark.parametrize(("compute", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_lion_is_the_published_formula(problem, compute, tolerance):
    weights, gradients = problem
    expected, momentum = weights.clone(), torch.zeros_like(weights)
    for grad in gradients:
        update = torch.sign(0.9 * momentum + 0.1 * 0.5 * grad)
        expected -= 1e-2 * (update + 0.1 * expected)
        momentum = 0.99 * momentum + 0.01 * 0.5 * grad
    actual = steps_of(Lion(lr=1e-2, weight_decay=0.1), weights, gradients, compute, compute)
    assert (actual.double() - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(("compute", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_sgd_is_torchs(problem, compute, tolerance):
    weights, gradients = problem
    expected = weights.clone().requires_grad_()
    optimizer = torch.optim.SGD([expected], lr=1e-2, momentum=0.9)
    for grad in gradients:
        expected.grad = 0.5 * grad
        optimizer.step()
    actual = steps_of(SGD(lr=1e-2), weights, gradients, compute, compute)
    assert (actual.double() - expected.detach()).norm() <= tolerance * expected.norm()


def test_sgd_decays_weights_apart_from_gradients(problem):
    weights, _ = problem
    decayed = steps_of(SGD(lr=1e-2, weight_decay=0.5), weights, [torch.zeros(1000)])
    assert torch.allclose(decayed, weights * 0.995)


def test_lion_does_not_move_without_gradients(problem):
    weights, _ = problem
    assert torch.equal(steps_of(Lion(lr=1e-2), weights, [torch.zeros(1000)]), weights)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (Lion, {"lr": -1.0}, "Lion lr"),
        (Lion, {"betas": (0.9, 1.0)}, "Lion beta2"),
        (SGD, {"momentum": 1.0}, "SGD momentum"),
        (SGD, {"weight_decay": float("nan")}, "SGD weight_decay"),
    ],
)
def test_settings_out_of_range_are_refused(kind, values, message):
    with pytest.raises(ValueError, match=message):
        kind(**values)


def test_every_optimizer_has_a_name_and_a_rule():
    for name, kind in OPTIMIZERS.items():
        assert name_of(kind()) == name
        assert rule_of(name, "vector", "float32", "bfloat16").states
