import re
import subprocess
import sys
from dataclasses import fields

import pytest

from flexengine.cli import parse_config
from flexengine.options.data import BUNDLED_DATA, TRIAL_STEPS
from flexengine.options.option import FlagWords, options_of
from flexengine.options.other_names import BY_VALUE, OTHERWISE, OWN, SAME, SPELLINGS, translated_flags
from flexengine.options.train_config import TrainConfig, options_from_yaml

SYNTHETIC = {"model": "preset:demo", "data_source": "synthetic"}


def test_yaml_both_ways():
    config = TrainConfig(**SYNTHETIC, lr=2e-5, steps=7, max_gpu_mem_gib=24, recompute="full", output_dir="out")
    assert TrainConfig.from_yaml(config.to_yaml()) == config


def test_every_option_has_help():
    assert set(options_of(TrainConfig)) == {field.name for field in fields(TrainConfig)}
    assert all(option.help for option in options_of(TrainConfig).values())


def test_yaml_numbers_without_a_dot_and_keys_with_dashes():
    assert options_from_yaml("lr: 3e-5\nmax-seq-len: 64\n", "f") == {"lr": 3e-5, "max_seq_len": 64}


def test_names_of_transformers():
    text = "learning_rate: 1.0e-4\nnum-train-epochs: 2\nwarmup_steps: 5\nlr_scheduler_type: cosine\n"
    assert options_from_yaml(text, "f") == {"lr": 1e-4, "epochs": 2, "lr_warmup_steps": 5, "lr_schedule": "cosine"}
    flags = ["--learning-rate=1e-4", "--num_train_epochs", "2", "--adam-epsilon", "1e-6"]
    config = parse_config("train", flags, {"model": "preset:demo", "dataset": "x.jsonl"})
    assert (config.lr, config.epochs, config.adam_eps) == (1e-4, 2.0, 1e-6)


def test_names_of_peft():
    text = "mode: lora\nr: 4\ntarget_modules: [q_proj, v_proj]\ninit_lora_weights: pissa\n"
    found = options_from_yaml(text, "f")
    assert found == {"mode": "lora", "lora_rank": 4, "lora_targets": ["q_proj", "v_proj"], "lora_init": "pissa"}


def test_an_adapter_has_the_learning_rate_of_adapters():
    options = {"model": "preset:demo", "data_source": "synthetic"}
    assert TrainConfig(**options).base_lr == 3e-5
    assert TrainConfig(**options, mode="lora").base_lr == 1e-4
    assert TrainConfig(**options, adapter="some/folder").base_lr == 1e-4


@pytest.mark.parametrize("name", sorted(SAME))
def test_names_of_transformers_lead_to_options(name):
    assert SAME[name] in options_of(TrainConfig)
    assert name not in options_of(TrainConfig)


@pytest.mark.parametrize("name", sorted(OTHERWISE))
def test_names_without_counterpart_are_explained(name):
    assert name not in options_of(TrainConfig)
    flags = re.findall("--([a-z-]+)", OTHERWISE[name])
    assert {flag.replace("-", "_") for flag in flags} <= set(options_of(TrainConfig))


@pytest.mark.parametrize("name", sorted(BY_VALUE))
def test_names_whose_value_says_what_they_mean_lead_to_values_that_are_taken(name):
    options = options_of(TrainConfig)
    assert (name in options) <= (name in OWN)
    for meant in BY_VALUE[name].values():
        for option, value in meant.items() if isinstance(meant, dict) else ():
            options[option].check(options[option].normalised(value), FlagWords())


@pytest.mark.parametrize("name", sorted(SPELLINGS))
def test_spellings_are_of_choices(name):
    choices = options_of(TrainConfig)[name].choices
    assert choices is not None
    known = {**SPELLINGS[name]}
    assert {value for value in known.values() if value in choices}
    assert not known.keys() & set(choices)


FLAGS = {
    "--use-muon --lr 1e-3": "--optimizer muon --lr 1e-3",
    "--strategy lora --load-in-4bit": "--mode lora --base-dtype nf4",
    "--numerics smallest": "--optimizer-state-dtype int8 --master-dtype bfloat16 --max-grad-norm 0",
    "--mode qlora --lora-r=8": "--mode lora --base-dtype nf4 --lora-rank=8",
    "--mode=full --optim adamw_8bit": "--mode full --optimizer adamw --optimizer-state-dtype int8",
    "--bf16 true --packing --use_peft": "--dtype bfloat16 --mode lora",
    "--mixed-precision fp8 --input_bin a.bin": "--dtype bfloat16 --matmul-dtype fp8 --dataset a.bin",
    "--report-to none --resume_from_checkpoint": "--resume auto",
    "--report-to wandb trackio --resume-from-checkpoint runs/a": "--report-to wandb trackio --resume runs/a",
    "--lora_target_linear true": "--lora-targets all-linear",
    "--quantization_bit 4 --use-cpu --beta1 0.9": "--base-dtype nf4 --device cpu --adam-beta1 0.9",
}


