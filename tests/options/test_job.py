"""One option is one line: every face of a job shows the same names, types, defaults and checks."""

import argparse
import inspect
from dataclasses import dataclass, fields
from typing import Annotated, Literal, get_type_hints

import pytest
import torch

from flexengine import from_pretrained
from flexengine.api import EngineArguments, PrepareArguments, build, prepare
from flexengine.cli import build_parser
from flexengine.commands.plan_flags import parse
from flexengine.models.group_factors import group_factors
from flexengine.optim import SGD, Lion, Optimizer
from flexengine.options.flags import add_flag, from_flags
from flexengine.options.job import Job, OptimizerName
from flexengine.options.keywords import takes
from flexengine.options.lora import LoRA
from flexengine.options.option import Option, options_of
from flexengine.options.train_config import TrainConfig
from flexengine.options.yaml_options import read_yaml
from flexengine.plan import Numerics
from flexengine.request import budget_gib

GIB = 2**30
SMALL = {"hardware": "cpu-test", "device": "cpu", "max_seq_len": 32, "max_global_batch_tokens": 64}


@dataclass(frozen=True, kw_only=True)
class JobWithRank(Job):
    """A job with one more option."""

    rank: Annotated[int, Option("rank of the adapters that --mode trains", above=0, most=512)] = 8


def test_every_field_of_a_job_is_an_option():
    assert set(options_of(Job)) == {field.name for field in fields(Job)}
    for name, option in options_of(Job).items():
        settled = {"mode": "full"}.get(name, option.default)
        assert (option.name, settled) == (name, getattr(Job(), name))
        assert option.help


@pytest.mark.parametrize(
    ("function", "arguments"), [(from_pretrained, EngineArguments), (prepare, PrepareArguments)], ids=["engine", "plan"]
)
def test_python_shows_every_option_with_its_default(function, arguments):
    shown = inspect.signature(function).parameters
    for name, option in options_of(Job).items():
        assert shown[name].default == option.default
        if (function, name) != (from_pretrained, "optimizer"):  # its second argument
            assert shown[name].kind == inspect.Parameter.KEYWORD_ONLY
        assert f"    {name}: " in function.__doc__
    assert list(shown) == list(inspect.signature(arguments).parameters)
    assert shown["max_seq_len"].annotation is int
    assert next(iter(shown)) == "path_or_preset"
    assert "--" not in function.__doc__


def test_python_types_are_those_of_the_declaration():
    hints = get_type_hints(Job)
    shown = inspect.signature(from_pretrained)
    found = {name: shown.parameters[name].annotation for name in options_of(Job)}
    assert found.pop("optimizer") == Optimizer | OptimizerName  # settings, or a name as in a job
    assert shown.parameters["optimizer"].kind == inspect.Parameter.POSITIONAL_OR_KEYWORD
    assert found == {name: hints[name] for name in options_of(Job) if name != "optimizer"}
    assert inspect.signature(prepare).parameters["optimizer"].annotation == OptimizerName


@pytest.mark.parametrize("optimizer", [Lion(lr=1e-3), "lion"], ids=["settings", "name"])
def test_python_takes_an_optimizers_settings_or_its_name(optimizer):
    job = EngineArguments(path_or_preset="preset:demo", optimizer=optimizer).as_job()
    assert job.optimizer == "lion"
    assert job.numerics.optimizer == "lion"


@pytest.mark.parametrize(
    "options",
    [{"lora_rank": 16}, {"lora_targets": "all-linear"}, {"lora_init": "default"}, {"lora": LoRA(rank=16)}],
    ids=str,
)
def test_in_python_options_of_adapters_mean_adapters(options):
    planned = prepare("preset:demo", **options, **SMALL)
    assert planned.job.lora_setup == LoRA()
    assert any(group.name.startswith("adapter") for group in planned.source.spec.groups)
    assert PrepareArguments("preset:demo", use_dora=False).mode == "full"
    with pytest.raises(ValueError, match=r"mode='full' contradicts lora=|is for adapters, got mode=full"):
        prepare("preset:demo", mode="full", **options, **SMALL)


def test_adapters_as_a_value_and_as_an_option_must_agree():
    with pytest.raises(ValueError, match="lora_rank=8 contradicts lora=, which says 16; give one of them"):
        prepare("preset:demo", lora=LoRA(rank=16), lora_rank=8, **SMALL)


@pytest.mark.parametrize("transport", ["relay", "split", "stages", "context"])
def test_a_transport_needs_several_gpus(transport):
    with pytest.raises(ValueError, match=f"transport={transport} is about several GPUs, and there is one"):
        prepare("preset:demo", transport=transport, **SMALL)


def test_an_engine_gets_the_optimizer_that_it_was_planned_for():
    planned = prepare("preset:demo", optimizer="lion", **SMALL)
    with pytest.raises(ValueError, match=r"plan was made for optimizer='lion'.*give prepare optimizer='sgd'"):
        build(planned, SGD())


