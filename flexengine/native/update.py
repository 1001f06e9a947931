"""One step of an optimizer rule on tensors in host memory by all cores; the CPU twin of the kernels of these rules.

Formulas and random bits are those of `flexengine.optim`, whose functions call these where `supports` allows it.
"""

import ctypes
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flexengine.native import library
from flexengine.native.adamw import _INSTRUCTION_SETS, InstructionSet, _Call, _check_tensor, _master

RuleName = Literal["adamw", "lion", "sgd"]
_RULES: tuple[RuleName, ...] = ("adamw", "lion", "sgd")  # as numbered in csrc/adamw.h
_FLOATS = (torch.float32, torch.bfloat16)
_STATES = {torch.float32: 0, torch.bfloat16: 1, torch.uint8: 2}
_BLOCK = 256  # kBlock of csrc/adamw.h
_STEPS = 2946  # kLastBucket - kLeastBucket + 1 of csrc/adamw_formula.h


class Tables(NamedTuple):
    """A codebook: values [256] float32 and steps [2946] int32, as in `optim/blockwise.py`."""

    values: Tensor
    steps: Tensor


class Blocks(NamedTuple):
    """What 8-bit states have beside their codes: scales [blocks] float32 and codebooks of both moments."""

    exp_avg_scales: Tensor
    exp_avg_sq_scales: Tensor
    signed_book: Tables
    unsigned_book: Tables


class HostUpdate(NamedTuple):
    """The tensors and numbers of a step.

    Shapes: weight [n] float32, or bf16 with remainder [n] int16, or bf16 alone; grad [n] bf16 or float32; states [n] of
    one dtype: the momentum, or AdamW's two moments, float32, bf16, or with `blocks` uint8 codes; all contiguous, on the
    CPU. grad_scale [1]; if it is not finite, nothing is written. factors: the seven of `AdamWFactors`. keys: two
    unsigned 32-bit numbers for each stream of random bits. element_offset: counter of element 0.
    """

    weight: Tensor
    remainder: Tensor | None
    states: tuple[Tensor, ...]
    grad: Tensor
    grad_scale: Tensor
    factors: Sequence[float]
    keys: Sequence[tuple[int, int]]
    element_offset: int
    blocks: Blocks | None = None


class Targets(NamedTuple):
    """Where new values go instead of where old ones are: tensors of their shapes and dtypes."""

    weight: Tensor
    remainder: Tensor | None
    states: tuple[Tensor, ...]


class _Codebook(ctypes.Structure):
    """`FlexCodebook` of csrc/adamw.h."""

    _fields_ = (("values", ctypes.c_void_p), ("steps", ctypes.c_void_p))


class _Update(ctypes.Structure):
    """`FlexUpdate` of csrc/adamw.h, field by field."""

    _fields_ = (
        ("adamw", _Call),
        ("rule", ctypes.c_int32),
        ("exp_avg_scales", ctypes.c_void_p),
        ("exp_avg_sq_scales", ctypes.c_void_p),
        ("signed_book", _Codebook),
        ("unsigned_book", _Codebook),
    )


class _Targets(ctypes.Structure):
    """`FlexTargets` of csrc/adamw.h, field by field."""

    _fields_ = tuple((name, ctypes.c_void_p) for name in ("weight", "remainder", "exp_avg", "exp_avg_sq"))


def supports(weight: Tensor, grad: Tensor) -> bool:
    """Whether the native path has this mode: CPU tensors, float32 or bf16, and a library to call."""
    return weight.device.type == "cpu" and {weight.dtype, grad.dtype} <= set(_FLOATS) and _function() is not None


def _function() -> Callable[..., int] | None:
    return library.bind("flex_update", ctypes.POINTER(_Update), ctypes.c_int, ctypes.c_int)


def _function_into() -> Callable[..., int] | None:
    targets = ctypes.POINTER(_Targets)
    return library.bind("flex_update_into", ctypes.POINTER(_Update), targets, ctypes.c_int, ctypes.c_int)


def supports_into(update: HostUpdate) -> bool:
    """Whether `update_into` has this mode: as `supports`, without states in blocks."""
    able = supports(update.weight, update.grad) and {s.dtype for s in update.states} <= set(_FLOATS)
    return able and _function_into() is not None


def update_(
    rule: RuleName, update: HostUpdate, num_threads: int | None = None, instruction_set: InstructionSet = "best"
) -> None:
    """One step in place.

    num_threads: default torch.get_num_threads(). instruction_set: for tests; all of them, and any number of threads,
    give the bits of the torch reference, except that every NaN is stored as the quiet one, 0x7fc00000.
    Cost: each plane is read once and all but grad written once.
    Order: has finished when it returns; other Python threads run meanwhile.
    Raises: ValueError on other shapes, dtypes or devices; RuntimeError without the library (ask `supports` first).
    """
    _check(rule, update)
    call = _function()
    if call is None:
        raise RuntimeError("update_: the native library is not available; ask supports() first")
    arguments = _arguments(rule, update)
    threads = torch.get_num_threads() if num_threads is None else num_threads
    library.check(call(arguments, threads, _INSTRUCTION_SETS.index(instruction_set)), f"native {rule}")


