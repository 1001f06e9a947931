"""The trainer's story on a stand-in engine: what it writes, prints, refuses and returns."""

import json
import logging
import math
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer

from flexengine import cli
from flexengine.checkpoint.layout import RUN_FILE
from flexengine.data import ChatTokenizer
from flexengine.data.batches import num_targets
from flexengine.hardware.presets import PRESETS
from flexengine.hardware.profile import HardwareProfile
from flexengine.metrics import StepMetrics
from flexengine.models.registry import ASSETS, open_model
from flexengine.options.train_config import TrainConfig
from flexengine.plan import PlanError, PlanReason, Prediction
from flexengine.run import feedback, trainer, training_data
from flexengine.run import folder as run_folder
from flexengine.run.health import NotFinite
from flexengine.runtime.not_finite import NotFiniteError

STOP = 6  # <|end|> of the bundled tokenizer


PREDICTED = Prediction(step_s=0.5, speed_of_light_s=1e-9)
EXPECTED = Prediction(step_s=0.125, speed_of_light_s=2e-9)


@dataclass(frozen=True)
class FakePlan:
    """Stands for decisions by its chunk size alone."""

    chunk_tokens: int = 64
    updates_on_cpu: bool = False
    predicted: Prediction = PREDICTED
    request: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(max_seq_len=256))

    def to_json(self):
        return json.dumps({"chunk_tokens": self.chunk_tokens})


@dataclass
class FakeEngine:
    """Loss falls by 0.5 a step; records what it was given. `interrupt_at` raises Ctrl-C in that step (from 1)."""

    team: None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    source: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(spec=None))
    model: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(task=None))
    loss: float = 4.0
    max_grad_norm: float = 1.0
    interrupt_at: int = 0
    step_count: int = 0
    skip_at: int = 0
    nan_at: tuple[int, ...] = ()
    measured_step: int = 0
    batches: list = field(default_factory=list)
    evaluated: list = field(default_factory=list)
    lrs: list = field(default_factory=list)
    reviewed_s: list = field(default_factory=list)
    plan: FakePlan = field(default_factory=FakePlan)
    profile: HardwareProfile | str = PRESETS["cpu-test"]
    matmul_flops_per_s: float = 1e12
    max_grad_norm: float | None = 1.0
    bad_weight: str = ""
    made_from: dict = field(default_factory=dict)

    def describe(self):
        return "the whole plan"

    def brief(self):
        return "plan: everything streams\nmachine: a CPU"

    def timeline(self):
        profile = self.profile if isinstance(self.profile, str) else self.profile.name
        return json.dumps({"traceEvents": [self.plan.chunk_tokens, profile]})

    def train_step(self, input_ids, labels, lr):
        self.batches.append((input_ids, labels))
        if len(self.batches) == self.interrupt_at:
            raise KeyboardInterrupt
        self.loss -= 0.5
        loss = math.nan if len(self.batches) in self.nan_at else self.loss
        tokens = sum(map(len, input_ids))
        targets = sum(map(num_targets, labels))
        out = SimpleNamespace(
            loss=loss, num_tokens=tokens, num_target_tokens=targets, model_flops=6e9, hardware_flops=8e9
        )
        self.lrs.append(lr)
        return out, SimpleNamespace(grad_norm=1.5, skipped=len(self.lrs) == self.skip_at, seconds=0.1, loss_scale=None)

    def evaluate(self, input_ids, labels):
        self.evaluated.append((input_ids, labels))
        return SimpleNamespace(loss=self.loss, num_target_tokens=1)

    def measure_next_step(self):
        self.measured_step = len(self.batches) + 1

    def memory_peaks(self):
        return SimpleNamespace(gpu_bytes=None, host_bytes=2**30)

    def generate(self, prompts, max_new_tokens, stop_ids):
        """The prompt ends with the <|assistant|> token, id 5."""
        assert all(prompt[-1] == 5 for prompt in prompts)
        assert STOP in stop_ids
        return [[40, 41][:max_new_tokens] for _ in prompts]

    def save_pretrained(self, folder, beside):
        if self.bad_weight:
            raise NotFiniteError(f"{self.bad_weight} holds values that are not finite, so nothing is exported")
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in {"config.json": "{}", **beside}.items():
            (folder / name).write_text(text)


