"""`flexengine plan` as a person calls it: text, JSON, files, comparisons, and what it says when nothing fits."""

import json
import shlex
from html import escape

import pytest

from flexengine.cli import main
from flexengine.hardware.presets import preset
from flexengine.options.job import Job
from flexengine.options.option import flag_of, options_of
from flexengine.options.train_config import TrainConfig
from flexengine.plan import Plan

CONFIG = {
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
}
WORK = "--max-seq-len 64 --max-global-batch-tokens 256 --dtype float32 --cuda-graphs never"
OF_ONE_SIZE = f"{WORK} --chunk-tokens 256 --round-tokens 256"
"""Planned in half the time, for what has nothing to do with sizes."""


@pytest.fixture
def model(tmp_path):
    """A model folder with nothing but its config.json."""
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def run(model, capsys):
    """Runs the command with flags written as in a shell; returns (exit status, standard output, standard error)."""

    def run_plan(flags: str, work: str = WORK):
        status = main(["plan", "--model", str(model), *shlex.split(work), *shlex.split(flags)])
        out, err = capsys.readouterr()
        return status, out, err

    return run_plan


def test_a_config_is_enough(run):
    status, out, err = run("--gpu cpu-test --max-gpu-mem-gib 0.004")
    left = "budgets found: host 15.00 GiB; left to the system: 1.00 GiB of host memory\n"
    assert (status, err) == (0, left)
    assert out.startswith("fits: ")
    for word in ("limited by: ", "model small", "GPU memory", "host memory", "speed of light: "):
        assert word in out


def test_json_is_all_that_is_printed(run):
    status, out, _ = run("--gpu rtx4090 --json", OF_ONE_SIZE)
    values = json.loads(out)
    assert status == 0
    assert (values["fits"], values["model"]) == (True, "small")
    assert values["hardware"]["name"] == preset("rtx-4090").name


def test_underscores_numerics_and_pinned_sizes(run):
    flags = (
        "--gpu rtx4090 --json --chunk_tokens=64 --round_tokens 128 --optimizer_state_dtype bfloat16 --recompute full"
    )
    _, out, _ = run(flags, "--max_seq_len 64 --max_global_batch_tokens 256")
    values = json.loads(out)
    assert (values["sizes"]["chunk_tokens"], values["sizes"]["chunks_per_round"], values["sizes"]["rounds"]) == (
        64,
        2,
        2,
    )
    numerics = values["request"]["numerics"]
    assert (numerics["compute"], numerics["master"], numerics["state"]) == ("bfloat16", "split", "bfloat16")
    assert all(not row["gpu"] and not row["host"] for row in values["layers"] if row["kind"] == "block")


def test_trades_are_told_where_they_are_asked_for(run):
    status, out, _ = run("--gpu rtx4090 --max-gpu-mem-gib 2 --json --trades", OF_ONE_SIZE)
    trades = json.loads(out)["trades"]
    assert status == 0
    assert all(trade["gain"] >= 0.02 and trade["changes"] for trade in trades)
    assert [trade["gain"] for trade in trades] == sorted((trade["gain"] for trade in trades), reverse=True)
    status, _, err = run("--gpu rtx4090 --trades --compare 8 12", OF_ONE_SIZE)
    assert (status, "leave --trades out" in err) == (2, True)


def test_gradients_that_nothing_stores(run):
    states = "--gpu rtx4090 --max-grad-norm 0 --optimizer-state-dtype int8 --cuda-graphs auto"
    assert "groups not stored" in run(f"{states} --max-gpu-mem-gib 0.8", OF_ONE_SIZE)[1]


def test_frozen_layers(run):
    _, whole, _ = run("--gpu rtx4090 --json", OF_ONE_SIZE)
    _, out, _ = run("--gpu rtx4090 --json --freeze embed block.0", OF_ONE_SIZE)
    values, before = json.loads(out), json.loads(whole)
    assert [row["update"] == "none" for row in values["groups"][:3]] == [True, True, False]
    assert values["groups"][1]["gradients"] is values["groups"][1]["states"] is values["layers"][1]["input"] is None
    assert values["groups"][1]["gradients_bytes"] == values["groups"][1]["states_bytes"] == 0
    assert values["predicted"]["step_s"] < before["predicted"]["step_s"]
    _, text, _ = run("--gpu rtx4090 --freeze embed block.0", OF_ONE_SIZE)
    assert "frozen: 2 of" in text
    assert "block 0: forward only, as nothing is trained there or below" in text


