"""Queries, keys and values of latent attention put side by side in one row, the rotated parts of them rotated.

T tokens, N heads of P columns without position, R rotated ones and V value columns, H = P + R, a latent of C columns.
Source: DeepSeek-AI 2024, DeepSeek-V2, https://arxiv.org/abs/2405.04434, section 2.1; rotation: Su et al. 2021,
RoFormer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import next_power_of_2
from flexengine.kernels.rounding import round_to

HeadSizes = tuple[int, int, int, int]
"""N, P, R, V."""
_TILE_ELEMENTS = 4096
"""Elements that a program holds at a time: as many heads as fill it."""
_LATENT_TILE = 1024


def latent_heads_forward(
    q: Tensor, kv: Tensor, shared: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, interleaved: bool,
    heads: HeadSizes, row: Tensor,
) -> None:  # fmt: skip
    """row [T, N * (2H + V)]: queries of q [T, N * H], keys of kv [T, N * (P + V)] beside the key of shared [T, C + R],
    values of kv; the last R columns of queries and keys rotated.

    All in bf16 or all in fp32, contiguous; positions [T] int32; inv_freq [R/2] fp32. interleaved: pairs of elements 2i
    and 2i + 1, else i and i + R/2.
    Rounding: angles, cos, sin and the rotation in fp32, one rounding at the store; the rest is copied.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    _check(q, kv, shared, positions, inv_freq, heads, row)
    if len(q):
        _forward_kernel[(len(q),)](
            q, kv, shared, positions, inv_freq, row, shared.shape[1], *heads, float(scaling),
            INTERLEAVED=interleaved, **_tiles(heads), num_warps=4,
        )  # fmt: skip


