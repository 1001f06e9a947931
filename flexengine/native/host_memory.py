"""Host memory of an exact size, in huge pages, near the GPU, page-locked for its copy engines on request.

csrc/host_arena.cpp maps it; without the library Python's mmap does, more slowly and wherever the kernel puts it, and
exhausted memory is not an error then: the kernel ends a process.
"""

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.native import library
from flexengine.native.page_lock import check_pin_limit, lock_pages, size_text, unlock_pages
from flexengine.native.threads import host_threads

PAGE_BYTES = mmap.PAGESIZE
_PCI_DEVICES = Path("/sys/bus/pci/devices")
_M_MMAP_THRESHOLD = -3  # of <malloc.h>
MAPPED_BLOCK_BYTES = 1 << 18
"""Blocks from here on get a mapping of their own: those of tensors that a step computes on the CPU."""


class _Mapping(NamedTuple):
    pages: Tensor  # uint8 [mapped bytes], every page in RAM and zero; the mapping lives as long as any view of it
    discard: Callable[[], object]  # gives the pages back; they read zero from then on
    numa_node: int | None  # the node they were asked of, where the kernel accepted it


def return_large_blocks() -> None:
    """Have malloc give large blocks back to the kernel as soon as they are freed.

    By default glibc learns to keep blocks of up to 32 MiB in its heap, where those of a step on the CPU leave holes:
    the process then holds several times what its tensors need at one moment. Other C libraries are left as they are.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, MAPPED_BLOCK_BYTES)


class HostBuffer:
    """A private anonymous mapping of `num_bytes` rounded up to whole pages, every page already in RAM and zero.

    `tensor` is a uint8 view [num_bytes], page-aligned. `numa_node` is the node the pages prefer, or None. Use the
    buffer as a context manager, or call `close`. Made by `allocate_host`. Page-locked memory does not exist in a forked
    child, which must not touch `tensor`; releasing the buffer does nothing there. lock_now: else `locking` does it.
    """

    def __init__(self, num_bytes: int, page_locked: bool, numa_node: int | None = None, lock_now: bool = True) -> None:
        self.num_bytes = num_bytes
        self.mapped_bytes = -(-num_bytes // PAGE_BYTES) * PAGE_BYTES
        self.page_locked = page_locked
        self._unlock: weakref.finalize | None = None
        mapping = _map_pages(self.mapped_bytes, page_locked, numa_node)
        self.numa_node = mapping.numa_node
        self._discard: Callable[[], object] | None = in_owner(mapping.discard) if page_locked else mapping.discard
        self._tensor: Tensor | None = mapping.pages[:num_bytes]
        if page_locked and lock_now:
            self._lock(partial(lock_pages, mapping.pages.data_ptr(), self.mapped_bytes))

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
        if self._discard is None:
            return
        if self._unlock is not None:
            self._unlock()
        self._discard()  # the addresses stay while a view is left, and must not dangle
        self._discard = None
        self._tensor = None

    @contextmanager
    def locking(self) -> Iterator[None]:
        """Lock the pages, where that is to be done and was not, beside the body; they are locked when it has ended.

        The driver takes a second for some GiB. Raises: MemoryError as `lock_pages`; the buffer is closed then.
        """
        if not self.page_locked or self._unlock is not None:
            yield
            return
        with ThreadPoolExecutor(1, "page-lock") as beside:
            locked = beside.submit(_lock_on, current_device(), self.tensor.data_ptr(), self.mapped_bytes)
            try:
                yield
            finally:
                self._lock(locked.result)

    def _lock(self, lock: Callable[[], object]) -> None:
        """Lock the pages by a call, or wait until it has."""
        address = self.tensor.data_ptr()
        try:
            lock()
        except MemoryError:
            self.close()  # now, not when the last traceback that mentions this buffer is gone
            raise
        self._unlock = weakref.finalize(self, in_owner(partial(unlock_pages, address)))
        self._unlock.atexit = False  # the driver releases everything when the process ends

    def __enter__(self) -> "HostBuffer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def current_device() -> int | None:
    """The CUDA device that this thread works on; None where CUDA was not begun."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


def _lock_on(device: int | None, address: int, num_bytes: int) -> None:
    """`lock_pages` for a device, on a thread of its own, which torch would have work on the first one."""
    if device is not None:
        torch.cuda.set_device(device)
    lock_pages(address, num_bytes)


def allocate_host(num_bytes: int, page_locked: bool, numa_node: int | None = None, lock_now: bool = True) -> HostBuffer:
    """`num_bytes` of host memory, zeroed, touched by all torch threads, in one piece of any size.

    The process grows by num_bytes rounded up to a page (4 KiB), no more: torch's pinned allocator would round up to a
    power of two. `page_locked` registers the whole range with CUDA in one call, so copies run at full link rate.
    numa_node: the node whose memory is preferred; default the current GPU's for page-locked memory, else none. A
    kernel or container that refuses, and a full node, only cost speed: see `HostBuffer.numa_node`. lock_now: False
    leaves page-locking to `HostBuffer.locking`, beside other work.
    Order: blocks until every page is in RAM (about 45 GB/s with 16 threads) and locked.
    Raises: ValueError if num_bytes < 1 or if page_locked is asked for without CUDA; MemoryError if the operating
    system or the CUDA driver refuses, or if more is to be page-locked than RAM and container have. Without the library,
    or before Linux 5.14, the system refuses address space only: exhausted memory makes it end a process.
    """
    if num_bytes < 1:
        raise ValueError(f"allocate_host: num_bytes is {num_bytes}, expected at least 1")
    if page_locked:
        if not torch.cuda.is_available():
            raise ValueError(
                f"allocate_host: {size_text(num_bytes)} page-locked needs a CUDA device; none is available"
            )
        check_pin_limit(num_bytes)
        numa_node = gpu_numa_node() if numa_node is None else numa_node
    return HostBuffer(num_bytes, page_locked, numa_node, lock_now)


