"""Attention of new tokens over caches of their own against the plain path in float64, in NaN-filled memory."""

import pytest
import torch

from flexengine.kernels.attention_decode import Heads, NewTokens, attention_decode
from flexengine.kernels.attention_tilings import Scoring
from flexengine.ops.attention.reference import attention_forward_reference
from flexengine.ops.attention.sinks import add_sinks
from flexengine.ops.attention.style import AttentionStyle

STARTS, TOKENS = (0, 70, 5, 129), 7
ROWS = (6, 0, 3, 4)
STYLES = {
    "all keys": AttentionStyle(),
    "scaled": AttentionStyle(0.31),
    "window 1": AttentionStyle(window=1),
    "window 37": AttentionStyle(window=37),
    "soft cap and window": AttentionStyle(0.7, 19, 2.0),
}
HEADS = {"GQA": Heads(4, 2, 16, 16), "MHA, narrow values": Heads(3, 3, 24, 20), "MQA of 6": Heads(6, 1, 40, 40)}

DTYPES = [torch.bfloat16] if torch.cuda.is_available() else [torch.float32, torch.bfloat16]
"""A GPU multiplies float32 in TF32, and engines decode so in bf16 alone."""


def caches_of(heads, dtype, device):
    """Keys and values of every sequence, NaN behind what they hold."""
    found = []
    for width in (heads.width, heads.value_width):
        for start in STARTS:
            cache = torch.full((start + 3, heads.keys, width), float("nan"), dtype=dtype, device=device)
            cache[:start] = torch.randn(start, heads.keys, width, device=device)
            found.append(cache)
    return found[: len(STARTS)], found[len(STARTS) :]


@pytest.mark.pairs
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "style"), [(h, s) for h in HEADS for s in STYLES if h == "GQA" or s == "scaled"])
def test_it_attends_to_each_sequences_own_cache(heads, style, dtype, sinks, device):
    heads, style = HEADS[heads], STYLES[style]
    (n, g, h, v), kinds = heads, {"dtype": dtype, "device": device}
    qkv = torch.full((TOKENS, (n + g) * h + g * v + 8), float("nan"), **kinds)[:, 8:]
    qkv[list(ROWS)] = torch.randn(len(ROWS), qkv.shape[1], device=device).to(dtype)
    out = torch.full((TOKENS, n * v), float("nan"), **kinds)
    keys, values = caches_of(heads, dtype, device)
    sink = torch.randn(n, device=device) if sinks else None
    places = torch.tensor([[x.data_ptr() for x in part] for part in (keys, values)], device=device)
    rows, starts = (torch.tensor(x, dtype=torch.int32, device=device) for x in (ROWS, STARTS))
    scoring = Scoring(style.scale_of(h), style.soft_cap, style.window)
    attention_decode(qkv, NewTokens(rows, starts, places), heads, scoring, out, sink)
    for row, start, k, x in zip(ROWS, STARTS, keys, values, strict=True):
        own_key, own_value = qkv[row, n * h : (n + g) * h].view(g, h), qkv[row, (n + g) * h :].view(g, v)
        assert torch.equal(k[start], own_key)
        assert torch.equal(x[start], own_value)
        assert k[start + 1 :].isnan().all()
        q = qkv[row, : n * h].view(1, n, h).double()
        wanted, lse = torch.empty(1, n, v, dtype=torch.float64, device=device), torch.empty_like(q[..., 0].T)
        seen = (k[: start + 1].double(), x[: start + 1].double())
        attention_forward_reference(q, *seen, (1,), start, wanted, lse, style)
        if sink is not None:
            add_sinks(wanted, lse, sink.double())
        torch.testing.assert_close(
            out[row].double(), wanted.flatten(), rtol=0, atol=4e-6 if dtype == torch.float32 else 2e-2
        )
    others = [row for row in range(TOKENS) if row not in ROWS]
    assert out[others].isnan().all()
