"""Several nodes train to the same bits whatever their number of ranks, and close to one node.

All are processes of this machine; by their environment they take themselves to be on several, each with memory of its
own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from engine_helpers import FLOAT32, random_batch, random_weights, tiny_config
from rank_cases import LENGTHS, Case, balanced_experts, bf16, float32, not_finite, one_round, steps_of, streamed
from ranks_helper import run_ranks, values_of
from test_from_pretrained import JOB, profile
from test_several_ranks import Shown, change_plans, check_same, opened, several_plans, train

from flexengine import from_pretrained
from flexengine.parallel.control import Control
from flexengine.parallel.nodes import NodeLink
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.signals import RankLost
from flexengine.parallel.team import leave
from flexengine.runtime.execution.in_order import InOrder
from flexengine.schedule.commands import Command
from flexengine.schedule.ranks import node_exchange


def tied_in_calls() -> Case:
    source = random_weights(tiny_config(tie_word_embeddings=True))
    return Case(source, streamed(source), steps_of(67, LENGTHS, [30], [31, 12, 5, 29]))


def check_close(shown: Shown, expected: Shown) -> None:
    numbers = [[float(x) for x in found.numbers if x not in ("True", "False")] for found in (shown, expected)]
    np.testing.assert_allclose(*numbers, rtol=1e-6)
    for found, wanted in ((shown.gradients, expected.gradients), (shown.weights, expected.weights)):
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=3e-4, atol=1e-6, err_msg=name)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(node_exchange, "PIECE_ELEMENTS", 301)


@pytest.mark.parametrize(
    ("make", "splits"), [(float32, [False]), (tied_in_calls, [False, True])], ids=["float32", "tied_in_calls"]
)
def test_nodes_train_to_the_same_bits_and_close_to_one(make, splits):
    """Also where ranks of a node walk the layers together."""
    case = make()
    first, *others = values_of(run_ranks(train, 2, 2, case, nodes=2))
    for split in splits:
        others += values_of(run_ranks(train, 4, 4, case._replace(split=split), nodes=2))
    for shown in others:
        check_same(shown, first)
    check_close(first, train(0, 1, case))


@pytest.mark.parametrize("make", [one_round, not_finite, balanced_experts], ids=lambda make: make.__name__)
def test_nodes_of_one_rank_train_close_to_one(make):
    case = make()
    first, *others = values_of(run_ranks(train, 3, 3, case, nodes=3))
    for shown in others:
        check_same(shown, first)
    check_close(first, train(0, 1, case))


def test_nodes_that_exchange_bf16_train_to_the_same_bits():
    """Of gradients that each node stores in float32."""
    case = bf16()
    numerics = replace(case.plan.request.numerics, grad="float32")
    request = replace(case.plan.request, numerics=numerics, exchange="bfloat16")
    case = case._replace(steps=case.steps[:1], plan=replace(case.plan, request=request))
    first = values_of(run_ranks(train, 2, 2, case, nodes=2))[0]
    for shown in values_of(run_ranks(train, 6, 6, case, nodes=2)):
        check_same(shown, first)


def added(rank: int, stored: torch.dtype, sent: torch.dtype) -> list[tuple[Any, float]]:
    """What a node of three has of pieces that all have added, and its squares; the last node has run no round."""
    ranks = Ranks.of_environment()
    link = NodeLink(Control.open(ranks))
    pieces = [piece.to(stored) for piece in pieces_of_node(rank)]
    squares = link.add(pieces, range(2), torch.float32, sent)
    return [(piece.float().numpy(), square) for piece, square in zip(pieces, squares, strict=True)]


def pieces_of_node(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(n, generator=generator) if rank < 2 else torch.full((n,), torch.nan) for n in (5000, 1, 7, 301)]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=["stored in bf16", "in float32"])
def test_sums_are_those_of_what_nodes_send(stored):
    """Copies and sums are rounded to bf16, and nothing else."""
    told = values_of(run_ranks(added, 3, stored, torch.bfloat16, nodes=3))
    for number, (first, second) in enumerate(zip(pieces_of_node(0), pieces_of_node(1), strict=True)):
        expected = (first.bfloat16().float() + second.bfloat16().float()).bfloat16().float()
        for found in told:
            np.testing.assert_array_equal(found[number][0], expected.numpy())
        assert sum(found[number][1] for found in told) == pytest.approx(float(expected.double().square().sum()))


def adds_meanwhile(rank: int, case: Case) -> bool:
    """Whether nodes have added up the head's gradient before the last round's backward comes to the embedding."""
    added, met = threading.Event(), list[bool]()
    send_sum, execute = NodeLink._send_sum, InOrder.execute

    def sent(self: NodeLink, exchange: Any) -> Any:
        added.set()
        return send_sum(self, exchange)

    def executed(self: InOrder, command: Command, handler: Any, copies: Any) -> None:
        if (command.name.verb, getattr(command.args, "layer", None)) == ("backward", 0):
            met.append(added.wait(20.0))
        execute(self, command, handler, copies)

    NodeLink._send_sum, InOrder.execute = sent, executed
    engine = opened(rank, 2, case)
    engine.train_step(case.steps[0][0])
    engine.close()
    return met == [True]


def test_nodes_add_up_gradients_while_the_last_round_goes_on():
    case = one_round()
    case = case._replace(steps=[[[*case.steps[0][0], *case.steps[1][0]]]])
    assert values_of(run_ranks(adds_meanwhile, 2, case, nodes=2)) == [True, True]


def test_nodes_change_plans_between_steps():
    case = several_plans(FLOAT32)
    one = change_plans(0, 1, case)
    for shown in values_of(run_ranks(change_plans, 4, 4, case, nodes=2)):
        check_close(shown, one)


def train_until_one_dies(rank: int, case: Case, dies: int) -> tuple[str, float]:
    engine = opened(rank, 2, case, watched=True)
    engine.train_step(case.steps[0][0])
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(RankLost) as caught:
        engine.train_step(case.steps[1][0])
    return str(caught.value), time.monotonic() - start_s


DEATHS = [pytest.param(4, "rank 3 (process", marks=pytest.mark.thorough), (2, "nothing is heard any more of node 1")]


@pytest.mark.parametrize(("size", "message"), DEATHS)
def test_the_death_of_a_rank_ends_all_nodes(size, message):
    outcomes = run_ranks(train_until_one_dies, size, float32(), size - 1, nodes=2)
    assert outcomes.pop().error == "ended"
    assert all(told.startswith(message) and seconds < 15 for told, seconds in values_of(outcomes)), outcomes


def differ(rank: int) -> str:
    options = {**JOB, "max_seq_len": 32} if rank == 1 else JOB
    with pytest.raises(ValueError, match="max_seq_len") as caught:
        from_pretrained("preset:demo", hardware=profile(), **options)
    leave()
    return str(caught.value)


def test_nodes_with_other_options_are_told():
    profile()
    message = "rank 1 has max_seq_len=32, rank 0 has 64; give every rank the same model and options"
    assert values_of(run_ranks(differ, 2, nodes=2)) == [message] * 2


def train_job(rank: int) -> tuple[tuple[float, float], tuple[int, int]]:
    os.environ["OMP_NUM_THREADS"] = "1"  # nodes would not have the same cores
    engine = from_pretrained("preset:demo", hardware=profile(), **JOB)
    out, update = engine.train_step(random_batch(1, [64, 50, 33, 12], 500))
    engine.close()
    leave()
    return (out.loss, update.grad_norm), (engine.plan.request.ranks, engine.plan.request.nodes)


def test_nodes_plan_and_train_by_from_pretrained(monkeypatch):
    monkeypatch.setattr(node_exchange, "PIECE_ELEMENTS", 1 << 17)
    profile()
    found = values_of(run_ranks(train_job, 2, nodes=2))
    [(alone, _)] = values_of(run_ranks(train_job, 1))
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0][0], alone, rtol=1e-5)
    assert found[0][1] == (1, 2)
