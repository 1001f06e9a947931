"""The options of a run that say how it is judged and followed, which `TrainConfig` has among its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from flexengine.options import Option

TRACKERS = ("wandb", "tensorboard", "trackio")
"""What --report-to knows; each is a package of its own."""


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Validation data, how often it is evaluated, and where metrics go."""

    val_dataset: Annotated[
        Sequence[str], Option("records to evaluate on, which are not trained, in the form of --dataset")
    ] = ()
    val_fraction: Annotated[
        float | None,
        Option(
            "hold out this fraction (between 0 and 1) of the records of each --dataset and evaluate on them",
            above=0,
            most=0.9,
        ),
    ] = None
    eval_steps: Annotated[
        int | None,
        Option(
            "evaluate after every N steps, and after the last one (default: ten times in a run)", above=0, most=10**9
        ),
    ] = None
    early_stopping_patience: Annotated[
        int | None,
        Option("end the run after this many evaluations in a row without a lower loss", above=0, most=10**9),
    ] = None
    sample_prompts: Annotated[
        Sequence[str], Option("print answers to these prompts after each evaluation, without one at the end of the run")
    ] = ()
    report_to: Annotated[
        Sequence[str], Option(f"also send metrics to these, each a package of its own: {', '.join(TRACKERS)}")
    ] = ()

    @property
    def validates(self) -> bool:
        """Whether the run evaluates while it trains."""
        return bool(self.val_dataset) or self.val_fraction is not None

    def check_evaluation(self, has_records: bool) -> None:
        """Raise ValueError for options that contradict each other. has_records: data are records, not random tokens."""
        if self.val_dataset and self.val_fraction is not None:
            raise ValueError(
                f"--val-dataset {' '.join(self.val_dataset)} and --val-fraction {self.val_fraction} both name what is"
                " evaluated; give one"
            )
        if self.validates and not has_records:
            raise ValueError(
                "--data-source synthetic has nothing to evaluate on; leave --val-dataset and --val-fraction"
            )
        if self.sample_prompts and not has_records:
            raise ValueError("--data-source synthetic has no tokenizer for --sample-prompts; leave them out")
        for flag, value in (
            ("--eval-steps", self.eval_steps),
            ("--early-stopping-patience", self.early_stopping_patience),
        ):
            if value is not None and not self.validates:
                raise ValueError(f"{flag} {value} needs data to evaluate on; give --val-dataset or --val-fraction too")
        unknown = [name for name in self.report_to if name not in TRACKERS]
        if unknown:
            raise ValueError(f"--report-to {unknown[0]} is not known; choose {', '.join(TRACKERS)}")
