"""Adapter folders as PEFT and others write them, in float32 on the CPU: read as PEFT reads them."""

import pytest
import torch
import transformers
from engine_helpers import build_engine, random_batch, relative_error, saved_model, streamed_plan, tiny_config
from family_checks import MAX_SEQ_LEN, last_logits
from family_configs import CASES, FAMILY_CASES
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file

from flexengine.checkpoint.adapter_config import ADAPTER_WEIGHTS
from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.options.job import Job
from flexengine.request import with_read_adapter

UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|mlp).*?(?:k_proj|v_proj|q_proj|down_proj).*?)|"
    r"(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|attention|mlp)\.(?:(?:k_proj|v_proj|q_proj|down_proj)))"
)


def renamed(name):
    """Names as the states of a model with an adapter of this name have them."""

    def rename(folder):
        path = folder / ADAPTER_WEIGHTS
        tensors = load_file(path)
        for part in ("lora_A", "lora_B"):
            tensors = {key.replace(f".{part}.", f".{part}.{name}."): tensor for key, tensor in tensors.items()}
        vector = "lora_magnitude_vector"
        save_file({k.replace(vector, f"{vector}.{name}.weight"): v for k, v in tensors.items()}, path)

    return rename


def rounded(folder):
    path = folder / ADAPTER_WEIGHTS
    save_file({name: tensor.half() for name, tensor in load_file(path).items()}, path, metadata={})


def check_read_as_peft_reads(config, folder, changed=None, save=None, **options):
    base = saved_model(folder / "base", config)
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=8, task_type="CAUSAL_LM", **options))
    for name, parameter in model.named_parameters():
        if ".lora_B." in name or ".modules_to_save." in name:
            torch.nn.init.normal_(parameter, 0.0, 0.2)
    model.save_pretrained(folder / "adapter", **(save or {}))
    if changed is not None:
        changed(folder / "adapter")
    lora = with_read_adapter(Job(adapter=str(folder / "adapter"))).lora_setup
    source = open_model(folder / "base")
    source = source._replace(spec=with_lora(source.spec, lora))
    tokens = random_batch(2, [21], source.spec.vocab_size)[0]
    with build_engine(
        source, streamed_plan(source.spec, chunk_tokens=MAX_SEQ_LEN), adapter=folder / "adapter"
    ) as engine:
        logits = engine.next_token_logits(tokens)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base", attn_implementation="eager")
    named_default = PeftModel.from_pretrained(base, folder / "adapter") if changed is None else model.eval()
    assert relative_error(logits, last_logits(named_default, tokens)) <= (1e-3 if changed is rounded else 1e-5)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": UNSLOTH},
        {"target_modules": "all-linear", "exclude_modules": ["down_proj"]},
        {"target_modules": "all-linear", "exclude_modules": ["model.layers.1.mlp.up_proj", "self_attn.q_proj"]},
        {"target_modules": r".*\.(q_proj|down_proj)", "exclude_modules": r".*layers\.1\..*"},
        {"target_modules": ["q_proj", "up_proj"], "exclude_modules": r".*0\.(self_attn|mlp).*"},
        {"target_modules": ["model.layers.0.self_attn.q_proj", "mlp.up_proj"]},
        {"target_modules": ["q_proj", "lm_head"], "modules_to_save": ["lm_head"]},
        {"target_modules": ["q_proj"], "changed": renamed("default")},
        {"target_modules": ["v_proj", "o_proj"], "use_dora": True, "changed": renamed("of_the_run")},
        {"target_modules": ["q_proj"], "changed": rounded},
        {"target_modules": ["q_proj"], "save": {"save_embedding_layers": True}},
        {"target_modules": ["q_proj"], "save": {"save_embedding_layers": True}, "modules_to_save": ["embed_tokens"]},
    ],
    ids=lambda value: (
        str({k: getattr(v, "__name__", v) for k, v in value.items()}) if isinstance(value, dict) else None
    ),
)
def test_of_llama(options, tmp_path):
    check_read_as_peft_reads(tiny_config(), tmp_path, **options)


@pytest.mark.parametrize(("family", "modules"), [("qwen2", ["v_proj"]), ("gpt2", ["c_fc"]), ("gemma3", ["o_proj"])])
def test_embedding_saved_beside(family, modules, tmp_path):
    """Also where it is the head, too, and in the dtype that it was loaded in."""
    config = CASES[FAMILY_CASES[family]]
    check_read_as_peft_reads(config, tmp_path, target_modules=modules, save={"save_embedding_layers": True})
