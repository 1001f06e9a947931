"""Memory figures of this process: resident set, GPU bytes by NVML or by difference, peaks by sampling."""

import os
import time
from types import SimpleNamespace

import pytest
import torch

from flexengine.hardware import memory_usage
from flexengine.hardware.memory_usage import (
    GpuMemoryMeter,
    gpu_used_bytes,
    memory_peaks,
    peak_resident_bytes,
    resident_bytes,
)
from flexengine.native import allocate_host

MIB = 2**20
GIB = 2**30
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def test_resident_set_follows_an_allocation():
    before_bytes = resident_bytes()
    with allocate_host(64 * MIB, page_locked=False):
        during_bytes = resident_bytes()
        assert during_bytes - before_bytes == pytest.approx(64 * MIB, abs=4 * MIB)
        assert peak_resident_bytes() >= during_bytes - 4 * MIB
    assert 16 * MIB < resident_bytes() < during_bytes
    assert peak_resident_bytes() >= during_bytes - 4 * MIB


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
        deadline_s = time.monotonic() + 5
        while meter._peak_bytes < 900 and time.monotonic() < deadline_s:
            time.sleep(0.002)
        used[0] = 300
    assert (meter.used_bytes(), meter.peak_bytes()) == (300, 900)
    assert memory_peaks(meter) == (900, peak_resident_bytes())
    meter.start()
    assert meter.stop() == 300
    assert meter.stop() == 300
    with pytest.raises(ValueError, match="period_s"):
        GpuMemoryMeter(CPU, period_s=0)


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch):
    """An NVML with one device: `used` bytes on it, and `processes` it lists."""
    nvml = SimpleNamespace(NVMLError=RuntimeError, used=3 * GIB, processes=[])
    nvml.nvmlDeviceGetComputeRunningProcesses = lambda handle: nvml.processes
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=nvml.used)
    monkeypatch.setattr(memory_usage, "_nvml", lambda: nvml)
    monkeypatch.setattr(memory_usage, "_nvml_handle", lambda index: "handle")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    memory_usage._baseline_bytes.cache_clear()
    yield nvml
    memory_usage._baseline_bytes.cache_clear()


def test_listed_process_counts_as_listed(fake_nvml: SimpleNamespace):
    fake_nvml.processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=2 * GIB)]
    assert gpu_used_bytes(CUDA) == 2 * GIB


@pytest.mark.parametrize("own_figure", ["unlisted", "no figure"])
def test_other_processes_are_left_out_by_the_baseline(fake_nvml: SimpleNamespace, own_figure: str):
    meter = GpuMemoryMeter(CUDA)  # 3 GiB belong to others
    if own_figure == "no figure":
        fake_nvml.processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=None)]
    fake_nvml.used = 5 * GIB
    assert meter.used_bytes() == 2 * GIB
    fake_nvml.used = 4 * GIB
    assert (meter.used_bytes(), meter.peak_bytes()) == (1 * GIB, 2 * GIB)


def test_foreign_process_number_is_not_believed(fake_nvml: SimpleNamespace, monkeypatch: pytest.MonkeyPatch):
    gpu_used_bytes(CUDA)
    fake_nvml.processes = [SimpleNamespace(pid=os.getpid(), usedGpuMemory=MIB)]
    fake_nvml.used = 5 * GIB
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: 1 * GIB)
    assert gpu_used_bytes(CUDA) == 2 * GIB


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
