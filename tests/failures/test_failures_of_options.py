"""Flags, commands and YAML files that mean nothing: refused before anything is opened, with what was probably meant."""

import pytest
from provoke import Case, arguments, cases, check_error, check_message

from flexengine import cli
from flexengine.options.train_config import TrainConfig
from flexengine.run.trainer import train

FLAGS = (
    Case(
        "unknown_flag",
        ["--max-gpu-mem", "24"],
        ("unknown flag --max-gpu-mem; did you mean --max-gpu-mem-gib\\?", "--help"),
    ),
    Case(
        "unknown_flag_with_underscores", ["--max_seqlen=8"], ("unknown flag --max-seqlen; did you mean --max-seq-len",)
    ),
    Case("two_unknown_flags", ["--wurm", "--lrr=3"], ("--wurm", "--lrr; did you mean --lr\\?")),
    Case("argument_without_a_flag", ["data.jsonl"], ("unexpected argument 'data.jsonl'; every option is a flag",)),
    Case("flag_without_a_value", ["--lr"], ("--lr: expected one argument", "--help")),
    Case("lr_is_no_number", ["--lr", "fast"], ("--lr: invalid float value: 'fast'", "--help")),
    Case("lr_is_negative", ["--lr", "-1e-4"], ("--lr must be more than 0, got -0.0001",)),
    Case("lr_is_zero", ["--lr", "0"], ("--lr must be more than 0, got 0.0",)),
    Case("lr_is_infinite", ["--lr", "inf"], ("--lr must be a finite number, got inf",)),
    Case("lr_is_nan", ["--lr", "nan"], ("--lr must be a finite number, got nan",)),
    Case("steps_with_a_fraction", ["--steps", "2.5"], ("--steps: invalid int value: '2.5'",)),
    Case(
        "one_of_two_sizes_beside_the_rule",
        ["--reproducible", "--round-tokens", "32"],
        ("--round-tokens 32 is one of two sizes that --reproducible chooses; give both, or none",),
    ),
    Case(
        "objective_without_data",
        ["--objective", "dpo", "--data-source", "json_sft"],
        ("--objective dpo needs records of preferences", "give --dataset"),
    ),
    Case("objective_of_random_tokens", ["--objective", "dpo"], ("--data-source synthetic has none of", "--dataset")),
    Case(
        "constant_of_another_objective",
        ["--objective", "dpo", "--simpo-gamma", "0.5"],
        ("--simpo-gamma 0.5 is SimPO's margin, got --objective dpo; give --objective simpo",),
    ),
    Case(
        "objective_with_dropout",
        ["--data-source=json_sft", "--dataset=x", "--objective=dpo", "--mode=lora", "--lora-dropout=0.1"],
        ("--lora-dropout 0.1 with --objective dpo: the loss is computed without dropout", "leave --lora-dropout out"),
    ),
    Case(
        "distillation_without_a_teacher",
        ["--data-source=json_sft", "--objective=distill"],
        ("--objective distill needs the model to learn from; give --teacher MODEL",),
    ),
    Case(
        "grpo_without_rewards",
        ["--data-source=json_sft", "--dataset=x", "--objective=grpo"],
        ("--objective grpo needs functions that reward completions; give --rewards file.py:function",),
    ),
    Case(
        "beta_beyond_divergences",
        ["--data-source=json_sft", "--objective=distill", "--teacher=x", "--beta=2"],
        ("--beta 2 with --objective distill", "give a number from 0 to 1"),
    ),
    Case(
        "classes_without_a_head",
        ["--labels", "a", "b"],
        ("--labels a b names classes, got --task None; give --task sequence or token",),
    ),
    Case("class_named_twice", ["--task", "token", "--labels", "a", "a"], ("labels: 'a' is given twice", "once")),
    Case(
        "head_without_classes",
        ["--task", "sequence", "--model", "preset:demo"],
        ("--task sequence: demo has no head with classes of its own; name them: --labels",),
    ),
    Case("steps_and_epochs", ["--epochs", "1"], ("--steps 2 and --epochs 1.0", "give one")),
    Case("seed_too_large", ["--seed", str(2**40)], ("--seed is at most 4294967295, got 1099511627776",)),
    Case("template_date_is_no_day", ["--template-date", "4.3.2024"], ("'4.3.2024' is no day", "YYYY-MM-DD")),
    Case("new_token_twice", ["--add-tokens", "<a>", "<a>"], ("--add-tokens: '<a>' is given twice", "once")),
    Case("new_token_blank", ["--add-tokens", " "], ("--add-tokens: ' ' is blank",)),
    Case("budget_of_zero", ["--max-gpu-mem-gib", "0"], ("--max-gpu-mem-gib must be more than 0, got 0.0",)),
    Case(
        "budget_in_bytes", ["--max-host-mem-gib", "8e9"], ("--max-host-mem-gib is at most 1048576, got 8000000000.0",)
    ),
    Case(
        "sequence_longer_than_a_step",
        ["--max-seq-len", "64"],
        ("--max-seq-len 64 tokens exceeds --max-global-batch-tokens 32",),
    ),
    Case(
        "step_of_a_billion_tokens", ["--max-global-batch-tokens", str(10**9)], ("is at most 268435456, got 1000000000",)
    ),
    Case("name_of_another_system", ["--zero-stage", "3"], ("--zero-stage is not an option: memory is planned here",)),
    Case("dtype_that_is_not_offered", ["--dtype", "fp8"], ("--dtype: .*fp8.*bfloat16.*float16",)),
    Case("cool_down_before_the_end_of_warm_up", ["--lr-warmup-pct", "0.9"], ("0.8 is before the end.*0.9",)),
    Case(
        "percent_in_place_of_a_fraction",
        ["--lr-final-pct", "10"],
        ("--lr-final-pct is a fraction from 0 to 1, got 10",),
    ),
    Case(
        "batch_size_per_device",
        ["--per-device-train-batch-size", "8"],
        ("--per-device-train-batch-size is not an option.*give --max-global-batch-tokens",),
    ),
    Case("unknown_frozen_layer", ["--freeze", "blocs"], ("freeze='blocs': .* no such parameters; did you mean block",)),
    Case(
        "data_set_beside_synthetic_data",
        ["--dataset", "x.jsonl"],
        ("--dataset x.jsonl names records.*got --data-source synthetic",),
    ),
    Case(
        "mode_auto_without_yes",
        ["--mode", "auto"],
        ("--mode auto proposes --mode full; add --yes to take it, or give",),
    ),
    Case("adapters_without_their_mode", ["--lora-rank", "16"], ("--lora-rank 16 is for adapters.*give --mode lora",)),
    Case(
        "constant_of_another_optimizer",
        ["--optimizer", "lion", "--adam-beta1", "0.9"],
        ("--adam-beta1 0.9 is a constant of AdamW.*got --optimizer lion; give --optimizer adamw or muon",),
    ),
    Case("transport_of_one_gpu", ["--transport", "split"], ("transport=split is about several GPUs",)),
    Case("exchange_of_one_node", ["--exchange-dtype", "bfloat16"], ("exchange_dtype=bfloat16 is about several nodes",)),
    Case("unknown_device", ["--device", "gpu"], ("device='gpu' is not known; choose auto, cpu, cuda or cuda:N",)),
    Case("unsupported_device", ["--device", "meta"], ("device='meta' is not supported; choose auto, cpu, cuda",)),
    Case(
        "master_dtype_of_another_dtype",
        ["--master-dtype", "bfloat16"],
        ("needs --dtype bfloat16, got --dtype float32",),
    ),
)