@pytest.fixture
def use(monkeypatch):
    """Have the trainer prepare and build a given engine."""

    def use(fake):
        monkeypatch.setattr(trainer, "prepare_run", lambda config: fake)
        monkeypatch.setattr(trainer, "build_engine", lambda config, prepared: fake)
        review = SimpleNamespace(describe=lambda: "as predicted", expected=EXPECTED, profile="corrected")

        def review_step(prepared, engine, step_s, predicted_s, lengths):
            fake.reviewed_s.append(step_s)
            return review

        monkeypatch.setattr(feedback, "review_step", review_step)
        by_plan = SimpleNamespace(step_s=lambda lengths, after_clipping=False: fake.plan.predicted.step_s)
        monkeypatch.setattr(feedback, "StepPredictor", lambda plan, spec, profile: by_plan)
        monkeypatch.setattr(trainer, "where_not_finite", lambda engine: NotFinite(fake.bad_weight, "block.3"))
        return fake

    return use


@pytest.fixture
def engine(use):
    return use(FakeEngine())


def config_in(folder, **changes):
    options = {
        "model": "preset:demo",
        "data_source": "synthetic",
        "max_seq_len": 16,
        "max_global_batch_tokens": 64,
        "steps": 4,
        "output_dir": str(folder / "run"),
    }
    return TrainConfig(**{**options, **changes})


def test_run_folder_and_output(engine, tmp_path, capsys):
    config = config_in(tmp_path, save=True, lr=1.0, plan_json=str(tmp_path / "copy" / "plan.json"))
    assert trainer.train(config, prompts=("What is the capital of France?",)) == 0
    run = tmp_path / "run"
    assert TrainConfig.from_yaml((run / "config.yaml").read_text()) == config
    assert json.loads((run / "plan.json").read_text()) == {"chunk_tokens": 64}
    assert (tmp_path / "copy" / "plan.json").read_text() == (run / "plan.json").read_text()
    log = [json.loads(line) for line in (run / "train_log.jsonl").read_text().splitlines()]
    assert [(entry["step"], entry["loss"], entry["num_tokens"]) for entry in log] == [
        (1, 3.5, 64), (2, 3.0, 64), (3, 2.5, 64), (4, 2.0, 64),
    ]  # fmt: skip
    assert engine.lrs == [entry["lr"] for entry in log]
    assert engine.lrs == pytest.approx([1.0, 1.0, 1.0, 0.1])
    assert (run / "final" / "config.json").is_file()
    assert sorted(path.name for path in run.iterdir()) == [
        "config.yaml", "final", "plan.json", "timeline.json", "train_log.jsonl",
    ]  # fmt: skip
    out = capsys.readouterr().out
    for part in ("everything streams", "step 4/4", "3.5000 at step 1, 2.0000 at step 4", "host 1.00 GiB"):
        assert part in out
    assert "sample" not in out  # synthetic data has no tokenizer


def test_instruction_data_and_sample(engine, tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "What is 2 plus 2?", "answer": "It is 4."}\n' * 3)
    lengths = {"max_seq_len": 32, "max_global_batch_tokens": 40}
    config = config_in(tmp_path, data_source="json_sft", dataset=str(path), steps=None, epochs=2.0, **lengths)
    assert trainer.train(config, prompts=("What is 2 plus 3?",)) == 0
    assert len(engine.batches) == 2 * 2  # 19 tokens a record, so two records fit in a batch
    out = capsys.readouterr().out
    assert "3 of 3 records" in out
    assert f"sample: 'What is 2 plus 3?' -> {ChatTokenizer.from_folder(ASSETS / 'demo').decode([40, 41])!r}" in out


