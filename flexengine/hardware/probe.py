"""Measures the machine once, remembers the rates on disk, and reads free memory again on every call."""

import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from flexengine.hardware.busy import busy_signs
from flexengine.hardware.cache import age_s, profile_path, read_cached, write_cached
from flexengine.hardware.host_memory import HostMemory, host_memory
from flexengine.hardware.machine_rates import pooled, remembered_machine
from flexengine.hardware.measure.cpu import HEAD_DIM as CPU_HEAD_DIM
from flexengine.hardware.measure.cpu import measure_cpu_machine, measure_cpu_model
from flexengine.hardware.measure.gpu import ProbeKernels, Rates, measure_model
from flexengine.hardware.measure.machine import measure_machine
from flexengine.hardware.memory_usage import gpu_used_bytes, note_baseline, release_unused_heap, resident_bytes
from flexengine.hardware.nvml import nvidia_driver_version
from flexengine.hardware.profile import DEFAULT_SHAPE, HardwareProfile, ProbeShape
from flexengine.native import library
from flexengine.native.memory_limits import PROC
from flexengine.native.proc_files import keyed_number
from flexengine.native.threads import host_threads
from flexengine.ops.attention.packages import installed_packages
from flexengine.ops.fp8 import SCALINGS
from flexengine.ops.ready_compiler import READY

PROBE_VERSION = 16  # part of the cache key: raise it when what is measured changes its meaning
NODE_VERSION = 5  # the same of what several ranks reach at once
DEFAULT_SECONDS = 10.0
CPU_SIZES = (256, 512, 1024)  # the CPU's rate hardly depends on the shape: models of similar size share a profile
# A context with every library loaded takes 0.4-1 GiB. More than this is another process that NVML cannot tell apart.
MAX_CONTEXT_BYTES = 2 * 2**30
BFLOAT16_SINCE = (8, 0)
"""Compute capability of the first cards whose tensor cores take bfloat16: a T4 does 2.5 TFLOP/s of its products and 42
of float16's (https://github.com/zzc0721/torch-performance-test-data, database.md)."""
BENCHMARKS_HOST_BYTES = 96 * 2**20
"""Host memory that a process which has measured a GPU holds for kernels and libraries of the benchmarks alone. With 64
MiB left out, 69 processes that found the rates took 87 to 246 MiB less than was predicted, slack included
(bench/results/h100_plan_accuracy.json, h200_plan_accuracy_half_cached.json, h100_h200_plan_accuracy.json)."""

logger = logging.getLogger(__name__)

_AT_IMPORT_BYTES = resident_bytes()
"""Resident set before this process loads data."""
_at_first_probe_bytes: dict[str, int] = {}
"""Resident set when a device type was first asked for: kernels and libraries come on top of it."""


class ProbeResult(NamedTuple):
    """A profile and its origin. age_s: seconds since it was measured, None if no file remembers it."""

    profile: HardwareProfile
    path: Path | None
    from_cache: bool
    age_s: float | None


def probe(
    device: torch.device,
    dtype: torch.dtype,
    shape: ProbeShape = DEFAULT_SHAPE,
    seconds_budget: float = DEFAULT_SECONDS,
    force: bool = False,
) -> HardwareProfile:
    """Give the profile of `device` and its host for products in `dtype`; see `run_probe`."""
    return run_probe(device, dtype, shape, seconds_budget, force).profile


def run_probe(
    device: torch.device,
    dtype: torch.dtype,
    shape: ProbeShape = DEFAULT_SHAPE,
    seconds_budget: float = DEFAULT_SECONDS,
    force: bool = False,
) -> ProbeResult:
    """Give the profile of `device` and its host for products in `dtype`, cached or measured in about `seconds_budget`.

    shape: that of the model whose linear layers and attention are timed. Rates and context size are cached per device,
    driver, versions, dtype, shape, CPU and thread count, under $FLEXENGINE_CACHE or the user's cache folder; `force`
    measures again. What depends on no model (`machine_rates.py`) is measured once a day at most. Memory totals are
    always read again.
    Order: call it first in a process, before the arenas take their memory and while the device is idle. It gives all
    memory back, and torch's random numbers continue as if it had not run. It ignores a cache that it cannot read or
    write.
    Raises: ValueError if `device` is neither CUDA nor CPU, a size of `shape` is below 1, or seconds_budget is not above
    0; MemoryError if CUDA refuses to page-lock the buffers.
    """
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"probe: device is {device}, expected a CUDA device or the CPU")
    if seconds_budget <= 0:
        raise ValueError(f"probe: seconds_budget is {seconds_budget}, expected more than 0 seconds")
    shape = ProbeShape(*shape)
    if min(shape[:3]) < 1:
        raise ValueError(
            f"probe: shape is {tuple(shape[:3])}, expected hidden_size, intermediate_size and head_dim of at least 1"
        )
    _at_first_probe_bytes.setdefault(device.type, resident_bytes())
    if device.type == "cuda":
        note_baseline()
        device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    shape = _measured_shape(device, shape)
    path = _path(device, dtype, shape)
    profile = None if force else read_cached(path)
    from_cache = profile is not None
    if profile is None:
        profile = _measured(device, dtype, shape, seconds_budget / DEFAULT_SECONDS, force)
        path = path if write_cached(path, _for_later(profile)) else None
    return ProbeResult(_with_current_memory(profile, device), path, from_cache, age_s(path))


