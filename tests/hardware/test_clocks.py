"""How a GPU runs, as a driver without a GPU tells it: read, watched, logged, told by the doctor and by slow steps."""

import json
from dataclasses import replace
from threading import Event
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from flexengine.hardware import doctor, nvml
from flexengine.hardware.card_watch import CardWatch, mean_mhz
from flexengine.hardware.nvml import IDLE, Clocks
from flexengine.metrics import CardHealth, StepMetrics, as_record, describe_slow_card
from flexengine.run.card_health import StepCard, health_of
from flexengine.run.feedback import Reviewer


class FakeNvml:
    """A driver that tells the clocks of one GPU. bits: of what holds them down; is_old: it knows these by their former
    name alone."""

    NVMLError = RuntimeError
    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

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

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return 312_500  # milliwatts

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        return 83

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


def step_on(card: CardHealth | None, step: int = 9, off: float = 0.41) -> StepMetrics:
    return replace(SLOW_STEP, step=step, step_s=1 + off, predicted_step_s=1.0, card=card)


SLOW_STEP = StepMetrics(1, 2.0, 1.0, 1e-4, 64, 1.0, 1.0, 64.0, 1.0, 1.0, 50.0, None, 0)
HOT = CardHealth(1110.0, 1980.0, 412.4, 87.0, ("its temperature",))


def reviewer(disturbed: tuple[int, ...] = ()) -> Reviewer:
    recorder = SimpleNamespace(disturbed=lambda step: step in disturbed)
    return cast(Reviewer, SimpleNamespace(recorder=recorder, timed_step=2, _told_of=set()))


def test_a_slow_step_tells_once_what_slows_the_card(capsys: pytest.CaptureFixture[str]):
    run = reviewer(disturbed=(3,))
    for step in (step_on(HOT, 1, 3.0), step_on(HOT, 3), step_on(HOT, 4, 0.05), step_on(None, 5)):
        Reviewer._tell_of_card(run, step)  # warms up, is timed, is as predicted, was too short to ask
    assert capsys.readouterr().out == ""
    for number in (6, 7):
        Reviewer._tell_of_card(run, step_on(HOT, number))
    assert capsys.readouterr().out == (
        "step 6: took 1.4 times what was predicted, at SM clock 1,110 MHz, where the probe saw 1,980; held by its"
        " temperature (87 C, 412 W); `flexengine doctor` says what to do\n"
    )
    Reviewer._tell_of_card(run, step_on(HOT._replace(slowed_by=("its power limit",)), 8))
    assert "held by its power limit" in capsys.readouterr().out


@pytest.mark.parametrize("mhz", [1980.0, 1800.0])
def test_a_slow_step_says_nothing_of_a_card_as_fast_as_ever(capsys: pytest.CaptureFixture[str], mhz: float):
    Reviewer._tell_of_card(reviewer(), step_on(CardHealth(mhz, 1980.0)))
    assert capsys.readouterr().out == ""


def test_health_sums_up_readings():
    readings = [Clocks(1200, 1980, ("its power limit",), 300.0, 80.0)]
    readings.append(Clocks(1000, 1980, ("its temperature", "its power limit"), None, 88.0))
    assert health_of(readings, 1755.0) == CardHealth(
        1100.0, 1755.0, 300.0, 88.0, ("its power limit", "its temperature")
    )
    assert health_of([Clocks(210, 1980, (IDLE,))]) == CardHealth(210.0)
    assert health_of([]) is None


def test_the_card_is_read_in_a_thread_until_it_is_closed(driver, monkeypatch: pytest.MonkeyPatch):
    driver(0x20)
    monkeypatch.setattr(CardWatch.__init__, "__defaults__", (1e-3, nvml.gpu_clocks))
    with StepCard(torch.device("cuda"), 1980.0) as card:
        found = None
        while found is None:
            found = card.health()
    assert found == CardHealth(1095.0, 1980.0, 312.5, 83.0, ("its temperature",))
    assert not card._thread.is_alive()


def test_moments_in_which_the_card_waits_are_left_out():
    told = iter([Clocks(0, 0, ())])  # asks whether the driver tells anything
    readings = [Clocks(210, 1980, (IDLE,)), Clocks(1200, 1980, ()), Clocks(1400, 1980, ())]
    read = Event()

    def answer(_: int) -> Clocks | None:
        if (first := next(told, None)) is not None:
            return first
        if not readings:
            read.set()
            return None
        return readings.pop(0)

    with CardWatch(torch.device("cuda"), 1e-4, answer) as card:
        assert read.wait(10)
        assert mean_mhz(card.take()) == 1300.0


@pytest.mark.parametrize(("device", "refuses"), [("cpu", False), ("cuda", True)])
def test_what_tells_nothing_is_not_watched(driver, device: str, refuses: bool):
    driver(0x20, refuses=refuses)
    with CardWatch(torch.device(device), every_s=1e-3) as card:
        assert not card._thread.is_alive()
        assert mean_mhz(card.take()) == 0.0


def test_the_log_holds_the_cards_figures_and_is_read_again():
    record = as_record(step_on(HOT))
    assert json.loads(json.dumps(record))["gpu_slowed_by"] == ["its temperature"]
    assert CardHealth.from_record(json.loads(json.dumps(record))) == HOT
    assert "gpu_clock_mhz" not in as_record(step_on(None))
    for damage in ({"gpu_clock_mhz": "fast"}, {"gpu_clock_mhz": float("nan")}, {"gpu_slowed_by": 3}):
        assert CardHealth.from_record(record | damage) is None


def test_a_run_counts_its_steps_on_a_slow_card():
    steps = [step_on(HOT, 3), step_on(HOT._replace(clock_mhz=900.0), 4), step_on(HOT._replace(clock_mhz=1900.0), 5)]
    found = describe_slow_card(steps)
    assert found.startswith(
        "The GPU ran slowly in 2 of 3 steps; in step 4: SM clock 900 MHz, where the probe saw 1,980"
    )
    assert describe_slow_card(steps[2:]) == describe_slow_card([step_on(None)]) == ""
