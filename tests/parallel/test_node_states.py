"""Nodes that divide the optimizer states train to the bits of nodes that each have all of them."""

from __future__ import annotations

import pytest
from rank_cases import Case, adapters_of_experts_in_parts, bf16, not_finite, tied
from ranks_helper import run_ranks, values_of
from test_several_ranks import check_same, train

from flexengine.schedule import node_states


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 301)


def check_bits(case: Case, ranks: int, nodes: int, *, split: bool = False) -> None:
    whole = values_of(run_ranks(train, nodes, nodes, case, nodes=nodes))
    for shown in values_of(run_ranks(train, ranks, ranks, case._replace(by_nodes=True, split=split), nodes=nodes)):
        check_same(shown, whole[0])


def test_states_of_what_the_cpu_updates_are_divided():
    """The GPU updates every other group, whose states each node has."""
    check_bits(bf16(), 2, 2)


def test_a_step_that_is_not_finite():
    check_bits(not_finite(), 3, 3)


def test_a_tied_embedding_on_nodes_of_two_ranks_that_split():
    check_bits(tied(), 4, 2, split=True)


def test_adapters_of_experts_in_parts_on_nodes_of_two_ranks():
    check_bits(adapters_of_experts_in_parts(), 4, 2)
