"""The table behind the page "Plan in the browser" is what the planner says today."""

import json
import random
from itertools import product

import pytest

from bench import plan_table
from flexengine.planner.limits import SearchLimits

TEXT = plan_table.TABLE.read_text()
TABLE = json.loads(TEXT)
PLACES = list(product(range(len(plan_table.CARDS)), range(len(plan_table.HOSTS_GIB)), range(len(plan_table.WAYS))))
FEW, MAY_DIFFER = 1, 0.05
"""How many cells are planned again, and by how much speeds may have changed before the table has to be made anew."""


@pytest.mark.thorough
def test_a_cell_is_planned_alike(monkeypatch):
    monkeypatch.setattr("flexengine.planner.limits.LIMITS", SearchLimits())
    for model, (c, h, w) in random.Random(TEXT).sample(list(product(TABLE["cells"], PLACES)), FEW):
        card, host, way = list(plan_table.CARDS)[c], plan_table.HOSTS_GIB[h], list(plan_table.WAYS)[w]
        told, found = TABLE["cells"][model][c][h][w], plan_table.cell(plan_table.flags_of(model, card, host, way))
        assert told.keys() == found.keys(), (model, card, host, way)
        if "tokens_per_s" in told:
            assert found["tokens_per_s"] == pytest.approx(told["tokens_per_s"], rel=MAY_DIFFER), (
                model,
                card,
                host,
                way,
            )


def test_the_table_has_a_cell_for_every_choice():
    assert TABLE["cells"].keys() == set(plan_table.MODELS)
    assert len(TEXT) < 200_000
    for cells in TABLE["cells"].values():
        assert all(cells[c][h][w] for c, h, w in PLACES)
    choices = (TABLE["cards"], tuple(TABLE["hosts_gib"]), TABLE["ways"])
    assert choices == (plan_table.CARDS, plan_table.HOSTS_GIB, plan_table.WAYS)
