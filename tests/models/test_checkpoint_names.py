"""Checkpoints whose names differ from the model's own: what transformers reads is read, the rest refused by name."""

import json
import shutil

import pytest
import torch
import transformers
from engine_helpers import build_engine, random_batch, same_bits, saved_model, streamed_plan, tiny_config
from family_configs import CASES, FAMILY_CASES
from safetensors.torch import load_file, save_file

from flexengine.models.lora import with_lora
from flexengine.models.registry import open_model
from flexengine.options.lora import LoRA
from flexengine.runtime.weights.weight_store import check_checkpoint

LLAMA, QWEN = tiny_config(), CASES[FAMILY_CASES["qwen3_5_text"]]
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
}  # fmt: skip


def renamed(folder, change):
    """Rename the tensors of a folder; None leaves one out."""
    tensors = {change(name): tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    tensors.pop(None, None)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def engine_on(folder, lora=None):
    source = open_model(folder)
    spec = check_checkpoint(source.spec if lora is None else with_lora(source.spec, lora), folder)
    return build_engine(source._replace(spec=spec), streamed_plan(spec))


def in_text_of_images(name):
    return name.replace("model.", "model.language_model.", 1)


def unprefixed(name):
    return name.removeprefix("model.")


READ = {
    "text of a model with images": (QWEN, in_text_of_images),
    "llama, text of a model with images": (LLAMA, in_text_of_images),
    "saved without its head's class": (LLAMA, unprefixed),
    "qwen3_5, saved without its head's class": (QWEN, unprefixed),
    "compiled": (LLAMA, lambda name: f"_orig_mod.{name}"),
    "distributed": (LLAMA, lambda name: f"module.{name}"),
    "distributed, compiled, without a prefix": (LLAMA, lambda name: f"module._orig_mod.{unprefixed(name)}"),
    "layers compiled and recomputed": (
        LLAMA, lambda name: name.replace(".mlp.", "._orig_mod.mlp._checkpoint_wrapped_module.")
    ),
    "experts in FSDP": (CASES["mixtral"], lambda name: f"_fsdp_wrapped_module.{name}"),
}  # fmt: skip


@pytest.mark.parametrize(("config", "change"), READ.values(), ids=READ.keys())
def test_other_names_are_read_and_exported_as_the_models_own(config, change, tmp_path):
    saved_model(tmp_path / "own", config)
    shutil.copytree(tmp_path / "own", tmp_path / "other")
    renamed(tmp_path / "other", change)
    own, other = load_file(tmp_path / "own" / "model.safetensors"), load_file(tmp_path / "other" / "model.safetensors")
    assert own.keys() != other.keys()
    with engine_on(tmp_path / "own") as expected, engine_on(tmp_path / "other") as engine:
        same_bits(engine.state_dict(), expected.state_dict())
        engine.save_pretrained(tmp_path / "export")
    same_bits(load_file(tmp_path / "export" / "model.safetensors"), own)


def test_adapters_are_named_by_modules(tmp_path):
    """PEFT finds modules of transformers, whatever the base's tensors are called."""
    saved_model(tmp_path / "base", LLAMA)
    renamed(tmp_path / "base", unprefixed)
    with engine_on(tmp_path / "base", LoRA(["q_proj"], 2, 4.0)) as engine:
        engine.save_pretrained(tmp_path / "adapter")
    names = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names


@pytest.mark.parametrize("head", [True, False], ids=["untied", "tied"])
def test_gemma3_with_images_in_the_names_of_version_5(head, tmp_path):
    """The export has these names too, beside those of the vision tower, and transformers reads it."""
    text = {**CASES["gemma3"], "tie_word_embeddings": not head}
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 66, "boi_token_index": 64, "eoi_token_index": 65}
    described = transformers.AutoConfig.for_model(
        "gemma3", text_config=text, vision_config=VISION, tie_word_embeddings=not head, **tokens
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(described, attn_implementation="eager")
    model.save_pretrained(tmp_path / "older")
    shutil.copytree(tmp_path / "older", tmp_path / "newer")
    parameters = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if not head:
        del parameters["lm_head.weight"]
    save_file(parameters, tmp_path / "newer" / "model.safetensors", {"format": "pt"})
    assert "model.language_model.norm.weight" in parameters
    with engine_on(tmp_path / "older") as older, engine_on(tmp_path / "newer") as newer:
        batch = random_batch(1, (20, 9), 60)
        assert newer.evaluate(batch).loss == older.evaluate(batch).loss
        newer.train_step(batch)
        newer.save_pretrained(tmp_path / "export")
        trained = newer.state_dict()
    exported = load_file(tmp_path / "export" / "model.safetensors")
    assert exported.keys() == parameters.keys()
    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "export", dtype="auto").state_dict()
    for name, tensor in trained.items():
        other = name.replace("language_model.model.", "model.language_model.").replace("language_model.lm_", "lm_")
        assert torch.equal(loaded[other], tensor), name