def mend(
    device: torch.device, dtype: torch.dtype, shape: ProbeShape, mended: Callable[[HardwareProfile], HardwareProfile]
) -> bool:
    """Change the remembered profile of a device by what a run showed; False where none is remembered."""
    path = _path(device, dtype, _measured_shape(device, shape))
    profile = read_cached(path)
    return profile is not None and write_cached(path, mended(profile))


def _measured_shape(device: torch.device, shape: ProbeShape) -> ProbeShape:
    """Give the shape that is measured for a model's: on the CPU one of few."""
    if device.type == "cuda":
        return ProbeShape(*shape)
    return ProbeShape(_nearby_size(shape.hidden_size), _nearby_size(shape.intermediate_size), CPU_HEAD_DIM)


def check_multiplies(device: torch.device, dtype: str, matmul_dtype: str) -> None:
    """Raise ValueError unless the device takes operands in the job's dtypes.

    Cards before 2020 compute bfloat16 as they do float32, some at half of its rate, without their tensor cores.
    """
    if device.type != "cuda":
        return
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if dtype == "bfloat16" and capability < BFLOAT16_SINCE:
        raise ValueError(
            f"dtype=bfloat16: {name} multiplies no bfloat16, which takes compute capability"
            f" {'.'.join(map(str, BFLOAT16_SINCE))} or more, and it has {'.'.join(map(str, capability))}; give"
            " --dtype float16 (dtype='float16')"
        )
    if matmul_dtype != "compute" and (why := SCALINGS[matmul_dtype].refusal(device)):
        raise ValueError(f"matmul_dtype={matmul_dtype} on {name}: {why}; leave it out")


def _measured(
    device: torch.device, dtype: torch.dtype, shape: ProbeShape, scale: float, force: bool
) -> HardwareProfile:
    logger.info("measuring the rates of %s once (a few seconds)", device)
    if signs := busy_signs():
        logger.warning(
            "the machine is busy (%s), so that these rates are of this moment: predictions will be too slow;"
            " `flexengine probe --force` measures again when it is idle",
            signs,
        )
    on_cuda = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_cuda else []):
        return (_probe_cuda if on_cuda else _probe_cpu)(device, dtype, shape, scale, force)


def _probe_cuda(
    device: torch.device, dtype: torch.dtype, shape: ProbeShape, scale: float, force: bool
) -> HardwareProfile:
    release_cached_memory()
    release_unused_heap()
    before_bytes, held_bytes = resident_bytes(), torch.cuda.memory_reserved(device)
    rates = _rates(device, dtype, shape, scale, force)
    torch.cuda.empty_cache()  # keeps the cuBLAS workspace, which counts as context from here on
    context_bytes = min(max(gpu_used_bytes(device) - held_bytes, 0), MAX_CONTEXT_BYTES)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    release_unused_heap()
    host = _host_memory()
    sizes = (total_bytes, free_bytes, context_bytes, host.total_bytes, host.available_bytes, _base_bytes(before_bytes))
    return rates.profile(torch.cuda.get_device_name(device), "cuda", *sizes)


def _probe_cpu(
    device: torch.device, dtype: torch.dtype, shape: ProbeShape, scale: float, force: bool
) -> HardwareProfile:
    release_unused_heap()
    before_bytes = resident_bytes()
    rates = _rates(device, dtype, shape, scale, force)
    release_unused_heap()
    host = host_memory()
    free_bytes = host.available_bytes
    sizes = (free_bytes, free_bytes, 0, host.total_bytes, free_bytes, _base_bytes(before_bytes))
    return rates.profile(cpu_name(), "cpu", *sizes)


def _rates(device: torch.device, dtype: torch.dtype, shape: ProbeShape, scale: float, force: bool) -> Rates:
    """Measure a model on this machine, and before it the machine, unless another model's probe has done that."""
    path = _machine_path(device, dtype)
    known = None if force else remembered_machine(path)
    if device.type != "cuda":
        known = known or pooled(measure_cpu_machine(dtype, scale), path, anew=force)
        return measure_cpu_model(dtype, shape, known, scale)
    with ProbeKernels(device, dtype, shape) as kernels:
        if known is None:
            free_bytes = host_memory().available_bytes
            known = pooled(measure_machine(device, dtype, free_bytes, scale, kernels.begin), path, anew=force)
        return measure_model(device, dtype, shape, known, kernels, scale)


def _for_later(profile: HardwareProfile) -> HardwareProfile:
    """Give a profile as a process that does not measure will need it."""
    if profile.device_type != "cuda":
        return profile
    return profile.changed(
        host_base_bytes=max(_AT_IMPORT_BYTES, profile.memory.host_base_bytes - BENCHMARKS_HOST_BYTES)
    )


