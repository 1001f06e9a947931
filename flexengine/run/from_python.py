"""Training from a Python program: options as a value or as keywords, data as names or as objects."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from flexengine.metrics import EvalMetrics, StepMetrics
from flexengine.options.adapters import meant_by
from flexengine.options.option import options_of
from flexengine.options.other_names import translated_keywords
from flexengine.options.train_config import FINAL_FOLDER, TrainConfig
from flexengine.run.callbacks import Callback
from flexengine.run.given_data import place_of
from flexengine.run.trainer import train as run_training


class TrainResult(NamedTuple):
    """What a run came to. exit_status: 0 unless its model is not worth keeping or it was stopped.

    folder: that of the run. steps, evaluations: their metrics, in order.
    """

    exit_status: int
    folder: Path
    steps: tuple[StepMetrics, ...]
    evaluations: tuple[EvalMetrics, ...]

    @property
    def global_step(self) -> int:
        """The last step that was taken; 0 where none was."""
        return self.steps[-1].step if self.steps else 0

    @property
    def training_loss(self) -> float:
        """The mean loss of the steps, as transformers' Trainer tells it; NaN where none was taken."""
        return sum(step.loss for step in self.steps) / len(self.steps) if self.steps else float("nan")

    @property
    def model(self) -> Path | None:
        """The folder of the trained model; None where it was not saved."""
        folder = self.folder / FINAL_FOLDER
        return folder if self.exit_status == 0 and folder.is_dir() else None


class _Listener(Callback):
    """Keeps the metrics of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps: list[StepMetrics] = []
        self.evaluations: list[EvalMetrics] = []

    def on_start(self, options: dict[str, Any], num_steps: int, folder: Path) -> None:
        """Keep the folder, which --mode auto chooses."""
        self.folder = folder

    def on_step(self, metrics: StepMetrics) -> None:
        """Keep those of a step."""
        self.steps.append(metrics)

    def on_eval(self, metrics: EvalMetrics) -> None:
        """Keep those of an evaluation."""
        self.evaluations.append(metrics)


def train(
    config: TrainConfig | None = None,
    dataset: Iterable[Any] | str | os.PathLike | None = None,
    val_dataset: Iterable[Any] | str | os.PathLike | None = None,
    callbacks: Sequence[Callback] = (),
    **options: Any,
) -> TrainResult:
    """Run one training as `flexengine train` does; returns its metrics and folder.

    config: the options, or None where `options` has them all; options: fields of TrainConfig, which replace those of
    config, also by the names that other systems have for them. dataset, val_dataset: a name as in --dataset, or
    records: mappings of a schema that files have, texts, lists of token ids or messages, a data set of them, or a
    DataLoader, whose rows are packed again. They are read once.
    Raises ValueError for what a person can correct, TypeError for options that do not exist.
    """
    options = translated_keywords(options, options_of(TrainConfig).keys())
    given = {"dataset": dataset, "val_dataset": val_dataset}
    for name, value in given.items():
        if value is not None and config is not None and getattr(config, name):
            raise ValueError(f"{name} is given twice, in config and as an argument; give one of them")
    cache = options.get("data_cache", config.data_cache if config else None)
    options |= {name: (place_of(value, name, cache),) for name, value in given.items() if value is not None}
    config = TrainConfig(**meant_by(options)) if config is None else replace(config, **options)
    heard = _Listener(config.run_folder)
    status = run_training(config, callbacks=[heard, *callbacks])
    return TrainResult(status, heard.folder, tuple(heard.steps), tuple(heard.evaluations))
