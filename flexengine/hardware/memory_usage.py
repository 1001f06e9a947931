"""Reads how much memory this process really uses: GPU bytes as NVML shows them, host bytes as the kernel counts them.

Budgets are promises about these figures; what the arenas hold is only their largest part.
"""

import ctypes
import resource
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch

from flexengine.hardware import nvml

SAMPLE_PERIOD_S = 0.02


class MemoryPeaks(NamedTuple):
    """The most memory that a process had in use at once, in bytes; `gpu_bytes` is None if nothing measures it."""

    gpu_bytes: int | None
    host_bytes: int


class GpuMemoryMeter:
    """GPU bytes of this process, now and at most since `start`, sampled by a thread every 20 ms.

    Make it, or call `note_baseline`, before the process first uses CUDA: then memory of others on the device is known
    and left out, even in containers where NVML does not list the process. `read_bytes` replaces NVML; without it a CPU
    device reads None. A peak shorter than the period may be missed; arenas hold their memory throughout, so budgets are
    unaffected.
    """

    def __init__(
        self, device: torch.device, read_bytes: Callable[[], int] | None = None, period_s: float = SAMPLE_PERIOD_S
    ) -> None:
        if period_s <= 0:
            raise ValueError(f"GpuMemoryMeter: period_s is {period_s}, expected more than 0 seconds")
        self._read_bytes = read_bytes
        self._period_s = period_s
        self._peak_bytes = 0
        self._peak_lock = threading.Lock()  # the sampling thread and the caller both raise the peak
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        if read_bytes is None and device.type == "cuda":
            index = _device_index(device)
            note_baseline()
            self._read_bytes = lambda: nvml.process_gpu_bytes(index)

    def used_bytes(self) -> int | None:
        """Read the bytes in use now. Raises: RuntimeError if the device cannot be read at all."""
        if self._read_bytes is None:
            return None
        used_bytes = self._read_bytes()
        with self._peak_lock:
            self._peak_bytes = max(self._peak_bytes, used_bytes)
        return used_bytes

    def peak_bytes(self) -> int | None:
        """Give the most bytes seen since `start` (or since the meter was made), including this moment."""
        return None if self.used_bytes() is None else self._peak_bytes

    def start(self) -> "GpuMemoryMeter":
        """Forget the peak and sample in the background until `stop`; starting again only forgets the peak."""
        with self._peak_lock:
            self._peak_bytes = 0
        if self._read_bytes is not None and self._thread is None:
            self._stopping.clear()
            self._thread = threading.Thread(target=self._sample, name="gpu-memory-meter", daemon=True)
            self._thread.start()
        return self

    def stop(self) -> int | None:
        """Stop sampling; returns the peak in bytes. Stopping twice is harmless."""
        if self._thread is not None:
            self._stopping.set()
            self._thread.join()
            self._thread = None
        return self.peak_bytes()

    def __enter__(self) -> "GpuMemoryMeter":
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _sample(self) -> None:
        while not self._stopping.wait(self._period_s):
            self.used_bytes()


def memory_peaks(meter: GpuMemoryMeter) -> MemoryPeaks:
    """Give the peaks of both memories: the meter's since its start, the host's since the process began."""
    return MemoryPeaks(gpu_bytes=meter.peak_bytes(), host_bytes=peak_resident_bytes())


def note_baseline() -> None:
    """Note what other processes hold on every GPU, for machines where NVML does not tell processes apart.

    Order: before anything makes a CUDA context, as `torch.cuda.current_device()` does. Only the first call counts.
    After CUDA has started, memory of others can no longer be told from this process's own and counts as its own.
    """
    nvml.baselines()


def gpu_used_bytes(device: torch.device) -> int:
    """Read the GPU bytes of this process as NVML shows them: context, kernels, libraries, arenas.

    If NVML does not list the process (in many containers), this is what the device has in use less what it had at
    `note_baseline`: an upper bound if others share the card and take more later.
    Raises: ValueError if `device` is no CUDA device.
    """
    if device.type != "cuda":
        raise ValueError(f"gpu_used_bytes: device is {device}, expected a CUDA device")
    return nvml.process_gpu_bytes(_device_index(device))


def resident_bytes() -> int:
    """Read the resident set of this process now (VmRSS), which includes page-locked memory."""
    return _status_bytes("VmRSS") or _statm_resident_bytes() or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Read the largest resident set since the process began, or since `forget_peak_resident` (VmHWM)."""
    recorded = _status_bytes("VmHWM")
    if recorded:
        return recorded
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def forget_peak_resident() -> bool:
    """Restart `peak_resident_bytes` at what is resident now; returns False if the system cannot do that.

    Source: proc_pid_clear_refs(5), Linux.
    """
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as clear:
            clear.write("5")
    except OSError:
        return False
    return True


def _status_bytes(key: str) -> int | None:
    """Read a "Vm" line of /proc/self/status in bytes; None if there is no such line."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith(f"{key}:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _statm_resident_bytes() -> int | None:
    """Read the second field of /proc/self/statm, in pages; some sandboxes have it without VmRSS."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None


def release_unused_heap() -> None:
    """Have the C library (glibc) give freed memory back to the operating system, before a reading."""
    # Otherwise buffers of the probe would count as memory that every later process takes.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def hold_cublas_workspace(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> None:
    """Have cuBLAS take its workspace for the current stream from torch's allocator, unless it has one.

    It stays, so that a block in which the first product finds it can never be given back.
    """
    operand = torch.ones(64, 64, device=device, dtype=dtype)
    torch.mm(operand, operand)


def _device_index(device: torch.device) -> int:
    """Give torch's index of a CUDA device; "cuda" alone is the current one, which is 0 until CUDA is initialised."""
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0


def cap_allocator(device: torch.device, num_bytes: int) -> None:
    """Hold torch's device allocator to so many bytes: what a budget leaves beside the CUDA context."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, max(0.0, num_bytes / total)), device)
