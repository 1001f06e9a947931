"""How much memory this process really uses: GPU bytes as NVML shows them, host bytes as the kernel counts them.

The figures that budgets are promises about; what the arenas hold is only their largest part.
"""

import os
import resource
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

SAMPLE_PERIOD_S = 0.02


class MemoryPeaks(NamedTuple):
    """The most memory a process had in use at once, in bytes; `gpu_bytes` is None where nothing measures it."""

    gpu_bytes: int | None
    host_bytes: int


class GpuMemoryMeter:
    """GPU bytes of this process, now and at most since `start`, sampled by a thread every 20 ms.

    Make it before the process first uses CUDA: then what others hold on the device is known and left out, even in
    containers where NVML does not list the process. `read_bytes` replaces NVML; without it a CPU device reads None.
    A peak shorter than the period may be missed; arenas hold their memory throughout, so budgets are unaffected.
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
            _baseline_bytes(index)
            self._read_bytes = lambda: _process_gpu_bytes(index)

    def used_bytes(self) -> int | None:
        """Bytes in use now. Raises: RuntimeError if the device cannot be read at all."""
        if self._read_bytes is None:
            return None
        used_bytes = self._read_bytes()
        with self._peak_lock:
            self._peak_bytes = max(self._peak_bytes, used_bytes)
        return used_bytes

    def peak_bytes(self) -> int | None:
        """Most bytes seen since `start` (or since the meter was made), counting this moment."""
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
    """Peaks of both memories: the meter's since its start, the host's since the process began."""
    return MemoryPeaks(gpu_bytes=meter.peak_bytes(), host_bytes=peak_resident_bytes())


def gpu_used_bytes(device: torch.device) -> int:
    """GPU bytes of this process as NVML shows them: context, kernels, libraries, arenas.

    Where NVML does not list the process (in many containers) this is what the device has in use less what it had at
    the first call, if that came before CUDA was initialised: an upper bound if others share the card.
    Raises: ValueError if `device` is no CUDA device.
    """
    if device.type != "cuda":
        raise ValueError(f"gpu_used_bytes: device is {device}, expected a CUDA device")
    return _process_gpu_bytes(_device_index(device))


def nvidia_driver_version() -> str:
    """Version of the NVIDIA driver, "unknown" without NVML."""
    nvml = _nvml()
    if nvml is None:
        return "unknown"
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return "unknown"


def resident_bytes() -> int:
    """Resident set of this process now (VmRSS), page-locked memory included."""
    return _status_bytes("VmRSS") or _statm_resident_bytes() or peak_resident_bytes()


def peak_resident_bytes() -> int:
    """Largest resident set since the process began (VmHWM)."""
    recorded = _status_bytes("VmHWM")
    if recorded:
        return recorded
    unit_bytes = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes


def _status_bytes(key: str) -> int | None:
    """A "Vm" line of /proc/self/status in bytes; None where the system has no such line."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                if line.startswith(f"{key}:"):
                    return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _statm_resident_bytes() -> int | None:
    """Second field of /proc/self/statm, pages; some sandboxes have it without VmRSS."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        return None


def _process_gpu_bytes(index: int) -> int:
    baseline_bytes = _baseline_bytes(index)
    listed_bytes = _listed_process_bytes(index)
    if listed_bytes is not None:
        return listed_bytes
    return max(0, _device_used_bytes(index) - baseline_bytes)


@cache
def _baseline_bytes(index: int) -> int:
    """What the device had in use before this process made its context; 0 if it is too late to know.

    Only NVML can tell: asking the CUDA driver makes the context.
    """
    if torch.cuda.is_initialized() or _nvml_handle(index) is None:
        return 0
    return _device_used_bytes(index)


def _listed_process_bytes(index: int) -> int | None:
    """NVML's figure for this process; None if it lists no such process, gives no figure, or cannot mean this one."""
    nvml = _nvml()
    handle = _nvml_handle(index)
    if nvml is None or handle is None:
        return None
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    for process in processes:
        if process.pid == os.getpid() and process.usedGpuMemory is not None:
            # In a container NVML may list the host's process numbers: less than torch holds must be someone else.
            reserved_bytes = torch.cuda.memory_reserved(index) if torch.cuda.is_initialized() else 0
            return int(process.usedGpuMemory) if process.usedGpuMemory >= reserved_bytes else None
    return None


def _device_used_bytes(index: int) -> int:
    """Bytes in use on the whole device, by all processes."""
    nvml = _nvml()
    handle = _nvml_handle(index)
    if nvml is not None and handle is not None:
        try:
            return int(_nvml_memory(nvml, handle).used)
        except nvml.NVMLError:
            pass  # some virtual GPUs refuse; the CUDA driver answers below
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return total_bytes - free_bytes


def _nvml_memory(nvml: ModuleType, handle: Any) -> Any:
    """NVML's memory figures; version 2 leaves what the driver reserves for itself out of `used`."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        try:
            return nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
        except (nvml.NVMLError, TypeError):
            pass  # a driver or binding older than version 2
    return nvml.nvmlDeviceGetMemoryInfo(handle)


@cache
def _nvml() -> ModuleType | None:
    """The NVML binding, initialised for the life of the process; None without driver or binding."""
    try:
        import pynvml  # noqa: PLC0415 - only machines with NVIDIA GPUs need it
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _nvml_handle(index: int) -> Any | None:
    """NVML's handle of torch's device `index`, without making a CUDA context; None if it cannot be told."""
    nvml = _nvml()
    if nvml is None:
        return None
    try:
        if torch.cuda.is_initialized():
            return nvml.nvmlDeviceGetHandleByUUID(_uuid(str(torch.cuda.get_device_properties(index).uuid)))
        visible = [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]
        entry = visible[index] if index < len(visible) else str(index)
        if entry.isdigit():
            return nvml.nvmlDeviceGetHandleByIndex(int(entry))
        return nvml.nvmlDeviceGetHandleByUUID(entry)
    except (nvml.NVMLError, AttributeError):
        return None


def _uuid(text: str) -> str:
    """NVML's spelling of a UUID; torch leaves the prefix out."""
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def _device_index(device: torch.device) -> int:
    """Torch's index of a CUDA device; "cuda" alone is the current one, which is 0 until CUDA is initialised."""
    if device.index is not None:
        return device.index
    return torch.cuda.current_device() if torch.cuda.is_initialized() else 0
