"""What a machine has and lacks for training: one finding each, with what to do. Nothing is changed or measured."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
import sys
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import torch

from flexengine.hardware.drive import place_of
from flexengine.hardware.drive_wear import wear_text
from flexengine.hardware.host_memory import host_memory
from flexengine.hardware.nvml import IDLE, gpu_clocks, has_nvlink, nvidia_driver_version
from flexengine.hardware.slurm import slurm_memory_bytes
from flexengine.native.library import DISABLING_VARIABLE, library_path, load
from flexengine.native.memory_limits import CGROUPS, PROC, host_memory_sizes, memlock_limit_bytes
from flexengine.native.threads import few_threads

GIB = 2**30
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LEAST_DISK_BYTES = 20 * GIB
"""Free bytes below which a model of 8B in 16 bits would not fit."""
IN_MEMORY = ("tmpfs", "ramfs")
LEAST_TORCH = (2, 11)
CLOCK_REMEDIES = {
    "application clocks": "nvidia-smi -rac gives a GPU its own clocks back",
    "its power limit": "more power makes it faster where its cooling allows: nvidia-smi -q -d POWER, then -pl",
    "a hardware slowdown": "look at the GPU's cooling, power supply and cables",
    "its temperature": "cool the GPU better",
    "its temperature, in hardware": "cool the GPU better",
    "the power brake": "look at the power supply and its cables",
}
"""What to do about what holds a GPU's clocks down, by the words of `nvml.SLOWED_BY`."""


class Finding(NamedTuple):
    """One thing that was looked at. remedy: what to do; empty where all is well."""

    name: str
    found: str
    remedy: str = ""


def findings(folder: Path, offload_dir: Path | None = None) -> list[Finding]:
    """Look at versions, GPU, driver, native code, cores, memory, locks, huge pages, the disk of `folder`, and the drive
    of another one if it is named."""
    software = (_versions, _bytecode, _gpu, _clocks, _kernels, _native)
    looks = (*software, _threads, _memory, _slurm, _page_locks, _huge_pages)
    drive = [] if offload_dir is None else [_drive(offload_dir)]
    return [*(look() for look in looks), _disk(folder), *drive, *_between_gpus(), *_between_nodes()]


def _versions() -> Finding:
    python = platform.python_version()
    found = f"Python {python}, torch {torch.__version__}, {platform.system()} {platform.release()}"
    release = tuple(int(part) for part in re.findall(r"\d+", torch.__version__)[:2])
    if sys.platform != "linux":
        return Finding("versions", found, "flexengine needs Linux; on Windows use WSL 2")
    needed = ".".join(map(str, LEAST_TORCH))
    return Finding("versions", found, "" if release >= LEAST_TORCH else f"install torch {needed} or newer")


def _bytecode() -> Finding:
    if Path(importlib.util.cache_from_source(torch.__file__)).exists():
        return Finding("bytecode", "kept on the disk")
    remedy = "set PYTHONPYCACHEPREFIX to a folder that can be written"
    if sys.dont_write_bytecode:
        remedy = f"unset PYTHONDONTWRITEBYTECODE, and where packages cannot be written {remedy}"
    return Finding("bytecode", "not kept: every start compiles Python's packages again, for 6 s or more", remedy)


