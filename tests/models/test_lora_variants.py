"""DoRA and ways to start adapters, in float32 on the CPU against PEFT on transformers."""

import json
from dataclasses import replace

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    ON_GPU,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    relative_error,
    same_bits,
    saved_model,
    streamed_plan,
)
from family_checks import last_logits
from family_configs import CASES, FAMILY_CASES
from peft import PeftModel
from peft_helpers import adapted_source, check_files, engine_on, peft_model, train_both

from flexengine import LoRA
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.lora import with_lora
from flexengine.models.registry import build_model
from flexengine.ops.adapters.dora import adapted_norms
from flexengine.optim import AdamW
from flexengine.options.job import Job
from flexengine.plan import Numerics
from flexengine.request import with_read_adapter


@pytest.mark.parametrize("family", ["mistral", "qwen2", "gpt2", "olmo2"])
def test_dora(family, tmp_path):
    config = CASES[FAMILY_CASES[family]]
    saved_model(tmp_path / "base", config)
    lora = LoRA(r"all-linear" if family != "mistral" else ["q_proj", "v_proj", "down_proj"], 3, 5.0, use_dora=True)
    model = peft_model(tmp_path, lora, use_dora=True)
    with engine_on(tmp_path, lora, adapter=tmp_path / "adapter") as engine:
        tokens = train_both(engine, model)
        logits = check_files(engine, tokens, tmp_path)
    assert with_read_adapter(Job(adapter=str(tmp_path / "out"))).use_dora
    with engine_on(tmp_path, lora, adapter=tmp_path / "out") as engine:
        assert relative_error(engine.next_token_logits(tokens), logits) <= 1e-5


@pytest.mark.parametrize(
    ("family", "init", "use_dora"),
    [("mistral", "pissa", False), ("gpt2", "pissa", True), ("qwen2", "orthogonal", True)],
)
def test_first_values(family, init, use_dora, tmp_path):
    config = CASES[FAMILY_CASES[family]]
    saved_model(tmp_path / "base", config)
    lora = LoRA("all-linear", 4, 6.0, use_dora=use_dora, init=init)
    model = peft_model(tmp_path, lora, use_dora=use_dora, init_lora_weights=init)
    options = {} if init == "pissa" else {"adapter": tmp_path / "adapter"}
    with engine_on(tmp_path, lora, **options) as engine:
        tokens = train_both(engine, model)
        check_files(engine, tokens, tmp_path)
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == ((8, 12.0) if init == "pissa" else (4, 6.0))
    with engine_on(tmp_path, lora) as engine:  # whatever they start from, the model is the base
        base = saved_model(tmp_path / "base", CASES[FAMILY_CASES[family]])
        assert relative_error(engine.next_token_logits(tokens), last_logits(base, tokens)) <= 1e-5


@pytest.mark.parametrize("use_dora", [False, True], ids=["", "DoRA"])
@pytest.mark.parametrize(
    "numerics",
    [
        replace(FLOAT32, base="nf4"),
        replace(FLOAT32, base="int8"),
        Numerics(),
        Numerics(master="stochastic", base="fp8"),
    ],
    ids=["nf4", "int8", "bf16", "stochastic, fp8"],
)
def test_files_of_pissa_are_for_the_untouched_model(numerics, use_dora, tmp_path):
    """Whatever the base loses that was trained beside, and whatever adapters are rounded to."""
    base = saved_model(tmp_path / "base", CASES[FAMILY_CASES["mistral"]])
    source = adapted_source(tmp_path, LoRA(rank=4, use_dora=use_dora, init="pissa_niter_4"))
    source = source._replace(spec=with_base_dtype(source.spec, numerics.base))
    with build_engine(source, streamed_plan(source.spec, numerics=numerics)) as engine:
        engine.save_pretrained(tmp_path / "out")
    tokens = random_batch(4, [20], 67)[0]
    expected = last_logits(base, tokens)
    assert relative_error(last_logits(PeftModel.from_pretrained(base, tmp_path / "out"), tokens), expected) <= 1e-5


