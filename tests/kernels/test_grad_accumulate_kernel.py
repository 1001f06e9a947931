"""Gradient accumulation kernel: exact bits of the stored values, squares of what was stored."""

import pytest
import torch

from flexengine.kernels import grad_accumulate
from flexengine.runtime import gradients
from flexengine.schedule import fixed_slots

DTYPES = [torch.float32, torch.bfloat16]


def check(checks, num_elements, num_parts, dtype, has_previous, device):
    acc = torch.randn(num_elements, device=device)
    previous = checks.normal(num_elements, dtype=dtype, device=device)
    stored = previous.clone() if has_previous else checks.empty(num_elements, dtype=dtype, device=device)
    squares = checks.empty(num_parts, dtype=torch.float32, device=device)
    grad_accumulate.grad_accumulate(acc, stored, has_previous, squares)
    expected = (acc + previous.float() if has_previous else acc).to(dtype)
    assert torch.equal(stored, expected)
    checks.assert_close(squares.double().sum(), expected.double().square().sum(), 1e-6, "squared norm")
    again = previous.clone() if has_previous else torch.zeros_like(stored)
    squares_again = torch.empty_like(squares)
    grad_accumulate.grad_accumulate(acc, again, has_previous, squares_again)
    assert torch.equal(squares, squares_again)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_previous", [False, True])
