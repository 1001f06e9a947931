"""The record of a step in train_log.jsonl, and the formatting of all printed units.

Inside the package bytes are ints and times are seconds; GiB (2**30 bytes), ms and TFLOP/s (10**12) appear only in text
that this module makes.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Protocol, TypeGuard

from flexengine.wording import explain_os_error

logger = logging.getLogger(__name__)

GIB = 2**30
MIB = 2**20
TERA = 1e12
MOST_PENDING_BYTES = 16 * MIB
"""Log lines kept for a disk that takes none: some 40000 steps."""
TIMED_STEP = 2
"""The step whose commands every run times, which slows it. The first step loads kernels, so its times say little."""
RECENT_STEPS = 20
"""Steps by which the time that is left is estimated."""
FAR_OFF = 0.1
"""A step is told to be off its prediction from this share of it on, and a GPU's clock to be off the probe's."""
LARGEST = 1e30
"""Largest number in a log; a loss above it has diverged, and is drawn as one that is not finite."""


def format_bytes(num_bytes: float | None) -> str:
    """Format bytes as "23.10 GiB" (from 0.1 GiB on), "12.5 MiB" or "512 bytes"; None is "not measured"."""
    if num_bytes is None:
        return "not measured"
    if num_bytes >= 0.1 * GIB:
        return f"{num_bytes / GIB:.2f} GiB"
    if num_bytes >= 0.1 * MIB:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes:.0f} bytes"


def format_seconds(seconds: float) -> str:
    """Format seconds in the unit that a person would use: "2 h 05 min", "3 min 20 s", "7.25 s", "12.3 ms"."""
    if not math.isfinite(seconds):
        return str(seconds)
    if seconds >= 3600:
        minutes = round(seconds / 60)
        return f"{minutes // 60} h {minutes % 60:02d} min"
    # Limits lie where rounding would otherwise print one digit more: 99.95 s is "1 min 40 s", not "100 s".
    if seconds >= 99.95:
        return f"{round(seconds) // 60} min {round(seconds) % 60:02d} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{three_digits(seconds / size)} {unit}"
    return f"{three_digits(seconds / 1e-6)} us"


def format_tokens_per_s(tokens_per_s: float) -> str:
    """Format a rate as "12345 tokens/s", with one decimal below 100."""
    return f"{tokens_per_s:.0f} tokens/s" if tokens_per_s >= 99.95 else f"{tokens_per_s:.1f} tokens/s"


def format_tflops(flops_per_s: float) -> str:
    """Format FLOP/s as "412.3 TFLOP/s", with three significant digits below 100."""
    tflops = flops_per_s / TERA
    return f"{tflops:.1f} TFLOP/s" if tflops >= 99.95 else f"{three_digits(tflops)} TFLOP/s"


def three_digits(value: float) -> str:
    """A number to three digits, without an exponent."""
    value = float(f"{value:.3g}")  # before counting digits: 0.9999 is 1.00
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{min(max(digits, 0), 6)}f}"


class CardHealth(NamedTuple):
    """How a GPU ran in a step, as its driver told once a second: the clock of its multiprocessors in MHz.

    usual_clock_mhz: what the probe saw under load, 0 = not known. slowed_by: all that held the clock down. Power and
    temperature are None where the card does not tell them.
    """

    clock_mhz: float
    usual_clock_mhz: float = 0.0
    power_w: float | None = None
    temperature_c: float | None = None
    slowed_by: tuple[str, ...] = ()

    @property
    def is_slow(self) -> bool:
        """Whether the clock is far below what the probe saw, on which predictions rest."""
        return self.clock_mhz < (1 - FAR_OFF) * self.usual_clock_mhz

    def describe(self) -> str:
        """Say in words at which clock the card ran, and why it was no faster."""
        probe = f", where the probe saw {self.usual_clock_mhz:,.0f}" if self.usual_clock_mhz else ""
        held = f"; held by {' and '.join(self.slowed_by)}" if self.slowed_by else ""
        figures = ((self.temperature_c, "C"), (self.power_w, "W"))
        told = ", ".join(f"{value:.0f} {unit}" for value, unit in figures if value is not None)
        return f"SM clock {self.clock_mhz:,.0f} MHz{probe}{held}{f' ({told})' if told else ''}"

    def record(self) -> dict[str, Any]:
        """Figures by their keys in train_log.jsonl; `from_record` is the inverse."""
        return {f"gpu_{name}": value for name, value in self._asdict().items()}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> CardHealth | None:
        """Read what a line of train_log.jsonl says of the card; None where it says nothing that makes sense."""
        found = {name: record.get(f"gpu_{name}") for name in cls._fields}
        reasons = found.pop("slowed_by") or []
        numbers = {name: float(value) for name, value in found.items() if is_finite_number(value) and value >= 0}
        if "clock_mhz" not in numbers or not isinstance(reasons, list):
            return None
        return cls(**numbers, slowed_by=tuple(str(reason) for reason in reasons))


class StepOfCard(Protocol):
    """A step of a log or of a run, and how the GPU ran in it."""

    @property
    def step(self) -> int: ...

    @property
    def card(self) -> CardHealth | None: ...


def describe_slow_card(steps: Sequence[StepOfCard]) -> str:
    """Say in how many steps the GPU ran slower than when it was probed, and how slow at worst; empty where it did not.

    The slowest clock is told with its step.
    """
    slow = [(step.card, step.step) for step in steps if step.card is not None and step.card.is_slow]
    if not slow:
        return ""
    card, number = min(slow, key=lambda pair: pair[0].clock_mhz)
    return f"The GPU ran slowly in {len(slow)} of {len(steps)} steps; in step {number}: {card.describe()}"


def is_finite_number(value: object) -> TypeGuard[float]:
    """Tell whether a value of a JSON file is a number that can be drawn; JSON's true is a whole number to Python."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST


