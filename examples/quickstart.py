"""Train a model on records under a budget, and save it. Runs in seconds on the bundled model.

For a model of your own, MODEL and TOKENIZER are its folder (`python download.py model ORG/NAME --target FOLDER`).
"""

from pathlib import Path

import flexengine
from flexengine import from_pretrained
from flexengine.data import ChatTokenizer, GlobalBatches, parse_source, prepare_sources
from flexengine.optim import AdamW

BUNDLED = Path(flexengine.__file__).parent / "assets" / "demo"
MODEL, TOKENIZER = "preset:demo", BUNDLED  # preset:demo has the shape of the bundled model and random weights
RECORDS = BUNDLED / "demo_instructions.jsonl"  # any source of `--dataset`: files, folders, hub ids
MAX_SEQ_LEN, TOKENS_PER_STEP, STEPS = 64, 256, 6

tokenizer = ChatTokenizer.from_folder(TOKENIZER)
prepared = prepare_sources([parse_source(str(RECORDS))], tokenizer, MAX_SEQ_LEN, truncate_long=False, cache=None)
print(prepared[0].describe())
batches = GlobalBatches.of_parts(prepared, TOKENS_PER_STEP, seed=0)

# float32 suits a CPU; on a GPU leave dtype out, and bfloat16 is used. The host budget is what is free.
with from_pretrained(
    MODEL,
    optimizer=AdamW(lr=2e-3),
    max_seq_len=MAX_SEQ_LEN,
    max_global_batch_tokens=TOKENS_PER_STEP,
    max_gpu_mem_gib=1.0,
    dtype="float32",
) as engine:
    print(engine.describe())
    for step, batch in enumerate(batches.batches(STEPS), start=1):
        out, update = engine.train_step(input_ids=batch.input_ids, labels=batch.labels)
        print(f"step {step}: loss {out.loss:.3f}, gradient norm {update.grad_norm:.2f}")
    engine.save_pretrained("tuned")  # a folder that transformers loads unchanged
