"""`flexengine check`: a model that computes what transformers does passes; of one that does not the op is named."""

from dataclasses import replace

import pytest
from engine_helpers import saved_model, tiny_config
from family_configs import CASES, FAMILY_CASES

from flexengine import cli
from flexengine.commands.check import check
from flexengine.models.variant_rows import VARIANTS


@pytest.mark.parametrize(("family", "dtype"), [("qwen3", "float32"), ("granitemoe", "float32"), ("glm4", "float64")])
def test_what_is_the_same_passes(family, dtype, tmp_path, capsys):
    saved_model(tmp_path, CASES[FAMILY_CASES[family]])
    assert cli.main(["check", str(tmp_path), "--steps", "2", "--dtype", dtype, "--ids", "5,17,3,29,11"]) == 0
    printed = capsys.readouterr().out
    assert "step 2: loss" in printed
    assert "all is within" in printed


def test_every_op_with_parameters_is_compared(tmp_path):
    saved_model(tmp_path, tiny_config())
    rows = {(row.layer, row.op): row for row in check(tmp_path).rows}
    names = ("attn_norm", "qkv_proj", "o_proj", "mlp_norm", "gate_up_proj", "down_proj")
    compared = [rows["block.1", name] for name in names]
    assert all(row.forward is not None and row.backward is not None for row in compared)
    assert rows["block.1", "rope"].forward is None


def test_the_first_difference_is_named(tmp_path, monkeypatch, capsys):
    saved_model(tmp_path, CASES["qwen3"])
    other = replace(VARIANTS["qwen3"], eps=("another_eps", 0.5))
    monkeypatch.setitem(VARIANTS, "qwen3", other)
    assert cli.main(["check", str(tmp_path)]) == 1
    assert "first difference beyond 0.0001: block.0 attn_norm: forward" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["preset:demo"], "preset:demo has no weights to compare"),
        (["{folder}", "--steps", "0"], "--steps 0: expected 1 or more"),
        (["{folder}", "--ids", "5,67"], "--ids: expected two tokens or more from 0 to 66, got [5, 67]"),
    ],
)
def test_input_that_cannot_be_compared_has_one_message(arguments, message, tmp_path, capsys):
    saved_model(tmp_path, tiny_config())
    assert cli.main(["check", *(a.format(folder=tmp_path) for a in arguments)]) == 2
    assert message in capsys.readouterr().err
