"""RMSNorm of every head, times weight and silu(z) or after silu(z), forward and backward.

T tokens, N groups of R heads of width V; z lies group by group in another row. A program holds whole heads in
registers. Source: Yang et al. 2024, "Gated Delta Networks"; Dao and Gu 2024, "Transformers are SSMs" (silu(z) first);
Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467. fp32 arithmetic, one rounding at the store.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2, stages_of_rows
from flexengine.kernels.rounding import round_to

_TILE_ELEMENTS = 2048


def gated_rmsnorm_forward(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, out: Tensor, gate_first: bool = False
) -> None:
    """out = x * rstd * weight * silu(z), rstd = 1 / sqrt(mean(x^2, over V) + eps); with gate_first x * silu(z) takes
    the place of x, and the gate no further part.

    Shapes: x and out [T, N, R, V] contiguous in bf16 or fp32; z the same with rows and groups that may be strided, the
    heads of a group side by side; weight [V], or [N * R * V] of each head.
    Cost: reads 2*T*N*R*V and writes T*N*R*V elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    sizes, tile = _check(x, weight, {"x": x, "out": out}, {"z": z})
    if x.numel():
        weights = len(weight) // x.shape[-1]
        grid = (cdiv(sizes[0] // weights, tile["ROWS"]), weights)
        _forward_kernel[grid](x, z, weight, out, *sizes, *z.stride()[:2], eps, GATE_FIRST=gate_first, **tile)


def gated_rmsnorm_backward(
    grad_y: Tensor, x: Tensor, z: Tensor, weight: Tensor, eps: float, grad_x: Tensor, grad_z: Tensor,
    partials: Tensor | None, gate_first: bool = False,
) -> None:  # fmt: skip
    """Gradients of x and z; and in `partials` [P, V or N * R * V] fp32 of a trained weight what its gradient sums up.

    With n = x * rstd, s = sigmoid(z) and gw = grad_y * weight * z * s: grad_x = rstd * (gw - n * mean(gw * n)), grad_z
    = grad_y * weight * n * s * (1 + z * (1 - s)), and the weight's gradient is the sum over heads of all tokens of
    grad_y * n * z * s. With gate_first: ops/gated_rmsnorm.py. P groups of consecutive heads are summed side by side;
    `sum_partials` adds them up, so the order of the sum depends on shapes only.
    Shapes: as forward's; grad_z strided as z may be. grad_x may be grad_y or x.
    Order: one launch on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    sizes, tile = _check(x, weight, {"x": x, "grad_y": grad_y, "grad_x": grad_x}, {"z": z, "grad_z": grad_z})
    weights = len(weight) // x.shape[-1]
    count, rows = sizes[0] // weights, tile["ROWS"]
    groups = cdiv(count, rows)
    if partials is not None:
        groups, rows = len(partials), cdiv(count, len(partials))
        check_tensor("partials", partials, (groups, len(weight)), (torch.float32,))
    if groups:
        _backward_kernel[(groups, weights)](
            grad_y, x, z, weight, grad_x, grad_z, x if partials is None else partials, *sizes, *z.stride()[:2],
            *grad_z.stride()[:2], eps, rows, SUMS=partials is not None, GATE_FIRST=gate_first,
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
    check_tensor("weight", weight, (width if len(weight) == width else groups * heads * width,), FLOATS)
    block = next_power_of_2(width)
    tile = {"ROWS": max(1, _TILE_ELEMENTS // block), "BLOCK": block, "num_warps": min(16, max(4, block // 512))}
    return (tokens * groups * heads, width, groups * heads, heads), tile


@triton.jit
def _at(rows, width, of_token, of_group, stride, step):
    """Where heads begin in strided rows."""
    head = rows % of_token
    return (rows // of_token) * stride + (head // of_group) * step + (head % of_group) * width


@triton.jit
def _load(
    x_ptr, z_ptr, rows, inside, width, of_token, of_group, stride, step, eps, GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """(columns, mask, x, normalised, rstd, z) of heads [ROWS, BLOCK]."""
    columns = tl.arange(0, BLOCK)
    mask = inside[:, None] & (columns < width)[None, :]
    x = tl.load(x_ptr + rows[:, None] * width + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    at = _at(rows, width, of_token, of_group, stride, step)
    z = tl.load(z_ptr + at[:, None] + columns[None, :], mask=mask, other=0.0).to(tl.float32)
    h = x
    if GATE_FIRST:
        h = x * z * tl.sigmoid(z)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(h * h, axis=1) / width + eps))
    return columns, mask, x, h * rstd[:, None], rstd, z


@triton.jit(do_not_specialize=["count"])
def _forward_kernel(
    x_ptr, z_ptr, weight_ptr, out_ptr, count, width, of_token, of_group, stride, step, eps,
    GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Heads of one weight: every head, or of those that have weights of their own every so many."""
    rows = (tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)) * tl.num_programs(1) + tl.program_id(1)
    columns, mask, _, n, _, z = _load(
        x_ptr, z_ptr, rows, rows < count, width, of_token, of_group, stride, step, eps, GATE_FIRST, BLOCK
    )
    own = weight_ptr + tl.program_id(1) * width + columns
    y = n * tl.load(own, mask=columns < width, other=0.0).to(tl.float32)[None, :]
    if not GATE_FIRST:
        y = y * z * tl.sigmoid(z)
    tl.store(out_ptr + rows[:, None] * width + columns[None, :], round_to(y, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count", "group_rows"])
def _backward_kernel(
    grad_y_ptr, x_ptr, z_ptr, weight_ptr, grad_x_ptr, grad_z_ptr, partials_ptr, count, width, of_token, of_group,
    stride, step, grad_stride, grad_step, eps, group_rows,
    SUMS: tl.constexpr, GATE_FIRST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A group of consecutive heads of one weight, whose parts of its gradient it adds up if these are wanted."""
    group, weights = tl.program_id(0).to(tl.int64), tl.num_programs(1)
    begin = group * group_rows
    end = tl.minimum(begin + group_rows, count // weights)
    columns = tl.arange(0, BLOCK)
    of_weight = tl.program_id(1) * width + columns
    weight = tl.load(weight_ptr + of_weight, mask=columns < width, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in tl.range(begin, end, ROWS, num_stages=STAGES):  # in two stages it loads the next heads beside these
        number = first + tl.arange(0, ROWS)
        rows = number * weights + tl.program_id(1)
        _, mask, x, n, rstd, z = _load(
            x_ptr, z_ptr, rows, number < end, width, of_token, of_group, stride, step, eps, GATE_FIRST, BLOCK
        )
        own = rows[:, None] * width + columns[None, :]
        grad_y = tl.load(grad_y_ptr + own, mask=mask, other=0.0).to(tl.float32)
        s = tl.sigmoid(z)
        slope, grad = s * (1.0 + z * (1.0 - s)), grad_y * weight[None, :]
        if GATE_FIRST:
            grad_h = rstd[:, None] * (grad - n * (tl.sum(grad * n, axis=1) / width)[:, None])
            grad_z, grad_x = grad_h * x * slope, grad_h * z * s
        else:
            grad_z, grad_n = grad * n * slope, grad * z * s
            grad_x = rstd[:, None] * (grad_n - n * (tl.sum(grad_n * n, axis=1) / width)[:, None])
        target = grad_z_ptr + _at(rows, width, of_token, of_group, grad_stride, grad_step)[:, None] + columns[None, :]
        tl.store(target, round_to(grad_z, grad_z_ptr.dtype.element_ty), mask=mask)
        tl.store(grad_x_ptr + own, round_to(grad_x, grad_x_ptr.dtype.element_ty), mask=mask)
        if SUMS:
            if GATE_FIRST:
                total += grad_y * n
            else:
                total += grad_y * n * z * s
    if SUMS:
        tl.store(partials_ptr + group * (weights * width) + of_weight, tl.sum(total, axis=0), mask=columns < width)
