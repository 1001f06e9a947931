"""Cross-entropy kernel against float64 autograd of torch's own loss."""

import pytest
import torch

from flexengine.kernels import cross_entropy

DTYPES = [torch.float32, torch.bfloat16]


def reference(logits, labels, soft_cap=0.0):
    given = logits = logits.double().requires_grad_()
    if soft_cap:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
    (grad,) = torch.autograd.grad(losses.sum(), given)
    return losses.detach(), grad


def check(checks, tokens, vocab_size, dtype, device, soft_cap=0.0):
    logits = checks.strided(tokens, vocab_size, dtype=dtype, device=device)
    logits.copy_(4 * checks.normal(tokens, vocab_size, dtype=dtype, device=device))
    labels = torch.randint(0, vocab_size, (tokens,), device=device)
    labels[0], labels[-1], labels[tokens // 2] = 0, vocab_size - 1, -100
    expected_losses, expected_grad = reference(logits, labels, soft_cap)
    losses = checks.empty(tokens, dtype=torch.float32, device=device)
    original = logits.clone()
    cross_entropy.cross_entropy_(logits, labels, losses, False, soft_cap)
    assert torch.equal(logits, original)
    checks.assert_close(losses, expected_losses, 1e-6, "losses without gradient")
    losses.fill_(float("nan"))
    cross_entropy.cross_entropy_(logits, labels, losses, True, soft_cap)
    checks.assert_close(losses, expected_losses, 1e-6, "losses")
    rounded = float((expected_grad.to(dtype).double() - expected_grad).norm() / expected_grad.norm())
    checks.assert_close(logits, expected_grad, max(checks.TOLERANCE[dtype], 1.01 * rounded), "gradient")
    assert losses[tokens // 2] == 0
    assert int(torch.count_nonzero(logits[tokens // 2])) == 0
    again = checks.strided(tokens, vocab_size, dtype=dtype, device=device)  # other strides may sum in another order
    again.copy_(original)
    cross_entropy.cross_entropy_(again, labels, losses, True, soft_cap)
    assert torch.equal(again, logits)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "vocab_size"), [(3, 5), (7, 1003), (4, 8192), (4, 20011)])
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_matches_float64(checks, device, tokens, vocab_size, dtype, soft_cap):
    check(checks, tokens, vocab_size, dtype, device, soft_cap)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "vocab_size"), [(513, 128256), (33, 256000), (33, 151937)])
@pytest.mark.parametrize("soft_cap", [0.0, 30.0])
def test_matches_float64_on_gpu(checks, gpu, tokens, vocab_size, dtype, soft_cap):
    check(checks, tokens, vocab_size, dtype, gpu, soft_cap)


def test_a_single_row_with_one_column(device):
    logits, losses = torch.full((1, 1), 3.0, device=device), torch.empty(1, device=device)
    cross_entropy.cross_entropy_(logits, torch.zeros(1, dtype=torch.int64, device=device), losses, write_grad=True)
    assert losses.item() == 0
    assert logits.item() == 0


def test_large_and_infinite_logits(device):
    """Logits of 1e4 and masked (-inf) columns, also a whole block of them, neither overflow nor give NaN."""
    logits = torch.full((2, 9000), float("-inf"), device=device)
    logits[0, :2] = torch.tensor([1e4, 1e4 - 1], device=device)
    logits[1, 8500:8502] = torch.tensor([-1e4, -1e4 - 1], device=device)
    labels = torch.tensor([1, 8500], device=device)
    expected_losses, expected_grad = reference(logits, labels)
    losses = torch.empty(2, device=device)
    cross_entropy.cross_entropy_(logits, labels, losses, write_grad=True)
    torch.testing.assert_close(losses, expected_losses.float())
    torch.testing.assert_close(logits, expected_grad.float())


def test_bad_values_show_in_the_loss(device):
    logits, losses = torch.zeros(3, 10, device=device), torch.zeros(3, device=device)
    logits[1, 4] = float("nan")
    cross_entropy.cross_entropy_(logits, torch.tensor([10, 2, -1], device=device), losses, write_grad=False)
    assert torch.isnan(losses).all()


def test_refuses_int32_labels(device):
    labels = torch.zeros(2, dtype=torch.int32, device=device)
    with pytest.raises(ValueError, match=r"labels must be torch.int64, got torch.int32"):
        cross_entropy.cross_entropy_(torch.zeros(2, 3, device=device), labels, torch.zeros(2, device=device), False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("soft_cap", [0.0, 5.0])
def test_weights_multiply_losses_and_gradients(checks, device, dtype, soft_cap):
    check_weights(checks, 7, 1003, dtype, device, soft_cap)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_multiply_losses_and_gradients_on_gpu(checks, gpu, dtype):
    check_weights(checks, 129, 128256, dtype, gpu, 0.0)


def check_weights(checks, tokens, vocab_size, dtype, device, soft_cap):
    logits = (4 * checks.normal(tokens, vocab_size, dtype=dtype, device=device)).to(dtype)
    labels = torch.randint(0, vocab_size, (tokens,), device=device)
    labels[2], weights = -100, torch.linspace(-1.0, 2.0, tokens, device=device)
    losses, expected_grad = reference(logits, labels, soft_cap)
    expected = weights[:, None] * expected_grad
    found = checks.empty(tokens, dtype=torch.float32, device=device)
    cross_entropy.cross_entropy_(logits, labels, found, True, soft_cap, weights)
    checks.assert_close(found, weights * losses, 1e-6, "losses")
    rounded = float((expected.to(dtype).double() - expected).norm() / expected.norm())
    checks.assert_close(logits, expected, max(checks.TOLERANCE[dtype], 1.01 * rounded), "gradient")