def latent_heads_backward(
    grad_row: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, interleaved: bool, heads: HeadSizes,
    grad_q: Tensor, grad_kv: Tensor, grad_shared: Tensor, accumulate: bool,
) -> None:  # fmt: skip
    """grad_q, grad_kv and grad_shared, in shapes and dtypes of the forward, from grad_row.

    The shared key's gradient is summed over heads in fp32, in an order that N alone decides, rotated back and rounded
    once; with accumulate what grad_shared holds is added, else its other columns become zero.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    _check(grad_q, grad_kv, grad_shared, positions, inv_freq, heads, grad_row)
    if len(grad_q):
        _backward_kernel[(len(grad_q),)](
            grad_row, positions, inv_freq, grad_q, grad_kv, grad_shared, grad_shared.shape[1], *heads, float(scaling),
            ACCUMULATE=accumulate, INTERLEAVED=interleaved, LATENT=_LATENT_TILE, **_tiles(heads), num_warps=4,
        )  # fmt: skip


def _check(
    q: Tensor, kv: Tensor, shared: Tensor, positions: Tensor, inv_freq: Tensor, heads: HeadSizes, row: Tensor
) -> None:
    tokens, dtypes, (num_heads, nope_dim, rope_dim, value_dim) = len(q), (q.dtype,), heads
    head_dim = nope_dim + rope_dim
    check_tensor("q", q, (tokens, num_heads * head_dim), FLOATS)
    check_tensor("kv", kv, (tokens, num_heads * (nope_dim + value_dim)), dtypes)
    check_tensor("shared", shared, (tokens, shared.shape[-1]), dtypes)
    check_tensor("row", row, (tokens, num_heads * (2 * head_dim + value_dim)), dtypes)
    check_tensor("positions", positions, (tokens,), (torch.int32,))
    check_tensor("inv_freq", inv_freq, (rope_dim // 2,), (torch.float32,))
    if shared.shape[-1] < rope_dim or rope_dim % 2:
        raise ValueError(
            f"shared must end with the rotated key of an even width, got {shared.shape[-1]} columns for "
            f"rope_dim={rope_dim}"
        )


def _tiles(heads: HeadSizes) -> dict[str, int]:
    """Powers of two that hold a head's parts, and how many heads a program takes at a time."""
    nope, pairs, value = (next_power_of_2(max(1, n)) for n in (heads[1], heads[2] // 2, heads[3]))
    count = max(1, min(_TILE_ELEMENTS // max(nope, pairs, value), next_power_of_2(heads[0])))
    return {"HEADS": count, "NOPE": nope, "PAIRS": pairs, "VALUE": value}


@triton.jit
def _angles(positions_ptr, inv_freq_ptr, token, pairs, half, scaling):
    """cos and sin of a token's pairs, times scaling."""
    angle = tl.load(positions_ptr + token).to(tl.float32) * tl.load(inv_freq_ptr + pairs, mask=pairs < half, other=0.0)
    return tl.cos(angle) * scaling, tl.sin(angle) * scaling


@triton.jit
def _copy_heads(from_ptr, from_stride, to_ptr, to_stride, heads, num_heads, columns, width):
    """The first `width` columns of some heads."""
    mask = (heads < num_heads)[:, None] & (columns < width)[None, :]
    value = tl.load(from_ptr + heads[:, None] * from_stride + columns[None, :], mask=mask)
    tl.store(to_ptr + heads[:, None] * to_stride + columns[None, :], value, mask=mask)


@triton.jit
def _rotate_heads(from_ptr, from_stride, to_ptr, to_stride, heads, num_heads, a, b, pairs, half, cos, sin):
    """The pairs (a, b) of some heads, rotated."""
    mask = (heads < num_heads)[:, None] & (pairs < half)[None, :]
    starts = from_ptr + heads[:, None] * from_stride
    dtype: tl.constexpr = to_ptr.dtype.element_ty
    first = tl.load(starts + a[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(starts + b[None, :], mask=mask, other=0.0).to(tl.float32)
    targets = to_ptr + heads[:, None] * to_stride
    tl.store(targets + a[None, :], round_to(first * cos[None, :] - second * sin[None, :], dtype), mask=mask)
    tl.store(targets + b[None, :], round_to(second * cos[None, :] + first * sin[None, :], dtype), mask=mask)


@triton.jit
def _forward_kernel(
    q_ptr, kv_ptr, shared_ptr, positions_ptr, inv_freq_ptr, row_ptr, shared_width, num_heads, nope_dim, rope_dim,
    value_dim, scaling, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, NOPE: tl.constexpr, PAIRS: tl.constexpr,
    VALUE: tl.constexpr,
):  # fmt: skip
    """One token per program: its cos and sin serve all heads, its rotated key is found once."""
    token, half = tl.program_id(0).to(tl.int64), rope_dim // 2
    pairs, nope, value = tl.arange(0, PAIRS), tl.arange(0, NOPE), tl.arange(0, VALUE)
    a = 2 * pairs if INTERLEAVED else pairs
    b = a + 1 if INTERLEAVED else a + half
    cos, sin = _angles(positions_ptr, inv_freq_ptr, token, pairs, half, scaling)
    head_dim, latent_dim = nope_dim + rope_dim, nope_dim + value_dim
    dtype: tl.constexpr = row_ptr.dtype.element_ty
    key_ptr = shared_ptr + token * shared_width + shared_width - rope_dim
    first = tl.load(key_ptr + a, mask=pairs < half, other=0.0).to(tl.float32)
    second = tl.load(key_ptr + b, mask=pairs < half, other=0.0).to(tl.float32)
    key_a = round_to(first * cos - second * sin, dtype)
    key_b = round_to(second * cos + first * sin, dtype)
    queries_ptr = row_ptr + token * num_heads * (2 * head_dim + value_dim)
    keys_ptr = queries_ptr + num_heads * head_dim
    values_ptr = keys_ptr + num_heads * head_dim
    q_ptr += token * num_heads * head_dim
    kv_ptr += token * num_heads * latent_dim
    for start in range(0, num_heads, HEADS):
        heads = start + tl.arange(0, HEADS)
        _copy_heads(q_ptr, head_dim, queries_ptr, head_dim, heads, num_heads, nope, nope_dim)
        _rotate_heads(
            q_ptr + nope_dim, head_dim, queries_ptr + nope_dim, head_dim, heads, num_heads, a, b, pairs, half, cos, sin
        )
        _copy_heads(kv_ptr, latent_dim, keys_ptr, head_dim, heads, num_heads, nope, nope_dim)
        _copy_heads(kv_ptr + nope_dim, latent_dim, values_ptr, value_dim, heads, num_heads, value, value_dim)
        mask = (heads < num_heads)[:, None] & (pairs < half)[None, :]
        targets = keys_ptr + nope_dim + heads[:, None] * head_dim
        tl.store(targets + a[None, :], tl.broadcast_to(key_a[None, :], (HEADS, PAIRS)), mask=mask)
        tl.store(targets + b[None, :], tl.broadcast_to(key_b[None, :], (HEADS, PAIRS)), mask=mask)


@triton.jit
def _backward_kernel(
    grad_row_ptr, positions_ptr, inv_freq_ptr, grad_q_ptr, grad_kv_ptr, grad_shared_ptr, shared_width, num_heads,
    nope_dim, rope_dim, value_dim, scaling, ACCUMULATE: tl.constexpr, INTERLEAVED: tl.constexpr, LATENT: tl.constexpr,
    HEADS: tl.constexpr, NOPE: tl.constexpr, PAIRS: tl.constexpr, VALUE: tl.constexpr,
):  # fmt: skip
    token, half = tl.program_id(0).to(tl.int64), rope_dim // 2
    pairs, nope, value = tl.arange(0, PAIRS), tl.arange(0, NOPE), tl.arange(0, VALUE)
    a = 2 * pairs if INTERLEAVED else pairs
    b = a + 1 if INTERLEAVED else a + half
    cos, sin = _angles(positions_ptr, inv_freq_ptr, token, pairs, half, scaling)
    head_dim, latent_dim = nope_dim + rope_dim, nope_dim + value_dim
    queries_ptr = grad_row_ptr + token * num_heads * (2 * head_dim + value_dim)
    keys_ptr = queries_ptr + num_heads * head_dim
    values_ptr = keys_ptr + num_heads * head_dim
    grad_q_ptr += token * num_heads * head_dim
    grad_kv_ptr += token * num_heads * latent_dim
    first, second = tl.zeros((PAIRS,), tl.float32), tl.zeros((PAIRS,), tl.float32)
    for start in range(0, num_heads, HEADS):
        heads = start + tl.arange(0, HEADS)
        _copy_heads(queries_ptr, head_dim, grad_q_ptr, head_dim, heads, num_heads, nope, nope_dim)
        _rotate_heads(
            queries_ptr + nope_dim, head_dim, grad_q_ptr + nope_dim, head_dim, heads, num_heads, a, b, pairs, half, cos,
            -sin,
        )  # fmt: skip
        _copy_heads(keys_ptr, head_dim, grad_kv_ptr, latent_dim, heads, num_heads, nope, nope_dim)
        _copy_heads(values_ptr, value_dim, grad_kv_ptr + nope_dim, latent_dim, heads, num_heads, value, value_dim)
        mask = (heads < num_heads)[:, None] & (pairs < half)[None, :]
        starts = keys_ptr + nope_dim + heads[:, None] * head_dim
        first += tl.sum(tl.load(starts + a[None, :], mask=mask, other=0.0).to(tl.float32), axis=0)
        second += tl.sum(tl.load(starts + b[None, :], mask=mask, other=0.0).to(tl.float32), axis=0)
    _store_key(
        grad_shared_ptr + token * shared_width, shared_width - rope_dim, first * cos + second * sin,
        second * cos - first * sin, a, b, pairs < half, ACCUMULATE, LATENT,
    )  # fmt: skip


@triton.jit
def _store_key(
    grad_ptr, latent_width, first, second, a, b, mask, ACCUMULATE: tl.constexpr, LATENT: tl.constexpr
):  # fmt: skip
    """The gradient of the shared key behind that of the latent, which becomes zero unless it holds a value."""
    key_ptr = grad_ptr + latent_width
    dtype: tl.constexpr = grad_ptr.dtype.element_ty
    if ACCUMULATE:
        first += tl.load(key_ptr + a, mask=mask, other=0.0).to(tl.float32)
        second += tl.load(key_ptr + b, mask=mask, other=0.0).to(tl.float32)
    tl.store(key_ptr + a, round_to(first, dtype), mask=mask)
    tl.store(key_ptr + b, round_to(second, dtype), mask=mask)
    if not ACCUMULATE:
        for start in range(0, latent_width, LATENT):
            columns = start + tl.arange(0, LATENT)
            tl.store(grad_ptr + columns, tl.zeros((LATENT,), dtype), mask=columns < latent_width)
