"""Learning rate over a run: linear warm-up, constant, cosine cool-down."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class LrSchedule:
    """The learning rate of each step of a run of num_steps.

    The "pct" values are fractions from 0 to 1: warm-up lasts the first warmup_pct of the steps, cool-down begins at
    cooldown_start_pct of them and reaches final_pct * lr at the last step; both bounds are rounded to whole steps.
    Raises ValueError on values out of range, or a cool-down that begins inside the warm-up.
    """

    lr: float
    num_steps: int
    warmup_pct: float = 0.1
    cooldown_start_pct: float = 0.8
    final_pct: float = 0.1

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"a schedule needs at least 1 step, got {self.num_steps}")
        if not 0.0 <= self.warmup_pct <= self.cooldown_start_pct <= 1.0 or not 0.0 <= self.final_pct <= 1.0:
            raise ValueError(
                f"need 0 <= warmup_pct <= cooldown_start_pct <= 1 and 0 <= final_pct <= 1, got {self.warmup_pct},"
                f" {self.cooldown_start_pct}, {self.final_pct}"
            )

    @property
    def num_warmup_steps(self) -> int:
        return round(self.warmup_pct * self.num_steps)

    @property
    def cooldown_start_step(self) -> int:
        return round(self.cooldown_start_pct * self.num_steps)

    def at(self, step: int) -> float:
        """Learning rate of step 0..num_steps-1.

        Warm-up of W steps: lr * (step + 1) / W, so that its last step has the full rate and no step has rate 0.
        Cool-down from step C: with t = (step + 1 - C) / (num_steps - C), the share of it that has passed,
        lr * (final + (1 - final) * (1 + cos(pi t)) / 2). Source: the cosine of Loshchilov and Hutter, SGDR, 2017,
        equation 5, without restarts.
        """
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step {step} is outside the schedule's 0..{self.num_steps - 1}")
        if step < self.num_warmup_steps:
            return self.lr * (step + 1) / self.num_warmup_steps
        start = self.cooldown_start_step
        if step < start:
            return self.lr
        passed = (step + 1 - start) / (self.num_steps - start)
        return self.lr * (self.final_pct + (1.0 - self.final_pct) * (1.0 + math.cos(math.pi * passed)) / 2.0)
