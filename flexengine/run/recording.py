"""Records single steps on request: a measured timeline of one (--trace), a profile of some by nsys."""

from __future__ import annotations

from pathlib import Path

from tqdm import tqdm

from flexengine.api import PlannedRun
from flexengine.checkpoint.atomic import atomic_file
from flexengine.hardware.devices import choose_device
from flexengine.metrics import TIMED_STEP, StepMetrics
from flexengine.options.option import flag_of
from flexengine.options.train_config import STEP_OPTIONS, TRACE_FILE, TrainConfig
from flexengine.parallel.team import is_first
from flexengine.plan import Plan
from flexengine.reports.plan_data import measured_timeline
from flexengine.runtime.engine import Engine
from flexengine.runtime.profiling import ProfiledSteps
from flexengine.wording import going_on_without

REVIEWED_STEP = 3
"""The step whose wall time is compared with the prediction: time stamps slow the timed step before it."""

SEEN_STEPS = 10
"""Steps that --replan sees before it changes the plan, beside the first two: a single one may have been disturbed."""


def reviewed_step(plan: Plan) -> int:
    """Choose the step to compare with a plan's prediction.

    The end of a timed step waits for the updates of the CPU. The step after it therefore begins with less left to do
    than other steps, and is passed over when the CPU updates.
    """
    return REVIEWED_STEP + plan.updates_on_cpu


def replan_step(plan: Plan, num_steps: int) -> int | None:
    """Choose the step after which --replan changes plans; None where a run is too short: the reviewed step serves."""
    step = TIMED_STEP + SEEN_STEPS + plan.updates_on_cpu
    return step if step < num_steps else None


def check_recording(config: TrainConfig, num_steps: int) -> None:
    """Raise ValueError if a step to be traced or profiled never comes, or if a profile has no GPU."""
    for name in STEP_OPTIONS:
        step = getattr(config, name)
        if step is not None and step > num_steps:
            raise ValueError(
                f"{flag_of(name)} {step}: the run has {num_steps} steps; name one of them, or raise --steps"
            )
    if config.profiled_steps and choose_device(config.device).type == "cpu":
        raise ValueError(
            f"--profile-start-step {config.profile_start_step}: a profile by nsys is of an NVIDIA GPU, and this run is"
            f" on the CPU (--device {config.device}); --trace measures a step on either"
        )
    if isinstance(config.trace, str) and Path(config.trace).is_dir():
        raise ValueError(f"--trace {config.trace} is a folder; name a file in it")


def traced_step(
    config: TrainConfig, num_steps: int, reviewed: int = REVIEWED_STEP, replanned: int | None = None
) -> int | None:
    """Choose the step that --trace measures; None without --trace.

    The default is the step that is timed anyway. Others are avoided for these reasons: the profile disturbs a profiled
    step and is disturbed by the trace; the reviewed step must run without time stamps; and with --replan the plan that
    the run continues with comes after the step `replanned`, or after the reviewed one.
    """
    if not config.trace or config.trace_step is not None:
        return config.trace_step
    profiled = config.profiled_steps
    settled = (replanned or reviewed) + 1
    earliest = settled if config.replan else TIMED_STEP
    for step in (TIMED_STEP, settled, profiled.stop, profiled.stop + 1):
        if earliest <= step <= num_steps and step != reviewed and step not in profiled:
            return step
    return min(TIMED_STEP, num_steps)  # the run is too short for a better one


class Recorder:
    """Is called before and after every step of a run; does nothing for steps that nobody asked to see.

    start: steps that were taken before the run was resumed; the timed step is counted from there.
    """

    def __init__(
        self, config: TrainConfig, planned: PlannedRun, engine: Engine, num_steps: int, start: int = 0
    ) -> None:
        self.config, self.planned, self.engine = config, planned, engine
        self.timed_step = start + TIMED_STEP
        replanned = replan_step(planned.plan, num_steps - start) if config.replan else None
        self.replan_step = None if replanned is None else start + replanned
        self.retimed_step = None if self.replan_step is None else self.replan_step - 1
        self.traced_step = traced_step(config, num_steps - start, reviewed_step(planned.plan), replanned)
        if self.traced_step is not None and config.trace_step is None:
            self.traced_step += start
        self.profile = ProfiledSteps(engine.executor, config.profiled_steps) if config.profiled_steps else None

    def before_step(self, step: int) -> None:
        """Prepare a step, counted from 1."""
        if step == self.traced_step:
            self.engine.measure_next_step(keep_runs=True)
        if self.profile is not None:
            self.profile.before_step(step)

    def after_step(self, metrics: StepMetrics) -> None:
        """Finish a step, and write its trace if it has one. Call it before the plan may change."""
        if self.profile is not None:
            self.profile.after_step(metrics.step)
        if metrics.step == self.traced_step:
            if not self._write_trace(metrics):
                return
            show = f"`flexengine report {self.config.run_folder}` draws it beside the simulated one"
            # Through tqdm, so that the line does not cut the progress bar in two.
            tqdm.write(f"step {metrics.step} traced: {self._trace_paths()[-1]}; {show}")

    def close(self) -> None:
        """Stop a profile whose last step the run did not reach."""
        if self.profile is not None:
            self.profile.stop()

    def slowed_by(self, step: int) -> str:
        """Tell what makes a step slower than others; empty for an undisturbed one."""
        if step in (self.timed_step, self.retimed_step, self.traced_step):
            return "timing its commands"
        return "profiling" if step in self.config.profiled_steps else ""

    def disturbed(self, step: int) -> bool:
        """Tell whether a step's time is unusual: it was slowed, or the CPU updates and the step before was slowed."""
        by_cpu = self.planned.plan.updates_on_cpu
        return bool(self.slowed_by(step)) or (by_cpu and bool(self.slowed_by(step - 1)))

    def _trace_paths(self) -> list[Path]:
        """List the trace file in the run folder, which `report` reads, and the one that was named."""
        named = [Path(self.config.trace)] if isinstance(self.config.trace, str) else []
        return [self.config.run_folder / TRACE_FILE, *named]

    def _write_trace(self, metrics: StepMetrics) -> bool:
        """Write the trace where it belongs; tells whether it got there. A disk that takes none does not end the run.

        Of several ranks, the first one writes what all did.
        """
        about = {
            "what": f"one measured step: step {metrics.step} of the run",
            "hardware": f"{self.planned.profile.name} ({self.planned.device})",
            "device": self.planned.device.type,
            "step": metrics.step,
            "step_s": metrics.step_s,
            "tokens": metrics.num_tokens,
            "predicted_step_s": metrics.predicted_step_s,
        }
        runs, others = self.engine.take_timed_runs_of_ranks()
        if not is_first(self.planned.team):
            return False
        written = 0
        for path in self._trace_paths():
            with going_on_without("the trace"):
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(path, "w", encoding="utf-8") as file:
                    file.writelines(measured_timeline(self.engine.plan, runs, about, others))
                written += 1
        return written == len(self._trace_paths())
