"""Measures the machine once, remembers the rates on disk, and reads free memory anew on every call."""

import hashlib
import os
import platform
import re
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from flexengine.hardware.host_memory import host_memory
from flexengine.hardware.measure import measure_cpu, measure_cuda
from flexengine.hardware.memory_usage import gpu_used_bytes, nvidia_driver_version, resident_bytes
from flexengine.hardware.profile import HardwareProfile

PROBE_VERSION = 1  # part of the cache key: raise it when what is measured changes its meaning
DEFAULT_SECONDS = 6.0
# A context with every library loaded takes 0.4-1 GiB. More than this is another process that NVML cannot tell apart.
MAX_CONTEXT_BYTES = 2 * 2**30


def probe(
    device: torch.device, dtype: torch.dtype, seconds_budget: float = DEFAULT_SECONDS, force: bool = False
) -> HardwareProfile:
    """Profile of `device` and its host for products in `dtype`, from the cache or measured in about `seconds_budget`.

    Rates and context size are cached per device, driver, torch version, dtype, CPU and thread count, under
    $FLEXENGINE_CACHE or the user's cache folder; `force` measures again. Memory totals are always read anew.
    Order: call it first in a process, before the arenas take their memory and while the device is idle. All memory it
    takes is given back. A cache that cannot be read or written is ignored.
    Raises: ValueError if `device` is neither CUDA nor CPU, or seconds_budget is not above 0.
    """
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"probe: device is {device}, expected a CUDA device or the CPU")
    if seconds_budget <= 0:
        raise ValueError(f"probe: seconds_budget is {seconds_budget}, expected more than 0 seconds")
    if device.type == "cuda":
        gpu_used_bytes(device)  # before CUDA starts: notes what other processes hold on the device
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    path = _cache_path(device, dtype)
    profile = None if force else _read_cache(path)
    if profile is None:
        scale = seconds_budget / DEFAULT_SECONDS
        profile = _probe_cuda(device, dtype, scale) if device.type == "cuda" else _probe_cpu(dtype, scale)
        _write_cache(path, profile)
    return _with_current_memory(profile, device)


def _probe_cuda(device: torch.device, dtype: torch.dtype, scale: float) -> HardwareProfile:
    _release_cached_memory()
    held_bytes = torch.cuda.memory_reserved(device)
    rates = measure_cuda(device, dtype, scale)
    torch.cuda.empty_cache()  # keeps the cuBLAS workspace, which counts as context from here on
    context_bytes = min(max(gpu_used_bytes(device) - held_bytes, 0), MAX_CONTEXT_BYTES)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    host = host_memory()
    return HardwareProfile(
        name=torch.cuda.get_device_name(device),
        device_type="cuda",
        source="measured",
        **rates._asdict(),
        gpu_total_bytes=total_bytes,
        gpu_free_bytes=free_bytes,
        gpu_context_bytes=context_bytes,
        host_total_bytes=host.total_bytes,
        host_available_bytes=host.available_bytes,
        host_base_bytes=resident_bytes(),
    )


def _probe_cpu(dtype: torch.dtype, scale: float) -> HardwareProfile:
    rates = measure_cpu(dtype, scale)
    host = host_memory()
    return HardwareProfile(
        name=_cpu_name(),
        device_type="cpu",
        source="measured",
        **rates._asdict(),
        gpu_total_bytes=host.available_bytes,
        gpu_free_bytes=host.available_bytes,
        gpu_context_bytes=0,
        host_total_bytes=host.total_bytes,
        host_available_bytes=host.available_bytes,
        host_base_bytes=resident_bytes(),
    )


def _with_current_memory(profile: HardwareProfile, device: torch.device) -> HardwareProfile:
    """`profile` with today's memory: what the machine has, what is free, and what this process has already."""
    host = host_memory()
    free_bytes = total_bytes = host.available_bytes
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        # With rates from the cache, kernels and libraries are not loaded yet and will still take their part.
        loaded_bytes = gpu_used_bytes(device) - torch.cuda.memory_reserved(device)
        free_bytes = max(0, free_bytes - max(0, profile.gpu_context_bytes - loaded_bytes))
    return replace(
        profile,
        gpu_total_bytes=total_bytes,
        gpu_free_bytes=free_bytes,
        gpu_context_bytes=min(profile.gpu_context_bytes, total_bytes),
        host_total_bytes=host.total_bytes,
        host_available_bytes=host.available_bytes,
        host_base_bytes=max(profile.host_base_bytes, resident_bytes()),
    )


def _release_cached_memory() -> None:
    """Give back what torch's allocator holds without use, and cuBLAS workspaces that it would count as in use."""
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    torch.cuda.empty_cache()


def _cache_path(device: torch.device, dtype: torch.dtype) -> Path | None:
    """File of this machine's profile; None if the user has no cache folder."""
    cuda = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if cuda else _cpu_name()
    driver = nvidia_driver_version() if cuda else "none"
    key = (PROBE_VERSION, name, driver, torch.__version__, dtype, _cpu_name(), os.cpu_count(), torch.get_num_threads())
    digest = hashlib.sha256(repr(key).encode()).hexdigest()[:12]
    readable = re.sub(r"[^a-z0-9]+", "-", f"{name} {dtype}".lower().replace("torch.", "")).strip("-")
    folder = _cache_folder()
    return None if folder is None else folder / "profiles" / f"{readable}-{digest}.json"


def _cache_folder() -> Path | None:
    """$FLEXENGINE_CACHE, else flexengine/ in the XDG cache folder (https://specifications.freedesktop.org/basedir)."""
    if own := os.environ.get("FLEXENGINE_CACHE"):
        return Path(own)
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "flexengine"
    try:
        return Path.home() / ".cache" / "flexengine"
    except RuntimeError:  # a user without a home
        return None


def _read_cache(path: Path | None) -> HardwareProfile | None:
    try:
        return None if path is None else HardwareProfile.from_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # absent, unreadable, or written by another version
        return None


def _write_cache(path: Path | None, profile: HardwareProfile) -> None:
    """Write beside and rename, so that processes that start together never read half a file."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(profile.to_json())
        os.replace(temporary, path)
    except OSError:  # a read-only or full disk costs a few seconds next time, nothing else
        return


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip() or "CPU"
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"
