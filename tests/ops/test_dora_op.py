"""Linear layers with adapters and magnitudes against float64, in bf16: small factors of outputs are not lost."""

import pytest
import torch

from flexengine.ops.linear import Linear
from tests.adapter_ops import adapted, run_ops

TOKENS, INPUTS, OUTPUTS, RANK = 64, 96, 80, 4
ADAPTED = ((0, 32), (48, 80))


def forward(dtype, raised):
    """Output of a layer whose adapters are zero and whose magnitudes are raised by a share of themselves."""
    torch.manual_seed(5)
    x, weight = torch.randn(TOKENS, INPUTS).to(dtype), torch.randn(OUTPUTS, INPUTS).to(dtype)
    rows = torch.cat([torch.arange(*span) for span in ADAPTED])
    ops = adapted((Linear("l", "x", "y", INPUTS, OUTPUTS, "w"),), {"l": ADAPTED}, RANK, has_magnitude=True)
    params = {
        "w": weight,
        "l.lora_A": torch.randn(2 * RANK, INPUTS).to(dtype),
        "l.lora_B": torch.zeros(len(rows), RANK, dtype=dtype),
        "l.lora_magnitude_vector": (raised * weight[rows].double().norm(dim=1)).to(dtype),
    }
    outputs, _, _ = run_ops(ops, params, {"x": x}, {"y": torch.zeros(TOKENS, OUTPUTS, dtype=dtype)})
    expected = x.double() @ weight.double().t()
    expected[:, rows] *= 1.0 + raised
    return outputs["y"].double(), expected


@pytest.mark.parametrize("raised", [0.0, 0.001, -0.002])
def test_small_changes_of_magnitudes_count(raised):
    y, expected = forward(torch.bfloat16, raised)
    assert (y - expected).norm() / expected.norm() <= 2.5e-3
    assert (y * expected).sum() / expected.square().sum() == pytest.approx(1.0, abs=2e-4)
    y, expected = forward(torch.float64, raised)
    assert (y - expected).abs().max() <= 1e-12
