"""Adapters of linear layers inside opaque blocks: against PEFT, files both ways, over a base in few bits, refusals."""

from dataclasses import replace

import pytest
from engine_helpers import (
    FLOAT32,
    ON_GPU,
    build_engine,
    make_plan,
    random_batch,
    random_weights,
    same_bits,
    saved_model,
    streamed_plan,
)
from family_checks import MAX_SEQ_LEN
from opaque_configs import RANDOM, config_of, folder_with
from peft_helpers import SETTINGS, check_files, engine_on, peft_model, train_both

from flexengine import LoRA, from_pretrained
from flexengine.models.base_dtype import with_base_dtype
from flexengine.models.lora import with_lora
from flexengine.optim import AdamW

LARGE_EPS = replace(SETTINGS, eps=3e-4)


@pytest.mark.parametrize(
    ("kind", "lora"),
    [
        ("gpt_neox", LoRA(rank=3, alpha=5.0, use_rslora=True, modules_to_save=["input_layernorm"])),
        ("mamba2", LoRA(["in_proj"], rank=3, alpha=5.0)),  # PEFT takes no out_proj of it
        ("cohere2_moe", LoRA(["q_proj", "o_proj"], rank=3)),  # experts stay as they are
        ("openai-gpt", LoRA(rank=3, alpha=5.0)),  # weights input by output
    ],
)
def test_loss_gradients_steps_and_files(kind, lora, tmp_path):
    saved_model(tmp_path / "base", config_of(kind))
    saved = list(lora.modules_to_save) or None
    model = peft_model(tmp_path, lora, use_rslora=lora.use_rslora, modules_to_save=saved)
    with engine_on(tmp_path, lora, LARGE_EPS, adapter=tmp_path / "adapter") as engine:
        check_files(engine, train_both(engine, model, settings=LARGE_EPS), tmp_path)


@pytest.mark.parametrize(("kind", "base"), [("gpt_neox", "nf4"), ("lfm2", "compute")])
def test_plans_give_the_same_bits(kind, base):
    source = random_weights(config_of(kind))
    source = source._replace(spec=with_base_dtype(with_lora(source.spec, LoRA(rank=4)), base))
    sizes = {"chunk_tokens": MAX_SEQ_LEN, "chunks_per_round": 2, "numerics": replace(FLOAT32, base=base)}
    found = []
    for plan in (
        streamed_plan(source.spec, **sizes),
        make_plan(source.spec, groups=[ON_GPU] * len(source.spec.groups), **sizes),
    ):
        with build_engine(source, plan, AdamW(lr=1e-2), seed=3) as engine:
            losses = [engine.train_step(random_batch(step, [48, 7, 31], 67))[0].loss for step in range(3)]
            found.append((losses, engine.state_dict()))
    (losses, state), (others, other) = found
    assert losses == others
    assert losses[2] != losses[0]
    same_bits(other, state)


def test_a_run_goes_on_from_its_adapter(tmp_path):
    folder = folder_with(config_of("gpt_neox"), tmp_path)
    with from_pretrained(folder, lora=LoRA(rank=2), base_dtype="nf4", **RANDOM) as engine:
        engine.train_step([[1, 2, 3, 4, 5], [6, 7]])
        engine.save_checkpoint(tmp_path / "state")
        wanted = engine.train_step([[5, 4, 3, 2]])[0].loss
        assert engine.memory_peaks().gpu_bytes <= engine.layout.plan.predicted.gpu_bytes
    with from_pretrained(folder, lora=LoRA(rank=2), base_dtype="nf4", **RANDOM) as engine:
        engine.load_checkpoint(tmp_path / "state")
        assert engine.train_step([[5, 4, 3, 2]])[0].loss == wanted


@pytest.mark.parametrize(
    ("kind", "lora", "message"),
    [
        ("gpt_neox", LoRA(use_dora=True), "use_dora=True with adapters of opaque blocks .* is not built"),
        ("gpt_neox", LoRA(dropout=0.5), "dropout=0.5 with adapters of opaque blocks"),
        ("cohere2_moe", LoRA(["all-experts"]), "all-experts.*no linear layer.*q_proj"),
        (
            "gpt_neox",
            LoRA(["attention.dense"], modules_to_save=["mlp.dense_h_to_4h"]),
            "dense_h_to_4h, a linear layer of a block",
        ),
    ],
)
def test_adapters_that_opaque_blocks_do_not_take_are_refused(kind, lora, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        from_pretrained(folder_with(config_of(kind), tmp_path), lora=lora, **RANDOM)
