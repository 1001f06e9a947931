"""Kernels of the gated delta rule against the plain path in float64, through the op that composes them."""

import pytest
import torch
from torch.nn.functional import logsigmoid

from flexengine.kernels.delta_prepare import Tiles, delta_prepare
from flexengine.ops.delta import kernels as delta_kernels
from flexengine.ops.delta import plain as delta_plain
from flexengine.ops.delta import segments as delta_segments
from flexengine.ops.delta.tiles import Ends, Operands, Sizes

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCES = {("cpu", torch.float32): (5e-6, 1e-5), ("cpu", torch.bfloat16): (2.2e-3, 1e-5)}
TOLERANCES |= {("cuda", torch.float32): (2e-5, 2e-5), ("cuda", torch.bfloat16): (4e-3, 4e-3)}
"""Of o and the gradient of qkv, which are rounded; of states and the gradients of gates. CUDA multiplies in TF32."""
STORED = {torch.float32: None, torch.bfloat16: (7e-3, 7e-3)}
"""The same by what is stored between kernels, where that is not what is computed with."""


def draw(checks, sizes, seq_lens, dtype, device):
    """(operands, grad_o); qkv's rows have a gap."""
    g, n, k, v = sizes
    tokens = sum(seq_lens)
    qkv = checks.strided(tokens, 2 * g * k + n * v, dtype=dtype, device=device)
    qkv.normal_()
    gates = logsigmoid(torch.randn(tokens, n, device=device)), torch.rand(tokens, n, device=device)
    cu = torch.tensor([0, *seq_lens]).cumsum(0).to(device, torch.int32)
    grad_o = checks.normal(tokens, n * v, dtype=dtype, device=device)
    return Operands(qkv, gates, cu, seq_lens, Sizes(*sizes), Ends()), grad_o


def exact(given):
    """The same in float64."""
    wide = lambda x: None if x is None else x.double()  # noqa: E731
    ends = Ends(*(wide(end) for end in given.ends))
    return given._replace(qkv=wide(given.qkv), gates=tuple(map(wide, given.gates)), ends=ends)


def run(path, given, grad_o, grad_ends, unwritten):
    """(o, grad_qkv, gradients of the gates), written over NaN."""
    o, grad_qkv = unwritten(grad_o), unwritten(given.qkv)
    grad_gates = tuple(unwritten(gate) for gate in given.gates)
    path.forward(given, o)
    path.backward(given, grad_o, grad_ends, grad_qkv, grad_gates)
    return o, grad_qkv, *grad_gates


def check(checks, given, grad_o, grad_ends=None, cancelled=1.0):
    """Both paths; returns what the kernels wrote. cancelled: what the gradients of gates lose in differences."""
    grad_ends, nan = grad_ends or Ends(), lambda x: torch.full_like(x, float("nan"))
    wanted_given, wanted_ends = exact(given), Ends(*(None if x is None else x.double() for x in grad_ends))
    found = run(delta_kernels, given, grad_o, grad_ends, nan)
    wanted_given = wanted_given._replace(between=torch.float32)  # exact
    wanted = run(delta_plain, wanted_given, grad_o.double(), wanted_ends, nan)
    rows, wide = STORED[given.between] or TOLERANCES[given.qkv.device.type, given.qkv.dtype]
    for i, (name, allowed) in enumerate((("o", rows), ("qkv", rows), ("decay", wide), ("strength", wide))):
        checks.assert_close(found[i], wanted[i], allowed * (cancelled if i > 1 else 1.0), name)
    for ends, wanted_of in ((given.ends, wanted_given.ends), (grad_ends, wanted_ends)):
        for name, end, expected in zip(Ends._fields, ends, wanted_of, strict=True):
            if end is not None:
                checks.assert_close(end, expected, wide, name)
    return found


def test_ragged_sequences(checks, device):
    check(checks, *draw(checks, (1, 2, 5, 3), (3, 130, 1, 64, 65), torch.float32, device))


def test_groups_of_heads_and_runs_of_sequences(checks, device, monkeypatch):
    """Two key heads of several blocks, one at a time, and of three sequences the last by itself."""
    monkeypatch.setattr(delta_segments, "STATE_BYTES", 3 * 4 * 20 * 70)
    check(checks, *draw(checks, (2, 2, 20, 70), (66, 2, 1), torch.bfloat16, device))


@pytest.mark.parametrize("between", STORED, ids=str)
def test_a_window(checks, device, between):
    given, grad_o = draw(checks, (1, 2, 5, 3), (70,), torch.float32, device)
    before, grad_left = (torch.randn(2, 5, 3, device=device) for _ in range(2))
    left, grad_before = (checks.empty(2, 5, 3, dtype=torch.float32, device=device) for _ in range(2))
    given = given._replace(ends=Ends(before, left), between=between)
    check(checks, given, grad_o, Ends(grad_before, grad_left))
    again = torch.full_like(left, float("nan"))
    delta_kernels.fill_window(given._replace(ends=Ends(before, again)))
    assert torch.equal(left, again)


def test_equal_keys_and_no_decay(checks, device):
    """Powers of A reach 1e18 here; entries of the inverse are about 1."""
    given, grad_o = draw(checks, (1, 1, 8, 8), (64,), torch.float32, device)
    given.qkv[:, 8:16] = 1.0 + 1e-3 * given.qkv[:, 8:16]
    given.gates[0].mul_(1e-6)
    given.gates[1].fill_(1.0)
    check(checks, given, grad_o, cancelled=100.0)


def test_refuses_half_a_key_head(checks, device):
    given, _ = draw(checks, (1, 2, 5, 3), (2,), torch.float32, device)
    spans = torch.tensor([[0], [2]], dtype=torch.int32, device=device)
    tiles = Tiles(given.qkv, *given.gates, given.cu_seqlens, spans, given.sizes, 1, 1)
    total, scale, query_scale, u, w = (
        torch.empty(1, 1, *shape, device=device) for shape in ((64,), (64,), (64,), (64, 3), (64, 5))
    )
    with pytest.raises(ValueError, match="whole key heads"):
        delta_prepare(tiles, total, scale, query_scale, u, w, None)
    with pytest.raises(ValueError, match="total must have shape"):
        delta_prepare(tiles._replace(first=0, heads=2), total, scale, query_scale, u, w, None)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "between"), [*((x, torch.float32) for x in DTYPES), (torch.bfloat16,) * 2], ids=str)
@pytest.mark.parametrize("sizes", [(2, 4, 128, 128), (1, 1, 256, 192), (3, 3, 40, 256)], ids=str)
def test_on_gpu(checks, gpu, sizes, dtype, between):
    given, grad_o = draw(checks, sizes, (200, 64, 65, 700), dtype, gpu)
    given = given._replace(between=between)
    first = check(checks, given, grad_o)
    assert all(torch.equal(a, b) for a, b in zip(first, check(checks, given, grad_o), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("between", STORED, ids=str)
@pytest.mark.parametrize("sizes", [(16, 32, 128, 128), (4, 8, 256, 256)], ids=str)
def test_a_full_gpu_gives_the_same_bits_again_and_again(checks, gpu, sizes, between):
    """A product that still reads while its operand is loaded anew shows where many programs wait for one another."""
    given, grad_o = draw(checks, sizes, (2000, 2048, 1, 700), torch.bfloat16, gpu)
    given = given._replace(between=between)
    first = check(checks, given, grad_o)
    for _ in range(10):
        again = run(delta_kernels, given, grad_o, Ends(), torch.empty_like)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
