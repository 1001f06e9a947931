"""A loss of your own on blocks of logits: cross-entropy with label smoothing. docs/losses.md explains more.

Full logits never exist: the model's head calls the function with a few tokens at a time, and autograd differentiates
the sum that it returns.
"""

import torch

from flexengine import from_pretrained
from flexengine.ops.custom_loss import LogitsBlock
from flexengine.optim import AdamW

SMOOTHING, STEPS = 0.1, 4


def smoothed(block: LogitsBlock) -> torch.Tensor:
    """Sum of the losses of a block: the label counts 1 - SMOOTHING, all tokens of the vocabulary share the rest."""
    log_probs = block.logits.log_softmax(-1)
    of_labels = log_probs.gather(1, block.labels[:, None])[:, 0]
    return -((1 - SMOOTHING) * of_labels + SMOOTHING * log_probs.mean(-1)).sum()


generator = torch.Generator().manual_seed(0)
batch = torch.randint(0, 2944, (2, 32), generator=generator).tolist()  # lists of token ids; every token is a target

with from_pretrained(
    "preset:demo",
    optimizer=AdamW(lr=1e-3),
    max_seq_len=32,
    max_global_batch_tokens=64,
    max_gpu_mem_gib=1,
    dtype="float32",
) as engine:
    for step in range(1, STEPS + 1):
        out, _ = engine.train_step(batch, loss=smoothed)
        print(f"step {step}: smoothed loss {out.loss:.3f}, cross-entropy {engine.evaluate(batch).loss:.3f}")
