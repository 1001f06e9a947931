"""Steps and evaluations of a model that labels sequences: classes, several classes at a time, or numbers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flexengine.data.batches import Batch, ImageBatch
from flexengine.objectives.two_passes import labels_at_end
from flexengine.options.task import TaskHead
from flexengine.parallel.team import Team
from flexengine.run.steps import Evaluated, Taken
from flexengine.runtime.batch_input import LossFunction
from flexengine.runtime.engine import Engine

UNSEEN = float("-inf")
"""What stands for the prediction of a sequence that another rank evaluates."""


class LabelSteps:
    """Learns the labels of sequences, as transformers computes their loss: the mean over the sequences of a batch."""

    has_perplexity = False

    def __init__(self, head: TaskHead, team: Team | None = None) -> None:
        self.head, self._team = head, team

    def train(self, engine: Engine, batch: Batch, lr: float) -> Taken:
        """See `Steps.train`."""
        loss = None if self.head.problem == "single_label_classification" else self._loss(engine, batch)
        out, update = engine.train_step(**self._columns(batch), loss=loss, lr=lr)
        return Taken(float(out.loss), out, update, {})

    def evaluate(self, engine: Engine, batches: Iterable[Batch]) -> Evaluated:
        """See `Steps.evaluate`. Classes have their accuracy and macro F1 beside the loss."""
        loss_sum, wanted, found = 0.0, list[float](), list[float]()
        for batch in batches:
            seen = torch.full((len(batch.input_ids),), UNSEEN, dtype=torch.float64)
            loss = self._loss(engine, batch, seen)
            out = engine.evaluate(**self._columns(batch), loss=loss)
            loss_sum += out.loss * len(seen)
            wanted += self._values(batch)
            found += self._of_all_ranks(seen)
        return Evaluated(loss_sum / len(wanted), len(wanted), self._scores(wanted, found))

    def _values(self, batch: Batch) -> Sequence[float]:
        return [0.0] * len(batch.input_ids) if batch.values is None else batch.values

    def _columns(self, batch: Batch) -> dict[str, Any]:
        """What the engine reads: labels at the last tokens are the class, and 0 where the loss reads the values."""
        is_class = self.head.problem == "single_label_classification"
        rows = zip(batch.input_ids, self._values(batch), strict=True)
        labels = [labels_at_end(ids, int(value) if is_class else 0, self.head.pad_token_id) for ids, value in rows]
        pixels = batch.columns if isinstance(batch, ImageBatch) else {}
        return {"input_ids": batch.input_ids, "labels": labels, **pixels}

    def _targets(self, batch: Batch) -> Tensor:
        """What the outputs are compared with: classes [N], 0 or 1 [N, outputs], or numbers [N, 1]."""
        values = self._values(batch)
        if self.head.problem == "single_label_classification":
            return torch.tensor(values).long()
        if self.head.problem == "regression":
            return torch.tensor(values)[:, None]
        return torch.tensor([[int(value) >> i & 1 for i in range(self.head.num_labels)] for value in values]).float()

    def _loss(self, engine: Engine, batch: Batch, seen: Tensor | None = None) -> LossFunction:
        """The loss of a batch. seen: takes what is predicted of each sequence."""
        targets, problem = self._targets(batch).to(engine.device), self.head.problem

        def loss(block: Any) -> Tensor:  # a LogitsBlock, of tokens that have a label
            wanted, logits = targets[block.sequences], block.logits
            if seen is not None:
                seen[block.sequences.cpu()] = self._predicted(logits.detach()).double().cpu()
            if problem == "single_label_classification":
                return torch.nn.functional.cross_entropy(logits, wanted, reduction="sum")
            if problem == "regression":
                return (logits - wanted).square().sum()
            wanted = wanted.to(logits.dtype)
            losses = torch.nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
            return losses / self.head.num_labels

        return loss

    def _predicted(self, logits: Tensor) -> Tensor:
        """The label of each row as one number, as records have it."""
        if self.head.problem == "single_label_classification":
            return logits.argmax(-1)
        if self.head.problem == "regression":
            return logits[:, 0]
        return ((logits > 0).double() * 2.0 ** torch.arange(self.head.num_labels, device=logits.device)).sum(-1)

    def _of_all_ranks(self, seen: Tensor) -> list[float]:
        if self._team is None:
            return seen.tolist()
        parts = torch.tensor(self._team.control.gather(seen.tolist()), dtype=torch.float64)
        return parts.max(0).values.tolist()

    def _scores(self, wanted: list[float], found: list[float]) -> dict[str, float | None]:
        """Accuracy, of several classes at a time of all at once, and the mean F1 of the classes that occur."""
        if self.head.problem == "regression":
            return {}
        accuracy = sum(a == b for a, b in zip(wanted, found, strict=True)) / len(wanted)
        scores = [self._f1(wanted, found, label) for label in range(self.head.num_labels)]
        occurring = [score for score in scores if score is not None]
        return {"accuracy": accuracy, "f1": sum(occurring) / len(occurring) if occurring else None}

    def _f1(self, wanted: list[float], found: list[float], label: int) -> float | None:
        """2 * hits / (those that have the label + those that were given it); None where there are none."""
        several = self.head.problem == "multi_label_classification"
        has = [[bool(int(v) >> label & 1) if several else v == label for v in values] for values in (wanted, found)]
        hits = sum(a and b for a, b in zip(*has, strict=True))
        total = sum(map(sum, has))
        return 2 * hits / total if total else None
