"""Trains an objective of preferences in two passes of the engine, without a second model.

The first pass is forward alone and gives the log-probability of every token. The loss is computed from these on the
CPU, in float64. The second pass is forward and backward with the loss's derivatives as weights of the tokens: as the
loss depends on the weights of the model through these log-probabilities alone, the gradient is exactly the loss's own.
Both passes read the same weights, and nothing of the first is kept but a number for each token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexengine.objectives.objective import Answers, Judged, Objective, Records
from flexengine.objectives.positions import IGNORE
from flexengine.runtime.engine import Engine
from flexengine.runtime.outputs import FwdBwdOutput, StepOutput


class AnswerRows(NamedTuple):
    """The rows of N records, 2N of them: the first and the second answer of each record, one behind the other.

    input_ids: prompt and answer. labels: the tokens of answers, -100 elsewhere; unshifted. reference: the
    log-probability of each row's answer in the reference, float64 [2N], if the objective needs it. wanted: whether the
    first answer of each record is a good one; None where all are. margins: by how much each first one is to be ahead.
    columns: of what is no text, such as the pixels of images, those of all rows.
    """

    input_ids: Sequence[Sequence[int]]
    labels: Sequence[Sequence[int]]
    reference: Tensor | None = None
    wanted: Sequence[bool] | None = None
    margins: Sequence[float] | None = None
    columns: Mapping[str, Tensor] = MappingProxyType({})


class Found(NamedTuple):
    """What an objective found in a batch: its mean loss over `num_records`, and mean rewards.

    wanted_reward, unwanted_reward: None where the batch has no such answer. accuracy: the share of pairs whose chosen
    answer has the higher reward; None for records that are no pairs.
    """

    loss: float
    num_records: int
    wanted_reward: float | None
    unwanted_reward: float | None
    accuracy: float | None

    def details(self) -> dict[str, float | None]:
        """What a log says beside the loss, by name."""
        good, bad = self.wanted_reward, self.unwanted_reward
        margin = None if good is None or bad is None else good - bad
        rewards = {"reward_chosen": good, "reward_rejected": bad, "reward_margin": margin}
        return {**rewards, "reward_accuracy": self.accuracy}


class Weighted(NamedTuple):
    """The second pass of a batch: what its first pass found, the columns to train, and the weights of their tokens."""

    found: Found
    columns: dict[str, Any]
    weights: list[Tensor]


def weighted(engine: Engine, objective: Objective, rows: AnswerRows) -> Weighted:
    """Run the first pass. `fwd_bwd(columns, weights=weights)` then adds the gradient of the loss, undivided.

    Raises: ValueError as `Engine.evaluate`, and where the objective needs a reference and the rows have none.
    """
    rows = _read_rows(engine, objective, rows)
    columns = _columns(engine, objective, rows)
    log_probs = [row.requires_grad_() for row in _token_log_probs(engine, columns)]
    judged = objective.judge(_records(objective, rows, columns["labels"], log_probs))
    judged.loss.backward()
    weights = [torch.zeros(len(row)) if row.grad is None else -row.grad for row in log_probs]
    if not objective.trains_second and not rows.columns:  # pixels are not told apart by rows; weights are 0 there
        columns, weights = {name: values[0::2] for name, values in columns.items()}, weights[0::2]
    return Weighted(_found(objective, judged), columns, weights)


def train_step(
    engine: Engine, objective: Objective, rows: AnswerRows, lr: float | None = None
) -> tuple[Found, FwdBwdOutput, StepOutput]:
    """Take one optimizer step on a batch of records; the loss that is found is that before the update.

    Raises: ValueError as `Engine.train_step` and `weighted`.
    """
    found, columns, weights = weighted(engine, objective, rows)
    out, update = engine.train_step(columns, weights=weights, lr=lr, divisor=1)
    return found, out, update


def evaluate(engine: Engine, objective: Objective, rows: AnswerRows) -> Found:
    """Compute the loss of a batch of records; nothing changes."""
    rows = _read_rows(engine, objective, rows)
    columns = _columns(engine, objective, rows)
    log_probs = _token_log_probs(engine, columns)
    return _found(objective, objective.judge(_records(objective, rows, columns["labels"], log_probs)))


def reference_log_probs(engine: Engine, rows: AnswerRows) -> Tensor:
    """The log-probability of each row's answer in the model as it is now, float64 [2N] on the CPU."""
    columns = {"input_ids": rows.input_ids, "labels": rows.labels, **rows.columns}
    return torch.stack([row.double().sum() for row in _token_log_probs(engine, columns)])


