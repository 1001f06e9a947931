"""`--trace`, profiles and `flexengine report`: what cannot be recorded, and run folders that cannot be drawn."""

import json
import shutil

import pytest
from provoke import Case, arguments, cases, check_message, write_model

from flexengine import cli
from flexengine.hardware.presets import preset
from flexengine.options.train_config import LOG_FILE, PLAN_FILE, TIMELINE_FILE, TRACE_FILE

RECORDINGS = (
    Case("trace_step_without_trace", {"trace_step": 2}, ("--trace-step 2 says which step --trace measures; give",)),
    Case(
        "trace_step_after_the_end",
        {"trace": True, "trace_step": 3},
        ("--trace-step 3: the run has 2 steps; name one of them, or raise --steps",),
    ),
    Case("trace_step_of_zero", {"trace": True, "trace_step": 0}, ("--trace-step must be more than 0, got 0",)),
    Case("trace_without_a_name", {"trace": ""}, ("--trace is given an empty file name; name a file",)),
    Case("trace_is_a_folder", {"trace": "model"}, ("--trace model is a folder; name a file in it",)),
    Case(
        "trace_under_a_file",
        {"trace": "model/config.json/x.json"},
        ("--trace .*config.json cannot be made: .*is a file, not a folder; choose another path",),
    ),
    Case("trace_of_a_dry_run", {"trace": True, "dry_run": True}, ("--trace and --dry-run contradict each other",)),
    Case(
        "profile_backwards",
        {"profile_start_step": 2, "profile_stop_step": 1},
        ("--profile-start-step 2 comes after --profile-stop-step 1; lower the first",),
    ),
    Case("profile_without_a_start", {"profile_stop_step": 2}, ("--profile-stop-step 2 needs --profile-start-step",)),
    Case(
        "profile_after_the_end",
        {"profile_start_step": 1, "profile_stop_step": 5},
        ("--profile-stop-step 5: the run has 2 steps; name one of them, or raise --steps",),
    ),
    Case(
        "profile_on_the_cpu",
        {"profile_start_step": 1},
        ("--profile-start-step 1: a profile by nsys is of an NVIDIA GPU, .* on the CPU \\(--device cpu\\); --trace",),
    ),
)


@cases(*RECORDINGS)
def test_recordings(case, model, command, known_machine, tmp_path):
    outcome = command("train", *arguments(model="model", output_dir="run", **case.provoke))
    assert outcome.status == case.status
    check_message(outcome.err, case.says)
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def traced_run(tmp_path_factory):
    """The folder of a traced run of two steps, made once."""
    folder = tmp_path_factory.mktemp("traced")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))
        options = {"model": write_model(folder / "model"), "output_dir": folder / "run", "trace": True}
        assert cli.main(["train", *arguments(**options)]) == 0
    return folder / "run"


@pytest.fixture
def run_folder(traced_run, tmp_path):
    """A copy of that run, to be damaged."""
    return shutil.copytree(traced_run, tmp_path / "run")


def edited(name, change):
    """Writes a JSON file of the run folder anew after `change` to its value."""

    def edit(folder):
        value = json.loads((folder / name).read_text())
        change(value)
        (folder / name).write_text(json.dumps(value))

    return edit


def replaced(name, text):
    """Puts a text in the place of a file of the run folder."""
    return lambda folder: (folder / name).write_bytes(text)


def of_pytorch(folder):
    events = [{"ph": "X", "name": "aten::mm", "pid": 1, "tid": 77, "ts": 1.0, "dur": 2.0, "args": {}}]
    (folder / TRACE_FILE).write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))


def simulated(folder):
    (folder / TRACE_FILE).write_bytes((folder / TIMELINE_FILE).read_bytes())


def a_folder_for_a_log(folder):
    (folder / LOG_FILE).unlink()
    (folder / LOG_FILE).mkdir()


