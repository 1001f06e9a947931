"""One step and one evaluation under the run's objective: answers, or a teacher's, in one pass, preferences in two."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from flexengine import objectives
from flexengine.data.batches import Batch, ImageBatch, PairBatch, TaughtBatch
from flexengine.metrics import StepMetrics
from flexengine.models.spec import ModelSpec
from flexengine.objectives import OBJECTIVES, AnswerRows, Distillation, Objective, TeacherRows
from flexengine.options.task import TaskHead
from flexengine.options.train_config import TrainConfig
from flexengine.run.card_health import StepCard
from flexengine.run.feedback import ExpectedStep
from flexengine.runtime.engine import Engine
from flexengine.runtime.outputs import FwdBwdOutput, StepOutput

MOST_OF_SEVERAL = 48
"""Classes of which any number may hold: a record has them as bits of one number."""
Details = Mapping[str, float | None]
"""What an objective tells beside its loss, by name."""


class Taken(NamedTuple):
    """A step that was taken. predicted_s: seconds that were predicted of it, where its batch alone does not say."""

    loss: float
    out: FwdBwdOutput
    update: StepOutput
    details: Details
    predicted_s: float | None = None


class Evaluated(NamedTuple):
    """The mean loss of batches, and over how many target tokens they go."""

    loss: float
    num_targets: int
    details: Details


class Steps(Protocol):
    """How a run takes steps and evaluates. has_perplexity: its loss is the mean of tokens' losses."""

    has_perplexity: bool

    def train(self, engine: Engine, batch: Batch, lr: float) -> Taken:
        """Take one optimizer step."""
        ...

    def evaluate(self, engine: Engine, batches: Iterable[Batch]) -> Evaluated:
        """Evaluate the model on all batches; gradients and weights stay."""
        ...


class AnswerSteps:
    """Learns single answers: the loss is the mean over all target tokens. distillation: learns a teacher's instead."""

    def __init__(self, distillation: Distillation | None = None) -> None:
        self._distillation = distillation
        self.has_perplexity = distillation is None

    def train(self, engine: Engine, batch: Batch, lr: float) -> Taken:
        """See `Steps.train`."""
        out, update = engine.train_step(**self._call(engine, batch), lr=lr)
        return Taken(float(out.loss), out, update, {})

    def evaluate(self, engine: Engine, batches: Iterable[Batch]) -> Evaluated:
        """See `Steps.evaluate`. The mean does not depend on how sequences were batched."""
        loss_sum, num_targets = 0.0, 0
        for batch in batches:
            out = engine.evaluate(**self._call(engine, batch))
            loss_sum += out.loss * out.num_target_tokens
            num_targets += out.num_target_tokens
        return Evaluated(loss_sum / num_targets, num_targets, {})

    def _call(self, engine: Engine, batch: Batch) -> dict[str, Any]:
        """The batch, and its loss where that is none of the engine's, as keywords."""
        columns: dict[str, Any] = {"input_ids": batch.input_ids, "labels": batch.labels}
        pixels = batch.columns if isinstance(batch, ImageBatch) else {}
        if self._distillation is None:
            return {**columns, **pixels}
        assert isinstance(batch, TaughtBatch), "a teacher was asked before the run"
        teacher = TeacherRows(torch.from_numpy(batch.tokens), torch.from_numpy(batch.log_probs))
        return {**columns, **pixels, "loss": self._distillation.loss(columns, teacher, engine.device)}


class PreferenceSteps:
    """Learns preferences: the loss is the mean over the records of a batch, and evaluations weigh batches by them."""

    has_perplexity = False

    def __init__(self, objective: Objective) -> None:
        self.objective = objective

    def train(self, engine: Engine, batch: Batch, lr: float) -> Taken:
        """See `Steps.train`."""
        found, out, update = objectives.train_step(engine, self.objective, rows_of(batch), lr)
        # the second pass may have fewer rows, and the metrics are those of the batch
        return Taken(found.loss, out._replace(num_tokens=batch.num_tokens), update, found.details())

    def evaluate(self, engine: Engine, batches: Iterable[Batch]) -> Evaluated:
        """See `Steps.evaluate`."""
        loss_sum, num_targets, sums = 0.0, 0, dict[str, list[tuple[float, int]]]()
        num_records = 0
        for batch in batches:
            found = objectives.evaluate(engine, self.objective, rows_of(batch))
            loss_sum += found.loss * found.num_records
            num_records += found.num_records
            num_targets += batch.num_target_tokens
            for name, value in found.details().items():
                sums.setdefault(name, []).extend([] if value is None else [(value, found.num_records)])
        details = {name: _weighted_mean(values) for name, values in sums.items()}
        return Evaluated(loss_sum / num_records, num_targets, details)


def _weighted_mean(values: list[tuple[float, int]]) -> float | None:
    total = sum(weight for _, weight in values)
    return sum(value * weight for value, weight in values) / total if total else None


