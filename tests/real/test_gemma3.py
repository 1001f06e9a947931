"""Gemma 3 270M with its real weights: losses of transformers, training, resume and export; `pytest -m real`.

Takes minutes and up to 6 GB; skipped where the weights are not (tests/real/gemma3.py), and not run in CI.
"""

import math
import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers

from flexengine import cli, from_pretrained
from flexengine.hardware.presets import preset
from flexengine.models.gguf import write
from flexengine.models.registry import build_model, open_model
from tests.real.gemma3 import joined

PLACE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flexengine" / "real"
WEIGHTS = joined(PLACE) if find_spec("gguf") else None
pytestmark = [
    pytest.mark.real,
    pytest.mark.skipif(WEIGHTS is None, reason="needs gguf and the weights of tests/real/gemma3.py"),
]
TEXTS = (
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May. How many clips did"
    " Natalia sell altogether in April and May? She sold 48 / 2 = 24 clips in May, 72 altogether.",
    "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting. How much did she earn?"
    " She earned 10 dollars.",
)
SIZES = {"dtype": "float32", "max_seq_len": 64, "max_global_batch_tokens": 128, "device": "cpu", "hardware": "cpu-test"}
BUDGETS = {"max_gpu_mem_gib": 5, "max_host_mem_gib": 12}
LORA = {"mode": "lora", "lora_rank": 8, "lora_targets": "all-linear"}


@pytest.fixture(scope="module")
def folder():
    return open_model(WEIGHTS).weights_folder


@pytest.fixture(scope="module")
def batch(folder):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return [tokenizer(text).input_ids[:48] for text in TEXTS]


@pytest.fixture(scope="module")
def there(folder, batch):
    """Loss and norm of all gradients by transformers in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    num_targets, total = sum(len(ids) - 1 for ids in batch), 0.0
    for ids in batch:
        loss = model(torch.tensor([ids]), labels=torch.tensor([ids])).loss * ((len(ids) - 1) / num_targets)
        loss.backward()
        total += loss.item()
    squares = sum(p.grad.double().pow(2).sum().item() for p in model.parameters() if p.grad is not None)
    return total, math.sqrt(squares)


def test_loss_and_gradients_of_transformers(folder, batch, there):
    with from_pretrained(folder, **SIZES, **BUDGETS) as engine:
        output, update = engine.train_step(batch, lr=1e-5)
    assert (output.loss, update.grad_norm) == pytest.approx(there, rel=3e-5)


@pytest.mark.parametrize("base_dtype", [None, "nf4"])
def test_adapters_learn(folder, batch, there, base_dtype):
    options = {} if base_dtype is None else {"base_dtype": base_dtype}
    with from_pretrained(folder, **SIZES, **BUDGETS, **LORA, **options) as engine:
        losses = [engine.train_step(batch, lr=1e-3)[0].loss for _ in range(4)]
    assert losses[0] == pytest.approx(there[0], rel=3e-5 if base_dtype is None else 0.15)
    assert losses[-1] < 0.9 * losses[0]


def test_a_run_its_resume_and_a_file(tmp_path, monkeypatch):
    """Adapters trained from the file itself; a run that goes on from its middle gives the same bits."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.chdir(tmp_path)
    flags = ["--model", str(WEIGHTS), "--mode", "lora", "--lora-rank", "8", "--dtype", "bfloat16", "--device", "cpu"]
    sizes = ["--max-gpu-mem-gib", "2", "--max-host-mem-gib", "8", "--max-seq-len", "128"]
    data = ["--max-global-batch-tokens", "128", "--steps", "4", "--save", "--save-steps", "2"]
    for out in ("whole", "parts"):
        assert cli.main(["train", *flags, *sizes, *data, "--output-dir", out]) == 0
    # Go on from the middle of one of them.
    last = max((tmp_path / "parts" / "checkpoints").iterdir(), key=lambda place: int(place.name.rpartition("-")[2]))
    for place in (last, tmp_path / "parts" / "final"):
        shutil.rmtree(place)
    assert cli.main(["train", *flags, *sizes, *data, "--output-dir", "parts", "--resume", "auto"]) == 0
    whole, parts = (Path(out, "final", "adapter_model.safetensors").read_bytes() for out in ("whole", "parts"))
    assert whole == parts
    assert cli.main(["generate", "--model", "whole", "--prompt", "The river", "--max-new-tokens", "4"]) == 0
    assert cli.main(["export", "--run", "whole", "--format", "gguf", "--gguf-type", "q8_0", "--out", "out"]) == 0
    assert next(Path("out").glob("*.gguf")).stat().st_size < 320 * 2**20


def test_decoded_to_the_floats_of_transformers(folder):
    """Every weight of transformers' own loader."""
    there = transformers.AutoModelForCausalLM.from_pretrained(WEIGHTS.parent, gguf_file=WEIGHTS.name)
    here = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    own = here.state_dict()
    assert all(torch.equal(tensor, own[name]) for name, tensor in there.state_dict().items())
    config = {name: value for name, value in there.config.to_dict().items() if name != "quantization_config"}
    config["rms_norm_eps"] = round(config["rms_norm_eps"], 12)  # the file holds it in float32
    assert write._computed(build_model("m", config)) == write._computed(open_model(folder).spec)
