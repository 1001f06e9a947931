"""What a person sets for a training run: one frozen dataclass, checked on construction; YAML and flags.

The field `max_seq_len` is the flag --max-seq-len and the key max_seq_len of config.yaml. What decides the plan comes
from `job.py`; this file adds data, length, learning rate and files. It imports nothing that loads torch, so that
`--help` is quick.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import yaml

from flexengine.options.adapters import meant_by
from flexengine.options.data import BUNDLED_DATA, TRIAL_STEPS, DataOptions
from flexengine.options.evaluation import EvaluationOptions
from flexengine.options.job import ADAPTER_LR, Job
from flexengine.options.keywords import takes_other_names
from flexengine.options.learning import DEFAULT_LR, LearningOptions
from flexengine.options.objective import ObjectiveOptions
from flexengine.options.option import FlagWords, Need, Option, Words, options_of
from flexengine.options.other_names import translated
from flexengine.options.recording import RecordingOptions
from flexengine.options.yaml_options import read_yaml
from flexengine.wording import hub_model

PLAN_FILE, TIMELINE_FILE, TRACE_FILE, LOG_FILE = "plan.json", "timeline.json", "trace.json", "train_log.jsonl"
"""What a run folder holds about its speed: the plan, the simulated step, the measured one (--trace), a line a step."""
CONFIG_FILE, FINAL_FOLDER, BEST_FOLDER = "config.yaml", "final", "best"
"""What was asked for, the trained model (--save), and the one with the lowest validation loss."""
EVAL_LOG_FILE = "eval_log.jsonl"
"""A line per evaluation, where there are validation data."""
DATA_FILE = "data.json"
"""What became of the records of each data set: how many are trained, left out or bad, and why."""

CHECKPOINTS_KEPT = 2
"""Checkpoints that are kept where --save-total-limit is not given."""

STEP_OPTIONS = ("trace_step", "profile_start_step", "profile_stop_step")
"""Options that name a step, counted from 1."""


@takes_other_names
@dataclass(frozen=True, kw_only=True)
class TrainConfig(ObjectiveOptions, DataOptions, LearningOptions, EvaluationOptions, RecordingOptions, Job):
    """Everything `train` can be asked: a job, and what only a run needs.

    Names that people bring from other systems, as learning_rate=, mean what they mean as flags.

    Raises ValueError naming the flag, the value and what is allowed.
    """

    words: ClassVar[Words] = FlagWords()

    model: Annotated[
        str,
        Option(
            "Hugging Face model folder, FILE.gguf, an id on the hub (ORG/NAME or ORG/NAME@REVISION, fetched into the"
            " hub's cache), or preset:NAME for a shipped config with random weights (required)"
        ),
    ] = ""

    mode: Annotated[
        Literal["full", "lora", "auto"] | None,
        Option(
            "what is trained: full = all weights, lora = low-rank adapters of the blocks' linear layers alone, auto ="
            " the first that fits of full, lora and lora beside a base in nf4, each with its predicted speed (default:"
            " full, or lora with --adapter)"
        ),
    ] = None
    yes: Annotated[
        bool,
        Option("take what --mode auto proposes", needs=(Need("mode", ("auto",), why="answers what --mode auto asks"),)),
    ] = False
    steps: Annotated[
        int | None,
        Option(
            "optimizer steps; without it --epochs decides",
            above=0,
            most=10**9,
            needs=(Need("epochs", absent=True, why="both set the length of the run"),),
        ),
    ] = None
    epochs: Annotated[
        float | None,
        Option(
            "passes over the data, when --steps is not given (default: 1)",
            above=0,
            most=10**4,
            needs=(Need("data_source", ("json_sft",), why="counts passes over records"),),
        ),
    ] = None

    max_skipped_steps: Annotated[
        int | None,
        Option(
            "end the run after this many steps in a row that train nothing, as their loss or gradient is not finite",
            above=0,
            most=10**9,
            zero_means="never",
        ),
    ] = 10
    gpus: Annotated[
        int,
        Option(
            "GPUs of this machine to train on, a process for each; --max-gpu-mem-gib is each one's, --max-host-mem-gib"
            " that of all together",
            above=0,
            most=1024,
        ),
    ] = 1
    replan: Annotated[
        bool,
        Option("plan again with the speeds that ten steps showed, within the memory already held; results stay"),
    ] = False
    output_dir: Annotated[
        str | None, Option("run folder (default: runs/NAME-MODE, by name of the model and --mode)")
    ] = None
    save: Annotated[bool, Option("write the trained model to final/ of the run folder, as Hugging Face does")] = False
    save_steps: Annotated[
        int | None,
        Option(
            "write a checkpoint to checkpoints/step-N of the run folder every so many steps and after the last one,"
            " while training goes on; --resume continues from it",
            above=0,
            most=10**9,
        ),
    ] = None
    save_total_limit: Annotated[
        int | None,
        Option(
            "checkpoints that are kept, the newest ones; 0 = all (default: 2)",
            least=0,
            most=10**9,
            needs=(Need(("save_steps", "save"), why="is about checkpoints"),),
        ),
    ] = None
    resume: Annotated[
        str | None,
        Option(
            "continue from a checkpoint, bit by bit, also within other budgets: auto = the newest of the run folder"
            " (from the beginning where there is none), or the folder of a run or of a checkpoint"
        ),
    ] = None
    overwrite: Annotated[
        bool,
        Option(
            "replace the run that the run folder holds: its log and checkpoints, and its model when a new one is saved",
            needs=(
                Need(
                    "resume",
                    absent=True,
                    why="contradict each other, as one replaces a run and the other continues it",
                ),
            ),
        ),
    ] = False
    dry_run: Annotated[bool, Option("print the plan and stop before anything is loaded")] = False
    plan_json: Annotated[str | None, Option("also write the plan to this JSON file")] = None
    verbose: Annotated[
        bool,
        Option("begin with the whole plan, the first sequence and other details, where five lines are printed (-v)"),
    ] = False
    logging: Annotated[
        Literal["debug", "info", "warning"],
        Option("how much is printed; debug adds tracebacks to errors, warning drops the line of each step"),
    ] = "info"

    def __post_init__(self) -> None:
        for option in options_of(TrainConfig).values():
            object.__setattr__(self, option.name, option.from_flag(getattr(self, option.name)))
        for name in (
            "dataset",
            "val_dataset",
            "columns",
            "sample_prompts",
            "report_to",
            "add_tokens",
            "labels",
            "rewards",
            "reward_weights",
        ):
            if isinstance(getattr(self, name), str):
                object.__setattr__(self, name, (getattr(self, name),))
        self.take_day()
        if self.objective == "reward" and self.task is None:
            object.__setattr__(self, "task", "sequence")  # a head with one output
            object.__setattr__(self, "problem_type", "regression")
        if isinstance(self.model, (str, Path)) and str(self.model).startswith("preset:"):
            object.__setattr__(self, "init", "random")
        super().__post_init__()
        if not self.model:
            raise ValueError(
                "--model is missing: give a Hugging Face model folder, an id on the hub (ORG/NAME), or preset:NAME"
            )
        self.check_objective(self.data_source, self.lora_dropout or 0.0)
        self.check_learning()
        self.check_evaluation()
        self.check_recording()
        if self.resume == "":
            raise ValueError("--resume is given an empty name; give auto, or the folder of a run or of a checkpoint")

    def with_data(self) -> TrainConfig:
        """The options of a run that trains: one without data tries the model on the bundled instructions, for a few
        steps unless told otherwise.
        """
        if self.dataset or self.data_source != "json_sft" or self.dry_run:
            return self
        self.check_has_preferences(self.dataset)
        has_length = self.steps is not None or self.epochs is not None
        return replace(self, dataset=(str(BUNDLED_DATA),), steps=self.steps if has_length else TRIAL_STEPS)

    def resolved(self) -> TrainConfig:
        """The options with what follows from others filled in, as far as no plan has to be made for that."""
        config = self.with_data()
        if self.mode == "auto":
            return config
        return replace(config, lr=self.base_lr, output_dir=str(self.run_folder))

    @property
    def base_lr(self) -> float:
        """The learning rate after warm-up: the one given, or the optimizer's; AdamW's is higher for adapters."""
        if self.lr is not None:
            return self.lr
        return ADAPTER_LR if self.mode == "lora" and self.optimizer == "adamw" else DEFAULT_LR[self.optimizer]

    @property
    def most_checkpoints(self) -> int | None:
        """How many checkpoints are kept; None for all."""
        return CHECKPOINTS_KEPT if self.save_total_limit is None else self.save_total_limit or None

    @property
    def makes_checkpoints(self) -> bool:
        """Whether a run that is asked to stop saves where it is."""
        return self.save or self.save_steps is not None

    @property
    def writes_files(self) -> bool:
        """Whether the run has a folder: of several ranks, those after the first one have none."""
        return self.output_dir != os.devnull

    def log_path(self, name: str) -> Path:
        """Where a log of the run is written."""
        return self.run_folder / name if self.writes_files else Path(os.devnull)

    @property
    def run_folder(self) -> Path:
        """output_dir, or runs/NAME-MODE from the model's name, of a model in a run's folder from that of the run."""
        if self.output_dir is not None:
            return Path(self.output_dir)
        if on_hub := hub_model(self.model):
            return Path("runs") / f"{on_hub['name']}-{self.mode}"
        place = Path(self.model.removeprefix("preset:")).resolve()
        name = f"{place.parent.name}-{place.name}" if place.name in (FINAL_FOLDER, BEST_FOLDER) else place.name
        return Path("runs") / f"{name}-{self.mode}"

    def to_yaml(self) -> str:
        """All options, one a line; `from_yaml` gives the config back equal."""
        options = options_of(TrainConfig).values()
        values = {option.name: option.to_flag(getattr(self, option.name)) for option in options}
        return yaml.safe_dump(values, sort_keys=False)

    @staticmethod
    def from_yaml(text: str) -> TrainConfig:
        """The config of `to_yaml`; options that are left out keep their defaults.

        Raises: ValueError as `options_from_yaml` and for values that no run can have.
        """
        return TrainConfig(**options_from_yaml(text, "config"))


def options_from_yaml(text: str, source: str) -> dict[str, Any]:
    """The options of `train` that a YAML file sets, keys with dashes or underscores, and what they mean.

    Raises ValueError when it is not YAML, not a mapping, or has a key that is no option; `source` names the file.
    """
    return meant_by(read_yaml(text, source, options_of(TrainConfig), translated))
