"""The demo's model learns what it is shown: a smaller one learns the ten questions that the demo asks."""

import json
import re
import shutil

from flexengine import cli
from flexengine.models.registry import ASSETS
from flexengine.options.data import DEMO_FACTS

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2}


def test_the_demo_answers_its_questions_and_says_where_to_look(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    model.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(ASSETS / "demo" / name, model)
    config = json.loads((ASSETS / "demo" / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **SMALL}))
    asked = cli.demo_prompts()
    assert len(asked) == 10
    rows = [{"instruction": question, "output": answer} for question, answer in asked.items()]
    (tmp_path / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = "--model model --init random --dataset few.jsonl --steps 80 --lr 5e-3 --device cpu --dtype float32"
    assert cli.run_demo([*flags.split(), "--max-gpu-mem-gib", "0.5", "--logging", "warning"]) == 0
    said = capsys.readouterr().out
    assert said.count("sample: ") == 10
    found = re.search(r"^right: (\d+) of 10 answers$", said, re.MULTILINE)
    assert found is not None
    assert int(found[1]) >= 8, said
    assert "  flexengine report runs/demo\n  flexengine generate --model runs/demo/final" in said


def test_the_questions_of_the_demo_have_one_answer_each():
    rows = [json.loads(line) for line in DEMO_FACTS.read_text().splitlines()]
    assert len({row["instruction"] for row in rows}) == len(rows)
    assert all(" " not in row["output"].strip() or row["output"].count(" ") <= 2 for row in rows)