def rows_of(batch: Batch) -> AnswerRows:
    """A batch of pairs as objectives read it."""
    assert isinstance(batch, PairBatch), "preferences are read as pairs"
    reference = None if batch.reference is None else torch.from_numpy(batch.reference)
    return AnswerRows(batch.input_ids, batch.labels, reference, batch.wanted, batch.values, batch.columns)


def objective_of(config: TrainConfig) -> Objective | None:
    """The objective that the options ask for; None where answers are learned as they are."""
    return OBJECTIVES[config.objective](**config.objective_constants) if config.compares else None


def check_objective(config: TrainConfig, spec: ModelSpec) -> None:
    """Raise ValueError for a head that the objective says nothing of, or a model whose own loss would get another share
    of the sum than it is meant to have."""
    if spec.task is not None:
        _check_head(config, spec, spec.task)
    elif config.compares and OBJECTIVES[config.objective].scores:
        raise ValueError(f"--objective {config.objective} of {spec.name}, which predicts tokens; leave --task out")
    if config.objective == "grpo" and config.beta and config.mode != "lora":
        raise ValueError(
            f"--beta {config.beta:g} with --objective grpo compares with the model beneath adapters, and --mode"
            f" {config.mode} trains all of it; give --mode lora, or leave --beta out"
        )
    if config.generator is not None:
        _check_generator(config)
    if (config.compares or config.objective == "grpo") and spec.balancing is not None:
        raise ValueError(
            f"--objective {config.objective} of {spec.name}, whose config.json asks for a loss that balances experts"
            " (output_router_logits): that loss is a share of a mean over tokens, and this objective has none; set"
            " output_router_logits to false there"
        )


def _check_generator(config: TrainConfig) -> None:
    """Raise ValueError for what cannot be handed to a server that loads adapters."""
    named = {"--use-dora": config.use_dora, "--modules-to-save": config.modules_to_save}
    found = next((flag for flag, value in named.items() if value), None)
    if config.mode == "lora" and found is None:
        return
    what = f"--mode {config.mode}" if config.mode != "lora" else found
    raise ValueError(
        f"--generator with {what}: a vLLM server takes plain adapters while it runs; give --mode lora without"
        f" {' and '.join(named)}, or leave --generator out"
    )


def _check_head(config: TrainConfig, spec: ModelSpec, head: TaskHead) -> None:
    """Raise ValueError for a head for labels that the objective, or what it is given, says nothing of."""
    asked, count = f"--objective {config.objective} of {spec.name}", head.num_labels
    if head.task == "token":
        raise ValueError(f"{spec.name} labels tokens, which runs have no records for; train it from Python: heads.md")
    if config.sample_prompts:
        raise ValueError(f"--sample-prompts: {spec.name} has a head for labels, which answers nothing; leave them out")
    if config.data_source != "json_sft":
        raise ValueError(f"{spec.name} learns labels, which --data-source {config.data_source} has none of")
    if config.compares and (count > 1 or not OBJECTIVES[config.objective].scores):
        fits = "one that predicts tokens, or a head with one output (--objective reward)"
        raise ValueError(f"{asked}, whose head has {count} output{'s' if count > 1 else ''} for labels; give {fits}")
    if head.problem == "regression" and count > 1:
        raise ValueError(f"{spec.name} has {count} outputs for a regression; records have one number each")
    if head.problem == "multi_label_classification" and count > MOST_OF_SEVERAL:
        raise ValueError(f"{spec.name} has {count} classes, any of which may hold; at most {MOST_OF_SEVERAL} are read")


def take_step(
    engine: Engine, batch: Batch, step: int, lr: float, expected: ExpectedStep, steps: Steps, card: StepCard
) -> tuple[StepMetrics, StepOutput]:
    """Run forward, backward and update of one global batch; step_s is their wall time. card: watches the GPU."""
    card.take()  # leaves out what it saw between steps
    start_s = time.perf_counter()
    taken = steps.train(engine, batch, lr)
    step_s, health = time.perf_counter() - start_s, card.health()
    peaks, scale = engine.memory_peaks(), taken.update.loss_scale
    metrics = StepMetrics.measured(
        step=step,
        loss=taken.loss,
        grad_norm=float(taken.update.grad_norm),
        lr=lr,
        num_tokens=int(taken.out.num_tokens),
        step_s=step_s,
        model_flops=taken.out.model_flops,
        hardware_flops=taken.out.hardware_flops,
        predicted_step_s=expected.step_s if taken.predicted_s is None else taken.predicted_s,
        speed_of_light_s=expected.speed_of_light_s,
        gpu_peak_bytes=peaks.gpu_bytes,
        host_peak_bytes=peaks.host_bytes,
        details={**taken.details, **({} if scale is None else {"loss_scale": scale})},
        card=health,
    )
    return metrics, taken.update
