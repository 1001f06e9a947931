"""RMSNorm of heads, or of a row of heads, and their rotation, in one pass over memory each way.

T tokens, G groups that are normalised by themselves, each of W columns: one head of width H, or several side by side;
rotary width R <= H. Formulas, roundings and layouts are those of kernels/rmsnorm.py and kernels/rope.py one after the
other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.rounding import round_to

_TILE_ELEMENTS = 1024  # of a warp, the pairs of kernels/rope.py; a row of heads is one tile


class Rotation(NamedTuple):
    """positions [T] int32, inv_freq [R/2] fp32, the factor on both, how pairs lie, and H."""

    positions: Tensor
    inv_freq: Tensor
    scaling: float
    interleaved: bool
    head_dim: int


class Norm(NamedTuple):
    """weight [W], to which offset is added; wide: it multiplies before the one rounding."""

    weight: Tensor
    eps: float
    offset: float
    wide: bool


def norm_rope_forward(x: Tensor, out: Tensor, norm: Norm, rotation: Rotation) -> None:
    """out = rotated(norm(x)).

    Shapes: x and out [T, G, W] in bf16 or fp32, rows and groups may be strided.
    Rounding: the norm's result to x's dtype, then fp32 and one rounding. Cost: reads and writes T*G*W elements.
    Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes, dtypes or strides.
    """
    sizes = _check(x, out, norm, rotation)
    if x.numel() == 0:
        return
    _forward_kernel[(len(x),)](
        x, out, norm.weight, rotation.positions, rotation.inv_freq, *x.stride()[:2], *out.stride()[:2], norm.eps,
        norm.offset, float(rotation.scaling), sizes.heads, sizes.of_group, sizes.head_dim, sizes.half, WIDE=norm.wide,
        INTERLEAVED=rotation.interleaved, **sizes.tile(),
    )  # fmt: skip


def norm_rope_backward(
    grad_out: Tensor, x: Tensor, grad_x: Tensor, norm: Norm, rotation: Rotation, partials: Tensor | None
) -> None:
    """grad_x of out's gradient, and in partials [P, W] fp32 what the gradient of the weight is the sum of, as
    `rmsnorm_backward` has it: P groups of consecutive tokens are summed side by side. None: the weight has none.

    Shapes: grad_out, x and grad_x as in forward; grad_x may be grad_out or x. Cost: reads 2*T*G*W elements and writes
    T*G*W. Order: launches on the current stream, never synchronises. Raises: ValueError on other shapes or dtypes.
    """
    sizes = _check(x, grad_out, norm, rotation)
    check_tensor("grad_x", grad_x, tuple(x.shape), (x.dtype,), strided_rows=True)
    programs = max(1, len(x)) if partials is None else len(partials)
    if partials is not None:
        check_tensor("partials", partials, (programs, x.shape[2]), (torch.float32,))
    elif x.numel() == 0:
        return
    _backward_kernel[(programs,)](
        grad_out, x, grad_x, norm.weight, norm.weight if partials is None else partials, rotation.positions,
        rotation.inv_freq, *grad_out.stride()[:2], *x.stride()[:2], *grad_x.stride()[:2], norm.eps, norm.offset,
        float(rotation.scaling), len(x), cdiv(len(x), programs), sizes.heads, sizes.of_group, sizes.head_dim,
        sizes.half, SUMS=partials is not None, WIDE=norm.wide, INTERLEAVED=rotation.interleaved, **sizes.tile(),
    )  # fmt: skip


class _Sizes(NamedTuple):
    """Heads of a token, those of a group, H and R/2."""

    heads: int
    of_group: int
    head_dim: int
    half: int

    def tile(self) -> dict[str, int | bool]:
        """Keywords of a launch: columns beyond the rotated ones are a tile of their own."""
        pairs, rest = next_power_of_2(self.half), self.head_dim - 2 * self.half
        many = next_power_of_2(rest) if rest else 0
        heads, width, row = next_power_of_2(self.heads), next_power_of_2(2 * pairs + many), self.of_group > 1
        warps = min(16, max(1, heads * width // _TILE_ELEMENTS)) if row else 1
        heads = heads if row else max(1, min(_TILE_ELEMENTS // width, heads))
        return {"HEADS": heads, "PAIRS": pairs, "REST": many, "ROW": row, "num_warps": warps}


def _check(x: Tensor, other: Tensor, norm: Norm, rotation: Rotation) -> _Sizes:
    tokens, groups, width = x.shape
    half, head_dim = rotation.inv_freq.numel(), rotation.head_dim
    check_tensor("x", x, (tokens, groups, width), FLOATS, strided_rows=True)
    check_tensor("out", other, (tokens, groups, width), (x.dtype,), strided_rows=True)
    check_tensor("weight", norm.weight, (width,), FLOATS)
    check_tensor("positions", rotation.positions, (tokens,), (torch.int32,))
    check_tensor("inv_freq", rotation.inv_freq, (half,), (torch.float32,))
    if width % head_dim or not 0 < 2 * half <= head_dim:
        raise ValueError(f"{width} columns are no heads of {head_dim} of which {2 * half} rotate")
    if width > head_dim and groups > 1:
        raise ValueError(f"{groups} groups of several heads each; expected one, or groups of one head")
    return _Sizes(groups * (width // head_dim), width // head_dim, head_dim, half)


@triton.jit
def _columns(half, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr):
    """(columns of the first and of the second of each pair, which pairs there are)."""
    pairs = tl.arange(0, PAIRS)
    if INTERLEAVED:
        return 2 * pairs, 2 * pairs + 1, pairs < half
    else:
        return pairs, pairs + half, pairs < half


@triton.jit
def _load(ptr, heads, num_heads, step, head_dim, columns, inside, ROW: tl.constexpr):
    """Columns of heads of a token, in fp32."""
    mask = (heads < num_heads)[:, None] & inside[None, :]
    begin = heads * head_dim if ROW else heads * step
    return tl.load(ptr + begin[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(ptr, value, heads, num_heads, step, head_dim, columns, inside, ROW: tl.constexpr):
    mask = (heads < num_heads)[:, None] & inside[None, :]
    begin = heads * head_dim if ROW else heads * step
    tl.store(ptr + begin[:, None] + columns[None, :], round_to(value, ptr.dtype.element_ty), mask=mask)


@triton.jit
def _weights(weight_ptr, heads, num_heads, head_dim, columns, inside, offset, ROW: tl.constexpr):
    """The weight of these columns plus its offset: [1, columns], or of a row of heads [heads, columns]."""
    if ROW:
        mask = (heads < num_heads)[:, None] & inside[None, :]
        found = tl.load(weight_ptr + heads[:, None] * head_dim + columns[None, :], mask=mask, other=0.0)
    else:
        found = tl.load(weight_ptr + columns, mask=inside, other=0.0)[None, :]
    return found.to(tl.float32) + offset


@triton.jit
def _normed(x, rstd, weight, dtype: tl.constexpr, WIDE: tl.constexpr):
    """The norm's result, as it is stored where another kernel rotates it."""
    if WIDE:
        return round_to(x * rstd * weight, dtype).to(tl.float32)
    else:
        y = round_to(x * rstd, dtype).to(tl.float32) * round_to(weight, dtype).to(tl.float32)
        return round_to(y, dtype).to(tl.float32)


