"""`flexengine plan` and `flexengine probe`: what they cannot plan, and files that they cannot write."""

import errno
import io
import json
import sys
import tempfile
from pathlib import Path

import pytest
from provoke import CONFIG, Case, cases, check_message

SMALL = ["--gpu", "rtx-4090", "--max-seq-len", "16", "--max-global-batch-tokens", "32"]
PLANS = (
    Case("plan_without_a_model", ["--gpu", "rtx-4090"], ("required: --model", "--help")),
    Case("plan_unknown_flag", ["--model", "preset:demo", "--htm", "x"], ("unknown flag --htm; did you mean --html",)),
    Case("plan_unknown_card", ["--model", "preset:demo", "--gpu", "rtx-4091"], ("'rtx-4091'", "rtx-4090")),
    Case("plan_card_file_absent", ["--model", "preset:demo", "--gpu", "x.json"], ("x.json",)),
    Case(
        "plan_misspelt_model", ["--model", "preset:dem", "--gpu", "h100"], ("unknown preset 'dem'; did you mean demo",)
    ),
    Case("plan_of_a_damaged_config", ["--model", "model", *SMALL], ("hidden_size='16' in config.json", "fetch")),
    Case("plan_budget_of_zero", ["--model", "preset:demo", "--max-gpu-mem-gib", "0"], ("'0' is not a number above 0",)),
    Case("plan_budget_nan", ["--model", "preset:demo", "--host-mem-gib", "nan"], ("'nan' is not a number above 0",)),
    Case(
        "plan_host_memory_in_bytes",
        ["--model", "preset:demo", *SMALL, "--host-mem-gib", "64e9"],
        ("--host-mem-gib is at most 1048576, got 64000000000.0",),
    ),
    Case(
        "plan_host_smaller_than_the_process",
        ["--model", "preset:demo", *SMALL, "--host-mem-gib", "2"],
        ("--host-mem-gib 2: the process itself takes 3.00 GiB; give more",),
    ),
    Case(
        "plan_comparison_with_a_negative_budget",
        ["--model", "preset:demo", *SMALL, "--compare", "rtx4090:-3"],
        ("--compare rtx4090:-3: a budget must be more than 0 GiB, got -3",),
    ),
    Case(
        "plan_of_negative_clipping",
        ["--model", "preset:demo", *SMALL, "--max-grad-norm", "-1"],
        ("--max-grad-norm must not be negative, got -1.0",),
    ),
    Case("plan_of_a_model_without_a_name", ["--model", "", *SMALL], ("--model is empty: give a .* or preset:NAME",)),
    Case(
        "plan_fp8_on_a_card_without",
        ["--model", "preset:demo", "--gpu", "rtx3090", "--matmul-dtype", "fp8"],
        ("--matmul-dtype fp8: NVIDIA GeForce RTX 3090 multiplies no FP8 operands; that takes .* 8.9", "leave it out"),
    ),
    Case(
        "plan_mxfp8_on_a_card_without",
        ["--model", "preset:demo", "--gpu", "h200", "--matmul-dtype", "mxfp8"],
        ("mxfp8 takes a Blackwell card .*, and the profile of NVIDIA H200 has no rate of such products; leave it out",),
    ),
    Case(
        "plan_fp8_in_float32",
        ["--model", "preset:demo", *SMALL, "--matmul-dtype", "fp8", "--dtype", "float32"],
        ("--matmul-dtype fp8 needs --dtype bfloat16, got --dtype float32",),
    ),
    Case(
        "plan_frozen_block_that_is_not_there",
        ["--model", "odd", *SMALL, "--freeze", "embed", "block.0-2"],
        ("freeze='block.0-2': odd has no such parameters", "there are embed, head, blocks .*, block.0 to block.1, and"),
    ),
    Case(
        "plan_of_nothing_to_train",
        ["--model", "odd", *SMALL, "--freeze", "embed", "blocks", "head"],
        ("freeze=embed blocks head: that is all of odd, and nothing is left to train; leave out what is to",),
    ),
    Case(
        "plan_fp8_of_odd_sizes",
        ["--model", "odd", *SMALL, "--matmul-dtype", "fp8"],
        ("odd: down_proj has 24 input and 16 output features; FP8 products need multiples of 16; leave",),
    ),
    Case(
        "plan_kept_fp8_of_experts",
        ["--model", "preset:olmoe-1b-7b", *SMALL, "--keep-dtype", "fp8"],
        ("keep_dtype=fp8 is for dense gated FFNs, and olmoe-1b-7b has experts; leave --keep-dtype out",),
    ),
    Case(
        "plan_stored_bfloat16_without_delta_rules",
        ["--model", "preset:llama-3.2-1b", *SMALL, "--delta-dtype", "bfloat16"],
        ("delta_dtype=bfloat16 is for gated delta rules, as of Qwen3-Next and Qwen3.5, and llama-3.2-1b has none",),
    ),
    Case(
        "plan_base_of_a_trained_model",
        ["--model", "odd", *SMALL, "--base-dtype", "nf4"],
        ("base_dtype=nf4 stores frozen linear layers in fewer bytes, but all of odd are trained; train adapters",),
    ),
    Case("plan_of_no_tokens", ["--model", "preset:demo", "--max-seq-len", "0"], ("'0' is not a whole number above 0",)),
    Case(
        "plan_cpu_on_a_card", ["--model", "preset:demo", "--device", "cpu", *SMALL], ("--gpu rtx-4090 is a GPU; leave",)
    ),
    Case(
        "plan_page_in_no_folder",
        ["--model", "preset:demo", *SMALL, "--html", "nowhere/x.html"],
        ("--html nowhere/x.html: there is no folder .*nowhere; name a file in a folder that exists",),
    ),
    Case(
        "plan_page_is_a_folder", ["--model", "preset:demo", *SMALL, "--html", "model"], ("--html model: is a folder",)
    ),
    Case(
        "plan_page_of_a_comparison",
        ["--model", "preset:demo", "--compare", "l40s", "--html", "x.html"],
        ("--compare prints one table of several plans; leave --html out",),
    ),
    Case(
        "plan_that_does_not_fit",
        [
            "--model",
            "preset:llama-3.2-1b",
            "--gpu",
            "rtx-4090",
            "--max-gpu-mem-gib",
            "0.5",
            "--max-global-batch-tokens=2048",
        ],
        (
            "needs 2.\\d+ GiB of 0.50 GiB GPU memory: 1.\\d+ GiB are missing",
            "fits with one of --max-gpu-mem-gib 2.\\d+",
        ),
    ),
)


