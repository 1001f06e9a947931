"""Reads how much host memory this process may use: the least of RAM, the container's limits and its own."""

import resource
from collections.abc import Mapping
from pathlib import Path

from flexengine.hardware.slurm import slurm_memory_bytes
from flexengine.native.control_groups import UNLIMITED_BYTES, HostMemory
from flexengine.native.memory_limits import CGROUPS, PROC, host_memory_sizes
from flexengine.native.proc_files import keyed_number

__all__ = ["HostMemory", "host_memory"]

# `ulimit` by what counts against it, a line of /proc/self/status. RLIMIT_DATA counts private writable memory, which the
# arenas are; Linux does not enforce RLIMIT_RSS, but who sets it (batch systems do) means it. Source: getrlimit(2).
PROCESS_LIMITS = {"RLIMIT_AS": "VmSize:", "RLIMIT_DATA": "VmData:", "RLIMIT_RSS": "VmRSS:"}
SLURM = "Slurm"
"""The job's memory, beside the limits of getrlimit: the resident set counts against it."""


def host_memory(
    proc: Path = PROC, cgroups: Path = CGROUPS, process_limits_bytes: Mapping[str, int] | None = None
) -> HostMemory:
    """Give the least of RAM (MemTotal, MemAvailable), control-group limits (v1 and v2, with ancestors), `ulimit` and
    what Slurm grants the job.

    `available_bytes` counts page cache as free, since the kernel drops it on demand, and leaves out what the process
    already has. `proc` is where that file system lies, `cgroups` where control groups are when /proc does not tell;
    `process_limits_bytes` replaces the limits of getrlimit by name (RLIMIT_AS, RLIMIT_DATA, RLIMIT_RSS; negative for
    none). Never raises on a missing or unreadable file: that limit is taken as absent.
    """
    limits = _process_limits() if process_limits_bytes is None else process_limits_bytes
    granted = slurm_memory_bytes()
    if granted is not None:
        limits = {**limits, SLURM: granted}
    sizes = [*host_memory_sizes(proc, cgroups), *_process_sizes(proc, limits)]
    total_bytes = min(size.total_bytes for size in sizes)
    available_bytes = min(size.available_bytes for size in sizes)
    # One limit may have the least total and another the least room, so the two are taken apart.
    return HostMemory(total_bytes, max(0, min(available_bytes, total_bytes)))


def _process_limits() -> dict[str, int]:
    """Read soft limits by name; RLIM_INFINITY is -1, or near 2**64 on some systems."""
    return {name: resource.getrlimit(getattr(resource, name))[0] for name in PROCESS_LIMITS if hasattr(resource, name)}


def _process_sizes(proc: Path, limits: Mapping[str, int]) -> list[HostMemory]:
    sizes = []
    for name, limit_bytes in limits.items():
        if 0 <= limit_bytes < UNLIMITED_BYTES:
            used_kib = keyed_number(proc / "self/status", PROCESS_LIMITS.get(name, "VmRSS:")) or 0
            sizes.append(HostMemory(limit_bytes, limit_bytes - used_kib * 1024))
    return sizes
