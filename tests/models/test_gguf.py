"""GGUF files: what is written is read back as it was, trains, and gives the tokens of transformers in llama.cpp."""

import json
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import transformers
from engine_helpers import saved_model
from safetensors.torch import load_file
from thorough import cases

from flexengine import cli
from flexengine.hardware.presets import preset
from flexengine.models.gguf import read, write
from flexengine.models.gguf.tokens import SPLITS
from flexengine.models.preset_files import ASSETS
from flexengine.models.registry import build_model, open_model
from tests.failures.provoke import arguments

pytestmark = pytest.mark.skipif(find_spec("gguf") is None, reason="needs the package gguf")

SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 96, "max_position_embeddings": 9000, "initializer_range": 0.3, "pad_token_id": None,
    "vocab_size": 2944, "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "initializer_range": 0.2}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MODELS = {
    "llama": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}, "attention_bias": True},
    "mistral": {"sliding_window": None, "rope_theta": 5e4},
    "qwen2": {"head_dim": 16, "tie_word_embeddings": True},
    "qwen3": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 8, "num_hidden_layers": 7},
    "qwen2_moe": {**EXPERTS, "head_dim": 16, "shared_expert_intermediate_size": 48},
    "qwen3_moe": {**EXPERTS, "norm_topk_prob": True},
    "olmoe": {**EXPERTS, "intermediate_size": 32, "head_dim": 16, "num_key_value_heads": 4},
}
READ_BACK = ("llama", "qwen2", "gemma3_text", "qwen2_moe")
IDS = [5, 17, 300, 44, 9, 12, 60, 2, 800, 11, 1500, 7, 33]
TEXT = "What is 2 plus 1745?\n\n The capital  of tin is ünder it's"
LORA = {"mode": "lora", "lora_rank": 4, "lora_targets": "all-linear"}


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """Commands run in an empty folder, and files are kept in a cache of its own."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.setenv("FLEXENGINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def model_folder(kind="llama", dtype=torch.float32):
    """A random model with the demo's tokens, split as llama.cpp knows how to."""
    folder = Path(kind)
    saved_model(folder, {"model_type": kind, **SIZES, **MODELS[kind]}, dtype)
    shutil.copy(ASSETS / "demo" / "tokenizer_config.json", folder)
    told = json.loads((ASSETS / "demo" / "tokenizer.json").read_text())
    pattern = next(regex for regex, name in SPLITS.items() if name == "qwen2")
    told["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = pattern
    (folder / "tokenizer.json").write_text(json.dumps(told))
    return folder


def written(folder, wanted="f32"):
    path = Path(f"{folder}.gguf")
    assert write.write_model(folder, open_model(folder).spec, "tiny", path, build_model, wanted) == wanted
    return path


@pytest.mark.parametrize("kind", cases([k for k in MODELS if k != "olmoe"], READ_BACK))
def test_what_is_written_is_read_back(kind):
    folder = model_folder(kind)
    source = open_model(written(folder))
    before, after = (load_file(place / "model.safetensors") for place in (folder, source.weights_folder))
    assert before.keys() - {"lm_head.weight"} <= after.keys()
    for name in after:
        torch.testing.assert_close(after[name], before[name], rtol=0, atol=1.2e-7)  # of norms around zero
    assert write._computed(source.spec) == write._computed(open_model(folder).spec)
    if kind != "gemma3_text":  # whose own tokenizer is of another kind
        first, again = (transformers.AutoTokenizer.from_pretrained(at) for at in (folder, source.tokenizer_folder))
        assert first(TEXT).input_ids == again(TEXT).input_ids
        assert first.chat_template == again.chat_template


@pytest.mark.parametrize("kind", MODELS)
def test_tokens_in_llama_cpp(kind):
    """Greedy tokens, logits and tokens of a text; caches in float32 leave its own rounding of activations alone."""
    cpp = pytest.importorskip("cyllama.llama.llama_cpp")
    folder = model_folder(kind)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    cpp.disable_logging()

    class Model(cpp.LlamaModel):
        n_vocab = SIZES["vocab_size"]  # get_logits_ith reads it, and it is not there

    options = cpp.LlamaContextParams()
    options.n_ctx, options.n_threads, options.n_threads_batch = 64, 1, 1
    options.type_k = options.type_v = 0
    there = Model(str(written(folder)), cpp.LlamaModelParams(), verbose=False)
    context, ids, new = cpp.LlamaContext(there, options, verbose=False), list(IDS), list(IDS)
    for _ in range(8):
        context.decode(cpp.llama_batch_get_one(new, len(ids) - len(new)))
        logits = torch.tensor(context.get_logits_ith(-1))
        with torch.no_grad():
            expected = model(torch.tensor([ids])).logits[0, -1]
        torch.testing.assert_close(logits, expected, rtol=0, atol=2e-2)
        new = [int(expected.argmax())]
        assert int(logits.argmax()) == new[0]
        ids += new
    own = transformers.AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
    assert list(there.get_vocab().tokenize(TEXT, True, True)) == own


def test_a_run_from_a_file_to_a_file(capsys):
    """Trains from a GGUF file, says once what it made of it, and exports what transformers' loader reads the same."""
    path = written(model_folder("qwen2"), "q8_0")
    options = {"model": path, "steps": 2, "dtype": "float32", "lr": 1e-2, "save": True, "output_dir": "run"}
    assert cli.main(["train", *arguments(**options)]) == 0
    assert cli.main(["export", "--run", "run", "--format", "gguf", "--gguf-type", "f32", "--out", "out"]) == 0
    assert Path("out/Modelfile").read_text() == "FROM ./qwen2-tuned.gguf\n"
    there = transformers.AutoModelForCausalLM.from_pretrained("out", gguf_file="qwen2-tuned.gguf")
    tuned = load_file("run/final/model.safetensors")
    for name, tensor in there.state_dict().items():
        assert torch.equal(tensor, tuned.get(name, tuned["model.embed_tokens.weight"])), name
    capsys.readouterr()
    assert cli.main(["generate", "--model", str(path), "--prompt", "What", "--max-new-tokens", "2"]) == 0
    assert "decoded to" not in capsys.readouterr().err  # it is kept


def test_adapters():
    """Llama's queries and keys have rows in another order, which B must share."""
    import gguf  # noqa: PLC0415

    folder = model_folder("llama")
    assert cli.main(["train", *arguments(model=folder, steps=2, lr=1e-2, save=True, output_dir="run", **LORA)]) == 0
    for form in ("merged", "gguf-adapter"):
        assert cli.main(["export", "--run", "run", "--format", form, "--out", form]) == 0
    assert Path("gguf-adapter/Modelfile").read_text() == "FROM ./llama.gguf\nADAPTER ./llama-adapter.gguf\n"
    low = {t.name: torch.tensor(t.data) for t in gguf.GGUFReader("gguf-adapter/llama-adapter.gguf").tensors}
    base, merged = (
        {t.name: torch.tensor(t.data) for t in gguf.GGUFReader(written(Path(f))).tensors} for f in (folder, "merged")
    )
    scale = json.loads(Path("run/final/adapter_config.json").read_text())["lora_alpha"] / 4
    assert len(low) == 2 * 2 * 7
    for name in (name.removesuffix(".lora_a") for name in low if name.endswith(".lora_a")):
        change = scale * low[f"{name}.lora_b"] @ low[f"{name}.lora_a"]
        torch.testing.assert_close(base[name] + change, merged[name], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "phi3"}, "no GGUF file is written of phi3 models, only of llama,"),
        ({"query_pre_attn_scalar": 9}, "cannot say all that config.json asks of this gemma3_text model"),
    ],
    ids=["gguf_of_no_such_family", "gguf_cannot_say_all"],
)
def test_models_that_are_not_written(change, said):
    folder = model_folder("gemma3_text")
    spec = open_model(folder).spec
    if "model_type" in change:
        spec.hf_config["model_type"] = change["model_type"]
    else:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        spec = open_model(folder).spec
    with pytest.raises(ValueError, match=said):
        write.write_model(folder, spec, "tiny", Path("tiny.gguf"), build_model)
    assert not Path("tiny.gguf").exists()


