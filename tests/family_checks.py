"""One config against transformers in float32 on the CPU: loss, gradients, logits and export."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from engine_helpers import (
    build_engine,
    random_batch,
    relative_error,
    saved_model,
    streamed_plan,
    worst_error,
)
from transformers.core_model_loading import revert_weight_conversion

from flexengine.models.registry import open_model
from flexengine.optim import AdamW

MAX_SEQ_LEN = 48


def draw_batch(vocab_size):
    """(input_ids, labels): ragged, one sequence of the full length, a third of the labels -100."""
    rng = random.Random(5)
    ids = random_batch(5, [MAX_SEQ_LEN, 3, *(rng.randint(4, MAX_SEQ_LEN) for _ in range(3))], vocab_size)
    return ids, [[-100 if rng.random() < 0.3 else t for t in row] for row in ids]


def reference_loss(model, ids, labels):
    """Mean over all target tokens of the batch, each sequence alone."""
    total, count = 0.0, 0
    for row, unshifted in zip(ids, labels, strict=True):
        logits = model(input_ids=torch.tensor([row]), use_cache=False).logits[0, :-1]
        target = torch.tensor(unshifted[1:], dtype=torch.int64)
        total = total + torch.nn.functional.cross_entropy(logits, target, reduction="sum", ignore_index=-100)
        count += int((target != -100).sum())
    return total / count


def last_logits(model, tokens):
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]


def as_stored(model, tensors):
    """Tensors by the names of the checkpoint: transformers holds the experts of a layer stacked, gate over up."""
    return {name: tensor for name, tensor in revert_weight_conversion(model, tensors).items() if tensor is not None}


class Reference(NamedTuple):
    """A saved model of transformers, and what it says of a batch. Of the first rows `logits` has those of the last
    token."""

    folder: Path
    model: Any
    ids: list[list[int]]
    labels: list[list[int]]
    loss: float
    gradients: dict[str, torch.Tensor]
    logits: list[torch.Tensor]


def reference_of(config, folder):
    """The reference of a config; `folder` takes the checkpoint."""
    model = saved_model(folder, config)
    ids, labels = draw_batch(config["vocab_size"])
    loss = reference_loss(model, ids, labels)
    loss.backward()
    gradients = as_stored(model, {name: p.grad for name, p in model.named_parameters()})
    return Reference(folder, model, ids, labels, loss.item(), gradients, [last_logits(model, row) for row in ids[:3]])


def engine_like(reference, chunk_tokens, **decisions):
    """A streamed engine on the checkpoint of a reference."""
    source = open_model(reference.folder)
    sizes = {"chunk_tokens": chunk_tokens, "chunks_per_round": 4, "max_seq_len": MAX_SEQ_LEN}
    return build_engine(source, streamed_plan(source.spec, **sizes, **decisions), AdamW(lr=1e-2))


def check_against_transformers(engine, reference):
    """Loss, gradients and logits of an engine."""
    result = engine.fwd_bwd(input_ids=reference.ids, labels=reference.labels)
    assert result.loss == pytest.approx(reference.loss, abs=1e-5)
    error, name = worst_error(engine.gradients(), reference.gradients)
    assert error <= 1e-4, f"gradient of {name}: relative error {error:.1e}"
    for row, logits in zip(reference.ids, reference.logits, strict=False):
        assert relative_error(engine.next_token_logits(row), logits) <= 1e-4


def check_export(engine, reference, folder):
    """What an engine saves after a step is read by transformers, which says what the engine does."""
    engine.step()
    engine.save_pretrained(folder)
    exported = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", attn_implementation="eager")
    assert exported.state_dict().keys() == reference.model.state_dict().keys()
    trained = last_logits(exported, reference.ids[0])
    assert relative_error(engine.next_token_logits(reference.ids[0]), trained) <= 1e-4
    assert relative_error(trained, reference.logits[0]) > 1e-4  # it was trained
