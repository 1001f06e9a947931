"""Tables of what several GPUs promise: those of the documentation are those that were committed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.ranks_tables import card_lines, largest_stage, lines_of_70b, node_lines
from flexengine.models.registry import open_model

ROOT = Path(__file__).parents[2]


def test_the_documentation_has_the_committed_tables():
    found = json.loads((ROOT / "bench/results/ranks_tables.json").read_text())
    page = (ROOT / "docs/several_gpus.md").read_text().splitlines()
    lines = [*card_lines(found["cards"]), *lines_of_70b(found["70b"]), *node_lines(found["nodes"])]
    assert [line for line in lines if line not in page] == []


def test_the_largest_stage_is_that_of_the_best_cut():
    """On as many stages as there are blocks and a head, the head is alone; on half as many, it still is the largest."""
    spec = open_model("preset:llama-3.1-8b").spec
    head, block, pieces = spec.groups[-1].numel, spec.groups[1].numel, len(spec.blocks) + 1
    assert largest_stage(spec, 1) == pytest.approx(1.0)
    mean = (head + (pieces - 1) * block) / pieces
    assert largest_stage(spec, pieces) == pytest.approx(head / mean)
    assert largest_stage(spec, 17) == pytest.approx(head / mean * 17 / pieces)