@cases(*FLAGS)
def test_flags(case, model, command, known_machine, tmp_path):
    given = arguments(model=model, output_dir=tmp_path / "run")
    named = {flag.partition("=")[0] for flag in case.provoke}
    outcome = command("train", *(flag for flag in given if flag.partition("=")[0] not in named), *case.provoke)
    assert outcome.status == case.status
    check_message(outcome.err, case.says)
    assert not (tmp_path / "run").exists()


COMMANDS = (
    Case("unknown_command", ["trian"], ("unknown command 'trian'; did you mean train\\?", "download")),
    Case(
        "command_forgotten", ["--model", "preset:demo"], ("a command comes before --model.*flexengine train --model",)
    ),
    Case("demo_with_an_unknown_flag", ["demo", "--stepps", "3"], ("unknown flag --stepps; did you mean --steps",)),
    Case("download_without_a_target", ["download", "model", "org/name"], ("required: --target", "--help")),
    Case(
        "download_with_an_unknown_flag",
        ["download", "model", "org/name", "--target", "x", "--revison", "main"],
        ("unknown flag --revison; did you mean --revision\\?",),
    ),
    Case("download_of_nothing", ["download", "modell"], ("invalid choice: 'modell'.*model.*dataset.*verify",)),
    Case(
        "verify_what_was_never_downloaded", ["download", "verify", "nowhere"], ("not found", "Run it again"), status=1
    ),
)


@cases(*COMMANDS)
def test_commands(case, command):
    outcome = command(*case.provoke)
    assert outcome.status == case.status
    check_message(outcome.err, case.says)


def test_no_command_shows_what_there_is(command):
    outcome = command()
    assert outcome.status == 2
    assert all(name in outcome.out for name in cli.COMMANDS)


