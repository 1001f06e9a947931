"""AdamW on flat tensors: one formula for float32, split and bf16 master weights, with float32 or bf16 states.

The order of the operations is part of the definition: every line of `adamw_values` is one rounding per operator, no
fused multiply-add, so that the Triton kernel (and any other implementation) can give the same bits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.native import update as native
from flexengine.native.library import fallback_notice
from flexengine.native.update import HostUpdate
from flexengine.optim.rule import NativeCall, Rule, StatePlane, Update
from flexengine.optim.stored import (
    MOMENTUM_STREAM,
    SECOND_STREAM,
    WEIGHT_STREAM,
    math_dtype,
    pieces,
    read_master,
    scaled_grad,
    write_master,
    write_state,
)
from flexengine.random_bits import stream_keys

_STREAMS = (WEIGHT_STREAM, MOMENTUM_STREAM, SECOND_STREAM)
_TILE_ELEMENTS = 1 << 18  # bounds the temporaries of a plain update to 20 MB, about the size of a last-level cache


@dataclass(frozen=True)
class AdamW:
    """Settings of AdamW. The weight decay is the value for segments that decay; the engine passes 0 for the others.

    Raises: ValueError when a value lies outside its range.
    """

    lr: float = 3e-5
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not 0.0 <= self.lr < float("inf"):
            raise ValueError(f"AdamW lr must be finite and at least 0, got {self.lr}")
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"AdamW betas must be two numbers in [0, 1), got {self.betas}")
        if not 0.0 < self.eps < float("inf"):
            raise ValueError(f"AdamW eps must be finite and above 0, got {self.eps}")
        if not 0.0 <= self.weight_decay < float("inf"):
            raise ValueError(f"AdamW weight_decay must be finite and at least 0, got {self.weight_decay}")


class AdamWFactors(NamedTuple):
    """The numbers of one step that multiply tensors, computed in float64 on the host."""

    decay: float  # 1 - lr * weight_decay
    one_minus_beta1: float
    beta2: float
    one_minus_beta2: float
    inverse_root_correction2: float  # 1 / sqrt(1 - beta2**step)
    eps: float
    step_size: float  # lr / (1 - beta1**step)


def adamw_factors(lr: float, betas: tuple[float, float], eps: float, weight_decay: float, step: int) -> AdamWFactors:
    """Factors of optimizer step `step` (1-based). Raises: ValueError if step < 1."""
    if step < 1:
        raise ValueError(f"AdamW step counts from 1, got {step}")
    beta1, beta2 = betas
    return AdamWFactors(
        decay=1.0 - lr * weight_decay,
        one_minus_beta1=1.0 - beta1,
        beta2=beta2,
        one_minus_beta2=1.0 - beta2,
        inverse_root_correction2=(1.0 - beta2**step) ** -0.5,
        eps=eps,
        step_size=lr / (1.0 - beta1**step),
    )


def adamw_rule(state_dtype: str) -> Rule:
    """AdamW with both moments of every element in one dtype."""
    states = (StatePlane("exp_avg", state_dtype), StatePlane("exp_avg_sq", state_dtype))
    return Rule("AdamW", states, adamw_update, native=_native)


def _native(update: Update) -> NativeCall:
    planes, settings = update.planes, update.settings
    host = HostUpdate(
        weight=planes["weights"],
        remainder=planes.get("remainder"),
        states=(planes["exp_avg"], planes["exp_avg_sq"]),
        grad=planes["grad"],
        grad_scale=update.grad_scale,
        factors=adamw_factors(update.lr, settings.betas, settings.eps, update.weight_decay, update.step),
        keys=[stream_keys(update.seed, update.step, stream) for stream in _STREAMS],
        element_offset=update.element_offset,
    )
    return NativeCall("adamw", host)


def adamw_update(update: Update) -> None:
    """One AdamW step in place: the Triton kernel on CUDA tensors, the native one on CPU tensors.

    Arguments, shapes and errors as `adamw_update_reference`, and the same bits (which NaN a NaN is may differ). float64
    tensors use the reference on both, and so do CPU tensors where the native library is missing: tile by tile.
    Cost: a segment of n elements reads and writes its states once: split master with float32 states 26 n bytes of
    memory traffic with a bf16 gradient, bf16 master with bf16 states 14 n.
    Order: launches on the current stream, never synchronises; on the CPU it has finished when it returns.
    """
    _check(update)
    weight = update.planes["weights"]
    if weight.is_cuda and weight.dtype != torch.float64:
        from flexengine.kernels.adamw import adamw_update_  # noqa: PLC0415  imports Triton

        call = _native(update).update
        exp_avg, exp_avg_sq = call.states
        adamw_update_(
            weight, call.remainder, exp_avg, exp_avg_sq, call.grad, call.grad_scale, call.factors, call.keys,
            call.element_offset,
        )  # fmt: skip
        return
    if native.supports(weight, update.planes["grad"]):
        native.update_(*_native(update))
        return
    if weight.dtype != torch.float64:
        fallback_notice("AdamW on the CPU", "it is computed in plain torch, which takes 10 to 40 times as long")
    for piece in pieces(update, _TILE_ELEMENTS):
        adamw_update_reference(piece)


def adamw_update_reference(update: Update) -> None:
    """One decoupled AdamW step in place, in plain torch.

    Planes: weights, exp_avg, exp_avg_sq, grad [n] contiguous, and remainder [n] int16 or none; grad_scale [1].
    Master: weights float32 or float64 alone are the master; bf16 with remainder is a float32 split in two
    (`split_fp32`); bf16 alone is updated in float32 and rounded stochastically.
    States: both in the dtype of the arithmetic (float32, or float64 for float64 weights), or both bf16, rounded
    stochastically when stored; the update itself uses them unrounded.
    grad: any float dtype. grad_scale: float32 or float64, multiplies the gradient (clip coefficient / target tokens);
    if it is NaN or infinite in the dtype of the arithmetic, and only then, nothing changes.
    The result does not depend on how a segment is cut into tiles (see `Update`).
    Order: launches on the current stream, never synchronises; allocates temporaries of about 10 x 4 n bytes.
    Raises: ValueError on shapes, dtypes or devices other than these, or step < 1.
    Source: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101; torch.optim.AdamW without amsgrad.
    """
    _check(update)
    settings, dtype = update.settings, math_dtype(update)
    factors = adamw_factors(update.lr, settings.betas, settings.eps, update.weight_decay, update.step)
    exp_avg, exp_avg_sq = (update.planes[name].to(dtype) for name in ("exp_avg", "exp_avg_sq"))
    master, exp_avg, exp_avg_sq = adamw_values(read_master(update), exp_avg, exp_avg_sq, scaled_grad(update), factors)
    write_master(update, master)
    write_state(update, "exp_avg", exp_avg, MOMENTUM_STREAM)
    write_state(update, "exp_avg_sq", exp_avg_sq, SECOND_STREAM)


def adamw_values(
    master: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, factors: AdamWFactors
) -> tuple[Tensor, Tensor, Tensor]:
    """The formula. One rounding per operator; a division by a host scalar is written as a product on purpose."""
    exp_avg = exp_avg + (grad - exp_avg) * factors.one_minus_beta1
    exp_avg_sq = exp_avg_sq * factors.beta2 + (grad * grad) * factors.one_minus_beta2
    # By way of float64: float32 sqrt of torch on the CPU is not correctly rounded (a fifth of its results are off
    # by one unit in the last place); rounding the float64 root is.
    root = exp_avg_sq.to(torch.float64).sqrt().to(exp_avg_sq.dtype)
    denominator = root * factors.inverse_root_correction2 + factors.eps
    return master * factors.decay - (exp_avg / denominator) * factors.step_size, exp_avg, exp_avg_sq


def _check(update: Update) -> None:
    """Raise ValueError unless the tensors form one of the supported modes."""
    planes, grad_scale = update.planes, update.grad_scale
    weight, remainder, grad = planes["weights"], planes.get("remainder"), planes["grad"]
    exp_avg, exp_avg_sq, math_type = planes["exp_avg"], planes["exp_avg_sq"], math_dtype(update)
    if weight.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"AdamW weight must be bfloat16, float32 or float64, got {weight.dtype}")
    if remainder is not None and (weight.dtype != torch.bfloat16 or remainder.dtype != torch.int16):
        raise ValueError(
            f"AdamW remainder must be int16 beside a bfloat16 weight, got {remainder.dtype}, {weight.dtype}"
        )
    if exp_avg.dtype != exp_avg_sq.dtype or exp_avg.dtype not in (math_type, torch.bfloat16):
        raise ValueError(
            f"AdamW states must both be {math_type} or both bfloat16, got {exp_avg.dtype} and {exp_avg_sq.dtype}"
        )
    if weight.dtype == torch.float64 and exp_avg.dtype != torch.float64:
        raise ValueError(f"AdamW states of a float64 weight must be float64, got {exp_avg.dtype}")
    if not grad.dtype.is_floating_point:
        raise ValueError(f"AdamW grad must be a float tensor, got {grad.dtype}")
    if grad_scale.numel() != 1 or grad_scale.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"AdamW grad_scale must be one float32 or float64, got {grad_scale.dtype} {grad_scale.shape}")
    named = {"weight": weight, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "grad": grad}
    if remainder is not None:
        named["remainder"] = remainder
    for name, tensor in named.items():
        if tensor.ndim != 1 or tensor.shape != weight.shape or not tensor.is_contiguous():
            raise ValueError(
                f"AdamW {name} must be contiguous with shape [{weight.numel()}], got shape {list(tensor.shape)} "
                f"with strides {list(tensor.stride())}"
            )
        if tensor.device != weight.device or grad_scale.device != weight.device:
            raise ValueError(
                f"AdamW tensors must share a device: weight on {weight.device}, {name} on {tensor.device}, "
                f"grad_scale on {grad_scale.device}"
            )
