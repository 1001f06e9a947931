"""What memory costs to map, lock and copy: as ranks share it, in huge pages and in small ones, and private memory."""

from __future__ import annotations

import mmap
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.rank_processes import told
from flexengine.native import allocate_host
from flexengine.native.page_lock import lock_pages, unlock_pages
from flexengine.native.shared_memory import map_shared

MADV_NOHUGEPAGE = 15


@contextmanager
def shared_pages(num_bytes: int) -> Iterator[Tensor]:
    """Memory as ranks share it."""
    fd = os.memfd_create("bench")
    try:
        os.truncate(fd, num_bytes)
        mapping = map_shared(fd, num_bytes, range(num_bytes))
    finally:
        os.close(fd)
    try:
        yield mapping.pages
    finally:
        mapping.detach()


@contextmanager
def small_shared_pages(num_bytes: int) -> Iterator[Tensor]:
    """The same in pages of 4 KiB."""
    fd = os.memfd_create("bench")
    try:
        os.truncate(fd, num_bytes)
        mapping = mmap.mmap(fd, num_bytes, flags=mmap.MAP_SHARED)
    finally:
        os.close(fd)
    mapping.madvise(MADV_NOHUGEPAGE)
    pages = torch.frombuffer(mapping, dtype=torch.uint8)
    pages.zero_()
    yield pages


@contextmanager
def private_pages(num_bytes: int) -> Iterator[Tensor]:
    """Memory of one rank."""
    with allocate_host(num_bytes, page_locked=False) as buffer:
        yield buffer.tensor


KINDS = {"shared": shared_pages, "shared, small pages": small_shared_pages, "private": private_pages}


def pages(device: torch.device, num_bytes: int) -> dict[str, Any]:
    """Rates of mapping and touching, of page-locking, and of copies to the GPU."""
    found: dict[str, Any] = {"bytes": num_bytes, "shmem_enabled": shmem_setting()}
    for kind, make in KINDS.items():
        start = time.perf_counter()
        with make(num_bytes) as memory:
            rates: dict[str, Any] = {"map_bytes_per_s": num_bytes / (time.perf_counter() - start)}
            rates["huge_bytes"] = huge_bytes(memory.data_ptr())
            if device.type == "cuda":
                rates |= locked_rates(memory, device)
            found[kind] = rates
            print(f"pages, {kind}: " + told(rates), flush=True)
            del memory
    return found


def locked_rates(memory: Tensor, device: torch.device) -> dict[str, float]:
    """Bytes per second of page-locking, of giving that back, and of copies of 256 MiB in both directions."""
    torch.cuda.synchronize(device)
    address, num_bytes = memory.data_ptr(), memory.numel()
    start = time.perf_counter()
    lock_pages(address, num_bytes)
    found = {"lock_bytes_per_s": num_bytes / (time.perf_counter() - start)}
    on_gpu = torch.empty(min(num_bytes, 2**28), dtype=torch.uint8, device=device)
    here = memory[: on_gpu.numel()]
    for name, target, source in (("h2d", on_gpu, here), ("d2h", here, on_gpu)):
        seconds = []
        for _ in range(5):
            torch.cuda.synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(device)
            seconds.append(time.perf_counter() - start)
        found[f"{name}_bytes_per_s"] = on_gpu.numel() / min(seconds)
    start = time.perf_counter()
    unlock_pages(address)
    return {**found, "unlock_bytes_per_s": num_bytes / (time.perf_counter() - start)}


def huge_bytes(address: int) -> int:
    """Bytes of huge pages in the mapping that an address lies in."""
    inside = found = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        span = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if span:
            inside = int(span[1], 16) <= address < int(span[2], 16)
        elif inside and line.startswith(("AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:")):
            found += 1024 * int(line.split()[1])
    return found


def shmem_setting() -> str:
    """Whether the kernel gives shared memory in huge pages: the setting in brackets."""
    try:
        return Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled").read_text().strip()
    except OSError:
        return "unknown"
