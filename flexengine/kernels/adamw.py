"""One AdamW step of a flat segment in one pass over memory; the fused twin of `adamw_update_reference`.

bf16 tensors are handled as int16 bit patterns, because every conversion here is one on bits (see rounding.py). The
operations, their order and the random bits are those of the reference, and fused multiply-add is off, so that CPU and
GPU give the same bits.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from flexengine.kernels.checks import FLOATS, bit_pattern, check_tensor, signed_words
from flexengine.kernels.counts import cdiv
from flexengine.kernels.rounding import canonical_bits, join, low_half, stochastic_pattern, upper_half, widen

_BLOCK = 1024  # elements per program; 4 warps hold 8 per thread, a 16-byte load of each bf16 tensor
_EXPONENT = tl.constexpr(0x7F80_0000)  # all ones: infinity or NaN


def adamw_update_(
    weight: Tensor,
    remainder: Tensor | None,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    grad: Tensor,
    grad_scale: Tensor,
    factors: Sequence[float],
    keys: Sequence[tuple[int, int]],
    element_offset: int,
) -> None:
    """One step in place; `flexengine.optim.adamw.adamw_update` is the function to call.

    Shapes: weight [n] fp32, or bf16 with remainder [n] int16, or bf16 alone; exp_avg and exp_avg_sq [n] both fp32 or
    both bf16; grad [n] bf16 or fp32; all contiguous. grad_scale [1] fp32 or fp64; if not finite, nothing is written.
    factors: the seven of `AdamWFactors`, in that order. keys: two unsigned 32-bit numbers for each stream of random
    bits (weight, exp_avg, exp_avg_sq). element_offset: counter of element 0.
    Order: launches on the current stream, never synchronises, never allocates.
    Raises: ValueError on other shapes or dtypes.
    """
    shape = weight.shape
    check_tensor("weight", weight, (weight.numel(),), FLOATS)
    check_tensor("exp_avg", exp_avg, shape, FLOATS)
    check_tensor("exp_avg_sq", exp_avg_sq, shape, (exp_avg.dtype,))
    check_tensor("grad", grad, shape, FLOATS)
    check_tensor("grad_scale", grad_scale.view(-1), (1,), (torch.float32, torch.float64))
    if remainder is not None:
        check_tensor("remainder", remainder, shape, (torch.int16,))
        check_tensor("weight", weight, shape, (torch.bfloat16,))
    if weight.numel() == 0:
        return
    signed_keys = signed_words(key for pair in keys for key in pair)
    _adamw_kernel[(cdiv(weight.numel(), _BLOCK),)](
        bit_pattern(weight), remainder, bit_pattern(exp_avg), bit_pattern(exp_avg_sq), grad, grad_scale, weight.numel(),
        *factors, *signed_keys, element_offset, BLOCK=_BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


_KEYS = ("weight_key_low", "weight_key_high", "avg_key_low", "avg_key_high", "sq_key_low", "sq_key_high")


# Keys and offset differ at every call: specialising on their values would compile the kernel again and again.
@triton.jit(do_not_specialize=(*_KEYS, "element_offset"))
def _adamw_kernel(
    weight_ptr, remainder_ptr, exp_avg_ptr, exp_avg_sq_ptr, grad_ptr, grad_scale_ptr, num_elements,
    decay, one_minus_beta1, beta2, one_minus_beta2, inverse_root_correction2, eps, step_size,
    weight_key_low, weight_key_high, avg_key_low, avg_key_high, sq_key_low, sq_key_high, element_offset,
    BLOCK: tl.constexpr,
):  # fmt: skip
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    counter = offsets + element_offset
    mask = offsets < num_elements  # of the loads: they must not wait for the scale
    scale = tl.load(grad_scale_ptr).to(tl.float32)
    bf16_states: tl.constexpr = exp_avg_ptr.dtype.element_ty == tl.int16
    bf16_master: tl.constexpr = (weight_ptr.dtype.element_ty == tl.int16) and (remainder_ptr is None)

    weight = tl.load(weight_ptr + offsets, mask=mask, other=0)
    exp_avg = tl.load(exp_avg_ptr + offsets, mask=mask, other=0)
    exp_avg_sq = tl.load(exp_avg_sq_ptr + offsets, mask=mask, other=0)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if remainder_ptr is not None:
        master = join(weight, tl.load(remainder_ptr + offsets, mask=mask, other=0))
    elif bf16_master:
        master = widen(weight)
    else:
        master = weight
    if bf16_states:
        exp_avg = widen(exp_avg)
        exp_avg_sq = widen(exp_avg_sq)

    grad = grad * scale
    exp_avg = exp_avg + (grad - exp_avg) * one_minus_beta1
    exp_avg_sq = exp_avg_sq * beta2 + (grad * grad) * one_minus_beta2
    denominator = tl.sqrt_rn(exp_avg_sq) * inverse_root_correction2 + eps
    master = master * decay - tl.div_rn(exp_avg, denominator) * step_size

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
    if bf16_states:
        tl.store(exp_avg_ptr + offsets, stochastic_pattern(exp_avg, counter, avg_key_low, avg_key_high), mask=mask)
        tl.store(exp_avg_sq_ptr + offsets, stochastic_pattern(exp_avg_sq, counter, sq_key_low, sq_key_high), mask=mask)
    else:
        tl.store(exp_avg_ptr + offsets, exp_avg, mask=mask)
        tl.store(exp_avg_sq_ptr + offsets, exp_avg_sq, mask=mask)
