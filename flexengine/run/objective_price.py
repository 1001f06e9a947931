"""What a step of an objective takes beside its updates: passes that compare, completions that the model writes.

`plan` and `train` tell it by the same prices, and give what is written the same room.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from flexengine.api import PlannedRun
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import format_bytes, format_seconds
from flexengine.models.spec import ModelSpec
from flexengine.objectives import OBJECTIVES
from flexengine.options.objective import ObjectiveOptions
from flexengine.options.train_config import TrainConfig
from flexengine.plan import CacheBytes, Plan, PlanError, Request
from flexengine.run.group_prediction import Forecast
from flexengine.run.start_times import START
from flexengine.run.step_prediction import StepPredictor


class Priced(NamedTuple):
    """Seconds of the parts of a step with full sequences, in their order, and what they are about.

    reference_s: of what is computed once before the first step, for as many tokens as a step has. num_completions,
    at_a_time: how many a step writes, and for how many there are caches; 0 where none are written here.
    """

    objective: str
    parts_s: dict[str, float]
    reference_s: float = 0.0
    num_completions: int = 0
    at_a_time: int = 0

    @property
    def step_s(self) -> float:
        """Seconds of all parts."""
        return sum(self.parts_s.values())

    def as_json(self) -> dict[str, Any]:
        """All of it as JSON values."""
        return {**self._asdict(), "step_s": self.step_s}

    def describe(self) -> str:
        """The parts in one line."""
        parts = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in self.parts_s.items())
        text = f"objective {self.objective}: predicted {format_seconds(self.step_s)} per step: {parts}"
        if self.num_completions:
            text += f"; {self.num_completions} completions of full length, {self.at_a_time} at a time"
        if self.reference_s:
            text += f"; once before them the reference, {format_seconds(self.reference_s)} for a step's tokens"
        return text


def price(options: ObjectiveOptions, plan: Plan, model: ModelSpec, profile: HardwareProfile) -> Priced | None:
    """Price a step with full sequences; None where the plan's own step is all of it."""
    if options.objective != "grpo" and not options.compares:
        return None
    predictor, request = StepPredictor(plan, model, profile), plan.request
    if options.objective == "grpo":
        return _of_groups(options, predictor)
    objective = OBJECTIVES[options.objective]
    lengths = [request.max_seq_len] * (request.max_global_batch_tokens // request.max_seq_len)
    trained = lengths if objective.trains_second else lengths[0::2]
    forward_s = predictor.forward_s(lengths)
    parts = {"pass for log-probabilities": forward_s, "pass that trains": predictor.step_s(trained)}
    return Priced(options.objective, parts, forward_s if objective.needs_reference else 0.0)


def _of_groups(options: ObjectiveOptions, predictor: StepPredictor) -> Priced:
    count, length = num_completions(options, predictor.plan.request), options.completion_tokens
    longest = predictor.plan.request.max_seq_len
    found = Forecast(options, predictor).seconds([longest - length] * count, [length] * count, predictor.arena_bytes)
    parts, passes = {"completions": found.generation_s, "rewards": found.rewarding_s}, dict[str, int]()
    if options.beta:
        passes["pass beneath adapters"] = 1
    if with_pass := options.updates_with_pass:
        passes["pass for log-probabilities" if with_pass == 1 else "passes for log-probabilities"] = with_pass
    pass_s = predictor.forward_s([longest] * count) if passes else 0.0
    parts |= {name: number * pass_s for name, number in passes.items()}
    parts["updates" if options.updates_per_step > 1 else "update"] = found.training_s - sum(passes.values()) * pass_s
    at_a_time = 0 if options.generator else min(count, predictor.num_caches(longest - 1, predictor.arena_bytes))
    return Priced(options.objective, parts, num_completions=count, at_a_time=at_a_time)


def num_completions(options: ObjectiveOptions, request: Request) -> int:
    """How many completions a step has whose sequences are as long as they may be.

    Raises: ValueError where prompts get no tokens, or those of one prompt are more than a step.
    """
    longest, per_prompt = request.max_seq_len, options.completions_per_prompt
    if options.completion_tokens >= longest:
        raise ValueError(
            f"--max-completion-length {options.completion_tokens} leaves nothing of --max-seq-len {longest} for"
            " prompts; give a smaller one, or a larger --max-seq-len"
        )
    return max(1, request.max_global_batch_tokens // longest // per_prompt) * per_prompt


# ---- room for what is written -----------------------------------------------------------------------------------


WRITING_SLACK_BYTES = 112 * 2**20
"""Host memory of a CUDA process for kernels that write completions and draw tokens, beside those of a step: on an H200
a run took 97 MiB more than a plan without."""


class CacheRoom(NamedTuple):
    """What a plan lacks for the caches of completions. fits: whether the budgets have it left."""

    caches: CacheBytes
    fits: bool

    def missing(self, longest: int) -> str:
        """Say what stands beside a plan that does not fit."""
        gpu_bytes, host_bytes = self.caches
        host = f" and what writes it {format_bytes(host_bytes)} of the host's" if host_bytes else ""
        return (
            f"beside that, the cache of one completion of {longest} tokens takes {format_bytes(gpu_bytes)} of the"
            f" GPU budget{host}; a smaller --max-seq-len takes less, and --generator has a server write"
        )


def cache_room(options: ObjectiveOptions, plan: Plan, model: ModelSpec, profile: HardwareProfile) -> CacheRoom:
    """Find the room for caches that a plan lacks, whose slots hold them between steps.

    On the GPU it is as much as the budget has left, up to what all completions of a step take. Where not one cache
    fits, it is that of one, for which the step has to be planned with less.
    """
    if options.objective != "grpo" or options.generator is not None:
        return CacheRoom(CacheBytes(), fits=True)
    predictor, tokens = StepPredictor(plan, model, profile), plan.request.max_seq_len - 1
    count, has = num_completions(options, plan.request), predictor.num_caches(tokens, predictor.arena_bytes)
    size, host_bytes = predictor.cache_bytes(tokens), 0
    if profile.device_type == "cuda":
        host_bytes = WRITING_SLACK_BYTES * plan.request.ranks
    fits = plan.predicted.host_bytes + host_bytes <= plan.request.max_host_bytes
    if has >= count:
        return CacheRoom(CacheBytes(0, host_bytes), fits)
    memory, most = profile.memory, plan.request.max_gpu_bytes
    if profile.device_type == "cuda":
        most = min(most, memory.gpu_free_bytes + memory.gpu_context_bytes)
    left = max(0, most - plan.predicted.gpu_bytes) // size
    gpu_bytes = min(count - has, left) * size if has + left else size
    return CacheRoom(CacheBytes(gpu_bytes, host_bytes), fits and has + left > 0)


@START.part("probe and plan")
def plan_with_room(config: TrainConfig, prepare: Callable[..., PlannedRun]) -> PlannedRun:
    """Plan a run, and the caches of its completions beside it. prepare: `prepare_job` of the run.

    Raises: PlanError where nothing fits, ValueError where caches do not fit beside it.
    """
    dry = config.dry_run
    planned = prepare(needs_weights=not dry, tell=dry)
    if config.objective != "grpo":
        return planned
    room = cache_room(config, planned.plan, planned.source.spec, planned.profile)
    if room.fits:
        return replace(planned, plan=planned.plan.with_caches(room.caches), cache_bytes=room.caches.gpu_bytes)
    try:
        return prepare(needs_weights=not dry, tell=False, caches=room.caches)
    except PlanError as error:
        raise ValueError(f"{error}\n  {room.missing(config.max_seq_len)}") from None


def parts_lines(config: TrainConfig, planned: PlannedRun) -> list[str]:
    """Tell what parts a step of a run has; nothing where the plan's step is all of it."""
    if config.objective == "sft":
        return []
    priced = price(config, planned.plan, planned.source.spec, planned.profile)
    return [] if priced is None else [priced.describe()]
