"""Fixtures of the tests of failures: a small model, a profile that needs no measuring, and the command line."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flexengine import cli
from flexengine.hardware.presets import preset

HELPERS = str(Path(__file__).resolve().parent)
if HELPERS not in sys.path:
    sys.path.append(HELPERS)

from provoke import Outcome, fingerprint, half_written, write_model  # noqa: E402, found from here on


@pytest.fixture
def known_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The profile of the tests of the planner instead of a measured one, which takes seconds."""
    monkeypatch.setattr("flexengine.api.probe", lambda *_, **__: preset("cpu-test"))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A small model in two shards, to be damaged."""
    return write_model(tmp_path / "model")


@pytest.fixture
def command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable:
    """Runs a command line in this process, in a working folder of its own, and holds it to what failures promise:
    files below `untouched` (default: all) are as they were, and nothing is half-written."""
    monkeypatch.chdir(tmp_path)

    def run(*argv: str, untouched: Path = tmp_path) -> Outcome:
        before = fingerprint(untouched)
        capsys.readouterr()
        try:
            status = cli.main(list(argv))
        except SystemExit as stopped:
            status = int(stopped.code or 0)
        captured = capsys.readouterr()
        assert before.items() <= fingerprint(untouched).items(), "a file that was there has changed"
        assert not half_written(tmp_path)
        return Outcome(status, captured.out, captured.err)

    return run
