"""Every example runs as a user would run it: scripts as programs, notebooks cell after cell."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"

TINY = {"needle.py": ["--steps", "1", "--lengths", "96", "128", "--depths", "0.5"]}
"""Arguments of scripts that are quicker with some."""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")


def name_of(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=name_of)
def test_script_runs(script, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script.name, *TINY.get(script.name, ())])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out


@pytest.mark.parametrize("notebook", sorted(EXAMPLES.glob("*.ipynb")), ids=name_of)
def test_notebook_runs_and_shows_what_it_gives(notebook, capsys):
    """Its outputs are those of a longer run: texts and pictures, which name no folder of who ran it."""
    cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    names: dict = {"__name__": "__main__"}
    for i, cell in enumerate(cells):
        source = re.sub(r"STEPS = (.*), \d+", r"STEPS = \1, 6", "".join(cell["source"]))
        exec(compile(source, f"{notebook.name}, cell {i}", "exec"), names)
        assert bool(cell["outputs"]) == bool(capsys.readouterr().out or "plt.show()" in source), f"cell {i}"
    shown = json.dumps([cell["outputs"] for cell in cells])
    assert "image/png" in shown
    assert not re.search("/(home|root|tmp|usr)/|stderr", shown), "run it again, and leave folders and warnings out"


def test_a_needle_lies_at_its_depth_and_is_asked_for_at_the_end():
    module = runpy.run_path(str(EXAMPLES / "needle.py"))
    tokenizer = module["AutoTokenizer"].from_pretrained(module["BUNDLED"])
    for depth in (0.0, 0.3, 1.0):
        needle = module["Haystack"](tokenizer, 0).needle(200, depth)
        text = tokenizer.decode(needle.context)
        (fact,) = re.findall(r"\nThe code of (\w+) is( \d \d \d \d \d)", text)
        asked = f"\nThe code of {fact[0]} is"
        assert text.endswith(asked)
        assert fact[1].split() == tokenizer.decode(needle.answer).split()
        assert len(needle.context) + len(needle.answer) == 200
        before = len(tokenizer.encode(text[: text.index(asked)]))
        room = 200 - 2 * (len(needle.answer) + len(tokenizer.encode(asked)))
        assert abs(before - depth * room) <= 3  # tokens at the seam may be cut otherwise
    with pytest.raises(ValueError, match="--lengths 20: fact and question take"):
        module["Haystack"](tokenizer, 0).needle(20, 0.5)


def test_the_table_names_every_example():
    table = (EXAMPLES / "README.md").read_text()
    examples = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert examples
    assert [name for name in examples if f"]({name})" not in table] == []
