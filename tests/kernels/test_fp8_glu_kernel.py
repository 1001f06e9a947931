"""Units that write codes: bit for bit what the kernels of units and of rounding by blocks make one after the other."""

import pytest
import torch

from flexengine.kernels import fp8_blocks, fp8_glu, glu

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # the interpreter computes with numpy
LIMITS = (448.0, 1e-30)


def side(codes, scales, device):
    """Buffers that hold NaN."""
    numbers = torch.full(scales, float("nan"), device=device)
    return torch.full(codes, 0x7F, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn), numbers


def same(found, wanted):
    assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(found[1].nan_to_num(-1.0), wanted[1].nan_to_num(-1.0))


def tensors(tokens, width, dtype, device):
    spread = torch.exp(torch.randn(tokens, 2 * width))
    gate_up, grad = torch.randn(tokens, 2 * width) * spread, 1e-3 * torch.randn(tokens, width)
    gate_up[tokens // 2, 3], gate_up[0, width], grad[tokens - 1, 5] = float("nan"), float("inf"), float("-inf")
    return gate_up.to(device, dtype), grad.to(device, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "width", "activation"), [(37, 128, "silu"), (130, 256, "gelu_tanh")])
def test_codes_are_those_of_the_values(device, tokens, width, activation, dtype):
    gate_up, grad = tensors(tokens, width, dtype, device)
    unit, grads = torch.full_like(grad, float("nan")), torch.full_like(gate_up, float("nan"))
    glu.glu_forward(gate_up, unit, activation)
    glu.glu_backward(grad, gate_up, grads, activation)
    wanted = side((tokens, width), (width // 128, tokens), device)
    fp8_blocks.round_vectors(unit, *LIMITS, wanted, None)
    for out in (None, torch.full_like(unit, float("nan"))):
        found = side((tokens, width), (width // 128, tokens), device)
        fp8_glu.glu_forward(gate_up, *found, *LIMITS, activation, out)
        same(found, wanted)
        assert out is None or torch.equal(out.nan_to_num(-1.0), unit.nan_to_num(-1.0))
    wanted, found = (side((tokens, 2 * width), (2 * width // 128, tokens), device) for _ in range(2))
    fp8_blocks.round_vectors(grads, *LIMITS, wanted, None)
    fp8_glu.glu_backward(grad, gate_up, *found, *LIMITS, activation)
    same(found, wanted)


def test_other_shapes_are_refused(device):
    gate_up, grad = torch.zeros(4, 160, device=device), torch.zeros(4, 80, device=device)
    codes = side((4, 256), (2, 4), device)
    with pytest.raises(ValueError, match="grad_out needs a multiple of 128 columns, got 80"):
        fp8_glu.glu_backward(grad, gate_up, *codes, *LIMITS, "silu")
    given = torch.zeros(5, 128, device=device), torch.zeros(5, 256, device=device)
    with pytest.raises(ValueError, match=r"codes must have shape \[5, 256\], got \[4, 256\]"):
        fp8_glu.glu_backward(*given, *codes, *LIMITS, "silu")
