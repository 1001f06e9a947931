"""Learning rate over a run: linear warm-up, constant, cosine cool-down, or a schedule of transformers by its name."""

import math
from dataclasses import dataclass

WARMUP_COOLDOWN = "warmup_cooldown"
INVERSE_SQRT_TIMESCALE = 10_000
"""Steps after which a rate without warm-up has fallen to 1 / sqrt(2); transformers' choice."""


@dataclass(frozen=True)
class LrSchedule:
    """The learning rate of each step of a run of num_steps.

    The "pct" values are fractions from 0 to 1: warm-up lasts the first warmup_pct of the steps, cool-down begins at
    cooldown_start_pct of them and reaches final_pct * lr; bounds become whole steps. final_pct: None is 0.1 for
    `warmup_cooldown` and 0 for the others. warmup_steps: replaces warmup_pct.
    name: `warmup_cooldown`, or what `transformers.get_scheduler` knows as linear, cosine, constant,
    constant_with_warmup, inverse_sqrt, and warmup_stable_decay (here wsd).
    Raises ValueError on values out of range, or a cool-down that begins inside the warm-up.
    """

    lr: float
    num_steps: int
    warmup_pct: float = 0.1
    cooldown_start_pct: float = 0.8
    final_pct: float | None = None
    name: str = WARMUP_COOLDOWN
    warmup_steps: int | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"a schedule needs at least 1 step, got {self.num_steps}")
        if self.name not in FACTORS:
            raise ValueError(f"schedule {self.name!r} is not known; choose {', '.join(FACTORS)}")
        cools_down = self.name in (WARMUP_COOLDOWN, "wsd") and self.warmup_steps is None
        warmup_end = self.cooldown_start_pct if cools_down else 1.0
        if not 0.0 <= self.warmup_pct <= warmup_end <= 1.0 or not 0.0 <= self.last_factor <= 1.0:
            raise ValueError(
                f"need 0 <= warmup_pct <= cooldown_start_pct <= 1 and 0 <= final_pct <= 1, got {self.warmup_pct},"
                f" {self.cooldown_start_pct}, {self.final_pct}"
            )

    @property
    def last_factor(self) -> float:
        """The share of the full rate that remains at the end."""
        if self.final_pct is not None:
            return self.final_pct
        return 0.1 if self.name == WARMUP_COOLDOWN else 0.0

    @property
    def num_warmup_steps(self) -> int:
        """Steps of warm-up; transformers rounds a share of the steps up."""
        if self.warmup_steps is not None:
            return min(self.warmup_steps, self.num_steps)
        share = self.warmup_pct * self.num_steps
        return round(share) if self.name == WARMUP_COOLDOWN else math.ceil(share)

    @property
    def cooldown_start_step(self) -> int:
        """The first step of the cool-down, never one of the warm-up."""
        return max(self.num_warmup_steps, round(self.cooldown_start_pct * self.num_steps))

    def at(self, step: int) -> float:
        """Learning rate of step 0..num_steps-1."""
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step {step} is outside the schedule's 0..{self.num_steps - 1}")
        return self.lr * FACTORS[self.name](self, step)


def _warmup_cooldown(schedule: LrSchedule, step: int) -> float:
    """Linear warm-up, constant, cosine cool-down.

    Warm-up of W steps: (step + 1) / W, so that its last step has the full rate and no step has rate 0.
    Cool-down from step C: with t = (step + 1 - C) / (num_steps - C), the share of it that has passed,
    final + (1 - final) * (1 + cos(pi t)) / 2. Source: the cosine of Loshchilov and Hutter, SGDR, 2017, equation 5,
    without restarts.
    """
    if step < schedule.num_warmup_steps:
        return (step + 1) / schedule.num_warmup_steps
    start = schedule.cooldown_start_step
    if step < start:
        return 1.0
    passed = (step + 1 - start) / (schedule.num_steps - start)
    return _cosine_between(passed, schedule.last_factor)


def _warmed_up(schedule: LrSchedule, step: int) -> float | None:
    """The factor of a step of warm-up as transformers counts, from 0; None after it."""
    return step / schedule.num_warmup_steps if step < schedule.num_warmup_steps else None


def _constant(schedule: LrSchedule, step: int) -> float:
    return 1.0


def _constant_with_warmup(schedule: LrSchedule, step: int) -> float:
    warm = _warmed_up(schedule, step)
    return 1.0 if warm is None else warm


def _linear(schedule: LrSchedule, step: int) -> float:
    """A straight line from the end of the warm-up to the step after the last."""
    warm = _warmed_up(schedule, step)
    if warm is not None:
        return warm
    left = (schedule.num_steps - step) / (schedule.num_steps - schedule.num_warmup_steps)
    return schedule.last_factor + (1.0 - schedule.last_factor) * left


def _cosine(schedule: LrSchedule, step: int) -> float:
    """Half a cosine from the end of the warm-up to the step after the last."""
    warm = _warmed_up(schedule, step)
    if warm is not None:
        return warm
    passed = (step - schedule.num_warmup_steps) / (schedule.num_steps - schedule.num_warmup_steps)
    return _cosine_between(passed, schedule.last_factor)


def _wsd(schedule: LrSchedule, step: int) -> float:
    """Warm-up from the last factor, constant, half a cosine to the step after the last."""
    warm, last = _warmed_up(schedule, step), schedule.last_factor
    if warm is not None:
        return last + (1.0 - last) * warm
    start = schedule.cooldown_start_step
    if step < start:
        return 1.0
    return _cosine_between((step - start) / (schedule.num_steps - start), last)


def _inverse_sqrt(schedule: LrSchedule, step: int) -> float:
    """One over the root of the steps, counted in units of the warm-up."""
    warm, timescale = _warmed_up(schedule, step), schedule.num_warmup_steps or INVERSE_SQRT_TIMESCALE
    if warm is not None:
        return warm
    return (timescale / (step + timescale - schedule.num_warmup_steps)) ** 0.5


def _cosine_between(passed: float, last: float) -> float:
    return last + (1.0 - last) * (1.0 + math.cos(math.pi * passed)) / 2.0


FACTORS = {
    WARMUP_COOLDOWN: _warmup_cooldown,
    "linear": _linear,
    "cosine": _cosine,
    "constant": _constant,
    "constant_with_warmup": _constant_with_warmup,
    "wsd": _wsd,
    "inverse_sqrt": _inverse_sqrt,
}
"""The share of the full rate at a step, by the name of the schedule."""
