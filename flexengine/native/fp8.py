"""FP8 codes (e4m3) of float32 values on the CPU, with a power of two as the scale of every block, and back.

A scale is the biased exponent of a float32: the least power of two, from 2^-126 on, with which no code of its block
exceeds 448. A product with it is exact, so that what rounding loses is, too: at most 1/16 of a value, or 2^-10 of the
scale. 255 stands for a block that holds something infinite, NaN, or above 1.75 * 2^127: all of it is NaN then.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from flexengine.native import library

BLOCK = 128
"""Elements that share a scale, a byte: 0.8% of what is sent. Fewer would follow the values closer, for more bytes."""
_NOT_FINITE = 255
_COST = "codes of gradients are made by torch, which takes ten times as long"


def encode_fp8(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    """Write codes [n] uint8 and scales [ceil(n / BLOCK)] uint8 of float32 values [n], which become what rounding loses.

    That is 0 where a block is not finite. All are contiguous. Bits depend on no number of threads.
    """
    _check(values, codes, scales)
    run = _encoder()
    if run is None:
        library.fallback_notice("FP8 codes", _COST)
        _encode_torch(values, codes, scales)
    else:
        pointers = (values.data_ptr(), codes.data_ptr(), scales.data_ptr())
        library.check(run(*pointers, values.numel(), torch.get_num_threads()), "FP8 codes")


def decode_fp8(codes: Tensor, scales: Tensor, out: Tensor, add: bool = False) -> None:
    """Write what codes stand for, or add it, to float32 values [n]. Shapes: as of `encode_fp8`."""
    _check(out, codes, scales)
    run = _decoder()
    if run is None:
        library.fallback_notice("FP8 codes", _COST)
        for values, some, of_some in _in_blocks(out, codes, scales):
            found = some.view(torch.float8_e4m3fn).float().mul_(_power(of_some))
            values.add_(found) if add else values.copy_(found)
    else:
        pointers = (codes.data_ptr(), scales.data_ptr(), out.data_ptr())
        library.check(run(*pointers, out.numel(), int(add), torch.get_num_threads()), "values of FP8 codes")


@cache
def _encoder() -> Callable[..., int] | None:
    return library.bind("flex_fp8_encode", *[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int)


@cache
def _decoder() -> Callable[..., int] | None:
    return library.bind("flex_fp8_decode", *[ctypes.c_void_p] * 3, ctypes.c_int64, ctypes.c_int, ctypes.c_int)


def _encode_torch(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    for some, of_codes, of_scales in _in_blocks(values, codes, scales):
        most = some.abs().amax(1, keepdim=True).view(torch.int32)
        exponents = (most.clamp_max_(0x7F800000) + 0x1FFFFF) >> 23
        not_finite = exponents >= _NOT_FINITE
        exponents = (exponents - 8).clamp_min_(1).masked_fill_(not_finite, _NOT_FINITE)
        of_scales.copy_(exponents)
        rounded = of_codes.view(torch.float8_e4m3fn)
        rounded.copy_(some * ((254 - exponents) << 23).view(torch.float32))
        of_codes.masked_fill_(not_finite, 0x7F)
        some.sub_(rounded.float().mul_(_power(of_scales))).masked_fill_(not_finite, 0.0)


def _in_blocks(values: Tensor, codes: Tensor, scales: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Views [blocks, elements], [blocks, elements] and [blocks, 1] of whole blocks, and of the last one."""
    whole = values.numel() // BLOCK * BLOCK
    cuts = [slice(0, whole), slice(whole, None)]
    rows = [slice(0, whole // BLOCK), slice(whole // BLOCK, None)]
    return [
        (values[cut].view(-1, size), codes[cut].view(-1, size), scales[row].view(-1, 1))
        for cut, row, size in zip(cuts, rows, (BLOCK, values.numel() - whole), strict=True)
        if size and values[cut].numel()
    ]


def _power(scales: Tensor) -> Tensor:
    """The powers of two that scales stand for, infinity for a block that is not finite, whose codes are NaN."""
    return (scales.to(torch.int32) << 23).view(torch.float32)


def _check(values: Tensor, codes: Tensor, scales: Tensor) -> None:
    count = values.numel()
    shapes = ((values, torch.float32, count), (codes, torch.uint8, count), (scales, torch.uint8, -(-count // BLOCK)))
    for tensor, dtype, expected in shapes:
        if tensor.dtype != dtype or tensor.shape != (expected,) or not tensor.is_contiguous() or not tensor.is_cpu:
            raise ValueError(
                f"FP8 codes take {dtype} [{expected}] on the CPU, got {tensor.dtype} {list(tensor.shape)} with strides"
                f" {list(tensor.stride())} on {tensor.device}"
            )
