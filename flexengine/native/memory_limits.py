"""What limits the memory of this process: RAM and control groups (v1 and v2, with ancestors), and locks on pages.

Sources: proc(5); getrlimit(2); capabilities(7). Standard library only. Swap is never counted: an engine that swaps is
slower than one that is told no.
"""

import os
import resource
from pathlib import Path

from flexengine.native.control_groups import HostMemory, control_group_sizes
from flexengine.native.proc_files import keyed_number, keyed_word

PROC, CGROUPS = Path("/proc"), Path("/sys/fs/cgroup")  # where these file systems are mounted
_CAP_IPC_LOCK = 14  # bit in CapEff: may lock pages beyond RLIMIT_MEMLOCK


def host_memory_sizes(proc: Path = PROC, cgroups: Path = CGROUPS) -> list[HostMemory]:
    """RAM (MemTotal, MemAvailable), then each limit of a control group around this process; the least one binds.

    Never raises on a missing or unreadable file: that limit is taken as absent.
    """
    return [_ram(proc), *control_group_sizes(proc, cgroups)]


def pin_limit_bytes(proc: Path = PROC, cgroups: Path = CGROUPS) -> int:
    """The most bytes that CUDA could page-lock on an idle machine: locked pages count as RAM and cannot be swapped.

    RLIMIT_MEMLOCK is left out: the CUDA driver pins through its kernel module, which does not charge it.
    """
    return min(size.total_bytes for size in host_memory_sizes(proc, cgroups))


def memlock_limit_bytes(proc: Path = PROC) -> int | None:
    """RLIMIT_MEMLOCK in bytes, which binds mlock(2); None without a limit or with CAP_IPC_LOCK, which lifts it."""
    limit_bytes = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    capabilities = keyed_word(proc / "self/status", "CapEff:") or "0"
    if limit_bytes == resource.RLIM_INFINITY or int(capabilities, 16) >> _CAP_IPC_LOCK & 1:
        return None
    return limit_bytes


def _ram(proc: Path) -> HostMemory:
    total_kib = keyed_number(proc / "meminfo", "MemTotal:")
    available_kib = keyed_number(proc / "meminfo", "MemAvailable:")
    if total_kib is None:  # no Linux
        total_bytes = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
        return HostMemory(total_bytes, total_bytes)
    return HostMemory(total_kib * 1024, (total_kib if available_kib is None else available_kib) * 1024)
