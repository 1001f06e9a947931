"""How the GPU of a run does in each of its steps, beside what the probe saw."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

import torch

from flexengine.hardware.card_watch import CardWatch, mean_mhz
from flexengine.hardware.nvml import IDLE, Clocks
from flexengine.metrics import CardHealth


class StepCard(CardWatch):
    """Watches the GPU of a run. usual_mhz: the clock that the probe saw, 0 = not known."""

    def __init__(self, device: torch.device, usual_mhz: float) -> None:
        self._usual_mhz = usual_mhz
        super().__init__(device)

    def health(self) -> CardHealth | None:
        """Tell how the GPU did since the last call; None where nothing was read."""
        return health_of(self.take(), self._usual_mhz)


def health_of(found: Sequence[Clocks], usual_mhz: float = 0.0) -> CardHealth | None:
    """Sum up readings: means of clock and power, the highest temperature, and all that held the clock down."""
    if not found:
        return None
    powers = [clocks.power_w for clocks in found if clocks.power_w is not None]
    celsius = [clocks.temperature_c for clocks in found if clocks.temperature_c is not None]
    reasons = dict.fromkeys(reason for clocks in found for reason in clocks.slowed_by if reason != IDLE)
    return CardHealth(
        clock_mhz=mean_mhz(found),
        usual_clock_mhz=usual_mhz,
        power_w=fmean(powers) if powers else None,
        temperature_c=max(celsius, default=None),
        slowed_by=tuple(reasons),
    )