def test_states_in_8_bits_are_for_adamw():
    assert Job(optimizer_state_dtype="int8").numerics.state == "int8"
    with pytest.raises(
        ValueError, match="optimizer_state_dtype=int8 is for adamw and muon, got optimizer=sgd; give optimizer=adamw"
    ):
        Job(optimizer="sgd", optimizer_state_dtype="int8")


def test_train_and_plan_have_a_flag_for_every_option():
    trained = {action.dest for action in build_parser("train", {})._actions}
    assert set(options_of(TrainConfig)) <= trained
    planned, job, _ = parse(["--model", "preset:demo"])
    assert {name for name, option in options_of(Job).items() if option.decides_plan} <= set(vars(planned))
    assert job.as_job() == Job()


def test_one_line_adds_an_option_to_every_face():
    option = options_of(JobWithRank)["rank"]
    parser = argparse.ArgumentParser(argument_default=argparse.SUPPRESS)
    add_flag(parser, option, option.default)
    assert "rank of the adapters that --mode trains (default: 8)" in " ".join(parser.format_help().split())
    given = from_flags(options_of(JobWithRank).values(), vars(parser.parse_args(["--rank", "16"])))
    assert JobWithRank(**given).rank == 16
    assert read_yaml("rank: 4", "f", options_of(JobWithRank)) == {"rank": 4}
    with pytest.raises(ValueError, match="--rank is at most 512, got 513"):
        from_flags([option], {"rank": 513})
    with pytest.raises(ValueError, match="rank must be positive, got 0"):
        JobWithRank(rank=0)

    @takes(JobWithRank)
    def rank_of(job: JobWithRank) -> int:
        """Return the rank."""
        return job.rank

    assert (rank_of(), rank_of(rank=2)) == (8, 2)
    assert inspect.signature(rank_of).parameters["rank"].default == 8
    assert "rank: rank of the adapters that mode trains" in (rank_of.__doc__ or "")


def test_names_and_values_of_others_in_python():
    @takes(PrepareArguments)
    def seen(arguments: PrepareArguments) -> PrepareArguments:
        return arguments

    others: dict = {"max_seq_length": 64, "compute_dtype": torch.float32, "use_muon": True, "master_dtype": "fp32"}
    found = seen("m", **others)
    assert (found.max_seq_len, found.dtype, found.optimizer, found.master_dtype) == (64, "float32", "muon", "float32")
    assert seen("m", max_gpu_mem_bytes=2**30).max_gpu_mem_gib == 1.0
    with pytest.raises(TypeError, match=r"seen\(\): batch_size is not an option: .* give max_global_batch_tokens"):
        seen("m", batch_size=8)  # pyright: ignore
    assert seen("m", dtype=torch.float16).numerics.master == "beside"  # pyright: ignore


def test_a_misspelt_keyword_is_guessed():
    says = r"from_pretrained\(\) got an unexpected .*'max_seq'; did you mean max_seq_len\?"
    with pytest.raises(TypeError, match=says):
        from_pretrained("preset:demo", max_seq=32)  # pyright: ignore
    with pytest.raises(TypeError, match=r"prepare\(\) missing a required argument: 'path_or_preset'"):
        prepare()  # pyright: ignore


# ---- values -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_bytes", [1, 2**20 + 1, 24 * GIB - 1, 2**50 - 3])
def test_bytes_and_gib_are_one_budget_in_two_units(num_bytes):
    gib = budget_gib("gpu", None, num_bytes)
    assert gib is not None
    assert int(gib * GIB) == num_bytes
    assert budget_gib("gpu", gib, None) == gib


def test_a_budget_in_bytes_is_kept_to_the_byte():
    planned = prepare("preset:demo", max_gpu_mem_bytes=2**28 + 1, max_host_mem_gib=2, **SMALL)
    assert planned.plan.request.max_gpu_bytes == 2**28 + 1
    assert planned.job.max_gpu_mem_gib == (2**28 + 1) / GIB