def test_an_adapter_that_peft_started_with_pissa(tmp_path):
    """Its file says so, and PEFT takes the principal parts out of the base again when it loads it."""
    saved_model(tmp_path / "base", CASES[FAMILY_CASES["mistral"]])
    model = peft_model(tmp_path, LoRA("q_proj", 4, init="pissa"), init_lora_weights="pissa")
    lora = with_read_adapter(Job(adapter=str(tmp_path / "adapter"))).lora_setup
    assert lora is not None
    assert lora.init == "pissa"
    tokens = random_batch(4, [20], 67)[0]
    with engine_on(tmp_path, lora, adapter=tmp_path / "adapter") as engine:
        assert relative_error(engine.next_token_logits(tokens), last_logits(model.eval(), tokens)) <= 1e-5


@pytest.mark.parametrize(
    ("family", "base", "lora"),
    [
        ("qwen3", "compute", LoRA(rank=4, use_dora=True)),
        ("qwen3", "compute", LoRA(rank=4, use_dora=True, dropout=0.1)),
        ("gemma2", "nf4", LoRA(rank=4, use_dora=True, init="pissa_niter_4")),
        ("qwen3_next", "compute", LoRA(rank=4, init="orthogonal")),
    ],
)
def test_the_plan_changes_no_bit(family, base, lora):
    source = random_weights(CASES[FAMILY_CASES[family]])
    source = source._replace(spec=with_base_dtype(with_lora(source.spec, lora), base))
    sizes = {"chunk_tokens": 48, "chunks_per_round": 2, "numerics": replace(FLOAT32, base=base)}
    found = []
    for plan in (
        streamed_plan(source.spec, **sizes),
        make_plan(source.spec, groups=[ON_GPU] * len(source.spec.groups), **sizes),
    ):
        with build_engine(source, plan, AdamW(lr=1e-2), seed=3) as engine:
            losses = [engine.train_step(random_batch(step, [48, 7, 31], 67))[0].loss for step in range(3)]
            found.append((losses, {n: t for n, t in engine.state_dict().items() if ".lora_" in n}))
    (losses, state), (others, other_state) = found
    assert losses == others
    same_bits(other_state, state)
    assert losses[2] != losses[0]


def test_a_magnitude_begins_without_rounding():
    """What changes nothing multiplies by exactly 1, although bf16 cannot hold the norms."""
    torch.manual_seed(2)
    weight, down = torch.randn(40, 30).bfloat16(), torch.randn(4, 30).bfloat16()
    weight[3] = 0.0
    norms, adapted = adapted_norms(weight, down, torch.zeros(40, 4).bfloat16(), 2.0)
    assert torch.equal(norms[norms > 0] / adapted[norms > 0], torch.ones(39))
    assert relative_error(norms, weight.float().norm(dim=1)) <= 1e-6
    assert torch.isfinite(norms / adapted).all()


def test_adapters_that_cannot_be(tmp_path):
    with pytest.raises(ValueError, match="init='pisa' is not known; give default, orthogonal, pissa"):
        LoRA(init="pisa")
    with pytest.raises(ValueError, match="needs an even rank, got 3"):
        Job(mode="lora", lora_rank=3, lora_init="orthogonal")
    with pytest.raises(ValueError, match="matmul_dtype=fp8 and use_dora are not built beside each other"):
        Job(mode="lora", use_dora=True, matmul_dtype="fp8")
    with pytest.raises(ValueError, match=r"lora_init=pissa with rank 64: .*q_proj has \d+ x \d+ .*rank of at most"):
        with_lora(build_model("tiny", CASES[FAMILY_CASES["qwen3"]]), LoRA("q_proj", rank=64, init="pissa"))
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "init_lora_weights": "olora"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="init_lora_weights='olora' changes the weights beneath"):
        with_read_adapter(Job(adapter=str(tmp_path)))
