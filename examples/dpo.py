"""Direct preference optimization (DPO): of two answers to a prompt, the chosen one is to become likelier.

Source: Rafailov et al., "Direct Preference Optimization", 2023, equation 7; the defaults are those of TRL's trainer.
The reference is the model before training: new adapters change nothing, so their model's log-probabilities before the
first step are the reference's, and no second model is loaded. DPO's gradient is that of a weighted sum of the tokens'
log-probabilities; docs/losses.md explains more.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer

import flexengine
from flexengine import from_pretrained
from flexengine.optim import AdamW
from flexengine.options.lora import LoRA
from flexengine.runtime.engine import Engine

BUNDLED = Path(flexengine.__file__).parent / "assets" / "demo"
BETA, LR, STEPS, NUM_PAIRS = 0.1, 2e-3, 4, 4


class Preference(NamedTuple):
    """A prompt with two answers, of which the first is preferred."""

    prompt: str
    chosen: str
    rejected: str


class DpoStep(NamedTuple):
    """loss: before the update. margin: how much further than the reference the chosen answers are ahead, on average."""

    loss: float
    margin: float


def read_preferences(path: Path, count: int) -> list[Preference]:
    """Make pairs of questions and answers: the answer to the next question is the rejected one."""
    lines = path.read_text(encoding="utf-8").splitlines()[: 4 * count]
    records = [record for record in map(json.loads, lines) if "input" not in record][: count + 1]
    answers = [record["output"] for record in records]
    return [Preference(records[i]["instruction"], answers[i], answers[i + 1]) for i in range(len(records) - 1)]


def tokenize(tokenizer: Any, preferences: Sequence[Preference]) -> dict[str, list[list[int]]]:
    """Make a batch of ragged rows (chosen, rejected, chosen, ...), in which only answers have labels."""
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for prompt, *answers in preferences:
        turns = [{"role": "user", "content": prompt}]
        context = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        context_ids = tokenizer(context, add_special_tokens=False)["input_ids"]
        for answer in answers:
            ids = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
            batch["input_ids"].append(context_ids + ids)
            batch["labels"].append([-100] * len(context_ids) + ids)
    return batch


def answer_log_probs(engine: Engine, batch: dict[str, Any]) -> list[Tensor]:
    """Log-probabilities of the tokens of each row; those without a label have 0."""
    found = engine.evaluate(batch, per_token=True).token_log_probs
    assert found is not None
    return found


def sums_of(rows: Sequence[Tensor]) -> Tensor:
    """Log-probability of each row's answer."""
    return torch.stack([row.sum() for row in rows])


def dpo_step(
    engine: Engine, batch: dict[str, Any], reference: Tensor, beta: float = BETA, lr: float | None = None
) -> DpoStep:
    """Take one optimizer step on pairs. reference: the `sums_of` their rows in the reference model.

    The loss is the mean of -log sigmoid(beta * margin) over pairs. Its derivatives by the log-probabilities of tokens
    are the weights of a second pass, which trains.
    """
    rows = [row.requires_grad_() for row in answer_log_probs(engine, batch)]
    ahead = sums_of(rows) - reference
    margins = ahead[0::2] - ahead[1::2]
    loss = -logsigmoid(beta * margins).mean()
    loss.backward()
    engine.fwd_bwd(batch, weights=[-row.grad for row in rows])
    engine.step(lr, divisor=1)  # the gradient is that of `loss`, not of a mean over tokens
    return DpoStep(loss.item(), margins.mean().item())


def main() -> None:
    """Train adapters of the bundled model's shape on a few pairs."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    batch = tokenize(tokenizer, read_preferences(BUNDLED / "demo_instructions.jsonl", NUM_PAIRS))
    with from_pretrained(
        "preset:demo",
        lora=LoRA(rank=8),
        optimizer=AdamW(lr=LR),
        max_seq_len=64,
        max_global_batch_tokens=64 * 2 * NUM_PAIRS,
        max_gpu_mem_gib=1,
        dtype="float32",
    ) as engine:
        reference = sums_of(answer_log_probs(engine, batch))
        for number in range(1, STEPS + 1):
            step = dpo_step(engine, batch, reference)
            print(f"step {number}: DPO loss {step.loss:.4f}, mean margin {step.margin:.4f}")
        engine.save_pretrained("preferred")  # the adapters, as PEFT writes them


if __name__ == "__main__":
    main()
