"""`--model ORG/NAME`: models of a loopback hub in the hub's own cache, fetched once, offline, broken off, refused."""

import json
import re

import huggingface_hub.constants as hub_constants
import pytest
import torch
from safetensors.torch import save

from flexengine import cli
from flexengine.checkpoint import hub_cache
from flexengine.checkpoint.manifest import DownloadError
from flexengine.hardware.presets import preset
from flexengine.models.registry import ASSETS, build_model, open_model

REPO = "org/tiny-llama"
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 3072,
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def repo(hub_of_models):
    """A small model with the demo's tokenizer on the hub, which keeps its files in tmp_path."""
    spec = build_model("tiny", CONFIG)
    torch.manual_seed(0)
    shapes = {s.name: s.shape for group in spec.groups for param in group.params for s in param.sources}
    weights = {name: 0.1 * torch.randn(shape) for name, shape in shapes.items()}
    hub_of_models.repos[f"models/{REPO}"] = {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": save(weights),
        **{name: (ASSETS / "demo" / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")},
        "pytorch_model.bin": b"pickle",
        "README.md": b"# tiny",
    }
    return hub_of_models.repos[f"models/{REPO}"]


def fetched(hub) -> list[str]:
    return sorted(request.path for request in hub.requests)


def offline(monkeypatch) -> None:
    """As HF_HUB_OFFLINE=1 in a new process."""
    monkeypatch.setattr(hub_constants, "HF_HUB_OFFLINE", True)
    hub_cache._commits.clear()


def test_the_headline_command_from_an_empty_cache_and_offline(hub, repo, tmp_path, capsys, monkeypatch):
    """Model, data, steps and budgets are found; the export is whole; a second run asks no hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    few = ["--dtype", "float32", "--max-seq-len", "64", "--max-global-batch-tokens", "128", "--device", "cpu"]
    command = ["train", "--model", REPO, "--max-gpu-mem-gib", "1", *few]
    assert cli.main([*command, "--save"]) == 0
    said = capsys.readouterr()
    assert "data: the instructions that come with the package" in said.out
    assert "step 20/20" in said.out
    assert re.search("budgets found: host .*; left to the system: .* of host memory", said.out)
    assert open_model("runs/tiny-llama-full/final").spec.num_parameters
    asked = len(hub.requests)
    offline(monkeypatch)
    assert cli.main([*command, "--mode", "lora", "--steps", "1", "--save"]) == 0
    adapter = json.loads((tmp_path / "runs/tiny-llama-lora/final/adapter_config.json").read_text())
    assert (adapter["base_model_name_or_path"], adapter["revision"]) == (REPO, hub.commit)
    assert len(hub.requests) == asked


def test_only_what_a_model_needs_is_fetched_once(hub, repo, monkeypatch):
    source = open_model(REPO, needs_weights=False)
    assert (source.spec.name, source.weights_folder) == ("tiny-llama", None)
    assert fetched(hub) == ["config.json", "tokenizer.json", "tokenizer_config.json"]
    source = open_model(REPO)
    assert fetched(hub) == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert source.weights_folder is not None
    assert source.weights_folder.name == hub.commit
    offline(monkeypatch)
    assert open_model(f"{REPO}@main").weights_folder == open_model(f"{REPO}@{hub.commit}").weights_folder
    assert len(hub.requests) == 4


def test_weights_that_a_plan_left_out_are_not_taken_for_whole(hub, repo, monkeypatch):
    open_model(REPO, needs_weights=False)
    offline(monkeypatch)
    assert open_model(REPO, needs_weights=False).spec.name == "tiny-llama"
    with pytest.raises(ValueError, match=r"no such folder, and not to be had from the hub: .*HF_HUB_OFFLINE"):
        open_model(REPO)


def test_shards(hub, repo):
    repo["model-1.safetensors"] = repo.pop("model.safetensors")
    names = ("config.json", "model-1.safetensors")
    repo["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": names[1]}}).encode()
    open_model(REPO)
    assert set(names) < set(fetched(hub))
    repo["model.safetensors.index.json"] = json.dumps({"weight_map": {"a": "model-2.safetensors"}}).encode()


def test_a_download_that_breaks_off_goes_on(hub, repo, monkeypatch):
    repo["model.safetensors"] += b"\0"  # of an odd size, so that a half is told from the whole
    half = len(repo["model.safetensors"]) // 2
    hub.drop_after["model.safetensors"] = half
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(ValueError, match="not to be had from the hub"):
        open_model(REPO)
    del hub.drop_after["model.safetensors"]
    hub.requests.clear()
    assert open_model(REPO).weights_folder is not None
    assert fetched(hub) == ["model.safetensors"]


REFUSED = {
    "missing": ("other/model", None, "not found or not accessible \\(HTTP 404\\)"),
    "gated": (REPO, (403, "GatedRepo"), "access is gated \\(no HF_TOKEN is set\\). Accept the terms"),
    "revision": (f"{REPO}@v2", None, "the revision does not"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_the_hub_refuses_is_one_message(hub, repo, case, capsys):
    name, hub.refuse, says = REFUSED[case]
    assert cli.main(["plan", "--model", name, "--gpu", "rtx4090"]) == cli.BAD_INPUT
    said = capsys.readouterr().err
    assert re.search(f"model {name}: no such folder, and not to be had from the hub: .*{says}", said), said
    assert len(said.splitlines()) == 1
    assert "Traceback" not in said


def test_a_repository_without_safetensors(hub, repo):
    del repo["model.safetensors"]
    with pytest.raises(ValueError, match="no safetensors weights on the hub"):
        open_model(REPO)
    del repo["config.json"]
    hub_cache._commits.clear()


def test_adapters_by_their_id(hub, repo, tmp_path, monkeypatch):
    """They are what a run of ours wrote, uploaded; what is no adapter is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    few = ["--dtype", "float32", "--max-seq-len", "64", "--max-global-batch-tokens", "128", "--device", "cpu"]
    command = ["train", "--model", REPO, "--max-gpu-mem-gib", "1", *few, "--steps", "1", "--save"]
    assert cli.main([*command, "--mode", "lora", "--lora-rank", "4"]) == 0
    final = tmp_path / "runs/tiny-llama-lora/final"
    hub.repos["models/org/adapter"] = {path.name: path.read_bytes() for path in final.iterdir() if path.is_file()}
    assert cli.main([*command, "--adapter", "org/adapter", "--output-dir", "again"]) == 0
    assert json.loads((tmp_path / "again/final/adapter_config.json").read_text())["r"] == 4
    assert "adapter: org/adapter" in (tmp_path / "again/config.yaml").read_text()
    with pytest.raises(DownloadError, match=r"org/tiny-llama: no adapter_config.json on the hub"):
        hub_cache.cached_adapter(REPO)
