"""Gradient scale: token mean and global-norm clipping in one number."""

import pytest
import torch

from flexengine.optim.clipping import gradient_scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("max_grad_norm", [0.1, 1.0, 100.0])
def test_matches_torch_clipping_of_mean_gradients(max_grad_norm, dtype):
    tokens, sums = 37, [torch.randn(50, dtype=dtype) * 20, torch.randn(7, dtype=dtype)]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in sums]
    for parameter, gradient in zip(parameters, sums, strict=True):
        parameter.grad = gradient / tokens
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_grad_norm)
    squares = torch.stack([gradient.square().sum() for gradient in sums])
    scales, grad_norm = gradient_scales(squares, tokens, max_grad_norm)
    assert (scales.shape, grad_norm.shape) == ((2,), (1,))
    assert scales.dtype == grad_norm.dtype == torch.float32
    torch.testing.assert_close(grad_norm[0], norm.float())
    for parameter, gradient, scale in zip(parameters, sums, scales, strict=True):
        torch.testing.assert_close(gradient * scale.to(dtype), parameter.grad)


def test_without_clipping_only_the_mean():
    scales, norm = gradient_scales(torch.tensor([9.0, 16.0]), 4, None)
    assert scales.tolist() == [0.25, 0.25]
    assert norm.item() == 1.25


@pytest.mark.parametrize(("max_grad_norm", "skipped"), [(None, [False, True, False]), (1.0, [True] * 3)])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_norm_gives_nan_scales(bad, max_grad_norm, skipped):
    scales, norm = gradient_scales(torch.tensor([1.0, bad, 4.0]), 4, max_grad_norm)
    assert torch.isnan(scales).tolist() == skipped
    assert not torch.isfinite(norm).any()


def test_without_clipping_a_scale_depends_on_its_own_gradient_alone():
    squares = torch.rand(5, dtype=torch.float64)
    scales, _ = gradient_scales(squares, 7, None)
    alone = [gradient_scales(squares[i : i + 1], 7, None)[0] for i in range(5)]
    assert torch.equal(scales, torch.cat(alone))


def test_zero_gradients_are_no_division_by_zero():
    scales, norm = gradient_scales(torch.zeros(3), 2, 1.0)
    assert (scales.tolist(), norm.item()) == ([0.5] * 3, 0.0)


@pytest.mark.parametrize(
    ("squares", "tokens", "max_grad_norm", "message"),
    [
        (torch.ones(1), 0, 1.0, "loss_weight must be above 0, got 0"),
        (torch.ones(1), 1, 0.0, "max_grad_norm must be above 0, or None for no clipping, got 0.0"),
        (torch.ones(1, 1), 1, 1.0, "norm_squares must be a float32 or float64 vector"),
        (torch.ones(1, dtype=torch.bfloat16), 1, 1.0, "got torch.bfloat16"),
    ],
)
def test_refuses_what_has_no_meaning(squares, tokens, max_grad_norm, message):
    with pytest.raises(ValueError, match=message):
        gradient_scales(squares, tokens, max_grad_norm)
