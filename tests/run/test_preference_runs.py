"""Runs of `train` on preferences and of a teacher: what they learn, evaluate, log, stop and resume, and plan."""

import json
import math
import shutil
from itertools import pairwise

import numpy as np
import pytest
import transformers

from flexengine import cli
from flexengine.hardware.presets import preset
from flexengine.models.registry import ASSETS
from flexengine.plan import Plan
from flexengine.run import reference
from tests.failures.provoke import arguments, fingerprint, killed_in, write_answering, write_model

STEPS = 6
QUESTIONS = ASSETS / "demo" / "demo_instructions.jsonl"


def write_pairs(path, count=12):
    """The answer to the next question is the rejected one, half of them as messages."""
    records = [json.loads(line) for line in QUESTIONS.read_text().splitlines()[: 2 * count]]
    records = [record for record in records if "input" not in record]
    rows = []
    for i, (own, other) in enumerate(pairwise(records)):
        prompt, chosen, rejected = own["instruction"], own["output"], other["output"]
        if i % 2:
            prompt = [{"role": "user", "content": prompt}]
            chosen, rejected = ([{"role": "assistant", "content": text}] for text in (chosen, rejected))
        rows.append({"prompt": prompt, "chosen": chosen, "rejected": rejected})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_answering(tmp_path_factory.mktemp("source") / "model")


