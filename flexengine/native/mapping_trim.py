"""Keeps few pages of a file's mapping in memory while somebody uses it."""

from __future__ import annotations

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import suppress

from torch import Tensor

RELEASE_S = 0.002
"""Between two releases a process that fills a mapping by 10 GB/s makes 20 MB of it resident."""
WRITE_BACK_S = 0.2
_DONTNEED = 4  # MADV_DONTNEED of <sys/mman.h>


class MappingTrim:
    """While started, gives the pages of a shared mapping back to the page cache all the time, and has the drive take
    what the cache holds. Nobody who reads or writes through the mapping sees it: a page comes back when it is touched.

    mapped: the mapping's bytes, which stay mapped until `close`: what came to lie at their addresses afterwards would
    be lost. descriptor: of its file. owner: at whose end it ends, too.
    """

    def __init__(self, mapped: Tensor, descriptor: int, owner: object) -> None:
        self._mapped, self._descriptor = mapped, descriptor
        self._ended, self._threads = threading.Event(), ()
        weakref.finalize(owner, self._ended.set)

    def start(self) -> None:
        """Begin; a second call before `end` does nothing."""
        if self._threads:
            return
        self._ended.clear()
        work = ((self._release, RELEASE_S), (self._write_back, WRITE_BACK_S))
        self._threads = tuple(threading.Thread(target=self._repeat, args=each, daemon=True) for each in work)
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """End; the next `start` begins anew."""
        self._ended.set()
        for thread in self._threads:
            thread.join()
        self._threads = ()

    def settle(self) -> None:
        """End, and have the drive hold what was written and memory nothing of it. Raises: OSError where it fails."""
        self.end()
        self._release()
        self._write_back()

    def close(self) -> None:
        """End, and let go of the mapping; a second call does nothing."""
        self.end()
        self._mapped = self._mapped.new_empty(0)

    def _repeat(self, work: Callable[[], None], period_s: float) -> None:
        with suppress(OSError):  # a drive that fails says so to whoever settles
            while not self._ended.wait(period_s):
                work()

    def _release(self) -> None:
        madvise = getattr(ctypes.CDLL(None), "madvise", None)
        if madvise is not None:  # called so that other threads run meanwhile, which mmap.madvise does not let them
            madvise(ctypes.c_void_p(self._mapped.data_ptr()), ctypes.c_size_t(self._mapped.numel()), _DONTNEED)

    def _write_back(self) -> None:
        os.fsync(self._descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
