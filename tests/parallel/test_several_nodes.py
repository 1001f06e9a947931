"""Several nodes train to the same bits whatever their number of ranks, and close to one node.

All are processes of this machine; by their environment they take themselves to be on several, each with memory of its
own.
"""

from __future__ import annotations

import numpy as np
import pytest
from engine_helpers import random_weights, tiny_config
from ranks_helper import run_ranks, values_of
from test_several_ranks import (
    LENGTHS,
    Case,
    Shown,
    balanced_experts,
    bf16,
    check_same,
    float32,
    not_finite,
    one_round,
    steps_of,
    streamed,
    train,
    unclipped,
)

from flexengine.runtime import node_gradients


def tied_in_calls() -> Case:
    source = random_weights(tiny_config(tie_word_embeddings=True))
    return Case(source, streamed(source), steps_of(67, LENGTHS, [30], [31, 12, 5, 29]))


def check_close(shown: Shown, expected: Shown) -> None:
    numbers = [[float(x) for x in found.numbers if x not in ("True", "False")] for found in (shown, expected)]
    np.testing.assert_allclose(*numbers, rtol=1e-6)
    for found, wanted in ((shown.gradients, expected.gradients), (shown.weights, expected.weights)):
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(node_gradients, "PIECE_ELEMENTS", 301)


@pytest.mark.parametrize("make", [float32, tied_in_calls], ids=lambda make: make.__name__)
def test_nodes_train_to_the_same_bits_and_close_to_one(make):
    case = make()
    first, *others = values_of(run_ranks(train, 2, 2, case, nodes=2))
    for shown in (*others, *values_of(run_ranks(train, 4, 4, case, nodes=2))):
        check_same(shown, first)
    check_close(first, train(0, 1, case))


@pytest.mark.parametrize("make", [one_round, not_finite, unclipped, balanced_experts], ids=lambda make: make.__name__)
def test_nodes_of_one_rank_train_close_to_one(make):
    case = make()
    first, *others = values_of(run_ranks(train, 3, 3, case, nodes=3))
    for shown in others:
        check_same(shown, first)
    check_close(first, train(0, 1, case))


def test_nodes_train_in_bf16_to_the_same_bits():
    case = bf16()
    case = case._replace(steps=case.steps[:1])
    first = values_of(run_ranks(train, 2, 2, case, nodes=2))[0]
    for shown in values_of(run_ranks(train, 6, 6, case, nodes=2)):
        check_same(shown, first)
