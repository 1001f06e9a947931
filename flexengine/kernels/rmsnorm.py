"""RMSNorm: y = weight * x / sqrt(mean(x^2) + eps), forward, the input half of backward, and backward in one pass.

T tokens, D width. Rows are [T, D], or K heads of width D in each row, [T, K, D], at any distance from each other, which
are normalised one by one with one weight. A program holds whole rows in registers: D up to about 65536. Source: Zhang
and Sennrich 2019, https://arxiv.org/abs/1910.07467, in the order of roundings of Hugging Face's LlamaRMSNorm, or with
`wide` of its Gemma and OLMo norms: the weight, plus `offset`, multiplies in fp32 before the one rounding.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2, stages_of_rows
from flexengine.kernels.rounding import round_to

_TILE_ELEMENTS = 2048  # elements per program when rows are short: several rows share a program
_SUM_ROWS, _SUM_COLUMNS = 256, 16  # few steps one after the other, and programs enough for narrow rows


def rmsnorm_forward(
    x: Tensor, weight: Tensor | None, eps: float, out: Tensor, rstd: Tensor | None, residual: Tensor | None = None,
    offset: float = 0.0, wide: bool = False,
) -> None:  # fmt: skip
    """out = (residual +) (weight + offset) * (x * rstd), rstd = 1 / sqrt(mean(x^2, over D) + eps), which is kept for
    backward unless that recomputes it (None). Without a weight x * rstd is all there is.

    Shapes: x, out and residual [T, D] or [T, K, D] in bf16 or fp32, rows may be strided; weight [D]; rstd [T] or
    [T, K] fp32, rows may be strided. out may be x or residual.
    Rounding: x * rstd is rounded to x's dtype, then multiplied by the weight in that dtype; with wide only the result
    is rounded. A residual is added in fp32, before the last rounding.
    Cost: reads T*D (twice that with a residual) and writes T*D elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    shape = tuple(x.shape)
    _check_rows("x", x, shape, FLOATS)
    _check_rows("out", out, shape, (x.dtype,))
    if residual is not None:
        _check_rows("residual", residual, shape, (x.dtype,))
    if weight is not None:
        check_tensor("weight", weight, shape[-1:], FLOATS)
    if rstd is not None:
        check_tensor("rstd", rstd, shape[:-1], (torch.float32,), strided_rows=x.dim() == 3)
    count, heads = _rows(x)
    if count == 0:
        return
    rows, block, num_warps = _row_tile(shape[-1])
    added = out if residual is None else residual
    _forward_kernel[(cdiv(count, rows),)](
        x, x if weight is None else weight, out, rstd, added, count, shape[-1], heads, *_strides(x), *_strides(out),
        0 if rstd is None else rstd.stride(0), *_strides(added), eps, offset, STORE_RSTD=rstd is not None,
        RESIDUAL=residual is not None, WEIGHT=weight is not None, WIDE=wide, ROWS=rows, BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip


def rmsnorm_backward_input(
    grad_y: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, grad_x: Tensor, accumulate: bool,
    offset: float = 0.0, eps: float | None = None,
) -> None:  # fmt: skip
    """Input half of the gradients: grad_x = (or +=) rstd * (gw - n * mean(gw * n)), n = x * rstd,
    gw = grad_y * (weight + offset).

    Shapes: grad_y, x, grad_x [T, D] or [T, K, D] in bf16 or fp32, rows may be strided; weight [D]; rstd from the
    forward, or with eps recomputed and written. accumulate adds the old grad_x in fp32 before the one rounding. grad_x
    may be grad_y or x.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    _check_backward(grad_y, x, weight, rstd, grad_x)
    count, heads = _rows(x)
    if count == 0:
        return
    rows, block, num_warps = _row_tile(x.shape[-1])
    _backward_input_kernel[(cdiv(count, rows),)](
        grad_y, x, x if weight is None else weight, rstd, grad_x, count, x.shape[-1], heads, *_strides(grad_y),
        *_strides(x), *_strides(grad_x), rstd.stride(0), offset, 0.0 if eps is None else eps,
        FIND_RSTD=eps is not None, ACCUMULATE=accumulate, WEIGHT=weight is not None, ROWS=rows, BLOCK=block,
        num_warps=num_warps,
    )  # fmt: skip


def rmsnorm_backward(
    grad_y: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, grad_x: Tensor, partials: Tensor, accumulate: bool,
    offset: float = 0.0, eps: float | None = None, wide: bool = False,
) -> None:  # fmt: skip
    """Input half as `rmsnorm_backward_input`, and in `partials` what the gradient of the weight is the sum of:
    grad_y * round(x * rstd), over T (and K), in one pass over the rows.

    Shapes: those of the input half; partials [P, D] fp32. P groups of consecutive rows are summed side by side;
    `sum_partials` adds them up. The order of the sum, so its bits, depends on T, K, D and P only (512 to 1024 keep any
    card busy). round is to x's dtype, as in the forward, whose exact derivative this is; with wide nothing is rounded.
    Cost: reads 2*T*D elements (3 where grad_x is added to) and writes T*D, K times, and 4*P*D bytes.
    Order: one launch on the current stream, never synchronises. Without rows the partial sums are zeros.
    Raises: ValueError on other shapes, dtypes or strides, and where there are no groups.
    """
    _check_backward(grad_y, x, weight, rstd, grad_x)
    groups, width = partials.shape[0], x.shape[-1]
    check_tensor("partials", partials, (groups, width), (torch.float32,))
    if groups == 0:
        raise ValueError("partials must have at least one row, got shape [0, D]")
    count, heads = _rows(x)
    rows, block, _ = _row_tile(width)
    _backward_kernel[(groups,)](
        grad_y, x, weight, rstd, grad_x, partials, count, width, heads, cdiv(count, groups), *_strides(grad_y),
        *_strides(x), *_strides(grad_x), rstd.stride(0), offset, 0.0 if eps is None else eps,
        FIND_RSTD=eps is not None, ACCUMULATE=accumulate, WIDE=wide, ROWS=rows, BLOCK=block,
        STAGES=stages_of_rows(block * x.element_size()), num_warps=min(16, max(4, block // 512)),
    )  # fmt: skip


def sum_partials(partials: Tensor, total: Tensor, accumulate: bool) -> None:
    """total [D] = (or +=) the sum of partials [P, D] over P, both fp32 and contiguous, in an order that P fixes."""
    groups, width = partials.shape
    _sum_partials_kernel[(cdiv(width, _SUM_COLUMNS),)](
        partials, total, groups, width, ACCUMULATE=accumulate, ROWS=_SUM_ROWS, COLUMNS=_SUM_COLUMNS, num_warps=4
    )


def _check_backward(grad_y: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, grad_x: Tensor) -> None:
    shape = tuple(x.shape)
    for name, tensor in (("x", x), ("grad_y", grad_y), ("grad_x", grad_x)):
        _check_rows(name, tensor, shape, FLOATS)
    if weight is not None:
        check_tensor("weight", weight, shape[-1:], FLOATS)
    check_tensor("rstd", rstd, shape[:-1], (torch.float32,), strided_rows=x.dim() == 3)


def _check_rows(name: str, tensor: Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]) -> None:
    """Rows may be strided, and so may heads of one row."""
    check_tensor(name, tensor, shape, dtypes, strided_rows=True)


def _strides(x: Tensor) -> tuple[int, int]:
    """Elements from a row to the next, and from a head to the next in it."""
    return x.stride(0), 0 if x.dim() == 2 else x.stride(1)


def _rows(x: Tensor) -> tuple[int, int]:
    """(rows to normalise, how many of them lie side by side)."""
    heads = 1 if x.dim() == 2 else x.shape[1]
    return x.shape[0] * heads, heads


def _row_tile(width: int) -> tuple[int, int, int]:
    """(rows per program, padded width, warps): by width alone, so that no other number moves a bit."""
    block = next_power_of_2(width)
    num_warps = 4 if block <= 4096 else 8 if block <= 16384 else 16
    return max(1, _TILE_ELEMENTS // block), block, num_warps


@triton.jit
def _offsets(rows, heads, stride, step):
    """Where rows begin: `heads` of them `step` elements apart, then the next `stride` elements further on."""
    return (rows // heads) * stride + (rows % heads) * step


@triton.jit(do_not_specialize=["count"])
def _forward_kernel(
    x_ptr, weight_ptr, out_ptr, rstd_ptr, residual_ptr, count, width, heads, x_stride, x_step, out_stride, out_step,
    rstd_stride, residual_stride, residual_step, eps, offset,
    STORE_RSTD: tl.constexpr, RESIDUAL: tl.constexpr, WEIGHT: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    mask = (rows < count)[:, None] & (columns < width)[None, :]
    source = x_ptr + _offsets(rows, heads, x_stride, x_step)[:, None] + columns[None, :]
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    # before the sum over the row is waited for, so that all loads are under way together
    weight = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    if RESIDUAL:
        added = residual_ptr + _offsets(rows, heads, residual_stride, residual_step)[:, None] + columns[None, :]
        residual = tl.load(added, mask=mask, other=0.0).to(tl.float32)
    mean_square = tl.sum(x * x, axis=1) / width
    rstd = tl.div_rn(1.0, tl.sqrt_rn(mean_square + eps))
    if STORE_RSTD:
        tl.store(rstd_ptr + _offsets(rows, heads, rstd_stride, 1), rstd, mask=rows < count)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    if WIDE:
        y = x * rstd[:, None] * (weight + offset)[None, :]
    else:
        normalised = round_to(x * rstd[:, None], dtype).to(tl.float32)
        y = normalised * round_to(weight + offset, dtype).to(tl.float32)[None, :]
    if RESIDUAL:
        y += residual
    target = out_ptr + _offsets(rows, heads, out_stride, out_step)[:, None] + columns[None, :]
    tl.store(target, round_to(y, dtype), mask=mask)


@triton.jit
def _backward_rows(
    grad_y_ptr, x_ptr, weight, rstd_ptr, grad_x_ptr, rows, end, columns, width, heads, grad_y_stride, grad_y_step,
    x_stride, x_step, grad_x_stride, grad_x_step, rstd_stride, eps, FIND_RSTD: tl.constexpr, ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Write the input gradient of rows; returns (grad_y, x * rstd) [ROWS, BLOCK] in fp32. weight: with its offset."""
    mask = (rows < end)[:, None] & (columns < width)[None, :]
    source = x_ptr + _offsets(rows, heads, x_stride, x_step)[:, None] + columns[None, :]
    x = tl.load(source, mask=mask, other=0.0).to(tl.float32)
    grads = grad_y_ptr + _offsets(rows, heads, grad_y_stride, grad_y_step)[:, None] + columns[None, :]
    grad_y = tl.load(grads, mask=mask, other=0.0).to(tl.float32)
    rstd_ptrs = rstd_ptr + _offsets(rows, heads, rstd_stride, 1)
    if not FIND_RSTD:
        rstd = tl.load(rstd_ptrs, mask=rows < end, other=0.0)
    target = grad_x_ptr + _offsets(rows, heads, grad_x_stride, grad_x_step)[:, None] + columns[None, :]
    if ACCUMULATE:  # all loads before the sum over the row is waited for
        previous = tl.load(target, mask=mask, other=0.0)
    if FIND_RSTD:
        rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=1) / width + eps))
        tl.store(rstd_ptrs, rstd, mask=rows < end)
    normalised = x * rstd[:, None]
    grad_normalised = grad_y * weight[None, :]
    projection = tl.sum(grad_normalised * normalised, axis=1) / width
    grad_x = rstd[:, None] * (grad_normalised - normalised * projection[:, None])
    if ACCUMULATE:
        grad_x += previous.to(tl.float32)
    tl.store(target, round_to(grad_x, grad_x_ptr.dtype.element_ty), mask=mask)
    return grad_y, normalised


