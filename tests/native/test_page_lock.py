"""Page-locking over pinners that refuse: what the message says, that nothing stays locked; limits from fake trees."""

import ctypes
import resource
from pathlib import Path

import pytest
import torch

from flexengine.native import memory_limits, page_lock
from flexengine.native.page_lock import DriverPinner, check_pin_limit, lock_pages, unlock_pages

MIB, GIB = 2**20, 2**30
ADDRESS = 0x7000_0000


class LimitedPinner:
    """Registers up to `most_bytes` at once."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.registered: dict[int, int] = {}

    def register(self, address: int, num_bytes: int) -> str | None:
        if num_bytes > self.most_bytes:
            return "out of memory (CUDA error 2)"
        assert address not in self.registered
        self.registered[address] = num_bytes
        return None

    def unregister(self, address: int) -> None:
        del self.registered[address]


def test_locks_and_unlocks():
    pinner = LimitedPinner(8 * MIB)
    lock_pages(ADDRESS, 8 * MIB, pinner)
    assert pinner.registered == {ADDRESS: 8 * MIB}
    unlock_pages(ADDRESS, pinner)
    assert pinner.registered == {}


def test_a_refusal_names_what_was_asked_what_could_be_and_what_to_do(monkeypatch):
    monkeypatch.setattr(page_lock, "pin_limit_bytes", lambda: 64 * GIB)
    monkeypatch.setattr(page_lock, "memlock_limit_bytes", lambda: 8 * MIB)
    pinner = LimitedPinner(3 * GIB)
    with pytest.raises(MemoryError) as caught:
        lock_pages(ADDRESS, 10 * GIB, pinner)
    text = str(caught.value)
    assert "cannot page-lock 10737418240 bytes (10.00 GiB) of host memory: out of memory (CUDA error 2)" in text
    assert f"{5 * GIB // 2} bytes (2.50 GiB) of it could be locked" in text
    assert "RAM and container 68719476736 bytes (64.00 GiB); `ulimit -l` 8388608 bytes" in text
    assert "lower the host budget" in text
    assert pinner.registered == {}


def test_nothing_at_all_could_be_locked():
    with pytest.raises(MemoryError, match="; 0 bytes"):
        lock_pages(ADDRESS, GIB, LimitedPinner(1000))


def test_more_than_there_is_of_ram_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(page_lock, "pin_limit_bytes", lambda: GIB)
    check_pin_limit(GIB)
    with pytest.raises(
        MemoryError, match=r"cannot page-lock 1073741825 bytes .* 1073741824 bytes \(1.00 GiB\) at most"
    ):
        check_pin_limit(GIB + 1)


class FakeFunction:
    def __init__(self, run) -> None:
        self.run = run
        self.argtypes: tuple[type, ...] = ()

    def __call__(self, *arguments):
        assert len(arguments) == len(self.argtypes)
        return self.run(*arguments)


class FakeCuda:
    """The functions of libcuda.so.1 that DriverPinner calls; `status` is what registering returns."""

    def __init__(self, status: int, context: int) -> None:
        self.calls: list[tuple] = []
        self.cuMemHostRegister_v2 = FakeFunction(lambda *a: self.calls.append(("register", *a)) or status)
        self.cuMemHostUnregister = FakeFunction(lambda *a: self.calls.append(("unregister", *a)) or 713)
        self.cuCtxGetCurrent = FakeFunction(lambda out: setattr(out._obj, "value", context) or 0)
        self.cuGetErrorString = FakeFunction(lambda _, out: setattr(out._obj, "value", b"out of memory") or 0)


def test_driver_calls():
    cuda = FakeCuda(status=0, context=1)
    pinner = DriverPinner(cuda)
    assert pinner.register(ADDRESS, MIB) is None
    pinner.unregister(ADDRESS)  # its failure is nobody's concern
    assert cuda.calls == [("register", ADDRESS, MIB, 3), ("unregister", ADDRESS)]
    assert cuda.cuMemHostRegister_v2.argtypes == (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint)
    assert DriverPinner(FakeCuda(status=2, context=1)).register(ADDRESS, MIB) == "out of memory (CUDA error 2)"


def test_a_thread_without_a_context_gets_torchs(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: entered.append(True))
    DriverPinner(FakeCuda(status=0, context=0)).register(ADDRESS, MIB)
    assert entered == [True]


def test_the_pin_limit_is_the_least_of_ram_and_container(tmp_path: Path):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "cgroup/job").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: {64 * 2**20} kB\nMemAvailable: {2**20} kB\n")
    assert memory_limits.pin_limit_bytes(tmp_path / "proc", tmp_path / "cgroup") == 64 * GIB
    (tmp_path / "proc/self/cgroup").write_text("0::/job\n")
    (tmp_path / "cgroup/job/memory.max").write_text(f"{16 * GIB}\n")
    (tmp_path / "cgroup/job/memory.current").write_text(f"{15 * GIB}\n")
    assert memory_limits.pin_limit_bytes(tmp_path / "proc", tmp_path / "cgroup") == 16 * GIB


@pytest.mark.parametrize(
    ("limit", "capabilities", "expected"),
    [(8 * MIB, "0000000000000000", 8 * MIB), (8 * MIB, "0000000000004000", None), (resource.RLIM_INFINITY, "0", None)],
)
def test_the_lock_limit_and_the_capability_that_lifts_it(tmp_path, monkeypatch, limit, capabilities, expected):
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(f"Name:\tx\nCapEff:\t{capabilities}\n")
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert memory_limits.memlock_limit_bytes(tmp_path) == expected
