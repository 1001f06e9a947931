"""`flexengine benchmark` in this process: cases, figures, and what changed since an earlier file."""

import contextlib
import io
import json
from subprocess import CompletedProcess

import pytest

from flexengine import cli
from flexengine.hardware.presets import preset

SMALL = ("--device", "cpu", "--dtype", "float32", "--max-global-batch-tokens", "128", "--max-gpu-mem-gib", "0.2")


@pytest.fixture
def here(monkeypatch, tmp_path):
    """Runs of cases in this process, on a machine whose rates are known."""

    def run(command, **_):
        said, wrong = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
            status = cli.main(list(map(str, command[3:])))
        return CompletedProcess(command, status, said.getvalue(), wrong.getvalue())

    monkeypatch.setattr("flexengine.commands.benchmark.subprocess.run", run)
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.chdir(tmp_path)


def test_every_combination_is_a_case_and_changes_are_told(here, capsys, tmp_path):
    flags = ["benchmark", "--model", "preset:demo", *SMALL, "--steps", "3", "--max-host-mem-gib", "4"]
    varied = ["--max-seq-len", "32", "64", "--mode", "full", "lora"]
    assert cli.main([*flags, *varied, "--json", "a.json"]) == 0
    found = json.loads((tmp_path / "a.json").read_text())["cases"]
    assert [(row["case"]["max_seq_len"], row["case"]["mode"]) for row in found] == [
        (32, "full"), (32, "lora"), (64, "full"), (64, "lora"),
    ]  # fmt: skip
    assert all(row["tokens_per_s"] > 0 and row["predicted_step_s"] > 0 for row in found)
    table = capsys.readouterr().out.splitlines()
    assert table[0].split() == ["case", "tokens/s", "step", "predicted", "GPU", "memory", "host", "memory"]
    assert table[1].startswith("--max-seq-len 32 --mode full  ")
    assert len(table) == 6  # one line for the machine

    for row in found:
        row |= {"tokens_per_s": row["tokens_per_s"] / 1e6, "machine": "machine: of yesterday"}
    (tmp_path / "a.json").write_text(json.dumps({"cases": found[:1]}))
    with_others = ["--max-seq-len", "32", "--mode", "full", "--against", "a.json"]
    assert cli.main([*flags, *with_others, "--dtype", "float32", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert "%" in said.splitlines()[1].split()[-1]
    assert said.splitlines()[2].endswith("new")
    assert said.endswith("--against is of another machine: of yesterday\n")


def test_a_case_that_does_not_fit_leaves_the_others(here, capsys):
    budgets = ["--max-gpu-mem-gib", "0.001", "0.2", "--max-host-mem-gib", "4", "--steps", "1", "--max-seq-len", "32"]
    assert cli.main(["benchmark", "--model", "preset:demo", *SMALL[:-2], *budgets]) == 2
    said = capsys.readouterr().out
    assert "\n--max-gpu-mem-gib 0.001: PlanError(INSUFFICIENT_DEVICE_MEMORY)" in said
    assert "\n--max-gpu-mem-gib 0.2 " in said


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "no such file; give one that --json wrote"), ("[]", "[] is no result of flexengine benchmark")],
)
def test_a_file_that_is_no_earlier_result(text, message, tmp_path, capsys):
    path = tmp_path / "a.json"
    if text is not None:
        path.write_text(text)
    assert cli.main(["benchmark", "--model", "preset:demo", "--against", str(path)]) == 2
    assert message in capsys.readouterr().err
