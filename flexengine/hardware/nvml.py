"""Asks NVML, the driver's management library, about a GPU and who uses it, without making a CUDA context.

Source: NVML API reference, https://docs.nvidia.com/deploy/nvml-api/. Every function also works without NVML, and then
knows less.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch

IDLE = "idle"
SLOWED_BY = {
    0x01: IDLE,
    0x02: "application clocks",
    0x04: "its power limit",
    0x08: "a hardware slowdown",
    0x20: "its temperature",
    0x40: "its temperature, in hardware",
    0x80: "the power brake",
}
"""What may hold a GPU's clocks down, by bits of NVML's clocks event reasons."""


class Clocks(NamedTuple):
    """The clock of a GPU's multiprocessors now and at most, in MHz, and what holds it down at this moment; power and
    temperature where the card tells them."""

    sm_mhz: int
    most_mhz: int
    slowed_by: tuple[str, ...]
    power_w: float | None = None
    temperature_c: float | None = None

    def describe(self) -> str:
        """The clocks in words."""
        held = f", held by {' and '.join(self.slowed_by)}" if self.slowed_by else ""
        return f"{self.sm_mhz} of {self.most_mhz} MHz{' (idle)' if self.slowed_by == (IDLE,) else held}"


def gpu_clocks(index: int) -> Clocks | None:
    """Read the clocks of torch's device `index`; None where NVML tells nothing of them."""
    nvml, handle = library(), _handle(index)
    if nvml is None or handle is None:
        return None
    try:
        now = int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        most = int(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM))
        bits = _clock_reasons(nvml, handle)
    except nvml.NVMLError:
        return None
    reasons = tuple(words for bit, words in SLOWED_BY.items() if bits & bit)
    power_mw = _told(nvml, lambda: nvml.nvmlDeviceGetPowerUsage(handle))
    celsius = _told(nvml, lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU))
    return Clocks(now, most, reasons, None if power_mw is None else power_mw / 1e3, celsius)


def _told(nvml: ModuleType, read: Callable[[], float]) -> float | None:
    """Read a figure that not every card tells."""
    try:
        return float(read())
    except nvml.NVMLError:
        return None


def _clock_reasons(nvml: ModuleType, handle: Any) -> int:
    try:
        return int(nvml.nvmlDeviceGetCurrentClocksEventReasons(handle))
    except nvml.NVMLError:  # drivers before 535 have the same bits under another name
        return int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))


def has_nvlink(index: int, other: int) -> bool:
    """Whether NVML says that two of torch's devices reach each other's memory over NVLink; False without NVML."""
    nvml, handles = library(), (_handle(index), _handle(other))
    if nvml is None or None in handles:
        return False
    try:
        return nvml.nvmlDeviceGetP2PStatus(*handles, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK
    except (nvml.NVMLError, AttributeError):  # bindings and drivers older than this question
        return False


def nvidia_driver_version() -> str:
    """Read the version of the NVIDIA driver; "unknown" without NVML."""
    nvml = library()
    if nvml is None:
        return "unknown"
    try:
        return str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return "unknown"


def process_gpu_bytes(index: int) -> int:
    """Read the GPU bytes of this process on torch's device `index`; see `memory_usage.gpu_used_bytes`."""
    baseline_bytes = _baseline_bytes(index)
    listed_bytes = _listed_bytes(index)
    if listed_bytes is not None:
        return listed_bytes
    return max(0, device_used_bytes(index) - baseline_bytes)


def _baseline_bytes(index: int) -> int:
    """Give the bytes that the device had in use before this process made its context; 0 if unknown."""
    known, nvml, handle = baselines(), library(), _handle(index)
    if nvml is None or handle is None or not known:
        return 0
    try:
        return known.get(_device_uuid(nvml, handle), 0)
    except nvml.NVMLError:
        return 0


@cache
def baselines() -> dict[str, int]:
    """Read bytes in use by UUID on every GPU, at the first call; empty if CUDA had been initialised by then.

    Only NVML can tell: asking the CUDA driver makes the context. Slices of a GPU (MIG) are found by
    CUDA_VISIBLE_DEVICES.
    """
    nvml, used = library(), dict[str, int]()
    if nvml is None or torch.cuda.is_initialized():
        return used
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        handles = []
    handles += [_handle(index) for index in range(len(_visible_devices()))]
    for handle in (known for known in handles if known is not None):
        with suppress(nvml.NVMLError):  # a GPU that this container may not read
            used[_device_uuid(nvml, handle)] = int(_memory(nvml, handle).used)
    return used


def _listed_bytes(index: int) -> int | None:
    """Read NVML's figure for this process; None if it lists no such process, gives no figure, or means another one."""
    nvml = library()
    handle = _handle(index)
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


def device_used_bytes(index: int) -> int:
    """Read bytes in use on the whole device, by all processes."""
    nvml = library()
    handle = _handle(index)
    if nvml is not None and handle is not None:
        try:
            return int(_memory(nvml, handle).used)
        except nvml.NVMLError:
            pass  # some virtual GPUs refuse; the CUDA driver answers below
    free_bytes, total_bytes = torch.cuda.mem_get_info(index)
    return total_bytes - free_bytes


def _memory(nvml: ModuleType, handle: Any) -> Any:
    """Read NVML's memory figures; version 2 leaves what the driver reserves for itself out of `used`."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    if version is not None:
        try:
            return nvml.nvmlDeviceGetMemoryInfo(handle, version=version)
        except (nvml.NVMLError, TypeError):
            pass  # a driver or binding older than version 2
    return nvml.nvmlDeviceGetMemoryInfo(handle)


@cache
def library() -> ModuleType | None:
    """Load the NVML binding, initialised for the life of the process; None without driver or binding."""
    try:
        import pynvml  # noqa: PLC0415 - only machines with NVIDIA GPUs need it
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def _handle(index: int) -> Any | None:
    """Find NVML's handle of torch's device `index` without making a CUDA context; None if that is impossible."""
    nvml = library()
    if nvml is None:
        return None
    try:
        if torch.cuda.is_initialized():
            return nvml.nvmlDeviceGetHandleByUUID(_uuid(str(torch.cuda.get_device_properties(index).uuid)))
        visible = _visible_devices()
        entry = visible[index] if index < len(visible) else str(index)
        if entry.isdigit():
            return nvml.nvmlDeviceGetHandleByIndex(int(entry))
        return nvml.nvmlDeviceGetHandleByUUID(entry)
    except (nvml.NVMLError, AttributeError):
        return None


def _visible_devices() -> list[str]:
    """List the entries of CUDA_VISIBLE_DEVICES, indices or UUIDs; empty if all devices are visible."""
    return [entry.strip() for entry in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if entry.strip()]


def _device_uuid(nvml: ModuleType, handle: Any) -> str:
    uuid = nvml.nvmlDeviceGetUUID(handle)
    return uuid.decode() if isinstance(uuid, bytes) else str(uuid)


def _uuid(text: str) -> str:
    """Spell a UUID as NVML does; torch leaves the prefix out."""
    return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"
