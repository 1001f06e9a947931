"""Kernels are not compiled for particular counts of tokens.

Triton compiles a kernel anew for an integer that is 1, or a multiple of 16, where others were not. Widths rarely
change; counts of tokens change with every ragged batch, and each compilation takes seconds inside a step.
"""

import ast
from pathlib import Path

import pytest

import flexengine.kernels

COUNTS = {"count", "tokens", "slots", "group_rows", "row_tiles", "share", "num_rows", "sequences", "before"}
FILES = sorted(Path(flexengine.kernels.__file__).parent.glob("*.py"))


def _kernels(path: Path):
    """Launched functions of a file with the decorator that compiles them."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
            yield node, next(d for d in node.decorator_list if "jit" in ast.unparse(d))


def _unspecialised(decorator: ast.expr) -> set[str]:
    """Names that the decorator leaves general."""
    found = [node.value for node in ast.walk(decorator) if isinstance(node, ast.Constant)]
    return {name for name in found if isinstance(name, str)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_counts_of_tokens_are_left_general(path):
    for kernel, decorator in _kernels(path):
        counts = {argument.arg for argument in kernel.args.args} & COUNTS
        assert counts <= _unspecialised(decorator), f"{path.name}: {kernel.name}"


def test_there_are_kernels_with_counts():
    found = [kernel for path in FILES for kernel, _ in _kernels(path)]
    assert sum(bool({a.arg for a in kernel.args.args} & COUNTS) for kernel in found) > 20
