"""Runs of `train` on drawn pictures: a tiny model with a random tower learns to name them, stopped and resumed or not.

What it exports answers as in transformers.
"""

import json
import math
import runpy
import threading
from http.server import HTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from image_models import write_gemma3, write_llava
from PIL import Image

from flexengine import Sampling, cli, from_pretrained
from flexengine.checkpoint.atomic import sha256_of
from flexengine.data import TokenizerOptions, TokenizerProcess
from flexengine.hardware.presets import preset
from flexengine.run import trainer
from tests.run.test_group_runs import Server, logged

DRAWN = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "draw_shapes.py"))
OPTIONS = (
    "--max-image-tokens 640 --max-seq-len 64 --max-global-batch-tokens 1024 --dtype float32 --device cpu"
    " --chunk-tokens 1024 --round-tokens 1024 --lr 4e-3 --save"
)
"""With sizes: every size that is planned counts the work of a tower."""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a model, pictures and their records, on a machine that need not be measured."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.chdir(tmp_path)
    write_llava(tmp_path / "model")
    DRAWN["write"](tmp_path / "shapes")
    return tmp_path


def train(run, *more):
    data = "--dataset shapes/train.jsonl --val-dataset shapes/val.jsonl --data-cache cache"
    return cli.main(["train", *f"--model model --output-dir {run} {data} {OPTIONS}".split(), *more])


def answers(model, processor, names):
    """What transformers writes after each picture, without special tokens."""
    found = []
    for name in names:
        turns = [{"role": "user", "content": [{"type": "image", "image": Image.open(name)},
                                              {"type": "text", "text": DRAWN["QUESTION"]}]}]  # fmt: skip
        given = processor.apply_chat_template(
            turns, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        with torch.no_grad():
            ids = model.generate(**given, max_new_tokens=4, do_sample=False)
        found.append(processor.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True).strip())
    return found


@pytest.mark.long
def test_a_model_learns_to_name_drawn_pictures(folder, monkeypatch, capsys):
    assert train("whole", "--epochs", "8", "--eval-steps", "50") == 0
    exported = folder / "whole" / "final"
    assert {"processor_config.json", "tokenizer.json", "chat_template.jinja"} <= {p.name for p in exported.iterdir()}
    kept = transformers.LlavaForConditionalGeneration.from_pretrained("model").state_dict()
    model = transformers.LlavaForConditionalGeneration.from_pretrained(exported).eval()
    trained = model.state_dict()
    assert all(torch.equal(trained[name], kept[name]) == ("vision_tower" in name) for name in kept)

    records = [json.loads(line) for line in Path("shapes/val.jsonl").read_text().splitlines()[:24]]
    names = [f"shapes/{record['messages'][0]['content'][0]['image']}" for record in records]
    found = answers(model, transformers.AutoProcessor.from_pretrained(exported), names)
    right = [record["messages"][1]["content"] == said for record, said in zip(records, found, strict=True)]
    assert sum(right) >= 0.9 * len(right), found

    capsys.readouterr()
    for name, said in list(zip(names, found, strict=True))[:2]:
        asked = ["--image", name, "--prompt", DRAWN["QUESTION"], "--max-new-tokens", "4"]
        assert cli.main(["generate", str(exported), *asked, "--dtype", "float32", "--device", "cpu"]) == 0
        assert capsys.readouterr().out.strip() == said


def test_a_run_that_is_killed_goes_on_with_the_same_bits(folder, monkeypatch):
    few = ("--steps", "4", "--eval-steps", "2")
    assert train("whole", *few) == 0
    take_step = trainer.take_step

    def killed(engine, batch, number, *more):
        if number == 4:
            raise OSError("the machine is gone")
        return take_step(engine, batch, number, *more)

    with monkeypatch.context() as context:
        context.setattr(trainer, "take_step", killed)
        assert train("stopped", *few, "--save-steps", "2") != 0
    assert train("stopped", *few, "--save-steps", "2", "--resume", "auto") == 0
    weights = "final/model.safetensors"
    assert sha256_of(folder / "stopped" / weights) == sha256_of(folder / "whole" / weights)


