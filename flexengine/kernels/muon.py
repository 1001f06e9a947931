"""What Muon does to every element before and after its matrix products; the fused twins of `optim/muon.py`.

Like kernels/adamw.py they handle bf16 as bit patterns and keep the reference's order of operations and random bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, bit_pattern, check_tensor, signed_words
from flexengine.kernels.counts import cdiv
from flexengine.kernels.rounding import canonical_bits, join, low_half, round_to, stochastic_pattern, upper_half, widen

_BLOCK = 1024  # elements per program
_EXPONENT = tl.constexpr(0x7F80_0000)  # all ones: infinity or NaN
_KEYS = ("key_low", "key_high")


def take_momentum_(
    momentum: Tensor, grad: Tensor, x: Tensor, grad_scale: Tensor, keep: float, keys: tuple[int, int],
    element_offset: int,
) -> None:  # fmt: skip
    """Store the new momentum and, in x, the direction ahead of it.

    Shapes: momentum, grad and x [n] bf16 or fp32, contiguous. grad_scale [1]; if not finite, the momentum stays.
    Order: launches on the current stream, never synchronises, never allocates.
    """
    shape = momentum.shape
    check_tensor("momentum", momentum, (momentum.numel(),), FLOATS)
    check_tensor("grad", grad, shape, FLOATS)
    check_tensor("x", x, shape, FLOATS)
    check_tensor("grad_scale", grad_scale.view(-1), (1,), (torch.float32, torch.float64))
    _momentum_kernel[(cdiv(momentum.numel(), _BLOCK),)](
        bit_pattern(momentum), grad, x, grad_scale, momentum.numel(), keep, 1.0 - keep, *signed_words(keys),
        element_offset, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


def apply_(
    masters: tuple[Tensor, Tensor | None], x: Tensor, grad_scale: Tensor, decay: float, step_size: float,
    keys: tuple[int, int], element_offset: int,
) -> None:  # fmt: skip
    """master = master * decay - x * step_size.

    masters: weight [n] fp32, or bf16 with remainder [n] int16, or bf16 alone (rounded at random); x [n] bf16 or fp32.
    grad_scale [1]; if not finite, nothing is written.
    Order: launches on the current stream, never synchronises, never allocates.
    """
    (weight, remainder), shape = masters, x.shape
    check_tensor("x", x, (x.numel(),), FLOATS)
    check_tensor("weight", weight, shape, FLOATS)
    check_tensor("grad_scale", grad_scale.view(-1), (1,), (torch.float32, torch.float64))
    if remainder is not None:
        check_tensor("remainder", remainder, shape, (torch.int16,))
        check_tensor("weight", weight, shape, (torch.bfloat16,))
    _apply_kernel[(cdiv(x.numel(), _BLOCK),)](
        bit_pattern(weight), remainder, x, grad_scale, x.numel(), decay, step_size, *signed_words(keys), element_offset,
        BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


# Keys and offset differ at every call: specialising on their values would compile the kernel again and again.
@triton.jit(do_not_specialize=(*_KEYS, "element_offset"))
def _momentum_kernel(
    momentum_ptr, grad_ptr, x_ptr, grad_scale_ptr, num_elements, keep, one_minus_keep, key_low, key_high,
    element_offset, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < num_elements
    scale = tl.load(grad_scale_ptr).to(tl.float32)
    bf16_state: tl.constexpr = momentum_ptr.dtype.element_ty == tl.int16
    momentum = tl.load(momentum_ptr + offsets, mask=mask, other=0)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    if bf16_state:
        momentum = widen(momentum)

    momentum = momentum + (grad - momentum) * one_minus_keep
    direction = grad + (momentum - grad) * keep
    tl.store(x_ptr + offsets, round_to(direction, x_ptr.dtype.element_ty), mask=mask)

    finite = (scale.to(tl.int32, bitcast=True) & _EXPONENT) != _EXPONENT
    mask = offsets < tl.where(finite, num_elements, 0)
    if bf16_state:
        pattern = stochastic_pattern(momentum, offsets + element_offset, key_low, key_high)
        tl.store(momentum_ptr + offsets, pattern, mask=mask)
    else:
        tl.store(momentum_ptr + offsets, momentum, mask=mask)


@triton.jit(do_not_specialize=(*_KEYS, "element_offset"))
def _apply_kernel(
    weight_ptr, remainder_ptr, x_ptr, grad_scale_ptr, num_elements, decay, step_size, key_low, key_high,
    element_offset, BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    scale = tl.load(grad_scale_ptr).to(tl.float32)
    finite = (scale.to(tl.int32, bitcast=True) & _EXPONENT) != _EXPONENT
    mask = offsets < tl.where(finite, num_elements, 0)
    bf16_master: tl.constexpr = (weight_ptr.dtype.element_ty == tl.int16) and (remainder_ptr is None)
    weight = tl.load(weight_ptr + offsets, mask=mask, other=0)
    x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if remainder_ptr is not None:
        master = join(weight, tl.load(remainder_ptr + offsets, mask=mask, other=0))
    elif bf16_master:
        master = widen(weight)
    else:
        master = weight

    master = master * decay - x * step_size
    if remainder_ptr is not None:
        bits = canonical_bits(master)
        tl.store(weight_ptr + offsets, upper_half(bits + 0x8000), mask=mask)
        tl.store(remainder_ptr + offsets, low_half(bits), mask=mask)
    elif bf16_master:
        pattern = stochastic_pattern(master, offsets + element_offset, key_low, key_high)
        tl.store(weight_ptr + offsets, pattern, mask=mask)
    else:
        tl.store(weight_ptr + offsets, master, mask=mask)
