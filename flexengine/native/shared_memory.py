"""A file of memory mapped by several processes: in huge pages, over several NUMA nodes, each bringing in its share.

csrc/host_arena.cpp maps it; without the library Python's mmap does, in pages and places of the kernel's choice.
"""

import ctypes
import mmap
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from flexengine.native import library
from flexengine.native.host_memory import PAGE_BYTES, advise, in_owner, keep_unforked, pages_at
from flexengine.native.page_lock import size_text
from flexengine.native.threads import host_threads


class SharedMapping(NamedTuple):
    """pages: uint8 [mapped bytes]. detach: lets go of the file; a view that is still held reads zeros, or what was."""

    pages: Tensor
    detach: Callable[[], object]


def map_shared(
    fd: int, num_bytes: int, share: range, numa_nodes: Sequence[int] = (), num_threads: int | None = None
) -> SharedMapping:
    """Map the first `num_bytes` (whole pages) of a file of memory, and bring the bytes of `share` into RAM.

    Nobody may have written to the share yet. numa_nodes: pages are interleaved over these, where the kernel lets.
    num_threads: that bring pages in; default `host_threads()`. The file may be closed afterwards. A forked child must
    not touch the pages.
    Raises: MemoryError if the operating system refuses.
    """
    native = library.bind(
        "flex_host_map_shared", ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_int64,
        ctypes.POINTER(ctypes.c_int), ctypes.c_int, ctypes.c_int,
        ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_int),
    )  # fmt: skip
    try:
        if native is not None:
            threads = host_threads() if num_threads is None else num_threads
            return _map_natively(partial(native, fd), num_bytes, share, numa_nodes, threads)
        library.fallback_notice("shared host memory", "it may be in small pages, and wherever the kernel puts them")
        return _map_by_python(fd, num_bytes, share)
    except (OSError, OverflowError, MemoryError, ctypes.ArgumentError) as error:
        raise MemoryError(
            f"cannot map {size_text(num_bytes)} of shared host memory: {error}; a smaller host budget may help"
        ) from error


def _map_natively(
    native: Callable[..., int], num_bytes: int, share: range, numa_nodes: Sequence[int], num_threads: int
) -> SharedMapping:
    address, bound = ctypes.c_void_p(), ctypes.c_int()
    nodes = (ctypes.c_int * len(numa_nodes))(*numa_nodes)
    places = (ctypes.byref(address), ctypes.byref(bound))
    status = native(num_bytes, share.start, len(share), nodes, len(numa_nodes), num_threads, *places)
    library.check(status, "shared host memory")
    unmap = library.bind("flex_host_unmap", ctypes.c_void_p, ctypes.c_int64)
    detach = library.bind("flex_host_detach_shared", ctypes.c_void_p, ctypes.c_int64)
    assert unmap is not None, "csrc/host_arena.cpp exports all three"
    assert detach is not None, "csrc/host_arena.cpp exports all three"
    start = address.value or 0
    pages = pages_at(start, num_bytes, in_owner(partial(unmap, start, num_bytes)))
    return SharedMapping(pages, in_owner(partial(detach, start, num_bytes)))


def _map_by_python(fd: int, num_bytes: int, share: range) -> SharedMapping:
    mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
    advise(mapping, "MADV_HUGEPAGE")
    advise(mapping, "MADV_DONTFORK")
    keep_unforked(mapping)
    # The tensor's storage holds a reference to the mapping, which ends with the last view.
    pages = torch.frombuffer(mapping, dtype=torch.uint8)
    pages[share.start : share.stop : PAGE_BYTES].zero_()
    return SharedMapping(pages, lambda: None)
