"""What objectives take beside the arenas of a plan: no more than its own step, and on a GPU the budget holds."""

import json
import subprocess
import sys

import pytest
import torch
from engine_helpers import peaks_of, random_batch, saved_model, tiny_config

from flexengine import Sampling, from_pretrained
from flexengine.objectives import DPO, GRPO, AnswerRows, Groups, reference_log_probs, train_step, update_groups

GIB = 2**30


def test_objectives_take_no_more_than_a_step_of_sft_with_adapters(tmp_path):
    """What the plan counts is one step for all; what calls allocate is compared, with the arenas, in bytes."""
    saved_model(tmp_path, tiny_config(vocab_size=4096))
    sizes = {"max_seq_len": 64, "max_global_batch_tokens": 512, "dtype": "float32", "device": "cpu"}
    with from_pretrained(tmp_path, mode="lora", hardware="cpu-test", **sizes) as engine:
        ids = random_batch(1, [64] * 8, 4096)
        labels = [[-100] * 8 + row[8:] for row in ids]
        rows, columns = AnswerRows(ids, labels), {"input_ids": ids, "labels": labels}
        rows = rows._replace(reference=reference_log_probs(engine, rows))
        groups = Groups(columns, torch.linspace(-1, 1, 8))
        sft, dpo, reference, grpo, writing = peaks_of(
            [
                lambda: engine.train_step(columns),
                lambda: train_step(engine, DPO(), rows),
                lambda: reference_log_probs(engine, rows),
                lambda: update_groups(engine, GRPO(), groups, keep=True),
                lambda: engine.generate([row[:32] for row in ids], 8, sampling=Sampling(temperature=1.0)),
            ]
        )
        held = sum(engine.arenas.capacity[place] for place in ("gpu", "host"))
        counted = engine.plan.predicted.host_categories
    assert held + max(dpo, reference) <= 1.05 * (held + sft)
    assert max(sft, dpo, reference, grpo, writing) <= counted["temporaries"]


COMMAND = """
import io, json, sys
from flexengine import cli
from flexengine.runtime.engine import Engine
close = Engine.close
def told(engine):
    print(json.dumps({"peaks": engine.memory_peaks()}), flush=True)
    close(engine)
Engine.close = told
sys.stdin = io.StringIO("Which day is it?\\nAnd tomorrow?\\n")
sys.exit(cli.main(sys.argv[1:]))
"""
LATE = "def late(completion_ids):\n    return [float(row[-1]) for row in completion_ids]\n"
TRAINED = "--max-seq-len 256 --max-global-batch-tokens 8192 --steps 3 --mode lora --data-cache cache --output-dir run"


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.parametrize(
    "command",
    [
        "generate --prompt Hello --max-new-tokens 64 --temperature 1",
        "chat --max-new-tokens 64 --max-seq-len 1024",
        f"train --dataset pairs.jsonl --objective dpo {TRAINED}",
        f"train --dataset prompts.jsonl --objective grpo --rewards late.py:late --max-completion-length 64 {TRAINED}",
    ],
    ids=["generate", "chat", "dpo", "grpo"],
)
def test_budgets_hold_on_a_gpu(command, tmp_path):
    """50M random parameters, as NVML and the kernel count the process."""
    (tmp_path / "late.py").write_text(LATE)
    texts = [f"What is {i} plus {i}?" for i in range(64)]
    pairs = [{"prompt": text, "chosen": f"{i} is right.", "rejected": "It is not."} for i, text in enumerate(texts)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    budgets = ["--max-gpu-mem-gib", "1.5", "--max-host-mem-gib", "12"]
    asked = [*command.split(), "--model", "preset:tiny-llama3-50m", *budgets]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, *asked], cwd=tmp_path, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stderr
    if command.startswith("train"):
        line = json.loads((tmp_path / "run" / "train_log.jsonl").read_text().splitlines()[-1])
        gpu_bytes, host_bytes = line["gpu_peak_bytes"], line["host_peak_bytes"]
    else:
        told = [line for line in done.stdout.splitlines() if line.startswith('{"peaks"')]
        gpu_bytes, host_bytes = json.loads(told[-1])["peaks"]
    assert 0 < gpu_bytes <= 1.5 * GIB
    assert 0 < host_bytes <= 12 * GIB
