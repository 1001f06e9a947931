"""Direct preference optimization (DPO): of two answers to a prompt, the chosen one is to become likelier.

Source: Rafailov et al., "Direct Preference Optimization", 2023, equation 7; the defaults are those of TRL's trainer.
The reference is the model before training: new adapters change nothing, so their model's log-probabilities before the
first step are the reference's, and no second model is loaded. `flexengine train --objective dpo` does the same for
files of pairs; docs/losses.md explains more.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from transformers import AutoTokenizer

import flexengine
from flexengine import from_pretrained
from flexengine.objectives import DPO, AnswerRows, reference_log_probs, train_step
from flexengine.optim import AdamW
from flexengine.options.lora import LoRA

BUNDLED = Path(flexengine.__file__).parent / "assets" / "demo"
BETA, LR, STEPS, NUM_PAIRS = 0.1, 2e-3, 4, 4


class Preference(NamedTuple):
    """A prompt with two answers, of which the first is preferred."""

    prompt: str
    chosen: str
    rejected: str


def read_preferences(path: Path, count: int) -> list[Preference]:
    """Make pairs of questions and answers: the answer to the next question is the rejected one."""
    lines = path.read_text(encoding="utf-8").splitlines()[: 4 * count]
    records = [record for record in map(json.loads, lines) if "input" not in record][: count + 1]
    answers = [record["output"] for record in records]
    return [Preference(records[i]["instruction"], answers[i], answers[i + 1]) for i in range(len(records) - 1)]


def tokenize(tokenizer: Any, preferences: Sequence[Preference]) -> AnswerRows:
    """Make ragged rows (chosen, rejected, chosen, ...), in which only answers have labels."""
    input_ids, labels = [], []
    for prompt, *answers in preferences:
        turns = [{"role": "user", "content": prompt}]
        context = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        context_ids = tokenizer(context, add_special_tokens=False)["input_ids"]
        for answer in answers:
            ids = tokenizer(answer + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
            input_ids.append(context_ids + ids)
            labels.append([-100] * len(context_ids) + ids)
    return AnswerRows(input_ids, labels)


def main() -> None:
    """Train adapters of the bundled model's shape on a few pairs."""
    tokenizer = AutoTokenizer.from_pretrained(BUNDLED)
    rows = tokenize(tokenizer, read_preferences(BUNDLED / "demo_instructions.jsonl", NUM_PAIRS))
    with from_pretrained(
        "preset:demo",
        lora=LoRA(rank=8),
        optimizer=AdamW(lr=LR),
        max_seq_len=64,
        max_global_batch_tokens=64 * 2 * NUM_PAIRS,
        max_gpu_mem_gib=1,
        dtype="float32",
    ) as engine:
        rows = rows._replace(reference=reference_log_probs(engine, rows))
        for number in range(1, STEPS + 1):
            found, _, _ = train_step(engine, DPO(BETA), rows)
            print(f"step {number}: DPO loss {found.loss:.4f}, accuracy {found.accuracy:.0%}")
        engine.save_pretrained("preferred")  # the adapters, as PEFT writes them


if __name__ == "__main__":
    main()
