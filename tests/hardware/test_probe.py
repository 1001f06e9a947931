"""The probe: plausible figures, and a cache that is used, keyed, refreshed and never in the way."""

import json
import logging
import os
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flexengine.hardware import cache
from flexengine.hardware import probe as probe_module
from flexengine.hardware.host_memory import HostMemory
from flexengine.hardware.machine_rates import MachineRates
from flexengine.hardware.measure.cpu import measure_cpu_machine, measure_cpu_model
from flexengine.hardware.measure.gpu import Rates
from flexengine.hardware.presets import preset
from flexengine.hardware.probe import check_multiplies, mend, probe, run_probe
from flexengine.hardware.profile import HardwareProfile, ProbeShape
from flexengine.native import library

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def rates_of(profile: HardwareProfile) -> Rates:
    """A profile as if it had been measured."""
    parts = (profile.matmul, profile.attention, profile.link, profile.host)
    return Rates(*parts, profile.memory.bytes_per_s, profile.curves)


def machine_of(profile: HardwareProfile) -> MachineRates:
    """What depends on no model in it."""
    own = profile.memory.bytes_per_s, profile.matmul.peak_flops_per_s, profile.matmul.sm_clock_mhz
    return MachineRates(profile.link, profile.host, *own, profile.curves)


@pytest.fixture
def machines(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Replaces the benchmarks of the CPU's machine by fixed figures; grows by the dtype of each measurement."""
    calls: list[torch.dtype] = []
    rates = machine_of(preset("cpu-test"))
    monkeypatch.setattr(probe_module, "measure_cpu_machine", lambda dtype, scale: (calls.append(dtype), rates)[1])
    return calls


@pytest.fixture
def measurements(machines: list[torch.dtype], monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """Replaces the CPU benchmarks by fixed figures; grows by the dtype of each model that is measured."""
    calls: list[torch.dtype] = []
    rates = rates_of(preset("cpu-test"))

    def measure(dtype: torch.dtype, shape: ProbeShape, machine: MachineRates, scale: float) -> Rates:
        assert scale > 0
        calls.append(dtype)
        torch.randn(3)
        return rates._replace(matmul=replace(rates.matmul, shape=shape[:2]), host=machine.host)

    monkeypatch.setattr(probe_module, "measure_cpu_model", measure)
    return calls


def assert_measured(profile: HardwareProfile, device_type: str) -> None:
    assert profile.source == "measured"
    assert profile.device_type == device_type
    assert 0 < profile.memory.host_base_bytes < profile.memory.host_total_bytes
    assert 0 < profile.memory.gpu_free_bytes <= profile.memory.gpu_total_bytes


def test_cpu_probe_is_valid():
    threads = torch.get_num_threads()
    profile = probe(
        CPU, torch.float32, ProbeShape(64, 96), seconds_budget=2.0, force=True
    )  # the profile checks every rate
    assert_measured(profile, "cpu")
    assert (profile.memory.gpu_context_bytes, profile.host.issue_s) == (0, 0.0)
    assert profile.matmul.shape == (256, 256)
    assert profile.matmul.flops_per_s[0][0] == 64
    assert [name for name, _ in profile.host.adamw_parameters_per_s][:3] == ["float32", "bfloat16", "int8"]
    names = [curve.name for curve in profile.curves]
    assert names[0] == "qkv_proj forward"
    assert names[-2:] == ["copy between arenas", "host memory copy"]
    assert profile.curves[-1].points[-1] == (threads, profile.host.bytes_per_s)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_what_is_measured_is_a_profile(dtype: torch.dtype):
    rates = measure_cpu_model(dtype, ProbeShape(256, 256), measure_cpu_machine(dtype, scale=0.02), scale=0.02)
    assert rates.profile("here", "cpu", 2, 2, 0, 2, 2, 1).host.launch_s > 0


def test_second_probe_reads_the_cache(measurements: list[torch.dtype]):
    first = probe(CPU, torch.float32)
    second = probe(CPU, torch.float32)
    assert measurements == [torch.float32]
    assert second.matmul.flops_per_s == first.matmul.flops_per_s
    probe(CPU, torch.float32, force=True)
    probe(CPU, torch.bfloat16)
    assert measurements == [torch.float32, torch.float32, torch.bfloat16]


def test_result_says_where_the_profile_comes_from(cache_folder: Path, measurements: list[torch.dtype]):
    first = run_probe(CPU, torch.float32)
    assert not first.from_cache
    assert first.path is not None
    assert first.path.parent == cache_folder / "profiles"
    an_hour_ago = time.time() - 3600
    os.utime(first.path, (an_hour_ago, an_hour_ago))
    second = run_probe(CPU, torch.float32)
    assert second.from_cache
    assert second.path == first.path
    assert second.age_s == pytest.approx(3600, abs=60)


def test_shapes_have_profiles_of_their_own_and_small_cpu_ones_share(
    cache_folder: Path, measurements: list[torch.dtype]
):
    assert probe(CPU, torch.float32, ProbeShape(64, 172)).matmul.shape == (256, 256)
    assert probe(CPU, torch.float32, ProbeShape(256, 200)).matmul.shape == (256, 256)
    assert len(measurements) == 1
    assert probe(CPU, torch.float32, ProbeShape(512, 1500)).matmul.shape == (512, 1024)
    assert probe(CPU, torch.float32).matmul.shape == (1024, 1024)
    assert len(measurements) == 3
    assert len(list((cache_folder / "profiles").iterdir())) == 3


def test_a_machine_is_measured_once_a_day_and_medians_count(
    cache_folder: Path,
    measurements: list[torch.dtype],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    found = [machine_of(preset("cpu-test").changed(launch_s=launch_s)) for launch_s in (1e-5, 3e-5, 9e-5)]
    monkeypatch.setattr(probe_module, "measure_cpu_machine", lambda dtype, scale: found.pop(0))
    with caplog.at_level(logging.INFO, logger="flexengine"):
        assert probe(CPU, torch.float32).host.launch_s == 1e-5
        assert probe(CPU, torch.float32, ProbeShape(256, 256)).host.launch_s == 1e-5
        assert (len(found), len(measurements)) == (2, 2)  # another model on the same machine
        (file,) = (cache_folder / "machines").iterdir()
        os.utime(file, (time.time() - 25 * 3600,) * 2)
        assert probe(CPU, torch.float32).host.launch_s == 1e-5  # as it was measured
        assert probe(CPU, torch.float32, ProbeShape(512, 512)).host.launch_s == pytest.approx(2e-5)
        assert probe(CPU, torch.float32, force=True).host.launch_s == 9e-5
    assert found == []
    assert "cannot be used" not in caplog.text


def test_key_holds_versions_threads_and_native_code(measurements: list[torch.dtype], monkeypatch: pytest.MonkeyPatch):
    other_native = object() if library.load() is None else None
    paths = {run_probe(CPU, torch.float32).path}
    for target, name, value in (
        (probe_module, "PROBE_VERSION", 99),
        (torch, "__version__", "9.9.9"),
        (torch, "get_num_threads", lambda: 77),
        (os, "cpu_count", lambda: 77),
        (library, "load", lambda: other_native),
    ):
        monkeypatch.setattr(target, name, value)
        paths.add(run_probe(CPU, torch.float32).path)
    assert len(paths) == 6


def test_random_numbers_go_on_as_if_nothing_had_been_measured(measurements: list[torch.dtype]):
    torch.manual_seed(5)
    expected = torch.randn(4)
    torch.manual_seed(5)
    probe(CPU, torch.float32)
    assert len(measurements) == 1
    assert torch.equal(torch.randn(4), expected)


def test_memory_is_read_anew(measurements: list[torch.dtype], monkeypatch: pytest.MonkeyPatch):
    probe(CPU, torch.float32)
    monkeypatch.setattr(probe_module, "host_memory", lambda: HostMemory(2**40, 2**39))
    monkeypatch.setattr(probe_module, "resident_bytes", lambda: 2**38)
    profile = probe(CPU, torch.float32)
    assert len(measurements) == 1
    assert profile.memory.host_base_bytes == 2**38
    assert (profile.memory.host_total_bytes, profile.memory.host_available_bytes) == (2**40, 2**39)
    assert (profile.memory.gpu_total_bytes, profile.memory.gpu_free_bytes) == (2**39, 2**39)


def test_what_libraries_will_still_take_is_not_free(measurements: list[torch.dtype], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(probe_module, "resident_bytes", lambda: 5000)
    assert probe(CPU, torch.float32).memory.host_base_bytes == 5000
    monkeypatch.setattr(probe_module, "host_memory", lambda: HostMemory(2**40, 2**39))
    monkeypatch.setattr(probe_module, "resident_bytes", lambda: 4000)
    profile = probe(CPU, torch.float32)
    assert (profile.memory.host_base_bytes, profile.memory.host_available_bytes) == (5000, 2**39 - 1000)


def test_data_of_one_run_is_not_remembered_for_the_next(measurements: list[torch.dtype], monkeypatch):
    """A process that holds 4000 bytes of data measures, and loads 500 of libraries; then one without data, and one with
    other data, read what it has remembered."""
    resident = [1000 + 4000]
    monkeypatch.setattr(probe_module, "_AT_IMPORT_BYTES", 1000)
    monkeypatch.setattr(probe_module, "_at_first_probe_bytes", {})
    monkeypatch.setattr(probe_module, "resident_bytes", lambda: resident[0])
    monkeypatch.setattr(probe_module, "host_memory", lambda: HostMemory(2**40, 2**39))
    measure = probe_module.measure_cpu_model

    def measure_and_load(*arguments: Any) -> Rates:
        resident[0] += 500
        return measure(*arguments)

    monkeypatch.setattr(probe_module, "measure_cpu_model", measure_and_load)
    assert probe(CPU, torch.float32).memory.host_base_bytes == 5500
    for data_bytes in (0, 700):
        monkeypatch.setattr(probe_module, "_at_first_probe_bytes", {})
        resident[0] = 1000 + data_bytes
        profile = probe(CPU, torch.float32)
        assert profile.memory.host_base_bytes == 1500 + data_bytes
        assert profile.memory.host_available_bytes == 2**39 - 500
    assert len(measurements) == 1


def test_a_process_that_finds_the_rates_needs_less_than_one_that_measured_a_gpu():
    measured = preset("h100").changed(host_base_bytes=3 * 2**30)
    later = probe_module._for_later(measured)
    assert measured.memory.host_base_bytes - later.memory.host_base_bytes == 96 * 2**20
    assert later.changed(host_base_bytes=measured.memory.host_base_bytes) == measured
    least = measured.changed(host_base_bytes=1)
    assert probe_module._for_later(least).memory.host_base_bytes == probe_module._AT_IMPORT_BYTES
    assert probe_module._for_later(preset("cpu-test")) == preset("cpu-test")


def test_a_fifo_in_place_of_the_cache_is_passed_over(measurements: list[torch.dtype], caplog: pytest.LogCaptureFixture):
    path = run_probe(CPU, torch.float32).path
    assert path is not None
    path.unlink()
    os.mkfifo(path)
    with caplog.at_level(logging.INFO, logger="flexengine"):
        probe(CPU, torch.float32)
    assert "it is no plain file" in caplog.text
    assert len(measurements) == 2
    assert run_probe(CPU, torch.float32).from_cache  # it took the FIFO's place


OLD_FORMAT = json.dumps({name: value for name, value in preset("cpu-test").to_dict().items() if name != "format"})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{}",
        b"not JSON",
        b"\x00",
        b"\xff\xfe",
        preset("h200").to_json()[:-40].encode(),
        OLD_FORMAT.encode(),
        b"[" * 200_000,
        json.dumps(preset("h200").to_dict() | {"h2d_bytes_per_s": 10**400}).encode(),
        json.dumps(preset("h200").to_dict() | {"cpu_adamw_parameters_per_s": [[["float32"], 1e9]]}).encode(),
        json.dumps(preset("h200").to_dict() | {"h2d_bytes_per_s": 1e-300}).encode(),
        json.dumps(preset("h200").to_dict() | {"matmul_flops_per_s": [[1024, 1e300]]}).encode(),
        json.dumps(preset("h200").to_dict() | {"copy_latency_s": 1e300}).encode(),
        preset("h200").to_json().encode() + b" " * cache.MAX_PROFILE_BYTES,
    ],
    ids=[
        "empty",
        "no fields",
        "no JSON",
        "zero",
        "no text",
        "truncated",
        "older",
        "deep",
        "huge",
        "list as dtype",
        "slow link",
        "fast products",
        "late copies",
        "long",
    ],
)
def test_spoilt_cache_is_measured_again_and_named_once(
    content: bytes, cache_folder: Path, measurements: list[torch.dtype], caplog: pytest.LogCaptureFixture
):
    probe(CPU, torch.float32)
    (file,) = (cache_folder / "profiles").iterdir()
    with caplog.at_level(logging.INFO, logger="flexengine"):
        for _ in range(2):
            file.write_bytes(content)
            probe(CPU, torch.float32)
    assert len(measurements) == 3
    assert HardwareProfile.from_json(file.read_text()).device_type == "cpu"
    said = [record for record in caplog.records if str(file) in record.getMessage()]
    assert [record.levelno for record in said] == [logging.INFO]


def test_unwritable_cache_is_no_error(tmp_path: Path, measurements: list[torch.dtype], monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "file" / "cache"))
    result = run_probe(CPU, torch.float32)
    assert_measured(result.profile, "cpu")
    assert (result.path, result.age_s) == (None, None)
    assert len(measurements) == 1


def test_failed_write_leaves_nothing_behind(
    cache_folder: Path, measurements: list[torch.dtype], monkeypatch: pytest.MonkeyPatch
):
    def full_disk(source: str, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full_disk)
    assert run_probe(CPU, torch.float32).path is None
    assert list((cache_folder / "profiles").iterdir()) == []


def test_user_without_a_home_is_measured_each_time(measurements: list[torch.dtype], monkeypatch: pytest.MonkeyPatch):
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("FLEXENGINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    for _ in range(2):
        assert run_probe(CPU, torch.float32).path is None
    assert len(measurements) == 2


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
    with pytest.raises(ValueError, match=r"shape is \(0, 64, 128\)"):
        probe(CPU, torch.float32, ProbeShape(0, 64))


@pytest.mark.gpu
@pytest.mark.alone  # it compares rates
@needs_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_cuda_probe(dtype: torch.dtype):
    device = torch.device("cuda")
    held_bytes = torch.cuda.memory_allocated()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    threads = torch.get_num_threads()
    profile = probe(device, dtype, ProbeShape(2048, 8192), seconds_budget=4.0, force=True)
    assert_measured(profile, "cuda")
    assert profile.matmul.shape == (2048, 8192)
    assert 2**26 < profile.memory.gpu_context_bytes < 4 * 2**30
    assert profile.matmul.rate(16384) > 0.9 * profile.matmul.rate(256)
    assert profile.matmul.rate(8192) < 1.25 * profile.matmul.peak_flops_per_s
    assert profile.link.h2d_duplex_bytes_per_s < 1.1 * profile.link.h2d_bytes_per_s
    assert 0 < profile.host.issue_s < 1e-3
    assert profile.host.launch_s < 1e-3
    assert torch.cuda.memory_allocated() <= held_bytes + 2**27  # cuBLAS workspaces stay
    assert torch.cuda.max_memory_reserved() <= held_bytes + 1.75 * 2**30
    assert torch.get_num_threads() == threads
    by_size = {curve.name: curve.points for curve in profile.curves}
    assert by_size["host to device, both busy"][-1] == (2**27, profile.link.h2d_duplex_bytes_per_s)
    assert by_size["device to host"][0][1] < by_size["device to host"][-1][1]
    result = run_probe(device, dtype, ProbeShape(2048, 8192))
    assert result.from_cache
    memory_names = ("gpu_free_bytes", "host_total_bytes", "host_available_bytes", "host_base_bytes")
    memory = {name: getattr(profile.memory, name) for name in memory_names}
    assert result.profile.changed(**memory) == profile


@pytest.mark.gpu
@needs_gpu
def test_cuda_probe_of_a_large_model_stays_in_its_memory():
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held_bytes = torch.cuda.memory_reserved()
    profile = probe(torch.device("cuda"), torch.bfloat16, ProbeShape(8192, 28672), seconds_budget=2.0, force=True)
    assert torch.cuda.max_memory_reserved() <= held_bytes + 1.75 * 2**30
    assert profile.matmul.flops_per_s[-1][0] >= 4096
    lengths = [length for length, _ in profile.attention.forward_flops_per_s]
    assert lengths == [512, 2048, 8192, 32768]


def test_a_remembered_profile_is_mended(measurements: list[torch.dtype], cache_folder: Path):
    shape = ProbeShape(300, 800)  # measured as one of few sizes, and found again by them
    faster = lambda profile: profile.changed(peak_matmul_flops_per_s=3e12)  # noqa: E731
    assert not mend(CPU, torch.float32, shape, faster), "nothing is remembered yet"
    probe(CPU, torch.float32, shape)
    assert mend(CPU, torch.float32, shape, faster)
    assert probe(CPU, torch.float32, shape).matmul.peak_flops_per_s == 3e12
    assert measurements == [torch.float32]


def test_a_busy_machine_is_said(measurements, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(probe_module, "busy_signs", lambda: "2.4 processes want each core")
    probe(CPU, torch.float32, ProbeShape(64, 96))
    assert "the machine is busy (2.4 processes want each core)" in caplog.text


@pytest.mark.parametrize(("capability", "dtype", "refused"), [
    ((7, 5), "bfloat16", True), ((7, 0), "bfloat16", True), ((8, 0), "bfloat16", False), ((7, 5), "float16", False),
])  # fmt: skip
def test_a_card_that_multiplies_no_bfloat16_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], dtype: str, refused: bool
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    if not refused:
        return check_multiplies(torch.device("cuda"), dtype, "compute")
    with pytest.raises(ValueError, match=r"Tesla T4 multiplies no bfloat16.* it has 7\.\d; give --dtype float16"):
        check_multiplies(torch.device("cuda"), dtype, "compute")
    check_multiplies(torch.device("cpu"), dtype, "compute")


@pytest.mark.parametrize(("capability", "cuda", "why"), [
    ((8, 6), "13.0", "on a card: it multiplies no FP8 operands; leave it out"),
    ((9, 0), "13.0", "a Blackwell card, of compute capability 10.0 or more, and this one has 9.0; leave it out"),
    ((12, 0), "12.8", "it takes a torch with torch.nn.functional.scaled_mm for CUDA 12.9 or more, and torch"),
    ((12, 0), "13.0", None),
])  # fmt: skip
def test_a_card_that_multiplies_no_such_operands_is_refused(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], cuda: str, why: str | None
):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for matmul in ("fp8",) if capability < (8, 9) else ("mxfp8", "nvfp4-gw-hp"):
        if why is None:
            check_multiplies(torch.device("cuda"), "bfloat16", matmul)
            continue
        with pytest.raises(ValueError, match=re.escape(f"matmul_dtype={matmul} on a card: ")) as found:
            check_multiplies(torch.device("cuda"), "bfloat16", matmul)
        assert why in str(found.value)
    check_multiplies(torch.device("cpu"), "bfloat16", "mxfp8")
