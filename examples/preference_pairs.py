"""DPO from per-token log-probabilities: their derivatives are the weights of the tokens. docs/losses.md explains why.

The pairs here are random tokens, so that the script runs in seconds: chosen answers get likelier than rejected ones.
"""

import torch
from torch.nn.functional import logsigmoid

from flexengine import from_pretrained
from flexengine.optim import AdamW

BETA, STEPS, PAIRS, PROMPT_LENGTH, ANSWER_LENGTH = 0.1, 4, 2, 8, 12

generator = torch.Generator().manual_seed(0)
prompts = torch.randint(0, 2944, (PAIRS, PROMPT_LENGTH), generator=generator)
answers = torch.randint(0, 2944, (2 * PAIRS, ANSWER_LENGTH), generator=generator)
input_ids = torch.cat((prompts.repeat_interleave(2, 0), answers), 1)  # chosen, rejected, chosen, rejected, ...
labels = input_ids.clone()
labels[:, :PROMPT_LENGTH] = -100
batch = {"input_ids": input_ids, "labels": labels}


def margins_of(log_probs: list[torch.Tensor], reference: torch.Tensor) -> torch.Tensor:
    """How much more the chosen answers gained on the model before training than the rejected ones."""
    gains = BETA * (torch.stack([row.sum() for row in log_probs]) - reference)
    return gains[0::2] - gains[1::2]


with from_pretrained(
    "preset:demo",
    optimizer=AdamW(lr=1e-4),
    max_seq_len=32,
    max_global_batch_tokens=128,
    max_gpu_mem_gib=1,
    dtype="float32",
) as engine:
    reference = torch.stack([row.sum() for row in engine.evaluate(batch, per_token=True).token_log_probs])
    for step in range(1, STEPS + 1):
        log_probs = [row.requires_grad_() for row in engine.evaluate(batch, per_token=True).token_log_probs]
        margins = margins_of(log_probs, reference)
        loss = -logsigmoid(margins).mean()
        loss.backward()
        engine.fwd_bwd(batch, weights=[-row.grad for row in log_probs])
        engine.step(divisor=1)  # the gradient is that of `loss`, not of a mean over tokens
        print(f"step {step}: DPO loss {loss.item():.4f}, mean margin {margins.mean().item():.4f}")
