"""Evaluation while training: losses equal to transformers', the best model, early stops, callbacks and trackers."""

import importlib.util
import json
import logging
import math
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from engine_helpers import build_engine, random_batch, saved_model, streamed_plan, tiny_config

from flexengine.commands.read_run import read_run
from flexengine.data import IGNORE, TokenizedRecord, hold_out, prepare_sequences
from flexengine.data.validation import ValidationBatches
from flexengine.hardware.presets import PRESETS
from flexengine.models.registry import open_model
from flexengine.options.train_config import TrainConfig
from flexengine.plan import Prediction
from flexengine.run import evaluation, trackers, trainer
from flexengine.run.callbacks import Callback
from flexengine.run.steps import AnswerSteps


def test_loss_and_perplexity_equal_transformers(tmp_path):
    theirs = saved_model(tmp_path, tiny_config())
    records = []
    for i, ids in enumerate(random_batch(1, (5, 48, 17, 2, 31, 40), 67)):
        first = i % 2 * (len(ids) // 2)
        records.append(TokenizedRecord(ids, [IGNORE] * first + ids[first:]))
    prepared = prepare_sequences(records, 48, False)
    source = open_model(tmp_path)
    engine = build_engine(source, streamed_plan(source.spec))
    batches = ValidationBatches.of_parts([prepared], 64)
    assert len(list(batches)) > 2
    loss, num_targets = AnswerSteps().evaluate(engine, batches)[:2]
    losses = 0.0
    for record in records:
        logits = theirs(torch.tensor([record.input_ids])).logits[0, :-1].detach()
        labels = torch.tensor(record.labels[1:])
        losses += float(torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="sum"))
    assert num_targets == sum(label != IGNORE for record in records for label in record.labels[1:])
    expected = losses / num_targets
    assert loss == pytest.approx(expected, abs=1e-5)
    assert evaluation.perplexity_of(loss) == pytest.approx(math.exp(expected), rel=1e-5)


# ---- a run with validation data --------------------------------------------------------------------------------


class ScriptedEngine:
    """Trains nothing; its validation losses are given."""

    model = SimpleNamespace(task=None)

    profile, step_count, device = PRESETS["cpu-test"], 0, torch.device("cpu")

    def __init__(self, losses):
        self.losses, self.evaluated, self.saved, self.max_grad_norm = list(losses), [], [], 1.0
        self.plan = SimpleNamespace(predicted=Prediction(step_s=0.1), updates_on_cpu=False, to_json=lambda: "{}")
        self.matmul_flops_per_s, self.team, self.made_from = 1e12, None, {}

    def brief(self):
        return "the plan in brief"

    def describe(self):
        return "plan"

    def timeline(self):
        return "{}"

    def measure_next_step(self):
        pass

    def memory_peaks(self):
        return SimpleNamespace(gpu_bytes=None, host_bytes=0)

    def train_step(self, input_ids, labels, lr):
        out = SimpleNamespace(loss=1.0, num_tokens=10, num_target_tokens=5, model_flops=1.0, hardware_flops=1.0)
        return out, SimpleNamespace(grad_norm=1.0, skipped=False, seconds=0.1, loss_scale=None)

    def evaluate(self, input_ids, labels):
        self.evaluated.append(input_ids)
        return SimpleNamespace(loss=self.losses[0], num_target_tokens=sum(map(len, input_ids)))

    def save_pretrained(self, folder, beside):
        self.losses.pop(0) if folder.name == "best" else None
        folder.mkdir(parents=True, exist_ok=True)
        self.saved.append(folder.name)


