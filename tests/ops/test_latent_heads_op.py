"""Rows of latent attention against autograd in float64: queries, keys and values from their parts."""

import pytest
import torch

from flexengine.ops.attention.latent_heads import HeadSizes, LatentHeads

LAYOUTS = [HeadSizes(1, 1, 2, 1), HeadSizes(3, 5, 4, 7), HeadSizes(4, 3, 6, 9)]
LATENT, SCALING = 5, 1.3
PARTS = ("q", "kv", "kv_a")


def operands(h, heads, interleaved, seq_lens):
    op = LatentHeads("heads", PARTS, "qkv", heads, LATENT, SCALING, interleaved)
    # float32 angles are part of the definition, so the frequencies are rounded to float32 first
    frequencies = (1.0 / 100.0 ** (torch.arange(heads.rope_dim // 2) / heads.rope_dim)).float()
    chunk, tokens = h.chunk(seq_lens, inv_freq=frequencies), sum(seq_lens)
    widths = (heads.query_width, heads.latent_width, LATENT + heads.rope_dim)
    return op, chunk, {name: h.randn(tokens, width) for name, width in zip(PARTS, widths, strict=True)}


def turned(x, chunk, interleaved):
    """Pairs of [T, heads, R] as complex numbers, turned and put back where they were."""
    angle = chunk.positions.double().cpu()[:, None] * chunk.constants["inv_freq"].double().cpu()[None]
    turn = torch.polar(torch.full_like(angle, SCALING), angle)[:, None, :]
    pairs = x.unflatten(-1, (-1, 2)) if interleaved else x.unflatten(-1, (2, -1)).transpose(-1, -2)
    result = torch.view_as_real(torch.complex(pairs[..., 0], pairs[..., 1]) * turn)
    return (result if interleaved else result.transpose(-1, -2)).flatten(-2)


def definition(parts, chunk, heads, interleaved):
    q, kv, shared = parts
    q, kv = q.unflatten(1, (heads.num_heads, -1)), kv.unflatten(1, (heads.num_heads, -1))
    key = turned(shared[:, None, LATENT:], chunk, interleaved).expand(-1, heads.num_heads, -1)
    nope = heads.nope_dim
    queries = torch.cat((q[..., :nope], turned(q[..., nope:], chunk, interleaved)), -1)
    keys = torch.cat((kv[..., :nope], key), -1)
    return torch.cat([x.flatten(1) for x in (queries, keys, kv[..., nope:])], dim=1)


def check(h, checks, heads, interleaved, seq_lens, previous, tolerance=1e-12):
    op, chunk, inputs = operands(h, heads, interleaved, seq_lens)
    parts = [x.detach().double().cpu().requires_grad_() for x in inputs.values()]
    row, grad = definition(parts, chunk, heads, interleaved), h.randn(sum(seq_lens), heads.width)
    wanted = dict(zip(PARTS, torch.autograd.grad(row, parts, grad.double().cpu()), strict=True))
    before = {"kv_a": h.randn(*inputs["kv_a"].shape)} if previous else {}
    result = h.run(op, chunk, inputs, grad_outputs={"qkv": grad}, previous=before)
    for name, value in before.items():
        wanted[name] = wanted[name] + value.double().cpu()
    checks.all_close(result.outputs, {"qkv": row}, tolerance)
    checks.all_close(result.grads, wanted, tolerance)


@pytest.mark.parametrize("previous", [False, True], ids=["first gradient", "added"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("heads", LAYOUTS, ids=str)
def test_matches_autograd(harness, checks, heads, interleaved, previous):
    check(harness, checks, heads, interleaved, (5, 1, 7), previous)


def test_scores_do_not_depend_on_where_pairs_lie(harness, checks):
    """What lets pairs stay: the reference puts them apart before it rotates, in queries and keys alike."""
    heads = LAYOUTS[1]
    op, chunk, inputs = operands(harness, heads, True, (6,))
    apart = LatentHeads("heads", PARTS, "qkv", heads, LATENT, SCALING, False)
    order = torch.cat((torch.arange(0, heads.rope_dim, 2), torch.arange(1, heads.rope_dim, 2)))
    moved = {name: x.clone() for name, x in inputs.items()}
    q = moved["q"].unflatten(1, (heads.num_heads, -1))
    q[..., heads.nope_dim :] = q[..., heads.nope_dim :][..., order]
    moved["kv_a"][:, LATENT:] = moved["kv_a"][:, LATENT:][:, order]
    rows = [harness.run(o, chunk, x).outputs["qkv"] for o, x in ((op, inputs), (apart, moved))]
    scores = [torch.einsum("tnh,snh->nts", *heads.split(row)[:2]) for row in rows]
    checks.close(scores[0], scores[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("previous", [False, True])
def test_on_cuda(make_harness, checks, previous, dtype):
    heads = HeadSizes(16, 128, 64, 128)
    tolerance = checks.GPU_TOLERANCE[dtype]
    check(make_harness("cuda", dtype), checks, heads, True, (300, 1, 212), previous, tolerance)