def test_a_run_of_pairs_about_pictures(folder):
    """Chosen names their shape, and rejected says no; the second run finds the reference of the first."""
    options, no = "--objective dpo --epochs 2 --eval-steps 2 --lr 1e-2", {"role": "assistant", "content": "no"}
    for name in ("train", "val"):
        lines = [json.loads(line)["messages"] for line in Path(f"shapes/{name}.jsonl").read_text().splitlines()]
        pairs = [{"prompt": turns[:1], "chosen": turns[1:], "rejected": [no]} for turns in lines[:24]]
        Path(f"shapes/{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    for run in ("first", "second"):
        assert train(run, *options.split()) == 0
    steps, evaluations = (
        [[json.loads(line)["loss"] for line in Path(run, name).read_text().splitlines()] for run in ("first", "second")]
        for name in ("train_log.jsonl", "eval_log.jsonl")
    )
    assert steps[0] == steps[1]
    assert evaluations[0] == evaluations[1]
    assert steps[0][0] == pytest.approx(math.log(2), abs=1e-6)
    assert evaluations[0][0] < math.log(2) - 0.05


def divergence(teacher):
    """How far the model's answers are from a teacher's, by transformers: KL(teacher | model), of two tokens each."""
    model = transformers.LlavaForConditionalGeneration.from_pretrained("model")
    processor = transformers.AutoProcessor.from_pretrained("model")
    found = []
    for line in Path("shapes/train.jsonl").read_text().splitlines():
        turns = json.loads(line)["messages"]
        turns[0]["content"][0]["image"] = f"shapes/{turns[0]['content'][0]['image']}"
        given = processor.apply_chat_template(turns, tokenize=True, return_dict=True, return_tensors="pt")
        with torch.no_grad():
            wanted, own = (one(**given).logits[0, -3:-1].log_softmax(-1) for one in (teacher, model))
        found.append(torch.nn.functional.kl_div(own, wanted, reduction="sum", log_target=True) / 2)
    return torch.stack(found).mean().item()


def test_a_run_that_learns_from_a_teacher_about_pictures(folder, monkeypatch, capsys):
    """The teacher reads pictures with its own processor, once; one whose tokens of images are others is refused."""
    for name in ("train", "val"):
        path = Path(f"shapes/{name}.jsonl")
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:24]))
    write_llava(folder / "teacher", seed=5)
    teacher = transformers.LlavaForConditionalGeneration.from_pretrained("teacher")
    with torch.no_grad():
        teacher.lm_head.weight.mul_(30.0)  # it is sure of something
    teacher.save_pretrained("teacher")
    options = ["--objective", "distill", "--teacher", "teacher", "--beta", "0", "--epochs", "6", "--eval-steps", "3"]
    assert train("first", *options) == 0
    with monkeypatch.context() as context:
        context.setattr("flexengine.run.teacher.prepare_job", None)
        assert train("second", *options) == 0
    steps, evaluations = (
        [[json.loads(line)["loss"] for line in Path(run, name).read_text().splitlines()] for run in ("first", "second")]
        for name in ("train_log.jsonl", "eval_log.jsonl")
    )
    assert steps[0] == steps[1]
    assert evaluations[0][1] < 0.9 * evaluations[0][0]
    assert steps[0][0] == pytest.approx(divergence(teacher), rel=1e-4)  # of one batch of all records

    config = json.loads(Path("teacher/config.json").read_text())
    Path("teacher/config.json").write_text(json.dumps({**config, "image_token_index": 20, "image_token_id": 20}))
    capsys.readouterr()
    assert train("third", *options) == cli.BAD_INPUT
    assert "the teacher does not read images as the model does: the batch has" in capsys.readouterr().err


def test_a_reward_model_of_answers_about_pictures(folder, capsys):
    """A Gemma 3 scores them; types that transformers has no such class of are refused."""
    no = {"role": "assistant", "content": "no"}
    for name in ("train", "val"):
        lines = [json.loads(line)["messages"] for line in Path(f"shapes/{name}.jsonl").read_text().splitlines()]
        pairs = [{"prompt": turns[:1], "chosen": turns[1:], "rejected": [no]} for turns in lines[:24]]
        Path(f"shapes/{name}.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    options = [
        "--objective",
        "reward",
        "--epochs",
        "2",
        "--eval-steps",
        "2",
        "--lr",
        "1e-2",
        "--max-image-tokens",
        "64",
    ]
    assert train("refused", *options) == cli.BAD_INPUT
    assert "a model of type 'llava' that scores sequences: transformers has no class for it" in capsys.readouterr().err
    write_gemma3(folder / "scorer")
    assert train("run", *options, "--model", "scorer") == 0
    found = [json.loads(line) for line in Path("run/eval_log.jsonl").read_text().splitlines()]
    assert found[-1]["reward_accuracy"] == 1.0
    scores, said = transformers.AutoModelForSequenceClassification.from_pretrained(
        "run/final", output_loading_info=True
    )
    assert not said["missing_keys"]
    assert not said["unexpected_keys"]
    assert type(scores).__name__ == "Gemma3ForSequenceClassification"


REWARD = """
def named(completions, answer, image, prompts):
    assert all(turns[0]["content"][0] == {"type": "image"} for turns in prompts)
    return [float(text[0]["content"] == right) for text, right in zip(completions, answer)]
"""


