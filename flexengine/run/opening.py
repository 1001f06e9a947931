"""What a run says before its first step, in five lines: what is trained, the data, the plan, the machine, the files.

Also `--mode auto`: which kinds of training fit this machine, with their predicted speeds, and the choice among them.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

from flexengine.api import PlannedRun, prepare_job
from flexengine.metrics import format_bytes, format_tokens_per_s
from flexengine.models.registry import ModelSource
from flexengine.options.data import BUNDLED_DATA
from flexengine.options.train_config import BEST_FOLDER, FINAL_FOLDER, TrainConfig
from flexengine.parallel.team import Team, is_first
from flexengine.plan import PlanError

KINDS = {
    "full": {"mode": "full"},
    "lora": {"mode": "lora"},
    "lora beside NF4": {"mode": "lora", "base_dtype": "nf4"},
}
"""What --mode auto proposes, the first that fits first."""


def model_line(config: TrainConfig, source: ModelSource) -> str:
    """Tell what is trained, and whether its weights are random."""
    spec = source.spec
    random = f" RANDOM weights, drawn from --seed {config.seed} (init: random);" if config.init == "random" else ""
    count = spec.num_parameters
    size = f"{count / 1e9:.2f} G parameters" if count >= 1e8 else f"{count / 1e6:.1f} M parameters"
    if lora := config.lora_setup:
        stored = "" if config.stored_base == "compute" else f" in {config.stored_base}"
        what = f"adapters of rank {lora.rank} beside {size}{stored}"
    else:
        what = f"all of {size}" if not config.freeze else f"{size} but {' '.join(config.freeze)}"
    return f"model {config.model}:{random} trains {what}, {config.optimizer} at {config.base_lr:.2e}, {config.dtype}"


def data_line(config: TrainConfig, description: str, num_steps: int, is_demo: bool) -> str:
    """Tell what is read, and what of it nobody gave."""
    tokens = config.max_global_batch_tokens
    came = "" if is_demo or config.dataset != (str(BUNDLED_DATA),) else "the instructions that come with the package, "
    came += "to try a model; --dataset trains on your own; " if came else ""
    return f"data: {came}{description}; {num_steps} steps of up to {tokens} tokens"


def files_line(config: TrainConfig) -> str:
    """Tell where a run writes, and what is left at its end."""
    kept = [f"the model to {FINAL_FOLDER}/"] if config.save else []
    kept += [f"the best one to {BEST_FOLDER}/"] if config.save and config.validates else []
    kept += [f"a checkpoint every {config.save_steps} steps"] if config.save_steps is not None else []
    return f"writes: {config.run_folder}: log and plan, {', '.join(kept) or 'no model (--save writes it)'}"


# ---- --mode auto --------------------------------------------------------------------------------------------------


class Proposal(NamedTuple):
    """A kind of training as it would be: its options, and its plan or why there is none."""

    kind: str
    config: TrainConfig
    planned: PlannedRun | None
    why_not: str = ""

    def describe(self) -> str:
        """The proposal in one line."""
        if self.planned is None:
            return f"  {self.kind}: {self.why_not}"
        plan = self.planned.plan
        p, tokens = plan.predicted, plan.request.max_global_batch_tokens
        return (
            f"  {self.kind}: {format_tokens_per_s(tokens / p.step_s)} predicted, {format_bytes(p.gpu_bytes)} GPU and"
            f" {format_bytes(p.host_bytes)} host memory"
        )


def with_mode(config: TrainConfig, team: Team | None) -> TrainConfig:
    """Replace --mode auto by the kind of training that is taken: the first that fits, with --yes or when asked.

    Raises: ValueError where nobody says yes, PlanError where nothing fits. Order: before data are read, on all ranks.
    """
    if config.mode != "auto":
        return config
    found = [_proposal(config, kind) for kind in KINDS]
    print("\n".join(["--mode auto: what fits this machine", *(one.describe() for one in found)]), flush=True)
    first = next((one for one in found if one.planned is not None), None)
    if first is None:
        # raises, with what would fit
        prepare_job(config.model, found[-1].config.as_job(), needs_weights=False, whole_steps=True)
        raise AssertionError("a plan was found that was not found before")
    given = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in KINDS[first.kind].items())
    if not (config.yes or (team is None and is_first(team) and _says_yes(f"train {given}?"))):
        raise ValueError(f"--mode auto proposes {given}; add --yes to take it, or give that or another --mode")
    print(f"taken: {given}")
    return first.config


def _proposal(config: TrainConfig, kind: str) -> Proposal:
    chosen = replace(config, **KINDS[kind], yes=False)
    try:
        planned = prepare_job(
            config.model, chosen.as_job(), needs_weights=not config.dry_run, tell=False, whole_steps=True
        )
    except PlanError as error:
        return Proposal(kind, chosen, None, f"does not fit: {str(error).splitlines()[0].partition('): ')[2]}")
    except ValueError as error:  # such as a base that cannot be stored so
        return Proposal(kind, chosen, None, f"cannot be: {str(error).splitlines()[0]}")
    return Proposal(kind, chosen, planned)


def _says_yes(question: str) -> bool:
    """Ask on a terminal; elsewhere nobody says yes."""
    if not (sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()):
        return False
    try:
        return input(f"{question} [Y/n] ").strip().lower() in ("", "y", "yes")
    except EOFError:
        return False
