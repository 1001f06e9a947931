"""The bundled demo and the shipped presets are what they say."""

import json
import subprocess
import sys

import pytest

from flexengine.data import ChatTokenizer, prepare_sequences, read_json_sft
from flexengine.data.encoding import encode_records
from flexengine.models.registry import ASSETS

DEMO = ASSETS / "demo"
BENCH = ASSETS.parent.parent / "bench" / "make_demo_assets.py"

# Parameters of the published models, as their model cards count them; ours by their names.
PARAMETERS = {
    "tiny-llama3-50m": 50_606_592,
    "tiny-llama3-150m": 149_840_640,
    "tiny-llama3-100m": 99_889_664,
    "tiny-llama3-300m": 297_689_856,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "codellama-7b": 6_738_546_688,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.2-3b-untied": 3_606_752_256,
}


def num_parameters(config):
    d, f, h, v = (config[k] for k in ("hidden_size", "intermediate_size", "head_dim", "vocab_size"))
    heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    layer = d * h * heads + 3 * d * f + 2 * d
    return config["num_hidden_layers"] * layer + d + v * d * (1 if config["tie_word_embeddings"] else 2)


def test_every_preset_of_llama_is_counted():
    presets = {path.stem: json.loads(path.read_text()) for path in (ASSETS / "presets").glob("*.json")}
    assert {name for name, config in presets.items() if config["model_type"] == "llama"} == set(PARAMETERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_preset_parameters(name):
    config = json.loads((ASSETS / "presets" / f"{name}.json").read_text())
    assert num_parameters(config) == PARAMETERS[name]


@pytest.mark.parametrize("name", ["llama-3.2-1b", "llama-2-70b", "codellama-7b"])
def test_presets_are_valid_for_transformers(name):
    transformers = pytest.importorskip("transformers")
    raw = json.loads((ASSETS / "presets" / f"{name}.json").read_text())
    config = transformers.LlamaConfig.from_dict(raw)
    assert (config.hidden_size, config.num_key_value_heads) == (raw["hidden_size"], raw["num_key_value_heads"])


def test_demo_folder():
    config = json.loads((DEMO / "config.json").read_text())
    tokenizer = ChatTokenizer.from_folder(DEMO)
    assert 8e6 < num_parameters(config) < 15e6
    assert tokenizer.max_id < config["vocab_size"]
    assert tokenizer.tokenizer.token_to_id("<|end|>") == config["eos_token_id"]
    data = DEMO / "demo_instructions.jsonl"
    assert data.stat().st_size < 800_000
    prepared = prepare_sequences(encode_records(read_json_sft(data), tokenizer), 128, truncate_long=False)
    assert len(prepared.sequences) == prepared.cut.num_records == 3000


@pytest.mark.skipif(not BENCH.is_file(), reason="bench/ is not beside the package")
def test_generator_writes_the_shipped_bytes(tmp_path):
    subprocess.run([sys.executable, str(BENCH), "--target", str(tmp_path)], check=True, capture_output=True)
    for name in ("demo_instructions.jsonl", "demo_facts.jsonl", "config.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (DEMO / name).read_bytes(), name
    new, shipped = (json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path, DEMO))
    assert new["model"]["vocab"] == shipped["model"]["vocab"]