@pytest.fixture
def run(model, tmp_path, monkeypatch):
    """Runs `train` in tmp_path; returns the exit status."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.setattr("flexengine.data.default_cache", lambda: None)
    monkeypatch.chdir(tmp_path)
    pairs = write_pairs(tmp_path / "pairs.jsonl").name  # what is held out is drawn by the name
    common = {"model": model, "dataset": pairs, "data_source": None, "steps": STEPS, "lr": 5e-2, "save": True}
    common |= {"max_seq_len": 64, "max_global_batch_tokens": 256, "data_cache": tmp_path / "cache"}

    def run(folder="run", **options):
        return cli.main(["train", *arguments(**{**common, "output_dir": folder, **options})])

    return run


def logged(folder, name="train_log.jsonl"):
    """The lines of a log, but for times and memory."""
    lines = (json.loads(line) for line in (folder / name).read_text().splitlines())
    measured = ("_s", "_bytes", "pct", "flops")
    return [{key: value for key, value in line.items() if not key.endswith(measured)} for line in lines]


@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo"])
def test_what_a_run_says(run, tmp_path, capsys, objective):
    assert run(objective=objective, mode="lora", val_fraction=0.2, eval_steps=3) == 0
    steps, evaluations = (logged(tmp_path / "run", f"{name}_log.jsonl") for name in ("train", "eval"))
    first, last = steps[0], steps[-1]
    if objective == "dpo":
        assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert first["reward_margin"] == pytest.approx(0, abs=1e-6)
        assert last["reward_margin"] > 0.002
        line = json.loads((tmp_path / "run" / "train_log.jsonl").read_text().splitlines()[0])
        plan = Plan.from_json((tmp_path / "run" / "plan.json").read_text())
        share = line["predicted_step_s"] / (plan.predicted.step_s * first["num_tokens"] / 256)
        assert 1.2 < share < 1.9  # a forward pass beside those of a step of answers
    assert min(step["loss"] for step in steps[1:]) < first["loss"]
    assert [found["step"] for found in evaluations] == [3, 6]
    assert all(found["perplexity"] is None and "reward_margin" in found for found in evaluations)
    assert "margin" in capsys.readouterr().out


def test_a_run_that_is_killed_goes_on_with_the_same_bits(run, tmp_path, monkeypatch):
    """Also without the reference that the first part of the run computed and kept."""
    options = {"objective": "dpo", "save_steps": 2, "max_grad_norm": 1}
    assert run("whole", **options) == 0
    with killed_in(4):
        assert run("stopped", **options) != 0
    kept = list((tmp_path / "cache").glob(f"*/{reference.FILE}"))
    assert len(kept) == 1
    before = np.load(kept[0])
    kept[0].unlink()
    assert run("stopped", resume="auto", **options) == 0
    assert np.array_equal(before, np.load(kept[0]))
    assert logged(tmp_path / "stopped") == logged(tmp_path / "whole")
    weights = [fingerprint(tmp_path / folder / "final") for folder in ("stopped", "whole")]
    assert len({found["model-00001-of-00002.safetensors"] for found in weights}) == 1


def test_a_plan_of_preferences_is_that_of_answers(run, tmp_path):
    """No second model, and no byte more."""
    plans = {}
    for objective in ("sft", "dpo"):
        assert run(objective=objective, mode="lora", dry_run=True, save=False, plan_json=tmp_path / "plan.json") == 0
        plans[objective] = Plan.from_json((tmp_path / "plan.json").read_text())
    assert plans["dpo"].predicted.gpu_bytes == plans["sft"].predicted.gpu_bytes
    assert plans["dpo"].predicted.host_bytes == plans["sft"].predicted.host_bytes


def test_a_teacher_is_asked_once_and_learned_from(run, model, tmp_path, monkeypatch, capsys):
    """Stopped and resumed with the same bits, without asking again."""
    teacher = write_answering(tmp_path / "teacher", num_hidden_layers=1)
    few = tmp_path / "questions.jsonl"
    few.write_text("".join(QUESTIONS.read_text().splitlines(keepends=True)[:300]))
    options = {"objective": "distill", "teacher": teacher, "teacher_top_k": 40, "beta": 0, "dataset": few}
    options |= {"val_fraction": 0.05, "eval_steps": 3, "save_steps": 2, "lr": 1e-2}
    assert run("whole", **options) == 0
    steps, evaluations = (logged(tmp_path / "whole", f"{name}_log.jsonl") for name in ("train", "eval"))
    assert steps[-1]["loss"] < 0.9 * steps[0]["loss"]
    assert evaluations[-1]["loss"] < evaluations[0]["loss"]
    assert evaluations[0]["perplexity"] is None
    assert "perplexity" not in capsys.readouterr().out
    folders = [path.parent for path in (tmp_path / "cache").glob("*/teacher_starts.npy")]
    assert len(folders) == 2
    rows = sum(int(np.load(folder / "teacher_starts.npy")[-1]) for folder in folders)
    assert sum((folder / "teacher_tokens.bin").stat().st_size for folder in folders) == rows * 40 * 4
    monkeypatch.setattr("flexengine.run.teacher.prepare_job", None)
    with killed_in(4):
        assert run("stopped", **options) != 0
    assert run("stopped", resume="auto", **options) == 0
    assert logged(tmp_path / "stopped") == logged(tmp_path / "whole")


def test_a_teacher_of_other_words_is_refused(run, tmp_path, capsys):
    teacher = write_model(tmp_path / "teacher", vocab_size=64)
    assert run(objective="distill", teacher=teacher, dataset=QUESTIONS) == 2
    assert "has a vocabulary of 64 tokens, and the model one of 2944" in capsys.readouterr().err


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_a_reward_model_begins_with_a_new_head_and_is_exported(run, model, tmp_path, capsys, mode):
    """From a model that predicts tokens; two plans give the same bits, and the head is in the export."""
    pairs = [json.loads(line) for line in (tmp_path / "pairs.jsonl").read_text().splitlines()]
    pairs[0]["margin"] = 0.5
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    base = shutil.copytree(model, tmp_path / "base")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaForCausalLM"], "pad_token_id": 0}))
    options = {"model": base, "objective": "reward", "mode": mode, "val_fraction": 0.2, "eval_steps": 3, "lr": 1e-2}
    sizes = {"chunk_tokens": 64, "round_tokens": 128}
    for folder, recompute in (("run", "none"), ("other", "full")):
        assert run(folder, recompute=recompute, **sizes, **options) == 0
    assert "a new head with 1 output for sequences begins with random weights" in capsys.readouterr().err
    steps, evaluations = (logged(tmp_path / "run", f"{name}_log.jsonl") for name in ("train", "eval"))
    assert steps == logged(tmp_path / "other")
    assert steps[-1]["reward_margin"] > steps[0]["reward_margin"]
    assert all(0 <= found["reward_accuracy"] <= 1 for found in evaluations)
    exported = tmp_path / "run" / "final"
    if mode == "lora":
        described = json.loads((exported / "adapter_config.json").read_text())
        assert (described["task_type"], described["modules_to_save"]) == ("SEQ_CLS", ["score"])
        return
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(exported)
    assert loaded.config.num_labels == loaded.score.out_features == 1
    assert run("dpo", objective="dpo", model=exported) == 2
    assert "whose head has 1 output for labels" in capsys.readouterr().err
