"""Host buffers, by native code and by Python: exact size, alignment, contents, release; page-locked ones on a GPU."""

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from flexengine.hardware.memory_usage import resident_bytes
from flexengine.native import PAGE_BYTES, allocate_host, host_memory, page_lock, pin_limit_bytes
from flexengine.native.host_memory import gpu_numa_node, numa_node_of_pci
from flexengine.native.page_lock import lock_pages

MIB = 2**20
HUGE_PAGE_BYTES = 2 * MIB
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(params=["native", "python"], autouse=True)
def path(request, monkeypatch):
    """Every test runs on both paths."""
    if request.param == "native":
        request.getfixturevalue("native_library")
    monkeypatch.setenv("FLEXENGINE_NATIVE", "1" if request.param == "native" else "0")
    return request.param


@pytest.mark.parametrize("num_bytes", [1, 63, PAGE_BYTES, PAGE_BYTES + 1, 5 * MIB + 12345])
def test_size_alignment_and_zeros(num_bytes: int):
    with allocate_host(num_bytes, page_locked=False) as buffer:
        assert buffer.tensor.dtype == torch.uint8
        assert buffer.tensor.shape == (num_bytes,)
        assert buffer.tensor.data_ptr() % 64 == 0
        assert num_bytes <= buffer.mapped_bytes < num_bytes + PAGE_BYTES
        assert buffer.mapped_bytes % PAGE_BYTES == 0
        assert not buffer.tensor.any()


def test_writes_survive_through_other_views():
    expected = torch.randint(256, (3 * MIB,), dtype=torch.uint8)
    with allocate_host(3 * MIB, page_locked=False) as buffer:
        buffer.tensor.view(torch.float32).copy_(expected.view(torch.float32))
        gc.collect()
        assert torch.equal(buffer.tensor, expected)


@pytest.mark.usefixtures("no_garbage")
def test_process_grows_by_what_was_asked_and_shrinks_on_close():
    num_bytes = 257 * MIB  # just above a power of two
    before_bytes = resident_bytes()
    buffer = allocate_host(num_bytes, page_locked=False)
    grown_bytes = resident_bytes() - before_bytes
    view = buffer.tensor[:1]
    buffer.close()
    left_bytes = resident_bytes() - before_bytes
    assert abs(grown_bytes - num_bytes) < 4 * MIB
    assert left_bytes < 8 * MIB  # even though a view is still held
    assert view.item() == 0


def test_close_twice_and_use_after():
    buffer = allocate_host(100, page_locked=False)
    buffer.close()
    buffer.close()
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.tensor


def test_addresses_are_given_back_with_the_last_view():
    num_bytes = 300 * MIB
    gc.collect()
    before_bytes = mapped_bytes()
    view = allocate_host(num_bytes, page_locked=False).tensor[MIB:]
    assert mapped_bytes() - before_bytes >= num_bytes
    del view
    gc.collect()
    assert mapped_bytes() - before_bytes < num_bytes // 2


def mapped_bytes():
    return int(Path("/proc/self/statm").read_text().split()[0]) * PAGE_BYTES


def test_large_buffers_begin_on_a_huge_page(path):
    if path == "python":
        pytest.skip("mmap chooses the address")
    for num_bytes in (HUGE_PAGE_BYTES, 5 * MIB + 1):
        with allocate_host(num_bytes, page_locked=False) as buffer:
            assert buffer.tensor.data_ptr() % HUGE_PAGE_BYTES == 0


def test_tensor_outlives_a_forgotten_buffer():
    tensor = allocate_host(MIB, page_locked=False).tensor
    gc.collect()
    tensor.fill_(7)
    assert tensor.sum().item() == 7 * MIB


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="num_bytes is 0"):
        allocate_host(0, page_locked=False)
    with pytest.raises(MemoryError, match="cannot map"):
        allocate_host(2**62, page_locked=False)


