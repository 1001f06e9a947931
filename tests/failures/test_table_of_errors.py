"""docs/errors.md lists failures that are really provoked: its last column names cases of the tests here."""

import re
from pathlib import Path

import pytest

TABLE = Path(__file__).resolve().parents[2] / "docs" / "errors.md"
CASE = re.compile(r"\| (?:[0-9]+|\w+Error) \| .* \| `(\w+)` \|$")


def listed() -> list[str]:
    return [match.group(1) for line in TABLE.read_text().splitlines() if (match := CASE.search(line))]


@pytest.mark.skipif(not TABLE.is_file(), reason="docs/ is not beside the tests")
def test_every_listed_failure_is_provoked(request):
    provoked = {name for item in request.session.items for name in re.split(r"[\[\]]", item.name)}
    if len(provoked) < 5000:
        pytest.skip("only some of the tests were collected")
    names = listed()
    assert len(names) == len(set(names)) >= 60
    assert [name for name in names if name not in provoked] == []


@pytest.mark.skipif(not TABLE.is_file(), reason="docs/ is not beside the tests")
def test_every_row_is_whole():
    """Five columns, the last of which names a case; below headings in bold and the heads of the tables."""
    rows = [line for line in TABLE.read_text().splitlines() if line.count(" | ") == 4]
    rows = [row for row in rows if not row.startswith(("| **", "| what happened"))]
    assert len(rows) >= 60
    assert [row for row in rows if not CASE.search(row)] == []