def _gpu() -> Finding:
    driver = nvidia_driver_version()
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("GPU", f"{', '.join(names)}; driver {driver}")
    if torch.version.cuda is None:  # type: ignore[attr-defined]
        remedy = "runs use the CPU; for an NVIDIA GPU install a build of torch with CUDA (pytorch.org)"
        return Finding("GPU", "none: this torch was built without CUDA", remedy)
    if driver == "unknown":
        return Finding(
            "GPU", "none: no NVIDIA driver answers", "install the driver, or start the container with --gpus"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return Finding("GPU", f"none with CUDA_VISIBLE_DEVICES={visible!r}; driver {driver}", "unset or correct it")
    remedy = f"update the driver: this torch was built for CUDA {torch.version.cuda}"  # type: ignore[attr-defined]
    return Finding("GPU", f"none that torch can use; driver {driver}", remedy)


def _clocks() -> Finding:
    known = [clocks for index in range(torch.cuda.device_count()) if (clocks := gpu_clocks(index)) is not None]
    if not known:
        return Finding("GPU clocks", "unknown: NVML tells nothing of them")
    slowed_by = dict.fromkeys(reason for clocks in known for reason in clocks.slowed_by if reason != IDLE)
    remedies = dict.fromkeys(CLOCK_REMEDIES[reason] for reason in slowed_by)
    return Finding("GPU clocks", ", ".join(clocks.describe() for clocks in known), "; ".join(remedies))


def _between_gpus() -> list[Finding]:
    """How the GPUs of this node reach each other; nothing where there is one GPU and one rank."""
    gpus, ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if max(gpus, ranks) < 2:
        return []
    if gpus < ranks:
        remedy = "let every rank see all GPUs of its node (CUDA_VISIBLE_DEVICES); they share the host's memory at best"
        return [Finding("between GPUs", f"unknown: this process sees {gpus} of those of {ranks} ranks", remedy)]
    ways: dict[str, list[str]] = {}
    for first, second in combinations(range(gpus), 2):
        both = all(torch.cuda.can_device_access_peer(*pair) for pair in ((first, second), (second, first)))
        way = "NVLink" if both and has_nvlink(first, second) else "peer access over PCIe" if both else "the host alone"
        ways.setdefault(way, []).append(f"{first}-{second}")
    every = len(ways) == 1
    told = (f"{way} between {'all pairs' if every else ' '.join(pairs)} of {gpus}" for way, pairs in ways.items())
    alone = "the host alone" in ways
    remedy = "split goes through the host there; relay and stages need nothing between GPUs" if alone else ""
    return [Finding("between GPUs", ", ".join(told), remedy)]


def _between_nodes() -> list[Finding]:
    """Whether ranks of several nodes would know each other; nothing for those of one."""
    all_ranks, ranks = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if all_ranks == ranks:
        return []
    known = "FLEXENGINE_RUN_TOKEN" in os.environ
    found = f"{all_ranks // ranks} of {ranks} ranks; FLEXENGINE_RUN_TOKEN is {'set' if known else 'not set'}"
    remedy = "give all nodes the same random text: whoever reaches this machine could pass for a rank"
    return [Finding("nodes", found, "" if known else remedy)]


def _kernels() -> Finding:
    if importlib.util.find_spec("triton") is not None:
        return Finding("Triton", "installed")
    return Finding("Triton", "not installed", "a GPU needs it: pip install triton; the CPU does not")


def _native() -> Finding:
    if os.environ.get(DISABLING_VARIABLE, "1") == "0":
        return Finding("native library", f"switched off by {DISABLING_VARIABLE}=0", f"unset {DISABLING_VARIABLE}")
    if load() is not None:
        return Finding("native library", f"loaded ({library_path()})")
    compiler = next((name for name in ("c++", "g++", "clang++") if shutil.which(name)), None)
    first = "" if compiler else "install a C++17 compiler (g++), then "
    found = "not built" if library_path() is None else "cannot be loaded, or is of another version"
    remedy = f"{first}pip install -e . builds it; steps may take several times what is predicted without"
    return Finding("native library", found, remedy)


def _threads() -> Finding:
    return Finding("cores", f"{len(os.sched_getaffinity(0))} that this process may use", few_threads())


def _memory() -> Finding:
    memory, sizes = host_memory(), host_memory_sizes(PROC, CGROUPS)
    found = f"{memory.available_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB free"
    if memory.total_bytes < sizes[0].total_bytes:
        found += f", by a limit below the machine's {sizes[0].total_bytes / GIB:.1f} GiB"
        return Finding(
            "host memory", found, "raise the container's or job's memory limit, or ulimit, for larger models"
        )
    return Finding("host memory", found)


def _slurm() -> Finding:
    granted = slurm_memory_bytes()
    if granted is None:
        inside = "SLURM_JOB_ID" in os.environ
        return Finding("Slurm", "a job without a stated memory; all of the node's" if inside else "not in a job")
    return Finding("Slurm", f"the job may use {granted / GIB:.1f} GiB on this node, which bounds the default budget")


def _page_locks() -> Finding:
    limit = memlock_limit_bytes()
    if limit is None:
        return Finding("page locks", "no limit")
    remedy = "" if torch.cuda.is_available() else "only matters without CUDA's own locks: ulimit -l unlimited"
    return Finding(
        "page locks", f"RLIMIT_MEMLOCK is {limit / 2**20:.1f} MiB; CUDA's own locks are not bound by it", remedy
    )


def _huge_pages() -> Finding:
    try:
        chosen = re.findall(r"\[(\w+)\]", HUGE_PAGES.read_text())
    except OSError:
        return Finding("huge pages", "unknown: the kernel tells nothing of them")
    if chosen and chosen[0] != "never":
        return Finding("huge pages", f"transparent huge pages: {chosen[0]}")
    remedy = f"as root: echo madvise > {HUGE_PAGES}; locking host memory is slower without"
    return Finding("huge pages", "transparent huge pages are switched off", remedy)


def _drive(folder: Path) -> Finding:
    try:
        place = place_of(folder)
    except (OSError, ValueError) as error:
        return Finding("drive", f"none in {folder}", getattr(error, "strerror", None) or str(error))
    how = f"{'O_DIRECT' if place.direct else 'no O_DIRECT'}, wear: {wear_text(folder)}"
    gpus = max(torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    shared = f", which {gpus} GPUs share by relay or split" if gpus > 1 else ""
    found = f"{place.free_bytes / GIB:.1f} GiB free in {folder}{shared}, {place.kind} at {place.mounted}, {how}"
    if place.kind in IN_MEMORY:
        return Finding("drive", found, f"{place.kind} lies in memory: name a folder on a drive with --offload-dir")
    remedy = "" if place.direct else "all of it passes through the page cache: name a folder of a local drive"
    return Finding("drive", found, remedy)


def _disk(folder: Path) -> Finding:
    nearest = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(nearest).free
    few = "" if free >= LEAST_DISK_BYTES else "an 8B model takes 16 GB: free some, or choose another --output-dir"
    return Finding("disk", f"{free / GIB:.1f} GiB free in {nearest}", few)
