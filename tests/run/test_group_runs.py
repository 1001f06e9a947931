"""Runs of `train --objective grpo`: what they write and learn, log, stop and resume, and how rewards fail."""

import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from engine_helpers import saved_model, tiny_config

from flexengine import Sampling, cli, from_pretrained
from flexengine.data.batches import PromptBatch
from flexengine.hardware.presets import preset
from flexengine.models.registry import ASSETS
from flexengine.run.health import RunHealth
from flexengine.run.rewards import Rewards
from tests.failures.provoke import arguments, killed_in, write_answering

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
    return write_answering(tmp_path_factory.mktemp("source") / "model")


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
    """Adapters, so that the model beneath is the reference; and two updates on the same completions."""
    options = {"mode": "lora", "beta": 0.05, "temperature": 0.9, "val_fraction": 0.1, "eval_steps": 3, "save_steps": 2}
    options |= {"num_iterations": 2}
    assert run("whole", **options) == 0
    said = capsys.readouterr()
    assert "reward" in said.out
    assert "completions of 6 tokens: " in said.out + said.err
    steps, evaluations = (logged(tmp_path / "whole", f"{name}_log.jsonl") for name in ("train", "eval"))
    assert 0 < steps[0]["kl"] < steps[-1]["kl"]  # of the second update on the same completions
    assert steps[0]["loss"] != pytest.approx(0, abs=1e-7)
    timed = [json.loads(line) for line in (tmp_path / "whole" / "train_log.jsonl").read_text().splitlines()]
    for one in timed:
        assert 0 < one["generation_s"] < one["step_s"]
        assert 0 < one["predicted_generation_s"] < one["predicted_step_s"]
    assert steps[-1]["kl"] > 1e-5
    assert all(1 <= step["completion_tokens"] <= 6 and 0 <= step["reward"] <= 1 for step in steps)
    assert len({step["generation_seed"] for step in steps}) == len(steps)
    assert evaluations[0]["loss"] == -evaluations[0]["reward"]
    with killed_in(4):
        assert run("stopped", **options) != 0
    assert run("stopped", resume="auto", **options) == 0
    assert logged(tmp_path / "stopped") == logged(tmp_path / "whole")


def test_a_model_is_judged_by_prompts_after_bad_steps(model):
    """They have no targets, and the reward of whatever a broken model writes is a number."""
    sizes = {"max_seq_len": 16, "max_global_batch_tokens": 32, "dtype": "float32", "device": "cpu"}
    with from_pretrained(model, hardware="cpu-test", **sizes) as engine:
        health = RunHealth(engine, None, None)
        health.in_a_row, health.good_batch = 1, PromptBatch([[5, 6, 7]], [[-100] * 3], records=[{}])
        assert not health.diverged()
        engine.train_step([[1, 2, 3]], lr=1e38)
        assert health.diverged()


class Server(BaseHTTPRequestHandler):
    """Answers as vLLM does, by an engine of its own with the adapter that was loaded last."""

    base, loaded, asked, wrong = None, {}, [], None

    def do_GET(self):
        self.answer(200, {"data": [{"id": "base", "max_model_len": 64}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        if self.path == self.wrong:
            self.answer(400, {"error": {"message": "LoRA rank 8 is greater than max_lora_rank 4."}})
        elif self.path == "/v1/load_lora_adapter":
            sizes = {"max_seq_len": 64, "max_global_batch_tokens": 512, "dtype": "float32", "device": "cpu"}
            self.loaded[body["lora_name"]] = from_pretrained(self.base, adapter=body["lora_path"], **sizes)
            self.answer(200, "Success: added")  # vLLM answers with a text here
        elif self.path == "/v1/unload_lora_adapter":
            self.loaded.pop(body["lora_name"]).close()
            self.answer(200, "Success: removed")
        else:
            prompts = [prompt for prompt in body["prompt"] for _ in range(body["n"])]
            sampling = Sampling(body["temperature"], body["top_p"], body["seed"])
            rows = self.loaded[body["model"]].generate(
                prompts, body["max_tokens"], stop_ids=body["stop_token_ids"], keep_stop=True, sampling=sampling
            )
            self.answer(200, {"choices": [{"index": i, "token_ids": row} for i, row in enumerate(rows)][::-1]})

    def answer(self, status, body):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode() if isinstance(body, str) else json.dumps(body).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server(model, monkeypatch):
    """The URL of a server."""
    monkeypatch.setattr(Server, "base", model)
    monkeypatch.setattr(Server, "asked", [])
    monkeypatch.setattr(Server, "loaded", {})
    with HTTPServer(("127.0.0.1", 0), Server) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{listening.server_port}/v1"
        listening.shutdown()
        thread.join()
    for engine in Server.loaded.values():
        engine.close()


def test_rewards_rise_by_adapters(run, tmp_path):
    """Adapters turn hidden states, and a reward that follows the head's rows along one direction is within their reach.

    Early ids are not: no direction of a narrow model tells a part of a random vocabulary from the rest.
    """
    folder = tmp_path / "source"
    head = saved_model(folder, tiny_config(vocab_size=2944)).lm_head.weight
    for file in (ASSETS / "demo").glob("tokenizer*"):
        shutil.copy(file, folder)
    wanted = (head[:, 0] > 0).nonzero()[:, 0].tolist()
    (tmp_path / "easy.py").write_text(
        f"IDS = set({wanted})\ndef easy(completion_ids):\n"
        "    return [sum(token in IDS for token in row) / len(row) for row in completion_ids]\n"
    )
    options = {"model": folder, "rewards": "easy.py:easy", "mode": "lora", "num_generations": 8, "steps": 8}
    assert run(**options, max_global_batch_tokens=1024, lr=2e-2, save=False) == 0
    rewards = [step["reward"] for step in logged(tmp_path / "run")]
    assert sum(rewards[:2]) / 2 == pytest.approx(0.5, abs=0.1)
    assert sum(rewards[-2:]) / 2 > 0.7


def test_a_server_that_is_handed_adapters_writes_what_the_engine_writes(run, server, tmp_path, monkeypatch, capsys):
    options = {"mode": "lora", "steps": 3, "num_iterations": 2}
    assert run("own", **options) == run("served", generator=server, **options) == 0
    assert logged(tmp_path / "served") == logged(tmp_path / "own")
    assert [path for path, _ in Server.asked].count("/v1/load_lora_adapter") == 3
    assert not Server.loaded
    assert not (tmp_path / "served" / "generator").exists()
    body = next(body for path, body in Server.asked if path == "/v1/completions")
    assert (body["n"], body["top_k"], body["repetition_penalty"], body["return_token_ids"]) == (4, -1, 1.0, True)
    assert server not in (tmp_path / "served" / "final" / "flexengine_run.json").read_text()
    monkeypatch.setattr(Server, "wrong", "/v1/load_lora_adapter")
    capsys.readouterr()
    assert run("refused", generator=server, **options) == 2
    said = capsys.readouterr().err
    assert f"--generator {server} refused /v1/load_lora_adapter (HTTP 400)" in said
    assert "greater than max_lora_rank 4" in said


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
        ({"generator": "http://127.0.0.1:9"}, "--generator with --mode full: a vLLM server takes plain adapters"),
        ({"generator": "localhost:8000", "mode": "lora"}, "give the URL of a vLLM server, as http://HOST:PORT"),
        ({"generator": "http://127.0.0.1:9", "mode": "lora"}, "--generator http://127.0.0.1:9 does not answer"),
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
