"""Byte ranges of files into memory the caller owns, by many threads, converted on the way where the formats differ.

csrc/reader.cpp does it; without the library, and for conversion to float16, os.preadv and torch do, with one thread.
Nothing is mapped, and no more memory is taken than one conversion buffer per thread.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.native import library

NUMBERS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""Formats that convert to each other."""
MAX_THREADS, MIN_THREADS = 16, 4  # a page cache is drained by few; a disk wants several requests at once
MAX_BLOCK_BYTES, MIN_BLOCK_BYTES = 8 << 20, 256 << 10  # where a read's fixed cost no longer matters
BLOCKS_PER_THREAD = 4  # enough for threads to end at about the same time
CALL_BYTES = 2 << 30  # read in one native call: between calls Python sees an interrupt
FALLBACK_BUFFER_BYTES = 16 << 20

_TYPES = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3, torch.float64: 4}  # `Type` of csrc/convert.h
_RAW = 0
_NATIVE_TARGETS = frozenset({torch.bfloat16, torch.float32, torch.float64})


class ReadJob(NamedTuple):
    """`target.numel()` elements that lie in a file as `dtype` from byte `offset_bytes` on.

    target: contiguous, on the CPU; of another dtype only if both are in NUMBERS (rounded to nearest even, by way of
    float32 when the target is bf16, as torch does; a NaN becomes some NaN). remainder: int16 of the target's size and
    layout, only with a bf16 target: the two are then split from the float32 value as `optim.rounding.split_fp32` says,
    bf16 being copied as it is.
    """

    descriptor: int
    offset_bytes: int
    dtype: torch.dtype
    target: Tensor
    remainder: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self.target.numel() * self.dtype.itemsize


class ReadFailureError(OSError):
    """Job number `job` failed at byte `offset_bytes` of its file: errno says why, 0 means that the file ended there."""

    def __init__(self, job: int, offset_bytes: int, error_number: int) -> None:
        why = "the file ends there" if error_number == 0 else os.strerror(error_number)
        super().__init__(error_number, f"job {job} at byte {offset_bytes}: {why}")
        self.job, self.offset_bytes = job, offset_bytes


def read_jobs(jobs: Sequence[ReadJob], num_threads: int | None = None) -> None:
    """Carry out all jobs; what a failed call leaves in the targets is undefined.

    num_threads: default as many as there are cores, between 4 and 16. Threads share out blocks of all jobs, so many
    small ones are read as fast as one large. Cost: page cache to memory at the rate of a plain parallel read; 256 KiB
    per thread. Order: blocks, other Python threads run meanwhile.
    Raises: ReadFailureError; ValueError for tensors that cannot be targets, or dtypes without conversion.
    """
    for job in jobs:
        _check(job)
    native = library.bind(
        "flex_read", ctypes.POINTER(_Job), ctypes.c_uint64, ctypes.c_int32, ctypes.c_uint64, ctypes.POINTER(_Failure)
    )
    for first, group in _groups(jobs, CALL_BYTES):
        if native is not None and _is_native(group[0]):  # and so are the others of the group
            _read_natively(native, first, group, num_threads or default_threads())
        else:
            what = "reading files" if native is None else "conversion to float16"
            library.fallback_notice(what, "one thread reads, and conversion by torch waits for it")
            _read_by_torch(first, group)


def default_threads() -> int:
    """Threads of a read that does not say."""
    return max(MIN_THREADS, min(MAX_THREADS, len(os.sched_getaffinity(0))))


def _check(job: ReadJob) -> None:
    target, remainder = job.target, job.remainder
    if job.dtype != target.dtype and not {job.dtype, target.dtype} <= NUMBERS:
        raise ValueError(f"no conversion from {job.dtype} to {target.dtype}; only floats of 16 to 64 bits convert")
    for tensor in (target, remainder):
        if tensor is not None and (tensor.device.type != "cpu" or not tensor.is_contiguous()):
            raise ValueError(
                f"a read needs contiguous memory on the CPU, got strides {tensor.stride()} on {tensor.device}"
            )
    if remainder is not None:
        wanted = (torch.bfloat16, torch.int16, target.numel())
        if (target.dtype, remainder.dtype, remainder.numel()) != wanted:
            raise ValueError(
                f"a remainder is int16 [{target.numel()}] and goes with a bfloat16 target, got {remainder.dtype} "
                f"[{remainder.numel()}] with {target.dtype}"
            )