@pytest.mark.parametrize(("num_elements", "num_parts"), [(1, 1), (1, 4), (5003, 3), (40_000, 4)])
def test_adds_rounds_and_reduces(checks, device, num_elements, num_parts, dtype, has_previous):
    check(checks, num_elements, num_parts, dtype, has_previous, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_previous", [False, True])
@pytest.mark.parametrize("num_elements", [58_720_256, 12_345_677])
def test_adds_rounds_and_reduces_on_gpu(checks, gpu, num_elements, dtype, has_previous):
    check(checks, num_elements, 1024, dtype, has_previous, gpu)


def test_parts_hold_consecutive_runs(device):
    """Each part is the sum over its own run of blocks, so the partition is the documented one."""
    acc = torch.zeros(3 * 4096, device=device)
    acc[4096 * 2] = 3.0
    stored, squares = torch.empty_like(acc), torch.empty(2, device=device)
    grad_accumulate.grad_accumulate(acc, stored, False, squares)
    assert squares.tolist() == [0.0, 9.0]


def test_non_finite_gradients_reach_the_norm(device):
    for bad in (float("nan"), float("inf")):
        acc = torch.tensor([1.0, bad], device=device)
        stored, squares = torch.empty(2, dtype=torch.bfloat16, device=device), torch.empty(1, device=device)
        grad_accumulate.grad_accumulate(acc, stored, False, squares)
        assert not torch.isfinite(squares).any()


def test_refuses_no_parts(device):
    with pytest.raises(ValueError, match="at least one element"):
        grad_accumulate.grad_accumulate(*torch.zeros(2, 4, device=device), False, torch.zeros(0, device=device))


def test_pieces_store_and_sum_what_the_whole_does(device):
    """Each piece has whole parts; the last one also those that nobody uses."""
    generator = torch.Generator().manual_seed(3)
    acc, stored = (torch.randn(30_001, generator=generator).to(device) for _ in range(2))
    stored = stored.to(torch.bfloat16)
    whole, squares = stored.clone(), torch.full((8,), torch.nan, device=device)
    grad_accumulate.grad_accumulate(acc, whole, True, squares)
    in_pieces, squares_of_pieces = stored.clone(), torch.full((8,), torch.nan, device=device)
    for first, last in ((0, 2), (2, 3), (3, 8)):
        span = slice(4096 * first, 4096 * last)
        grad_accumulate.grad_accumulate(acc[span], in_pieces[span], True, squares_of_pieces[first:last], 4096)
    assert torch.equal(in_pieces, whole)
    assert torch.equal(squares_of_pieces, squares)
    with pytest.raises(ValueError, match="7 parts of 4096 elements do not hold 30001"):
        grad_accumulate.grad_accumulate(acc, stored, True, squares[:7], 4096)


ROWS = ["one", "both", "one elsewhere"]


def check_fold(checks, device, num_elements, dtype, has_previous, rounds, rows):
    """One kernel stores what one call for each part does, one after the other, and has the squares of the last."""
    wide = torch.randn(2, rounds, num_elements + 24, device=device)
    wide[:, :, :9] = -0.0
    first, second = wide[0, :, 8:-16], wide[1, :, 8:-16] if rows == "both" else None
    previous = checks.normal(num_elements, dtype=dtype, device=device)
    expected, stored = (previous.clone() if has_previous else torch.full_like(previous, torch.nan) for _ in range(2))
    squares_expected, squares = (torch.full((64,), torch.nan, device=device) for _ in range(2))
    begun = has_previous
    for number in range(rounds):
        for each in (first,) if second is None else (first, second):
            grad_accumulate.grad_accumulate(each[number].clone(), expected, begun, squares_expected)
            begun = True
    elsewhere = None
    if rows == "one elsewhere":
        elsewhere = rounds // 2, first[rounds // 2].clone()
        first[rounds // 2] = torch.nan
    grad_accumulate.fold(first, second, stored, has_previous, squares, elsewhere=elsewhere)
    assert torch.equal(stored, expected)
    assert torch.equal(stored.signbit(), expected.signbit())
    assert torch.equal(squares, squares_expected)


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_previous", [False, True])
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("num_elements", "rounds"), [(1, 1), (5003, 3), (12_288, 4)])
def test_folding_is_adding_part_after_part(checks, device, num_elements, rounds, rows, has_previous, dtype):
    check_fold(checks, device, num_elements, dtype, has_previous, rounds, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("num_elements", [54_525_952, 12_345_677])
def test_folding_is_adding_part_after_part_on_gpu(checks, gpu, num_elements, rows, dtype):
    check_fold(checks, gpu, num_elements, dtype, True, 4, rows)


def test_folding_refuses_rows_of_two_lengths(device):
    first, second = torch.zeros(2, 8, device=device), torch.zeros(3, 8, device=device)
    with pytest.raises(ValueError, match=r"shapes \[2, 8\] and \[3, 8\]"):
        grad_accumulate.fold(first, second, torch.zeros(8, device=device), False, torch.zeros(1, device=device))
    with pytest.raises(ValueError, match="row 2 lies elsewhere, of 2"):
        grad_accumulate.fold(first, None, first[0], False, first[1], elsewhere=(2, first[0]))


def test_folded_pieces_of_rounds_are_what_finishing_round_after_round_stores(device, monkeypatch):
    """Owners of pieces add up all rounds' parts; their partial sums give the sum of squares of the whole."""
    monkeypatch.setattr(gradients, "use_kernel", lambda tensor: True)
    monkeypatch.setattr(fixed_slots, "PARTIAL_SQUARES", 8)
    generator = torch.Generator().manual_seed(4)
    rounds = [torch.randn(30_001, generator=generator).to(device) for _ in range(3)]
    stored = torch.zeros(30_001, dtype=torch.bfloat16, device=device)
    whole, partial, totals = stored.clone(), torch.empty(8, device=device), torch.empty(2, dtype=torch.float64)
    for number, acc in enumerate(rounds):
        squares = gradients.Squares(partial, totals[0], 0, 30_001)
        gradients.finish_gradient(acc, whole, number > 0, squares)
    table = torch.zeros(1, 8, dtype=torch.float64, device=device)
    for first, last in ((0, 12_288), (12_288, 30_001)):
        squares = gradients.RunSquares(partial, table[0], first, 30_001)
        gradients.fold_parts([torch.stack(rounds)[:, first:last]], None, stored[first:last], False, squares)
    gradients.sum_parts(table, totals[1:], [30_001], torch.float32)
    assert torch.equal(stored, whole)
    assert totals[0] == totals[1]
