"""Packages of attention kernels: stand-ins with the packages' signatures, in plain torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import cast

import pytest
import torch
from torch import Tensor

from flexengine.hardware.measure import attention as measured
from flexengine.hardware.measure.attention import error_of, errors_of, slice_error_of
from flexengine.ops import cards
from flexengine.ops.attention import packages
from flexengine.ops.attention.kernels import KERNELS, can_serve, choose_kernels
from flexengine.ops.attention.packages import PACKAGES
from flexengine.ops.attention.style import AttentionShape

SHAPES = (AttentionShape(4, 16, 16), AttentionShape(2, 8, 8, window=300))
CPU = torch.device("cpu")


def scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int) -> Tensor:
    """[N, queries, keys] with -inf where a query does not see a key; the last keys are the queries' own."""
    found = torch.einsum("qnh,knh->nqk", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    distance = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))[None, :]
    hidden = (distance < 0) & causal | (distance > left) & (left >= 0)
    return found.masked_fill(hidden, -torch.inf)


def attend(q, k, v, cu_q, cu_k, scale, causal, left):
    """(out, lse) of packed sequences."""
    outs, stats = [], []
    for i in range(len(cu_q) - 1):
        queries, keys = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        found = scores(q[queries].float(), k[keys].float(), scale, causal, left)
        values = v[keys].float().repeat_interleave(q.shape[1] // v.shape[1], 1)
        outs.append(torch.einsum("nqk,knh->qnh", found.softmax(-1), values))
        stats.append(found.logsumexp(-1))
    return torch.cat(outs).to(q.dtype), torch.cat(stats, 1)


def differentiate(grad_out, rows, out, lse, grads, cu_q, cu_k, scale, causal, left):
    """Write the gradients of q, k and v."""
    for i in range(len(cu_q) - 1):
        queries, keys = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        q, k, v = rows[0][queries].float(), *(x[keys].float() for x in rows[1:])
        members = q.shape[1] // k.shape[1]
        p = (scores(q, k, scale, causal, left) - lse[:, queries, None]).exp()
        grad = grad_out[queries].float()
        of_values = torch.einsum("nqk,qnh->knh", p, grad)
        of_p = torch.einsum("qnh,knh->nqk", grad, v.repeat_interleave(members, 1))
        of_scores = p * (of_p - (grad * out[queries].float()).sum(-1).t()[..., None]) * scale
        grads[0][queries] = torch.einsum("nqk,knh->qnh", of_scores, k.repeat_interleave(members, 1)).to(q.dtype)
        for target, own in zip(grads[1:], (torch.einsum("nqk,qnh->knh", of_scores, q), of_values), strict=True):
            target[keys] = own.unflatten(1, (-1, members)).sum(2)


def flash2(asked: list) -> dict:
    def forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        asked.append((max_seqlen_q, max_seqlen_k, window_size_right))
        out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size_left)
        return out, lse, None, None

    def backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        asked.append(deterministic)
        operands = (dout, (q, k, v), out, softmax_lse, (dq, dk, dv), cu_seqlens_q, cu_seqlens_k)
        differentiate(*operands, softmax_scale, causal, window_size_left)

    return {"_flash_attn_varlen_forward": forward, "_flash_attn_varlen_backward": backward}


def flash3(asked: list) -> dict:
    def forward(
        q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None,
        cu_seqlens_k_new=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None,
        kv_batch_idx=None, leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None,
        k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size_left=-1, window_size_right=-1,
        attention_chunk=0, softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=1, pack_gqa=None,
        sm_margin=0,
    ):  # fmt: skip
        asked.append((max_seqlen_q, max_seqlen_k, window_size_right))
        out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, window_size_left)
        return out, lse, None, None

    def backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None,
        max_seqlen_q=None, max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False,
        window_size_left=-1, window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        asked.append(deterministic)
        operands = (dout, (q, k, v), out, softmax_lse, (dq, dk, dv), cu_seqlens_q, cu_seqlens_k)
        differentiate(*operands, softmax_scale, is_causal, window_size_left)

    return {"_flash_attn_forward": forward, "_flash_attn_backward": backward}


