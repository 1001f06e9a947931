"""One result for two people: sizes by the rule, their bits within any budget, their cost, and the digest of bits."""

import hashlib
import random
from dataclasses import replace

import pytest
import yaml

from flexengine import cli, from_pretrained
from flexengine.api import prepare
from flexengine.hardware.nodes import with_gpus
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.registry import open_model
from flexengine.options.job import Job
from flexengine.options.train_config import TrainConfig
from flexengine.plan import MOST_ROUNDED, Numerics, Plan, PlanError, Request
from flexengine.planner.feasibility.remedies import Least, Try, remedies
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.planner.reproducible import sizes_of_rule
from flexengine.reports.bits import bits_digest, bits_line
from flexengine.reports.plan_text import describe
from flexengine.request import described
from tests.engine_helpers import random_batch
from tests.failures.provoke import write_model

MIB = 2**20
SIZES = {"max_seq_len": 64, "max_global_batch_tokens": 1024}
CPU = {**SIZES, "device": "cpu", "hardware": "cpu-test", "dtype": "float32"}
LARGE = Request(2048, 131072, 24 * GIB, 128 * GIB)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("source") / "model", hidden_size=64, intermediate_size=128)


def trained(folder, budget_mib, **options) -> tuple[tuple[int, int], str]:
    """Chunk and round sizes of an engine, and the SHA-256 of what it has trained in two steps."""
    with from_pretrained(folder, max_gpu_mem_bytes=int(budget_mib * MIB), **{**CPU, **options}) as engine:
        for step in range(2):
            engine.train_step(random_batch(step, [64, 30, 50, *[64] * 12], 61))
        digest = hashlib.sha256()
        for _, tensor in sorted(engine.state_dict().items()):
            digest.update(tensor.contiguous().view(-1).numpy().tobytes())
        return (engine.plan.chunk_tokens, engine.plan.round_tokens), digest.hexdigest()


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "lora", "lora_dropout": 0.1}, pytest.param({"optimizer": "muon"}, marks=pytest.mark.thorough)],
    ids=["full", "lora", "muon"],
)
def test_any_budget_gives_the_same_model(folder, options):
    """Free sizes differ within the smallest and the largest of these budgets, and so do their bits."""
    budgets = (3.2, 5, 32)
    found = {trained(folder, mib, reproducible=True, **options) for mib in budgets}
    assert [sizes for sizes, _ in found] == [(512, 1024)]
    if not options:
        free = {trained(folder, mib) for mib in budgets}
        assert len({digest for _, digest in free}) == len({sizes for sizes, _ in free}) == 3


