"""Callbacks that send metrics to trackers, whose packages are imported only when asked for."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from flexengine.metrics import EvalMetrics, StepMetrics
from flexengine.options.evaluation import OF_ACCELERATE
from flexengine.run.callbacks import Callback

logger = logging.getLogger(__name__)

STEP_VALUES = ("loss", "grad_norm", "lr", "tokens_per_s", "step_s", "effective_tflops")
EVAL_VALUES = ("loss", "perplexity")
PROJECT = "flexengine"
"""The project that runs belong to unless WANDB_PROJECT or TRACKIO_PROJECT names another."""


def open_trackers(names: Sequence[str]) -> list[Callback]:
    """Make the callbacks that --report-to names. Raises ValueError, saying what to install, where one is missing."""
    for name in names:
        for package in (name, "accelerate") if name in OF_ACCELERATE else (name,):
            if importlib.util.find_spec(package) is None:
                raise ValueError(
                    f"--report-to {name} needs the package {package}; pip install {package}, or leave it out:"
                    " train_log.jsonl has every figure"
                )
    return [TRACKERS[name]() for name in names]


def _details(of: str, metrics: StepMetrics | EvalMetrics) -> dict[str, float]:
    """What an objective tells beside its loss, as far as it is a number."""
    return {f"{of}/{name}": value for name, value in metrics.details.items() if value is not None}


class Tracker(Callback, ABC):
    """Sends figures somewhere. What goes wrong there is said once, and the run goes on without it."""

    name = ""

    def __init__(self) -> None:
        self._works = True

    def on_start(self, options: dict[str, Any], num_steps: int, folder: Path) -> None:
        """Open the run there."""
        self._attempt(lambda: self.start(options, folder))

    def on_step(self, metrics: StepMetrics) -> None:
        """Send the figures of a step."""
        values = {f"train/{name}": getattr(metrics, name) for name in STEP_VALUES} | _details("train", metrics)
        self._attempt(lambda: self.send(values, metrics.step))

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Send the figures of an evaluation."""
        values = {f"eval/{name}": getattr(metrics, name) for name in EVAL_VALUES} | _details("eval", metrics)
        self._attempt(lambda: self.send(values, metrics.step))

    def on_end(self, exit_status: int | None) -> None:
        """Close the run there."""
        self._attempt(self.finish)

    def _attempt(self, call: Callable[[], None]) -> None:
        """Call something of another package, unless an earlier call of it failed."""
        if not self._works:
            return
        try:
            call()
        except (Exception, SystemExit) as error:  # whatever a tracker raises must not end a run
            self._works = False
            logger.warning("--report-to %s failed, and the run goes on without it: %s", self.name, error)

    @abstractmethod
    def start(self, options: dict[str, Any], folder: Path) -> None:
        """Open the run."""

    @abstractmethod
    def send(self, values: dict[str, float], step: int) -> None:
        """Send figures of one step."""

    @abstractmethod
    def finish(self) -> None:
        """Close the run."""


class WandbTracker(Tracker):
    """Sends figures to Weights & Biases, or to a folder with WANDB_MODE=offline."""

    name = "wandb"

    def start(self, options: dict[str, Any], folder: Path) -> None:
        """Open a run named like the run folder."""
        project = os.environ.get("WANDB_PROJECT", PROJECT)
        wandb = importlib.import_module("wandb")
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=options)

    def send(self, values: dict[str, float], step: int) -> None:
        """Log figures at a step."""
        self._run.log(values, step=step)

    def finish(self) -> None:
        """Upload what is left."""
        self._run.finish()


class TensorboardTracker(Tracker):
    """Writes event files to tensorboard/ of the run folder."""

    name = "tensorboard"

    def start(self, options: dict[str, Any], folder: Path) -> None:
        """Open the event file and write the options into it."""
        writer = importlib.import_module("torch.utils.tensorboard").SummaryWriter
        self._writer = writer(log_dir=str(folder / "tensorboard"))
        lines = [f"    {name}: {value}" for name, value in options.items()]
        self._writer.add_text("options", "\n".join(lines))

    def send(self, values: dict[str, float], step: int) -> None:
        """Write figures at a step."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def finish(self) -> None:
        """Write what is left."""
        self._writer.close()


class TrackioTracker(Tracker):
    """Sends figures to trackio's local dashboard."""

    name = "trackio"

    def start(self, options: dict[str, Any], folder: Path) -> None:
        """Open a run named like the run folder."""
        self._trackio = importlib.import_module("trackio")
        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        self._trackio.init(project=project, name=folder.name, config=options)

    def send(self, values: dict[str, float], step: int) -> None:
        """Log figures at a step."""
        self._trackio.log(values, step=step)

    def finish(self) -> None:
        """Store what is left."""
        self._trackio.finish()


class AccelerateTracker(Tracker):
    """Sends figures through a tracker of accelerate, whose own settings are those of the tracker's environment."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def start(self, options: dict[str, Any], folder: Path) -> None:
        """Open a run named like the run folder."""
        kind = importlib.import_module("accelerate.tracking").LOGGER_TYPE_TO_CLASS[self.name]
        # Its log asks for accelerate's state, which would wait for other ranks where the environment names some.
        with mock.patch.dict(os.environ):
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                os.environ.pop(name, None)
            importlib.import_module("accelerate.state").PartialState(cpu=True)
        place = {"logging_dir": str(folder)} if kind.requires_logging_directory else {}
        self._tracker = type(kind.__name__, (kind,), {"main_process_only": False})(folder.name, **place)
        self._tracker.start()
        plain = {
            name: value if isinstance(value, bool | int | float) else str(value) for name, value in options.items()
        }
        self._tracker.store_init_configuration(plain)

    def send(self, values: dict[str, float], step: int) -> None:
        """Log figures at a step."""
        self._tracker.log(values, step=step)

    def finish(self) -> None:
        """Send what is left."""
        self._tracker.finish()


TRACKERS: dict[str, Callable[[], Callback]] = {
    **{tracker.name: tracker for tracker in (WandbTracker, TensorboardTracker, TrackioTracker)},
    **{name: partial(AccelerateTracker, name) for name in OF_ACCELERATE},
}