def test_plan_knows_the_names_of_others_too(run):
    status, out, _ = run("--gpu cpu-test --max-gpu-mem-gib 0.004 --strategy lora --lora-r 2 --compute-dtype fp32")
    assert (status, "adapter" in out) == (0, True)
    for flags, says in (
        ("--batch-size 8", "--batch-size is not an option: a step here is counted in tokens"),
        ("--learning-rate 1e-4", "--lr is an option of train that no plan depends on; leave it out"),
    ):
        status, _, err = run(f"--gpu cpu-test {flags}")
        assert (status, says in err) == (2, True), err


def test_host_memory_is_the_machines_and_the_default_budget(run):
    _, out, _ = run("--gpu rtx4090 --host-mem-gib 32 --json")
    values = json.loads(out)
    assert values["hardware"]["host_total_bytes"] == 32 << 30
    assert values["request"]["max_host_bytes"] == 30 << 30, "a sixteenth is left to the system"
    _, out, _ = run("--gpu rtx4090 --host-mem-gib 32 --max-host-mem-gib 8 --json")
    values = json.loads(out)
    assert (values["hardware"]["host_total_bytes"], values["request"]["max_host_bytes"]) == (32 << 30, 8 << 30)


def test_files(run, tmp_path):
    names = {
        flag: tmp_path / name for flag, name in (("timeline", "t.json"), ("html", "p.html"), ("plan-json", "x.json"))
    }
    status, _, err = run("--gpu cpu-test " + " ".join(f"--{flag} {path}" for flag, path in names.items()))
    assert status == 0
    assert json.loads(names["timeline"].read_text())["traceEvents"]
    assert names["html"].read_text().startswith("<!DOCTYPE html>")
    assert "python -m flexengine plan --model" in names["html"].read_text()
    assert Plan.from_json(names["plan-json"].read_text()).model == "small"
    assert all(f"wrote {path}" in err for path in names.values())


def test_a_profile_file_is_a_machine(run, tmp_path):
    path = tmp_path / "machine.json"
    path.write_text(preset("cpu-test").to_json())
    _, out, _ = run(f"--gpu {path} --json")
    assert json.loads(out)["hardware"] == json.loads(path.read_text())


def test_a_budget_above_the_card_is_for_another_card(run):
    flags = "--gpu rtx4090 --max-gpu-mem-gib 48 --max-host-mem-gib 200"
    card = "the GPU memory budget, 48.00 GiB, is more than the 23.50 GiB of this card: this plan is for another card"
    host = "the host memory budget, 200.00 GiB, is more than the 128.00 GiB of this machine"
    lines = run(flags, OF_ONE_SIZE)[1].splitlines()
    assert f"note: {card}" in lines
    assert any(line.startswith(f"note: {host}") for line in lines)
    assert [note.partition(":")[0] for note in json.loads(run(f"{flags} --json", OF_ONE_SIZE)[1])["notes"]] == [
        card.partition(":")[0],
        host,
    ]
    assert f"rtx4090:48: {card}" in run("--compare rtx4090:20 rtx4090:48", OF_ONE_SIZE)[1].splitlines()
    assert "note:" not in run("--gpu rtx4090 --max-gpu-mem-gib 20 --max-host-mem-gib 128", OF_ONE_SIZE)[1]


def test_on_a_cpu_both_budgets_are_of_one_memory(run):
    assert "note:" not in run("--gpu cpu-test --max-gpu-mem-gib 12 --max-host-mem-gib 4")[1]
    text = "note: the sum of the two memory budgets, 17.00 GiB, is more than the 16.00 GiB of this machine"
    assert text in run("--gpu cpu-test --max-gpu-mem-gib 12 --max-host-mem-gib 5")[1]


# ---- several cases ---------------------------------------------------------------------------------------------


