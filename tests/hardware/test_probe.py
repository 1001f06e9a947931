"""The probe: plausible figures, and a cache that is used, keyed, refreshed and never in the way."""

import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch

from flexengine.hardware import probe as probe_module
from flexengine.hardware.host_memory import HostMemory
from flexengine.hardware.measure import Rates, measure_cpu
from flexengine.hardware.presets import preset
from flexengine.hardware.probe import probe
from flexengine.hardware.profile import HardwareProfile

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measurements(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Replaces the CPU benchmarks by fixed figures; the list grows by the dtype of each measurement."""
    calls: list[torch.dtype] = []
    rates = Rates(*(getattr(preset("cpu-test"), name) for name in Rates._fields))

    def measure(dtype: torch.dtype, scale: float) -> Rates:
        assert scale > 0
        calls.append(dtype)
        return rates

    monkeypatch.setattr(probe_module, "measure_cpu", measure)
    return calls


def assert_measured(profile: HardwareProfile, device_type: str) -> None:
    assert profile.source == "measured"
    assert profile.device_type == device_type
    assert 0 < profile.host_base_bytes < profile.host_total_bytes
    assert 0 < profile.gpu_free_bytes <= profile.gpu_total_bytes


def test_cpu_probe_is_quick_and_valid():
    start_s = time.perf_counter()
    profile = probe(CPU, torch.float32, force=True)  # the profile checks that every rate is finite and positive
    assert time.perf_counter() - start_s < 3
    assert_measured(profile, "cpu")
    assert profile.gpu_context_bytes == 0
    assert len(profile.matmul_flops_per_s) == 6


def test_measured_fields_are_fields_of_the_profile():
    assert set(Rates._fields) <= {field.name for field in fields(HardwareProfile)}
    assert measure_cpu(torch.bfloat16, scale=0.05).launch_s > 0


def test_second_probe_reads_the_cache(measurements: list[torch.dtype]):
    first = probe(CPU, torch.float32)
    second = probe(CPU, torch.float32)
    assert measurements == [torch.float32]
    assert second.matmul_flops_per_s == first.matmul_flops_per_s
    probe(CPU, torch.float32, force=True)
    probe(CPU, torch.bfloat16)
    assert measurements == [torch.float32, torch.float32, torch.bfloat16]


def test_memory_is_read_anew(measurements: list[torch.dtype], monkeypatch: pytest.MonkeyPatch):
    probe(CPU, torch.float32)
    monkeypatch.setattr(probe_module, "host_memory", lambda: HostMemory(2**40, 2**39))
    profile = probe(CPU, torch.float32)
    assert len(measurements) == 1
    assert (profile.host_total_bytes, profile.host_available_bytes) == (2**40, 2**39)
    assert (profile.gpu_total_bytes, profile.gpu_free_bytes) == (2**39, 2**39)


@pytest.mark.parametrize("text", ["", "{}", "not JSON", "\x00"])
def test_spoilt_cache_is_measured_again(text: str, cache_folder: Path, measurements: list[torch.dtype]):
    probe(CPU, torch.float32)
    (file,) = (cache_folder / "profiles").iterdir()
    file.write_text(text)
    probe(CPU, torch.float32)
    assert len(measurements) == 2
    assert HardwareProfile.from_json(file.read_text()).device_type == "cpu"


def test_unwritable_cache_is_no_error(tmp_path: Path, measurements: list[torch.dtype], monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "file" / "cache"))
    assert_measured(probe(CPU, torch.float32), "cpu")
    assert len(measurements) == 1


def test_xdg_folder_is_used_without_own_one(
    tmp_path: Path, measurements: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("FLEXENGINE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    probe(CPU, torch.float32)
    assert len(list((tmp_path / "xdg" / "flexengine" / "profiles").glob("*.json"))) == 1


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="device is meta"):
        probe(torch.device("meta"), torch.float32)
    with pytest.raises(ValueError, match="seconds_budget is 0"):
        probe(CPU, torch.float32, seconds_budget=0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cuda_probe(dtype: torch.dtype):
    device = torch.device("cuda")
    held_bytes = torch.cuda.memory_allocated()
    profile = probe(device, dtype, seconds_budget=2.0, force=True)
    assert_measured(profile, "cuda")
    assert 2**26 < profile.gpu_context_bytes < 4 * 2**30
    assert profile.matmul_rate(16384) > 0.9 * profile.matmul_rate(256)
    assert profile.h2d_duplex_bytes_per_s < 1.1 * profile.h2d_bytes_per_s
    assert profile.launch_s < 1e-3
    assert torch.cuda.memory_allocated() <= held_bytes + 2**27  # cuBLAS workspaces stay
    start_s = time.perf_counter()
    again = probe(device, dtype)
    assert time.perf_counter() - start_s < 0.5
    memory_names = ("gpu_free_bytes", "host_total_bytes", "host_available_bytes", "host_base_bytes")
    assert replace(again, **{name: getattr(profile, name) for name in memory_names}) == profile