@pytest.mark.parametrize(
    ("options", "numerics"),
    [
        ({}, Numerics("bfloat16", "split", "bfloat16", "float32", "compute")),
        ({"master_dtype": "bfloat16", "grad_dtype": "float32"}, Numerics("bfloat16", "stochastic", "float32")),
        ({"dtype": "float32", "optimizer_state_dtype": "bfloat16"}, Numerics("float32", "full", "float32", "bfloat16")),
        ({"dtype": "float64"}, Numerics("float64", "full", "float64", "float64")),
        ({"matmul_dtype": "fp8"}, Numerics(matmul="fp8")),
    ],
    ids=str,
)
def test_dtypes_of_a_plan(options, numerics):
    assert Job(**options).numerics == numerics


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seq_len": 64.5}, "max_seq_len must be of type int, got 64.5"),
        ({"max_seq_len": 2**24 + 1, "max_global_batch_tokens": 2**28}, "max_seq_len must be at most 16777216"),
        ({"deterministic": 1}, "deterministic must be of type bool, got 1"),
        ({"seed": True}, "seed must be of type int, got True"),
        ({"freeze": (1,)}, r"freeze must be a list of names, got \(1,\)"),
        ({"max_grad_norm": -1.0}, "max_grad_norm must be positive, or None for no clipping, got -1.0"),
        ({"dtype": "float32", "grad_dtype": "float64"}, "grad_dtype=float64 needs dtype=float64, got dtype=float32"),
        (
            {"max_seq_len": 64, "max_global_batch_tokens": 32},
            "max_seq_len=64 tokens exceeds max_global_batch_tok",
        ),
    ],
)
def test_python_is_answered_in_keywords(options, message):
    with pytest.raises(ValueError, match=message):
        Job(**options)


@pytest.mark.parametrize(
    ("sequences", "options", "grad"),
    [
        (64, {"round_tokens": 64}, "bfloat16"),
        (65, {"round_tokens": 64}, "float32"),
        (65, {"round_tokens": 128}, "bfloat16"),
        (65, {"round_tokens": 96}, "float32"),  # a chunk of 96 tokens takes one sequence
        (65, {"round_tokens": 96, "chunk_tokens": 32}, "float32"),  # a round takes one in two slices
        (65, {"round_tokens": 64, "grad_dtype": "bfloat16"}, "bfloat16"),
        (65, {"round_tokens": 64, "max_gpu_mem_gib": 0.01}, "float32"),
        (65, {"round_tokens": 64, "dtype": "float64"}, "float64"),
        (2**16, {}, "bfloat16"),  # the planner makes at most 64 rounds
    ],
    ids=str,
)
def test_gradients_of_many_pinned_rounds_are_stored_in_float32(sequences, options, grad):
    assert Job(max_seq_len=64, max_global_batch_tokens=64 * sequences, **options).numerics.grad == grad


def test_names_of_frozen_layers_in_any_form():
    for given in ("embed", ["embed"], ("embed",)):
        assert prepare("preset:demo", freeze=given, **SMALL).job.freeze == ("embed",)


def test_zero_stands_for_no_clipping_in_flags_and_yaml_alone():
    config = TrainConfig(model="preset:demo", data_source="synthetic", max_grad_norm=0)
    assert config.as_job() == Job(max_grad_norm=None, init="random")
    assert "max_grad_norm: 0.0\n" in config.to_yaml()
    assert TrainConfig.from_yaml(config.to_yaml()) == config
    with pytest.raises(ValueError, match="--max-grad-norm must not be negative, got -1"):
        TrainConfig(model="preset:demo", data_source="synthetic", max_grad_norm=-1)


def test_build_changes_what_the_plan_does_not_know():
    planned = prepare("preset:demo", seed=3, max_grad_norm=None, dtype="float32", **SMALL)
    engine = build(planned, deterministic=True)
    assert (engine.max_grad_norm, engine.settings.seed, engine.settings.deterministic) == (None, 3, True)
    engine.close()
    with pytest.raises(ValueError, match="max_seq_len=16 decides the plan, which is made; give it to prepare"):
        build(planned, max_seq_len=16)


def test_choices_of_words_and_of_dtypes():
    option = Option("a", name="kind", kind=Literal["a", "b", "c"])
    with pytest.raises(ValueError, match="kind='d'; choose a, b or c"):
        option.check("d", Job.words)


def test_factors_of_groups_are_read_and_checked():
    planned = prepare("preset:demo", lr_groups=["blocks=0.5", "block.0=2"], weight_decay_groups="embed=0", **SMALL)
    with build(planned) as engine:
        blocks = len(planned.source.spec.blocks)
        assert engine.settings.lr_factors == (
            1.0,
            2.0,
            *(0.5,) * (blocks - 1),
            *engine.settings.lr_factors[blocks + 1 :],
        )
        assert engine.settings.decay_factors[:2] == (0.0, 1.0)
    planned = prepare("preset:demo", mode="lora", lr_groups=["adapter.*=2", "block.[01]=0.5"], **SMALL)
    factors = group_factors(planned.source.spec, "lr_groups", planned.job.lr_groups)
    expected = {"adapter.0": 2.0, "adapter.2": 2.0, "block.0": 0.5, "block.1": 0.5, "block.2": 1.0, "embed": 1.0}
    found = dict(zip((group.name for group in planned.source.spec.groups), factors, strict=True))
    assert {name: found[name] for name in expected} == expected
    for wrong, message in (("embed", "write NAME=FACTOR"), ("embed=-1", "at least 0"), ("hed=1", "no such parameters")):
        with pytest.raises(ValueError, match=f"lr_groups=.*{message}"):
            prepare("preset:demo", lr_groups=wrong, **SMALL)
