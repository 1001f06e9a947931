"""The text of models with images: what a config leaves out, and what an export holds beside it."""

import json

import pytest
import torch
import transformers
from engine_helpers import random_batch, relative_error, spec_of, tiny_config
from family_checks import last_logits
from safetensors.torch import load_file, save_file

from flexengine import from_pretrained
from flexengine.models.registry import open_model
from flexengine.models.wrappers import SIZES, TEXTS, WRAPPERS
from flexengine.optim import AdamW

VISION = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def saved(folder, kind="mistral3", **changes):
    text = {**tiny_config(), "model_type": "mistral", **changes.pop("text", {})}
    config = transformers.AutoConfig.for_model(
        kind, text_config=text, vision_config=VISION, image_token_index=66, **changes
    )
    torch.manual_seed(7)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager").eval()
    model.save_pretrained(folder)
    return model


def test_what_stands_beside_the_text_is_exported_as_it_came(tmp_path, caplog):
    model = saved(tmp_path / "source", tie_word_embeddings=False)
    options = {"max_seq_len": 40, "max_global_batch_tokens": 128, "hardware": "cpu-test", "device": "cpu"}
    ids = random_batch(0, [30, 7], 60)
    with from_pretrained(tmp_path / "source", AdamW(lr=1e-2), dtype="float32", **options) as engine:
        engine.train_step(ids)
        engine.save_pretrained(tmp_path / "export")
        logits = engine.next_token_logits(ids[0])
    assert caplog.text.count("the text part is trained; the tensors beside it are exported unchanged") == 1
    source, export = (load_file(tmp_path / folder / "model.safetensors") for folder in ("source", "export"))
    assert export.keys() == source.keys()
    for name, tensor in source.items():
        assert torch.equal(export[name], tensor) == (not name.startswith("language_model.")), name
    exported = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "export").eval()
    assert relative_error(logits, last_logits(exported, ids[0])) <= 1e-4
    assert relative_error(logits, last_logits(model, ids[0])) > 1e-4


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_that_the_config_does_not_tell_of_is_tied_as_stored(tied, tmp_path):
    """The class of mistral3 ties it by default, published checkpoints have one of its own."""
    saved(tmp_path, tie_word_embeddings=tied)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k != "tie_word_embeddings"}))
    assert open_model(tmp_path).spec.tie_word_embeddings == tied
    assert not spec_of({"model_type": "llava", "text_config": {}}).tie_word_embeddings


def test_a_config_of_early_models_has_the_text_among_its_own_fields():
    """As Qwen2-VL was published."""
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 1]}}
    text = {**tiny_config(), **rope}
    flat = spec_of({**text, "model_type": "qwen2_vl", "vision_config": {}})
    nested = spec_of({"model_type": "qwen2_vl", "text_config": {**text, "model_type": "qwen2_vl_text"}})
    assert flat.groups == nested.groups
    assert [layer.ops for layer in flat.blocks] == [layer.ops for layer in nested.blocks]


@pytest.mark.parametrize("kind", sorted({row.text for row in WRAPPERS.values()} & {*TEXTS, *SIZES}))
def test_an_absent_size_is_what_transformers_takes_it_for(kind):
    """Published configs leave out what is a default of the text's class."""
    family = next(name for name, row in WRAPPERS.items() if row.text == kind)
    # the defaults of two types do not go together
    stated = {"qwen3_omni_moe_text": {"hidden_size": 28 * 64}, "glm4v_moe_text": {"num_attention_heads": 64}}.get(
        kind, {}
    )
    own = type(transformers.AutoConfig.for_model(family).text_config)(**stated).to_dict()
    ours = spec_of({"model_type": family, "text_config": {"model_type": kind, **stated}})
    wanted = spec_of({"model_type": family, "text_config": own})
    assert (ours.groups, ours.tables) == (wanted.groups, wanted.tables)
    assert [layer.ops for layer in ours.blocks] == [layer.ops for layer in wanted.blocks]


def test_a_text_of_another_type_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model_type='mamba' in the text_config of config\.json: a text of this type"):
        spec_of({"model_type": "llava", "text_config": {"model_type": "mamba"}})


def test_a_tensor_of_another_task_is_refused(tmp_path):
    saved(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "score.weight": torch.ones(1, 24)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"score.weight"):
        from_pretrained(tmp_path, max_seq_len=8, max_global_batch_tokens=8, hardware="cpu-test", device="cpu")
