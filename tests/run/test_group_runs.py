"""Runs of `train --objective grpo`: what they write and learn, log, stop and resume, and how rewards fail."""

import json
import shutil

import pytest

from flexengine import cli
from flexengine.hardware.presets import preset
from flexengine.models.registry import ASSETS
from flexengine.run import trainer
from flexengine.run.rewards import Rewards
from tests.failures.provoke import arguments, write_model

QUESTIONS = ASSETS / "demo" / "demo_instructions.jsonl"
REWARDS = """
import time

def short(completions, **_):
    return [-float(len(text)) for text in completions]

def early(completion_ids, output):
    assert len(output) == len(completion_ids)
    return [sum(token < 500 for token in row) / len(row) for row in completion_ids]

def few(completions):
    return [1.0]

def broken(completions):
    return [completions[0].answer]

def text(completions):
    return ["good" for _ in completions]

def slow(completions):
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_model(tmp_path_factory.mktemp("source") / "model", vocab_size=2944)
    for file in (ASSETS / "demo").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Runs `train` in tmp_path; returns the exit status."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    common = {"model": model, "dataset": QUESTIONS, "data_source": None, "steps": 6, "lr": 5e-2, "save": True}
    common |= {"max_seq_len": 64, "max_global_batch_tokens": 512, "data_cache": tmp_path / "cache", "max_records": 40}
    common |= {"objective": "grpo", "rewards": "rewards.py:early", "max_completion_length": 6, "num_generations": 4}

    def run(folder="run", **options):
        return cli.main(["train", *arguments(**{**common, "output_dir": folder, **options})])

    return run


def logged(folder, name="train_log.jsonl"):
    """The lines of a log, but for times and memory."""
    lines = (json.loads(line) for line in (folder / name).read_text().splitlines())
    measured = ("_s", "_bytes", "pct", "flops")
    return [{key: value for key, value in line.items() if not key.endswith(measured)} for line in lines]


def test_a_run_that_is_killed_goes_on_with_the_same_bits(run, tmp_path, monkeypatch, capsys):
    """Adapters, so that the model beneath is the reference; and rewards rise."""
    options = {"mode": "lora", "beta": 0.05, "temperature": 0.9, "val_fraction": 0.1, "eval_steps": 3, "save_steps": 2}
    assert run("whole", **options) == 0
    assert "reward" in capsys.readouterr().out
    steps, evaluations = (logged(tmp_path / "whole", f"{name}_log.jsonl") for name in ("train", "eval"))
    assert steps[0]["kl"] == pytest.approx(0, abs=1e-7)
    assert steps[-1]["kl"] > 1e-5
    assert all(1 <= step["completion_tokens"] <= 6 and 0 <= step["reward"] <= 1 for step in steps)
    assert len({step["generation_seed"] for step in steps}) == len(steps)
    assert evaluations[-1]["reward"] > evaluations[0]["reward"] > 0.1
    assert evaluations[0]["loss"] == -evaluations[0]["reward"]
    take_step = trainer.take_step

    def killed(engine, batch, number, *more):
        if number == 4:
            raise KeyboardInterrupt
        return take_step(engine, batch, number, *more)

    with monkeypatch.context() as patched:
        patched.setattr(trainer, "take_step", killed)
        assert run("stopped", **options) != 0
    assert run("stopped", resume="auto", **options) == 0
    assert logged(tmp_path / "stopped") == logged(tmp_path / "whole")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("rewards.py:few", "returned 1 rewards for"),
        ("rewards.py:broken", "raised AttributeError at line 15: 'str' object has no attribute 'answer'"),
        ("rewards.py:text", "returned 'good'; a reward is a number, or None"),
        ("rewards.py:slow", "nothing was heard of it for 0.5 s; correct the function, or give --reward-timeout-s"),
        ("rewards.py:missing", "has no function missing"),
        ("other.py:early", "there is no file other.py"),
        ("rewards.py", "write file.py:function"),
    ],
)
def test_rewards_that_fail_are_told_in_one_message(tmp_path, monkeypatch, name, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text(REWARDS)
    with pytest.raises(ValueError, match="--rewards") as raised:
        Rewards([name], [], 0.5).of({"completions": ["a", "b"]})
    assert said in str(raised.value)


def test_rewards_of_several_functions_are_weighed(tmp_path):
    (tmp_path / "rewards.py").write_text(REWARDS + "def some(completions):\n    return [None, 2]\n")
    rewards = Rewards([f"{tmp_path}/rewards.py:{name}" for name in ("short", "some")], [0.5, 3.0], 20.0)
    found = rewards.of({"completions": ["abc", "a"]})
    assert rewards.total(found).tolist() == [-1.5, 5.5]
    rewards.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"reward_weights": "good"}, "--reward-weights good: a weight is a number"),
        ({"beta": 0.1, "mode": "full"}, "compares with the model beneath adapters, and --mode full trains all of it"),
        ({"max_completion_length": 64}, "leaves nothing of --max-seq-len 64 for prompts"),
        ({"num_generations": 40}, "a prompt with its completions of"),
        ({"dataset": "answers.jsonl"}, "the conversation ends with a turn of the assistant"),
    ],
)
def test_what_is_refused(run, tmp_path, capsys, options, said):
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    (tmp_path / "answers.jsonl").write_text(json.dumps({"messages": turns}))
    assert run(**options) == 2
    assert said in capsys.readouterr().err
