"""Runs of `train` on drawn pictures: a tiny model with a random tower learns to name them, stopped and resumed or not.

What it exports answers as in transformers.
"""

import json
import math
import runpy
from pathlib import Path

import pytest
import torch
import transformers
from image_models import write_gemma3, write_llava
from PIL import Image

from flexengine import cli
from flexengine.checkpoint.atomic import sha256_of
from flexengine.hardware.presets import preset
from flexengine.run import trainer

DRAWN = runpy.run_path(str(Path(__file__).resolve().parents[2] / "examples" / "draw_shapes.py"))
OPTIONS = (
    "--max-image-tokens 640 --max-seq-len 64 --max-global-batch-tokens 1024 --dtype float32 --device cpu"
    " --lr 4e-3 --save"
)


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
    assert train("whole", "--epochs", "10", "--eval-steps", "50") == 0
    exported = folder / "whole" / "final"
    assert {"processor_config.json", "tokenizer.json", "chat_template.jinja"} <= {p.name for p in exported.iterdir()}
    kept = transformers.LlavaForConditionalGeneration.from_pretrained("model").state_dict()
    model = transformers.LlavaForConditionalGeneration.from_pretrained(exported).eval()
    trained = model.state_dict()
    assert all(torch.equal(trained[name], kept[name]) == ("vision_tower" in name) for name in kept)

    records = [json.loads(line) for line in Path("shapes/val.jsonl").read_text().splitlines()]
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
    few = ("--steps", "6", "--eval-steps", "3")
    assert train("whole", *few) == 0
    take_step = trainer.take_step

    def killed(engine, batch, number, *more):
        if number == 5:
            raise OSError("the machine is gone")
        return take_step(engine, batch, number, *more)

    with monkeypatch.context() as context:
        context.setattr(trainer, "take_step", killed)
        assert train("stopped", *few, "--save-steps", "3") != 0
    assert train("stopped", *few, "--save-steps", "3", "--resume", "auto") == 0
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
