"""Linear layers with adapters and magnitudes against float64, in bf16: small factors of outputs are not lost."""

import pytest
import torch

from flexengine.ops.adapters.dora import DoRALinear
from flexengine.ops.adapters.lora import AdaptedRows
from flexengine.ops.linear import Linear

TOKENS, INPUTS, OUTPUTS, RANK = 64, 96, 80, 4
ADAPTED = (AdaptedRows(0, 32), AdaptedRows(48, 80))


def forward(env_of, dtype, raised):
    """Output of a layer whose adapters are zero and whose magnitudes are raised by a share of themselves."""
    torch.manual_seed(5)
    x, weight = torch.randn(TOKENS, INPUTS).to(dtype), torch.randn(OUTPUTS, INPUTS).to(dtype)
    rows = torch.cat([torch.arange(*span) for span in ADAPTED])
    op = DoRALinear(Linear("l", "x", "y", INPUTS, OUTPUTS, "w"), RANK, 2.0, ADAPTED)
    env = env_of(op)
    env.t |= {"x": x, "y": torch.empty(TOKENS, OUTPUTS, dtype=dtype)}
    wide = torch.promote_types(dtype, torch.float32)
    for spec in op.scratch("forward"):
        kind = wide if spec.dtype == "float32" else dtype
        env.t[spec.name] = torch.empty(spec.height(TOKENS), *spec.shape, dtype=kind)
    env.p |= {
        "w": weight,
        op.down: torch.randn(2 * RANK, INPUTS).to(dtype),
        op.up: torch.zeros(len(rows), RANK, dtype=dtype),
        op.magnitude: (raised * weight[rows].double().norm(dim=1)).to(dtype),
    }
    op.forward(env)
    expected = x.double() @ weight.double().t()
    expected[:, rows] *= 1.0 + raised
    return env.t["y"].double(), expected


@pytest.fixture
def env_of():
    from flexengine.ops.base import ChunkContext, OpEnv  # noqa: PLC0415

    empty = torch.empty(0)
    chunk = ChunkContext(TOKENS, empty, empty, empty, empty, (TOKENS,), empty, {})
    return lambda _: OpEnv({}, {}, {}, {}, chunk)


@pytest.mark.parametrize("raised", [0.0, 0.001, -0.002])
def test_small_changes_of_magnitudes_count(env_of, raised):
    y, expected = forward(env_of, torch.bfloat16, raised)
    assert (y - expected).norm() / expected.norm() <= 2.5e-3
    assert (y * expected).sum() / expected.square().sum() == pytest.approx(1.0, abs=2e-4)
    y, expected = forward(env_of, torch.float64, raised)
    assert (y - expected).abs().max() <= 1e-12