def test_compare_prints_one_table(run):
    status, out, _ = run("--gpu cpu-test --compare 0.0001 1 rtx4090 rtx4090:2", OF_ONE_SIZE)
    head, *rows = out.splitlines()
    assert status == 0
    assert [row.split()[0] for row in rows] == ["0.0001", "1", "rtx4090", "rtx4090:2"]
    assert len({row.index(" yes ") for row in rows[1:]}) == 1
    assert rows[0].endswith(tuple("0123456789"))
    assert " no " in rows[0]
    assert "--max-gpu-mem-gib" in rows[0]
    assert "tokens/s" in head
    assert " of 0.1 MiB " in rows[0]
    assert " of 2.00 GiB " in rows[3]


def test_compare_as_json(run):
    status, out, _ = run("--gpu cpu-test --json --compare 0.0001 1")
    none, some = json.loads(out)["cases"]
    assert status == 0
    assert (none["fits"], some["fits"]) == (False, True)
    assert none["fits_with"][0]["flags"].startswith("--max-gpu-mem-gib")
    assert some["tokens_per_s"] == pytest.approx(256 / some["step_s"])


def test_compare_where_nothing_fits(run):
    assert run("--gpu cpu-test --compare 0.0001 0.0002")[0] == 2


def test_compare_writes_no_files(run, tmp_path):
    status, _, err = run(f"--gpu cpu-test --compare 1 --html {tmp_path / 'p.html'}")
    assert status == 2
    assert "--html" in err


# ---- nothing fits ----------------------------------------------------------------------------------------------


def test_nothing_fits_and_the_advice_works(run, tmp_path):
    page = tmp_path / "no.html"
    status, out, err = run(f"--gpu cpu-test --max-gpu-mem-gib 0.0005 --html {page}")
    assert (status, out) == (2, "")
    assert "INSUFFICIENT_DEVICE_MEMORY" in err
    assert "are missing" in err
    assert "gradient accumulators" in err
    assert "planned: " in err
    assert "Does not fit" in page.read_text()
    advice = [line.strip() for line in err.split("fits with one of\n")[1].splitlines() if line.startswith("  --")]
    flags = advice[0].partition("planned:")[0]
    assert run(f"--gpu cpu-test --max-gpu-mem-gib 0.0005 {flags}")[0] == 0


def test_files_of_a_plan_that_is_none_are_named(run, tmp_path):
    plan, trace = tmp_path / "plan.json", tmp_path / "t.json"
    plan.write_text("of yesterday")
    _, _, err = run(f"--gpu cpu-test --max-gpu-mem-gib 0.0005 --plan-json {plan} --timeline {trace}")
    assert f"not written: nothing fits (--timeline {trace}, --plan-json {plan})" in err
    assert plan.read_text() == "of yesterday"
    assert not trace.exists()


def test_nothing_fits_as_json(run):
    status, out, _ = run("--gpu cpu-test --max-gpu-mem-gib 0.0005 --json")
    values = json.loads(out)
    assert status == 2
    assert values["fits"] is False
    assert values["smallest_plan"]["gpu"]["missing_bytes"] > 0


