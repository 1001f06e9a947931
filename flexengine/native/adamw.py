"""One AdamW step on tensors in host memory by all cores; the CPU twin of `kernels/adamw.py`.

Formula and random bits are those of `flexengine.optim.adamw`, which is also the torch path: it calls this function
where `supports` allows it, and computes the same in plain torch elsewhere.
"""

import ctypes
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from flexengine.native import library
from flexengine.native.threads import host_threads

InstructionSet = Literal["best", "scalar", "avx2", "avx512"]
_INSTRUCTION_SETS: tuple[InstructionSet, ...] = ("best", "scalar", "avx2", "avx512")  # as numbered in csrc/adamw.h
_MASTER_FLOAT32, _MASTER_SPLIT, _MASTER_BF16 = 0, 1, 2
_HALF_OR_FULL = (torch.float32, torch.bfloat16)
_NUM_FACTORS, _NUM_STREAMS = 7, 3


class _Call(ctypes.Structure):
    """`FlexAdamW` of csrc/adamw.h, field by field."""

    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("remainder", ctypes.c_void_p),
        ("exp_avg", ctypes.c_void_p),
        ("exp_avg_sq", ctypes.c_void_p),
        ("grad", ctypes.c_void_p),
        ("num_elements", ctypes.c_int64),
        ("element_offset", ctypes.c_uint64),
        ("master", ctypes.c_int32),
        ("bf16_states", ctypes.c_int32),
        ("bf16_grad", ctypes.c_int32),
        ("grad_scale", ctypes.c_float),
        ("factors", ctypes.c_float * _NUM_FACTORS),
        ("keys", ctypes.c_uint32 * (2 * _NUM_STREAMS)),
    )


def supports(weight: Tensor, exp_avg: Tensor, grad: Tensor) -> bool:
    """Whether the native path has this mode: CPU tensors, float32 or bf16 throughout, and a library to call."""
    dtypes = {weight.dtype, exp_avg.dtype, grad.dtype}
    return weight.device.type == "cpu" and dtypes <= set(_HALF_OR_FULL) and library.load() is not None


def instruction_sets() -> tuple[InstructionSet, ...]:
    """The paths this processor can run, narrowest first; empty without the library."""
    best = library.bind("flex_adamw_instruction_set")
    return () if best is None else _INSTRUCTION_SETS[1 : best() + 1]


def update_threads() -> int:
    """Threads of an update beside a running step: all but one, which is left to the issue of commands."""
    return max(1, host_threads() - 1)


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
    num_threads: int | None = None,
    instruction_set: InstructionSet = "best",
) -> None:
    """One step in place; `flexengine.optim.adamw.adamw_update` is the function to call.

    Shapes: weight [n] float32, or bf16 with remainder [n] int16, or bf16 alone; exp_avg and exp_avg_sq [n] both float32
    or both bf16; grad [n] bf16 or float32; all contiguous, on the CPU. grad_scale [1] float32 or float64; if it is not
    finite, nothing is written.
    factors: the seven of `AdamWFactors`, in that order. keys: two unsigned 32-bit numbers for each stream of random
    bits (weight, exp_avg, exp_avg_sq). element_offset: counter of element 0.
    num_threads: default torch.get_num_threads(). instruction_set: for tests; all of them, and any number of threads,
    give the bits of the torch reference, except that every NaN is stored as the quiet one, 0x7fc00000.
    Cost: each plane is read once and all but grad written once; bound by host memory from a few cores on.
    Order: has finished when it returns; other Python threads run meanwhile.
    Raises: ValueError on other shapes, dtypes or devices, or an instruction set that the processor lacks; RuntimeError
    without the library (ask `supports` first).
    """
    _check(weight, remainder, exp_avg, exp_avg_sq, grad, grad_scale)
    update = library.bind("flex_adamw", ctypes.POINTER(_Call), ctypes.c_int, ctypes.c_int)
    if update is None:
        raise RuntimeError("adamw_update_: the native library is not available; ask supports() first")
    call = _Call(
        weight=weight.data_ptr(),
        remainder=None if remainder is None else remainder.data_ptr(),
        exp_avg=exp_avg.data_ptr(),
        exp_avg_sq=exp_avg_sq.data_ptr(),
        grad=grad.data_ptr(),
        num_elements=weight.numel(),
        element_offset=element_offset,
        master=_master(weight, remainder),
        bf16_states=exp_avg.dtype == torch.bfloat16,
        bf16_grad=grad.dtype == torch.bfloat16,
        grad_scale=float(grad_scale.to(torch.float32)),
        factors=tuple(factors),
        keys=tuple(key for pair in keys for key in pair),
    )
    threads = torch.get_num_threads() if num_threads is None else num_threads
    library.check(update(call, threads, _INSTRUCTION_SETS.index(instruction_set)), "native AdamW")


def _master(weight: Tensor, remainder: Tensor | None) -> int:
    if remainder is not None:
        return _MASTER_SPLIT
    return _MASTER_FLOAT32 if weight.dtype == torch.float32 else _MASTER_BF16


def _check(
    weight: Tensor, remainder: Tensor | None, exp_avg: Tensor, exp_avg_sq: Tensor, grad: Tensor, grad_scale: Tensor
) -> None:
    """Raise ValueError unless every pointer that C will follow leads to as many elements of the type it expects."""
    shape = weight.shape
    if len(shape) != 1:
        raise ValueError(f"native AdamW: weight must have shape [n], got {list(shape)}")
    _check_tensor("weight", weight, shape, _HALF_OR_FULL)
    _check_tensor("exp_avg", exp_avg, shape, _HALF_OR_FULL)
    _check_tensor("exp_avg_sq", exp_avg_sq, shape, (exp_avg.dtype,))
    _check_tensor("grad", grad, shape, _HALF_OR_FULL)
    if remainder is not None:
        _check_tensor("remainder", remainder, shape, (torch.int16,))
        _check_tensor("weight", weight, shape, (torch.bfloat16,))
    if grad_scale.numel() != 1:
        raise ValueError(f"native AdamW: grad_scale must be one number, got shape {list(grad_scale.shape)}")


def _check_tensor(name: str, tensor: Tensor, shape: torch.Size, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous() or tensor.device.type != "cpu":
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"native AdamW: {name} must be contiguous {expected} {list(shape)} on the CPU, got {tensor.dtype} "
            f"{list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
        )