def test_a_numa_node_is_asked_for_and_a_missing_one_ignored(path):
    with allocate_host(MIB, page_locked=False, numa_node=0) as near:
        assert near.tensor.sum() == 0
        asked = near.numa_node
    with allocate_host(MIB, page_locked=False, numa_node=1000) as nowhere:
        assert nowhere.numa_node is None
        assert nowhere.tensor.sum() == 0
    if path == "python" or not os.path.exists("/sys/devices/system/node/node0"):
        assert asked is None
    else:
        assert asked in (0, None)  # None where a container forbids the system call


def test_the_node_of_a_pci_device(tmp_path):
    for address, node in [("0000:1b:00.0", "1\n"), ("0001:00:02.0", "-1\n"), ("0000:02:00.0", "?")]:
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(node)
    assert numa_node_of_pci(0, 0x1B, 0, tmp_path) == 1
    assert numa_node_of_pci(1, 0, 2, tmp_path) is None
    assert numa_node_of_pci(0, 2, 0, tmp_path) is None
    assert numa_node_of_pci(0, 3, 0, tmp_path) is None


FORKING = """
import ctypes, gc, mmap, os, sys
from flexengine.native import host_memory

host_memory.lock_pages = host_memory.unlock_pages = lambda *_: None  # page-locked as far as forks are concerned
num_bytes, pattern = 64 * mmap.PAGESIZE, b"child" * 1000
place = ctypes.CDLL(None).mmap
place.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
place.restype = ctypes.c_size_t

def fill_the_hole(start):
    fixed_noreplace = 0x100000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_noreplace
    assert place(start, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == start, "there is no hole"
    ctypes.memmove(start, pattern, len(pattern))

for way in ("close", "drop"):
    buffer = host_memory.HostBuffer(num_bytes, page_locked=True)
    start = buffer.tensor.data_ptr()
    child = os.fork()
    if child == 0:
        fill_the_hole(start)
        if way == "close":
            buffer.close()
        del buffer
        gc.collect()
        os._exit(0 if ctypes.string_at(start, len(pattern)) == pattern else 9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, way
    del buffer
    gc.collect()
    fill_the_hole(start)  # the parent has given the addresses back
"""


