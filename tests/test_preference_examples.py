"""The example of GRPO trains what its paper's formula, written here in plain torch, trains.

The formula has the defaults of TRL's trainer; both sides update with AdamW, and every loss must agree.
"""

import runpy
from pathlib import Path

import pytest
import torch
from engine_helpers import saved_model, tiny_config

from flexengine import from_pretrained
from flexengine.optim import AdamW

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
LR, STEPS = 5e-3, 4
PROMPTS, ANSWERS = (5, 3), (4, 7, 2, 6)
"""Lengths of prompts and, two for each prompt, of answers."""


@pytest.fixture
def models(tmp_path):
    """An engine, and a transformers model with the same weights."""
    model = saved_model(tmp_path / "model", tiny_config()).float().train()
    with from_pretrained(
        tmp_path / "model",
        optimizer=AdamW(lr=LR),
        max_seq_len=16,
        max_global_batch_tokens=64,
        max_gpu_mem_gib=0.1,
        device="cpu",
        hardware="cpu-test",
        dtype="float32",
    ) as engine:
        yield engine, model


@pytest.fixture
def batch():
    """Four answers, two to each of two prompts."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda count: torch.randint(0, 67, (count,), generator=generator).tolist()  # noqa: E731
    prompts = [prompt for length in PROMPTS for prompt in [draw(length)] * 2]
    answers = [draw(length) for length in ANSWERS]
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    labels = [[-100] * len(prompt) + answer for prompt, answer in zip(prompts, answers, strict=True)]
    return {"input_ids": rows, "labels": labels}


def log_probs_of(model, batch):
    """For each row the log-probabilities of its answer's tokens, from transformers' logits."""
    found = []
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        log_probs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
        targets = torch.tensor(labels[1:])
        found.append(log_probs[torch.arange(len(targets)), targets.clamp(min=0)][targets != -100])
    return found


def optimizer_of(model):
    defaults = AdamW(lr=LR)
    return torch.optim.AdamW(model.parameters(), LR, defaults.betas, defaults.eps, defaults.weight_decay)


def update(model, optimizer, loss):
    """One step with the gradient clipped at norm 1, as both trainers do by default."""
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def test_grpo(models, batch):
    """The learning rate is large enough that some ratios are clipped."""
    engine, model = models
    rewards = torch.tensor([[1.0, 0.25], [0.0, 0.5]])
    example = runpy.run_path(str(EXAMPLES / "grpo.py"))
    found = example["grpo_updates"](engine, batch, rewards, STEPS)
    optimizer = optimizer_of(model)
    mean = rewards.mean(1, keepdim=True)
    deviation = ((rewards - mean) ** 2).sum(1, keepdim=True).div(rewards.shape[1] - 1).sqrt()
    advantages = ((rewards - mean) / (deviation + 1e-4)).flatten().tolist()
    with torch.no_grad():
        old = log_probs_of(model, batch)
    num_clipped = 0
    for step_loss in found:
        losses = []
        for new, before, advantage in zip(log_probs_of(model, batch), old, advantages, strict=True):
            ratio = torch.exp(new - before)
            clipped = torch.clamp(ratio, 0.8, 1.2)
            num_clipped += int((clipped != ratio).sum())
            losses.append(-torch.min(ratio * advantage, clipped * advantage))
        loss = torch.cat(losses).sum() / sum(ANSWERS)
        assert step_loss == pytest.approx(loss.item(), abs=1e-4)
        update(model, optimizer, loss)
    assert num_clipped > 0
    assert found[-1] < found[0]