LEVELS = [
    f"&{name} [{','.join([inner] * 9)}]"
    for name, inner in zip("abcdefgh", ["x", *map("*{}".format, "abcdefg")], strict=True)
]
"""Eight levels of nine references: a few hundred bytes that are 43 million entries when written out."""
YAML = (
    Case("yaml_unknown_key", "max-gpu-mem: 24\n", ("unknown options: max_gpu_mem; did you mean max_gpu_mem_gib\\?",)),
    Case("yaml_list", "- model: x\n", ("must hold one `option: value` a line, found list",)),
    Case("yaml_empty", "# nothing\n", ("must hold one `option: value` a line, found nothing",)),
    Case("yaml_damaged", "model: [\n", ("run.yaml is not valid YAML.*line 2",)),
    Case("yaml_key_twice", "lr: 1e-3\nlr: 1e-4\n", ("not valid YAML: 'lr' is given twice",)),
    Case("yaml_no_text", b"\xff\xfe", ("run.yaml: no UTF-8 text.*byte 0",)),
    Case("yaml_nested_too_deep", "[" * 20000, ("run.yaml is not valid YAML: values are nested too deep",)),
    Case("yaml_impossible_date", "model: 2020-99-99\n", ("run.yaml is not valid YAML: month must be in 1..12",)),
    Case("yaml_text_for_a_number", "lr: fast\n", ("--lr must be of type float, got 'fast'",)),
    Case("yaml_number_too_large", "lr: 1" + "0" * 400 + "\n", ("--lr must be a finite number",)),
    Case("yaml_that_grows_when_written_out", f"model: [{','.join(LEVELS)}]", ("--model must be of type str, got \\[",)),
    Case("yaml_runs_no_code", "lr: !!python/object/apply:os.getcwd []\n", ("not valid YAML.*python/object",)),
    Case("yaml_folder", None, ("--config run.yaml: a folder; name a file",)),
)


@cases(*YAML)
def test_yaml(case, command, tmp_path):
    path = tmp_path / "run.yaml"
    if case.provoke is None:
        path.mkdir()
    else:
        path.write_bytes(case.provoke.encode() if isinstance(case.provoke, str) else case.provoke)
    outcome = command("train", "--config", "run.yaml")
    assert outcome.status == case.status
    check_message(outcome.err, case.says)


def test_epochs_without_end(command):
    outcome = command("train", *arguments(model="preset:demo", steps=None, epochs=1e9))
    assert outcome.status == 2
    check_message(outcome.err, ("--epochs is at most 10000, got 1000000000.0",))


def test_yaml_that_is_absent(command):
    outcome = command("train", "--config=nowhere.yaml")
    assert outcome.status == 2
    check_message(outcome.err, ("--config nowhere.yaml: no such file",))


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), ("memory ran out: the operating system refused", "--max-host-mem-gib", "ulimit -v")),
        (MemoryError("cannot map 3 GiB"), ("cannot map 3 GiB",)),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
            ("memory ran out.*you tried", "ulimit"),
        ),
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
            ("Tried to allocate 2.00 GiB", "--max-gpu-mem"),
        ),
        (
            OSError(28, "No space left on device", "/tmp/x"),
            ("/tmp/x: no space left on the disk \\(.*MiB free\\)", "Free"),
        ),
        (
            OSError(30, "Read-only file system", "/tmp/x"),
            ("/tmp/x: no permission \\(Read-only", "another --output-dir"),
        ),
        (OSError(5, "Input/output error", "/tmp/x"), ("/tmp/x: Input/output error \\(error 5\\)",)),
        (OSError("the library said no"), ("the library said no",)),
        (ModuleNotFoundError("no", name="matplotlib.pyplot"), ("matplotlib is not installed; pip install matplotlib",)),
    ],
)
def test_errors_of_the_system(error, says, command, monkeypatch):
    def fail(argv):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command(fail, ""))
    outcome = command("train")
    assert outcome.status == 2
    check_message(outcome.err, says)


@pytest.mark.parametrize(
    "error",
    [RuntimeError("shape mismatch"), KeyError("x"), ValueError(), ModuleNotFoundError("no", name="flexengine.x")],
)
def test_a_bug_keeps_its_traceback(error, command, monkeypatch):
    """What no other input would avoid is not dressed up as the fault of the person who sees it."""

    def fail(argv):
        raise error

    monkeypatch.setitem(cli.COMMANDS, "train", cli.Command(fail, ""))
    with pytest.raises(type(error)):
        command("train")


def test_gpus_are_those_that_train(model):
    """From Python nobody starts the others, and under torchrun it is torchrun that does."""
    config = TrainConfig(model=str(model), data_source="synthetic", gpus=2, device="cpu")
    check_error(lambda: train(config), ("--gpus 2, but 1 of this machine's processes train.*leave --gpus out",))


def test_help_of_every_command_ends_well(command):
    for name in cli.COMMANDS:
        assert command(name, "--help").status == 0
