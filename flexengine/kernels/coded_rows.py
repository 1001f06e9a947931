"""Rows [T, D] as FP8 values (e4m3) with a scale for every 128 columns, and back.

B = ceil(D / 128) blocks of columns. Values [T, D] and scales [T, B] are columns of one matrix, so that neighbouring
rows of either lie as far apart as its rows do. Rounding and reading are those of kernels/rounded_glu.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels import rounded_glu
from flexengine.kernels.checks import FLOATS, check_tensor
from flexengine.kernels.counts import cdiv, next_power_of_2
from flexengine.kernels.rounded_glu import _load_codes, _store_codes, _tile
from flexengine.kernels.rounding import round_to

_BLOCKS = 16  # blocks of columns per program, as in kernels/rounded_glu.py


def write_codes(x: Tensor, values: Tensor, scales: Tensor, largest: float, least: float) -> None:
    """values = x / scales, where a scale is max(largest magnitude of its block, least) / largest.

    Shapes: x [T, D] in bf16, fp16 or fp32, values [T, D] uint8, scales [T, B] fp32, the rows of both of any stride.
    Rounding: as kernels/fp8.py. NaN stays NaN; a block with an infinity becomes NaN.
    Cost: reads T*D elements, writes T*D + 4*T*B bytes.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    launch = _launch(x, values, scales)
    if x.numel() > 0:
        _write_kernel[(len(x) * launch["tiles"],)](x, values, scales, largest=largest, least=least, **launch)


def read_codes(values: Tensor, scales: Tensor, x: Tensor) -> None:
    """x = values * scales.

    Shapes: as `write_codes`. Rounding: one product in fp32, and one rounding at the store.
    Cost: reads T*D + 4*T*B bytes, writes T*D elements.
    Order: launches on the current stream, never synchronises.
    Raises: ValueError on other shapes, dtypes or strides.
    """
    launch = _launch(x, values, scales)
    if x.numel() > 0:
        _read_kernel[(len(x) * launch["tiles"],)](values, scales, x, **launch)


def _launch(x: Tensor, values: Tensor, scales: Tensor) -> dict[str, int | bool]:
    """Check the operands; returns the keywords of a launch."""
    tokens, width = x.shape
    blocks = cdiv(width, rounded_glu.COLUMNS)
    check_tensor("x", x, (tokens, width), FLOATS)
    check_tensor("values", values, (tokens, width), (torch.uint8,), strided_rows=True)
    check_tensor("scales", scales, (tokens, blocks), (torch.float32,), strided_rows=True)
    together = min(_BLOCKS, next_power_of_2(blocks))
    return {
        "width": width, "blocks": blocks, "tiles": cdiv(blocks, together),
        "values_stride": values.stride(0), "scales_stride": scales.stride(0),
        "NATIVE": rounded_glu.is_native(values), "BLOCKS": together, "num_warps": 4,
    }  # fmt: skip


@triton.jit
def _write_kernel(
    x_ptr, values_ptr, scales_ptr, width, blocks, tiles, values_stride, scales_stride, largest, least,
    NATIVE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    token, block, column, inside = _tile(width, tiles, BLOCKS)
    x = tl.load(x_ptr + token * width + column, mask=inside, other=0.0).to(tl.float32)
    values, scales = values_ptr + token * values_stride + column, scales_ptr + token * scales_stride + block
    _store_codes(x, values, scales, inside, block < blocks, largest, least, NATIVE)


@triton.jit
def _read_kernel(
    values_ptr, scales_ptr, x_ptr, width, blocks, tiles, values_stride, scales_stride,
    NATIVE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    token, block, column, inside = _tile(width, tiles, BLOCKS)
    values, scales = values_ptr + token * values_stride + column, scales_ptr + token * scales_stride + block
    x = _load_codes(values, scales, inside, block < blocks, NATIVE)
    tl.store(x_ptr + token * width + column, round_to(x, x_ptr.dtype.element_ty), mask=inside)