@dataclass(frozen=True)
class StepMetrics:
    """One line of train_log.jsonl; the fields are its keys, in this order.

    step: counted from 1. loss: mean over the target tokens of the step. grad_norm: before clipping. num_tokens: all
    tokens of the step, targets or not. effective_tflops counts forward and backward once, hardware_tflops also the
    recomputation, both in 10**12 FLOP/s. sol_pct: the least time that any schedule could take, as a percentage of
    step_s; NaN where no bound is known. Peaks: most bytes of the process so far; None if nothing measures them (the GPU
    of a CPU run). details: what the objective tells beside its loss, which are keys as the fields are. card: how the
    GPU ran, None where it does not tell or the step was too short to ask; its figures are keys, too.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    num_tokens: int
    step_s: float
    predicted_step_s: float
    tokens_per_s: float
    effective_tflops: float
    hardware_tflops: float
    sol_pct: float
    gpu_peak_bytes: int | None
    host_peak_bytes: int
    details: dict[str, float | None] = field(default_factory=dict)
    card: CardHealth | None = None

    @classmethod
    def measured(
        cls, *, step_s: float, num_tokens: int, model_flops: float, hardware_flops: float, speed_of_light_s: float,
        **others: Any,
    ) -> StepMetrics:  # fmt: skip
        """Compute the rates of a step from what it measured; others: fields that stay as they were measured.

        FLOPs are those of the whole step, step_s is above 0. speed_of_light_s: the least seconds that any schedule
        could take; 0 where no bound is known.
        """
        return cls(
            **others,
            num_tokens=num_tokens,
            step_s=step_s,
            tokens_per_s=num_tokens / step_s,
            effective_tflops=model_flops / step_s / TERA,
            hardware_tflops=hardware_flops / step_s / TERA,
            sol_pct=100.0 * speed_of_light_s / step_s if speed_of_light_s else math.nan,
        )

    @property
    def off_prediction(self) -> float:
        """What the step took beyond its prediction, as a share of it; below 0 for a faster step."""
        return self.step_s / self.predicted_step_s - 1 if self.predicted_step_s > 0 else 0.0

    def describe(self, num_steps: int, left_s: float = 0.0) -> str:
        """Describe the step in one line. left_s: seconds until the last step, where there are more."""
        width = len(str(num_steps))
        details = describe_details(self.details)
        light = "" if math.isnan(self.sol_pct) else "  above the predicted speed of light"
        if self.sol_pct < 100.5:  # more: a step smaller than planned for, or a profile too slow
            light = f"  {self.sol_pct:.0f}% of speed of light"
        predicted = format_seconds(self.predicted_step_s) if self.predicted_step_s else "nothing"
        if abs(self.off_prediction) > FAR_OFF:
            predicted += f": {self.off_prediction:+.0%}"
        return (
            f"step {self.step:>{width}}/{num_steps}  loss {self.loss:.4f}{details}  grad norm {self.grad_norm:.3f}"
            f"  lr {self.lr:.2e}  {format_seconds(self.step_s)} (predicted {predicted})"
            f"  {format_tokens_per_s(self.tokens_per_s)}  {format_tflops(self.effective_tflops * TERA)}"
            f"{light}{f'  {format_seconds(left_s)} left' if left_s else ''}"
        )

    def describe_shortly(self) -> str:
        """Describe the step beside a progress bar."""
        speed = format_tokens_per_s(self.tokens_per_s)
        return f"loss {self.loss:.4f}, norm {self.grad_norm:.3g}, lr {self.lr:.2e}, {speed}"


class Pace:
    """Estimates how long the steps that are left take, with whatever happens between steps: by the recent ones."""

    def __init__(self) -> None:
        """Order: before the first step."""
        self._ends_s: deque[float] = deque(maxlen=RECENT_STEPS)

    def left_s(self, num_left: int, predicted_s: float) -> float:
        """Seconds that `num_left` steps take. Order: when a step has ended; predicted_s: of a step, for the first."""
        self._ends_s.append(time.perf_counter())
        steps = len(self._ends_s) - 1
        step_s = (self._ends_s[-1] - self._ends_s[0]) / steps if steps else predicted_s
        return num_left * step_s


def describe_details(details: Mapping[str, float | None]) -> str:
    """Describe what an objective tells of answers, to follow its loss."""
    accuracy, margin, reward = (details.get(name) for name in ("reward_accuracy", "reward_margin", "reward"))
    parts = [] if accuracy is None else [f"accuracy {accuracy:.0%}"]
    parts += [] if reward is None else [f"reward {reward:.3f}"]
    parts += [] if margin is None else [f"margin {margin:.3f}"]
    return "".join(f", {part}" for part in parts)


def as_record(metrics: StepMetrics | EvalMetrics) -> dict[str, Any]:
    """Figures by name: the fields, and the details and the card's as if they were fields."""
    record = asdict(metrics)
    details, card = record.pop("details"), getattr(metrics, "card", None)
    record.pop("card", None)
    return record | details | (card.record() if card is not None else {})


