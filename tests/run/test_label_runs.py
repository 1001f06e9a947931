"""Runs of `train` that learn the labels of sequences: what they learn, evaluate, resume and refuse."""

import json

import numpy as np
import pytest
import torch
import transformers

from flexengine import cli
from flexengine.data.labelled import value_of
from flexengine.data.sources import LabelNames
from flexengine.hardware.presets import preset
from flexengine.models.registry import ASSETS
from tests.failures.provoke import arguments, fingerprint, killed_in, write_answering
from tests.run.test_preference_runs import logged

WORDS = ("red", "green", "blue")
QUESTIONS = ASSETS / "demo" / "demo_instructions.jsonl"
LABELS = {
    "single_label_classification": lambda i: WORDS[i % 3],
    "multi_label_classification": lambda i: [WORDS[i % 3], WORDS[(i + 1) % 3]] if i % 2 else [0, 0, 1],
    "regression": lambda i: i / 10 - 0.5,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = write_answering(tmp_path_factory.mktemp("source") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"]}))
    return folder


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Runs `train` in tmp_path; returns the exit status."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.setattr("flexengine.data.default_cache", lambda: None)
    monkeypatch.chdir(tmp_path)
    common = {"model": model, "dataset": "labelled.jsonl", "data_source": None, "steps": 8, "lr": 2e-2, "save": True}
    common |= {"max_seq_len": 48, "max_global_batch_tokens": 128, "data_cache": tmp_path / "cache", "task": "sequence"}

    def run(problem, folder="run", **options):
        texts = [json.loads(line)["instruction"] for line in QUESTIONS.read_text().splitlines()[:24]]
        rows = [{"text": f"{text} {WORDS[i % 3]}", "label": LABELS[problem](i)} for i, text in enumerate(texts)]
        rows[1] = {"messages": [{"role": "user", "content": rows[1]["text"]}], "label": rows[1]["label"]}
        (tmp_path / "labelled.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        named = () if problem == "regression" else ("--labels", *WORDS)
        given = arguments(**{**common, "problem_type": problem, "output_dir": folder, **options})
        return cli.main(["train", *given, *named])

    return run


@pytest.mark.parametrize("problem", LABELS)
def test_a_run_learns_labels_and_transformers_says_the_same(run, tmp_path, problem):
    assert run(problem, val_dataset="labelled.jsonl", eval_steps=4) == 0
    steps, evaluations = (logged(tmp_path / "run", f"{name}_log.jsonl") for name in ("train", "eval"))
    assert evaluations[-1]["loss"] < evaluations[0]["loss"] < steps[0]["loss"] * 1.5
    assert evaluations[-1]["perplexity"] is None
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "run" / "final").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "run" / "final")
    rows = [json.loads(line) for line in (tmp_path / "labelled.jsonl").read_text().splitlines()]
    names, losses, right = LabelNames(tuple(loaded.config.id2label.values()), problem), [], []
    for row in (row for row in rows if "text" in row):
        ids = [*tokenizer(row["text"], add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        value = value_of(row["label"], names)
        wanted = torch.tensor([int(value)])
        if problem == "regression":
            wanted = torch.tensor([value])
        if problem == "multi_label_classification":
            wanted = torch.tensor([[float(int(value) >> i & 1) for i in range(3)]])
        out = loaded(input_ids=torch.tensor([ids]), labels=wanted)
        losses.append(out.loss.item())
        right.append(
            bool(((out.logits > 0) == wanted.bool()).all()) if wanted.dim() > 1 else out.logits.argmax() == wanted
        )
    if problem != "regression":  # all but one of the records
        assert abs(sum(right) - evaluations[-1]["accuracy"] * len(rows)) <= 1.001
        assert 0 <= evaluations[-1]["f1"] <= 1
        assert tuple(loaded.config.id2label.values()) == WORDS
    assert np.mean(losses) == pytest.approx(evaluations[-1]["loss"], rel=0.1)


def test_a_run_that_is_killed_goes_on_with_the_same_bits(run, tmp_path, monkeypatch):
    problem, options = "regression", {"save_steps": 2}
    assert run(problem, "whole", **options) == 0
    with killed_in(4):
        assert run(problem, "stopped", **options) != 0
    assert run(problem, "stopped", resume="auto", **options) == 0
    assert logged(tmp_path / "stopped") == logged(tmp_path / "whole")
    weights = [fingerprint(tmp_path / folder / "final") for folder in ("stopped", "whole")]
    names = [name for name in weights[0] if name.endswith(".safetensors")]
    assert names
    assert [weights[0][name] for name in names] == [weights[1][name] for name in names]


@pytest.mark.parametrize(
    ("label", "problem", "said"),
    [
        ("violet", "single_label_classification", r"label 'violet' is none of the model's 3: red, green, blue"),
        (3, "single_label_classification", "label 3 is none of the model's 3"),
        (True, "single_label_classification", "label True is none of"),
        ("red", "multi_label_classification", "label must be a list of classes"),
        ("much", "regression", "label must be a number"),
    ],
)
def test_what_no_label_is(label, problem, said):
    with pytest.raises(ValueError, match=said):
        value_of(label, LabelNames(WORDS, problem))


def test_what_is_refused(run, capsys):
    for options, said in (
        ({"objective": "dpo"}, "whose head has 3 outputs for labels"),
        ({"sample_prompts": "Who?"}, "has a head for labels, which answers nothing"),
        ({"task": "token", "problem_type": None}, "labels tokens, which runs have no records for"),
    ):
        assert run("single_label_classification", **options) == 2
        assert said in capsys.readouterr().err