def _token_log_probs(engine: Engine, columns: Mapping[str, Any]) -> list[Tensor]:
    found = engine.evaluate(columns, per_token=True).token_log_probs
    assert found is not None, "they were asked for"
    return found


def _read_rows(engine: Engine, objective: Objective, rows: AnswerRows) -> AnswerRows:
    """Put a label on the token that is scored, for an objective of scores. Raises ValueError for another head."""
    head = engine.model.task
    if not objective.scores and head is None:
        return rows
    if not objective.scores or head is None or head.num_labels != 1:
        what = "scores, of a head with one output" if objective.scores else "log-probabilities of tokens"
        has = "predicts tokens" if head is None else f"has {head.num_labels} outputs for labels"
        raise ValueError(f"{type(objective).__name__} is a loss of {what}, and the head of {engine.model.name} {has}")
    return rows._replace(labels=[labels_at_end(row, 0, head.pad_token_id) for row in rows.input_ids])


def labels_at_end(input_ids: Sequence[int], label: int, pad_token_id: int | None) -> list[int]:
    """The labels of a sequence that is labelled as a whole: that of its last token but padding, IGNORE elsewhere.

    transformers reads the outputs there, also where a sequence itself ends in what the config calls padding.
    """
    last = next((i for i in range(len(input_ids) - 1, 0, -1) if input_ids[i] != pad_token_id), len(input_ids) - 1)
    return [label if i == last else IGNORE for i in range(len(input_ids))]


def _columns(engine: Engine, objective: Objective, rows: AnswerRows) -> dict[str, Any]:
    """The rows as the engine reads them.

    Where prompts are trained, every token of first answers has a label but those that stand for what is no text.
    """
    labels, given = list(rows.labels), engine.model.given
    if objective.trains_prompts:
        placed = None if given is None else given.token_id
        labels[0::2] = [[IGNORE if token == placed else token for token in row] for row in rows.input_ids[0::2]]
    return {"input_ids": rows.input_ids, "labels": labels, **rows.columns}


def _records(
    objective: Objective, rows: AnswerRows, trained: Sequence[Sequence[int]], log_probs: Sequence[Tensor]
) -> Records:
    """The sums that the objective is a function of. trained: labels of the pass that found them.

    Raises ValueError where a reference is missing.
    """
    if objective.needs_reference and rows.reference is None:
        raise ValueError(
            f"{type(objective).__name__} compares with a reference; give reference=reference_log_probs(engine, rows)"
            " of the model before training"
        )
    num_records = len(rows.input_ids) // 2
    wanted = torch.ones(num_records, dtype=torch.bool) if rows.wanted is None else torch.tensor(list(rows.wanted))
    margins = None if rows.margins is None else torch.tensor(list(rows.margins), dtype=torch.float64)
    first, second = (_answers(rows, trained, log_probs, which) for which in range(2))
    return Records(first, second, wanted, margins)


def _answers(rows: AnswerRows, trained: Sequence[Sequence[int]], log_probs: Sequence[Tensor], which: int) -> Answers:
    """First (0) or second (1) answers."""
    rows_of_sums = list[list[Tensor]]()
    own_rows = (column[which::2] for column in (rows.labels, trained, log_probs))
    for labels, all_labels, row in zip(*own_rows, strict=True):
        found = row[1:].double()  # nothing predicts the first token
        is_answer, is_text = (torch.tensor(own[1:]) != IGNORE for own in (labels, all_labels))
        counts = torch.tensor([int(is_answer.sum()), int(is_text.sum())], dtype=torch.float64)
        rows_of_sums.append([found[is_answer].sum(), counts[0], found[is_text].sum(), counts[1]])
    sums, lengths, text_sums, text_lengths = torch.stack([torch.stack(row) for row in rows_of_sums]).unbind(1)
    reference = None if rows.reference is None else rows.reference[which::2]
    return Answers(sums, lengths, text_sums, text_lengths, reference)


def _found(objective: Objective, judged: Judged) -> Found:
    wanted, unwanted = judged.wanted_rewards.detach(), judged.unwanted_rewards.detach()
    accuracy = (wanted > unwanted).double().mean().item() if objective.records != "rated" else None
    num_records = len(wanted) if objective.records != "rated" else len(wanted) + len(unwanted)
    good, bad = (rewards.mean().item() if len(rewards) else None for rewards in (wanted, unwanted))
    return Found(judged.loss.item(), num_records, good, bad, accuracy)
