"""What holds a GPU's clocks down, as a driver without a GPU tells it: read, told by the doctor and by slow steps."""

from types import SimpleNamespace

import pytest
import torch

from flexengine.hardware import doctor, nvml
from flexengine.run.feedback import Reviewer


class FakeNvml:
    """A driver that tells the clocks of one GPU. bits: of what holds them down; is_old: it knows these by their former
    name alone."""

    NVMLError = RuntimeError
    NVML_CLOCK_SM = 1

    def __init__(self, bits: int, sm_mhz: int = 1095, is_old: bool = False, refuses: bool = False) -> None:
        self.bits, self.sm_mhz, self.is_old, self.refuses = bits, sm_mhz, is_old, refuses

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        if self.refuses:
            raise RuntimeError("not supported")
        return self.sm_mhz

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return 1980

    def nvmlDeviceGetCurrentClocksEventReasons(self, handle: int) -> int:  # noqa: N802
        if self.is_old:
            raise RuntimeError("function not found")
        return self.bits

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return self.bits


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch):
    """Puts such a driver under the one GPU of this machine."""

    def use(*arguments, **options) -> None:
        fake = FakeNvml(*arguments, **options)
        monkeypatch.setattr(nvml, "library", lambda: fake)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)

    return use


@pytest.mark.parametrize(
    ("bits", "told", "remedy"),
    [
        (0x0, "1095 of 1980 MHz", ""),
        (0x1, "1095 of 1980 MHz (idle)", ""),
        (0x4, "1095 of 1980 MHz, held by its power limit", "nvidia-smi -q -d POWER"),
        (0x20, "1095 of 1980 MHz, held by its temperature", "cool the GPU better"),
        (0x48, "1095 of 1980 MHz, held by a hardware slowdown and its temperature, in hardware", "power supply"),
        (0x80, "1095 of 1980 MHz, held by the power brake", "power supply"),
        (0x2, "1095 of 1980 MHz, held by application clocks", "nvidia-smi -rac"),
        (0x110, "1095 of 1980 MHz", ""),  # several GPUs that boost together, a display: nothing to do about
    ],
)
@pytest.mark.parametrize("is_old", [False, True], ids=["driver of today", "old driver"])
def test_the_doctor_tells_what_holds_clocks_down(driver, bits: int, told: str, remedy: str, is_old: bool):
    driver(bits, is_old=is_old)
    found = doctor._clocks()
    assert found.found == told
    assert (remedy in found.remedy) if remedy else found.remedy == ""


def test_a_driver_that_tells_nothing_is_no_error(driver):
    driver(0x4, refuses=True)
    assert nvml.gpu_clocks(0) is None
    assert doctor._clocks() == doctor.Finding("GPU clocks", "unknown: NVML tells nothing of them")


def slow_step(step: int, off: float) -> SimpleNamespace:
    return SimpleNamespace(step=step, off_prediction=off)


def reviewer(device: str = "cuda", disturbed: tuple[int, ...] = ()) -> SimpleNamespace:
    recorder = SimpleNamespace(disturbed=lambda step: step in disturbed)
    engine = SimpleNamespace(device=torch.device(device))
    return SimpleNamespace(engine=engine, recorder=recorder, timed_step=2, _told_of=set())


def test_a_slow_step_tells_once_what_holds_the_clock_down(driver, capsys):
    run = reviewer(disturbed=(3,))
    driver(0x4)
    for step in (slow_step(1, 3.0), slow_step(3, 0.4), slow_step(4, 0.05)):  # warms up, is timed, is as predicted
        Reviewer._tell_of_clocks(run, step)
    assert capsys.readouterr().out == ""
    for number in (5, 6):
        Reviewer._tell_of_clocks(run, slow_step(number, 0.41))
    assert capsys.readouterr().out == (
        "step 5: took 41% more than predicted, while the GPU's clock is 1095 of 1980 MHz, held by its power limit;"
        " `flexengine doctor` says what to do\n"
    )
    driver(0x24, sm_mhz=900)
    Reviewer._tell_of_clocks(run, slow_step(7, 0.8))
    assert "900 of 1980 MHz, held by its power limit and its temperature" in capsys.readouterr().out


@pytest.mark.parametrize(("bits", "device"), [(0x1, "cuda"), (0x0, "cuda"), (0x4, "cpu")])
def test_a_slow_step_says_nothing_of_clocks_that_are_not_held(driver, capsys, bits: int, device: str):
    driver(bits)
    Reviewer._tell_of_clocks(reviewer(device), slow_step(9, 0.5))
    assert capsys.readouterr().out == ""