def test_data_sets_are_mixed_by_weight_and_shown(engine, tmp_path, capsys):
    for name in ("a", "b"):
        turns = [{"role": "user", "content": "Letter?"}, {"role": "assistant", "content": name}]
        turns += [{"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."}]
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": turns}) + "\n")
    places = [str(tmp_path / "a.jsonl"), f"{tmp_path / 'b.jsonl'}=3"]
    options = {"train_on": "last", "data_cache": str(tmp_path / "cache"), "max_seq_len": 40, "steps": None}
    config = config_in(tmp_path, data_source="json_sft", dataset=places, epochs=1.0, verbose=True, **options)
    assert TrainConfig.from_yaml(config.to_yaml()) == config
    assert trainer.train(config) == 0
    assert sum(len(input_ids) for input_ids, _ in engine.batches) == 4
    out = capsys.readouterr().out
    assert "a.jsonl: 1 of 1 records" in out
    assert "weight 3" in out
    assert "<|assistant|>a<|end|><|user|>Sure?<|end|><|assistant|>[[Yes.<|end|>]]" in out
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_bad_records_that_are_skipped_are_told_and_recorded(engine, tmp_path, capsys):
    good = json.dumps({"question": "a", "answer": "b"})
    for name, lines in (("a", [good, "{}", good, "{", good]), ("b", ["3", good])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    options = {"data_source": "json_sft", "dataset": str(tmp_path / "a.jsonl"), "max_seq_len": 32, "save": True}
    options |= {"data_cache": str(tmp_path / "cache")}
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: the record is empty\n.*--bad-records skip counts them"):
        trainer.train(config_in(tmp_path, **options))
    assert not (tmp_path / "run").exists()
    config = config_in(tmp_path, **options, bad_records="skip")
    assert trainer.train(config) == 0
    out = capsys.readouterr().out
    assert "a.jsonl: 3 of 5 records" in out
    assert "; 2 bad records left out (--bad-records skip)" in out
    for said in ("line 2: the record is empty", "line 4: not valid JSON"):
        assert f"\n    {tmp_path}/a.jsonl, {said}" in out
    (told,) = json.loads((tmp_path / "run" / "data.json").read_text())
    assert (told["kept"], told["records"], told["bad_records"]) == (3, 5, 2)
    assert told["first_bad_records"][0] == f"{tmp_path}/a.jsonl, line 2: the record is empty"
    lines = [line.replace(f"{tmp_path}/", "") for line in told["first_bad_records"]]
    named = {**told, "place": "a.jsonl", "first_bad_records": lines}
    assert json.loads((tmp_path / "run" / "final" / RUN_FILE).read_text())["data"] == [named]
    config = replace(config, val_dataset=str(tmp_path / "b.jsonl"))
    cached, anew = (
        training_data.open_data(replace(config, data_cache=str(tmp_path / cache)), open_model("preset:demo"))
        for cache in ("cache", "another")
    )
    assert cached.batches.fingerprint() == anew.batches.fingerprint()  # so that it can be resumed
    assert cached.description == anew.description
    assert f"1 bad records left out (--bad-records skip)\n    {tmp_path}/b.jsonl, line 1: a record" in anew.description
    assert [part["bad_records"] for part in anew.records] == [2, 1]


def test_a_template_that_was_made_up_is_exported(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(ChatTokenizer, "from_folder", lambda _: bare)
    bare = ChatTokenizer(Tokenizer.from_file(str(ASSETS / "demo" / "tokenizer.json")), None, "", "<|end|>")
    (tmp_path / "a.jsonl").write_text('{"question": "a", "answer": "b"}\n')
    dataset = str(tmp_path / "a.jsonl")
    trainer.train(config_in(tmp_path, data_source="json_sft", dataset=dataset, save=True, max_seq_len=32))
    assert (tmp_path / "run" / "final" / "chat_template.jinja").read_text() == bare.template


def test_dry_run_reads_no_data(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(trainer, "prepare_run", lambda config: SimpleNamespace(describe=lambda: "the plan"))
    monkeypatch.setattr(training_data, "prepare_sources", None)
    (tmp_path / "a.jsonl").write_text("no record")
    config = {"data_source": "json_sft", "dry_run": True, "save": False}
    assert trainer.train(config_in(tmp_path, dataset=str(tmp_path / "a.jsonl"), **config)) == 0
    assert trainer.DATA_NOT_COUNTED in capsys.readouterr().out
    with pytest.raises(ValueError, match="no such file"):
        trainer.train(config_in(tmp_path, dataset=str(tmp_path / "b.jsonl"), **config))


def test_dry_run_prints_the_plan_and_leaves_the_run_folder_alone(monkeypatch, tmp_path, capsys):
    plan = SimpleNamespace(to_json=lambda: '{"chunk_tokens": 64}')
    prepared = SimpleNamespace(plan=plan, describe=lambda: "chunks of 64 tokens")
    monkeypatch.setattr(trainer, "prepare_run", lambda config: prepared)
    config = config_in(tmp_path, dry_run=True, plan_json=str(tmp_path / "plan.json"))
    assert trainer.train(config) == 0
    printed = capsys.readouterr().out
    assert "chunks of 64 tokens" in printed
    assert trainer.DATA_NOT_COUNTED not in printed  # random tokens
    assert json.loads((tmp_path / "plan.json").read_text()) == {"chunk_tokens": 64}
    assert not config.run_folder.exists()


def test_dry_run_without_data(monkeypatch, tmp_path):
    plan = SimpleNamespace(to_json=lambda: "{}")
    monkeypatch.setattr(trainer, "prepare_run", lambda config: SimpleNamespace(plan=plan, describe=lambda: ""))
    assert trainer.train(config_in(tmp_path, dry_run=True, data_source="json_sft", model="preset:llama-3.1-405b")) == 0


def test_warning_level_prints_no_step_lines(engine, tmp_path, capsys):
    assert trainer.train(config_in(tmp_path, logging="warning")) == 0
    assert "step 1/4" not in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "reviewed"), [(1, None), (2, 2), (3, 3), (5, 3)])
def test_the_second_step_is_timed_and_the_next_one_compared(engine, tmp_path, capsys, steps, reviewed):
    trainer.train(config_in(tmp_path, steps=steps))
    printed = capsys.readouterr().out
    log = [json.loads(line) for line in (tmp_path / "run" / "train_log.jsonl").read_text().splitlines()]
    assert engine.measured_step == 2
    assert printed.count("as predicted") == len(engine.reviewed_s) == (reviewed is not None)
    if reviewed is not None:
        assert engine.reviewed_s == [log[reviewed - 1]["step_s"]]
        slowed = " (slowed by timing its commands)" if reviewed == 2 else ""
        assert f"step {reviewed}{slowed}: as predicted" in printed
    assert [entry["predicted_step_s"] for entry in log] == [0.5] * min(steps, 3) + [EXPECTED.step_s] * (steps - 3)


def test_a_changed_plan_is_written_everywhere(engine, tmp_path, capsys, monkeypatch):
    def change_plan(prepared, engine, review):
        assert engine.plan.predicted == EXPECTED
        engine.plan = FakePlan(chunk_tokens=32)
        return "changed the plan"

    monkeypatch.setattr(feedback, "change_plan", change_plan)
    copy = tmp_path / "copy.json"
    trainer.train(config_in(tmp_path, replan=True, plan_json=str(copy)))
    assert "changed the plan" in capsys.readouterr().out
    for path in (copy, tmp_path / "run" / "plan.json"):
        assert json.loads(path.read_text()) == {"chunk_tokens": 32}
    assert json.loads((tmp_path / "run" / "timeline.json").read_text()) == {"traceEvents": [32, "corrected"]}


@pytest.mark.parametrize(("steps", "speed"), [(1, "10.0"), (2, "20.0"), (4, "34.3")])
def test_averages_leave_out_the_first_and_the_timed_step(engine, steps, speed):
    names = "loss grad_norm lr model_flops hardware_flops predicted_step_s speed_of_light_s gpu_peak_bytes"
    figures = {**dict.fromkeys(names.split(), 1), "num_tokens": 10, "host_peak_bytes": 0}
    taken = [StepMetrics.measured(step=n, step_s=1 / n, **figures) for n in range(1, steps + 1)]
    assert f"speed: {speed} tokens/s" in trainer.summary(engine, taken, taken[2:])


def test_ctrl_c_keeps_the_log(engine, tmp_path, capsys):
    engine.interrupt_at = 3
    assert trainer.train(config_in(tmp_path, save=True)) == trainer.INTERRUPTED
    assert "interrupted after step 2 of 4" in capsys.readouterr().err
    assert len((tmp_path / "run" / "train_log.jsonl").read_text().splitlines()) == 2
    assert not (tmp_path / "run" / "final").exists()


def test_ctrl_c_in_the_first_step(engine, tmp_path, capsys):
    engine.interrupt_at = 1
    assert trainer.train(config_in(tmp_path)) == trainer.INTERRUPTED
    assert "no step was taken" in capsys.readouterr().out


def test_divergence_is_not_success(engine, tmp_path, capsys):
    engine.loss = float("nan")
    assert trainer.train(config_in(tmp_path)) == trainer.DIVERGED
    assert "diverged" in capsys.readouterr().err


def test_skipped_update_is_said(engine, tmp_path, caplog):
    engine.skip_at = 2
    with caplog.at_level(logging.WARNING):
        trainer.train(config_in(tmp_path))
    assert [r.message for r in caplog.records] == ["step 2 skipped its update: the gradient norm is 1.5"]


def test_one_bad_last_batch_does_not_discard_a_good_run(use, tmp_path, capsys):
    engine = use(FakeEngine(nan_at=(2, 4)))
    assert trainer.train(config_in(tmp_path, save=True)) == 0
    assert (tmp_path / "run" / "final" / "config.json").is_file()
    assert engine.evaluated == [engine.batches[2]]
    out = capsys.readouterr().out
    assert "skipped: 2 of 4 steps, whose loss or gradient was not finite (step 2, 4)" in out
    assert "still works on other batches" in out


def test_a_model_that_has_lost_good_batches_too_is_not_exported(use, tmp_path, capsys):
    engine = use(FakeEngine(nan_at=(4,)))
    engine.evaluate = lambda input_ids, labels: SimpleNamespace(loss=math.inf, num_target_tokens=1)
    assert trainer.train(config_in(tmp_path, save=True)) == trainer.DIVERGED
    err = capsys.readouterr().err
    assert "the run diverged at step 4 of 4; every weight is finite, and the first gradient that is not" in err
    assert "that of block.3" in err
    assert "not exported" in err
    assert not (tmp_path / "run" / "final").exists()


@pytest.mark.parametrize(("most", "taken", "status"), [(3, 5, 1), (2, 4, 1), (4, 12, 0), (0, 12, 0)])
def test_bad_steps_in_a_row_end_a_run(use, tmp_path, capsys, most, taken, status):
    engine = use(FakeEngine(nan_at=(1, 3, 4, 5)))
    assert trainer.train(config_in(tmp_path, steps=12, max_skipped_steps=most)) == status
    assert len(engine.batches) == taken
    if status:
        err = capsys.readouterr().err
        assert f"the run diverged at step 3 of {taken} and ended after {most} such steps (--max-skipped-steps)" in err


def test_a_weight_that_is_not_finite_is_not_exported(use, tmp_path, capsys):
    use(FakeEngine(bad_weight="model.norm.weight"))
    assert trainer.train(config_in(tmp_path, save=True)) == trainer.DIVERGED
    assert "model.norm.weight holds values that are not finite" in capsys.readouterr().err
    assert not (tmp_path / "run" / "final").exists()


def test_final_tells_which_run_made_it(engine, tmp_path):
    config = config_in(tmp_path, save=True, max_grad_norm=0)
    assert trainer.train(config) == 0
    record = json.loads((tmp_path / "run" / "final" / RUN_FILE).read_text())
    assert record["steps"] == 4
    same = {name: getattr(config, name) for name in (*run_folder.NAMED_PLACES, *run_folder.LOCAL_PLACES)}
    assert TrainConfig(**{**record["config"], **same}) == config


def test_a_folder_that_another_run_uses_is_refused(engine, tmp_path):
    config = config_in(tmp_path)
    config.run_folder.mkdir()
    with run_folder.held(config.run_folder), pytest.raises(ValueError, match="run is in use by another run; wait"):
        trainer.train(config)
    assert not engine.batches
    assert list(config.run_folder.iterdir()) == []
    assert trainer.train(config) == 0


def test_a_folder_that_was_used_while_planning_is_checked_again(engine, tmp_path, monkeypatch):
    first, second = config_in(tmp_path, save=True), config_in(tmp_path, save=True, steps=5)

    def meanwhile(config):
        monkeypatch.setattr(trainer, "prepare_run", lambda config: engine)
        assert trainer.train(first) == 0
        return engine

    monkeypatch.setattr(trainer, "prepare_run", meanwhile)
    with pytest.raises(ValueError, match="the model of another run"):
        trainer.train(second)
    assert TrainConfig.from_yaml((tmp_path / "run" / "config.yaml").read_text()) == first


def test_batches_do_not_depend_on_the_budget(use, tmp_path):
    seen = []
    for budget in (0.05, 10.0):
        fake = use(FakeEngine())
        trainer.train(config_in(tmp_path, max_gpu_mem_gib=budget, chunk_tokens=int(budget * 100), overwrite=True))
        seen.append(fake.batches)
    assert seen[0] == seen[1]


def test_trained_model_of_another_run_is_kept(engine, tmp_path):
    config = config_in(tmp_path, save=True)
    assert trainer.train(config) == 0
    with pytest.raises(ValueError, match=r"train_log\.jsonl is of an earlier run; .* give --overwrite"):
        trainer.train(config)
    other = config_in(tmp_path, save=True, steps=5)
    with pytest.raises(ValueError, match="the model of another run"):
        trainer.train(other)
    assert trainer.train(other, replace=True) == 0
    assert trainer.train(replace(config, overwrite=True)) == 0


def test_folder_of_something_else_is_refused(engine, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "thesis.tex").write_text("")
    with pytest.raises(ValueError, match="not of a run"):
        trainer.train(config_in(tmp_path))
    with pytest.raises(ValueError, match="is a file"):
        trainer.train(config_in(tmp_path, output_dir=str(tmp_path / "run" / "thesis.tex")))
    assert not engine.batches


def test_plan_error_comes_before_the_run_folder(monkeypatch, tmp_path, capsys):
    def refuse(config):
        raise PlanError(PlanReason.INSUFFICIENT_DEVICE_MEMORY, "smallest plan needs 23.1 GiB, budget is 20.0 GiB.")

    monkeypatch.setattr(trainer, "prepare_run", refuse)
    argv = ["--model", "preset:demo", "--data-source", "synthetic", "--output-dir", str(tmp_path / "run")]
    assert cli.main(["train", *argv]) == cli.BAD_INPUT
    assert "INSUFFICIENT_DEVICE_MEMORY): smallest plan needs 23.1 GiB" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_tokenizer_larger_than_the_vocabulary(engine, tmp_path, monkeypatch):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "x y z"}\n')
    monkeypatch.setattr(ChatTokenizer, "max_id", 5000)
    with pytest.raises(ValueError, match="ids up to 5000, but the model's vocab_size is 2944"):
        trainer.train(config_in(tmp_path, data_source="json_sft", dataset=str(path)))