@cases(*PLANS)
def test_plan(case, command, tmp_path):
    for name, changes in (("model", {"hidden_size": "16"}), ("odd", {})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    outcome = command("plan", *case.provoke)
    assert outcome.status == case.status
    check_message(outcome.err, case.says)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "odd"]


PROBES = (
    Case("probe_unknown_preset", ["--preset", "h1000"], ("'h1000'", "h100")),
    Case("probe_preset_and_measuring", ["--preset", "rtx-4090", "--force"], ("measures nothing; leave --force out",)),
    Case("probe_file_of_another_kind", ["--preset", "rtx-4090", "--json", "x.txt"], ("x.txt: profiles end in .json",)),
    Case(
        "probe_file_in_no_folder", ["--preset", "rtx-4090", "--json", "no/x.json"], ("--json no/x.json: there is no f",)
    ),
)


@cases(*PROBES)
def test_probe(case, command, tmp_path):
    outcome = command("probe", *case.provoke)
    assert outcome.status == case.status
    check_message(outcome.err, case.says)
    assert list(tmp_path.iterdir()) == []


def test_folder_that_takes_no_files(command, monkeypatch, tmp_path):
    """As in /proc, where everybody has all rights and nobody can write."""

    def refused(**keywords):
        raise OSError(errno.EACCES, "Permission denied", str(keywords["dir"]))

    monkeypatch.setattr(tempfile, "mkstemp", refused)
    outcome = command("plan", "--model", "preset:demo", *SMALL, "--html", "page.html")
    assert (outcome.status, outcome.out) == (2, "")
    check_message(
        outcome.err, ("--html page.html: no file can be made in .* \\(Permission denied\\); name a file in a folder",)
    )
    assert list(tmp_path.iterdir()) == []


def test_full_disk_below_the_output(command, monkeypatch):
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", Full())
        outcome = command("plan", "--model", "preset:demo", *SMALL, "--json")
    assert outcome.status == 2
    check_message(outcome.err, ("plan: the output: no space left on the disk. Free some or choose another output.",))


WRITES = {
    "--html": ["plan", "--model", "preset:demo", *SMALL, "--html", "there"],
    "--timeline": ["plan", "--model", "preset:demo", *SMALL, "--timeline", "there"],
    "--plan-json": ["plan", "--model", "preset:demo", *SMALL, "--plan-json", "there"],
    "--json": ["probe", "--preset", "rtx-4090", "--json", "there.json"],
}


@pytest.mark.parametrize("flag", WRITES)
def test_disk_full_while_a_file_is_replaced(flag, command, monkeypatch, tmp_path):
    """The file that was there is as it was, and the message names the flag of this place."""
    target = tmp_path / WRITES[flag][-1]
    target.write_text("of yesterday")
    write_text = Path.write_text

    def full(path, text, **keywords):
        write_text(path, text[: len(text) // 2], **keywords)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    outcome = command(*WRITES[flag])
    assert outcome.status == 2
    check_message(
        outcome.err, (f"{target.name}: no space left on the disk \\(.*MiB free\\)", f"choose another {flag}\\.")
    )
    assert list(tmp_path.iterdir()) == [target]
    assert target.read_text() == "of yesterday"
