"""Products of operands with other scales than one for a matrix, by cuBLAS: torch's `_scaled_mm_v2`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

CUDA_VERSION = (12, 9)
"""From which cuBLAS multiplies with scales for 128 terms on Hopper, and for 32 or 16 on all Blackwell cards."""


class ScaledMatrix(NamedTuple):
    """Codes [rows, terms], and scales of the kinds, and in the orders, that torch names so; no orders: as they lie."""

    codes: Tensor
    scales: Sequence[Tensor]
    kinds: Sequence[str]
    orders: Sequence[str] = ()


def has_scale_kinds() -> bool:
    """Whether torch, and the CUDA that it was built for, have such products, on cards that do."""
    cuda = tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])
    return cuda >= CUDA_VERSION and hasattr(torch.ops.aten, "_scaled_mm_v2")


def scaled_product(a: ScaledMatrix, b: ScaledMatrix, out: Tensor, bias: Tensor | None) -> None:
    """out = a @ b.T (+ bias). Tensors without memory, where kernels are compiled ahead, stay as they are."""
    if out.device.type != "cuda":
        return
    kinds, orders = (
        [[_number(of, name) for name in names] for names in both]
        for of, both in (("ScalingType", (a.kinds, b.kinds)), ("SwizzleType", (a.orders, b.orders)))
    )
    torch.ops.aten._scaled_mm_v2.out(  # torch.nn.functional.scaled_mm has no out
        a.codes, b.codes.t(), list(a.scales), kinds[0], orders[0], list(b.scales), kinds[1], orders[1], bias, out.dtype,
        [], False, out=out,
    )  # fmt: skip


@cache
def _number(of: str, name: str) -> int:
    """torch's number of a kind of scales, or of an order that these lie in."""
    return int(getattr(getattr(torch.nn.functional, of), name).value)
