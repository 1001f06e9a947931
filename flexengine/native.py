"""The one typed door to native code, with a plain torch or operating-system path beside each function.

Now: host memory of an exact size, in huge pages, page-locked for the GPU's copy engines on request.
"""

import mmap
import weakref
from typing import Any

import torch
from torch import Tensor

GIB = 2**30
PAGE_BYTES = mmap.PAGESIZE
CUDA_HOST_REGISTER_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device of the process


class HostBuffer:
    """A private anonymous mapping of `num_bytes` rounded up to whole pages, every page already in RAM and zero.

    `tensor` is a uint8 view [num_bytes], page-aligned. Use the buffer as a context manager, or call `close`.
    Made by `allocate_host`.
    """

    def __init__(self, num_bytes: int, page_locked: bool) -> None:
        self.num_bytes = num_bytes
        self.mapped_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        self.page_locked = page_locked
        self._mapping: mmap.mmap | None = _map_pages(self.mapped_bytes, page_locked)
        # The tensor's storage holds a reference to the mapping, which therefore outlives every view.
        pages = torch.frombuffer(self._mapping, dtype=torch.uint8, count=self.mapped_bytes)
        self._tensor: Tensor | None = pages[:num_bytes]
        self._unlock: weakref.finalize | None = None
        _touch_pages(pages)
        if page_locked:
            self._lock(pages.data_ptr())

    @property
    def tensor(self) -> Tensor:
        """The bytes, uint8 [num_bytes]. Raises: ValueError after `close`."""
        if self._tensor is None:
            raise ValueError("this host buffer is closed")
        return self._tensor

    def close(self) -> None:
        """Unlock the pages and give them back to the operating system; a second call does nothing.

        Order: every copy from or to the buffer must have finished. A view that is still held reads zeros from now on.
        """
        if self._mapping is None:
            return
        if self._unlock is not None:
            self._unlock()
        self._mapping.madvise(mmap.MADV_DONTNEED)  # not mmap.close: a view may be left, and must not dangle
        self._mapping = None
        self._tensor = None

    def _lock(self, address: int) -> None:
        try:
            _lock_pages(address, self.mapped_bytes)
        except MemoryError:
            self.close()  # now, not when the last traceback that mentions this buffer is gone
            raise
        self._unlock = weakref.finalize(self, _unlock_pages, address)
        self._unlock.atexit = False  # the driver releases everything when the process ends

    def __enter__(self) -> "HostBuffer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def allocate_host(num_bytes: int, page_locked: bool) -> HostBuffer:
    """`num_bytes` of host memory, zeroed, touched by all torch threads, in one piece of any size.

    The process grows by num_bytes rounded up to a page (4 KiB), no more: torch's pinned allocator would round up to a
    power of two. `page_locked` registers the whole range with CUDA in one call, so copies run at full link rate.
    Order: blocks until every page is in RAM (about 45 GB/s with 16 threads) and locked.
    Raises: ValueError if num_bytes < 1 or if page_locked is asked for without CUDA; MemoryError if the operating
    system or the CUDA driver refuses.
    """
    if num_bytes < 1:
        raise ValueError(f"allocate_host: num_bytes is {num_bytes}, expected at least 1")
    if page_locked and not torch.cuda.is_available():
        raise ValueError(f"allocate_host: {_size(num_bytes)} page-locked needs a CUDA device; none is available")
    return HostBuffer(num_bytes, page_locked)


def _map_pages(num_bytes: int, page_locked: bool) -> mmap.mmap:
    """Reserve addresses for `num_bytes`, backed by huge pages where the kernel has them."""
    try:
        mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(
            f"cannot map {_size(num_bytes)} of host memory: {error}; `ulimit -v` or a smaller host budget may help"
        ) from error
    _advise(mapping, "MADV_HUGEPAGE")
    if page_locked:
        _advise(mapping, "MADV_DONTFORK")  # a fork would mark the pages copy-on-write and move them under the GPU
    return mapping


def _advise(mapping: mmap.mmap, advice: str) -> None:
    """madvise, where platform and kernel know the advice; memory is the same without it."""
    if not hasattr(mmap, advice):
        return
    try:
        mapping.madvise(getattr(mmap, advice))
    except OSError:  # a kernel built without it
        return


def _touch_pages(pages: Tensor) -> None:
    """Bring every page into RAM by writing one byte of each, split over torch's threads. `pages` is uint8 [bytes].

    The kernel hands out zeroed pages; writing one byte instead of all halves the memory traffic.
    """
    pages[::PAGE_BYTES].zero_()


def _lock_pages(address: int, num_bytes: int) -> None:
    """Register a range with CUDA, so that the GPU copies from and to it directly."""
    cudart: Any = torch.cuda.cudart()  # functions of the CUDA runtime, untyped
    status = cudart.cudaHostRegister(address, num_bytes, CUDA_HOST_REGISTER_PORTABLE)
    if int(status) != 0:
        _forget_cuda_error()
        raise MemoryError(
            f"CUDA cannot page-lock {_size(num_bytes)} of host memory: {cudart.cudaGetErrorString(status)} "
            f"(error {int(status)}); raise the limit shown by `ulimit -l`, the container's memory limit, "
            f"or lower the host budget"
        )


def _unlock_pages(address: int) -> None:
    """Undo `_lock_pages`. Runs once per buffer, from close or when the buffer is collected; never raises."""
    cudart: Any = torch.cuda.cudart()
    status = cudart.cudaHostUnregister(address)
    if int(status) != 0:
        _forget_cuda_error()


def _forget_cuda_error() -> None:
    """CUDA repeats the last failure at the next kernel launch, whoever makes it: make one and let it fail here."""
    try:
        torch.empty(1, device="cuda").fill_(0)
    except RuntimeError:
        return


def _size(num_bytes: int) -> str:
    return f"{num_bytes} bytes ({num_bytes / GIB:.2f} GiB)"
