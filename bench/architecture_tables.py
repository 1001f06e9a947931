"""Writes the tables of docs/architectures.md: types that train, and what others lack.

python -m bench.architecture_tables
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import flexengine
from flexengine.models.registry import FAMILIES
from flexengine.models.towers.description import LAYOUTS
from flexengine.models.unknown import MISSING_IN_TYPES

ROOT = Path(__file__).resolve().parent.parent
DOC = ROOT / "docs" / "architectures.md"
HEADS = {
    "families": ("model_type", "checkpoints", "beside Llama's block", "configs compared", "file", "lines"),
    "missing": ("missing for ops of their own", "types"),
}


def rows(table: str) -> Iterator[tuple[str, ...]]:
    """Give the cells of a table's rows."""
    if table == "missing":
        for feature, types in MISSING_IN_TYPES.items():
            yield feature, ", ".join(f"`{name}`" for name in types.split())
        return
    for name, family in FAMILIES.items():
        module = family.build.__module__.partition(".")[2].replace(".", "/")
        path = Path(flexengine.__file__).parent / f"{module}.py"
        lines = len(path.read_text(encoding="utf-8").splitlines())
        yield (
            f"`{name}`",
            family.checkpoints + (" and images" if name in LAYOUTS else ""),
            family.options,
            str(family.configs_compared),
            f"`{module}.py`",
            str(lines),
        )


def with_tables(text: str) -> str:
    """The page with its tables as they should be. Raises ValueError where it lacks the head of one."""
    for table, head in HEADS.items():
        start = text.index(_line(head))
        end = text.index("\n\n", start)
        body = [head, tuple("---" for _ in head), *rows(table)]
        text = (
            text[:start] + "\n".join(map(_line, body)).replace("| --- ", "|---").replace("--- |", "---|") + text[end:]
        )
    return text


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    DOC.write_text(with_tables(DOC.read_text(encoding="utf-8")), encoding="utf-8")
