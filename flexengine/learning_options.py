"""The options of the optimizer and of its learning rate over a run, which `TrainConfig` has among its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from flexengine.options import Option

ScheduleName = Literal["warmup_cooldown", "linear", "cosine", "constant", "constant_with_warmup", "wsd", "inverse_sqrt"]
WITH_COOLDOWN = ("warmup_cooldown", "wsd")
"""Schedules that hold the full rate until --lr-cooldown-start-pct."""
WITHOUT_END = ("constant", "constant_with_warmup", "inverse_sqrt")
"""Schedules that know no last rate."""


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
        float, Option("linear warm-up over this fraction (0 to 1) of the steps", least=0, most=1)
    ] = 0.1
    lr_warmup_steps: Annotated[
        int | None, Option("linear warm-up over this many steps, in place of --lr-warmup-pct", least=0, most=10**9)
    ] = None
    lr_cooldown_start_pct: Annotated[
        float,
        Option(
            "the cosine cool-down of warmup_cooldown and wsd starts at this fraction (0 to 1) of the steps",
            least=0,
            most=1,
        ),
    ] = 0.8
    lr_final_pct: Annotated[
        float | None,
        Option(
            "learning rate at the end as a fraction (0 to 1) of --lr (default: 0.1 for warmup_cooldown, 0 for linear,"
            " cosine and wsd)",
            least=0,
            most=1,
        ),
    ] = None
    weight_decay: Annotated[
        float, Option("weight decay, decoupled from the gradient; not applied to norms and biases", least=0)
    ] = 0.0
    adam_beta1: Annotated[float, Option("decay of AdamW's mean of gradients", least=0, most=1)] = 0.9
    adam_beta2: Annotated[float, Option("decay of AdamW's mean of squared gradients", least=0, most=1)] = 0.95
    adam_eps: Annotated[float, Option("what AdamW adds to the root of the mean square", above=0, most=1)] = 1e-8

    def check_learning(self) -> None:
        """Raise ValueError for options of the schedule and of AdamW that contradict each other."""
        if (
            self.lr_warmup_steps is None
            and self.lr_schedule in WITH_COOLDOWN
            and self.lr_warmup_pct > self.lr_cooldown_start_pct
        ):
            raise ValueError(
                f"--lr-cooldown-start-pct {self.lr_cooldown_start_pct} is before the end of the warm-up,"
                f" --lr-warmup-pct {self.lr_warmup_pct}; raise the first or lower the second"
            )
        if self.lr_final_pct is not None and self.lr_schedule in WITHOUT_END:
            raise ValueError(
                f"--lr-final-pct {self.lr_final_pct} says where the learning rate ends, but --lr-schedule"
                f" {self.lr_schedule} ends nowhere; leave it out, or take linear, cosine or wsd"
            )
        for flag, beta in (("--adam-beta1", self.adam_beta1), ("--adam-beta2", self.adam_beta2)):
            if beta >= 1.0:
                raise ValueError(f"{flag} must be below 1, got {beta}; with 1 the mean would never change")
