"""Dynamic loss scaling: float16 gradients are computed times a power of two, which follows from what overflowed.

Source: the rule of torch.amp.GradScaler with its defaults (Micikevicius et al. 2018, "Mixed Precision Training").
"""

from __future__ import annotations

import math
from dataclasses import dataclass

GROWTH, BACKOFF, INTERVAL = 2.0, 0.5, 2000
LARGEST, SMALLEST = 2.0**100, 2.0**-100
"""Bounds within which factors and what they multiply stay normal numbers in float32."""


@dataclass
class LossScale:
    """The scale of the next step, and how many steps in a row since its last change had finite gradients."""

    scale: float = 65536.0
    good_steps: int = 0

    def factor(self, loss_weight: float) -> float:
        """What gradients of a sum of losses are multiplied by in backward, a power of two.

        The scale is that of the mean loss, as elsewhere, and the sum has loss_weight times its gradient. Of that the
        largest power of two is left off, so that dividing by the factor is exact.
        """
        return self.scale / 2.0 ** (math.frexp(loss_weight)[1] - 1)

    def end_step(self, finite: bool) -> None:
        """Follow a step: halve the scale where a gradient was not finite, double it after INTERVAL steps that were."""
        if not finite:
            self.scale, self.good_steps = max(SMALLEST, self.scale * BACKOFF), 0
        elif self.good_steps + 1 < INTERVAL:
            self.good_steps += 1
        else:
            self.scale, self.good_steps = min(LARGEST, self.scale * GROWTH), 0
