"""The picture of rooms and arrows in docs/architecture.md, kept true by reading every import in the package."""

import ast
import re
import sys
from collections.abc import Collection, Iterator
from functools import cache
from pathlib import Path

import pytest

from flexengine.models.registry import FAMILIES

PACKAGE = Path(__file__).resolve().parents[1] / "flexengine"
FILES = sorted(PACKAGE.rglob("*.py"))

# A room is a folder, or a module beside the folders. Which rooms each may import; itself always.
ARROWS: dict[str, set[str]] = {
    "kernels": set(),
    "native": set(),
    "plan": set(),
    "random_bits": set(),
    "version": set(),
    "wording": set(),
    "metrics": {"wording"},
    "ops": {"kernels", "random_bits"},
    "optim": {"kernels", "native", "random_bits"},
    "options": {"plan", "wording"},
    "output": {"wording"},
    "parallel": {"native"},
    "checkpoint": {"native", "options", "version", "wording"},
    "hardware": {"native", "ops", "optim", "parallel", "wording"},
    "data": {"checkpoint", "wording"},
    "models": {"checkpoint", "native", "ops", "options", "wording"},
    "request": {"checkpoint", "hardware", "metrics", "models", "options", "plan", "wording"},
    "schedule": {"models", "ops", "optim", "plan"},
    "planner": {"hardware", "metrics", "models", "native", "ops", "plan", "schedule"},
    "runtime": {
        "checkpoint",
        "hardware",
        "kernels",
        "models",
        "native",
        "ops",
        "optim",
        "parallel",
        "plan",
        "schedule",
    },
    "objectives": {"runtime", "ops"},
    "harness": {"data", "ops", "runtime"},
    "serving": {"data", "runtime", "wording"},
    "reports": {"hardware", "metrics", "models", "plan", "planner", "schedule"},
    "api": {
        "hardware",
        "models",
        "native",
        "optim",
        "options",
        "parallel",
        "plan",
        "planner",
        "reports",
        "request",
        "runtime",
    },
    "__init__": {"api", "models", "options", "plan", "run", "version"},
    "run": {
        "api",
        "checkpoint",
        "data",
        "hardware",
        "metrics",
        "models",
        "objectives",
        "ops",
        "optim",
        "options",
        "output",
        "parallel",
        "plan",
        "planner",
        "reports",
        "request",
        "runtime",
        "schedule",
        "wording",
    },
    "commands": {
        "api",
        "checkpoint",
        "data",
        "hardware",
        "harness",
        "metrics",
        "models",
        "objectives",
        "optim",
        "options",
        "plan",
        "planner",
        "reports",
        "request",
        "run",
        "schedule",
        "serving",
        "wording",
    },
    "cli": {"__init__", "commands", "options", "output", "run", "wording"},
    "__main__": {"cli", "output", "parallel"},
}
# Rooms that only describe and decide: torch reaches them by way of ops and models alone.
WITHOUT_TORCH = ("plan", "options", "request", "planner", "reports", "schedule")


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


@cache
def tree_of(path: Path) -> ast.Module:
    """What a file says; parsed once for all tests."""
    return ast.parse(path.read_text())


def statements_of(node: ast.AST) -> Iterator[ast.AST]:
    """Every statement inside, at any depth; most nodes of a tree are parts of expressions."""
    for block in ("body", "orelse", "finalbody", "handlers", "cases"):
        for inside in getattr(node, block, ()):
            yield inside
            yield from statements_of(inside)


@cache
def imports_of(path: Path, top_level_only: bool = False) -> list[tuple[int, str]]:
    """(line, dotted module) of every absolute import; imports under TYPE_CHECKING are for readers and not counted as
    top level."""
    tree = tree_of(path)
    nodes = tree.body if top_level_only else statements_of(tree)
    found = []
    for node in nodes:
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively; write the full name"
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return found


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def test_every_room_is_in_the_picture():
    assert {room_of(path) for path in FILES} <= set(ARROWS)


def test_imports_follow_the_arrows():
    wrong = []
    for path in FILES:
        own = room_of(path)
        for line, module in imports_of(path):
            room = module.split(".")[1] if module.startswith("flexengine.") else own
            if room in ARROWS and room not in ARROWS[own] | {own}:
                wrong.append(f"{name_of(path)}:{line}: {own} must not import {module}")
    assert wrong == []


