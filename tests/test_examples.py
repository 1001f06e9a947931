"""Every example runs as a user would run it: scripts as programs, notebooks cell after cell."""

import json
import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")


def name_of(path: Path) -> str:
    return path.name


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=name_of)
def test_script_runs(script, capsys):
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


def test_the_table_names_every_example():
    table = (EXAMPLES / "README.md").read_text()
    examples = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert examples
    assert [name for name in examples if f"]({name})" not in table] == []
