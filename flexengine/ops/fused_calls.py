"""Formulas with kernels of their own as functions that autograd knows, for code of others that calls them.

On the meta device, where calls are counted, they make what the kernels make. On the CPU they go over a few rows at a
time, so that a call takes there what was counted, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flexengine.ops.base import use_kernel
from flexengine.ops.rmsnorm import (
    NormStyle,
    StyleAgain,
    add_partials,
    grad_partials,
    num_parts,
    rmsnorm_backward,
    rmsnorm_backward_input,
    rmsnorm_forward,
)

CPU_ELEMENTS = 1 << 12
"""Elements of rows that the CPU works on at once, or a row."""


def fused_rmsnorm(x: Tensor, weight: Tensor, style: NormStyle) -> Tensor:
    """The norm of the last dimension of x [..., D], times weight [D], both of one dtype; `flexengine.ops.rmsnorm`.

    Backward keeps x and a number for each row.
    """
    return _RMSNorm.apply(x, weight, style)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, style: NormStyle) -> Tensor:
        rows = _rows(x, x.shape[-1])
        out = rows.new_empty(rows.shape)
        rstd = torch.empty(len(rows), dtype=_wide(x), device=x.device)
        for part in _parts(rows):
            rmsnorm_forward(rows[part], weight, style.eps, out[part], rstd[part], None, style.offset, style.wide)
        ctx.save_for_backward(rows, weight, rstd)
        ctx.style = style
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        rows, weight, rstd = ctx.saved_tensors
        style = ctx.style
        grads, width = _rows(grad, rows.shape[1]), rows.shape[1]
        grad_x = rows.new_empty(rows.shape)
        if not ctx.needs_input_grad[1]:
            for part in _parts(rows):
                operands = grads[part], rows[part], weight, rstd[part], grad_x[part]
                rmsnorm_backward_input(*operands, False, style.offset)
            return grad_x.view(grad.shape), None, None
        count = num_parts(grad_partials(width), len(rows))
        sums = torch.empty(count, width, dtype=rstd.dtype, device=rows.device)
        total = torch.zeros(width, dtype=rstd.dtype, device=rows.device)
        for part in _parts(rows):
            operands = grads[part], rows[part], weight, rstd[part], grad_x[part], sums
            rmsnorm_backward(*operands, False, StyleAgain(style.offset, None, style.wide))
            add_partials(sums, len(rows[part]), total, True)
        return grad_x.view(grad.shape), total.to(weight.dtype), None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _rows(x: Tensor, width: int) -> Tensor:
    """x as rows whose elements lie side by side."""
    rows = x.reshape(-1, width)
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _parts(rows: Tensor) -> Iterator[slice]:
    """Rows of each call: all of them for a kernel, none where tensors have no storage."""
    step = len(rows) if use_kernel(rows) else max(1, CPU_ELEMENTS // rows.shape[1])
    if rows.is_meta or not len(rows):
        return
    for start in range(0, len(rows), step):
        yield slice(start, start + step)
