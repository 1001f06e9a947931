"""What stands around the steps of several ranks: validation, the best model, answers, callbacks, traces."""

import json
import shutil
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from ranks_helper import run_ranks, values_of

import flexengine
from flexengine.hardware.presets import preset
from flexengine.options.train_config import TrainConfig
from flexengine.run import trainer
from flexengine.run.callbacks import Callback
from flexengine.schedule.timeline import MEASURED
from flexengine.schedule.trace_reader import read_trace
from tests.failures.provoke import OPTIONS, fingerprint, write_model

DEMO = Path(flexengine.__file__).parent / "assets" / "demo"


@pytest.fixture(scope="module", autouse=True)
def known_machine():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
        yield


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """Options of a run with a tokenizer and records."""
    scratch = tmp_path_factory.mktemp("given")
    model = write_model(scratch / "model", vocab_size=json.loads((DEMO / "config.json").read_text())["vocab_size"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, model / name)
    rows = [json.dumps({"prompt": f"What is {i} plus 2?", "completion": f"It is {i + 2}."}) for i in range(10)]
    (scratch / "data.jsonl").write_text("\n".join(rows))
    return {
        **OPTIONS, "data_source": "json_sft", "model": str(model), "dataset": str(scratch / "data.jsonl"), "steps": 6,
        "data_cache": str(scratch / "cache"), "max_seq_len": 32, "max_global_batch_tokens": 128, "chunk_tokens": 32,
        "round_tokens": 32, "round_multiple": 2, "save": True, "lr": 3.0,
    }  # fmt: skip


class Told(Callback):
    """Remembers the steps that it is told of, and ends a run."""

    def __init__(self, end_at: int) -> None:
        self.steps, self.end_at = [], end_at

    def on_step(self, metrics):
        self.steps.append(metrics.step)
        return metrics.step == self.end_at


def train(rank: int, folder: Path, options: dict, end_at: int = 0) -> tuple[int, str, list[int]]:
    """Exit status of a run, what this rank printed and the steps that its callback was told of."""
    told, printed = Told(end_at), Path(f"{folder}-printed{rank}")
    with printed.open("w") as file, redirect_stdout(file):
        status = trainer.train(TrainConfig(**{**options, "output_dir": str(folder)}), callbacks=[told])
    return status, printed.read_text(), told.steps


def evaluations(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (folder / "eval_log.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["is_best"]) for line in lines]


def weights_of(folder: Path) -> dict[str, str]:
    return {name: digest for name, digest in fingerprint(folder).items() if name.endswith(".safetensors")}


def test_ranks_evaluate_keep_the_best_model_and_answer_as_one(given, tmp_path):
    one, two, other = tmp_path / "one", tmp_path / "two", tmp_path / "other.jsonl"
    other.write_text("\n".join(json.dumps({"prompt": f"{i}?", "completion": "ZQXJ KVWY ZQ"}) for i in range(3)))
    asked = {
        "val_dataset": str(other), "eval_steps": 1, "early_stopping_patience": 2, "lr": 1.0,
        "sample_prompts": "What is 2 plus 2?",
    }  # fmt: skip
    status, printed, steps = train(0, one, {**given, **asked})
    first, second = values_of(run_ranks(train, 2, two, {**given, **asked}))
    assert (first[0], second[0]) == (status, status) == (0, 0)
    assert evaluations(two) == evaluations(one)
    # The more the model learns, the less it expects answers of other letters, so that the patience ends the run.
    assert [is_best for *_, is_best in evaluations(one)][-2:] == [False, False]
    assert 2 < len(steps) < 6
    assert (first[2], second[2]) == (steps, [])
    samples = [line for line in printed.splitlines() if line.startswith("sample: ")]
    assert samples == [line for line in first[1].splitlines() if line.startswith("sample: ")]
    assert second[1] == ""
    for name in ("best", "final"):
        assert weights_of(two / name) == weights_of(one / name)


def test_a_callback_of_rank_0_ends_all(given, tmp_path):
    found = values_of(run_ranks(train, 2, tmp_path / "run", given, 2))
    assert [(status, steps) for status, _, steps in found] == [(0, [1, 2]), (0, [])]


def test_a_trace_has_rows_of_all_ranks(given, tmp_path):
    named = tmp_path / "named.json"
    values_of(run_ranks(train, 2, tmp_path / "run", {**given, "trace": str(named), "steps": 3}))
    value = json.loads(named.read_text())
    assert (tmp_path / "run" / "trace.json").read_text() == named.read_text()
    events = [event for event in value["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in events} == {1, 2}
    names = [event["args"]["name"] for event in value["traceEvents"] if event["name"] == "process_name"]
    assert names == ["model, measured step", "rank 1"]
    rounds = [part for part in read_trace(value, named, MEASURED).parts if part.name.startswith("round")]
    assert len(rounds) == 2  # of four, rank 0 runs every second one
