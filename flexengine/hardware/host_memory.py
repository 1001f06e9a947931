"""How much host memory this process may use: RAM, the container's limits and the process's own, whichever is least.

Sources: Linux admin guide, cgroup-v1/memory.rst and cgroup-v2.rst; proc(5); getrlimit(2). Standard library only.
"""

import os
import resource
from pathlib import Path
from typing import NamedTuple

# Control groups write "max" (v2) or 2**63 less one page (v1) for no limit; nothing near that is a real one.
UNLIMITED_BYTES = 2**60


class HostMemory(NamedTuple):
    """Bytes this process could use on an idle machine, and bytes it can still take now."""

    total_bytes: int
    available_bytes: int


def host_memory(
    proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup"), address_limit_bytes: int | None = None
) -> HostMemory:
    """The least of RAM (MemTotal, MemAvailable), control-group limits (v1 and v2, with ancestors) and RLIMIT_AS.

    `available_bytes` counts page cache as free, since the kernel drops it on demand, and leaves out what the process
    already has. `proc` and `cgroups` are where those file systems are mounted; `address_limit_bytes` replaces
    RLIMIT_AS. Never raises on a missing or unreadable file: that limit is taken as absent.
    """
    sizes = [_ram(proc), *_cgroup_sizes(proc, cgroups)]
    if address_limit_bytes is None:
        address_limit_bytes = resource.getrlimit(resource.RLIMIT_AS)[0]
    if 0 <= address_limit_bytes < UNLIMITED_BYTES:  # RLIM_INFINITY is -1
        mapped_bytes = _keyed_number(proc / "self/status", "VmSize:") or 0
        sizes.append(HostMemory(address_limit_bytes, address_limit_bytes - mapped_bytes * 1024))
    total_bytes = min(size.total_bytes for size in sizes)
    available_bytes = min(size.available_bytes for size in sizes)
    return HostMemory(total_bytes, max(0, min(available_bytes, total_bytes)))


def _ram(proc: Path) -> HostMemory:
    total_kib = _keyed_number(proc / "meminfo", "MemTotal:")
    available_kib = _keyed_number(proc / "meminfo", "MemAvailable:")
    if total_kib is None:  # no Linux
        total_bytes = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
        return HostMemory(total_bytes, total_bytes)
    return HostMemory(total_kib * 1024, (total_kib if available_kib is None else available_kib) * 1024)


def _cgroup_sizes(proc: Path, cgroups: Path) -> list[HostMemory]:
    """Limit and remainder of every control group around this process that limits memory."""
    sizes = []
    for line in _read(proc / "self/cgroup").splitlines():
        # "hierarchy:controllers:path"; hierarchy 0 without controllers is version 2.
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            sizes += _walk(cgroups, path, ("memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            sizes += _walk(cgroups / "memory", path, files)
    return sizes


def _walk(mount: Path, path: str, files: tuple[str, str, str]) -> list[HostMemory]:
    """Sizes from the group at `path` up to the mount point: each ancestor limits the sum of its children.

    Inside a container the path may be the host's; then only the mount point, which is the container, exists.
    `files` are the names of limit and usage, and the key of reclaimable page cache in memory.stat.
    """
    limit_file, usage_file, cache_key = files
    sizes = []
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        group = mount.joinpath(*parts[:depth])
        limit = _read(group / limit_file).strip()
        if not limit.isdigit() or int(limit) >= UNLIMITED_BYTES:
            continue
        usage = _read(group / usage_file).strip()
        cached_bytes = _keyed_number(group / "memory.stat", cache_key) or 0
        used_bytes = max(0, int(usage) - cached_bytes) if usage.isdigit() else 0
        sizes.append(HostMemory(int(limit), max(0, int(limit) - used_bytes)))
    return sizes


def _keyed_number(path: Path, key: str) -> int | None:
    """The number after `key` in a file of "key number ..." lines."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