class Told(Callback):
    """Remembers what it is told; also moves the engine to its next loss."""

    def __init__(self, engine, end_at=0):
        self.engine, self.end_at, self.calls = engine, end_at, []

    def on_start(self, options, num_steps, folder):
        self.calls.append(("start", options["steps"], num_steps, folder.name))

    def on_step(self, metrics):
        self.calls.append(("step", metrics.step))
        return metrics.step == self.end_at

    def on_eval(self, metrics):
        self.calls.append(("eval", metrics.step, metrics.loss))
        if not metrics.is_best:
            self.engine.losses.pop(0)

    def on_save(self, folder, step):
        self.calls.append(("save", folder.name, step))

    def on_end(self, exit_status):
        self.calls.append(("end", exit_status))


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Run the trainer on ten records with given validation losses; returns the engine, the callback, exit status."""
    rows = [json.dumps({"prompt": f"What is {i} plus 2?", "completion": f"It is {i + 2}."}) for i in range(10)]
    (tmp_path / "data.jsonl").write_text("\n".join(rows))

    def run(losses, end_at=0, **options):
        engine = ScriptedEngine(losses)
        monkeypatch.setattr(trainer, "prepare_run", lambda config: engine)
        monkeypatch.setattr(trainer, "build_engine", lambda config, planned: engine)
        monkeypatch.setattr("flexengine.run.watchers.Reviewer.after_step", lambda self, batch, metrics: None)
        predicted = SimpleNamespace(step_s=lambda lengths, after_clipping=False: 0.1)
        monkeypatch.setattr("flexengine.run.watchers.Reviewer._predict_by", lambda self, profile: predicted)
        chosen = {
            "model": "preset:demo", "dataset": str(tmp_path / "data.jsonl"), "max_seq_len": 64, "steps": 6,
            "save": True, "max_global_batch_tokens": 64, "output_dir": str(tmp_path / "run"),
            "data_cache": str(tmp_path / "cache"),
            "val_fraction": 0.3, "eval_steps": 2,
        }  # fmt: skip
        told = Told(engine, end_at)
        return engine, told, trainer.train(TrainConfig(**{**chosen, **options}), callbacks=[told])

    return run


def test_evaluations_are_logged_told_and_the_best_model_is_kept(start, tmp_path, capsys):
    _, told, status = start([3.0, 2.0, 2.5, 9.0])
    assert status == 0
    assert told.calls == [
        ("start", 6, 6, "run"),
        ("step", 1), ("step", 2), ("save", "best", 2), ("eval", 2, 3.0),
        ("step", 3), ("step", 4), ("save", "best", 4), ("eval", 4, 2.0),
        ("step", 5), ("step", 6), ("eval", 6, 2.5),
        ("save", "final", 6), ("end", 0),
    ]  # fmt: skip
    lines = [json.loads(line) for line in (tmp_path / "run" / "eval_log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line["is_best"]) for line in lines] == [
        (2, 3.0, True), (4, 2.0, True), (6, 2.5, False),
    ]  # fmt: skip
    assert lines[0]["perplexity"] == pytest.approx(math.exp(3.0))
    out = capsys.readouterr().out
    assert "evaluated, not trained: 3 sequences" in out
    assert "validation after step 4: loss 2.0000, the lowest so far, perplexity 7.39" in out
    assert "validation: lowest loss 2.0000 (perplexity 7.39) after step 4" in out
    for name in ("plan.json", "timeline.json"):  # those of the stand-in are none
        (tmp_path / "run" / name).unlink()
    assert [evaluation.loss for evaluation in read_run(tmp_path / "run").evaluations] == [3.0, 2.0, 2.5]


def test_a_run_ends_when_the_loss_no_longer_falls(start, capsys):
    _, told, status = start([3.0, 4.0, 5.0, 1.0], steps=60, early_stopping_patience=2)
    assert (status, told.calls[-1]) == (0, ("end", 0))
    assert max(call[1] for call in told.calls if call[0] == "step") == 6
    assert "ended after 2 evaluations without a lower one (--early-stopping-patience)" in capsys.readouterr().out


def test_a_callback_may_end_the_run_which_is_then_evaluated_and_saved(start):
    _, told, status = start([3.0, 2.0, 1.0], end_at=3)
    assert status == 0
    assert told.calls[-4:] == [("save", "best", 3), ("eval", 3, 2.0), ("save", "final", 3), ("end", 0)]


def test_a_loss_that_is_not_finite_is_no_best(start):
    _, told, _ = start([math.nan, 2.0, math.inf, 1.0])
    assert [call[1:] for call in told.calls if call[0] == "save"] == [("best", 4), ("final", 6)]


def test_callbacks_hear_of_the_end_of_a_run_that_fails(start):
    class Failing(Told):
        def on_step(self, metrics):
            raise RuntimeError("the callback is broken")

    failing = Failing(None)
    with pytest.raises(RuntimeError, match="the callback is broken"), trainer.Callbacks([failing]) as callbacks:
        callbacks.on_step(SimpleNamespace(step=1))
    assert failing.calls == [("end", None)]


@pytest.mark.parametrize(("steps", "expected"), [(40, [4, 8, 12]), (3, [1, 2, 3])])
def test_ten_evaluations_by_default(start, steps, expected):
    _, told, _ = start(range(100, 0, -1), steps=steps, eval_steps=None, save=True)
    assert [call[1] for call in told.calls if call[0] == "eval"][:3] == expected


@pytest.mark.parametrize(("val_fraction", "times"), [(0.3, 3), (None, 1)])
def test_answers_to_sample_prompts(start, capsys, monkeypatch, val_fraction, times):
    """After each evaluation; without validation data once, at the end."""
    monkeypatch.setattr(ScriptedEngine, "generate", lambda self, prompts, *_, **__: [[40, 41]], raising=False)
    monkeypatch.setattr(trainer, "show_samples", partial(shown_without_plan, trainer.show_samples))
    every = {"val_fraction": val_fraction, "eval_steps": 2 if val_fraction else None}
    start([3.0, 2.0, 1.0, 0.5], sample_prompts="What is 2 plus 2?", **every)
    assert capsys.readouterr().out.count("sample: 'What is 2 plus 2?' -> '") == times


def shown_without_plan(show, engine, *asked):
    engine.plan.request = SimpleNamespace(max_seq_len=64)
    show(engine, *asked)


def test_no_memory_for_samples_does_not_end_a_run(start, capsys, monkeypatch):
    def refuse(self, prompts, *_, **__):
        raise ValueError("the cache does not fit")

    monkeypatch.setattr(ScriptedEngine, "generate", refuse, raising=False)
    monkeypatch.setattr(trainer, "show_samples", partial(shown_without_plan, trainer.show_samples))
    _, _, status = start([1.0], sample_prompts="Who?", val_fraction=None, eval_steps=None)
    assert status == 0
    assert "no samples: the cache does not fit" in capsys.readouterr().out


# ---- what is held out ------------------------------------------------------------------------------------------


def records_of(lengths, targets_from=0):
    made = []
    for i, length in enumerate(lengths):
        ids = [100 + i] * length
        made.append(TokenizedRecord(ids, [IGNORE] * targets_from + ids[targets_from:]))
    return made


def first_ids(part):
    return [part.sequences[i].input_ids[0] for i in range(len(part.sequences))]


def test_whole_records_are_held_out_once_and_always_the_same():
    prepared = prepare_sequences(records_of([10, 40, 3, 25, 10, 7, 90, 4, 5, 6]), 16, False)
    train, held = hold_out(prepared, 0.3, seed=1)
    assert sorted(first_ids(train) + first_ids(held)) == sorted(first_ids(prepared))
    assert not set(first_ids(train)) & set(first_ids(held))
    assert len(set(first_ids(held))) == 3
    assert first_ids(hold_out(prepared, 0.3, seed=1)[1]) == first_ids(held)
    assert any(first_ids(hold_out(prepared, 0.3, seed=s)[1]) != first_ids(held) for s in range(5))


def test_a_single_text_is_held_out_at_its_end():
    prepared = prepare_sequences(records_of([100]), 11, False)
    train, held = hold_out(prepared, 0.2, seed=1)
    assert (len(train.sequences), len(held.sequences)) == (8, 2)
    assert train.cut.starts.max() < held.cut.starts.min()
    with pytest.raises(ValueError, match="would leave nothing to train on; give --val-dataset"):
        hold_out(prepare_sequences(records_of([5]), 11, False), 0.2, seed=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_fraction": 0.1, "val_dataset": "x.jsonl"}, "both name what is evaluated; give one"),
        ({"eval_steps": 5}, "--eval-steps 5 needs data to evaluate on; give --val-dataset or --val-fraction"),
        ({"early_stopping_patience": 5}, "--early-stopping-patience 5 needs data to evaluate on"),
        ({"val_fraction": 1.0}, "--val-fraction is at most 0.9, got 1.0"),
        ({"report_to": "mlfow"}, "--report-to mlfow is not known; choose wandb, tensorboard, trackio"),
        (
            {"val_fraction": 0.1, "data_source": "synthetic", "dataset": ()},
            "--val-fraction 0.1 is about records",
        ),
    ],
)
def test_options_that_contradict_each_other(options, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{"model": "preset:demo", "dataset": "a.jsonl", **options})


# ---- trackers --------------------------------------------------------------------------------------------------

STEP = SimpleNamespace(step=3, loss=1.5, grad_norm=2.0, lr=1e-4, tokens_per_s=10.0, step_s=0.5, effective_tflops=1.0)
STEP.details = {}
EVAL = SimpleNamespace(step=3, loss=1.25, perplexity=3.5, details={"reward_margin": 0.5, "reward_accuracy": None})


class Recorded:
    """Stands for a tracker's package: every call of it is written down."""

    def __init__(self, name, calls):
        self.name, self.calls = name, calls

    def __getattr__(self, name):
        return Recorded(name, self.calls)

    def __call__(self, *args, **keywords):
        self.calls.append((self.name, args, keywords))
        return self


