"""A training loop of your own: transformers' tokenizer and collator, accumulated gradients, a learning-rate schedule.

At the end the exported model is loaded in transformers, and both give the same loss.
"""

import json
from pathlib import Path

import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq

import flexengine
from flexengine import from_pretrained
from flexengine.optim import AdamW

BUNDLED = Path(flexengine.__file__).parent / "assets" / "demo"
LR, CALLS_PER_STEP, STEPS = 2e-3, 2, 3

tokenizer = AutoTokenizer.from_pretrained(BUNDLED)


def tokenized(row: dict) -> dict:
    """Tokens of a question and its answer; only the answer has labels."""
    turns = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
    question = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template(turns, tokenize=False)
    ids = tokenizer(whole, add_special_tokens=False)["input_ids"]
    num_context = len(tokenizer(question, add_special_tokens=False)["input_ids"])
    return {"input_ids": ids, "labels": [-100] * num_context + ids[num_context:]}


lines = (BUNDLED / "demo_instructions.jsonl").read_text(encoding="utf-8").splitlines()[:200]
records = [record for record in map(json.loads, lines) if "input" not in record]
rows = [{"question": record["instruction"], "answer": record["output"]} for record in records]
data = Dataset.from_list(rows).map(tokenized, remove_columns=["question", "answer"])
loader = DataLoader(data, batch_size=4, shuffle=True, collate_fn=DataCollatorForSeq2Seq(tokenizer))

with from_pretrained(
    "preset:demo",
    optimizer=AdamW(weight_decay=0.01),
    max_seq_len=64,
    max_global_batch_tokens=256,
    max_gpu_mem_gib=1,
    dtype="float32",
) as engine:
    step = 0
    for call, batch in enumerate(loader, start=1):
        out = engine.fwd_bwd(batch)  # the gradients of several calls add up
        if call % CALLS_PER_STEP == 0:
            update = engine.step(lr=LR * (1 - step / STEPS))  # trains the mean over all target tokens of these calls
            step += 1
            print(f"step {step}: loss of the last call {out.loss:.3f}, gradient norm {update.grad_norm:.2f}")
        if step == STEPS:
            break
    loss = engine.evaluate(batch).loss
    engine.save_pretrained("tuned")

model = AutoModelForCausalLM.from_pretrained("tuned", dtype=torch.float32)
with torch.no_grad():
    same = model(**batch).loss.item()
print(f"loss of the last batch: {loss:.6f}; of the exported model in transformers: {same:.6f}")
assert abs(loss - same) < 1e-4