@pytest.mark.parametrize("given", FLAGS)
def test_flags_of_others_are_rewritten(given):
    assert " ".join(translated_flags(given.split(), options_of(TrainConfig))) == FLAGS[given]


REFUSED_NAMES = {
    "--zero-stage 3": "--zero-stage is not an option: memory is planned here",
    "--tensor-parallel 2": "--transport",
    "--nodes 2": "torchrun",
    "--force-save-level 2": "--recompute",
    "--strategy prefix": "its values are full, lora, qlora",
    "--gradient-compression x": "--exchange-dtype",
    "--activation-checkpointing": "--recompute",
    "--chat-template x": "--tokenizer names a folder with another",
}


@pytest.mark.parametrize("given", REFUSED_NAMES)
def test_flags_without_a_counterpart_say_what_to_use(given):
    with pytest.raises(ValueError, match="is not an option: ") as refused:
        translated_flags(given.split(), options_of(TrainConfig))
    assert REFUSED_NAMES[given] in str(refused.value)


def test_values_in_other_spellings():
    config = parse_config(
        "train", ["--model", "m", "--dtype", "bf16", "--master-dtype", "bf16", "--base-dtype=bfloat16"]
    )
    assert (config.dtype, config.master_dtype, config.base_dtype) == ("bfloat16", "bfloat16", "bf16")
    assert options_from_yaml("quantization_bit: 8", "f") == {"base_dtype": "int8"}
    found = options_from_yaml("adapter: qlora\nbase_model: m\nbf16: auto\nsample_packing: true\n", "f")
    assert found == {"mode": "lora", "base_dtype": "nf4", "model": "m", "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- a\n", "must hold one `option: value` a line, found list"),
        ("a: [\n", "is not valid YAML"),
        ("learning-speed: 1\n", "unknown options: learning_speed"),
        ("learning_rate: 1\nlr: 2\n", "gives lr twice, once by another name"),
        ("per_device_train_batch_size: 8\n", "is not an option: .*--max-global-batch-tokens"),
        ("max-gpu-mem: 8\n", "unknown options: max_gpu_mem; did you mean max_gpu_mem_gib?"),
        ("lr: 1\nlr: 2\n", "'lr' is given twice"),
        ("", "found nothing"),
    ],
)
def test_bad_yaml(text, message):
    with pytest.raises(ValueError, match=message):
        options_from_yaml(text, "run.yaml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": ""}, "--model is missing"),
        ({"mode": "frozen"}, "--mode must be one of full, lora, auto, got 'frozen'"),
        ({"max_seq_len": 0}, "--max-seq-len must be more than 0, got 0"),
        ({"max_seq_len": 64.0}, "--max-seq-len must be of type int, got 64.0"),
        ({"steps": True}, "--steps must be of type int, got True"),
        ({"lr": "fast"}, "--lr must be of type float, got 'fast'"),
        ({"lr": float("nan")}, "--lr must be a finite number"),
        ({"max_gpu_mem_gib": -1}, "--max-gpu-mem-gib must be more than 0"),
        ({"weight_decay": -0.1}, "--weight-decay must not be negative"),
        ({"lr_final_pct": 10.0}, "--lr-final-pct is a fraction from 0 to 1, got 10.0"),
        ({"lr_warmup_pct": 0.9}, "--lr-cooldown-start-pct 0.8 is before the end of the warm-up"),
        (
            {"lr_final_pct": 0.1, "lr_schedule": "constant"},
            "got --lr-schedule constant; give --lr-schedule warmup_cooldown, linear,",
        ),
        ({"lr_schedule": "polynomial"}, "--lr-schedule must be one of warmup_cooldown, linear"),
        ({"adam_beta2": 1.0}, "--adam-beta2 must be below 1, got 1.0"),
        ({"steps": 3, "epochs": 1.0}, "give one"),
        ({"dataset": "x.json"}, "--dataset x.json names records, but random tokens need no data"),
        ({"max_seq_len": 2048, "max_global_batch_tokens": 1024}, "2048 tokens exceeds --max-global-batch-tokens 1024"),
        ({"dtype": "float8"}, "--dtype must be one of bfloat16, float16, float32, float64"),
        ({"save": "yes"}, "--save must be of type bool"),
        ({"output_dir": 3}, "--output-dir must be of type str"),
    ],
)
def test_refused_options_name_flag_and_value(changes, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**{**SYNTHETIC, **changes})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--lora-rank 16 --lora-alpha 16", "--lora-rank 16 is for adapters, got --mode full; give --mode lora, or"),
        ("--lora-targets all-linear", "--lora-targets all-linear is for adapters"),
        ("--lora-dropout 0", "--lora-dropout 0.0 is for adapters"),
        ("--mode full --adapter some/folder", "--adapter some/folder is for adapters, got --mode full"),
        ("--optimizer lion --adam-beta1 0.9", "--adam-beta1 0.9 is a constant of AdamW, .* got --optimizer lion"),
        ("--lr-schedule cosine --lr-cooldown-start-pct 0.8", "--lr-cooldown-start-pct 0.8 .* got --lr-schedule cosine"),
        ("--lr-schedule constant --lr-warmup-pct 0.1", "--lr-warmup-pct 0.1 is about the warm-up, got --lr-schedule"),
        ("--lr-warmup-steps 3 --lr-warmup-pct 0.1", "--lr-warmup-pct 0.1 and --lr-warmup-steps 3 both .*; give one"),
        ("--train-on assistant", "--train-on assistant is about records, got --data-source synthetic"),
        ("--truncate-long", "--truncate-long is about records"),
        ("--save-total-limit 2", "--save-total-limit 2 is about checkpoints; give --save-steps or --save too"),
        ("--eval-steps 5", "--eval-steps 5 needs data to evaluate on; give --val-dataset or --val-fraction too"),
        ("--weight-decay-groups embed=0", "--weight-decay-groups embed=0 is a factor .*; give --weight-decay too"),
        ("--dtype float64 --optimizer-state-dtype bfloat16", "--optimizer-state-dtype bfloat16 .* got --dtype float64"),
        ("--overwrite --resume auto", "--overwrite and --resume auto contradict each other"),
        ("--trace --dry-run", "--trace and --dry-run contradict each other"),
    ],
)
def test_an_option_without_what_it_hangs_on_is_refused_also_at_its_usual_value(flags, message):
    with pytest.raises(ValueError, match=message):
        parse_config("train", flags.split(), SYNTHETIC)