def gpu_numa_node() -> int | None:
    """The NUMA node that the current CUDA device hangs on; None where torch or the kernel cannot tell."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return numa_node_of_pci(device.pci_domain_id, device.pci_bus_id, device.pci_device_id)


def numa_node_of_pci(domain: int, bus: int, device: int, devices: Path = _PCI_DEVICES) -> int | None:
    """The NUMA node of a PCI device, as the kernel lists it under `devices`; None if it lists none.

    Source: Linux ABI/testing/sysfs-bus-pci, numa_node; -1 means that the firmware does not tell.
    """
    try:
        node = int((devices / f"{domain:04x}:{bus:02x}:{device:02x}.0" / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def _map_pages(num_bytes: int, page_locked: bool, numa_node: int | None) -> _Mapping:
    """Map `num_bytes` (whole pages) and bring them into RAM, by native code where there is any."""
    native = library.bind(
        "flex_host_map", ctypes.c_int64, ctypes.c_int, ctypes.c_int, ctypes.c_int,
        ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int),
    )  # fmt: skip
    try:
        if native is not None:
            return _map_natively(native, num_bytes, page_locked, numa_node)
        cost = "it is mapped without regard to NUMA nodes and more slowly, and when memory is exhausted the system may "
        library.fallback_notice("host memory", cost + "end the process instead of refusing the request")
        return _map_by_python(num_bytes, page_locked)
    except (OSError, OverflowError, MemoryError, ctypes.ArgumentError) as error:
        raise MemoryError(
            f"cannot map {size_text(num_bytes)} of host memory: {error}; `ulimit -v` or a smaller host budget may help"
        ) from error


def _map_natively(native: Callable[..., int], num_bytes: int, page_locked: bool, numa_node: int | None) -> _Mapping:
    address, bound = ctypes.c_void_p(), ctypes.c_int()
    node = -1 if numa_node is None else numa_node
    # Forked children must not share locked pages: they would become copy-on-write and move away under the GPU.
    status = native(num_bytes, node, page_locked, host_threads(), ctypes.byref(address), ctypes.byref(bound))
    library.check(status, "host arena")
    unmap = library.bind("flex_host_unmap", ctypes.c_void_p, ctypes.c_int64)
    discard = library.bind("flex_host_discard", ctypes.c_void_p, ctypes.c_int64)
    assert unmap is not None, "csrc/host_arena.cpp exports all three"
    assert discard is not None, "csrc/host_arena.cpp exports all three"
    start = address.value or 0
    release = partial(unmap, start, num_bytes)
    pages = pages_at(start, num_bytes, in_owner(release) if page_locked else release)
    return _Mapping(pages, partial(discard, start, num_bytes), numa_node if bound.value else None)


def pages_at(address: int, num_bytes: int, release: Callable[[], object]) -> Tensor:
    """The pages [num_bytes] there, as uint8; `release` gives the addresses back after the last view."""
    array = (ctypes.c_uint8 * num_bytes).from_address(address)  # which the tensor's storage holds a reference to
    weakref.finalize(array, release).atexit = False
    return torch.frombuffer(array, dtype=torch.uint8)


def _map_by_python(num_bytes: int, page_locked: bool) -> _Mapping:
    """The same by Python's mmap; torch's threads touch the pages."""
    mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    advise(mapping, "MADV_HUGEPAGE")
    if page_locked:
        advise(mapping, "MADV_DONTFORK")
        keep_unforked(mapping)
    # The tensor's storage holds a reference to the mapping, which therefore outlives every view.
    pages = torch.frombuffer(mapping, dtype=torch.uint8)
    # Writing one byte of each page halves the memory traffic of writing all: the kernel hands out zeroed pages.
    pages[::PAGE_BYTES].zero_()
    return _Mapping(pages, partial(mapping.madvise, mmap.MADV_DONTNEED), None)


def in_owner(release: Callable[[], object]) -> Callable[[], None]:
    """`release`, or nothing in a forked child: a page-locked range is a hole there, which its later memory may fill."""
    owner = os.getpid()

    def run() -> None:
        if os.getpid() == owner:
            release()

    return run


_unforked: "weakref.WeakSet[mmap.mmap]" = weakref.WeakSet()


def keep_unforked(mapping: mmap.mmap) -> None:
    """Have a forked child never unmap the addresses of a Python mapping that it does not see."""
    _unforked.add(mapping)


def _hold_unforked() -> None:
    """In a forked child: the same for Python's mappings, which end with their objects: these get a reference more."""
    for mapping in _unforked:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


os.register_at_fork(after_in_child=_hold_unforked)


def advise(mapping: mmap.mmap, advice: str) -> None:
    """madvise, where platform and kernel know the advice; memory is the same without it."""
    if not hasattr(mmap, advice):
        return
    try:
        mapping.madvise(getattr(mmap, advice))
    except OSError:  # a kernel built without it
        return
