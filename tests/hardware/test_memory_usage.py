"""Memory figures of this process: resident set, GPU bytes by NVML or by difference, peaks by sampling."""

import os
import time
from types import SimpleNamespace

import pytest
import torch

from flexengine.hardware import memory_usage, nvml
from flexengine.hardware.memory_usage import (
    GpuMemoryMeter,
    forget_peak_resident,
    gpu_used_bytes,
    memory_peaks,
    note_baseline,
    peak_resident_bytes,
    release_unused_heap,
    resident_bytes,
)
from flexengine.native import allocate_host

MIB = 2**20
GIB = 2**30
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.usefixtures("no_garbage")
def test_resident_set_follows_an_allocation():
    before_bytes = resident_bytes()
    with allocate_host(64 * MIB, page_locked=False):
        during_bytes = resident_bytes()
        assert during_bytes - before_bytes == pytest.approx(64 * MIB, abs=4 * MIB)
        assert peak_resident_bytes() >= during_bytes - 4 * MIB
    assert 16 * MIB < resident_bytes() < during_bytes
    assert peak_resident_bytes() >= during_bytes - 4 * MIB


@pytest.mark.usefixtures("no_garbage")
def test_a_peak_is_forgotten_where_the_system_can():
    with allocate_host(64 * MIB, page_locked=False):
        during_bytes = resident_bytes()
    before_bytes = peak_resident_bytes()
    if forget_peak_resident():
        assert peak_resident_bytes() < during_bytes - 48 * MIB
    else:
        assert peak_resident_bytes() == before_bytes


@pytest.mark.usefixtures("no_garbage")
def test_fallbacks_agree_with_proc_status(monkeypatch: pytest.MonkeyPatch):
    now_bytes, peak_bytes = resident_bytes(), peak_resident_bytes()
    monkeypatch.setattr(memory_usage, "_status_bytes", lambda key: None)
    assert resident_bytes() == pytest.approx(now_bytes, abs=16 * MIB)
    assert peak_resident_bytes() == pytest.approx(peak_bytes, abs=16 * MIB)


def test_meter_without_a_source_reads_none():
    with GpuMemoryMeter(CPU) as meter:
        assert meter.used_bytes() is None
    assert meter.peak_bytes() is None
    assert memory_peaks(meter).gpu_bytes is None


def test_meter_samples_peaks_of_a_callable():
    used = [100]
    meter = GpuMemoryMeter(CPU, read_bytes=lambda: used[0], period_s=0.001)
    with meter:
        used[0] = 900
        deadline_s = time.monotonic() + 60
        while meter._peak_bytes < 900 and time.monotonic() < deadline_s:
            time.sleep(0.002)
        used[0] = 300
    assert (meter.used_bytes(), meter.peak_bytes()) == (300, 900)
    peaks = memory_peaks(meter)
    assert peaks.gpu_bytes == 900
    assert 0 < peaks.host_bytes <= peak_resident_bytes()
    meter.start()
    assert meter.stop() == 300
    assert meter.stop() == 300
    with pytest.raises(ValueError, match="period_s"):
        GpuMemoryMeter(CPU, period_s=0)


class FakeNvml(SimpleNamespace):
    """An NVML with two devices: `used` bytes on the first, twice that on the second, and `processes` on both."""

    NVMLError = RuntimeError

    def __init__(self) -> None:
        super().__init__(used=3 * GIB, processes=[])

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:  # noqa: N802
        return f"handle {index}"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        return f"handle {int(uuid.removeprefix('GPU-'))}"

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:  # noqa: N802
        return f"GPU-{handle.split()[1]}".encode()

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:  # noqa: N802
        return self.processes

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=self.used * (1 + int(handle.split()[1])))


