"""bench/delta_rule.py without a GPU: the peer gets what our op gets, and a peer that refuses backward is reported."""

import sys
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import spec_of, tiny_config
from family_configs import CASES
from torch.nn.functional import normalize

from bench import delta_rule

CPU = torch.device("cpu")
HALF = delta_rule.Half(2e-3, 5.0)


def recurrence(q, k, v, g, beta, use_qk_l2norm_in_kernel, cu_seqlens):
    """The peer's signature, token by token. Shapes: q, k [1, T, G, K], v [1, T, N, V], g and beta [1, T, N]."""
    assert use_qk_l2norm_in_kernel
    repeats = v.shape[2] // q.shape[2]
    q, k = (normalize(x[0].float(), dim=-1).repeat_interleave(repeats, dim=1) for x in (q, k))
    rows, starts = [], {0} if cu_seqlens is None else set(cu_seqlens.tolist())
    for t in range(len(q)):
        if t in starts:
            state = torch.zeros(q.shape[1], q.shape[2], v.shape[3])
        state = g[0, t].exp()[:, None, None] * state
        new = beta[0, t][:, None] * (v[0, t].float() - torch.einsum("nkv,nk->nv", state, k[t]))
        state = state + torch.einsum("nk,nv->nkv", k[t], new)
        rows.append(torch.einsum("nkv,nk->nv", state, q[t]) / q.shape[2] ** 0.5)
    return torch.stack(rows)[None].to(v.dtype), None


class Refused(torch.autograd.Function):
    """A peer whose backward its authors switched off."""

    @staticmethod
    def forward(ctx, o):
        return o.clone()

    @staticmethod
    def backward(ctx, *grads):
        raise RuntimeError("this Triton miscompiles it")


@pytest.fixture
def compared(monkeypatch):
    """The comparison with a peer's rule, on the CPU."""

    def compare(rule):
        monkeypatch.setitem(sys.modules, "fla.ops.gated_delta_rule", SimpleNamespace(chunk_gated_delta_rule=rule))
        monkeypatch.setattr(delta_rule, "CHECK_LENGTHS", (5, 1, 70))
        monkeypatch.setattr(delta_rule, "measured", lambda call: (call(), HALF)[1])
        torch.manual_seed(0)
        with torch.no_grad():
            return delta_rule.compare(spec_of(CASES["qwen3_next"]), 32, 16, CPU)

    return compare


def test_both_compute_the_same_from_the_same_operands(compared):
    found = compared(recurrence)
    assert found["peer"]["refused"] is None
    for engine in ("flexengine", "peer"):
        assert list(found[engine]["errors"]) == list(delta_rule.RESULTS)
        assert max(found[engine]["errors"].values()) < 0.02  # bf16 results and operands
        assert found[engine]["forward"] == found[engine]["backward"] == HALF._asdict()


def test_a_peer_that_refuses_backward_is_reported_without_it(compared):
    found = compared(lambda *args, **kwargs: (Refused.apply(recurrence(*args, **kwargs)[0]), None))
    assert found["peer"]["refused"] == "this Triton miscompiles it"
    assert found["peer"]["backward"] is None
    assert list(found["peer"]["errors"]) == ["output"]


def test_a_model_without_linear_attention_is_refused():
    with pytest.raises(SystemExit, match="names a llama model without linear attention; try preset"):
        delta_rule.rule_of(spec_of(tiny_config()))
