"""`flexengine models`: what it lists is what can be built and what is tested."""

import json
import re
from pathlib import Path

import pytest
import transformers
import transformers.models.auto.modeling_auto as auto
from family_configs import CASES

from flexengine import cli
from flexengine.models.registry import FAMILIES, preset_names
from flexengine.models.unknown import MISSING_IN_TYPES
from flexengine.models.wrappers import WRAPPERS

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = {
    "llama-3.1-8b": 8030261248, "qwen2.5-0.5b": 494032768, "qwen2.5-1.5b": 1543714304, "qwen2.5-3b": 3085938688,
    "qwen2.5-7b": 7615616512, "qwen2.5-14b": 14770033664, "qwen2.5-32b": 32763876352, "qwen2.5-72b": 72706203648,
    "qwen3-0.6b": 596049920, "qwen3-1.7b": 1720574976, "qwen3-4b": 4022468096, "qwen3-8b": 8190735360,
    "qwen3-14b": 14768307200, "qwen3-32b": 32762123264, "mistral-7b": 7248023552, "gemma-2-2b": 2614341888,
    "gemma-2-9b": 9241705984, "gemma-2-27b": 27227128320, "gemma-3-1b": 999885952, "olmo-3-7b": 7298011136,
    "phi-4": 14659507200, "gpt2": 124439808, "mixtral-8x7b": 46702792704, "olmoe-1b-7b": 6919161856,
    "qwen3-30b-a3b": 30532122624, "qwen3-235b-a22b": 235093634560, "gpt-oss-20b": 20914757184,
    "gpt-oss-120b": 116829156672, "deepseek-v2-lite": 15706484224, "deepseek-v3": 671026404352,
    "bamba-9b": 9780235392,
}  # fmt: skip
"""Parameters of the published checkpoints, a tied tensor counted once."""
TEXT_OF_PUBLISHED = {
    "qwen3-next-80b-a3b": 79674391296, "qwen3.5-9b": 8953803264, "qwen3.6-27b": 26895998464,
    "qwen3.5-35b-a3b": 34660610688, "gemma-4-31b": 30697345280, "gemma-4-26b-a4b": 25233141760,
    "qwen3-vl-8b": 8190735360,
}  # fmt: skip
"""Parameters as transformers counts those of the text; the checkpoints hold more, such as what sees."""


def test_lists_every_family_and_preset(capsys):
    assert cli.main(["models"]) == 0
    printed = capsys.readouterr().out
    assert all(re.search(rf"^{name}: ", printed, re.MULTILINE) for name in FAMILIES)
    assert all(f"preset:{name} " in printed for name in preset_names())


def test_json_has_the_published_sizes(capsys):
    assert cli.main(["models", "--json"]) == 0
    presets = json.loads(capsys.readouterr().out)["presets"]
    known = PUBLISHED | TEXT_OF_PUBLISHED
    assert {name: presets[name]["parameters"] for name in known} == known
    assert set(presets) == set(preset_names())
    others = {name for name, found in presets.items() if found["model_type"] != "llama"}
    assert others - set(known) == {"gemma-3-4b", "gemma-3-12b", "gemma-3-27b"}  # the text of published models


@pytest.mark.parametrize("family", FAMILIES)
def test_as_many_configs_are_compared_as_it_says(family):
    compared = sum(config["model_type"] == family for config in CASES.values())
    if family in WRAPPERS:
        compared = 1  # bench/coverage.py; some in test_texts_beside_images.py
    if family == "llama":
        text = (ROOT / "tests" / "models" / "test_parity_with_transformers.py").read_text(encoding="utf-8")
        compared = int(re.findall(r"^NUM_CASES = (\d+)$", text, re.MULTILINE)[0])
    assert FAMILIES[family].configs_compared == compared


@pytest.mark.skipif(not transformers.__version__.startswith("5.24."), reason="other versions have other types")
def test_every_type_of_transformers_is_supported_or_says_what_is_missing():
    listed = [name for types in MISSING_IN_TYPES.values() for name in types.split()]
    mappings = (auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
    assert len(listed) == len(set(listed))
    assert not set(listed) & set(FAMILIES)
    assert {name for mapping in mappings for name in mapping} <= {*listed, *FAMILIES}