def set_cuda_started(monkeypatch: pytest.MonkeyPatch, started: bool) -> None:
    """torch numbers its devices the other way round than NVML: its device i is the one with UUID 1 - i."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 1 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=str(1 - index)))


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch):
    fake = FakeNvml()
    monkeypatch.setattr(nvml, "library", lambda: fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    set_cuda_started(monkeypatch, False)
    nvml.baselines.cache_clear()
    yield fake
    nvml.baselines.cache_clear()


def test_listed_process_counts_as_listed(fake_nvml: FakeNvml):
    fake_nvml.processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=2 * GIB)]
    assert gpu_used_bytes(CUDA) == 2 * GIB


@pytest.mark.parametrize("own_figure", ["unlisted", "no figure"])
def test_other_processes_are_left_out_by_the_baseline(fake_nvml: FakeNvml, own_figure: str):
    meter = GpuMemoryMeter(CUDA)  # 3 GiB belong to others
    if own_figure == "no figure":
        fake_nvml.processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)]
    fake_nvml.used = 5 * GIB
    assert meter.used_bytes() == 2 * GIB
    fake_nvml.used = 4 * GIB
    assert (meter.used_bytes(), meter.peak_bytes()) == (1 * GIB, 2 * GIB)


def test_foreign_process_number_is_not_believed(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    note_baseline()
    fake_nvml.processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=MIB)]
    fake_nvml.used = 5 * GIB
    set_cuda_started(monkeypatch, True)
    assert gpu_used_bytes(torch.device("cuda", 1)) == 2 * GIB


def test_baseline_goes_by_uuid_and_not_by_number(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    note_baseline()  # 3 GiB belong to others on NVML's first device, 6 GiB on its second
    set_cuda_started(monkeypatch, True)
    fake_nvml.used = 4 * GIB
    assert gpu_used_bytes(torch.device("cuda", 0)) == 2 * GIB
    assert gpu_used_bytes(torch.device("cuda", 1)) == 1 * GIB


def test_baseline_after_cuda_has_started_is_unknown(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    set_cuda_started(monkeypatch, True)
    note_baseline()
    set_cuda_started(monkeypatch, False)
    note_baseline()  # too late: only the first call counts
    set_cuda_started(monkeypatch, True)
    assert gpu_used_bytes(torch.device("cuda", 1)) == 3 * GIB


def test_driver_that_will_not_tell_has_no_baseline(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    def refuse(handle: str) -> None:
        raise RuntimeError("not supported")

    monkeypatch.setattr(fake_nvml, "nvmlDeviceGetUUID", refuse)
    note_baseline()
    assert nvml.baselines() == {}


def test_visible_device_named_by_uuid_has_a_baseline(fake_nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-1")
    monkeypatch.setattr(fake_nvml, "nvmlDeviceGetCount", lambda: 0)
    meter = GpuMemoryMeter(CUDA)
    assert nvml.baselines() == {"GPU-1": 6 * GIB}
    fake_nvml.used = 5 * GIB
    assert meter.used_bytes() == 4 * GIB


def test_machine_without_nvml_notes_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(nvml, "library", lambda: None)
    nvml.baselines.cache_clear()
    note_baseline()
    assert nvml.baselines() == {}
    assert nvml.nvidia_driver_version() == "unknown"
    nvml.baselines.cache_clear()


@pytest.mark.usefixtures("no_garbage")
def test_freed_heap_goes_back_to_the_system():
    before_bytes = resident_bytes()
    blocks = [bytearray(60_000) for _ in range(1000)]  # below the size that the C library maps on its own
    kept = bytearray(60_000)
    del blocks
    release_unused_heap()
    assert resident_bytes() < before_bytes + 16 * MIB
    assert len(kept) == 60_000


def test_cpu_has_no_gpu_bytes():
    with pytest.raises(ValueError, match="device is cpu"):
        gpu_used_bytes(CPU)


@pytest.mark.gpu
@needs_gpu
def test_meter_sees_an_allocation_and_remembers_it():
    meter = GpuMemoryMeter(torch.device("cuda"))
    torch.zeros(1, device="cuda")
    torch.cuda.empty_cache()
    before_bytes = meter.used_bytes()
    assert before_bytes is not None
    with meter:
        block = torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")
        assert gpu_used_bytes(torch.device("cuda")) - before_bytes >= 510 * MIB
        time.sleep(0.2)
        del block
        torch.cuda.empty_cache()
    after_bytes, peak_bytes = meter.used_bytes(), meter.peak_bytes()
    assert after_bytes is not None
    assert peak_bytes is not None
    assert after_bytes - before_bytes < 64 * MIB
    assert peak_bytes - before_bytes >= 510 * MIB
