"""The options of training on completions that the model writes itself, which `ObjectiveOptions` has among its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from flexengine.options.option import Need, Option

FOR_GRPO = (Need("objective", ("grpo",), why="is about completions of grpo"),)


@dataclass(frozen=True, kw_only=True)
class GroupOptions:
    """How completions are written and rewarded, and constants of their loss, as TRL's GRPOTrainer names them."""

    rewards: Annotated[
        Sequence[str],
        Option(
            "Python functions that reward completions, each as file.py:function, in processes of their own",
            needs=FOR_GRPO,
        ),
    ] = ()
    reward_weights: Annotated[
        Sequence[str], Option("a factor on each function's rewards (default: 1)", needs=FOR_GRPO)
    ] = ()
    reward_timeout_s: Annotated[
        float | None, Option("longest call of a reward function (default: 60)", above=0, most=1e6, needs=FOR_GRPO)
    ] = None
    generator: Annotated[
        str | None,
        Option(
            "URL of a vLLM server that writes the completions; it reads the adapters of every update from a folder of"
            " the run (default: the engine writes)",
            decides_plan=False,
            needs=FOR_GRPO,
        ),
    ] = None
    num_generations: Annotated[
        int | None, Option("completions after each prompt (default: 8)", least=2, most=2**16, needs=FOR_GRPO)
    ] = None
    max_completion_length: Annotated[
        int | None, Option("longest completion, in tokens (default: 256)", above=0, most=2**24, needs=FOR_GRPO)
    ] = None
    num_iterations: Annotated[
        int | None,
        Option(
            "updates on the completions of a batch, which make one step (default: 1)",
            least=1,
            most=2**10,
            needs=FOR_GRPO,
        ),
    ] = None
    top_p: Annotated[
        float | None,
        Option("draw from the likeliest tokens that sum to this (default: 1.0)", above=0, most=1, needs=FOR_GRPO),
    ] = None
    epsilon: Annotated[
        float | None,
        Option("how far a ratio may fall before it is clipped (default: 0.2)", above=0, most=1, needs=FOR_GRPO),
    ] = None
    epsilon_high: Annotated[
        float | None, Option("how far it may rise (default: as epsilon)", above=0, most=1e3, needs=FOR_GRPO)
    ] = None
    loss_type: Annotated[
        Literal["grpo", "bnpo", "dr_grpo", "dapo"] | None,
        Option("how the losses of tokens are added (default: dapo)", needs=FOR_GRPO),
    ] = None
    scale_rewards: Annotated[
        Literal["group", "batch", "none"] | None,
        Option("whose deviation advantages are divided by (default: group)", needs=FOR_GRPO),
    ] = None

    @property
    def completions_per_prompt(self) -> int:
        """How many completions a prompt gets."""
        return self.num_generations or 8

    @property
    def completion_tokens(self) -> int:
        """The longest completion."""
        return self.max_completion_length or 256

    @property
    def updates_per_step(self) -> int:
        """How many updates a step makes."""
        return self.num_iterations or 1

    def check_groups(self) -> None:
        """Raise ValueError where nothing rewards completions, weights are no numbers, or a generator has no URL."""
        if self.generator is not None and not self.generator.startswith(("http://", "https://")):
            raise ValueError(f"--generator {self.generator}: give the URL of a vLLM server, as http://HOST:PORT")
        if not self.rewards:
            raise ValueError(
                "--objective grpo needs functions that reward completions; give --rewards file.py:function"
            )
        if self.reward_weights and len(self.reward_weights) != len(self.rewards):
            raise ValueError(
                f"--reward-weights has {len(self.reward_weights)} numbers for {len(self.rewards)} --rewards; give one"
                " for each"
            )
        self.weights_of_rewards()

    def weights_of_rewards(self) -> list[float]:
        """The factors as numbers. Raises: ValueError for a text that is none."""
        try:
            return [float(text) for text in self.reward_weights]
        except ValueError:
            raise ValueError(f"--reward-weights {' '.join(self.reward_weights)}: a weight is a number") from None