@triton.jit(do_not_specialize=["num_heads"])
def _forward_kernel(
    x_ptr, out_ptr, weight_ptr, positions_ptr, inv_freq_ptr, x_stride, x_step, out_stride, out_step, eps, offset,
    scaling, num_heads, of_group, head_dim, half,
    WIDE: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr,
    ROW: tl.constexpr,
):  # fmt: skip
    """One token per program: its cos and sin serve all heads."""
    token = tl.program_id(0).to(tl.int64)
    x_ptr += token * x_stride
    out_ptr += token * out_stride
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    firsts, seconds, inside = _columns(half, INTERLEAVED, PAIRS)
    angle = tl.load(positions_ptr + token).to(tl.float32) * tl.load(
        inv_freq_ptr + tl.arange(0, PAIRS), mask=inside, other=0.0
    )
    cos, sin = (tl.cos(angle) * scaling)[None, :], (tl.sin(angle) * scaling)[None, :]
    rest, more = tl.arange(0, 1), tl.arange(0, 1) < 0
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST)
        more = rest < head_dim
    for first in range(0, num_heads, HEADS):
        heads = first + tl.arange(0, HEADS)
        a = _load(x_ptr, heads, num_heads, x_step, head_dim, firsts, inside, ROW)
        b = _load(x_ptr, heads, num_heads, x_step, head_dim, seconds, inside, ROW)
        of_a = _weights(weight_ptr, heads, num_heads, head_dim, firsts, inside, offset, ROW)
        of_b = _weights(weight_ptr, heads, num_heads, head_dim, seconds, inside, offset, ROW)
        square = tl.sum(a * a + b * b, 1)
        if REST > 0:
            c = _load(x_ptr, heads, num_heads, x_step, head_dim, rest, more, ROW)
            of_c = _weights(weight_ptr, heads, num_heads, head_dim, rest, more, offset, ROW)
            square += tl.sum(c * c, 1)
        if ROW:
            square = tl.zeros((HEADS,), tl.float32) + tl.sum(square, 0)
        rstd = tl.div_rn(1.0, tl.sqrt_rn(square / (of_group * head_dim) + eps))[:, None]
        a, b = _normed(a, rstd, of_a, dtype, WIDE), _normed(b, rstd, of_b, dtype, WIDE)
        _store(out_ptr, a * cos - b * sin, heads, num_heads, out_step, head_dim, firsts, inside, ROW)
        _store(out_ptr, b * cos + a * sin, heads, num_heads, out_step, head_dim, seconds, inside, ROW)
        if REST > 0:
            c = _normed(c, rstd, of_c, dtype, WIDE)
            _store(out_ptr, c, heads, num_heads, out_step, head_dim, rest, more, ROW)


