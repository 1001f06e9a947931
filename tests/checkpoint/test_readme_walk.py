"""README and the page of one job from top to bottom: their commands and programs run, on a small model.

Budgets and sizes are those of a test; models that the pages name are on a loopback hub.
"""

import io
import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from flexengine import cli
from flexengine.hardware.presets import preset
from flexengine.models.registry import ASSETS, build_model

ROOT = Path(__file__).resolve().parents[2]
MODELS = ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B", "Qwen/Qwen3-0.6B")
CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 3072,
    "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
ROWS = [{"instruction": f"What is {i}?", "output": f"It is {i}."} for i in range(4)]
SMALL = (
    *("--device", "cpu", "--dtype", "float32", "--max-seq-len", "64", "--max-global-batch-tokens", "128"),
    *("--max-gpu-mem-gib", "1", "--max-host-mem-gib", "3", "--overwrite"),
)
STAND_INS = {
    "train": SMALL,
    "probe": ("--preset", "h200"),  # this machine's would take a minute
    "plan": ("--chunk-tokens", "8192", "--round-tokens", "16384"),  # one size instead of thirty
    "data": ("--max-seq-len", "64"),
    **dict.fromkeys(("generate", "chat"), (*SMALL[:4], *SMALL[8:12], "--max-new-tokens", "4")),
}
"""What is added to commands, by their names."""
PLACES = {"RUN_FOLDER": "runs/Llama-3.1-8B-full", "M": "meta-llama/Llama-3.1-8B", "D": "data.jsonl"}
"""What stands for names that a reader replaces."""
NAMED = ("flexengine plan", "flexengine plan --svg FILE", "flexengine generate", "flexengine-train", "flexengine")
"""Commands that README only names, without what they need."""
SIZES = {"131072": "128", "2048": "64", "=24": "=1", "=110": "=3", "=8,": "=1, max_seq_len=64,"}
RUNS = re.compile(r"^```(sh|python)\n(.*?)^```|`((?:flexengine|docker|pip)\b[^`]*)`", re.MULTILINE | re.DOTALL)


def steps_of(page: str) -> list[tuple[str, str]]:
    """Kinds and texts of everything that can be run, in the order of the page."""
    found: list[tuple[str, str]] = []
    for kind, block, inline in RUNS.findall((ROOT / page).read_text()):
        lines = block.replace("\\\n", "").splitlines() if kind == "sh" else [block] if kind else [inline]
        found += [(kind or "sh", line) for line in lines if line.strip() and not line.startswith("#")]
    return [(kind, text) for kind, text in found if text not in NAMED]


@pytest.fixture
def machine(hub_of_models, tmp_path, monkeypatch):
    """A folder with data and recipes, a hub with README's models, and a machine whose rates are known."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.setenv("HF_ENDPOINT", hub_of_models.url)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    torch.manual_seed(0)
    shapes = {s.name: s.shape for g in build_model("tiny", CONFIG).groups for p in g.params for s in p.sources}
    files = {name: (ASSETS / "demo" / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")}
    files["config.json"] = json.dumps(CONFIG).encode()
    files["model.safetensors"] = save({name: 0.1 * torch.randn(shape) for name, shape in shapes.items()})
    hub_of_models.repos |= {f"models/{model}": files for model in MODELS}


@pytest.mark.long
def test_readme_runs_from_top_to_bottom(machine, monkeypatch, capsys):
    steps = steps_of("README.md")
    assert [kind for kind, _ in steps].count("python") == 2
    for kind, text in steps:
        if kind == "sh":
            run_line(shlex.split(text, comments=True), monkeypatch)
        else:
            run_program(text)
    said = capsys.readouterr().out
    assert "step 20/20" in said
    assert (Path("models/tuned") / "model.safetensors").exists()
    assert Path("plan.html").exists()


@pytest.mark.long
def test_one_job_runs_from_data_to_an_export(machine, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO())  # chat ends at once
    for _, text in steps_of("docs/one_job.md"):
        run_line(shlex.split(text, comments=True), monkeypatch)
    said = capsys.readouterr().out
    assert "sample: 'How do I reset my password?' -> " in said
    assert Path("runs/answers/report.html").exists()
    assert (Path("models/answers") / "model.safetensors").exists()


def run_line(words: list[str], monkeypatch) -> None:
    """Run a line of a shell in this process."""
    words = [PLACES.get(word, word) for word in words]
    if words[0] == "make":
        assert f"\n{words[1]}: " in (ROOT / "Makefile").read_text()
    elif words[0] in ("docker", "pip"):
        assert (ROOT / {"docker": "Dockerfile", "pip": "pyproject.toml"}[words[0]]).exists()
    elif words[:2] == ["python", "train.py"]:
        monkeypatch.setattr("sys.argv", [*words[1:], *SMALL])
        with pytest.raises(SystemExit, match=r"^0$"):
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    else:
        assert words[0] == "flexengine", words
        arguments = words[1 : words.index(">") if ">" in words else None]
        if "--help" in arguments:
            with pytest.raises(SystemExit, match=r"^0$"):
                cli.main(arguments)
        else:
            assert cli.main([*arguments, *STAND_INS.get(words[1], ())]) == 0, words


def run_program(text: str) -> None:
    """Run a program with the names that README's reader has."""
    for size, small in SIZES.items():
        text = text.replace(size, small)
    exec(compile(text, "README.md", "exec"), {"rows": ROWS, "batches": [[[5, 6, 7, 8]], [[9, 10, 11]]]})