@pytest.mark.parametrize("seed", range(40))
def test_the_rule_makes_few_even_rounds_that_hold_a_sequence(seed):
    rng = random.Random(seed)
    longest = int(2 ** rng.uniform(2, 17))
    request = Request(longest, longest * int(2 ** rng.uniform(0, 10)), 1, 1)
    chunk, chunks = sizes_of_rule(open_model("preset:demo").spec, request)
    plan = Plan("any", request, chunk, chunks, (), ())
    assert chunk <= 4096
    assert plan.num_rounds <= MOST_ROUNDED
    slices = -(-longest // chunk)
    unit_tokens = longest if slices > 1 else chunk // longest * longest
    assert chunks % slices == 0
    if chunks > slices:  # no round has more room than all of them need, nor is it longer than asked for
        assert replace(plan, chunks_per_round=chunks - slices).num_rounds > plan.num_rounds
        assert chunks // slices * unit_tokens <= max(16384, request.max_global_batch_tokens / 32)


@pytest.mark.parametrize(
    ("name", "options", "sizes"),
    [
        ("llama-3.1-8b", {}, (4096, 4)),
        ("llama-3.1-8b", {"mode": "lora", "base_dtype": "nf4"}, (4096, 4)),
        ("qwen3-30b-a3b", {}, (4096, 32)),  # of 30 G parameters 3 G serve a token
        ("qwen3-30b-a3b", {"mode": "lora", "base_dtype": "nf4"}, (4096, 8)),
        ("mixtral-8x7b", {}, (4096, 8)),
    ],
)
def test_rounds_are_as_long_as_weights_take_to_come(name, options, sizes):
    job = Job(**options)
    model = described(open_model(f"preset:{name}").spec, job)
    assert sizes_of_rule(model, replace(LARGE, numerics=job.numerics)) == sizes


def test_a_plan_says_what_the_rule_costs_and_from_which_budget_it_fits():
    model, profile = open_model("preset:demo").spec, preset("cpu-test")
    request = Request(256, 1 << 15, GIB, 4 * GIB, numerics=Numerics("float32", "full", "float32"), reproducible=True)
    plan, free = (plan_for_ranks(model, replace(request, reproducible=rule), profile) for rule in (True, False))
    assert (plan.chunk_tokens, plan.round_tokens) == (4096, 16384)
    assert plan.predicted.free_step_s == free.predicted.step_s < plan.predicted.step_s
    least = plan.predicted.least_gpu_bytes
    assert plan_for_ranks(model, replace(request, max_gpu_bytes=least), profile).round_tokens == 16384
    with pytest.raises(PlanError, match="INSUFFICIENT_DEVICE_MEMORY"):
        plan_for_ranks(model, replace(request, max_gpu_bytes=least // 2), profile)
    assert "reproducible: sizes by the rule cost +" in describe(plan, model)
    assert "reproducible" not in describe(free, model).replace("--reproducible", "")
    assert Plan.from_json(plan.to_json()) == plan


def test_remedies_of_the_rule_keep_both_sizes_or_name_both():
    pinned = replace(LARGE, chunk_tokens=4096, round_tokens=16384, reproducible=True)
    least, judge = Least(30 * GIB, None), Try(lambda _: True, lambda _: Least(30 * GIB, 30 * GIB))
    found = [remedy.flags for remedy in remedies(pinned, least, judge)]
    assert "--chunk-tokens 2048 --round-tokens 16384" in found
    assert not [flags for flags in found if flags.startswith(("--max-seq-len", "--max-global-batch", "--round"))]


# ---- options ----------------------------------------------------------------------------------------------------


def test_the_option_in_flags_yaml_and_python(folder):
    assert Job(reproducible=True).deterministic
    config = TrainConfig(model="preset:demo", data_source="synthetic", reproducible=True)
    assert TrainConfig.from_yaml(yaml.safe_dump({**yaml.safe_load(config.to_yaml())})) == config
    assert config.deterministic
    with pytest.raises(ValueError, match="chunk_tokens=512 is one of two sizes that reproducible chooses; give both"):
        Job(reproducible=True, chunk_tokens=512)
    planned = prepare(folder, **CPU, chunk_tokens=128, round_tokens=256, reproducible=True)  # as a checkpoint pins them
    assert (planned.plan.chunk_tokens, planned.plan.round_tokens) == (128, 256)


def test_kernels_do_not_depend_on_what_a_probe_found(folder):
    profile = preset("cpu-test").changed(attention_kernels="cudnn")
    for reproducible, kernels in ((False, "cudnn"), (True, "flash")):
        with from_pretrained(folder, **{**CPU, "hardware": profile}, reproducible=reproducible) as engine:
            assert engine.settings.attention == kernels
            assert engine.settings.deterministic is reproducible


# ---- the digest -------------------------------------------------------------------------------------------------


def told(gpu: str, ranks: int = 1, reproducible: bool = True, **changes) -> str:
    """What a plan tells of its bits."""
    model, numerics = open_model("preset:demo").spec, Numerics()
    request = Request(
        256,
        2048,
        GIB,
        8 * GIB,
        numerics=numerics,
        clipping=False,
        ranks=ranks,
        reproducible=reproducible,
        graphs="never",
    )
    return bits_line(model, plan_for_ranks(model, replace(request, **changes), with_gpus(preset(gpu), ranks)))


def test_plans_of_one_result_tell_one_digest():
    one = told("rtx4090")
    assert one.endswith("the same within any budget, and on any number of GPUs with --round-multiple 1")
    assert told("h200", max_gpu_bytes=2 * GIB, recompute="full") == one
    several = told("h100", ranks=2)
    assert several.endswith("--round-multiple 2")
    assert told("rtx3090", round_multiple=2) == several
    assert several.split()[1] != one.split()[1]
    free = told("rtx4090", reproducible=False)
    assert free.endswith("another budget may have others, unless --reproducible chooses the sizes")


def test_the_command_tells_bits_and_cost(capsys):
    flags = ["--gpu", "rtx4090", "--max-seq-len", "256", "--max-global-batch-tokens", "8192", "--reproducible"]
    assert cli.main(["plan", "--model", "preset:demo", *flags]) == 0
    out = capsys.readouterr().out
    assert "\nreproducible: sizes by the rule cost " in out
    assert out.count("\nbits: ") == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"lora_rank": 8}, {"lora_alpha": 8.0}, {"lora_dropout": 0.1}, {"use_dora": True}, {"base_dtype": "nf4"},
        {"lora_targets": ("q_proj",)}, {"max_grad_norm": None}, {"matmul_dtype": "fp8"},
    ],
    ids=str,
)  # fmt: skip
def test_what_sets_bits_is_in_the_digest(changed):
    digests = []
    for options in ({}, changed):
        job = Job(mode="lora", **options)
        request = replace(LARGE, numerics=job.numerics, clipping=job.max_grad_norm is not None)
        model = described(open_model("preset:tiny-llama3-50m").spec, job)
        digests.append(bits_digest(model, Plan("any", request, 4096, 4, (), ())))
    assert digests[0] != digests[1]


def test_names_and_folders_are_not_in_the_digest():
    model = open_model("preset:tiny-llama3-50m").spec
    plan = Plan("any", LARGE, 4096, 4, (), ())
    other = replace(model, name="other", hf_config={**model.hf_config, "transformers_version": "9"}, notice="read this")
    assert bits_digest(other, replace(plan, model="other")) == bits_digest(model, plan)
    for sizes in ({"chunk_tokens": 2048}, {"chunks_per_round": 2}, {"request": replace(LARGE, round_multiple=3)}):
        assert bits_digest(model, replace(plan, **sizes)) != bits_digest(model, plan)


@pytest.mark.parametrize(("stored", "nodes", "count"), [("float32", 2, 3), ("bfloat16", 2, 2), ("float32", 1, 1)])
def test_what_nodes_send_is_in_the_digest_where_it_rounds(stored, nodes, count):
    model = open_model("preset:tiny-llama3-50m").spec
    request = replace(LARGE, nodes=nodes, numerics=replace(LARGE.numerics, grad=stored))
    digests = {
        bits_digest(model, Plan("any", replace(request, exchange=exchange), 4096, 4, (), ()))
        for exchange in (None, "bfloat16", "fp8")
    }
    assert len(digests) == count