@triton.jit
def _turned_back(a, b, cos, sin, dtype: tl.constexpr):
    """The gradient of what was rotated, as it is stored where another kernel reads it."""
    return round_to(a * cos + b * sin, dtype).to(tl.float32), round_to(b * cos - a * sin, dtype).to(tl.float32)


@triton.jit
def _part(grad, x, rstd, dtype: tl.constexpr, WIDE: tl.constexpr):
    """What a row adds to the gradient of the weight."""
    if WIDE:
        return grad * (x * rstd)
    else:
        return grad * round_to(x * rstd, dtype).to(tl.float32)


@triton.jit
def _store_sums(ptr, sums, num_heads, head_dim, columns, inside, ROW: tl.constexpr):
    """Store a program's own sums: of a head's columns over heads, or of each head's."""
    if ROW:
        heads = tl.arange(0, sums.shape[0])
        mask = (heads < num_heads)[:, None] & inside[None, :]
        tl.store(ptr + heads[:, None] * head_dim + columns[None, :], sums, mask=mask)
    else:
        tl.store(ptr + columns, tl.sum(sums, 0), mask=inside)


@triton.jit(do_not_specialize=["tokens", "of_program", "num_heads"])
def _backward_kernel(
    grad_ptr, x_ptr, grad_x_ptr, weight_ptr, partials_ptr, positions_ptr, inv_freq_ptr, grad_stride, grad_step,
    x_stride, x_step, grad_x_stride, grad_x_step, eps, offset, scaling, tokens, of_program, num_heads, of_group,
    head_dim, half,
    SUMS: tl.constexpr, WIDE: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Some consecutive tokens, one after the other, whose parts of the weight's gradient add up in registers."""
    program, width = tl.program_id(0).to(tl.int64), of_group * head_dim
    dtype: tl.constexpr = grad_x_ptr.dtype.element_ty
    firsts, seconds, inside = _columns(half, INTERLEAVED, PAIRS)
    inv_freq = tl.load(inv_freq_ptr + tl.arange(0, PAIRS), mask=inside, other=0.0)
    rest, more = tl.arange(0, 1), tl.arange(0, 1) < 0
    if REST > 0:
        rest = 2 * half + tl.arange(0, REST)
        more = rest < head_dim
    sum_a, sum_b = tl.zeros((HEADS, PAIRS), tl.float32), tl.zeros((HEADS, PAIRS), tl.float32)
    sum_c = tl.zeros((HEADS, REST if REST > 0 else 1), tl.float32)
    for token in range(program * of_program, tl.minimum((program + 1) * of_program, tokens)):
        angle = tl.load(positions_ptr + token).to(tl.float32) * inv_freq
        cos, sin = (tl.cos(angle) * scaling)[None, :], (tl.sin(angle) * scaling)[None, :]
        row, grads = x_ptr + token * x_stride, grad_ptr + token * grad_stride
        target = grad_x_ptr + token * grad_x_stride
        for first in range(0, num_heads, HEADS):
            heads = first + tl.arange(0, HEADS)
            a = _load(row, heads, num_heads, x_step, head_dim, firsts, inside, ROW)
            b = _load(row, heads, num_heads, x_step, head_dim, seconds, inside, ROW)
            grad_a = _load(grads, heads, num_heads, grad_step, head_dim, firsts, inside, ROW)
            grad_b = _load(grads, heads, num_heads, grad_step, head_dim, seconds, inside, ROW)
            of_a = _weights(weight_ptr, heads, num_heads, head_dim, firsts, inside, offset, ROW)
            of_b = _weights(weight_ptr, heads, num_heads, head_dim, seconds, inside, offset, ROW)
            grad_a, grad_b = _turned_back(grad_a, grad_b, cos, sin, dtype)
            square, product = tl.sum(a * a + b * b, 1), tl.sum(grad_a * of_a * a + grad_b * of_b * b, 1)
            if REST > 0:
                c = _load(row, heads, num_heads, x_step, head_dim, rest, more, ROW)
                grad_c = _load(grads, heads, num_heads, grad_step, head_dim, rest, more, ROW)
                of_c = _weights(weight_ptr, heads, num_heads, head_dim, rest, more, offset, ROW)
                square += tl.sum(c * c, 1)
                product += tl.sum(grad_c * of_c * c, 1)
            if ROW:
                square = tl.zeros((HEADS,), tl.float32) + tl.sum(square, 0)
                product = tl.zeros((HEADS,), tl.float32) + tl.sum(product, 0)
            rstd = tl.div_rn(1.0, tl.sqrt_rn(square / width + eps))[:, None]
            mean = product[:, None] * rstd / width
            _store(target, rstd * (grad_a * of_a - a * rstd * mean), heads, num_heads, grad_x_step, head_dim, firsts,
                   inside, ROW)  # fmt: skip
            _store(target, rstd * (grad_b * of_b - b * rstd * mean), heads, num_heads, grad_x_step, head_dim, seconds,
                   inside, ROW)  # fmt: skip
            if REST > 0:
                _store(target, rstd * (grad_c * of_c - c * rstd * mean), heads, num_heads, grad_x_step, head_dim, rest,
                       more, ROW)  # fmt: skip
            if SUMS:
                sum_a += _part(grad_a, a, rstd, dtype, WIDE)
                sum_b += _part(grad_b, b, rstd, dtype, WIDE)
                if REST > 0:
                    sum_c += _part(grad_c, c, rstd, dtype, WIDE)
    if SUMS:
        sums = partials_ptr + program * width
        _store_sums(sums, sum_a, num_heads, head_dim, firsts, inside, ROW)
        _store_sums(sums, sum_b, num_heads, head_dim, seconds, inside, ROW)
        if REST > 0:
            _store_sums(sums, sum_c, num_heads, head_dim, rest, more, ROW)