def no_package(path, monkeypatch):
    monkeypatch.setattr(read, "find_spec", lambda _: None)


def cut(path, monkeypatch):
    path.write_bytes(path.read_bytes()[:5000])


def other_key(path, monkeypatch):
    path.write_bytes(path.read_bytes().replace(b"llama.rope.freq_base", b"llama.rope.freq_bosh"))


def other_tensor(path, monkeypatch):
    path.write_bytes(path.read_bytes().replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xx.weight"))


def other_architecture(path, monkeypatch):
    path.write_bytes(path.read_bytes().replace(b"llama", b"zebra"))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (no_package, r"read by the package gguf; install it: pip install 'flexengine-train\[gguf\]'"),
        (cut, "is no whole GGUF file"),
        (other_key, "nothing here reads its keys rope.freq_bosh"),
        (other_tensor, "it lacks 1 of the model's .* tensors, such as"),
        (other_architecture, "it holds a model of zebra, and llama,"),
    ],
    ids=["gguf_package_missing", "gguf_cut", "gguf_key_unknown", "gguf_tensor_missing", "gguf_architecture_unknown"],
)
def test_files_that_are_not_read(damage, said, monkeypatch):
    path = written(model_folder())
    damage(path, monkeypatch)
    with pytest.raises(ValueError, match=said):
        open_model(path)
    assert not list(Path("cache").rglob("config.json"))
