"""docs/commands.md beside the code: every kind that is lowered has a handler and a row, which names what exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "flexengine"
PAGE = ROOT / "docs" / "commands.md"
PLACE = re.compile(r"`([\w/]+\.py)(?::(\w+))?`")
LOWERING = sorted((PACKAGE / "schedule").rglob("*.py"))
HANDLERS = ("runtime/execution/handlers.py", "runtime/ranks/split_handlers.py")


def tables() -> list[list[list[str]]]:
    """The cells of the page's tables, without their heads."""
    found: list[list[list[str]]] = [[]]
    for line in PAGE.read_text().splitlines():
        if line.startswith("|"):
            found[-1].append([cell.strip() for cell in line.strip("|").split("|")])
        elif found[-1]:
            found.append([])
    return [table[2:] for table in found if table]


ROWS = {row[0].strip("`"): row[1:] for row in tables()[0]}
PRICES = {row[0] for row in tables()[1]}


def makes_a_command(call: ast.Call) -> bool:
    """Whether the first argument is the kind of a command: of a program's builder, or of what makes calls of layers."""
    if isinstance(call.func, ast.Attribute):
        has_stream = len(call.args) > 2 and "stream" in ast.unparse(call.args[2]).lower()
        return call.func.attr == "_use_kept" or (call.func.attr == "add" and has_stream)
    return ast.unparse(call.func) == "ComputeCall"


@cache
def lowered(path: Path) -> set[str]:
    """The kinds of commands that a file makes."""
    calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args]
    kinds = (ast.walk(call.args[0]) for call in calls if makes_a_command(call))
    copies = {"copy"} if any(isinstance(c.func, ast.Attribute) and c.func.attr == "add_copy" for c in calls) else set()
    return copies | {each.value for found in kinds for each in found if isinstance(each, ast.Constant)}


@cache
def handled() -> dict[str, str]:
    """The handler of every kind but copies, as the tables of handlers name it."""
    found = dict[str, str]()
    for file in HANDLERS:
        for node in ast.walk(ast.parse((PACKAGE / file).read_text())):
            if isinstance(node, ast.Dict):
                pairs = zip(node.keys, node.values, strict=True)
                found |= {k.value: f"{file}:{v.attr}" for k, v in pairs if k and isinstance(v, ast.Attribute)}
            elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "LAYER_KINDS":
                found |= dict.fromkeys(ast.literal_eval(node.value), f"{file}:_run_layer")
    return found


def test_every_kind_is_lowered_handled_and_has_a_row():
    kinds = set().union(*map(lowered, LOWERING))
    assert kinds == set(ROWS)
    assert {"copy", *handled()} == set(ROWS)


@pytest.mark.parametrize("kind", ROWS)
def test_a_row_says_what_the_code_does(kind):
    _, lowering, handler, price, _ = ROWS[kind]
    assert {PACKAGE / file for file, _ in PLACE.findall(lowering)} == {p for p in LOWERING if kind in lowered(p)}
    assert kind == "copy" or [":".join(place) for place in PLACE.findall(handler)] == [handled()[kind]]
    assert {each.removeprefix("or ") for each in price.split(", ")} <= PRICES


def test_functions_that_are_named_exist():
    for file, name in PLACE.findall(PAGE.read_text()):
        text = (PACKAGE / file).read_text() if not file.startswith("tests/") else ""
        assert not name or re.search(rf"(def|class) {name}\(", text), f"{file} has no function {name}"