# ---- wrong input -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--gpu rtx9999", "rtx-4090"),
        ("--gpu nowhere.json", "nowhere.json"),
        ("--gpu rtx4090 --device cpu", "--device cpu"),
        ("--gpu cpu-test --html /nowhere/at/all/p.html", "--html"),
        ("--gpu cpu-test --max-seq-len 512", "--max-seq-len 512"),
        ("--gpu cpu-test --network-gbit-per-s 100", "is about several nodes, and there is one; give --nodes"),
        ("--gpu cpu-test --transport stages", "--transport stages is about several GPUs, and there is one"),
        ("--gpu cpu-test --nodes 2 --transport split", "--transport split is about several GPUs of a node, and each"),
        (
            "--gpu cpu-test --gpus 2 --transport stages --max-disk-gib 1",
            "GPUs share --max-disk-gib 1.0 with --transport relay",
        ),
        ("--gpu cpu-test --gpus 2 --nodes 2 --max-disk-gib 1", "--max-disk-gib 1.0 is about the GPUs of one node"),
        ("--gpu cpu-test --lora-alpha 16", "--lora-alpha 16.0 is for adapters, got --mode full; give --mode lora"),
        ("--gpu cpu-test --chunk-tokens 48 --round-tokens 100", "works with"),
        ("--gpu cpu-test --host-mem-gib 0.5", "--host-mem-gib 0.5: the process itself takes 1.00 GiB; give more"),
        ("--gpu cpu-test --host-mem-gib 1e300", "--host-mem-gib is at most 1048576, got 1e+300"),
        ("--gpu cpu-test --compare 0", "--compare 0: a budget must be more than 0 GiB, got 0"),
        ("--gpu cpu-test --compare 1 rtx4090:-3", "--compare rtx4090:-3: a budget must be more than 0 GiB, got -3"),
        ("--gpu cpu-test --compare nan", "--compare nan: a budget must be more than 0 GiB"),
        ("--gpu cpu-test --compare 1e300", "--compare 1e300: a budget is at most 1048576"),
    ],
    ids=str,
)
def test_wrong_input_is_one_message(run, flags, message):
    status, out, err = run(flags)
    assert (status, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


LARGEST = {
    name: option.value_type(option.most)
    for name, option in options_of(Job).items()
    if option.most is not None and option.decides_plan
}


def test_sizes_and_budgets_have_limits():
    sizes = {"max_seq_len", "max_global_batch_tokens", "chunk_tokens", "round_tokens", "round_multiple"}
    sizes |= {"max_image_tokens", "max_disk_gib"}
    assert set(LARGEST) == {*sizes, "max_gpu_mem_gib", "max_host_mem_gib", "lora_rank", "lora_alpha", "lora_dropout"}


@pytest.mark.parametrize("name", LARGEST)
def test_limits_are_those_of_train(run, name):
    options = {name: LARGEST[name] + 1}
    if name == "max_seq_len":
        options["max_global_batch_tokens"] = LARGEST["max_global_batch_tokens"]
    with pytest.raises(ValueError, match="is at most") as refused:
        TrainConfig(model="preset:demo", data_source="synthetic", **options)
    flags = " ".join(f"{flag_of(option)} {value}" for option, value in options.items())
    assert run(f"--gpu cpu-test {flags}") == (2, "", f"flexengine plan: {refused.value}\n")


def test_an_empty_name_is_no_folder(capsys):
    assert main(["plan", "--model", "", "--gpu", "cpu-test"]) == 2
    assert "--model is empty" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--max-gpu-mem-gib 0", "--chunk-tokens many", "--mode halfway", "--gpus rtx4090"])
def test_wrong_flags_end_with_status_2(run, flags):
    with pytest.raises(SystemExit) as caught:
        run(flags)
    assert caught.value.code == 2


def test_without_a_gpu_the_cards_are_listed(run, monkeypatch):
    import torch  # noqa: PLC0415

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, _, err = run("")
    assert status == 2
    assert "rtx-4090" in err
    assert "--device cpu" in err


def test_help_tells_units_and_defaults(capsys):
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--help"])
    out = capsys.readouterr().out
    assert caught.value.code == 0
    assert "preset:llama-3.1-8b" in out
    for flag in ("--max-gpu-mem-gib", "--max-seq-len", "--optimizer-state-dtype", "--timeline", "--compare"):
        assert flag in out
    assert out.count("(default:") >= 12


# ---- objectives ------------------------------------------------------------------------------------------------

GRPO = "--objective grpo --num-generations 2 --max-completion-length 16"


@pytest.mark.parametrize(
    ("flags", "parts", "beside"),
    [
        ("--objective dpo", ["pass for log-probabilities", "pass that trains"], "once before them the reference, "),
        ("--objective simpo", ["pass for log-probabilities", "pass that trains"], ""),
        (
            f"{GRPO} --num-iterations 2 --beta 0.1 --mode lora",
            ["completions", "rewards", "pass beneath adapters", "passes for log-probabilities", "updates"],
            "; 4 completions of full length, 4 at a time",
        ),
    ],
)
def test_parts_of_an_objective_are_those_that_train_tells(
    run, model, tmp_path, monkeypatch, capsys, flags, parts, beside
):
    budgets = "--max-gpu-mem-gib 0.01 --max-host-mem-gib 4"
    status, out, _ = run(f"--gpu cpu-test {budgets} {flags}")
    line = out.splitlines()[-1]
    assert status == 0
    assert line.startswith(f"objective {flags.split()[1]}: predicted ")
    assert all(f"{part} " in line for part in parts)
    assert beside in line
    _, out, _ = run(f"--gpu cpu-test {budgets} {flags} --json --html {tmp_path / 'plan.html'}")
    assert escape(line) in (tmp_path / "plan.html").read_text()
    found = json.loads(out)["objective"]
    assert list(found["parts_s"]) == parts
    assert found["step_s"] == sum(found["parts_s"].values())
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    (tmp_path / "data.jsonl").write_text("{}\n")
    rewards = "--rewards r.py:f" if "grpo" in flags else ""
    asked = (
        f"--dataset {tmp_path}/data.jsonl --output-dir {tmp_path}/run --init random --device cpu --dry-run {rewards}"
    )
    assert main(["train", "--model", str(model), *shlex.split(f"{WORK} {budgets} {flags} {asked}")]) == 0
    assert line in capsys.readouterr().out.splitlines()


def test_what_writes_completions_counts_on_the_host_of_a_gpu(run):
    """Also where a plan without them would take all of the budget."""
    budgets = "--gpu h200 --dtype bfloat16 --max-gpu-mem-gib 4"
    memory = json.loads(run(f"{budgets} --max-host-mem-gib 4 --json", OF_ONE_SIZE)[1])["memory"]["host"]
    more = json.loads(run(f"{budgets} --max-host-mem-gib 4 --json {GRPO}", OF_ONE_SIZE)[1])["memory"]["host"]
    assert more["bytes"] - memory["bytes"] == 112 * 2**20
    assert more["bytes"] == sum(more["categories"].values())
    status, _, err = run(f"{budgets} --max-host-mem-gib {(memory['bytes'] + 2**20) / 2**30} {GRPO}", OF_ONE_SIZE)
    assert status == 2
    assert "and what writes it 0.11 GiB of the host's" in err


def test_completions_get_the_room_that_a_plan_leaves(run, model, tmp_path, monkeypatch, capsys):
    """As if no slot of the plan were free between steps: what the budget has left is theirs, and one has to fit."""
    monkeypatch.setattr("flexengine.run.step_prediction.StepPredictor.num_caches", lambda *_: 0)
    sequence_bytes = 63 * 3 * 2 * 2 * 32 * 4
    status, out, _ = run(f"--gpu cpu-test --max-gpu-mem-gib 0.02 --json {GRPO}")
    memory = json.loads(out)["memory"]["gpu"]
    assert status == 0
    assert memory["categories"]["caches of sequences"] == 4 * sequence_bytes
    assert memory["bytes"] == sum(memory["categories"].values()) <= memory["budget_bytes"]
    monkeypatch.setattr("flexengine.run.step_prediction.StepPredictor.cache_bytes", lambda *_: 2 << 20)
    status, _, err = run(f"--gpu cpu-test --max-gpu-mem-gib 0.003 {GRPO}")
    says = "beside that, the cache of one completion of 64 tokens takes 2.0 MiB of the GPU budget"
    assert status == 2
    assert says in err
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
    (tmp_path / "data.jsonl").write_text("{}\n")
    asked = (
        f"{WORK} --max-gpu-mem-gib 0.003 --max-host-mem-gib 4 {GRPO} --rewards r.py:f --dataset {tmp_path}/data.jsonl"
    )
    asked += f" --output-dir {tmp_path}/run --init random --device cpu --dry-run"
    assert main(["train", "--model", str(model), *shlex.split(asked)]) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--num-generations 3", "--num-generations 3 is about completions of grpo, got --objective sft"),
        (f"{GRPO} --max-seq-len 16", "--max-completion-length 16 leaves nothing of --max-seq-len 16 for prompts"),
        ("--objective dpo --compare 1 2", "--compare prints steps of sft, and --objective is dpo"),
        ("--objective grpo --rewards r.py:f", "--rewards is an option of train that no plan depends on"),
    ],
)
def test_objectives_that_cannot_be_planned(run, flags, says):
    status, _, err = run(f"--gpu cpu-test {flags}")
    assert (status, says in err) == (2, True), err
