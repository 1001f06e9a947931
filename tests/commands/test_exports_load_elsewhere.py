"""Every kind of export loads in transformers and PEFT, which compute with it what is computed here.

The base is as people have them: config.json names code that is not needed, and says NF4 of weights that are in 16 bits.
"""

import json
import shutil
from pathlib import Path

import peft
import pytest
import torch
import transformers
from engine_helpers import saved_model
from family_configs import CASES
from safetensors.torch import load_file

from flexengine import cli, from_pretrained
from flexengine.checkpoint.layout import RUN_FILE
from flexengine.hardware.presets import preset
from flexengine.models.preset_files import ASSETS
from tests.failures.provoke import arguments

IDS = [5, 17, 30, 44, 9, 12, 60, 2, 8, 11]
LEFT_OVER = {
    "quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "auto_map": {
        "AutoConfig": "configuration_phi3.Phi3Config",
        "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM",
    },
}
RUNS = {
    "full": {},
    "resumed": {"save_steps": 1},
    "adapters": {"mode": "lora", "lora_rank": 2},
    "adapters of a stored base": {"mode": "lora", "lora_rank": 2, "base_dtype": "nf4"},
}


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A folder whose config names code that ends the process that runs it."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "base"
    saved_model(folder, {**CASES["phi3"], "hidden_size": 64, "vocab_size": 128}, torch.bfloat16)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **LEFT_OVER}))
    for name in ("configuration_phi3.py", "modeling_phi3.py"):
        (folder / name).write_text("raise SystemExit('a stranger')\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "demo" / name, folder)
    return folder


def train(base, **options):
    common = {"model": base, "steps": 2, "dtype": "float32", "lr": 1e-2, "save": True, "output_dir": "run"}
    assert cli.main(["train", *arguments(**{**common, **options})]) == 0


def export(form):
    assert cli.main(["export", "--run", "run", "--format", form, "--out", f"out-{form}"]) == 0
    return Path(f"out-{form}")


def loss_here(folder, **options):
    sizes = {"max_seq_len": 32, "max_global_batch_tokens": 64, "device": "cpu", "hardware": "cpu-test"}
    with from_pretrained(folder, dtype="float32", **sizes, **options) as engine:
        return engine.evaluate([IDS]).loss


def loss_there(folder, adapter=None):
    """The loss by transformers, with an adapter by PEFT; a class of another program would end the process."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=True)
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, adapter)
    with torch.no_grad():
        return model(torch.tensor([IDS]), labels=torch.tensor([IDS])).loss.item()


def check_whole(folder, base):
    """A model that describes itself as it is: no 4 bits, no code, no folders of the machine that made it."""
    config, original = (json.loads((place / "config.json").read_text()) for place in (folder, base))
    assert config == {name: value for name, value in original.items() if name not in LEFT_OVER}
    assert {str(tensor.dtype) for tensor in load_file(folder / "model.safetensors").values()} == {"torch.bfloat16"}
    assert not list(folder.glob("*.py"))
    record = folder / RUN_FILE
    assert not record.is_file() or str(Path.cwd()) not in record.read_text()
    assert transformers.AutoTokenizer.from_pretrained(folder).vocab_size > 0
    assert loss_there(folder) == pytest.approx(loss_here(folder), abs=1e-5)


@pytest.mark.parametrize("kind", RUNS)
def test_an_export_is_read_as_it_was_meant(kind, base):
    train(base, **RUNS[kind])
    final = Path("run/final")
    if "mode" not in RUNS[kind]:
        check_whole(final, base)
        check_whole(export("hf"), base)
        assert loss_here("out-hf") == loss_here(final)
        return
    plain = base.with_name("plain")  # PEFT loads the base with transformers, which would want bitsandbytes
    shutil.copytree(base, plain)
    config = json.loads((base / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in LEFT_OVER}))
    stored = "base_dtype" in RUNS[kind]
    assert loss_there(plain, final) == pytest.approx(loss_here(base, adapter=str(final)), abs=1e-5)
    check_whole(export("merged"), base)
    # Merged weights are rounded to bfloat16, of a stored base after it was decoded.
    expected = loss_here(base, adapter=str(final), **({"base_dtype": "nf4"} if stored else {}))
    assert loss_here("out-merged") == pytest.approx(expected, abs=2e-2)


def test_code_of_a_tokenizer_goes_with_it(base):
    """It may be the only place of its class, so it is copied with what it imports; nothing of it runs."""
    named = {"AutoTokenizer": ["tokenization_own.Own", None], "AutoProcessor": "org/other--processing.P"}
    config = json.loads((base / "tokenizer_config.json").read_text())
    (base / "tokenizer_config.json").write_text(json.dumps({**config, "auto_map": named}))
    (base / "tokenization_own.py").write_text("from .tokenization_part import x\nraise SystemExit\n")
    (base / "tokenization_part.py").write_text("from .nowhere import y\nraise SystemExit\n")
    train(base)
    assert {path.name for path in Path("run/final").glob("*.py")} == {"tokenization_own.py", "tokenization_part.py"}