def _groups(jobs: Sequence[ReadJob], limit_bytes: int) -> Iterator[tuple[int, Sequence[ReadJob]]]:
    """(index of the first, jobs) of runs of at most limit_bytes (or one job) that are all native or all not."""
    first, group_bytes = 0, 0
    for index, job in enumerate(jobs):
        full = group_bytes + job.num_bytes > limit_bytes or _is_native(job) != _is_native(jobs[first])
        if full and index > first:
            yield first, jobs[first:index]
            first, group_bytes = index, 0
        group_bytes += job.num_bytes
    if first < len(jobs):
        yield first, jobs[first:]


# -- native ------------------------------------------------------------------------------------------------------------


class _Job(ctypes.Structure):
    """`ReadJob` of csrc/reader.cpp."""

    _fields_ = (
        ("offset_bytes", ctypes.c_uint64),
        ("count", ctypes.c_uint64),
        ("target", ctypes.c_void_p),
        ("remainder", ctypes.c_void_p),
        ("descriptor", ctypes.c_int32),
        ("source_type", ctypes.c_uint32),
        ("target_type", ctypes.c_uint32),
        ("unused", ctypes.c_uint32),
    )


class _Failure(ctypes.Structure):
    """`ReadFailureError` of csrc/reader.cpp."""

    _fields_ = (("job", ctypes.c_uint64), ("offset_bytes", ctypes.c_uint64), ("error_number", ctypes.c_int32))


def _is_native(job: ReadJob) -> bool:
    return job.dtype == job.target.dtype or job.target.dtype in _NATIVE_TARGETS


def _read_natively(read: Callable[..., int], first: int, jobs: Sequence[ReadJob], num_threads: int) -> None:
    rows = (_Job * len(jobs))(*[_row(job) for job in jobs])
    share = sum(job.num_bytes for job in jobs) // (BLOCKS_PER_THREAD * num_threads)
    failure = _Failure()
    failure.job = len(jobs)
    block_bytes = max(MIN_BLOCK_BYTES, min(MAX_BLOCK_BYTES, share))
    status = read(rows, len(jobs), num_threads, block_bytes, ctypes.byref(failure))
    if status != 0 and failure.job < len(jobs):
        raise ReadFailureError(first + failure.job, failure.offset_bytes, failure.error_number)
    library.check(status, "native reader")


def _row(job: ReadJob) -> tuple[int | None, ...]:
    target, remainder = job.target, job.remainder
    address = None if remainder is None else remainder.data_ptr()
    if job.dtype == target.dtype and remainder is None:
        return (job.offset_bytes, job.num_bytes, target.data_ptr(), None, job.descriptor, _RAW, _RAW, 0)
    types = (_TYPES[job.dtype], _TYPES[target.dtype])
    return (job.offset_bytes, target.numel(), target.data_ptr(), address, job.descriptor, *types, 0)


# -- in torch ----------------------------------------------------------------------------------------------------------


def _read_by_torch(first: int, jobs: Sequence[ReadJob]) -> None:
    for index, job in enumerate(jobs, first):
        target = job.target.detach().view(-1)
        remainder = None if job.remainder is None else job.remainder.view(-1)
        if job.dtype == target.dtype:
            _preadv(index, job.descriptor, job.offset_bytes, target)
            if remainder is not None:
                remainder.zero_()
            continue
        buffer = torch.empty(min(target.numel(), FALLBACK_BUFFER_BYTES // job.dtype.itemsize), dtype=job.dtype)
        for start in range(0, target.numel(), buffer.numel() or 1):
            piece = buffer[: target.numel() - start]
            _preadv(index, job.descriptor, job.offset_bytes + start * job.dtype.itemsize, piece)
            part = slice(start, start + piece.numel())
            if remainder is None:
                target[part].copy_(piece)
            else:
                _split(piece.float(), target[part], remainder[part])


def _preadv(job: int, descriptor: int, offset_bytes: int, target: Tensor) -> None:
    """Fill flat `target` with a file's bytes; a read may return part of what was asked for."""
    memory = target.view(torch.uint8).numpy().data
    while memory.nbytes:
        try:
            count = os.preadv(descriptor, [memory], offset_bytes)
        except OSError as error:
            raise ReadFailureError(job, offset_bytes, error.errno or -1) from error
        if count == 0:
            raise ReadFailureError(job, offset_bytes, 0)
        memory, offset_bytes = memory[count:], offset_bytes + count


def _split(value_f32: Tensor, weight_bf16: Tensor, remainder_int16: Tensor) -> None:
    """`optim.rounding.split_fp32`, which this room cannot see."""
    bits = torch.where(value_f32.isnan(), 0x7FC0_0000, value_f32.view(torch.int32))
    weight_bf16.copy_(((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16))
    remainder_int16.copy_(((bits & 0xFFFF) ^ 0x8000) - 0x8000)
