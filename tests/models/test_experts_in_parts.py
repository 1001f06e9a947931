"""Experts that cross the link part by part: equal to transformers, and to themselves under every plan."""

import pytest
from engine_helpers import (
    spec_of,
)
from family_checks import MAX_SEQ_LEN, check_against_transformers
from family_configs import CASES

from flexengine.models import blocks

IN_PARTS = [
    case
    for case, config in CASES.items()
    if any(op.name == "hand_out" for block in spec_of(config).blocks for op in block.ops)
]


@pytest.fixture(autouse=True)
def parts(monkeypatch):
    """Every expert is a part of its own."""
    monkeypatch.setattr(blocks, "PART_ELEMENTS", 1)


@pytest.mark.parametrize("chunk_tokens", [MAX_SEQ_LEN, 20], ids=["whole sequences", "cut sequences"])
@pytest.mark.parametrize("case", IN_PARTS)
def test_parts_match_transformers(case, chunk_tokens, tmp_path):
    check_against_transformers(CASES[case], chunk_tokens, tmp_path)
