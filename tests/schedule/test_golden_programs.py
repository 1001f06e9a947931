"""Plans made by hand are lowered to the same programs as before, command for command, and these are proven.

On a mismatch that is meant, look at both programs (`python -m tests.schedule.golden_programs --show`), then `--write`.
"""

import json
from functools import cache

import pytest

from flexengine.schedule.checker import check_program
from tests.schedule.golden_cases import golden_cases
from tests.schedule.golden_programs import COMMAND_DIGITS, GOLDEN, Described, described, first_difference

cases = cache(golden_cases)
STORED = json.loads(GOLDEN.read_text())


def test_stored_plans_are_those_that_are_lowered():
    assert list(STORED) == [case.name for case in cases()]


@pytest.mark.parametrize("number", range(len(STORED)), ids=list(STORED))
def test_programs_are_as_stored(number):
    case = cases()[number]
    programs, stored = described(case), STORED[case.name]
    assert list(stored) == list(programs)
    found = {name: first_difference(program, stored[name]) for name, program in programs.items()}
    assert found == dict.fromkeys(stored, ""), f"{case.name}: {next(filter(None, found.values()))}"


@pytest.mark.parametrize("number", range(len(STORED)), ids=list(STORED))
def test_programs_are_proven(number):
    layout = cases()[number].layout()
    for program in cases()[number].programs(layout).values():
        check_program(program, layout.gpu_bytes, layout.host_bytes)


def test_the_first_command_that_differs_is_named():
    program = Described(["held", "a", "b", "c"], ["fetch a", "fetch b", "fetch c"])
    stored = program.digests()
    assert first_difference(program, stored) == ""
    other = Described(["held", "a", "x", "c"], program.labels).digests()
    assert (
        first_difference(program, other) == "3 commands, stored are 3; the first that differs is number 1, fetch b: b"
    )
    before = Described(["other", "a", "b", "c"], program.labels).digests()
    assert "is what holds before all: held" in first_difference(program, before)
    fewer = {"digest": "", "commands": stored["commands"][:-COMMAND_DIGITS]}
    assert (
        first_difference(program, fewer) == "3 commands, stored are 2; the first that differs is number 2, fetch c: c"
    )
    more = {"digest": "", "commands": stored["commands"] + "----"}
    assert "stored are 4; the first that differs is number 3, which there is no more" in first_difference(program, more)


def test_digests_know_no_names():
    """The same commands on slots of other names, with other labels and contents, are the same."""
    case = cases()[0]
    for program in described(case).values():
        assert not any(label in line for label in program.labels for line in program.lines)
        assert not any(slot.name in line for slot in case.layout().slots for line in program.lines if "[" in slot.name)
