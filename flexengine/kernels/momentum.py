"""One step of Lion or SGD on a flat segment in one pass over memory; the fused twin of `momentum_update_reference`.

Like kernels/adamw.py it handles bf16 as bit patterns and keeps the reference's order of operations and random bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, bit_pattern, check_tensor, signed_words
from flexengine.kernels.counts import cdiv
from flexengine.kernels.rounding import canonical_bits, join, low_half, stochastic_pattern, upper_half, widen

_BLOCK = 1024  # elements per program
_EXPONENT = tl.constexpr(0x7F80_0000)  # all ones: infinity or NaN


class Planes(NamedTuple):
    """weight [n] fp32, or bf16 with remainder [n] int16, or bf16 alone; momentum and grad [n] bf16 or fp32."""

    weight: Tensor
    remainder: Tensor | None
    momentum: Tensor
    grad: Tensor


def momentum_update_(
    rule: str,
    planes: Planes,
    grad_scale: Tensor,
    factors: Sequence[float],
    keys: Sequence[tuple[int, int]],
    element_offset: int,
) -> None:
    """One step in place; `flexengine.optim.momentum.momentum_update` is the function to call.

    rule: lion or sgd. Planes are contiguous. grad_scale [1]; if not finite, nothing is written. factors: the seven of
    `AdamWFactors`. keys: two unsigned 32-bit numbers for each stream of random bits (weight, momentum).
    Order: launches on the current stream, never synchronises, never allocates.
    Raises: ValueError on other shapes or dtypes.
    """
    weight, remainder, momentum, grad = planes
    shape = weight.shape
    check_tensor("weight", weight, (weight.numel(),), FLOATS)
    check_tensor("momentum", momentum, shape, FLOATS)
    check_tensor("grad", grad, shape, FLOATS)
    check_tensor("grad_scale", grad_scale.view(-1), (1,), (torch.float32, torch.float64))
    if remainder is not None:
        check_tensor("remainder", remainder, shape, (torch.int16,))
        check_tensor("weight", weight, shape, (torch.bfloat16,))
    if weight.numel() == 0:
        return
    signed_keys = signed_words(key for pair in keys[:2] for key in pair)
    _momentum_kernel[(cdiv(weight.numel(), _BLOCK),)](
        bit_pattern(weight), remainder, bit_pattern(momentum), grad, grad_scale, weight.numel(),
        factors[0], factors[1], factors[2], factors[3], factors[6], *signed_keys, element_offset,
        LION=rule == "lion", BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


_KEYS = ("weight_key_low", "weight_key_high", "momentum_key_low", "momentum_key_high")


# Keys and offset differ at every call: specialising on their values would compile the kernel again and again.
@triton.jit(do_not_specialize=(*_KEYS, "element_offset"))
def _momentum_kernel(
    weight_ptr, remainder_ptr, momentum_ptr, grad_ptr, grad_scale_ptr, num_elements,
    decay, one_minus_beta1, beta2, one_minus_beta2, step_size,
    weight_key_low, weight_key_high, momentum_key_low, momentum_key_high, element_offset,
    LION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counter = offsets + element_offset
    mask = offsets < num_elements  # of the loads: they must not wait for the scale
    scale = tl.load(grad_scale_ptr).to(tl.float32)
    bf16_state: tl.constexpr = momentum_ptr.dtype.element_ty == tl.int16
    bf16_master: tl.constexpr = (weight_ptr.dtype.element_ty == tl.int16) and (remainder_ptr is None)

    weight = tl.load(weight_ptr + offsets, mask=mask, other=0)
    momentum = tl.load(momentum_ptr + offsets, mask=mask, other=0)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if remainder_ptr is not None:
        master = join(weight, tl.load(remainder_ptr + offsets, mask=mask, other=0))
    elif bf16_master:
        master = widen(weight)
    else:
        master = weight
    if bf16_state:
        momentum = widen(momentum)

    grad = grad * scale
    if LION:
        difference = grad - momentum
        direction = momentum + difference * one_minus_beta1
        momentum = momentum + difference * one_minus_beta2
        bits = direction.to(tl.int32, bitcast=True)
        one = tl.where((bits & 0x7FFF_FFFF) == 0, 0.0, tl.where(bits < 0, -1.0, 1.0))
        direction = one + (direction - direction)
    else:
        momentum = momentum * beta2 + grad
        direction = momentum
    master = master * decay - direction * step_size

    finite = (scale.to(tl.int32, bitcast=True) & _EXPONENT) != _EXPONENT
    mask = offsets < tl.where(finite, num_elements, 0)  # of the stores
    if remainder_ptr is not None:
        bits = canonical_bits(master)
        tl.store(weight_ptr + offsets, upper_half(bits + 0x8000), mask=mask)
        tl.store(remainder_ptr + offsets, low_half(bits), mask=mask)
    elif bf16_master:
        pattern = stochastic_pattern(master, counter, weight_key_low, weight_key_high)
        tl.store(weight_ptr + offsets, pattern, mask=mask)
    else:
        tl.store(weight_ptr + offsets, master, mask=mask)
    if bf16_state:
        pattern = stochastic_pattern(momentum, counter, momentum_key_low, momentum_key_high)
        tl.store(momentum_ptr + offsets, pattern, mask=mask)
    else:
        tl.store(momentum_ptr + offsets, momentum, mask=mask)
