import os
from pathlib import Path

import pytest

from flexengine import __version__, cli
from flexengine.options.option import flag_of, options_of
from flexengine.options.other_names import COMMANDS as COMMANDS_OF_OTHERS
from flexengine.options.train_config import TrainConfig

ROOT = Path(__file__).resolve().parent.parent
SYNTHETIC = ["--model", "preset:demo", "--data-source", "synthetic"]


def parse(*argv):
    return cli.parse_config("test", [cli.with_dashes(a) for a in argv])


def test_dashes_and_underscores():
    dashes = parse(*SYNTHETIC, "--max-seq-len", "64", "--lr=1e-3", "--save")
    assert dashes == parse(
        "--model=preset:demo", "--data_source=synthetic", "--max_seq_len=64", "--lr", "1e-3", "--save"
    )
    assert (dashes.max_seq_len, dashes.lr, dashes.save) == (64, 1e-3, True)
    assert cli.with_dashes("--output_dir=my_runs/a_b") == "--output-dir=my_runs/a_b"
    assert cli.with_dashes("my_file") == "my_file"


def test_flags_override_the_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: preset:demo\ndataset: x.jsonl\nmax-seq-len: 64\nsteps: 3\nsave: true\nlr: 3e-4\n")
    config = parse("--config", str(path), "--max-seq-len", "32", "--no-save", "--epochs", "2")
    assert (config.max_seq_len, config.save, config.lr) == (32, False, 3e-4)
    assert (config.steps, config.epochs) == (None, 2.0)


def test_config_yaml_of_a_run_starts_the_same_run(tmp_path):
    config = parse(*SYNTHETIC, "--max-gpu-mem-gib", "0.5", "--steps", "2", "--output-dir", str(tmp_path))
    (tmp_path / "config.yaml").write_text(config.to_yaml())
    assert parse("--config", str(tmp_path / "config.yaml")) == config


def test_help_names_every_flag_default_and_unit(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert stopped.value.code == 0
    assert all(flag_of(name) in text for name in options_of(TrainConfig))
    for part in (
        "in GiB (default: what is free less a reserve)",
        "in tokens (default: 2048)",
        "(default: 3e-05)",
        "(default: no)",
    ):
        assert part in text


def test_top_level_help_and_unknown_command(capsys):
    assert cli.main(["--help"]) == 0
    assert cli.main([]) == cli.BAD_INPUT
    assert cli.main(["trian"]) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert all(name in captured.out for name in cli.COMMANDS)
    assert "unknown command 'trian'" in captured.err


def test_commands_of_others_lead_to_ours(capsys):
    for name, ours in COMMANDS_OF_OTHERS.items():
        assert cli.main([name]) == cli.BAD_INPUT
        assert f"there is no command {name!r}: flexengine {ours}" in capsys.readouterr().err
        assert ours.split()[0] in cli.COMMANDS
    with pytest.raises(SystemExit):
        cli.main(["train", "run.yaml"])
    assert "unexpected argument 'run.yaml'; give --config run.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data-source", "synthetic"], "--model is missing"),
        ([*SYNTHETIC, "--config", "nowhere.yaml"], "--config nowhere.yaml: no such file"),
        (["--model", "no/such/folder", "--data-source", "synthetic"], "no such folder"),
        (["--model", "preset:llama-9", "--data-source", "synthetic"], "unknown preset 'llama-9'"),
        (["--model", "preset:demo", "--dataset", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
    ],
)
def test_bad_input_is_one_message_without_traceback(argv, message, capsys):
    assert cli.main(["train", *argv]) == cli.BAD_INPUT
    captured = capsys.readouterr()
    assert captured.err.startswith("flexengine train: ")
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_unknown_flag(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["train", *SYNTHETIC, "--max-seqlen", "3"])
    assert stopped.value.code == cli.BAD_INPUT
    assert "--max-seqlen" in capsys.readouterr().err


@pytest.mark.parametrize(("error", "status"), [(ValueError("no"), 2), (OSError("disk"), 2), (KeyboardInterrupt(), 130)])
def test_exit_status_of_errors(error, status, monkeypatch, capsys):
    def fail(argv):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command(fail, ""))
    assert cli.main(["train"]) == status
    assert capsys.readouterr().err.startswith("flexengine train: ")


def test_demo_of_adapters_begins_with_the_model_of_the_demo(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    configs = []
    monkeypatch.setattr(cli, "_train", lambda config, **_: configs.append(config) or 0)
    assert cli.run_demo(["--lora", "--lora-rank", "4"]) == 0
    final = tmp_path / "runs" / "demo" / "final"
    final.mkdir(parents=True)
    (final / "config.json").write_text("{}")
    assert cli.run_demo(["--lora"]) == 0
    assert [(c.model, c.mode, c.lora_setup.rank) for c in configs] == [
        ("preset:demo", "lora", 4),
        ("runs/demo/final", "lora", 16),
    ]


def test_demo_options_make_a_config_that_flags_override():
    base = cli.demo_options()
    config = TrainConfig(**base)
    assert Path(*config.dataset).is_file()
    assert config.save
    assert cli.parse_config("demo", ["--steps", "3"], base).steps == 3
    assert cli.parse_config("demo", ["--epochs", "1"], base).steps is None
    assert cli.parse_config("demo", ["--data-source", "synthetic"], base).dataset == ()


def test_version(capsys):
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"flexengine {__version__}\n"


@pytest.mark.parametrize("given", [None, "7"])
def test_compiled_products_of_the_cpu_are_bounded_unless_the_environment_says_how_many(monkeypatch, capsys, given):
    names = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
    for name in names:
        monkeypatch.setenv(name, "")  # so that it is as before afterwards
        monkeypatch.delenv(name)
        if given is not None:
            monkeypatch.setenv(name, given)
    assert cli.main(["--version"]) == 0
    assert [os.environ[name] for name in names] == [given or str(cli.COMPILED_PRODUCTS)] * 2
