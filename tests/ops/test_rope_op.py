"""RoPE: the plain path against autograd and a complex-number definition, the CUDA path against the same in float64."""

import pytest
import torch

from flexengine.ops.rope import RoPE, rope_

HEADS = [(4, 2), (3, 3), (6, 1)]  # grouped, multi-head, multi-query


def frequencies(rotary_dim):
    return 1.0 / (10000.0 ** (torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim))


def operands(h, seq_lens, n, g, width, scaling):
    op = RoPE("rope", "raw", "qkv", n, g, width, scaling)
    tokens, columns = sum(seq_lens), (n + 2 * g) * width
    # float32 angles are part of the definition, so the frequencies are rounded to float32 first
    chunk = h.chunk(seq_lens, inv_freq=frequencies(width).float())
    return op, chunk, {"raw": h.randn(tokens, columns)}, h.randn(tokens, columns)


def definition(raw, positions, inv_freq, n, g, width, scaling):
    """Each pair (x[i], x[i + R/2]) is a complex number turned by position * inv_freq[i]; values stay."""
    heads = raw.view(len(raw), n + 2 * g, width)
    angle = positions.double().cpu()[:, None] * inv_freq.double().cpu()[None]
    turn = torch.polar(torch.full_like(angle, scaling), angle)[:, None, :]
    half = inv_freq.numel()
    pairs = torch.complex(heads[:, : n + g, :half], heads[:, : n + g, half : 2 * half]) * turn
    rotated = torch.cat((pairs.real, pairs.imag, heads[:, : n + g, 2 * half :]), dim=-1)
    return torch.cat((rotated, heads[:, n + g :]), dim=1).view_as(raw)


def expected(op, chunk, inputs, grad):
    raw = inputs["raw"].detach().double().cpu().requires_grad_()
    y = definition(
        raw, chunk.positions, chunk.constants["inv_freq"], op.num_heads, op.num_kv_heads, op.head_dim, op.scaling
    )
    (grad_raw,) = torch.autograd.grad(y, raw, grad.double().cpu())
    return {"qkv": y}, {"raw": grad_raw}


@pytest.mark.parametrize("scaling", [1.0, 1.2079441541679836])
@pytest.mark.parametrize(("n", "g"), HEADS)
@pytest.mark.parametrize(("seq_lens", "width"), [((1,), 2), ((5, 1, 7), 8), ((13,), 6)])
def test_matches_autograd(harness, checks, seq_lens, width, n, g, scaling):
    op, chunk, inputs, grad = operands(harness, seq_lens, n, g, width, scaling)
    result = harness.run(op, chunk, inputs, grad_outputs={"qkv": grad})
    outputs, grads = expected(op, chunk, inputs, grad)
    checks.all_close(result.outputs, outputs)
    checks.all_close(result.grads, grads)


def test_values_stay_as_they_are(harness):
    op, chunk, inputs, _ = operands(harness, (6,), 4, 2, 8, 1.0)
    values = slice((4 + 2) * 8, None)
    assert torch.equal(harness.run(op, chunk, inputs).outputs["qkv"][:, values], inputs["raw"][:, values])


def test_inverse_is_the_transpose(harness, checks):
    """<R x, y> = <x, R^T y>, and R^T R = scaling^2."""
    x, y = harness.randn(9, 5, 8), harness.randn(9, 5, 8)
    positions, inv_freq = torch.arange(9, dtype=torch.int32), frequencies(8)
    forward, backward = x.clone(), y.clone()
    rope_(forward, positions, inv_freq, 1.3, 5, inverse=False)
    rope_(backward, positions, inv_freq, 1.3, 5, inverse=True)
    checks.close((forward * y).sum(), (x * backward).sum())
    rope_(forward, positions, inv_freq, 1.3, 5, inverse=True)
    checks.close(forward, x * 1.3**2)


def test_columns_beyond_the_rotary_part_stay(harness, checks):
    """Fewer frequencies than half the width rotate the first columns only."""
    x, inv_freq = harness.randn(5, 2, 10), frequencies(6)
    rotated = x.clone()
    rope_(rotated, torch.arange(5, dtype=torch.int32), inv_freq, 1.0, 2, inverse=False)
    assert torch.equal(rotated[..., 6:], x[..., 6:])
    flat = definition(x.reshape(5, -1), torch.arange(5), inv_freq, 2, 0, 10, 1.0)
    checks.close(rotated.reshape(5, -1), flat)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("n", "g", "width"), [(16, 4, 64), (8, 8, 128), (8, 1, 128), (4, 2, 80)])
@pytest.mark.usefixtures("deterministic")
def test_cuda_matches_definition(make_harness, checks, dtype, n, g, width):
    h = make_harness("cuda", dtype)
    op, chunk, inputs, grad = operands(h, (700, 1, 333), n, g, width, 1.2)
    result = h.run(op, chunk, inputs, grad_outputs={"qkv": grad})
    outputs, grads = expected(op, chunk, inputs, grad)
    # float32: the angle (up to 700 radians) is rounded to float32 before its sine is taken
    tolerance = 3e-5 if dtype == torch.float32 else checks.GPU_TOLERANCE[dtype]
    checks.all_close(result.outputs, outputs, tolerance)
    checks.all_close(result.grads, grads, tolerance)
    checks.same_bits(result, h.run(op, chunk, inputs, grad_outputs={"qkv": grad}))
