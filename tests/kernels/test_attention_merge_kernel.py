"""Joining attention over two sets of keys, against attention over all of them in float64."""

import pytest
import torch

from flexengine.kernels.attention_merge import attention_merge_


def attention(scores, values):
    """(out [T, N, H], lse [N, T]) of scores [N, T, K] and values [K, N, H]."""
    return torch.einsum("ntk,knh->tnh", scores.softmax(-1), values), torch.logsumexp(scores, dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 1, 8), (13, 3, 20), (16, 2, 64)])
def test_parts_join(checks, device, tokens, heads, width, dtype):
    scores = 30 * torch.randn(heads, tokens, 11, dtype=torch.float64)  # far apart: one part outweighs the other
    values = torch.randn(11, heads, width, dtype=torch.float64)
    (total, lse), (part, part_lse) = (attention(scores[..., r], values[r]) for r in (slice(0, 4), slice(4, 11)))
    total, lse, part_lse = (x.to(device, torch.float32).contiguous() for x in (total, lse, part_lse))
    part = part.to(device, dtype).contiguous()
    attention_merge_(total, lse, part, part_lse)
    out, both = attention(scores, values)
    checks.assert_close(total, out, {torch.float32: 3e-6, torch.bfloat16: checks.TOLERANCE[torch.bfloat16]}[dtype])
    checks.assert_close(lse, both, 1e-6, "log-sum-exp")


def test_wrong_shapes_are_refused(device):
    total, part = torch.zeros(4, 2, 8, device=device), torch.zeros(4, 2, 8, device=device)
    with pytest.raises(ValueError, match="part_lse must have shape"):
        attention_merge_(total, torch.zeros(2, 4, device=device), part, torch.zeros(4, 2, device=device))
