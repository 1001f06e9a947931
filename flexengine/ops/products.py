"""Products of matrices by torch, and where Triton kernels that multiply run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexengine.ops.base import FLOAT64_BYTES, use_kernel, wide
from flexengine.ops.cards import multiplies_in_kernels


def use_product_kernel(tensor: Tensor) -> bool:
    """Whether a Triton kernel that multiplies matrices should run: where others do, but on cards before 8.0."""
    return use_kernel(tensor) and multiplies_in_kernels(tensor.device)


def write_product(out: Tensor, a: Tensor, b: Tensor, added: bool) -> None:
    """out = a @ b, or with `added` out += a @ b. Where out is wider than a and b, CUDA sums straight into it, and the
    CPU widens both first."""
    if a.dtype != out.dtype and not a.is_cuda:
        a, b = wide(a), wide(b)
    kind: dict[str, Any] = {} if a.dtype == out.dtype else {"out_dtype": out.dtype}
    torch.addmm(out, a, b, out=out, **kind) if added else torch.mm(a, b, out=out, **kind)


def add_product(start: Tensor | None, low: Tensor, up: Tensor, out: Tensor, also: Tensor | None = None) -> None:
    """out = start + low @ up.T (+ also). torch adds to a copy of `start`, which is one pass over out more."""
    if start is None:
        torch.mm(low, up.t(), out=out)
    elif use_product_kernel(out) and out.element_size() < FLOAT64_BYTES:
        from flexengine.kernels import lora_sum  # noqa: PLC0415 (Triton is imported when first used)

        lora_sum.add_product(start, low, up, out, also)
    else:
        start = start if also is None else torch.add(start, also, out=out)
        torch.addmm(start, low, up.t(), out=out)


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x [T, D] @ weight [F, D].T in float32 (float64), not rounded to the operands' type; also of stacks of both."""
    if x.is_cuda and x.element_size() == 2:
        product = torch.bmm if x.dim() == 3 else torch.mm
        return product(x, weight.mT, out_dtype=torch.float32)
    return wide(x) @ wide(weight).mT