@dataclass(frozen=True)
class EvalMetrics:
    """One line of eval_log.jsonl; the fields are its keys, in this order.

    step: steps taken so far. loss: mean over the target tokens of all validation data. perplexity: e to its power.
    is_best: no earlier evaluation of the run gave a lower loss. details: as of `StepMetrics`; the perplexity
    is NaN where the loss is none of tokens.
    """

    step: int
    loss: float
    perplexity: float
    num_target_tokens: int
    eval_s: float
    is_best: bool
    details: dict[str, float | None] = field(default_factory=dict)

    def describe(self) -> str:
        """Describe the evaluation in one line."""
        best = ", the lowest so far" if self.is_best else ""
        of_tokens = "" if math.isnan(self.perplexity) else f", perplexity {self.perplexity:.2f}"
        more = describe_details(self.details) if self.details else of_tokens
        return (
            f"validation after step {self.step}: loss {self.loss:.4f}{best}{more}"
            f" ({self.num_target_tokens} target tokens, {format_seconds(self.eval_s)})"
        )


class JsonlWriter:
    """Appends records to a JSON Lines file that starts empty; readers see each line when write returns.

    append: it goes on after the lines that are there.

    NaN and infinities become null, which every JSON reader understands. Where the disk takes no line, the run goes on:
    this is said once, and lines wait until the disk takes them again.
    """

    def __init__(self, path: Path, append: bool = False) -> None:
        self._path, self._pending, self._failing = path, b"", False
        self._file = path.open("ab" if append else "wb", buffering=0)

    def write(self, metrics: StepMetrics | EvalMetrics) -> None:
        record = {key: _finite_or_none(value) for key, value in as_record(metrics).items()}
        # Written line by line: a run that is killed leaves every step it took.
        self._pending += json.dumps(record, allow_nan=False).encode() + b"\n"
        self._write_pending()

    def _write_pending(self) -> None:
        try:
            while self._pending:
                # A full disk may take a part of a line, and the rest later.
                self._pending = self._pending[self._file.write(self._pending) :]
            self._failing = False
        except OSError as error:
            error.filename = error.filename or os.fspath(self._path)
            if not self._failing:
                logger.warning("the log of steps waits, and the run goes on: %s", explain_os_error(error))
            self._failing = True
            if len(self._pending) > MOST_PENDING_BYTES:
                self._pending = b""

    def __enter__(self) -> JsonlWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._write_pending()
        if self._pending:
            logger.warning("the last %d bytes of %s are missing", len(self._pending), self._path)
        try:
            self._file.close()
        except OSError as close_error:
            logger.warning("the log of steps may be incomplete: %s", explain_os_error(close_error))


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
