"""The options of a run that say how it is judged and followed, which `TrainConfig` has among its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from flexengine.options.option import Need, Option

OF_ACCELERATE = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "swanlab")
"""Trackers that accelerate.tracking speaks to."""
TRACKERS = ("wandb", "tensorboard", "trackio", *OF_ACCELERATE)
"""What --report-to knows; each is a package of its own."""
FOR_RECORDS = Need("data_source", ("json_sft",), why="is about records")
FOR_EVALUATION = Need(("val_dataset", "val_fraction"), why="needs data to evaluate on")


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Validation data, how often it is evaluated, and where metrics go."""

    val_dataset: Annotated[
        Sequence[str],
        Option(
            "records to evaluate on, which are not trained, in the form of --dataset",
            needs=(FOR_RECORDS, Need("val_fraction", absent=True, why="both name what is evaluated")),
        ),
    ] = ()
    val_fraction: Annotated[
        float | None,
        Option(
            "hold out this fraction (between 0 and 1) of the records of each --dataset and evaluate on them",
            above=0,
            most=0.9,
            needs=(FOR_RECORDS,),
        ),
    ] = None
    eval_steps: Annotated[
        int | None,
        Option(
            "evaluate after every N steps, and after the last one (default: ten times in a run)",
            above=0,
            most=10**9,
            needs=(FOR_EVALUATION,),
        ),
    ] = None
    early_stopping_patience: Annotated[
        int | None,
        Option(
            "end the run after this many evaluations in a row without a lower loss",
            above=0,
            most=10**9,
            needs=(FOR_EVALUATION,),
        ),
    ] = None
    sample_prompts: Annotated[
        Sequence[str],
        Option(
            "print answers to these prompts after each evaluation, without one at the end of the run",
            needs=(Need("data_source", ("json_sft",), why="needs a tokenizer, which random tokens do without"),),
        ),
    ] = ()
    report_to: Annotated[
        Sequence[str], Option(f"also send metrics to these, each a package of its own: {', '.join(TRACKERS)}")
    ] = ()

    @property
    def validates(self) -> bool:
        """Whether the run evaluates while it trains."""
        return bool(self.val_dataset) or self.val_fraction is not None

    def check_evaluation(self) -> None:
        """Raise ValueError for a tracker that is not known."""
        unknown = [name for name in self.report_to if name not in TRACKERS]
        if unknown:
            raise ValueError(f"--report-to {unknown[0]} is not known; choose {', '.join(TRACKERS)}")