def classifier(name):
    return "score.weight" if name == "lm_head.weight" else name


def beneath_an_adapter(name):
    return f"base_model.model.{name.replace('q_proj.weight', 'q_proj.base_layer.weight')}"


@pytest.mark.parametrize(
    ("change", "found", "hint"),
    [
        (lambda name: f"language_model.{name}", "20 others, such as .'language_model.model.embed", ""),
        (beneath_an_adapter, "'base_model.model.lm_head.weight'", "merge the adapter into its model first"),
        (classifier, r"has 1 others, such as \['score.weight'\]", "give one that predicts tokens"),
        (lambda name: name.replace("model.", "gpt_neox."), "'gpt_neox.embed_tokens.weight'", ""),
        (lambda name: None if "layers.1" in name else name, "lacks 9 of the model's 21 tensors", ""),
    ],
    ids=["with images", "PEFT", "classifier", "another model", "incomplete"],
)
def test_a_refusal_tells_the_names_that_were_found(change, found, hint, tmp_path):
    saved_model(tmp_path, LLAMA)
    renamed(tmp_path, change)
    with pytest.raises(ValueError, match=f"{found}.*{hint}"):
        check_checkpoint(open_model(tmp_path).spec, tmp_path)


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_a_classifier_that_does_not_say_so_is_refused(task, tmp_path):
    """By the head that nothing reads; where it says what it is for, that head is the model's."""
    described = transformers.AutoConfig.for_model(**{**LLAMA, "tie_word_embeddings": True}, num_labels=2)
    getattr(transformers, f"AutoModelFor{task}").from_config(described).save_pretrained(tmp_path)
    assert check_checkpoint(open_model(tmp_path).spec, tmp_path).num_labels == 2
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": None}))
    with pytest.raises(ValueError, match=r"reads \d of .*'score\.\w+'.*\(score is the head of a classifier"):
        check_checkpoint(open_model(tmp_path).spec, tmp_path)


def test_a_model_without_a_head_is_read_where_its_head_is_tied(tmp_path):
    """As embedding models are published; frequencies that old checkpoints hold are nobody's parameters."""
    config = {**LLAMA, "tie_word_embeddings": True}
    described = transformers.AutoConfig.for_model(**config)
    transformers.AutoModel.from_config(described).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    frequencies = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    save_file({**tensors, **frequencies}, tmp_path / "model.safetensors", {"format": "pt"})
    assert not any(name.startswith("model.") for name in tensors)
    check_checkpoint(open_model(tmp_path).spec, tmp_path)


def test_two_tensors_of_one_name_are_refused(tmp_path):
    saved_model(tmp_path, LLAMA)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "module.model.norm.weight": tensors["model.norm.weight"] + 1}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"'model.norm.weight' and 'module.model.norm.weight' are both"):
        check_checkpoint(open_model(tmp_path).spec, tmp_path)


LEFTOVERS = {
    "nf4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "fp4": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"quant_method": "bitsandbytes", "load_in_8bit": True},
    "switched off": {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False},
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq", "bits": 4},
    "compressed-tensors": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "modelopt": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}


@pytest.mark.parametrize("place", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("options", LEFTOVERS.values(), ids=LEFTOVERS.keys())
def test_a_config_of_quantised_weights_beside_plain_ones_is_left_out(options, place, tmp_path):
    saved_model(tmp_path / "model", CASES["qwen3"], torch.bfloat16)
    plain = open_model(tmp_path / "model").spec
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, place: options}))
    spec = open_model(tmp_path / "model").spec
    assert spec.groups == plain.groups
    assert spec.notice == "config.json says that the weights are quantised, but they are not: they are read as they are"
    with engine_on(tmp_path / "model") as engine:
        engine.save_pretrained(tmp_path / "export")
    assert json.loads((tmp_path / "export" / "config.json").read_text()) == config
    same_bits(*(load_file(tmp_path / folder / "model.safetensors") for folder in ("export", "model")))


def test_quantised_weights_that_nothing_reads_are_refused(tmp_path):
    saved_model(tmp_path, CASES["qwen3"], torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.up_proj"
    tensors[f"{name}.qweight"] = tensors.pop(f"{name}.weight").view(torch.int32)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    config = {**json.loads((tmp_path / "config.json").read_text()), "quantization_config": LEFTOVERS["gptq"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"method 'gptq'\): its weights are quantised"):
        open_model(tmp_path)


def test_a_text_inside_of_a_config_may_say_that_it_is_quantised(tmp_path):
    text = {**CASES["gemma3"], "quantization_config": LEFTOVERS["awq"]}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
    with pytest.raises(ValueError, match=r"quantization_config \(method 'awq'\)"):
        open_model(tmp_path, needs_weights=False)
