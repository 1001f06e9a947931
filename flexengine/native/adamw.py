"""What updates on the CPU have in common: instruction sets, threads, and the call that C reads field by field."""

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


def instruction_sets() -> tuple[InstructionSet, ...]:
    """The paths this processor can run, narrowest first; empty without the library."""
    best = library.bind("flex_adamw_instruction_set")
    return () if best is None else _INSTRUCTION_SETS[1 : best() + 1]


def update_threads() -> int:
    """Threads of an update beside a running step: all but one, which is left to the issue of commands."""
    return max(1, host_threads() - 1)


def _master(weight: Tensor, remainder: Tensor | None) -> int:
    if remainder is not None:
        return _MASTER_SPLIT
    return _MASTER_FLOAT32 if weight.dtype == torch.float32 else _MASTER_BF16


def _check_tensor(name: str, tensor: Tensor, shape: torch.Size, dtypes: Sequence[torch.dtype]) -> None:
    if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous() or tensor.device.type != "cpu":
        expected = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(
            f"native AdamW: {name} must be contiguous {expected} {list(shape)} on the CPU, got {tensor.dtype} "
            f"{list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
        )