@pytest.mark.parametrize(
    ("name", "module", "log"),
    [
        ("wandb", "wandb", "log"),
        ("trackio", "trackio", "log"),
        ("tensorboard", "torch.utils.tensorboard", "add_scalar"),
    ],
)
def test_trackers_get_every_figure(name, module, log, monkeypatch, tmp_path):
    calls = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: wanted)
    monkeypatch.setitem(sys.modules, module, Recorded(name, calls))
    (tracker,) = trackers.open_trackers([name])
    assert not calls
    tracker.on_start({"lr": 1e-4}, 10, tmp_path)
    tracker.on_step(STEP)
    tracker.on_eval(EVAL)
    tracker.on_end(0)
    sent = {}
    for called, args, _ in calls:
        if called == log:
            sent |= args[0] if isinstance(args[0], dict) else {args[0]: args[1]}
    assert sent["train/loss"] == 1.5
    assert sent["train/lr"] == 1e-4
    assert sent["eval/loss"] == 1.25
    assert sent["eval/reward_margin"] == 0.5
    assert "eval/reward_accuracy" not in sent
    assert calls[-1][0] in ("finish", "close")


def test_trackers_of_accelerate_get_every_figure(monkeypatch, tmp_path):
    """Also where the environment names ranks, for which accelerate would wait."""
    tracking = importlib.import_module("accelerate.tracking")
    sent = {}

    class Kept(tracking.GeneralTracker):
        name, requires_logging_directory = "mlflow", True

        @tracking.on_main_process
        def __init__(self, run_name, logging_dir):
            sent["begun"] = (run_name, logging_dir)

        @property
        def tracker(self):
            return None

        @tracking.on_main_process
        def store_init_configuration(self, values):
            tracking.logger.debug("which asks for accelerate's state")
            sent["options"] = values

        @tracking.on_main_process
        def log(self, values, step=None):
            sent[step] = sent.get(step, {}) | values

        def finish(self):
            sent["finished"] = True

    monkeypatch.setattr(importlib.util, "find_spec", lambda wanted: wanted)
    monkeypatch.setitem(tracking.LOGGER_TYPE_TO_CLASS, "mlflow", Kept)
    monkeypatch.setattr("accelerate.state.PartialState._shared_state", {})
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    (tracker,) = trackers.open_trackers(["mlflow"])
    tracker.on_start({"lr": 1e-4, "dataset": ("a", "b")}, 10, tmp_path)
    tracker.on_step(STEP)
    tracker.on_eval(EVAL)
    tracker.on_end(0)
    assert sent["begun"] == (tmp_path.name, str(tmp_path))
    assert sent["options"] == {"lr": 1e-4, "dataset": "('a', 'b')"}
    assert (sent[3]["train/loss"], sent[3]["eval/loss"], sent["finished"]) == (1.5, 1.25, True)


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(monkeypatch, caplog, tmp_path):
    class Broken(trackers.WandbTracker):
        def start(self, options, folder):
            raise ConnectionError("no network")

    tracker = Broken()
    with caplog.at_level(logging.WARNING):
        tracker.on_start({}, 1, tmp_path)
        tracker.on_step(STEP)
        tracker.on_end(0)
    assert [record.message for record in caplog.records] == [
        "--report-to wandb failed, and the run goes on without it: no network"
    ]


def test_a_tracker_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"--report-to trackio needs the package trackio; pip install trackio, or"):
        trackers.open_trackers(["trackio"])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "accelerate" else name)
    with pytest.raises(ValueError, match="--report-to mlflow needs the package accelerate; pip install accelerate"):
        trackers.open_trackers(["mlflow"])
