"""What Lion and SGD share: rules with one state, the momentum, and a formula of one rounding per operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from flexengine.native import update as native
from flexengine.native.library import fallback_notice
from flexengine.optim.adamw import AdamWFactors
from flexengine.optim.rule import NativeCall, Update
from flexengine.optim.stored import (
    MOMENTUM_STREAM,
    WEIGHT_STREAM,
    math_dtype,
    pieces,
    read_master,
    scaled_grad,
    write_master,
    write_state,
)
from flexengine.random_bits import stream_keys

Formula = Callable[[Tensor, Tensor, Tensor, AdamWFactors], tuple[Tensor, Tensor]]
"""(master, momentum, scaled gradient, factors) -> new master and new momentum."""
STATE = "momentum"
_TILE_ELEMENTS = 1 << 18  # bounds the temporaries of a plain update to 10 MB


def momentum_update(kernel: Literal["lion", "sgd"], update: Update, factors: AdamWFactors, formula: Formula) -> None:
    """One step in place: the Triton kernel on CUDA tensors, the native one on CPU tensors, plain torch elsewhere.

    Planes: weights float32, float64 or bf16 (with remainder int16, or alone: rounded at random), momentum in the dtype
    of the arithmetic or bf16, grad in any float dtype. All paths give the same bits (which NaN a NaN is may differ).
    """
    planes = update.planes
    weight, momentum, grad = planes["weights"], planes[STATE], planes["grad"]
    on_gpu = weight.is_cuda and weight.dtype != torch.float64
    if on_gpu or native.supports(weight, grad):
        call = native_call(kernel, update, factors).update
        if on_gpu:
            from flexengine.kernels.momentum import Planes, momentum_update_  # noqa: PLC0415  imports Triton

            tensors = Planes(weight, call.remainder, momentum, grad)
            momentum_update_(kernel, tensors, call.grad_scale, factors, call.keys, call.element_offset)
        else:
            native.update_(kernel, call)
        return
    if weight.dtype != torch.float64:
        fallback_notice("updates on the CPU", "they are computed in plain torch, which takes 10 to 40 times as long")
    for piece in pieces(update, _TILE_ELEMENTS):
        momentum_update_reference(piece, factors, formula)


def native_call(kernel: Literal["lion", "sgd"], update: Update, factors: AdamWFactors) -> NativeCall:
    """The arguments of the native update."""
    planes = update.planes
    keys = [stream_keys(update.seed, update.step, stream) for stream in (WEIGHT_STREAM, MOMENTUM_STREAM, 2)]
    tensors = planes["weights"], planes.get("remainder"), (planes[STATE],), planes["grad"]
    return NativeCall(kernel, native.HostUpdate(*tensors, update.grad_scale, factors, keys, update.element_offset))


def momentum_update_reference(update: Update, factors: AdamWFactors, formula: Formula) -> None:
    """One step in place, in plain torch."""
    momentum = update.planes[STATE].to(math_dtype(update))
    master, momentum = formula(read_master(update), momentum, scaled_grad(update), factors)
    write_master(update, master)
    write_state(update, STATE, momentum, MOMENTUM_STREAM)


def check_settings(name: str, lr: float, weight_decay: float, **betas: float) -> None:
    """Raise ValueError when a setting lies outside its range."""
    if not 0.0 <= lr < float("inf"):
        raise ValueError(f"{name} lr must be finite and at least 0, got {lr}")
    if not 0.0 <= weight_decay < float("inf"):
        raise ValueError(f"{name} weight_decay must be finite and at least 0, got {weight_decay}")
    for key, value in betas.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} {key} must be in [0, 1), got {value}")