def flash4(asked: list) -> dict:
    def forward(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, return_lse=False,
    ):  # fmt: skip
        asked.append((max_seqlen_q, max_seqlen_k, window_size_right))
        assert return_lse
        left = -1 if window_size_left is None else window_size_left
        out, lse = attend(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale, causal, left)
        return out, lse, None, None, None

    def backward(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None,
        max_seqlen_q=None, max_seqlen_k=None, deterministic=False, dq=None, dk=None, dv=None,
    ):  # fmt: skip
        asked.append(deterministic)
        left = -1 if window_size_left is None else window_size_left
        operands = (dout, (q, k, v), out, lse, (dq, dk, dv), cu_seqlens_q, cu_seqlens_k)
        differentiate(*operands, softmax_scale, causal, left)
        return dq, dk, dv

    return {"_flash_attn_fwd": forward, "_flash_attn_bwd": backward}


STAND_INS = {"flash2": flash2, "flash3": flash3, "flash4": flash4}


@pytest.fixture(params=list(PACKAGES))
def package(request, monkeypatch):
    """(name, what its functions are asked) of a package that only this test has."""
    name, asked = request.param, []
    parts, module = PACKAGES[name].module.split("."), ModuleType(PACKAGES[name].module)
    vars(module).update(STAND_INS[name](asked))
    monkeypatch.setattr(measured, "KERNEL_ROWS", 4 * measured.KERNEL_TOKENS)
    for i in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[0]))
    monkeypatch.setitem(sys.modules, PACKAGES[name].module, module)
    monkeypatch.setattr(packages, "_loaded", lambda module: sys.modules[module])
    monkeypatch.setattr(packages, "installed", lambda asked: asked == name)
    monkeypatch.setattr("flexengine.ops.attention.kernels.installed", lambda asked: asked == name)
    return name, asked


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packages_are_asked_for_what_the_definition_has(package, shape):
    name, asked = package
    assert errors_of(name) == (error_of, slice_error_of)
    for error in errors_of(name):
        assert error(name, shape, CPU, torch.float32) < 1e-5
    longest = [call for call in asked if isinstance(call, tuple)]
    sides = 0 if shape.window else asked[0][2]
    slices = [(512, 1024, sides)] if shape.window else [(512, 512, sides), (512, 512, sides)]
    assert longest == [(512, 512, sides), *slices]


class OnGpu:
    """Shape and dtype of queries on a GPU."""

    is_cuda, dtype, device, shape = True, torch.bfloat16, torch.device("cuda", 0), (4, 2, 128)


QUERIES = cast(Tensor, OnGpu())


def test_packages_serve_where_they_are_preferred_and_can(package, monkeypatch):
    name, _ = package
    majors = PACKAGES[name].majors
    for major in (8, 9, 10, 12):
        monkeypatch.setattr(cards, "_capability", lambda _, major=major: (major, 0))
        found = choose_kernels((name, "flash"), QUERIES, (2048, 100))
        assert found is (KERNELS[name] if major in majors else KERNELS["flash"])
    monkeypatch.setattr(cards, "_capability", lambda _: (9, 0))
    assert choose_kernels("flash", QUERIES, (2048,)) is KERNELS["flash"]
    assert choose_kernels(name, QUERIES, (64,) * 31) is KERNELS[name]
    assert choose_kernels(name, QUERIES, (64,) * 32) is KERNELS["flash"]  # more padding than memory is planned for
    assert not can_serve(name, torch.bfloat16, 192, value_dim=128)
    assert not can_serve(name, torch.float32, 128)


@pytest.mark.usefixtures("deterministic")
def test_packages_keep_an_order_of_sums_where_it_is_asked_for(package, monkeypatch):
    name, asked = package
    monkeypatch.setattr(cards, "_capability", lambda _: (9, 0))
    able = name != "flash2"
    assert choose_kernels(name, QUERIES, (2048,)) is KERNELS[name if able else "flash"]
    error_of(name, SHAPES[0], CPU, torch.float32)
    assert asked[-1] is able


def test_a_package_that_is_called_otherwise_is_an_error_of_the_probe(package, monkeypatch):
    name, _ = package
    monkeypatch.setattr(type(PACKAGES[name]), "functions", ("_flash_attn_before_2023", "x"))
    with pytest.raises(RuntimeError, match=f"{PACKAGES[name].module}._flash_attn_before_2023 cannot be called so"):
        error_of(name, SHAPES[0], CPU, torch.float32)


def test_what_is_not_installed_serves_nobody():
    assert not any(can_serve(name, torch.bfloat16, 128) for name in PACKAGES if not packages.installed(name))