def test_a_run_of_completions_about_pictures(folder):
    """The model writes them itself and is rewarded for the right word."""
    Path("reward.py").write_text(REWARD)
    for name in ("train", "val"):
        lines = [json.loads(line)["messages"] for line in Path(f"shapes/{name}.jsonl").read_text().splitlines()][:12]
        asked = [[{"role": "user", "content": [{"type": "image"}, ask[0]["content"][1]]}] for ask in lines]
        prompts = [
            {"prompt": turns, "image": given[0]["content"][0]["image"], "answer": given[1]["content"]}
            for turns, given in zip(asked, lines, strict=True)
        ]
        Path(f"shapes/{name}.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    options = "--objective grpo --rewards reward.py:named --num-generations 4 --max-completion-length 2 --steps 4"
    assert train("run", *options.split(), "--max-image-tokens", "256", "--eval-steps", "2") == 0
    steps, evaluations = (
        [json.loads(line) for line in Path("run", f"{name}_log.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    )
    assert all(1 <= one["completion_tokens"] <= 2 and 0 <= one["reward"] <= 1 for one in (*steps, *evaluations))
    assert (len(steps), len(evaluations)) == (4, 2)
    assert evaluations[0]["loss"] == -evaluations[0]["reward"]


class ServerOfPictures(Server):
    """Answers chats about pictures as vLLM does, and tells the tokens of the prompt."""

    tokenizer: Any = None
    more, loaded, asked = [], {}, []

    def do_POST(self):  # noqa: N802 - http.server's name
        if self.path == "/v1/completions":
            return super().do_POST()
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, body))
        if self.path == "/v1/load_lora_adapter":
            sizes: dict[str, Any] = {"max_seq_len": 64, "max_global_batch_tokens": 512, "max_image_tokens": 128}
            place = {"dtype": "float32", "device": "cpu", "hardware": "cpu-test"}
            self.loaded[body["lora_name"]] = from_pretrained("model", adapter=body["lora_path"], **place, **sizes)
            return self.answer(200, "Success: added")
        if self.path == "/v1/unload_lora_adapter":
            self.loaded.pop(body["lora_name"]).close()
            return self.answer(200, "Success: removed")
        ids, pixels = self.tokenizer.encode_turns(body["messages"])
        rows = self.loaded[body["model"]].generate(
            [ids] * body["n"], body["max_tokens"], stop_ids=body["stop_token_ids"], keep_stop=True,
            sampling=Sampling(body["temperature"], body["top_p"], body["seed"]),
            images={name: torch.cat([column] * body["n"]) for name, column in pixels.items()},
        )  # fmt: skip
        choices = [{"index": i, "token_ids": row} for i, row in enumerate(rows)]
        return self.answer(200, {"choices": choices, "prompt_token_ids": [*ids, *self.more]})


def test_a_server_writes_completions_about_pictures(folder, monkeypatch, capsys):
    """As the engine does: of three prompts with pictures and one without, each in a step of its own."""
    Path("reward.py").write_text("def yes(completion_ids):\n    return [float(row[0] % 2) for row in completion_ids]\n")
    lines = [json.loads(line)["messages"] for line in Path("shapes/train.jsonl").read_text().splitlines()[:3]]
    prompts = [*({"prompt": turns[:1]} for turns in lines), {"prompt": "what is the other one"}]
    Path("shapes/prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    options = (
        "--model model --dataset shapes/prompts.jsonl --data-cache cache --objective grpo --rewards reward.py:yes"
        " --num-generations 4 --max-completion-length 3 --steps 4 --mode lora --max-image-tokens 64 --max-seq-len 64"
        " --max-global-batch-tokens 120 --dtype float32 --device cpu --lr 1e-2"
    )
    monkeypatch.setattr(
        ServerOfPictures, "tokenizer", TokenizerProcess(TokenizerOptions(folder / "model", 24, images=True))
    )
    with HTTPServer(("127.0.0.1", 0), ServerOfPictures) as listening:
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{listening.server_port}"
        try:
            assert cli.main(["train", *options.split(), "--output-dir", "own"]) == 0
            served = ["train", *options.split(), "--generator", url, "--output-dir"]
            assert cli.main([*served, "served"]) == 0
            monkeypatch.setattr(ServerOfPictures, "more", [7])
            capsys.readouterr()
            assert cli.main([*served, "other"]) == cli.BAD_INPUT
        finally:
            listening.shutdown()
            thread.join()
    assert logged(folder / "served") == logged(folder / "own")
    paths = [path for path, _ in ServerOfPictures.asked]
    assert paths.count("/v1/chat/completions") >= 3
    assert paths.count("/v1/completions") >= 1
    assert "which are not the" in capsys.readouterr().err
