"""Memory limits of the control groups around this process: version 1, version 2 and both at once, with ancestors.

Sources: Linux admin guide, cgroup-v1/memory.rst and cgroup-v2.rst; proc(5), "/proc/pid/mountinfo".
"""

import re
from pathlib import Path
from typing import NamedTuple

from flexengine.native.proc_files import keyed_number, read_text

# Control groups write "max" (v2) or 2**63 less one page (v1) for no limit; nothing near that is a real one.
UNLIMITED_BYTES = 2**60


class HostMemory(NamedTuple):
    """Bytes this process could use on an idle machine, and bytes it can still take now."""

    total_bytes: int
    available_bytes: int


class _Files(NamedTuple):
    """Names of a group's files: limits and usage; and in memory.stat the keys of page cache and inherited limit."""

    limits: tuple[str, ...]
    usage: str
    cache_keys: tuple[str, ...]
    inherited_key: str


# memory.high is no hard limit, but a group above it is throttled until it has given memory back: a wall all the same.
_V2_FILES = _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"), "")
_V1_FILES = _Files(
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
    "hierarchical_memory_limit",
)


class _Mount(NamedTuple):
    """Where a hierarchy of control groups is mounted, and which of its groups lies at the mount point."""

    point: Path
    root: str


def control_group_sizes(proc: Path, cgroups: Path) -> list[HostMemory]:
    """Limit and remainder of every control group around this process that limits memory.

    `proc` is where that file system lies, `cgroups` where control groups are when /proc does not tell. On a machine
    with both versions (hybrid) the memory controller belongs to one of them, and the other has no such files.
    """
    sizes = []
    mounts_v2, mounts_v1 = _mounts(proc)
    for line in read_text(proc / "self/cgroup").splitlines():
        # "hierarchy:controllers:path"; hierarchy 0 without controllers is version 2.
        hierarchy, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if hierarchy == "0" and not controllers:
            for mount in mounts_v2 or [_Mount(cgroups, "/"), _Mount(cgroups / "unified", "/")]:
                sizes += _walk(mount, path, _V2_FILES)
        elif "memory" in controllers.split(","):
            for mount in mounts_v1 or [_Mount(cgroups / "memory", "/")]:
                sizes += _walk(mount, path, _V1_FILES)
    return sizes


def _mounts(proc: Path) -> tuple[list[_Mount], list[_Mount]]:
    """Mounts of version 2, and of version 1's memory controller.

    Lines read "id parent device root point options ... - type source super-options".
    """
    v2, v1 = [], []
    for line in read_text(proc / "self/mountinfo").splitlines():
        place, separator, kind = line.partition(" - ")
        words, kinds = place.split(), kind.split()
        if not separator or len(words) < 5 or not kinds:
            continue
        mount = _Mount(Path(_unescaped(words[4])), _unescaped(words[3]))
        if kinds[0] == "cgroup2":
            v2.append(mount)
        elif kinds[0] == "cgroup" and "memory" in kinds[-1].split(","):
            v1.append(mount)
    return v2, v1


def _walk(mount: _Mount, path: str, files: _Files) -> list[HostMemory]:
    """Sizes from the group at `path` up to the mount point: each ancestor limits the sum of its children.

    Inside a container the mount point may be the container's own group while `path` still counts from the host's root:
    what they have in common is left out, and where nothing of the rest exists the mount point alone is read.
    """
    sizes = []
    parts, root = _parts(path), _parts(mount.root)
    if parts[: len(root)] == root:
        parts = parts[len(root) :]
    for depth in range(len(parts), -1, -1):
        group = mount.point.joinpath(*parts[:depth])
        limits = [read_text(group / name).strip() for name in files.limits]
        found = [int(limit) for limit in limits if limit.isdigit()]
        if files.inherited_key:
            found.append(keyed_number(group / "memory.stat", files.inherited_key) or UNLIMITED_BYTES)
        limit_bytes = min(found, default=UNLIMITED_BYTES)
        if limit_bytes < UNLIMITED_BYTES:
            sizes.append(HostMemory(limit_bytes, max(0, limit_bytes - _used_bytes(group, files))))
    return sizes


def _used_bytes(group: Path, files: _Files) -> int:
    """What a group holds beyond page cache, which the kernel drops before it refuses memory.

    Files in RAM (tmpfs, shared memory) are not among the keys of the cache.
    """
    usage = read_text(group / files.usage).strip()
    cached_bytes = sum(keyed_number(group / "memory.stat", key) or 0 for key in files.cache_keys)
    return max(0, int(usage) - cached_bytes) if usage.isdigit() else 0


def _parts(path: str) -> list[str]:
    """Names of a group's path; ".." leads out of the namespace, where nothing can be read."""
    return [part for part in path.split("/") if part and part != ".."]


def _unescaped(text: str) -> str:
    r"""Blanks in mountinfo are written as octal codes such as \040."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)