@triton.jit(do_not_specialize=["count"])
def _backward_input_kernel(
    grad_y_ptr, x_ptr, weight_ptr, rstd_ptr, grad_x_ptr, count, width, heads, grad_y_stride, grad_y_step, x_stride,
    x_step, grad_x_stride, grad_x_step, rstd_stride, offset, eps,
    FIND_RSTD: tl.constexpr, ACCUMULATE: tl.constexpr, WEIGHT: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    weight = tl.full((BLOCK,), 1.0, tl.float32)
    if WEIGHT:
        weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32) + offset
    _backward_rows(
        grad_y_ptr, x_ptr, weight, rstd_ptr, grad_x_ptr, rows, count, columns, width, heads, grad_y_stride, grad_y_step,
        x_stride, x_step, grad_x_stride, grad_x_step, rstd_stride, eps, FIND_RSTD, ACCUMULATE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count", "group_rows"])
def _backward_kernel(
    grad_y_ptr, x_ptr, weight_ptr, rstd_ptr, grad_x_ptr, partials_ptr, count, width, heads, group_rows, grad_y_stride,
    grad_y_step, x_stride, x_step, grad_x_stride, grad_x_step, rstd_stride, offset, eps, FIND_RSTD: tl.constexpr,
    ACCUMULATE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A group of consecutive rows, whose parts of the weight's gradient it adds up; lanes of a tile are summed once, at
    the end. The loop takes more registers than `_backward_input_kernel`, which is for rows without sums."""
    group = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32) + offset
    begin = group * group_rows
    end = tl.minimum(begin + group_rows, count)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(begin, end, ROWS, num_stages=STAGES):
        grad_y, normalised = _backward_rows(
            grad_y_ptr, x_ptr, weight, rstd_ptr, grad_x_ptr, first + tl.arange(0, ROWS), end, columns, width, heads,
            grad_y_stride, grad_y_step, x_stride, x_step, grad_x_stride, grad_x_step, rstd_stride, eps, FIND_RSTD,
            ACCUMULATE,
        )  # fmt: skip
        if not WIDE:
            normalised = round_to(normalised, x_ptr.dtype.element_ty).to(tl.float32)
        total += grad_y * normalised
    tl.store(partials_ptr + group * width + columns, tl.sum(total, axis=0), mask=columns < width)


@triton.jit(do_not_specialize=["groups"])
def _sum_partials_kernel(
    partials_ptr, grad_weight_ptr, groups, width,
    ACCUMULATE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    columns = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, groups, ROWS):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < groups)[:, None] & (columns < width)[None, :]
        total += tl.load(partials_ptr + rows[:, None] * width + columns[None, :], mask=mask, other=0.0)
    grad_weight = tl.sum(total, axis=0)
    if ACCUMULATE:
        grad_weight += tl.load(grad_weight_ptr + columns, mask=columns < width, other=0.0)
    tl.store(grad_weight_ptr + columns, grad_weight, mask=columns < width)
