"""The options that say what a run trains its records for, which `TrainConfig` has among its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from flexengine.options.groups import GroupOptions
from flexengine.options.option import Need, Option

ObjectiveName = Literal["sft", "dpo", "ipo", "kto", "orpo", "simpo", "reward", "distill", "grpo"]
PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo")
FOR_PULLED = Need("objective", (*PREFERENCES, "distill", "grpo"), why="is a constant of other objectives")
FOR_LOGITS = Need("objective", ("distill", "grpo"), why="is about distillation and completions")
FOR_DISTILL = Need("objective", ("distill",), why="is about distillation")
FOR_KTO = Need("objective", ("kto",), why="weighs rated answers")


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions(GroupOptions):
    """The objective, and the constants of its loss; those that are not given are the objective's own."""

    objective: Annotated[
        ObjectiveName,
        Option(
            "what records are trained for: sft = their answers; of pairs of a chosen and a rejected answer, or of"
            " rankings, dpo, ipo, orpo, simpo or reward (a model that scores answers); of answers with a label kto;"
            " distill = what --teacher says of their answers; of prompts grpo, by completions that --rewards judge"
        ),
    ] = "sft"
    beta: Annotated[
        float | None,
        Option(
            "how strongly preferences pull (default: 0.1; of simpo 2.0); of distill the place between the forward"
            " divergence, 0, and the reverse one, 1 (default: 0.5); of grpo the factor on the divergence from the"
            " model beneath adapters (default: 0)",
            least=0,
            most=1e6,
            needs=(FOR_PULLED,),
        ),
    ] = None
    label_smoothing: Annotated[
        float | None,
        Option(
            "the share of pairs that is taken to be the wrong way round (default: 0)",
            least=0,
            most=0.5,
            needs=(Need("objective", ("dpo", "simpo"), why="doubts pairs"),),
        ),
    ] = None
    simpo_gamma: Annotated[
        float | None,
        Option(
            "the margin by which chosen answers are to be ahead (default: 1.0)",
            least=0,
            most=1e6,
            needs=(Need("objective", ("simpo",), why="is SimPO's margin"),),
        ),
    ] = None
    center_rewards_coefficient: Annotated[
        float | None,
        Option(
            "how strongly the rewards of a pair are drawn to a sum of 0 (default: not at all)",
            above=0,
            most=1e6,
            needs=(Need("objective", ("reward",), why="centers rewards"),),
        ),
    ] = None
    desirable_weight: Annotated[
        float | None, Option("factor on the loss of wanted answers (default: 1.0)", least=0, most=1e6, needs=(FOR_KTO,))
    ] = None
    undesirable_weight: Annotated[
        float | None,
        Option("factor on the loss of unwanted answers (default: 1.0)", least=0, most=1e6, needs=(FOR_KTO,)),
    ] = None

    teacher: Annotated[
        str | None,
        Option(
            "the model that distill learns from, of the same vocabulary: named as --model is; it runs before the model"
            " is loaded, within the same budgets",
            needs=(FOR_DISTILL,),
        ),
    ] = None
    teacher_top_k: Annotated[
        int | None,
        Option(
            "likeliest tokens of the teacher that are kept of every target token, beside the probability of all others"
            " together (default: 64)",
            above=0,
            most=2**16,
            needs=(FOR_DISTILL,),
        ),
    ] = None
    temperature: Annotated[
        float | None,
        Option(
            "divides the logits of teacher and model, or those that completions are drawn from (default: 1.0)",
            above=0,
            most=1e3,
            needs=(FOR_LOGITS,),
        ),
    ] = None
    cross_entropy_weight: Annotated[
        float | None,
        Option(
            "factor on the loss of answers, which distill adds (default: 0)", least=0, most=1e6, needs=(FOR_DISTILL,)
        ),
    ] = None

    @property
    def compares(self) -> bool:
        """Whether records are compared, rather than learned."""
        return self.objective in (*PREFERENCES, "reward")

    @property
    def updates_with_pass(self) -> int:
        """How many updates of grpo begin with a pass that finds log-probabilities.

        None where ratios are all 1 and nothing is a reference, nor where a temperature makes the loss one of logits.
        """
        return (
            self.updates_per_step if self.temperature in (None, 1.0) and (self.updates_per_step > 1 or self.beta) else 0
        )

    @property
    def objective_constants(self) -> dict[str, Any]:
        """The constants that were given, as the objective's class names them."""
        given = {
            "beta": self.beta,
            "label_smoothing": self.label_smoothing,
            "gamma": self.simpo_gamma,
            "center_coefficient": self.center_rewards_coefficient,
            "desirable_weight": self.desirable_weight,
            "undesirable_weight": self.undesirable_weight,
            "temperature": self.temperature,
            "cross_entropy_weight": self.cross_entropy_weight,
            "epsilon": self.epsilon,
            "epsilon_high": self.epsilon_high,
            "loss_type": self.loss_type,
            "max_completion_length": self.max_completion_length,
        }
        return {name: value for name, value in given.items() if value is not None}

    def check_objective(self, data_source: str, lora_dropout: float) -> None:
        """Raise ValueError for what the objective's loss cannot be computed of."""
        if self.objective == "distill":
            self._check_distillation(data_source)
        if self.objective == "grpo":
            self.check_groups()
        if not self.compares and self.objective != "grpo":
            return
        if self.beta == 0 and self.compares:
            raise ValueError(f"--beta 0 with --objective {self.objective} trains nothing; give a number above 0")
        if data_source != "json_sft":
            raise ValueError(
                f"--objective {self.objective} is about records, which --data-source {data_source} has none of; give"
                " --dataset"
            )
        if lora_dropout:
            raise ValueError(
                f"--lora-dropout {lora_dropout} with --objective {self.objective}: the loss is computed without"
                " dropout, and its gradient would be that of another model; leave --lora-dropout out"
            )

    def _check_distillation(self, data_source: str) -> None:
        if self.teacher is None:
            raise ValueError("--objective distill needs the model to learn from; give --teacher MODEL")
        if data_source != "json_sft":
            raise ValueError(
                f"--objective distill learns what a teacher says of answers, which --data-source {data_source} has none"
                " of; give --dataset"
            )
        if self.beta is not None and self.beta > 1:
            raise ValueError(
                f"--beta {self.beta:g} with --objective distill: it is a place between the forward divergence, 0, and"
                " the reverse one, 1; give a number from 0 to 1"
            )

    def check_has_preferences(self, dataset: object) -> None:
        """Raise ValueError for a run that compares answers and has none."""
        if (self.compares or self.objective == "grpo") and not dataset:
            what = "preferences" if self.compares else "prompts"
            raise ValueError(
                f"--objective {self.objective} needs records of {what}, and none come with the package; give --dataset"
            )