DAMAGES = (
    Case(
        "trace_cut_off", replaced(TRACE_FILE, b'{"traceEvents": [{"ph": "X"'), ("trace.json: not valid JSON.*fetch or",)
    ),
    Case("trace_no_text", replaced(TRACE_FILE, b"\xff\xfe\x00"), ("trace.json: no UTF-8 text at byte 0",)),
    Case(
        "trace_of_another_program", of_pytorch, ("trace.json is no trace of flexengine: it has no metadata.*--trace",)
    ),
    Case(
        "trace_that_is_a_list", replaced(TRACE_FILE, b"[1, 2]"), ("is no trace of flexengine: it has no traceEvents",)
    ),
    Case(
        "trace_that_was_simulated",
        simulated,
        ("trace.json is a simulated step, not a measured one; run `flexengine train",),
    ),
    Case(
        "trace_with_a_time_of_text",
        edited(TRACE_FILE, lambda trace: trace["traceEvents"][-1].update(ts="soon")),
        ("trace.json: ts is 'soon', expected a number of at least 0",),
    ),
    Case(
        "trace_with_commands_missing",
        edited(TRACE_FILE, lambda trace: trace["traceEvents"].pop()),
        ("trace.json holds \\d+ commands, its parts name \\d+; run `flexengine train --trace` again",),
    ),
    Case(
        "timeline_of_endless_rounds",
        edited(TIMELINE_FILE, lambda trace: trace["metadata"]["parts"][0].update(repeats=10**12)),
        ("timeline.json: a part runs 1000000000000 times, expected 1 to 1048576",),
    ),
    Case("plan_no_plan", replaced(PLAN_FILE, b"{}"), ("plan.json is no plan of flexengine: 'request'; move it away",)),
    Case("log_cut_off", replaced(LOG_FILE, b'{"step": 1, "step_s"'), ("train_log.jsonl, line 1: not valid JSON",)),
    Case("log_of_something_else", replaced(LOG_FILE, b"[1]\n"), ("train_log.jsonl, line 1 is no step of a run",)),
    Case(
        "log_without_seconds",
        replaced(LOG_FILE, b'{"step": 1, "step_s": null}\n'),
        ("train_log.jsonl, line 1: step_s is None, expected a number of at least 0",),
    ),
    Case("log_is_a_folder", a_folder_for_a_log, ("train_log.jsonl is no file; move it away",)),
    Case("run_with_a_damaged_config", replaced("config.yaml", b"model: [\n"), ("config.yaml is not valid YAML",)),
)


@cases(*DAMAGES)
def test_reports_of_damaged_runs(case, run_folder, command):
    case.provoke(run_folder)
    outcome = command("report", "run")
    assert (outcome.status, outcome.out) == (case.status, "")
    check_message(outcome.err, case.says)
    assert not (run_folder / "report.html").exists()


@pytest.mark.parametrize("damage", [b'{"step": 1, "st\n', b"\x00\xff\n", b"[1]\n"], ids=["cut", "no text", "no step"])
def test_report_of_a_log_with_a_damaged_line(damage, run_folder, command):
    log = run_folder / LOG_FILE
    log.write_bytes(damage + log.read_bytes())
    outcome = command("report", "run", untouched=run_folder / "none")
    says = "wrote run/report.html\n1 damaged lines of run/train_log.jsonl are left out\n"
    assert (outcome.status, outcome.out, outcome.err) == (0, says, "")


def test_every_damage_is_to_a_run_that_can_be_drawn(run_folder, command):
    outcome = command("report", "run", untouched=run_folder / "none")
    assert (outcome.status, outcome.out, outcome.err) == (0, "wrote run/report.html\n", "")


NO_RUNS = (
    Case("report_of_no_folder", ["nowhere"], ("run folder nowhere: there is no such folder; give the --output-dir",)),
    Case("report_of_a_file", ["notes.txt"], ("run folder notes.txt: is a file, not a folder; give the --output-dir",)),
    Case("report_of_another_folder", ["."], ("holds none of plan.json, .*train_log.jsonl; give the --output-dir",)),
    Case("report_without_a_folder", [], ("required: RUN_FOLDER", "--help")),
    Case("report_of_two_folders", [".", "more"], ("unexpected argument 'more'",)),
)


@cases(*NO_RUNS)
def test_reports_of_no_run(case, command, tmp_path):
    (tmp_path / "notes.txt").write_text("")
    outcome = command("report", *case.provoke)
    assert (outcome.status, outcome.out) == (case.status, "")
    check_message(outcome.err, case.says)


def test_report_in_no_folder(run_folder, command):
    outcome = command("report", "run", "--html", "nowhere/page.html")
    assert outcome.status == 2
    check_message(outcome.err, ("--html nowhere/page.html: there is no folder .*nowhere; name a file in a folder",))
