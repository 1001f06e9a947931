"""Whole runs of `train` on real engines: the loss falls, the log tells what was done, transformers loads the export."""

import json

import pytest
import safetensors
import torch
import transformers
from engine_helpers import saved_model, spec_of, tiny_config

from flexengine import cli
from flexengine.options.train_config import TrainConfig
from flexengine.plan import Plan
from flexengine.run import trainer


def config_in(folder, **changes):
    options = {"model": "preset:demo", "data_source": "synthetic", "max_seq_len": 16, "max_global_batch_tokens": 64}
    return TrainConfig(**{**options, "steps": 4, "output_dir": str(folder / "run"), **changes})


def test_no_clipping_is_planned_and_built_alike(tmp_path):
    config = config_in(tmp_path, max_grad_norm=0.0)
    planned = trainer.prepare_run(config)
    assert not planned.plan.request.clipping
    assert planned.job.max_grad_norm is None
    assert trainer.prepare_run(config_in(tmp_path)).plan.request.clipping


def test_end_to_end_on_the_real_engine(tmp_path, capsys):
    """The bundled model under a device budget below its training state: loss falls, the export is complete."""
    path = tmp_path / "data.jsonl"
    path.write_text('{"question": "What colour is snow?", "answer": "Snow is white."}\n')
    options = {"data_source": "json_sft", "dataset": str(path), "dtype": "float32", "device": "cpu", "save": True}
    lengths = {"max_seq_len": 32, "max_global_batch_tokens": 64, "max_gpu_mem_gib": 0.09, "steps": 4, "lr": 1e-3}
    config = config_in(tmp_path, **options, **lengths, replan=True)
    assert trainer.train(config, prompts=("What colour is snow?",)) == 0
    run = config.run_folder
    losses = [json.loads(line)["loss"] for line in (run / "train_log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0] - 1.0
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {p.name for p in (run / "final").iterdir()}
    printed = capsys.readouterr().out
    assert "sample: 'What colour is snow?' -> " in printed
    assert "step 3: measured" in printed
    assert "plan: GPU" in printed
    plan = Plan.from_json((run / "plan.json").read_text())
    assert plan.request.max_seq_len == 32
    predicted = [json.loads(line)["predicted_step_s"] for line in (run / "train_log.jsonl").read_text().splitlines()]
    assert predicted[0] == predicted[2]
    assert 0 < predicted[3] < plan.predicted.step_s  # 16 of the 64 tokens that the plan is for, at corrected speeds
    assert predicted[3] != predicted[2]


def test_frozen_layers_from_the_command_line(tmp_path, capsys):
    """As `train.py --freeze`: the loss falls, the log counts what was done, and what is frozen is as it was."""
    model, run = tmp_path / "model", tmp_path / "run"
    tensors = saved_model(model, tiny_config(num_hidden_layers=3)).state_dict()
    groups = spec_of(tiny_config(num_hidden_layers=3)).groups
    flags = "--data-source synthetic --max-seq-len 16 --max-global-batch-tokens 64 --steps 3 --lr 1e-2 --save"
    machine = "--device cpu --dtype bfloat16 --max-gpu-mem-gib 1 --max-host-mem-gib 4"
    line = f"train --model {model} --output-dir {run} {flags} {machine} --freeze embed block.0-1 -v"
    assert cli.main(line.split()) == 0
    assert "frozen: 3 of 5 groups" in capsys.readouterr().out
    assert TrainConfig.from_yaml((run / "config.yaml").read_text()).freeze == ("embed", "block.0-1")
    plan = Plan.from_json((run / "plan.json").read_text())
    assert [group.update == "none" for group in plan.groups] == [True, True, True, False, False]
    frozen = {s.name for g in groups[:3] for param in g.params for s in param.sources}
    with safetensors.safe_open(run / "final" / "model.safetensors", framework="pt") as written:
        for name, tensor in tensors.items():
            assert torch.equal(written.get_tensor(name), tensor) == (name in frozen), name


def test_from_scratch_from_the_command_line(tmp_path, capsys):
    """As `train.py --init random`, from config.json alone: the seed decides, and transformers loads the model."""
    model, heads = tmp_path / "model", {}
    model.mkdir()
    (model / "config.json").write_text(json.dumps(tiny_config(initializer_range=0.05)))
    flags = "--data-source synthetic --max-seq-len 16 --max-global-batch-tokens 64 --steps 1 --lr 1e-9 --save"
    machine = "--device cpu --dtype float32 --max-gpu-mem-gib 1 --max-host-mem-gib 4"
    for run, seed in (("a", 1), ("b", 1), ("c", 2)):
        line = f"train --model {model} --output-dir {tmp_path / run} {flags} {machine} --init random --seed {seed}"
        assert cli.main(line.split()) == 0
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / run / "final", dtype=torch.float32)
        heads[run] = loaded.lm_head.weight.detach()
    assert float(heads["a"].std()) == pytest.approx(0.05, rel=0.1)
    assert torch.equal(heads["a"], heads["b"])
    assert not torch.allclose(heads["a"], heads["c"])
    assert cli.main(f"train --model {model} --output-dir {tmp_path / 'd'} {flags} {machine}".split()) == cli.BAD_INPUT
    assert "or train from scratch with --init random" in capsys.readouterr().err