def update_into(
    rule: RuleName,
    update: HostUpdate,
    targets: Targets,
    num_threads: int | None = None,
    instruction_set: InstructionSet = "best",
) -> None:
    """The same bits into other tensors, which share no memory with those that are read; these stay as they are.

    Where grad_scale is not finite nothing is written.
    Cost: each plane is read once and all targets written once, past the caches.
    Order and errors: as of `update_`; ask `supports_into` first.
    """
    _check(rule, update)
    _check(rule, update._replace(weight=targets.weight, remainder=targets.remainder, states=targets.states))
    if (targets.weight.dtype, targets.states[0].dtype) != (update.weight.dtype, update.states[0].dtype) or (
        targets.remainder is None) != (update.remainder is None):  # fmt: skip
        raise ValueError(f"native {rule}: targets must have the dtypes of what is read")
    call = _function_into()
    if call is None or update.blocks is not None:
        raise RuntimeError("update_into: the native library has no such function; ask supports_into() first")
    first, *second = targets.states
    places = _Targets(
        weight=targets.weight.data_ptr(),
        remainder=None if targets.remainder is None else targets.remainder.data_ptr(),
        exp_avg=first.data_ptr(),
        exp_avg_sq=second[0].data_ptr() if second else None,
    )
    threads = torch.get_num_threads() if num_threads is None else num_threads
    status = call(_arguments(rule, update), places, threads, _INSTRUCTION_SETS.index(instruction_set))
    library.check(status, f"native {rule} into other tensors")


def _arguments(rule: RuleName, update: HostUpdate) -> _Update:
    first, *second = update.states
    adamw = _Call(
        weight=update.weight.data_ptr(),
        remainder=None if update.remainder is None else update.remainder.data_ptr(),
        exp_avg=first.data_ptr(),
        exp_avg_sq=second[0].data_ptr() if second else None,
        grad=update.grad.data_ptr(),
        num_elements=update.weight.numel(),
        element_offset=update.element_offset,
        master=_master(update.weight, update.remainder),
        bf16_states=_STATES[first.dtype],
        bf16_grad=update.grad.dtype == torch.bfloat16,
        grad_scale=float(update.grad_scale.to(torch.float32)),
        factors=tuple(update.factors),
        keys=tuple(key for pair in update.keys for key in pair),
    )
    arguments = _Update(adamw=adamw, rule=_RULES.index(rule))
    if update.blocks is not None:
        arguments.exp_avg_scales = update.blocks.exp_avg_scales.data_ptr()
        arguments.exp_avg_sq_scales = update.blocks.exp_avg_sq_scales.data_ptr()
        arguments.signed_book = _book(update.blocks.signed_book)
        arguments.unsigned_book = _book(update.blocks.unsigned_book)
    return arguments


def _book(tables: Tables) -> _Codebook:
    return _Codebook(*(table.data_ptr() for table in tables))


def _check(rule: RuleName, update: HostUpdate) -> None:
    """Raise ValueError unless every pointer that C will follow leads to as many elements of the type it expects."""
    weight, shape = update.weight, update.weight.shape
    if len(shape) != 1:
        raise ValueError(f"native {rule}: weight must have shape [n], got {list(shape)}")
    _check_tensor("weight", weight, shape, _FLOATS if update.remainder is None else (torch.bfloat16,))
    if update.remainder is not None:
        _check_tensor("remainder", update.remainder, shape, (torch.int16,))
    _check_tensor("grad", update.grad, shape, _FLOATS)
    if len(update.states) != (2 if rule == "adamw" else 1):
        raise ValueError(f"native {rule}: {len(update.states)} states were given")
    dtypes = _FLOATS if update.blocks is None else (torch.uint8,)
    for number, state in enumerate(update.states):
        _check_tensor(f"state {number}", state, shape, dtypes if number == 0 else (update.states[0].dtype,))
    if update.grad_scale.numel() != 1:
        raise ValueError(f"native {rule}: grad_scale must be one number, got shape {list(update.grad_scale.shape)}")
    if update.blocks is not None:
        _check_blocks(update.blocks, torch.Size([-(-len(weight) // _BLOCK)]))


def _check_blocks(blocks: Blocks, shape: torch.Size) -> None:
    _check_tensor("exp_avg_scales", blocks.exp_avg_scales, shape, (torch.float32,))
    _check_tensor("exp_avg_sq_scales", blocks.exp_avg_sq_scales, shape, (torch.float32,))
    for values, steps in (blocks.signed_book, blocks.unsigned_book):
        _check_tensor("values", values, torch.Size([256]), (torch.float32,))
        _check_tensor("steps", steps, torch.Size([_STEPS]), (torch.int32,))
