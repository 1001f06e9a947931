"""Evaluate a model token by token: the log-probability of each, the perplexity, and what surprised the model most."""

import math
from pathlib import Path

import torch
from transformers import AutoTokenizer

import flexengine
from flexengine import from_pretrained

BUNDLED = Path(flexengine.__file__).parent / "assets" / "demo"
TEXTS = ["The opposite of give is take.", "10 plus 42 is 52."]

tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
batch = tokenizer(TEXTS, add_special_tokens=False, padding=True, return_tensors="pt")

with from_pretrained(
    "preset:demo", max_seq_len=64, max_global_batch_tokens=256, max_gpu_mem_gib=1, dtype="float32"
) as engine:
    found = engine.evaluate(batch, per_token=True)  # forward only; padding is left out

for ids, mask, log_probs in zip(batch["input_ids"], batch["attention_mask"], found.token_log_probs, strict=True):
    tokens = tokenizer.convert_ids_to_tokens(ids[mask.bool()])
    worst = int(torch.argmin(log_probs))  # the first token has none: nothing comes before it
    print(" ".join(f"{token}:{p:.2f}" for token, p in zip(tokens[1:], log_probs[1:].tolist(), strict=True)))
    print(f"  most surprising: {tokens[worst]!r}, {math.exp(log_probs[worst]):.2e}")

mean = sum(float(row.sum()) for row in found.token_log_probs) / found.num_target_tokens
print(f"loss {found.loss:.4f}, perplexity {math.exp(found.loss):.1f}")
assert math.isclose(found.loss, -mean, rel_tol=1e-5)
