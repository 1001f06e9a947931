"""bench/objectives.py on a small model on the CPU, whose figures all come from runs."""

import json
import sys

import pytest

from bench import objectives
from bench.gsm8k_rewards import even, right
from flexengine.hardware.presets import preset
from tests.failures.provoke import write_answering


@pytest.mark.parametrize("objective", ["dpo", "grpo"])
def test_a_run_of_an_objective_and_its_figures(objective, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    model, out = write_answering(tmp_path / "model"), tmp_path / "out.json"
    questions = tmp_path / "questions.jsonl"
    questions.write_text(json.dumps({"question": "2 + 3?", "answer": "2 + 3 = 5\n#### 5"}) + "\n")
    sizes = {"model": model, "steps": 3, "max-seq-len": 64, "max-global-batch-tokens": 256, "max-gpu-mem-gib": 1}
    sizes |= {"device": "cpu", "dtype": "float32", "max-host-mem-gib": 6}
    if objective == "dpo":
        sizes["pairs"] = 3
    else:
        sizes |= {"dataset": questions, "num-generations": 2, "max-completion-length": 4}
    flags = [text for name, value in sizes.items() for text in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", ["objectives", objective, *flags, "--json", str(out)])
    with pytest.raises(SystemExit) as ended:
        objectives.main()
    assert not ended.value.code
    text = out.read_text()
    assert str(tmp_path) not in text
    found = json.loads(text)
    steps, settled = found["steps"], found["settled"]
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert settled["step_s"] == steps[2]["step_s"]
    assert settled["off_prediction"] == steps[2]["step_s"] / steps[2]["predicted_step_s"] - 1
    assert found["plain"]["1"] == steps[0]["step_s"] / steps[0]["predicted_step_s"] - 1
    assert 0 < found["peaks_gib"]["gpu"] <= found["promised_gib"]["gpu"] <= found["budgets_gib"]["gpu"] == 1
    if objective == "grpo":
        parts = settled["generation_s"] + settled["training_s"] + settled["rewarding_s"]
        assert parts == pytest.approx(settled["step_s"])
        assert all(0 <= row["reward_even"] <= 1 and row["reward_right"] == 0 for row in steps)
    assert "off_prediction" in capsys.readouterr().out


def test_rewards_of_answers():
    said = ["so it is 1,234.", [{"role": "assistant", "content": "5 or 6"}], "nothing"]
    assert right(said, ["#### 1234", "#### 5", "#### 7"]) == [1.0, 0.0, 0.0]
    assert even([[2, 3, 4, 6], [1]]) == [0.75, 0.0]
