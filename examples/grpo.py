"""Group relative policy optimization (GRPO) on completions that are given with their rewards.

Source: Shao et al., "DeepSeekMath", 2024, equation 3, with the defaults of TRL's trainer: no KL term, advantages
divided by the group's standard deviation, ratios of tokens clipped at 1 +- 0.2, and the sum of all tokens' losses
divided by their number (Yu et al., "DAPO", 2025). In a real run completions come from `engine.generate`, the rewards
from a function of them. The loss is a function on blocks of logits; docs/losses.md explains more.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoTokenizer

import flexengine
from flexengine import from_pretrained
from flexengine.ops.custom_loss import LogitsBlock
from flexengine.optim import AdamW
from flexengine.runtime.engine import Engine

BUNDLED = Path(flexengine.__file__).parent / "assets" / "demo"
EPSILON, LR, UPDATES_PER_BATCH = 0.2, 1e-5, 4


class Group(NamedTuple):
    """Completions of one prompt, and how good each is."""

    prompt: str
    completions: Sequence[str]
    rewards: Sequence[float]


GROUPS = (
    Group("What is 10 plus 42?", ("10 plus 42 is 52.", "52", "10 plus 42 is 42.", "take"), (1.0, 0.6, 0.2, 0.0)),
    Group(
        "What is the opposite of give?",
        ("The opposite of give is take.", "take", "give", "The capital of Latvia is Riga."),
        (1.0, 0.6, 0.1, 0.0),
    ),
)


def advantages_of(rewards: Tensor) -> Tensor:
    """Standardize rewards [groups, completions] within each group, by the unbiased standard deviation."""
    deviations = rewards - rewards.mean(1, keepdim=True)
    return deviations / (rewards.std(1, keepdim=True) + 1e-4)


def tokenize(tokenizer: Any, groups: Sequence[Group]) -> dict[str, list[list[int]]]:
    """Make a batch of ragged rows, group by group, in which only completions have labels."""
    batch: dict[str, list[list[int]]] = {"input_ids": [], "labels": []}
    for group in groups:
        turns = [{"role": "user", "content": group.prompt}]
        context = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        context_ids = tokenizer(context, add_special_tokens=False)["input_ids"]
        for completion in group.completions:
            ids = tokenizer(completion + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
            batch["input_ids"].append(context_ids + ids)
            batch["labels"].append([-100] * len(context_ids) + ids)
    return batch


def clipped_loss(
    old_log_probs: Tensor, advantages: Tensor, epsilon: float = EPSILON
) -> Callable[[LogitsBlock], Tensor]:
    """Make the loss of a step: for each token -min(ratio * A, clip(ratio, 1 - epsilon, 1 + epsilon) * A).

    Shapes: old_log_probs [rows, longest row], from the model that the completions are of; advantages [rows]. Both are
    on the engine's device. ratio is the token's probability now by that probability.
    """

    def loss(block: LogitsBlock) -> Tensor:
        new = block.logits.log_softmax(-1).gather(1, block.labels[:, None])[:, 0]
        ratio = (new - old_log_probs[block.sequences, block.positions]).exp()
        advantage = advantages[block.sequences]
        return -torch.minimum(ratio * advantage, ratio.clamp(1 - epsilon, 1 + epsilon) * advantage).sum()

    return loss


def grpo_updates(
    engine: Engine, batch: dict[str, Any], rewards: Tensor, num_updates: int, lr: float | None = None
) -> list[float]:
    """Take optimizer steps on one batch of completions; returns the loss before each.

    rewards: [groups, completions], in the order of the batch's rows.
    """
    before = engine.evaluate(batch, per_token=True).token_log_probs
    assert before is not None
    old_log_probs = pad_sequence(before, batch_first=True).to(engine.device)
    loss = clipped_loss(old_log_probs, advantages_of(rewards).flatten().to(engine.device))
    losses = []
    for _ in range(num_updates):
        losses.append(engine.fwd_bwd(batch, loss=loss).loss)  # the mean over the completions' tokens
        engine.step(lr)
    return losses


def main() -> None:
    """Train the bundled model's shape on two groups."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    batch = tokenize(tokenizer, GROUPS)
    with from_pretrained(
        "preset:demo",
        optimizer=AdamW(lr=LR),
        max_seq_len=64,
        max_global_batch_tokens=512,
        max_gpu_mem_gib=1,
        dtype="float32",
    ) as engine:
        rewards = torch.tensor([group.rewards for group in GROUPS])
        for update, loss in enumerate(grpo_updates(engine, batch, rewards, UPDATES_PER_BATCH), start=1):
            print(f"update {update}: GRPO loss {loss:.4f}")


if __name__ == "__main__":
    main()
