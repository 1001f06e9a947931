"""RMSNorm of every head, times weight and silu(z), forward and backward.

T tokens, N groups of R heads of width V; z lies group by group in another row. A program holds whole heads in
registers. Source: Yang et al. 2024, "Gated Delta Networks"; Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
fp32 arithmetic, one rounding at the store.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2, stages_of_rows
from flexengine.kernels.rounding import round_to

_TILE_ELEMENTS = 2048


def gated_rmsnorm_forward(x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """out = x * rstd * weight * silu(z), rstd = 1 / sqrt(mean(x^2, over V) + eps).

    Shapes: x and out [T, N, R, V] contiguous in bf16 or fp32; z the same with rows and groups that may be strided, the
    heads of a group side by side; weight [V]. Cost: reads 2*T*N*R*V and writes T*N*R*V elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    sizes, tile = _check(x, weight, {"x": x, "out": out}, {"z": z})
    if x.numel():
        _forward_kernel[_grid(x, tile)](x, z, weight, out, *sizes, *z.stride()[:2], eps, **tile)


def gated_rmsnorm_backward(
    grad_y: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, grad_x: Tensor, grad_z: Tensor,
    partials: Tensor | None,
) -> None:  # fmt: skip
    """Gradients of x and z; and in `partials` [P, V] fp32 of a trained weight what its gradient is the sum of.

    With n = x * rstd, s = sigmoid(z) and gw = grad_y * weight * z * s: grad_x = rstd * (gw - n * mean(gw * n)), grad_z
    = grad_y * weight * n * s * (1 + z * (1 - s)), and the weight's gradient is the sum over heads of all tokens of
    grad_y * n * z * s. P groups of consecutive heads are summed side by side; `sum_partials` adds them up, so the order
    of the sum depends on shapes only.
    Shapes: as forward's; grad_z strided as z may be. grad_x may be grad_y or x.
    Order: one launch on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    sizes, tile = _check(x, weight, {"x": x, "grad_y": grad_y, "grad_x": grad_x}, {"z": z, "grad_z": grad_z})
    count, rows = sizes[0], tile["ROWS"]
    groups = cdiv(count, rows)
    if partials is not None:
        groups, rows = len(partials), cdiv(count, len(partials))
        check_tensor("partials", partials, (groups, x.shape[-1]), (torch.float32,))
    if groups:
        _backward_kernel[(groups,)](
            grad_y, x, z, weight, grad_x, grad_z, x if partials is None else partials, *sizes, *z.stride()[:2],
            *grad_z.stride()[:2], eps, rows, SUMS=partials is not None,
            STAGES=stages_of_rows(tile["BLOCK"] * x.element_size()), **tile,
        )  # fmt: skip


def _check(
    x: Tensor, weight: Tensor, whole: dict[str, Tensor], strided: dict[str, Tensor]
) -> tuple[tuple[int, int, int, int], dict[str, int]]:
    """(heads of all tokens, their width, heads of a token, heads of a group), and the shape of a program's tile."""
    for name, tensor in whole.items():
        check_tensor(name, tensor, x.shape, FLOATS)
    for name, tensor in strided.items():
        check_tensor(name, tensor, x.shape, FLOATS, strided_rows=True)
        if x.shape[2] > 1 and tensor.stride(2) != x.shape[3]:
            raise ValueError(f"{name} needs the heads of a group side by side, got strides {list(tensor.stride())}")
    tokens, groups, heads, width = x.shape
    check_tensor("weight", weight, (width,), FLOATS)
    block = next_power_of_2(width)
    tile = {"ROWS": max(1, _TILE_ELEMENTS // block), "BLOCK": block, "num_warps": 4 if block <= 4096 else 8}
    return (tokens * groups * heads, width, groups * heads, heads), tile


def _grid(x: Tensor, tile: dict[str, int]) -> tuple[int]:
    return (cdiv(x.numel() // x.shape[-1], tile["ROWS"]),)


@triton.jit
def _at(rows, width, of_token, of_group, stride, step):
    """Where heads begin in strided rows."""
    head = rows % of_token
    return (rows // of_token) * stride + (head // of_group) * step + (head % of_group) * width


@triton.jit
def _load(x_ptr, z_ptr, rows, end, width, of_token, of_group, stride, step, eps, BLOCK: tl.constexpr):
    """(columns, mask, normalised, rstd, z) of heads [ROWS, BLOCK]."""
    columns = tl.arange(0, BLOCK)
    mask = (rows < end)[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * width + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    at = _at(rows, width, of_token, of_group, stride, step)
    z = tl.load(z_ptr + at[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x, axis=1) / width + eps))
    return columns, mask, x * rstd[:, None], rstd, z


@triton.jit(do_not_specialize=["count"])
def _forward_kernel(
    x_ptr, z_ptr, weight_ptr, out_ptr, count, width, of_token, of_group, stride, step, eps,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns, mask, n, _, z = _load(x_ptr, z_ptr, rows, count, width, of_token, of_group, stride, step, eps, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    y = n * weight[None, :] * z * tl.sigmoid(z)
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], round_to(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "group_rows"])
def _backward_kernel(
    grad_y_ptr, x_ptr, z_ptr, weight_ptr, grad_x_ptr, grad_z_ptr, partials_ptr, count, width, of_token, of_group,
    stride, step, grad_stride, grad_step, eps, group_rows,
    SUMS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A group of consecutive heads, whose parts of the weight's gradient it adds up if these are wanted."""
    group = tl.program_id(0).to(tl.int64)
    begin = group * group_rows
    end = tl.minimum(begin + group_rows, count)
    columns = tl.arange(0, BLOCK)
    weight = tl.load(weight_ptr + columns, mask=columns < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(begin, end, ROWS, num_stages=STAGES):  # in two stages it loads the next heads beside these
        rows = first + tl.arange(0, ROWS)
        own = rows[:, None] * width + columns[None, :]
        grad_y = tl.load(grad_y_ptr + own, mask=(rows < end)[:, None] & (columns < width)[None, :], other=0.0)
        _, mask, n, rstd, z = _load(x_ptr, z_ptr, rows, end, width, of_token, of_group, stride, step, eps, BLOCK)
        s, grad_y = tl.sigmoid(z), grad_y.to(tl.float32)
        grad = grad_y * weight[None, :]
        grad_z = grad * n * s * (1.0 + z * (1.0 - s))
        grad_n = grad * z * s
        grad_x = rstd[:, None] * (grad_n - n * (tl.sum(grad_n * n, axis=1) / width)[:, None])
        target = grad_z_ptr + _at(rows, width, of_token, of_group, grad_stride, grad_step)[:, None] + columns[None, :]
        tl.store(target, round_to(grad_z, grad_z_ptr.dtype.element_ty), mask=mask)
        tl.store(grad_x_ptr + own, round_to(grad_x, grad_x_ptr.dtype.element_ty), mask=mask)
        if SUMS:
            total += grad_y * n * z * s
    if SUMS:
        tl.store(partials_ptr + group * width + columns, tl.sum(total, axis=0), mask=columns < width)
