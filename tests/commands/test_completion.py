"""Tab completion: the script that is printed completes commands, flags and values in shells."""

import shlex
import shutil
import subprocess

import pytest

from flexengine import cli
from flexengine.commands.completion import parser_of
from flexengine.options.option import options_of
from flexengine.options.train_config import TrainConfig
from flexengine.wording import EXAMPLES

BASH = 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _flexengine; echo "${COMPREPLY[@]}"'
WORDS = {
    ("flexengine", "tr"): ["train"],
    ("flexengine", "train", "--mode", ""): ["full", "lora", "auto"],
    ("flexengine", "train", "--max-gpu"): ["--max-gpu-mem-gib"],
    ("flexengine", "plan", "--model", "x", "--opt"): ["--optimizer", "--optimizer-state-dtype"],
    ("flexengine", "data", "pre"): ["preview"],
    ("flexengine", "data", "preview", "--model", "x", "--reco"): ["--records"],
    ("flexengine", "train", "--dataset", "rows"): [],  # files: those that the shell itself completes
}


@pytest.fixture
def script(tmp_path, capsys):
    assert cli.main(["completion"]) == 0
    path = tmp_path / "completion.sh"
    path.write_text(capsys.readouterr().out)
    return path


def test_the_shell_completes_commands_flags_and_values(script):
    for words, expected in WORDS.items():
        said = subprocess.run(["bash", "-c", BASH, "-", script, *words], capture_output=True, text=True, check=True)
        assert (said.stdout.split(), said.stderr) == (expected, "")
    text = script.read_text()
    assert all(f" {option.flag} " in text for option in options_of(TrainConfig).values())
    assert all(f'*" {name} "*" -"*)' in text for name in cli.COMMANDS if name != "completion")


@pytest.mark.parametrize("command", EXAMPLES)
def test_help_shows_examples_that_are_read(command, capsys):
    name, *within = command.split()
    parser = parser_of(cli.COMMANDS[name].run)
    for line in EXAMPLES[command]:
        parser.parse_args([*within, *shlex.split(line)] if command != "demo" else [])
    with pytest.raises(SystemExit, match=r"^0$"):
        parser.parse_args([*within, "--help"])
    assert f"examples:\n  flexengine {command}" in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh_reads_the_script(script):
    asked = f'source "{script}" && print ${{_comps[flexengine]}}'
    said = subprocess.run(["zsh", "-fc", asked], capture_output=True, text=True, check=True)
    assert "_flexengine" in said.stdout
