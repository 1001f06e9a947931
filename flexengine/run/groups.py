"""Steps on completions that the model writes itself: write, reward, compare within groups, and train in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.data.batches import Batch, PromptBatch
from flexengine.data.prompts import KEYS
from flexengine.data.tokenizer_process import TokenizerProcess
from flexengine.objectives import GRPO, Distillation, GroupLoss, Groups, advantages, token_log_probs
from flexengine.options.job import LARGEST_SEED
from flexengine.options.train_config import TrainConfig
from flexengine.parallel.team import Team
from flexengine.run.label_steps import LabelSteps
from flexengine.run.ranks import told_by_first
from flexengine.run.rewards import Rewards
from flexengine.run.steps import AnswerSteps, Evaluated, PreferenceSteps, Steps, Taken, objective_of
from flexengine.run.training_data import TrainingData
from flexengine.runtime.engine import Engine

STEP_PRIME = 1_000_003
"""Steps between two seeds of the run that write with the same draws."""


class Written(NamedTuple):
    """Completions of a batch, those of a prompt one behind the other.

    columns: input_ids and labels, which are -100 but in completions. rewards: [completions, functions], NaN for none.
    lengths: tokens of completions. num_ended: how many of them a stop token ended. seed: of their draws.
    """

    columns: dict[str, list[list[int]]]
    rewards: Tensor
    lengths: list[int]
    num_ended: int
    seed: int


class GroupSteps:
    """Learns by rewards. Its evaluations write with draws of their own, the same ones each time.

    What a step writes follows from its weights, the run's seed and the number of updates before it, so a resumed run
    writes the same.
    """

    has_perplexity = False

    def __init__(
        self, config: TrainConfig, objective: GRPO, tokenizer: TokenizerProcess, rewards: Rewards, team: Team | None
    ) -> None:
        self._config, self._objective, self._tokenizer = config, objective, tokenizer
        self._rewards, self._team = rewards, team

    def train(self, engine: Engine, batch: Batch, lr: float) -> Taken:
        """See `Steps.train`. The loss is about 0 where nothing is clipped; rewards say what was learned."""
        seed = (self._config.seed + STEP_PRIME * (1 + engine.step_count)) % LARGEST_SEED
        written = self._write(engine, batch, seed)
        total = self._rewards.total(written.rewards)
        per_prompt, scale = self._config.completions_per_prompt, self._config.scale_rewards or "group"
        mine = self._objective
        beneath = token_log_probs(engine, written.columns, mine.temperature, adapters=False) if mine.beta else None
        groups = Groups(written.columns, advantages(total, per_prompt, scale), reference=beneath)
        loss = GroupLoss(mine, groups, engine.device)
        out, update = engine.train_step(written.columns, loss=loss, lr=lr, divisor=1)
        kl, clipped = (sum(values) / loss.num_tokens for values in zip(*_gathered(engine, loss), strict=True))
        divergence = {"kl": kl} if mine.beta else {}
        details = self._details(written, total) | divergence | {"clipped": clipped, "generation_seed": float(seed)}
        return Taken(float(out.loss) * out.num_target_tokens, out, update, details)

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
        count, options = self._config.completions_per_prompt, self._config
        prompts = [prompt for prompt in batch.input_ids for _ in range(count)]
        stop_ids = self._tokenizer.stop_ids
        answers = engine.generate(
            prompts, options.completion_tokens, stop_ids=stop_ids, temperature=self._objective.temperature,
            top_p=1.0 if options.top_p is None else options.top_p, seed=seed, keep_stop=True,
        )  # fmt: skip
        records = [columns for columns in batch.columns for _ in range(count)]
        rewards = told_by_first(self._team, lambda: self._rewarded(records, answers).tolist())
        columns = {
            "input_ids": [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)],
            "labels": [[-100] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)],
        }
        ended = sum(answer[-1] in stop_ids for answer in answers)
        return Written(
            columns, torch.tensor(rewards, dtype=torch.float64), [len(answer) for answer in answers], ended, seed
        )

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


def _gathered(engine: Engine, loss: GroupLoss) -> list[list[float]]:
    """Sums over the tokens that each rank trained."""
    return engine.context.gather([loss.kl, float(loss.clipped)])


def _mean_details(details: Sequence[dict[str, float | None]], sizes: Sequence[int]) -> dict[str, float | None]:
    """Means by completions."""
    found: dict[str, float | None] = {}
    for name in details[0]:
        known = [(one[name], size) for one, size in zip(details, sizes, strict=True)]
        found[name] = sum((value or 0.0) * size for value, size in known) / sum(sizes)
    return found


def steps_of(config: TrainConfig, engine: Engine, data: TrainingData, team: Team | None) -> Steps:
    """Choose how a run takes steps: by its objective, and by what the model's head is for."""
    objective = objective_of(config)
    if objective is not None:
        return PreferenceSteps(objective)
    if config.objective == "grpo":
        assert data.tokenizer is not None, "prompts were tokenized"
        assert data.rewards is not None, "options were checked"
        return GroupSteps(config, GRPO(**config.objective_constants), data.tokenizer, data.rewards, team)
    if engine.model.task is not None:
        return LabelSteps(engine.model.task, team)
    return AnswerSteps(Distillation(**config.objective_constants) if config.objective == "distill" else None)