def test_every_arrow_is_used():
    used = {room: set[str]() for room in ARROWS}
    for path in FILES:
        modules = (module.split(".") for _, module in imports_of(path))
        used[room_of(path)] |= {parts[1] for parts in modules if parts[0] == "flexengine" and len(parts) > 1}
    idle = {room: rooms - used[room] - {"__init__"} for room, rooms in ARROWS.items()}
    assert {room: rooms for room, rooms in idle.items() if rooms} == {}


def test_the_picture_has_no_cycle():
    done: set[str] = set()
    while len(done) < len(ARROWS):
        free = {room for room, uses in ARROWS.items() if room not in done and uses <= done}
        assert free, f"cycle among {sorted(set(ARROWS) - done)}"
        done |= free


def module_of(path: Path) -> str:
    parts = ("flexengine", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def circles_of(uses: dict[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach each other."""
    reached = {node: set(targets) for node, targets in uses.items()}
    for middle in uses:
        for node in uses:
            if middle in reached[node]:
                reached[node] |= reached[middle]
    groups = {tuple(sorted(b for b in reached[a] if a in reached[b])) for a in uses if a in reached[a]}
    return [list(group) for group in sorted(groups)]


def test_modules_import_each_other_in_no_circle():
    """Imports inside functions and for type checkers count: they hide a circle, they do not open it."""
    modules = {module_of(path) for path in FILES}

    def imported(name: str) -> str:
        return name if name in modules else name.rpartition(".")[0]

    uses = {module_of(path): {imported(name) for _, name in imports_of(path)} & modules for path in FILES}
    assert circles_of(uses) == []


def test_circles_are_found():
    uses = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f", "d"}, "f": {"e"}, "g": {"a"}}
    assert circles_of(uses) == [["a", "b", "c"], ["e", "f"]]


def test_planner_and_runtime_never_meet():
    for a, b in (("planner", "runtime"), ("runtime", "planner")):
        assert b not in ARROWS[a]
        assert b not in {used for room in ARROWS[a] for used in ARROWS[room]}


def imported_in(rooms: Collection[str], top_level_only: bool = False) -> Iterator[tuple[str, str]]:
    """The place and the module of every import in rooms."""
    for path in FILES:
        if room_of(path) in rooms:
            for line, module in imports_of(path, top_level_only):
                yield f"{name_of(path)}:{line}", module


def test_ranks_are_known_where_they_belong():
    """In runtime/ and hardware/ modules about ranks import what these share, and the handlers of collectives."""
    own = ("runtime/ranks/", "runtime/execution/handlers.py", "hardware/node_")
    found = imported_in({"runtime", "hardware"})
    others = [
        place for place, module in found if module.startswith("flexengine.parallel.") and not place.startswith(own)
    ]
    assert others == []


def test_planning_needs_no_torch_of_its_own():
    found = imported_in(WITHOUT_TORCH, top_level_only=True)
    assert [place for place, module in found if module.split(".")[0] in ("torch", "triton")] == []


# Modules that run code which they read, and their like in torch, which do so inside.
RUNS_WHAT_IT_READS = ("pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib")
OBJECT_CALLS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list",
                "send_object_list", "recv_object_list", "_recv_bytes_object")  # fmt: skip


def runs_what_it_reads(tree: ast.Module) -> list[str]:
    """What a module has that turns bytes from outside into code: imports and calls."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
            found += [name for name in names if name.split(".")[0] in RUNS_WHAT_IT_READS]
        elif isinstance(node, (ast.Attribute, ast.Name)):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            found += [name] if name in OBJECT_CALLS else []
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            words = {word.arg: ast.unparse(word.value) for word in node.keywords}
            if ast.unparse(node.func) == "torch.load" and words.get("weights_only") != "True":
                found.append("torch.load")
            if node.func.attr == "load" and words.get("allow_pickle", "False") != "False":
                found.append("allow_pickle")
            if node.func.attr == "recv" and not node.args:  # of a connection of multiprocessing, which unpickles
                found.append("recv")
    return found


def test_nothing_that_is_read_is_run():
    found = {name_of(path): runs_what_it_reads(tree_of(path)) for path in FILES}
    assert {name: words for name, words in found.items() if words} == {}


@pytest.mark.parametrize(
    "source",
    ["import pickle", "from torch import distributed as d; d.all_gather_object(a, b)", "torch.load(f)",
     "from dill import loads", "torch.load(f, weights_only=False)", "connection.recv()",
     "np.load(f, allow_pickle=True)"],
)  # fmt: skip
def test_what_runs_what_it_reads_is_found(source):
    assert runs_what_it_reads(ast.parse(source))


def test_kernels_use_torch_and_triton_only():
    allowed = {"torch", "triton", "flexengine", *sys.stdlib_module_names}
    found = imported_in({"kernels"})
    assert [(place, module) for place, module in found if module.split(".")[0] not in allowed] == []


def test_triton_kernels_are_imported_when_first_used():
    found = imported_in(ARROWS.keys() - {"kernels", "native"}, top_level_only=True)
    assert [place for place, module in found if module.startswith(("triton", "flexengine.kernels."))] == []


def code_words(path: Path) -> set[str]:
    """Identifiers and string constants of a file, docstrings left out, in lower case."""
    tree, words = tree_of(path), set()
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            words.add(node.id)
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
        elif isinstance(node, ast.arg):
            words.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            words.add(node.name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            words.add(node.value)
    return {word.lower() for word in words}


def test_models_know_nothing_of_streams_slots_and_budgets():
    found = []
    for path in (path for path in FILES if room_of(path) == "models"):
        words = code_words(path) - {"slot_class"}  # names the kind of a group, which the schedule may share slots among
        forbidden = ("stream", "slot", "budget", "cuda", "offload")
        found += [(name_of(path), word) for word in words if any(each in word for each in forbidden)]
    assert found == []


def test_no_architecture_is_named_outside_models():
    words = {"seed", "got", "aria"}  # which mean other things as well
    makers = {re.sub(r"_?\d.*|_.*", "", family) for family in FAMILIES} - words
    named = re.compile(rf"\b({'|'.join(makers)})")
    found = {}
    rooms = ("runtime", "schedule", "planner", "reports", "parallel", "optim", "serving", "plan")
    for path in (path for path in FILES if room_of(path) in rooms):
        found[name_of(path)] = named.findall(path.read_text().lower())
    assert {name: makers for name, makers in found.items() if makers} == {}


# ---- sizes ---------------------------------------------------------------------------------------------------------

MOST_LINES = {"class": 250, "function": 50, "module": 400}
MOST_PARAMETERS = 8
"""Of functions; what makes a value takes as many as it has fields, and a kernel as many as it has tensors."""
MOST_ROOT_MODULES = 14
MOST_LINES_OF_ADAPTERS = 1450
TOO_LARGE = {
    "ops/base.py": 406,
    "run/trainer.py": 436,
}
"""What is larger than it should be, and by how much at the most: nothing comes to these, and none of them grows."""


def sizes_of(path: Path) -> Iterator[tuple[str, str, int, int]]:
    """Kind, name, lines and parameters of a module and of all classes and functions in it."""
    text, own = path.read_text(), name_of(path)
    yield "module", own, len(text.splitlines()), 0
    for node in statements_of(tree_of(path)):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            is_class = isinstance(node, ast.ClassDef)
            parameters = 0 if is_class else sum(map(len, (node.args.posonlyargs, node.args.args, node.args.kwonlyargs)))
            lines = (node.end_lineno or 0) - node.lineno + 1
            yield "class" if is_class else "function", f"{own}:{node.name}", lines, parameters


def test_nothing_grows_too_large():
    found = [size for path in FILES if room_of(path) != "kernels" for size in sizes_of(path)]
    large = {name: lines for kind, name, lines, _ in found if lines > MOST_LINES[kind]}
    assert {name: lines for name, lines in large.items() if lines > TOO_LARGE.get(name, 0)} == {}
    assert TOO_LARGE.keys() - large.keys() == set(), "no longer too large: leave them out here"
    many = {name for _, name, _, parameters in found if parameters > MOST_PARAMETERS and not name.endswith("__init__")}
    assert many == set()


def test_the_root_has_few_modules():
    assert len([path for path in FILES if path.parent == PACKAGE]) <= MOST_ROOT_MODULES


def test_adapters_take_few_lines():
    """Their ops, and what models say of them."""
    paths = [*PACKAGE.glob("ops/adapters/*.py"), *PACKAGE.glob("models/lora*.py")]
    assert sum(len(path.read_text().splitlines()) for path in paths) <= MOST_LINES_OF_ADAPTERS
