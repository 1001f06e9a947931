"""One AdamW step with 8-bit moments in one pass over memory; the fused twin of `adamw_in_blocks_reference`.

Operations, their order and the random bits are the reference's. A program takes whole blocks of 256 elements: it
decodes their moments, updates, finds every block's largest magnitude and encodes.
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

BLOCK = 256  # BLOCK of optim/blockwise.py
_BLOCKS = 4  # blocks per program; 4 warps hold 8 elements per thread
_EXPONENT = tl.constexpr(0x7F80_0000)  # all ones: infinity or NaN
# of optim/blockwise.py, whose steps it reads
_LEAST_BUCKET, _LAST_BUCKET, _ZERO_CODE = tl.constexpr(0x33FF), tl.constexpr(0x3F80), tl.constexpr(127)
_RANK_SHIFT, _TIE_SHIFT, _MIDDLE = tl.constexpr(18), tl.constexpr(17), tl.constexpr((1 << 17) - 1)


class Moments(NamedTuple):
    """Codes [n] uint8 and scales [blocks] fp32 of both moments."""

    exp_avg: Tensor
    exp_avg_sq: Tensor
    exp_avg_scale: Tensor
    exp_avg_sq_scale: Tensor


def adamw_in_blocks_(
    masters: tuple[Tensor, Tensor | None],
    moments: Moments,
    books: Sequence[tuple[Tensor, Tensor]],
    grad: Tensor,
    grad_scale: Tensor,
    factors: Sequence[float],
    weight_keys: tuple[int, int],
    element_offset: int,
) -> None:
    """One step in place; the update of `flexengine.optim.adamw_blocks.adamw_in_blocks_rule` is the function to call.

    masters: weight [n] fp32, or bf16 with remainder [n] int16, or bf16 alone. grad [n] bf16 or fp32. grad_scale [1]; if
    not finite, nothing is written. books: values and steps of both codebooks. factors: the seven of
    `AdamWFactors`. weight_keys: of the random bits that round bf16 masters.
    Order: launches on the current stream, never synchronises, never allocates.
    Raises: ValueError on other shapes or dtypes.
    """
    (weight, remainder), shape = masters, masters[0].shape
    check_tensor("weight", weight, (weight.numel(),), FLOATS)
    check_tensor("grad", grad, shape, FLOATS)
    check_tensor("grad_scale", grad_scale.view(-1), (1,), (torch.float32, torch.float64))
    if remainder is not None:
        check_tensor("remainder", remainder, shape, (torch.int16,))
        check_tensor("weight", weight, shape, (torch.bfloat16,))
    num_blocks = cdiv(weight.numel(), BLOCK)
    for name, tensor in moments._asdict().items():
        scales = name.endswith("scale")
        check_tensor(name, tensor, (num_blocks,) if scales else shape, (torch.float32 if scales else torch.uint8,))
    if weight.numel() == 0:
        return
    signed_keys, pattern = signed_words(weight_keys), bit_pattern(weight)
    _adamw_in_blocks_kernel[(cdiv(num_blocks, _BLOCKS),)](
        pattern, remainder, *moments, *books[0], *books[1], grad, grad_scale, weight.numel(), *factors, *signed_keys,
        element_offset, BLOCKS=_BLOCKS, SIZE=BLOCK, num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit
def _decode(codes, values_ptr, scale):
    """float32 of uint8 codes [blocks, size] with scales [blocks]."""
    return tl.load(values_ptr + codes.to(tl.int32)) * scale[:, None]


@triton.jit
def _encode(x, steps_ptr, SIGNED: tl.constexpr):
    """(uint8 codes, scales [blocks]) of float32 x [blocks, size], by the steps of a codebook."""
    largest = tl.max(canonical_bits(x) & 0x7FFF_FFFF, axis=1)
    scale = largest.to(tl.float32, bitcast=True)
    divisor = tl.where(largest == 0, 1.0, scale)
    quotient = tl.div_rn(x, tl.broadcast_to(divisor[:, None], x.shape))
    bits = quotient.to(tl.int32, bitcast=True)
    bucket = tl.minimum(tl.maximum((bits & 0x7FFF_FFFF) >> 16, _LEAST_BUCKET), _LAST_BUCKET) - _LEAST_BUCKET
    step = tl.load(steps_ptr + bucket)
    middle, magnitude = step & _MIDDLE, bits & 0xFFFF
    if SIGNED:  # a middle itself takes the higher code: the lesser magnitude
        magnitude -= (bits >> 31) & (step >> _TIE_SHIFT) & 1
    codes = (step >> _RANK_SHIFT) + (magnitude >= middle).to(tl.int32)
    if SIGNED:
        codes = tl.maximum(_ZERO_CODE + tl.where(bits < 0, -codes, codes), 0)  # there is 1, and no -1
    return tl.where((bits & _EXPONENT) == _EXPONENT, 0, codes).to(tl.uint8), scale


_KEYS = ("weight_key_low", "weight_key_high")


# Keys and offset differ at every call: specialising on their values would compile the kernel again and again.
@triton.jit(do_not_specialize=(*_KEYS, "element_offset"))
def _adamw_in_blocks_kernel(
    weight_ptr, remainder_ptr, avg_ptr, sq_ptr, avg_scale_ptr, sq_scale_ptr,
    avg_values_ptr, avg_steps_ptr, sq_values_ptr, sq_steps_ptr,
    grad_ptr, grad_scale_ptr, num_elements,
    decay, one_minus_beta1, beta2, one_minus_beta2, inverse_root_correction2, eps, step_size,
    weight_key_low, weight_key_high, element_offset, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    blocks = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    offsets = blocks[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    counter = offsets + element_offset
    mask, block_mask = offsets < num_elements, blocks * SIZE < num_elements
    scale = tl.load(grad_scale_ptr).to(tl.float32)
    bf16_master: tl.constexpr = (weight_ptr.dtype.element_ty == tl.int16) and (remainder_ptr is None)

    weight = tl.load(weight_ptr + offsets, mask=mask, other=0)
    avg_codes = tl.load(avg_ptr + offsets, mask=mask, other=0)
    sq_codes = tl.load(sq_ptr + offsets, mask=mask, other=0)
    grad = tl.load(grad_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    avg_scale = tl.load(avg_scale_ptr + blocks, mask=block_mask, other=0.0)
    sq_scale = tl.load(sq_scale_ptr + blocks, mask=block_mask, other=0.0)
    if remainder_ptr is not None:
        master = join(weight, tl.load(remainder_ptr + offsets, mask=mask, other=0))
    elif bf16_master:
        master = widen(weight)
    else:
        master = weight
    exp_avg = _decode(avg_codes, avg_values_ptr, avg_scale)
    exp_avg_sq = _decode(sq_codes, sq_values_ptr, sq_scale)

    grad = grad * scale
    exp_avg = exp_avg + (grad - exp_avg) * one_minus_beta1
    exp_avg_sq = exp_avg_sq * beta2 + (grad * grad) * one_minus_beta2
    denominator = tl.sqrt_rn(exp_avg_sq) * inverse_root_correction2 + eps
    master = master * decay - tl.div_rn(exp_avg, denominator) * step_size

    # what lies behind the last element counts for no block's largest magnitude
    avg_codes, avg_scale = _encode(tl.where(mask, exp_avg, 0.0), avg_steps_ptr, True)
    sq_codes, sq_scale = _encode(tl.where(mask, exp_avg_sq, 0.0), sq_steps_ptr, False)
    finite = (scale.to(tl.int32, bitcast=True) & _EXPONENT) != _EXPONENT
    stored = tl.where(finite, num_elements, 0)
    mask, block_mask = offsets < stored, blocks * SIZE < stored  # of the stores
    if remainder_ptr is not None:
        bits = canonical_bits(master)
        tl.store(weight_ptr + offsets, upper_half(bits + 0x8000), mask=mask)
        tl.store(remainder_ptr + offsets, low_half(bits), mask=mask)
    elif bf16_master:
        pattern = stochastic_pattern(master, counter, weight_key_low, weight_key_high)
        tl.store(weight_ptr + offsets, pattern, mask=mask)
    else:
        tl.store(weight_ptr + offsets, master, mask=mask)
    tl.store(avg_ptr + offsets, avg_codes, mask=mask)
    tl.store(sq_ptr + offsets, sq_codes, mask=mask)
    tl.store(avg_scale_ptr + blocks, avg_scale, mask=block_mask)
    tl.store(sq_scale_ptr + blocks, sq_scale, mask=block_mask)
