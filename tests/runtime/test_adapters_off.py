"""Adapters left out give the base model's bits, merged ones those of the exported model, and both can be undone."""

from dataclasses import replace

import pytest
import torch
from engine_helpers import (
    FLOAT32,
    build_engine,
    make_plan,
    random_batch,
    same_bits,
    saved_model,
    streamed_plan,
    tiny_config,
)
from family_configs import CASES

from flexengine import LoRA
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.plan import Numerics
from flexengine.runtime.weights.weight_store import check_checkpoint

SPLIT = Numerics("bfloat16", "split", "bfloat16", "float32")
KINDS = {
    "llama": (tiny_config(), LoRA(rank=4, init="orthogonal"), FLOAT32),
    "magnitudes": (tiny_config(attention_bias=True), LoRA(rank=4, use_dora=True), FLOAT32),
    "bfloat16": (tiny_config(), LoRA(rank=4, init="orthogonal"), SPLIT),
    "transposed": (CASES["gpt2"], LoRA(rank=4, use_dora=True), FLOAT32),
    "experts": (CASES["qwen3_moe"], LoRA(["all-linear", "all-experts", "gate"], rank=2), FLOAT32),
}
PLANS = {"resident": make_plan, "streamed": streamed_plan}
PAIRS = [("llama", "resident"), ("experts", "resident"), *((kind, "streamed") for kind in KINDS)]


def engine_on(folder, make=streamed_plan, lora=None, numerics=FLOAT32, base="model"):
    source = open_model(folder)
    spec = check_checkpoint(source.spec, source.weights_folder)
    spec = spec if lora is None else with_lora(spec, lora)
    spec = spec if base == "model" else with_base_dtype(spec, base)
    return build_engine(source._replace(spec=spec), make(spec, chunk_tokens=16, chunks_per_round=3, numerics=numerics))


def trained(folder, *args, **options):
    engine = engine_on(folder, *args, **options)
    for seed in range(3):
        engine.train_step(random_batch(seed, (9, 20), engine.model.vocab_size))
    return engine


def losses(engine, **options):
    out = engine.evaluate(random_batch(9, (13, 30, 5), engine.model.vocab_size), per_token=True, **options)
    return {"loss": torch.tensor(out.loss), **{str(i): row for i, row in enumerate(out.token_log_probs)}}


@pytest.mark.parametrize(("kind", "plan"), PAIRS)
def test_adapters_off_merged_and_back(kind, plan, tmp_path):
    config, lora, numerics = KINDS[kind]
    saved_model(tmp_path / "base", config)
    plain = engine_on(tmp_path / "base", PLANS[plan], numerics=numerics)
    engine = trained(tmp_path / "base", PLANS[plan], lora, numerics)
    own, weights, greedy = losses(engine), engine.state_dict(), engine.generate([[1, 2, 3]], 4)
    assert own["loss"] != losses(plain)["loss"]
    same_bits(losses(engine, adapters=False), losses(plain))
    same_bits(losses(engine), own)

    engine.save_pretrained(tmp_path / "merged", merged=True)
    engine.merge()
    same_bits(losses(engine), losses(engine_on(tmp_path / "merged", PLANS[plan], numerics=numerics)))
    for refused in (engine.merge, engine.state_dict, lambda: engine.train_step([[1, 2, 3]])):
        with pytest.raises(ValueError, match=r"call unmerge\(\) first"):
            refused()
    with pytest.raises(ValueError, match=r"adapters=False after merge\(\)"):
        losses(engine, adapters=False)
    engine.unmerge()
    same_bits(engine.state_dict(), weights)
    same_bits(losses(engine), own)
    assert engine.generate([[1, 2, 3]], 4) == greedy
    engine.train_step([[1, 2, 3]])


def test_what_cannot_be_switched(tmp_path):
    saved_model(tmp_path, tiny_config())
    plain, saved = engine_on(tmp_path), engine_on(tmp_path, lora=LoRA("q_proj", 2, modules_to_save="lm_head"))
    pissa = engine_on(tmp_path, lora=LoRA(rank=2, init="pissa"))
    for call, message in (
        (lambda: losses(plain, adapters=False), "adapters=False: .* has no adapters; leave it out"),
        (plain.merge, r"merge\(\): .* has no adapters"),
        (plain.unmerge, r"unmerge\(\) without merge\(\)"),
        (lambda: losses(saved, adapters=False), "adapters=False beside modules_to_save"),
        (pissa.merge, r"merge\(\): adapters with lora_init=pissa took their beginning out of the base"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
    saved.fwd_bwd([[1, 2, 3]])
    with pytest.raises(ValueError, match="between fwd_bwd and step"):
        saved.merge()
    config = tiny_config(hidden_size=64, intermediate_size=64, head_dim=16)
    saved_model(tmp_path / "wide", config)
    coded = trained(tmp_path / "wide", lora=LoRA(rank=2), base="nf4", numerics=replace(FLOAT32, base="nf4"))
    assert losses(coded, adapters=False)["loss"] != losses(coded)["loss"]
    with pytest.raises(ValueError, match="weights in fewer bytes"):
        coded.merge()
