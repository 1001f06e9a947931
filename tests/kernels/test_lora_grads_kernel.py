"""Both gradients of adapters' products in one pass over grad_y, against float64."""

import itertools

import pytest
import torch

from flexengine.kernels import lora_grads
from flexengine.ops.adapters.lora_grads import MOST_RANK, partial_sums
from flexengine.ops.glu import GLU
from flexengine.ops.linear import Linear
from tests.adapter_ops import adapted, run_ops


@pytest.mark.parametrize(
    ("tokens", "widths", "rank", "spans", "dtype"),
    [
        (150, (32, 16, 40), 5, 2, torch.float32),
        (70, (16, 17), 16, 1, torch.bfloat16),
        (9, (64,), 3, 4, torch.float32),  # spans without tokens
    ],
    ids=str,
)
def test_matches_float64(checks, device, tokens, widths, rank, spans, dtype):
    columns, width, modules = 16, sum(widths), len(widths)
    grad = checks.strided(tokens, width, dtype=dtype, device=device)
    grad.copy_(checks.normal(tokens, width, dtype=dtype, device=device))
    low = checks.normal(tokens, (modules + 1) * rank, dtype=dtype, device=device)[:, rank:]
    up = checks.normal(width, rank, dtype=dtype, device=device)
    found = []
    for _ in range(2):
        grad_low = checks.strided(tokens, modules * rank, dtype=dtype, device=device)
        parts = checks.empty(tokens, -(-width // columns) * rank, dtype=torch.float32, device=device)
        sums = checks.empty(spans, width * rank, dtype=torch.float32, device=device)
        grad_up = checks.empty(width, rank, dtype=torch.float32, device=device)
        lora_grads.write_gradients(grad, low, up, 0.5, grad_low, parts, sums, widths, columns)
        lora_grads.add_parts(sums, grad_up, True)
        found.append((grad_low.clone(), grad_up.clone()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    grads, ups = grad.double().split(widths, dim=1), up.double().split(widths)
    expected = torch.cat([0.5 * own @ b for own, b in zip(grads, ups, strict=True)], dim=1)
    checks.assert_close(found[0][0], expected, checks.TOLERANCE[dtype], "grad_low")
    lows = low.double().split(rank, dim=1)
    expected = torch.cat([own.t() @ mine for own, mine in zip(grads, lows, strict=True)])
    checks.assert_close(found[0][1], expected, checks.TOLERANCE[torch.float32], "grad_B")
    lora_grads.add_parts(sums, grad_up, False)
    checks.assert_close(grad_up, 2 * expected, checks.TOLERANCE[torch.float32], "grad_B of two chunks")


@pytest.mark.parametrize("before_a_unit", [False, True])
@pytest.mark.parametrize("columns", [16, 256])  # modules share a call, or not
def test_a_layer_has_the_gradients_of_separate_passes(before_a_unit, columns, checks, monkeypatch):
    torch.manual_seed(2)
    monkeypatch.setattr("flexengine.ops.adapters.lora_grads.COLUMNS", columns)
    unit = (GLU("glu", "y", "a", 24),) if before_a_unit else ()
    ops = adapted((Linear("l", "x", "y", 24, 48, "w"), *unit), {"l": ((0, 24), (24, 48))})
    shapes = {"w": (48, 24), "l.lora_A": (6, 24), "l.lora_B": (48, 3)}
    params = {name: torch.randn(*shape).bfloat16() for name, shape in shapes.items()}
    x, output, found = torch.randn(70, 24).bfloat16(), ops[-1].outputs[0], []
    grad = torch.randn(70, *output.shape).bfloat16()
    for kernel in (False, True):
        monkeypatch.setattr(
            "flexengine.ops.adapters.lora_grads.use_product_kernel", lambda tensor, kernel=kernel: kernel
        )
        _, grads, sums = run_ops(ops, params, {"x": x}, {output.name: grad}, chunks=2)
        found.append(grads | sums)
    assert found[0].keys() == found[1].keys() == {"x", "l.lora_A", "l.lora_B"}
    for name, expected in found[0].items():
        checks.assert_close(found[1][name], expected, checks.TOLERANCE[torch.bfloat16], name)


@pytest.mark.parametrize(
    ("widths", "expected"),
    [((256, 512, 100), [3]), ((100, 256), [1, 1]), ((256, 256, 256, 256), [3, 1]), ((256, 300, 256), [2, 1])],
    ids=str,
)
def test_modules_share_a_call_where_no_sum_is_of_two(widths, expected):
    ends = list(itertools.accumulate(widths))
    spans = [range(end - width, end) for width, end in zip(widths, ends, strict=True)]
    assert [len(numbers) for numbers in lora_grads.runs(spans, 256)] == expected
    apart = [range(own.start + 256 * number, own.stop + 256 * number) for number, own in enumerate(spans)]
    assert [len(numbers) for numbers in lora_grads.runs(apart, 256)] == [1] * len(widths)


def test_large_ranks_take_a_pass_for_each_gradient():
    assert partial_sums("l", (64,), MOST_RANK) is not None
    assert partial_sums("l", (64,), MOST_RANK + 1) is None