def _base_bytes(before_bytes: int) -> int:
    """Resident set of a process that has imported this package, and then measured.

    before_bytes: that of this process before it measured. What it had loaded besides by then, such as data, is left
    out.
    """
    now_bytes = resident_bytes()
    return min(now_bytes, _AT_IMPORT_BYTES + max(0, now_bytes - before_bytes))


def _with_current_memory(profile: HardwareProfile, device: torch.device) -> HardwareProfile:
    """Update the memory fields of `profile`: what the machine has, what is free, and what this process has already.

    With rates from the cache, kernels and libraries are not loaded yet. As far as the process has not grown by them
    since its first probe, they will come on top of what it holds, and take their part of what is free.
    """
    host, resident = _host_memory(), resident_bytes()
    grown_bytes = max(0, resident - _at_first_probe_bytes.get(device.type, resident))
    pending_bytes = max(0, profile.memory.host_base_bytes - _AT_IMPORT_BYTES - grown_bytes)
    base_bytes = max(profile.memory.host_base_bytes, resident + pending_bytes)
    free_host_bytes = max(0, host.available_bytes - (base_bytes - resident))
    free_bytes = total_bytes = free_host_bytes
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        loaded_bytes = gpu_used_bytes(device) - torch.cuda.memory_reserved(device)
        free_bytes = max(0, free_bytes - max(0, profile.memory.gpu_context_bytes - loaded_bytes))
    return profile.changed(
        gpu_total_bytes=total_bytes,
        gpu_free_bytes=free_bytes,
        gpu_context_bytes=min(profile.memory.gpu_context_bytes, total_bytes),
        host_total_bytes=host.total_bytes,
        host_available_bytes=free_host_bytes,
        host_base_bytes=base_bytes,
    )


def _host_memory() -> HostMemory:
    """What `host_memory` says, with what the process has that compiles for this one: it ends before the first step."""
    host, process = host_memory(), READY.process
    if process is None:
        return host
    held_bytes = 1024 * (keyed_number(PROC / f"{process.pid}/smaps_rollup", "Private_Dirty:") or 0)
    return HostMemory(host.total_bytes, min(host.total_bytes, host.available_bytes + held_bytes))


def release_cached_memory() -> None:
    """Give back unused memory of torch's allocator, and cuBLAS workspaces that it would count as in use."""
    clear_workspaces = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear_workspaces is not None:
        clear_workspaces()
    torch.cuda.empty_cache()


def _nearby_size(size: int) -> int:
    """Choose the first of CPU_SIZES that is at least `size`, or the last."""
    return next((nearby for nearby in CPU_SIZES if nearby >= size), CPU_SIZES[-1])


def _path(device: torch.device, dtype: torch.dtype, shape: ProbeShape) -> Path | None:
    """Give the file of this machine's profile; None if the user has no cache folder."""
    readable = f"{_name(device)} {dtype} {' '.join(map(str, shape[:3]))}".replace("torch.", "")
    return profile_path(readable, (PROBE_VERSION, *machine(device), str(dtype), tuple(shape)))


def _machine_path(device: torch.device, dtype: torch.dtype) -> Path | None:
    """Give the file of what depends on no model; None as of a profile."""
    readable = f"machine of {_name(device)} {dtype}".replace("torch.", "")
    return profile_path(readable, (PROBE_VERSION, *machine(device), str(dtype)), "machines")


def node_path(device: torch.device, dtype: torch.dtype, ranks: int, nodes: int) -> Path | None:
    """Give the file of what so many ranks on each of so many nodes reach at once; None as of a profile.

    What the environment says of NCCL and of copies between GPUs is part of the key.
    """
    readable = f"{ranks} of {_name(device)} {dtype} on {nodes} nodes".replace("torch.", "")
    told = sorted((name, value) for name, value in os.environ.items() if name.startswith(("NCCL_", "FLEXENGINE_PEER_")))
    return profile_path(readable, (NODE_VERSION, *machine(device), str(dtype), ranks, nodes, *told))


def machine(device: torch.device) -> tuple[object, ...]:
    """What rates depend on besides what is measured: versions, device, host, threads."""
    cuda = device.type == "cuda"
    total_bytes = torch.cuda.get_device_properties(device).total_memory if cuda else 0
    versions = (torch.__version__, torch.version.cuda, nvidia_driver_version() if cuda else "none")
    native = library.ABI_VERSION if library.load() is not None else None  # AdamW on the CPU is far slower without
    host = (cpu_name(), os.cpu_count(), torch.get_num_threads(), host_threads())
    packages = installed_packages() if cuda else ()  # none: a key as of before there were any
    return (*versions, native, _name(device), total_bytes, *host, *packages)


def _name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name()


def cpu_name() -> str:
    """Read what the processor calls itself; its architecture where it does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip() or "CPU"
    except OSError:
        pass
    return platform.processor() or platform.machine() or "CPU"
