"""The options of the optimizer and of its learning rate over a run, which `TrainConfig` has among its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from flexengine.options.option import Need, Option

ScheduleName = Literal["warmup_cooldown", "linear", "cosine", "constant", "constant_with_warmup", "wsd", "inverse_sqrt"]
WITH_COOLDOWN = ("warmup_cooldown", "wsd")
"""Schedules that hold the full rate until --lr-cooldown-start-pct."""
WITH_END = ("warmup_cooldown", "linear", "cosine", "wsd")
WITH_WARMUP = (*WITH_END, "constant_with_warmup", "inverse_sqrt")
FOR_WARMUP = Need("lr_schedule", WITH_WARMUP, why="is about the warm-up")
FOR_MOMENTS = (Need("optimizer", ("adamw", "muon"), why="is a constant of AdamW, which Muon has beside it"),)


DEFAULT_LR = {"adamw": 3e-5, "muon": 1e-3, "lion": 1e-5, "sgd": 1e-2}
"""Learning rates by optimizer where none is given."""


@dataclass(frozen=True, kw_only=True)
class LearningOptions:
    """Learning rate, schedule, and the constants of AdamW."""

    lr: Annotated[
        float | None,
        Option(
            "learning rate after warm-up (default: 3e-05); without it adapters take 1e-04, muon 1e-03, lion 1e-05, sgd"
            " 0.01",
            above=0,
        ),
    ] = None
    lr_schedule: Annotated[
        ScheduleName,
        Option(
            "learning rate over the run: warmup_cooldown = linear warm-up, constant, cosine cool-down; the others are"
            " the schedules that transformers has by these names (wsd is its warmup_stable_decay)"
        ),
    ] = "warmup_cooldown"
    lr_warmup_pct: Annotated[
        float | None,
        Option(
            "linear warm-up over this fraction (0 to 1) of the steps (default: 0.1)",
            least=0,
            most=1,
            needs=(FOR_WARMUP, Need("lr_warmup_steps", absent=True, why="both set the length of the warm-up")),
        ),
    ] = None
    lr_warmup_steps: Annotated[
        int | None,
        Option(
            "linear warm-up over this many steps, in place of --lr-warmup-pct",
            least=0,
            most=10**9,
            needs=(FOR_WARMUP,),
        ),
    ] = None
    lr_cooldown_start_pct: Annotated[
        float | None,
        Option(
            "the cosine cool-down of warmup_cooldown and wsd starts at this fraction (0 to 1) of the steps (default:"
            " 0.8)",
            least=0,
            most=1,
            needs=(Need("lr_schedule", WITH_COOLDOWN, why="is about the cool-down"),),
        ),
    ] = None
    lr_final_pct: Annotated[
        float | None,
        Option(
            "learning rate at the end as a fraction (0 to 1) of --lr (default: 0.1 for warmup_cooldown, 0 for linear,"
            " cosine and wsd)",
            least=0,
            most=1,
            needs=(Need("lr_schedule", WITH_END, why="says where the learning rate ends"),),
        ),
    ] = None
    weight_decay: Annotated[
        float, Option("weight decay, decoupled from the gradient; not applied to norms and biases", least=0)
    ] = 0.0
    adam_beta1: Annotated[
        float | None,
        Option("decay of AdamW's mean of gradients (default: 0.9)", least=0, most=1, needs=FOR_MOMENTS),
    ] = None
    adam_beta2: Annotated[
        float | None,
        Option("decay of AdamW's mean of squared gradients (default: 0.95)", least=0, most=1, needs=FOR_MOMENTS),
    ] = None
    adam_eps: Annotated[
        float | None,
        Option("what AdamW adds to the root of the mean square (default: 1e-08)", above=0, most=1, needs=FOR_MOMENTS),
    ] = None

    @property
    def warmup_pct(self) -> float:
        """The fraction of the steps that the warm-up takes, unless lr_warmup_steps is given."""
        return 0.1 if self.lr_warmup_pct is None else self.lr_warmup_pct

    @property
    def cooldown_start_pct(self) -> float:
        """The fraction of the steps after which the rate falls, in schedules that hold it until then."""
        return 0.8 if self.lr_cooldown_start_pct is None else self.lr_cooldown_start_pct

    def check_learning(self) -> None:
        """Raise ValueError for options of the schedule and of AdamW that contradict each other."""
        by_share = self.lr_warmup_steps is None and self.lr_schedule in WITH_COOLDOWN
        if by_share and self.warmup_pct > self.cooldown_start_pct:
            raise ValueError(
                f"--lr-cooldown-start-pct {self.cooldown_start_pct} is before the end of the warm-up, --lr-warmup-pct"
                f" {self.warmup_pct}; raise the first or lower the second"
            )
        for flag, beta in (("--adam-beta1", self.adam_beta1), ("--adam-beta2", self.adam_beta2)):
            if beta is not None and beta >= 1.0:
                raise ValueError(f"{flag} must be below 1, got {beta}; with 1 the mean would never change")