def test_options_whose_needs_are_met_and_those_that_are_absent():
    flags = "--mode lora --lora-rank 16 --save --save-total-limit 0 --lr-schedule wsd --lr-warmup-steps 0"
    config = parse_config("train", flags.split(), SYNTHETIC)
    assert (config.lora_setup.rank, config.lora_setup.alpha, config.most_checkpoints) == (16, 16.0, None)
    assert TrainConfig.from_yaml(config.to_yaml()) == config
    assert TrainConfig(**SYNTHETIC, use_dora=False, lora_rank=None, truncate_long=False).mode == "full"
    assert TrainConfig(**SYNTHETIC).most_checkpoints == 2


def test_what_was_given_is_known_of_every_option_that_always_hangs_on_another():
    hanging = [option for option in options_of(TrainConfig).values() if any(not need.of for need in option.needs)]
    assert len(hanging) > 20
    assert all(option.default is None or option.default is False or option.default == () for option in hanging)
    others = {name for option in options_of(TrainConfig).values() for need in option.needs for name in need.others}
    assert others <= set(options_of(TrainConfig))


def test_options_of_adapters_in_a_file_mean_adapters():
    text = "model: preset:demo\ndata_source: synthetic\nlora_rank: 16\n"
    assert TrainConfig.from_yaml(text).mode == "lora"
    with pytest.raises(ValueError, match="--lora-rank 16 is for adapters, got --mode full"):
        TrainConfig.from_yaml(f"{text}mode: full\n")


def test_a_run_without_data_tries_the_model_on_the_bundled_set():
    config = TrainConfig(model="org/name").with_data()
    assert (config.dataset, config.steps) == ((str(BUNDLED_DATA),), TRIAL_STEPS)
    assert TrainConfig(model="org/name", epochs=2.0).with_data().steps is None


def test_presets_say_that_their_weights_are_random():
    assert (TrainConfig(model="preset:demo").init, TrainConfig(model="org/name").init) == ("random", "checkpoint")


def test_dry_run_needs_no_data():
    assert TrainConfig(model="preset:llama-3.1-8b", dry_run=True).with_data().dataset == ()


def test_names_of_other_systems_are_understood_in_python():
    config = TrainConfig(model="preset:demo", learning_rate=1e-3, num_train_epochs=2.0, bf16=True, optim="adamw_8bit")
    assert (config.lr, config.epochs, config.dtype) == (1e-3, 2.0, "bfloat16")
    assert config.optimizer_state_dtype == "int8"
    with pytest.raises(TypeError, match=r"zero_stage is not an option: memory is planned here; give max_gpu_mem_gib"):
        TrainConfig(model="preset:demo", zero_stage=3)
    with pytest.raises(TypeError, match=r"lr is given twice, once by another name"):
        TrainConfig(model="preset:demo", lr=1e-3, learning_rate=1e-4)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'max_seq_len_'; did you mean max_seq_len\?"):
        TrainConfig(model="preset:demo", max_seq_len_=1)


@pytest.mark.parametrize(
    ("changes", "folder"),
    [
        ({"model": "preset:llama-3.1-8b"}, "runs/llama-3.1-8b-full"),
        ({"model": "/models/Llama-3.2-1B/", "mode": "lora"}, "runs/Llama-3.2-1B-lora"),
        ({"model": "runs/demo/final"}, "runs/demo-final-full"),
        ({"model": "org/name@v1", "mode": "lora"}, "runs/name-lora"),
        ({"output_dir": "elsewhere"}, "elsewhere"),
    ],
)
def test_run_folder(changes, folder):
    assert str(TrainConfig(**{**SYNTHETIC, **changes}).run_folder) == folder


def test_stands_alone():
    """Option errors and --help come without loading torch."""
    code = "import sys, flexengine.options.train_config, flexengine.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
