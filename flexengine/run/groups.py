"""Steps on completions that the model writes itself: write, reward, compare within groups, and train."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.api import PlannedRun
from flexengine.data.batches import Batch, PromptBatch
from flexengine.data.prompts import KEYS
from flexengine.objectives import GRPO, Distillation, Groups, GroupUpdate, advantages, token_log_probs, update_groups
from flexengine.options.job import LARGEST_SEED
from flexengine.options.train_config import TrainConfig
from flexengine.parallel.team import Team, told_by_first
from flexengine.run.group_prediction import Forecast, Parts
from flexengine.run.label_steps import LabelSteps
from flexengine.run.step_prediction import StepPredictor
from flexengine.run.steps import AnswerSteps, Evaluated, PreferenceSteps, Steps, Taken, objective_of
from flexengine.run.training_data import TrainingData
from flexengine.run.writers import Draws, writer_of
from flexengine.runtime.engine import Engine
from flexengine.runtime.generation import Sampling

STEP_PRIME = 1_000_003
"""Steps between two seeds of the run that write with the same draws."""


class Written(NamedTuple):
    """Completions of a batch, those of a prompt one behind the other.

    columns: input_ids, labels, which are -100 but in completions, and pixels. rewards: [completions, functions], NaN
    for none.
    prompts, lengths: tokens of the prompt of each, and of completions. num_ended: how many a stop token ended.
    writing_s, rewarding_s: what both took.
    """

    columns: dict[str, Any]
    rewards: Tensor
    prompts: list[int]
    lengths: list[int]
    num_ended: int
    writing_s: float
    rewarding_s: float


class GroupSteps:
    """Learns by rewards. Its evaluations write with draws of their own, the same ones each time.

    What a step writes follows from its weights, the run's seed and the number of updates before it, so a resumed run
    writes the same, unless a server writes.
    """

    has_perplexity = False

    def __init__(
        self, config: TrainConfig, objective: GRPO, data: TrainingData, team: Team | None, forecast: Forecast
    ) -> None:
        assert data.tokenizer is not None, "prompts were tokenized"
        assert data.rewards is not None, "options were checked"
        self._config, self._objective, self._tokenizer = config, objective, data.tokenizer
        self._rewards, self._team = data.rewards, team
        self.writer, self._forecast = writer_of(config, team, data.tokenizer), forecast

    def train(self, engine: Engine, batch: Batch, lr: float) -> Taken:
        """See `Steps.train`. The loss is about 0 where nothing is clipped; rewards say what was learned."""
        seed = (self._config.seed + STEP_PRIME * (1 + engine.step_count)) % LARGEST_SEED
        self._forecast.tell(engine, [len(prompt) for prompt in batch.input_ids])
        written = self._write(engine, batch, seed)
        start_s = time.perf_counter()
        total = self._rewards.total(written.rewards)
        per_prompt, scale = self._config.completions_per_prompt, self._config.scale_rewards or "group"
        mine = self._objective
        beneath = token_log_probs(engine, written.columns, mine.temperature, adapters=False) if mine.beta else None
        groups = Groups(written.columns, advantages(total, per_prompt, scale), reference=beneath)
        taken = self._update(engine, groups, lr)
        parts = Parts(written.writing_s, written.rewarding_s, time.perf_counter() - start_s)
        predicted = self._forecast.predict(engine, written.prompts, written.lengths)
        self._forecast.learn(parts)
        seconds = {"generation_s": parts.generation_s, "predicted_generation_s": predicted.generation_s}
        seconds["rewarding_s"] = parts.rewarding_s
        details = {**self._details(written, total), **taken.details, "generation_seed": float(seed), **seconds}
        return taken._replace(details=details, predicted_s=sum(predicted))

    def _update(self, engine: Engine, groups: Groups, lr: float) -> Taken:
        """Make all updates of a step. Those after the first compare with the model that the first one found."""
        count, found = self._config.updates_per_step, list[GroupUpdate]()
        for _ in range(count):
            found.append(update_groups(engine, self._objective, groups, lr, keep=groups.old is None and count > 1))
            if groups.old is None:
                groups = groups._replace(old=found[0].log_probs)
        details = {"clipped": sum(one.clipped for one in found) / count}
        if self._objective.beta:
            details = {"kl": sum(one.kl for one in found) / count} | details
        out = found[0].out._replace(
            num_tokens=sum(one.out.num_tokens for one in found),
            model_flops=sum(one.out.model_flops for one in found),
            hardware_flops=sum(one.out.hardware_flops for one in found),
        )
        last = found[-1].update._replace(skipped=any(one.update.skipped for one in found))
        return Taken(sum(one.loss for one in found) / count, out, last, details)

    def evaluate(self, engine: Engine, batches: Iterable[Batch]) -> Evaluated:
        """See `Steps.evaluate`. The loss is the mean reward, with the other sign."""
        totals, details, counts = list[Tensor](), list[dict[str, float | None]](), list[int]()
        for batch in batches:
            written = self._write(engine, batch, self._config.seed)
            totals.append(self._rewards.total(written.rewards))
            details.append(self._details(written, totals[-1]))
            counts.append(sum(written.lengths))
        sizes = [len(total) for total in totals]
        return Evaluated(-torch.cat(totals).mean().item(), sum(counts), _mean_details(details, sizes))

    def _write(self, engine: Engine, batch: Batch, seed: int) -> Written:
        assert isinstance(batch, PromptBatch), "prompts are read as such"
        count, options, stop_ids = self._config.completions_per_prompt, self._config, self._tokenizer.stop_ids
        times_s = [time.perf_counter()]
        sampling = Sampling(options.temperature or 1.0, 1.0 if options.top_p is None else options.top_p, seed)
        draws = Draws(options.completion_tokens, frozenset(stop_ids), sampling)
        answers = self.writer.write(engine, batch, count, draws)
        times_s.append(time.perf_counter())
        records = [record for record in batch.records for _ in range(count)]
        rewards = told_by_first(self._team, lambda: self._rewarded(records, answers).tolist())
        times_s.append(time.perf_counter())
        prompts = [prompt for prompt in batch.input_ids for _ in range(count)]
        columns = {
            "input_ids": [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
            "labels": [[-100] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)],
            **batch.columns,
        }
        ended = sum(answer[-1] in stop_ids for answer in answers)
        of_prompts, of_answers = ([len(row) for row in rows] for rows in (prompts, answers))
        writing_s, rewarding_s = (end - start for start, end in pairwise(times_s))
        told = torch.tensor(rewards, dtype=torch.float64)
        return Written(columns, told, of_prompts, of_answers, ended, writing_s, rewarding_s)

    def _rewarded(self, records: Sequence[dict[str, Any]], answers: Sequence[list[int]]) -> Tensor:
        """Ask all functions for the rewards of answers to the prompts of records."""
        texts = [self._tokenizer.decode(answer) for answer in answers]
        prompts = [next(record[key] for key in KEYS if record.get(key)) for record in records]
        completions = [
            [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
            for prompt, text in zip(prompts, texts, strict=True)
        ]
        names = {name for record in records for name in record}
        columns = {name: [record.get(name) for record in records] for name in sorted(names)}
        return self._rewards.of({**columns, "prompts": prompts, "completions": completions, "completion_ids": answers})

    def _details(self, written: Written, total: Tensor) -> dict[str, float | None]:
        """What a log says: rewards of all functions together and of each, and how long completions are."""
        count = len(total)
        groups = total.view(-1, self._config.completions_per_prompt)
        found: dict[str, float | None] = {"reward": total.mean().item(), "reward_std": groups.std(1).mean().item()}
        if len(self._rewards.names) > 1:
            means = written.rewards.nanmean(0).tolist()
            found |= {
                f"reward_{name.rpartition(':')[2]}": m for name, m in zip(self._rewards.names, means, strict=True)
            }
        return found | {"completion_tokens": sum(written.lengths) / count, "ended": written.num_ended / count}


def _mean_details(details: Sequence[dict[str, float | None]], sizes: Sequence[int]) -> dict[str, float | None]:
    """Means by completions."""
    found: dict[str, float | None] = {}
    for name in details[0]:
        known = [(one[name], size) for one, size in zip(details, sizes, strict=True)]
        found[name] = sum((value or 0.0) * size for value, size in known) / sum(sizes)
    return found


def steps_of(config: TrainConfig, planned: PlannedRun, engine: Engine, data: TrainingData, opened: ExitStack) -> Steps:
    """Choose how a run takes steps: by its objective, and by the model's head. opened: is closed behind them."""
    objective, team = objective_of(config), planned.team
    if objective is not None:
        return PreferenceSteps(objective)
    if config.objective == "grpo":
        forecast = Forecast(config, StepPredictor(engine.plan, planned.source.spec, planned.profile))
        made = GroupSteps(config, GRPO(**config.objective_constants), data, team, forecast)
        opened.callback(made.writer.close)
        return made
    if engine.model.task is not None:
        return LabelSteps(engine.model.task, team)
    return AnswerSteps(Distillation(**config.objective_constants) if config.objective == "distill" else None)
