"""What a run says before its first step, --print-config, and --mode auto."""

import re

import pytest

from flexengine import cli
from flexengine.hardware.presets import preset
from flexengine.metrics import Pace
from flexengine.options.train_config import TrainConfig
from flexengine.run import opening

SMALL = "--max-seq-len 32 --max-global-batch-tokens 64 --dtype float32 --device cpu --steps 3"


@pytest.fixture(autouse=True)
def machine(monkeypatch, tmp_path):
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    monkeypatch.chdir(tmp_path)


def said(line: str, capsys) -> list[str]:
    assert cli.main(line.split()) == 0
    return capsys.readouterr().out.splitlines()


def test_a_run_begins_with_five_lines_and_says_what_is_left(capsys):
    lines = said(f"train --model preset:demo {SMALL} --max-gpu-mem-gib 1", capsys)
    first = next(number for number, line in enumerate(lines) if line.startswith("step 1/3"))
    assert [line.partition(":")[0].partition(" ")[0] for line in lines[:first]] == [
        "model", "data", "plan", "machine", "writes",
    ]  # fmt: skip
    assert lines[0].startswith(
        "model preset:demo: RANDOM weights, drawn from --seed 0 (init: random); trains all of 4.0 M"
    )
    assert lines[1].startswith("data: the instructions that come with the package")
    assert re.search(r"budgets found: host .*; left to the system: .* of host memory", lines[3])
    assert lines[4] == "writes: runs/demo-full: log and plan, no model (--save writes it)"
    assert lines[first].endswith(" left")
    assert not next(line for line in lines if line.startswith("step 3/3")).endswith(" left")
    assert any(line.endswith("; runs of fewer than 10 steps are all warm-up") for line in lines)
    more = said(f"train --model preset:demo {SMALL} --max-gpu-mem-gib 1 --overwrite -v --steps 1", capsys)
    assert any("the first sequence, trained between [[ and ]]" in line for line in more)
    assert any(line.startswith("weights: 5 of 5 groups") for line in more)


def test_time_left_goes_by_the_steps_and_what_is_between_them(monkeypatch):
    ends = iter([10.0, 13.0, 17.0])
    monkeypatch.setattr("flexengine.metrics.time.perf_counter", lambda: next(ends))
    pace = Pace()
    assert [pace.left_s(left, 2.0) for left in (10, 9, 8)] == [20.0, 27.0, 28.0]


def test_printed_options_run_again(capsys, tmp_path):
    line = f"--model preset:demo {SMALL} --mode lora --lora-rank 4"
    printed = "\n".join(said(f"train {line} --print-config", capsys))
    (tmp_path / "run.yaml").write_text(printed)
    again = cli.parse_config("flexengine train", ["--config", "run.yaml"])
    assert again == cli.parse_config("flexengine train", line.split()).resolved()
    assert (again.lr, again.output_dir, again.init) == (1e-4, "runs/demo-lora", "random")
    assert not (tmp_path / "runs").exists()


def test_mode_auto_proposes_and_takes_the_first_that_fits(capsys, monkeypatch, whole_demo):
    sizes = "--cuda-graphs never --chunk-tokens 64 --round-tokens 64"
    line = f"train --model preset:demo {SMALL} {sizes} --mode auto --max-gpu-mem-gib"
    assert cli.main([*line.split(), "1"]) == 2
    printed = capsys.readouterr()
    assert re.search(r"  full: \d+ tokens/s predicted, .* GPU and .* host memory\n  lora: \d+ tokens/s", printed.out)
    assert "  lora beside NF4: " in printed.out
    assert "--mode auto proposes --mode full; add --yes to take it, or give that or another --mode" in printed.err
    assert "taken: --mode full" in said(f"{line} 1 --yes --dry-run", capsys)
    lines = said(f"{line} 0.05 --max-host-mem-gib 1.11 --yes --dry-run", capsys)
    assert any(re.match("  full: does not fit: smallest plan needs .* GiB of host memory", text) for text in lines)
    assert any(re.match("taken: --mode lora", text) for text in lines)
    assert cli.main([*line.split(), "0.0001", "--yes", "--dry-run"]) == 2
    assert "INSUFFICIENT_DEVICE_MEMORY" in capsys.readouterr().err


@pytest.mark.parametrize(("answer", "taken"), [("", True), ("y", True), ("no", False)])
def test_mode_auto_asks_on_a_terminal(monkeypatch, answer, taken):
    for stream in ("stdin", "stdout"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    assert opening._says_yes("train?") is taken


def test_options_that_belong_to_one_kind_are_refused_beside_auto():
    with pytest.raises(ValueError, match="--lora-rank 8 is for adapters, got --mode auto; give --mode lora"):
        TrainConfig(model="preset:demo", mode="auto", lora_rank=8)
    with pytest.raises(ValueError, match="--yes answers what --mode auto asks, got --mode full"):
        TrainConfig(model="preset:demo", mode="full", yes=True)
