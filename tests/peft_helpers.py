"""Engines with adapters beside PEFT's models: they start alike, train alike, and read each other's files.

A test's folder holds the model in `base` and an adapter whose B is not zero in `adapter`.
"""

import pytest
import torch
import transformers
from engine_helpers import build_engine, relative_error, streamed_plan, worst_error
from family_checks import MAX_SEQ_LEN, draw_batch, last_logits, reference_loss
from peft import LoraConfig, PeftModel, get_peft_model

from flexengine.models.lora import adapters, with_lora
from flexengine.models.registry import open_model
from flexengine.optim import AdamW

SETTINGS = AdamW(lr=1e-3, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.1)
"""A large eps: AdamW's first steps are the signs of gradients, however small, and so of their rounding."""


def adapted_source(folder, lora):
    source = open_model(folder / "base")
    return source._replace(spec=with_lora(source.spec, lora))


def engine_on(folder, lora, settings=SETTINGS, **options):
    """An engine that streams everything, without clipping."""
    source = adapted_source(folder, lora)
    plan = streamed_plan(source.spec, chunk_tokens=MAX_SEQ_LEN, chunks_per_round=4)
    return build_engine(source, plan, settings, max_grad_norm=None, **options)


def loaded(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")


def adapted(folder, base, **settings):
    """A model with adapters of PEFT's, which are saved; where they start with zeros B is drawn."""
    torch.manual_seed(3)
    model = get_peft_model(base, LoraConfig(**settings))
    for name, parameter in model.named_parameters():
        if settings.get("init_lora_weights", True) is True and ".lora_B." in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder / "adapter")
    return model


def peft_model(folder, lora, **settings):
    """The same of the saved model, on the modules that `lora` has."""
    settings["target_modules"] = [adapter.module.name for adapter in adapters(adapted_source(folder, lora).spec)]
    return adapted(folder, loaded(folder / "base"), r=lora.rank, lora_alpha=lora.alpha, **settings)


def by_name(tensors):
    """PEFT's tensors by the names that files and engines have for them."""
    found = {}
    for name, tensor in tensors.items():
        if ".modules_to_save.default." in name:
            found[name.replace(".modules_to_save.default", "").removeprefix("base_model.model.")] = tensor
        else:
            found[name.replace(".default.", ".").replace("vector.weight", "vector")] = tensor
    return found


def train_both(engine, model, names=by_name, settings=SETTINGS):
    """Loss, gradients and what is trained are the same in two steps; vectors never decay. Returns some tokens."""
    ids, labels = draw_batch(engine.model.vocab_size)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if (p.ndim > 1) == decays], "weight_decay": decay}
        for decays, decay in ((True, settings.weight_decay), (False, 0.0))
    ]
    optimizer = torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)
    for step in range(2):
        loss = torch.as_tensor(reference_loss(model, ids, labels))
        loss.backward()
        assert engine.fwd_bwd(input_ids=ids, labels=labels).loss == pytest.approx(loss.item(), abs=1e-5)
        if step == 0:
            error, name = worst_error(engine.gradients(), names({n: p.grad for n, p in trained.items()}))
            assert error <= 1e-4, f"gradient of {name}: relative error {error:.1e}"
        optimizer.step()
        optimizer.zero_grad()
        engine.step()
    state, expected = engine.state_dict(), names({name: p.detach() for name, p in trained.items()})
    assert {name for name in state if ".lora_" in name} == {name for name in expected if ".lora_" in name}
    for name, tensor in expected.items():
        assert (state[name] - tensor).abs().max() <= 1e-5 * max(1.0, tensor.abs().max().item()), name
    return ids[0]


def check_merged(engine, tokens, folder):
    """transformers reads the merged model, and says what the engine says; returns the engine's logits."""
    logits = engine.next_token_logits(tokens)
    engine.save_pretrained(folder / "out")
    engine.save_pretrained(folder / "merged", merged=True)
    assert relative_error(logits, last_logits(loaded(folder / "merged"), tokens)) <= 1e-4
    return logits


def check_files(engine, tokens, folder):
    """The same, and PEFT reads the adapters onto the untouched base."""
    logits = check_merged(engine, tokens, folder)
    read = PeftModel.from_pretrained(loaded(folder / "base"), folder / "out")
    assert relative_error(logits, last_logits(read, tokens)) <= 1e-4
    return logits
