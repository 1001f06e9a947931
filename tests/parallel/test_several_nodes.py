"""Several nodes train to the same bits whatever their number of ranks, and close to one node.

All are processes of this machine; by their environment they take themselves to be on several, each with memory of its
own.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
import torch
from engine_helpers import FLOAT32, random_batch, random_weights, tiny_config
from rank_cases import BF16, LENGTHS, Case, balanced_experts, bf16, float32, not_finite, one_round, steps_of, streamed
from ranks_helper import run_ranks, values_of
from test_from_pretrained import JOB, profile
from test_several_ranks import Shown, change_plans, check_same, opened, several_plans, speculate, train

from flexengine import from_pretrained
from flexengine.ops.custom_loss import LogitsBlock
from flexengine.parallel.control import Control
from flexengine.parallel.nodes import NodeLink, Piece
from flexengine.parallel.ranks import Ranks
from flexengine.parallel.signals import RankLost
from flexengine.parallel.team import leave
from flexengine.runtime.engine import Engine
from flexengine.runtime.execution.in_order import InOrder
from flexengine.runtime.ranks.sent_gradients import Fp8, sent_gradients
from flexengine.schedule import node_states
from flexengine.schedule.commands import Command
from flexengine.schedule.ranks import waves
from flexengine.schedule.ranks.node_exchange import SentAs


def tied_in_calls() -> Case:
    source = random_weights(tiny_config(tie_word_embeddings=True))
    return Case(source, streamed(source), steps_of(67, LENGTHS, [30], [31, 12, 5, 29]))


def streamed_by_cpu() -> Case:
    source = random_weights(tiny_config())
    return Case(source, streamed(source, numerics=BF16), steps_of(67, LENGTHS, count=3))


def check_close(shown: Shown, expected: Shown) -> None:
    numbers = [[float(x) for x in found.numbers if x not in ("True", "False")] for found in (shown, expected)]
    np.testing.assert_allclose(*numbers, rtol=1e-6)
    for found, wanted in ((shown.gradients, expected.gradients), (shown.weights, expected.weights)):
        assert found.keys() == wanted.keys()
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=3e-4, atol=1e-6, err_msg=name)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 301)


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


def test_nodes_that_update_before_the_norm_is_known_train_to_the_same_bits(monkeypatch):
    """Two of two ranks each, beside nodes of one rank that wait. The fourth step waits as it follows a clipped one, the
    last as it has one round, so that a node has none."""
    monkeypatch.setattr(waves, "SECTION_BYTES", 8192)
    case = bf16()
    vocab_size = case.source.spec.vocab_size
    steps = steps_of(vocab_size, LENGTHS, [31, 12], count=4)
    case = case._replace(steps=[*steps, [random_batch(4, [9], vocab_size)]])
    expected, _ = values_of(run_ranks(speculate, 2, 2, case, nodes=2))[0]
    for shown, parts in values_of(run_ranks(speculate, 4, 4, case._replace(split=True, bold=True), nodes=2)):
        assert parts == ["committed", "committed", "rolled_back"]
        check_same(shown, expected)


def exchanging(case: Case, exchange: Literal["bfloat16", "fp8"]) -> Case:
    """Of gradients that each node stores in float32."""
    numerics = replace(case.plan.request.numerics, grad="float32")
    request = replace(case.plan.request, numerics=numerics, exchange=exchange)
    return case._replace(plan=replace(case.plan, request=request))


@pytest.mark.parametrize("exchange", ["bfloat16", "fp8"])
def test_nodes_that_exchange_fewer_bytes_train_to_the_same_bits(exchange):
    """Whatever their ranks; two steps with FP8, so that what the first loses counts in the second, by nodes that divide
    states, too."""
    case = exchanging(bf16(), exchange)
    case = case._replace(steps=case.steps[: 2 if exchange == "fp8" else 1])
    first = values_of(run_ranks(train, 2, 2, case, nodes=2))[0]
    for shown in values_of(run_ranks(train, 6, 6, case._replace(by_nodes=exchange == "fp8"), nodes=2)):
        check_same(shown, first)


class Shot(NamedTuple):
    """Losses and norms of steps, which of them were skipped, what is kept of exchanges after each, and the weights at
    the end."""

    losses: list[float]
    norms: list[float]
    skipped: list[bool]
    kept: list[float]
    weights: list[Any]


def kept_by(engine: Engine) -> float:
    """The sum of the sizes of what a rank keeps of exchanges."""
    errors = engine.context.errors
    return sum(float(errors.of(piece).double().abs().sum()) for piece in errors.pieces) if errors is not None else 0.0


def shown_steps(rank: int, size: int, case: Case, factors: Sequence[float]) -> Shot:
    """Steps of which the loss is multiplied by factors."""
    engine = opened(rank, size, case)
    shot = Shot([], [], [], [], [])
    for calls, factor in zip(case.steps, factors, strict=True):
        output, update = engine.train_step(calls[0], loss=partial(cross_entropy_times, factor))
        shot.losses.append(output.loss)
        shot.norms.append(update.grad_norm)
        shot.skipped.append(update.skipped)
        shot.kept.append(kept_by(engine))
    shot.weights.extend(tensor.numpy() for tensor in engine.state_dict().values())
    engine.close()
    return shot


def cross_entropy_times(factor: float, block: LogitsBlock) -> torch.Tensor:
    return factor * torch.nn.functional.cross_entropy(block.logits, block.labels, reduction="sum")


def test_losses_with_fp8_stay_near_whatever_a_step_skips_or_clips():
    """Beside one rank. The gradients of the second of seven steps are not finite, and those of the fifth 1e6 times as
    large: what rounding loses of them is more than what the next steps have."""
    case, factors = float32(), (1.0, 1e38, 1.0, 1.0, 1e6, 1.0, 1.0)
    case = case._replace(steps=[case.steps[step % 2 * 2] for step in range(7)])
    told, other = values_of(run_ranks(shown_steps, 2, 2, exchanging(case, "fp8"), factors, nodes=2))
    one = shown_steps(0, 1, case, factors)
    assert told.skipped == one.skipped == [False, True, *[False] * 5]
    assert [kept > 0.0 for kept in told.kept] == [not skipped for skipped in told.skipped]
    np.testing.assert_allclose(told.losses, one.losses, rtol=0.01)
    np.testing.assert_allclose(told.norms, one.norms, rtol=0.2)
    assert told.norms[4] > 1e5
    assert told.losses[-1] != one.losses[-1]
    for found, same, alone in zip(told.weights, other.weights, one.weights, strict=True):
        np.testing.assert_array_equal(found, same)
        assert np.isfinite(found).all()
        assert not np.array_equal(found, alone)


def go_on(rank: int, size: int, case: Case, folder: Path, resumed: bool) -> tuple[list[str], dict[str, Any], float]:
    """Steps after the first, behind which a checkpoint is saved, or from which the run goes on; what is kept then."""
    engine = opened(rank, size, case)
    if resumed:
        engine.load_checkpoint(folder)
    else:
        engine.train_step(case.steps[0][0])
        engine.save_checkpoint(folder)
    kept = kept_by(engine)
    updates = [engine.train_step(calls[0])[1] for calls in case.steps[1:]]
    weights = {name: tensor.numpy() for name, tensor in engine.state_dict().items()}
    engine.close()
    return [repr(update.grad_norm) for update in updates], weights, kept


def test_a_resumed_run_has_what_fp8_lost_before(tmp_path):
    """By other numbers of ranks in two nodes; by three nodes, which begin with nothing. Steps differ in tokens."""
    case = exchanging(bf16(), "fp8")
    batches = [random_batch(step, LENGTHS[: 7 - 2 * step] * 2, 67) for step in range(3)]
    case = case._replace(steps=[[batch] for batch in batches])
    (numbers, weights, kept), _ = values_of(run_ranks(go_on, 2, 2, case, tmp_path / "saved", False, nodes=2))
    found = values_of(run_ranks(go_on, 6, 6, case, tmp_path / "saved", True, nodes=2))
    assert sum(other for *_, other in found[:3]) == pytest.approx(kept)
    assert kept > 0
    for told, arrays, _ in found:
        check_same(Shown(told, {}, arrays), Shown(numbers, {}, weights))
    others = values_of(run_ranks(go_on, 3, 3, case, tmp_path / "saved", True, nodes=3))
    assert [other for *_, other in others] == [0.0] * 3
    assert others[0][0] != numbers


def added(rank: int, stored: torch.dtype, sent: str) -> list[tuple[Any, float]]:
    """What a node of three has of pieces that all have added, and its squares; the last node has run no round."""
    ranks = Ranks.of_environment()
    link, crosses = NodeLink(Control.open(ranks)), sent_gradients(SentAs(sent, str(stored).removeprefix("torch.")))
    pieces = [piece.to(stored) for piece in pieces_of_node(rank)]
    squares = link.add([Piece(piece) for piece in pieces], range(2), torch.float32, crosses)
    return [(piece.float().numpy(), square) for piece, square in zip(pieces, squares, strict=True)]


def pieces_of_node(rank: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return [torch.randn(n, generator=generator) if rank < 2 else torch.full((n,), torch.nan) for n in (5000, 1, 7, 301)]


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=["stored in bf16", "in float32"])
def test_sums_are_those_of_what_nodes_send(stored):
    """Copies and sums are rounded to bf16, and nothing else."""
    told = values_of(run_ranks(added, 3, stored, "bfloat16", nodes=3))
    for number, (first, second) in enumerate(zip(pieces_of_node(0), pieces_of_node(1), strict=True)):
        expected = (first.bfloat16().float() + second.bfloat16().float()).bfloat16().float()
        for found in told:
            np.testing.assert_array_equal(found[number][0], expected.numpy())
        assert sum(found[number][1] for found in told) == pytest.approx(float(expected.double().square().sum()))


def repeated(rank: int, steps: int) -> tuple[list[list[Any]], list[Any]]:
    """Sums of each step in which nodes exchange equal pieces in FP8, and what this node has lost at the end."""
    link = NodeLink(Control.open(Ranks.of_environment()))
    errors = [torch.zeros(len(piece), dtype=torch.bfloat16) for piece in pieces_of_node(rank)]
    found = []
    for _ in range(steps):
        pieces = pieces_of_node(rank)
        link.add(list(map(Piece, pieces, errors)), range(2), torch.float32, Fp8())
        found.append([piece.double().numpy() for piece in pieces])
    return found, [error.double().numpy() for error in errors]


def test_what_fp8_loses_in_a_step_comes_in_the_next():
    """Sums of many steps, and what is left, are those of what nodes hold, but for the rounding of what is left; the
    last node has run no round."""
    steps = 16
    told = values_of(run_ranks(repeated, 3, steps, nodes=3))
    for number, (first, second) in enumerate(zip(pieces_of_node(0), pieces_of_node(1), strict=True)):
        sums = [[step[number] for step in found] for found, _ in told]
        np.testing.assert_array_equal(sums[0], sums[1])
        np.testing.assert_array_equal(sums[0], sums[2])
        expected, largest = (first.double() + second.double()).numpy(), torch.maximum(first.abs(), second.abs()).numpy()
        assert len(first) < 100 or (sums[0][0] != expected).mean() > 0.9, "each step rounds"
        assert np.all(np.abs(sums[0][0] - expected) <= (2 * largest + np.abs(expected)) / 16 + 1e-4)
        left = np.sum([lost[number] for _, lost in told], axis=0)
        bound = steps * 2.0**-13 * (2 * largest + np.abs(expected)) + 1e-4
        assert np.all(np.abs(np.sum(sums[0], axis=0) + left - steps * expected) <= bound)


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
    engine.fwd_bwd(case.steps[1][0])
    with pytest.raises(ValueError, match="nodes divide the masters, which would take the place of the gradients"):
        engine.state_dict()
    engine.step()
    if rank == dies:
        os.kill(os.getpid(), signal.SIGKILL)
    start_s = time.monotonic()
    with pytest.raises(RankLost) as caught:
        engine.train_step(case.steps[1][0])
    return str(caught.value), time.monotonic() - start_s


DEATHS = [pytest.param(4, "rank 3 (process", marks=pytest.mark.thorough), (2, "nothing is heard any more of node 1")]


@pytest.mark.parametrize(("size", "message"), DEATHS)
def test_the_death_of_a_rank_ends_all_nodes(size, message):
    """Also where the others wait for the weights that its node has updated."""
    case = streamed_by_cpu()._replace(by_nodes=True)
    outcomes = run_ranks(train_until_one_dies, size, case, size - 1, nodes=2)
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
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 1 << 17)
    profile()
    found = values_of(run_ranks(train_job, 2, nodes=2))
    [(alone, _)] = values_of(run_ranks(train_job, 1))
    assert found[0] == found[1]
    np.testing.assert_allclose(found[0][0], alone, rtol=1e-5)
    assert found[0][1] == (1, 2)