def test_preset_without_tokenizer_uses_the_bundled_one(engine, tmp_path, capsys):
    path = tmp_path / "data.jsonl"
    path.write_text('{"text": "the river is wide"}\n')
    trainer.train(config_in(tmp_path, model="preset:tiny-llama3-50m", data_source="json_sft", dataset=str(path)))
    assert "bundled demo tokenizer is used" in capsys.readouterr().out


def test_options_of_a_job_are_those_of_the_contract(tmp_path):
    config = config_in(tmp_path, lr=1e-3, weight_decay=0.1, max_gpu_mem_gib=2.0)
    optimizer = trainer.optimizer_of(config)
    assert (optimizer.lr, optimizer.betas, optimizer.eps, optimizer.weight_decay) == (1e-3, (0.9, 0.95), 1e-8, 0.1)
    contract = (
        "max_seq_len max_global_batch_tokens max_gpu_mem_gib max_host_mem_gib device dtype master_dtype grad_dtype"
        " optimizer optimizer_state_dtype matmul_dtype keep_dtype freeze max_grad_norm seed chunk_tokens round_tokens"
        " recompute deterministic init mode lora_rank lora_alpha lora_targets lora_dropout use_rslora use_dora"
        " lora_init modules_to_save adapter base_dtype lr_groups weight_decay_groups round_multiple transport"
        " exchange_dtype cuda_graphs tokenizer add_tokens resize_embeddings reproducible task labels problem_type"
        " max_image_tokens train_tower trust_remote_code offload_dir max_disk_gib delta_dtype"
    )
    assert sorted(asdict(config.as_job())) == sorted(contract.split())
    assert config.as_job().max_gpu_mem_gib == 2.0


def test_a_full_disk_is_found_before_training(engine, tmp_path, monkeypatch):
    monkeypatch.setattr(run_folder.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(ValueError, match="the disk has 1000 bytes free"):
        trainer.train(config_in(tmp_path, save=True))
    assert not engine.batches
