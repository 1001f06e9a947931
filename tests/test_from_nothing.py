"""The README's flow on the bundled model: look at the data, train with validation, be stopped, resume, export, ask.

Runs are processes of their own, as a person starts them.
"""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from flexengine.checkpoint.run_checkpoints import whole_checkpoints
from flexengine.cli import main
from flexengine.models.registry import ASSETS
from flexengine.run.saver import STOPPED

ROOT = Path(__file__).resolve().parents[1]
STEPS, LENGTH, NUM_NEW = 8, 64, 6
PROMPT = "What is 2 plus 2?"
DEADLINE_S = 600


@pytest.fixture(autouse=True)
def _folder_of_a_new_user(tmp_path, monkeypatch):
    """A folder with a model's config and tokenizer, and a file of records."""
    monkeypatch.chdir(tmp_path)
    Path("model").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "demo" / name, "model")
    config = json.loads((ASSETS / "demo" / "config.json").read_text())
    Path("model/config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    records = (ASSETS / "demo" / "demo_instructions.jsonl").read_text().splitlines(keepends=True)
    Path("data.jsonl").write_text("".join(records[:600]))


def flexengine(*flags: str) -> subprocess.Popen[str]:
    """Start a command."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "flexengine", *flags]
    return subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    """What a command printed that this process ran."""
    assert main(list(flags)) == 0
    return capsys.readouterr().out


def finished(process: subprocess.Popen[str], status: int = 0) -> str:
    """What a command printed that ended with this exit status."""
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == status, out + err
    return out


def lines_of(log: str) -> list[dict]:
    path = Path("run") / log
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def stop_after_a_step(process: subprocess.Popen[str]) -> None:
    """Ask a run to stop as soon as it has taken a step."""
    deadline = time.monotonic() + DEADLINE_S
    while not lines_of("train_log.jsonl"):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "no step was taken"
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)


def greedy(folder: str) -> str:
    """How the exported model answers in transformers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    turns = [{"role": "user", "content": PROMPT}]
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**ids, max_new_tokens=NUM_NEW, do_sample=False, pad_token_id=tokenizer.eos_token_id)
    return tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()


@pytest.mark.long
@pytest.mark.thorough
def test_from_nothing_to_answers(capsys):
    data = ("--dataset", "data.jsonl", "--max-seq-len", str(LENGTH))
    on_cpu = ("--dtype", "float32", "--device", "cpu", "--max-gpu-mem-gib", "0.1")
    train = (
        "train", "--model", "model", "--init", "random", *data, *on_cpu, "--max-global-batch-tokens", "128",
        "--steps", str(STEPS), "--val-fraction", "0.005", "--eval-steps", "4", "--sample-prompts", PROMPT,
        "--save-steps", "4", "--output-dir", "run",
    )  # fmt: skip

    assert "trained tokens stand between [[ and ]]" in printed(capsys, "data", "preview", "--model", "model", *data)

    first = flexengine(*train)
    stop_after_a_step(first)
    finished(first, STOPPED)
    stopped_at = whole_checkpoints(Path("run"))[0].step
    assert stopped_at == len(lines_of("train_log.jsonl")) < STEPS

    said = finished(flexengine(*train, "--resume", "auto"))
    assert f"resumed after step {stopped_at} of {STEPS}" in said
    assert f"sample: {PROMPT!r} -> " in said
    steps, evaluations = lines_of("train_log.jsonl"), lines_of("eval_log.jsonl")
    assert [line["step"] for line in steps] == list(range(1, STEPS + 1))
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert [line["step"] for line in evaluations] == [4, STEPS]
    assert evaluations[-1]["perplexity"] == pytest.approx(math.exp(evaluations[-1]["loss"]))

    assert f"model after step {STEPS}: run/final" in printed(capsys, "export", "--run", "run")
    asked = ("--prompt", PROMPT, "--max-new-tokens", str(NUM_NEW))
    answer = printed(capsys, "generate", "--model", "run/final", *on_cpu, *asked).strip()
    assert answer == greedy("run/final")
