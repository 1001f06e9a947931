"""The options that say what a run trains its records for, which `TrainConfig` has among its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from flexengine.options.option import Need, Option

ObjectiveName = Literal["sft", "dpo", "ipo", "kto", "orpo", "simpo", "reward"]
PREFERENCES = ("dpo", "ipo", "kto", "orpo", "simpo")
FOR_PREFERENCES = Need("objective", PREFERENCES, why="is about preferences")
FOR_KTO = Need("objective", ("kto",), why="weighs rated answers")


@dataclass(frozen=True, kw_only=True)
class ObjectiveOptions:
    """The objective, and the constants of its loss; those that are not given are the objective's own."""

    objective: Annotated[
        ObjectiveName,
        Option(
            "what records are trained for: sft = their answers; of pairs of a chosen and a rejected answer dpo, ipo,"
            " orpo, simpo or reward (a model that scores answers); of answers with a verdict (label) kto"
        ),
    ] = "sft"
    beta: Annotated[
        float | None,
        Option(
            "how strongly preferences pull (default: 0.1; of simpo 2.0)", above=0, most=1e6, needs=(FOR_PREFERENCES,)
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

    @property
    def compares(self) -> bool:
        """Whether records are compared, rather than learned."""
        return self.objective != "sft"

    @property
    def objective_constants(self) -> dict[str, float]:
        """The constants that were given, as the objective's class names them."""
        given = {
            "beta": self.beta,
            "label_smoothing": self.label_smoothing,
            "gamma": self.simpo_gamma,
            "center_coefficient": self.center_rewards_coefficient,
            "desirable_weight": self.desirable_weight,
            "undesirable_weight": self.undesirable_weight,
        }
        return {name: value for name, value in given.items() if value is not None}

    def check_objective(self, data_source: str, lora_dropout: float) -> None:
        """Raise ValueError for what a loss of preferences cannot be computed of."""
        if not self.compares:
            return
        if data_source != "json_sft":
            raise ValueError(
                f"--objective {self.objective} compares answers, which --data-source {data_source} has none of; give"
                " --dataset with records of preferences"
            )
        if lora_dropout:
            raise ValueError(
                f"--lora-dropout {lora_dropout} with --objective {self.objective}: the loss is computed without"
                " dropout, and its gradient would be that of another model; leave --lora-dropout out"
            )

    def check_has_preferences(self, dataset: object) -> None:
        """Raise ValueError for a run that compares answers and has none."""
        if self.compares and not dataset:
            raise ValueError(
                f"--objective {self.objective} needs records of preferences, and none come with the package; give"
                " --dataset"
            )
