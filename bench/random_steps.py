"""How a random job of `bench.random_runs` takes a step: what it trains on, and by which calls of the engine."""

from __future__ import annotations

from random import Random
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from flexengine.objectives import DPO, KTO, ORPO, AnswerRows, SimPO, weighted
from flexengine.objectives.objective import Objective
from flexengine.ops.custom_loss import LogitsBlock
from flexengine.runtime.engine import Engine

Feed = Literal["tokens", "weights", "parts", "loss", "preferences"]
"""Plain tokens; weights of them, also negative ones; a batch in two calls; a loss function; answers to compare."""
FEEDS: tuple[Feed, ...] = ("tokens", "tokens", "weights", "parts", "loss", "preferences")
Calls = Literal["train_step", "fwd_bwd"]
"""One call, or fwd_bwd and step, which have the same results."""
OBJECTIVES: tuple[Objective, ...] = (DPO(), KTO(), ORPO(), SimPO())


def take_step(engine: Engine, ids: list[list[int]], feed: Feed, calls: Calls, random: Random) -> list[float]:
    """Take one optimizer step on the sequences of a batch; gives its loss and the norm of its gradients."""
    if feed == "preferences":
        return _prefer(engine, ids, calls, random)
    columns: dict[str, Any] = {"input_ids": ids, "labels": ids}
    given: dict[str, Any] = {"loss": smoothed} if feed == "loss" else {}
    if feed == "weights":
        given["weights"] = [[random.uniform(-0.5, 2.0) for _ in row] for row in ids]
    if feed == "parts" and any(len(row) > 1 for row in ids[1:]):  # one token alone has no target
        engine.fwd_bwd(input_ids=ids[:1], labels=ids[:1])
        columns = {"input_ids": ids[1:], "labels": ids[1:]}
    return _finish(engine, columns, given, calls)


def smoothed(block: LogitsBlock) -> Tensor:
    """The sum of cross-entropies with smoothed labels."""
    return cross_entropy(block.logits, block.labels, reduction="sum", label_smoothing=0.1)


def _prefer(engine: Engine, ids: list[list[int]], calls: Calls, random: Random) -> list[float]:
    """Train on pairs of answers: the later half of every sequence that has two tokens."""
    rows = [row for row in ids if len(row) > 1]
    rows = rows[: len(rows) // 2 * 2] or [[1, 2], [1, 3]]
    labels = [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in rows]
    reference = torch.tensor([-4.0 * len(row) * random.random() for row in rows], dtype=torch.float64)
    wanted = [random.random() < 0.5 for _ in rows[::2]]
    found, columns, weights = weighted(engine, random.choice(OBJECTIVES), AnswerRows(rows, labels, reference, wanted))
    return [found.loss, *_finish(engine, columns, {"weights": weights}, calls, 1.0)]


def _finish(
    engine: Engine, columns: dict[str, Any], given: dict[str, Any], calls: Calls, divisor: float | None = None
) -> list[float]:
    if calls == "train_step":
        output, update = engine.train_step(**columns, **given, divisor=divisor)
    else:
        output, update = engine.fwd_bwd(**columns, **given), engine.step(divisor=divisor)
    return [float(output.loss), float(update.grad_norm)]