def test_a_forked_child_does_not_unmap_what_it_has_put_in_the_hole(path):
    """Page-locked ranges do not exist in a child, and its later mappings may lie there."""
    result = subprocess.run([sys.executable, "-c", FORKING], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


class SlowPinner:
    """A driver that locks pages only after `reading` was set, or refuses."""

    def __init__(self, refusal: str | None = None) -> None:
        self.refusal, self.reading, self.locked = refusal, threading.Event(), list[tuple[int, int]]()

    def register(self, address: int, num_bytes: int) -> str | None:
        assert self.reading.wait(10), "the body runs beside"
        self.locked += [] if self.refusal else [(address, num_bytes)]
        return self.refusal

    def unregister(self, address: int) -> None:
        self.locked = [one for one in self.locked if one[0] != address]


def test_pages_are_locked_beside_what_is_read_into_them(monkeypatch):
    pinner = SlowPinner()
    monkeypatch.setattr(page_lock, "cuda_pinner", lambda: pinner)
    buffer = host_memory.HostBuffer(MIB, page_locked=True, lock_now=False)
    address = buffer.tensor.data_ptr()
    with buffer.locking():
        assert not pinner.locked
        buffer.tensor.fill_(7)
        pinner.reading.set()
    assert pinner.locked == [(address, MIB)]
    with buffer.locking():  # once
        pass
    assert pinner.locked == [(address, MIB)]
    assert int(buffer.tensor.min()) == 7
    buffer.close()
    assert not pinner.locked


def test_a_refusal_to_lock_pages_is_told_when_they_were_read(monkeypatch):
    pinner = SlowPinner("out of memory")
    monkeypatch.setattr(page_lock, "cuda_pinner", lambda: pinner)
    buffer = host_memory.HostBuffer(MIB, page_locked=True, lock_now=False)
    with pytest.raises(MemoryError, match="cannot page-lock 1048576 bytes"), buffer.locking():
        pinner.reading.set()
    with pytest.raises(ValueError, match="closed"):
        _ = buffer.tensor


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_page_locking_needs_cuda():
    with pytest.raises(ValueError, match="needs a CUDA device"):
        allocate_host(MIB, page_locked=True)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("num_bytes", [1025 * MIB + 12345, 3 * 1024 * MIB + 1])
def test_page_locked_memory_is_what_was_asked(num_bytes):
    """Within 1%, where allocators that round to powers of two take up to twice as much."""
    allocate_host(MIB, page_locked=True).close()  # what the driver takes once
    before_bytes = resident_bytes()
    with allocate_host(num_bytes, page_locked=True) as buffer:
        assert buffer.tensor.is_pinned()
        assert abs((resident_bytes() - before_bytes) / num_bytes - 1) < 0.01


@pytest.mark.gpu
@needs_gpu
def test_page_locked_copies_on_a_stream():
    num_bytes = 33 * MIB + 5
    stream = torch.cuda.Stream()
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    with allocate_host(num_bytes, page_locked=True) as buffer:
        assert buffer.tensor.is_pinned()
        assert buffer.tensor[12345:].is_pinned()
        with torch.cuda.stream(stream):
            buffer.tensor.copy_(source, non_blocking=True)
            back = torch.empty_like(source)
            back.copy_(buffer.tensor, non_blocking=True)
        stream.synchronize()
        assert torch.equal(back, source)
        assert torch.equal(buffer.tensor, source.cpu())


@pytest.mark.gpu
@needs_gpu
def test_page_locked_size_is_exact_and_released():
    torch.zeros(1, device="cuda")  # CUDA's own host memory first
    num_bytes = 513 * MIB
    before_bytes = resident_bytes()
    buffer = allocate_host(num_bytes, page_locked=True)
    view = buffer.tensor[:16]
    assert abs(resident_bytes() - before_bytes - num_bytes) < num_bytes // 100
    buffer.close()
    buffer.close()
    assert not view.is_pinned()
    assert resident_bytes() - before_bytes < num_bytes // 100


@pytest.mark.gpu
@needs_gpu
def test_page_locked_memory_lies_near_the_gpu(path):
    with allocate_host(8 * MIB, page_locked=True) as buffer:
        assert buffer.numa_node in ((gpu_numa_node(), None) if path == "native" else (None,))


@pytest.mark.gpu
@needs_gpu
def test_a_refused_lock_names_what_was_possible_and_leaves_cuda_usable():
    """Registering a range a second time is refused by the driver, whatever its limits."""
    with allocate_host(4 * MIB, page_locked=True) as buffer:
        with pytest.raises(MemoryError, match=r"cannot page-lock 4194304 bytes .* \(CUDA error \d+\); 0 bytes"):
            lock_pages(buffer.tensor.data_ptr(), 4 * MIB)
        assert torch.ones(1000, device="cuda").sum().item() == 1000
        assert buffer.tensor.is_pinned()


@pytest.mark.gpu
@needs_gpu
def test_more_than_the_machine_has_is_refused_before_it_is_touched():
    with pytest.raises(MemoryError, match="RAM and the container's memory limit leave this process"):
        allocate_host(pin_limit_bytes() + 1, page_locked=True)


@pytest.mark.gpu
@needs_gpu
def test_forgotten_page_locked_buffer_is_unlocked():
    buffer = allocate_host(MIB, page_locked=True)
    view = buffer.tensor
    del buffer
    gc.collect()
    assert not view.is_pinned()
    assert view.fill_(3).sum().item() == 3 * MIB


BLOCKS = """
import torch
from flexengine.hardware.memory_usage import resident_bytes
from flexengine.native.host_memory import return_large_blocks

first = torch.ones(1 << 22)
del first  # from its freed block glibc would learn to keep such blocks
return_large_blocks()
before_bytes = resident_bytes()
blocks = [torch.ones(1 << 22) for _ in range(8)]
assert resident_bytes() - before_bytes > 7 << 24
del blocks[:-1]
assert resident_bytes() - before_bytes < 2 << 24
"""


@pytest.mark.parametrize("path", ["python"], indirect=True)  # both paths call the same
def test_freed_blocks_go_back_although_later_ones_are_in_use():
    """In a process of its own: holes that others have left in the heap would serve the blocks."""
    result = subprocess.run([sys.executable, "-c", BLOCKS], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
