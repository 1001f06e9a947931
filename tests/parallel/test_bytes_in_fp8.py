"""What plans count of gradients that nodes exchange in FP8 is what is sent and kept."""

from __future__ import annotations

from dataclasses import replace
from math import inf, nan
from random import Random
from typing import Literal

import pytest

from flexengine.plan import GroupPlan
from flexengine.runtime.ranks.kept_errors import kept_errors
from flexengine.runtime.ranks.sent_gradients import sent_gradients
from flexengine.schedule import node_states
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.node_exchange import (
    PIECES_UNDER_WAY,
    WIDENED_BYTES,
    exchange_bytes,
    lower_exchange,
    own_pieces,
    sent_as,
)
from flexengine.schedule.shares import Share
from tests.schedule.small_plans import random_plan, small_model


def layout_of_nodes(exchange: Literal["fp8"] | None) -> Layout:
    """Of two ranks on each of three nodes."""
    model = small_model()
    plan = random_plan(Random(5), model, sliced=False)
    request = replace(plan.request, ranks=2, nodes=3, transport="relay", exchange=exchange)
    groups = tuple(GroupPlan() for _ in plan.groups)
    return Layout(model, replace(plan, groups=groups, request=request, transport="relay", touched_only=False))


def test_fewer_bytes_cross_in_fp8_and_what_it_loses_is_counted(monkeypatch):
    """As they are written: of shares of odd lengths, and 2 bytes for each element that a rank exchanges."""
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 1601)
    layouts = stored, coded = layout_of_nodes(None), layout_of_nodes("fp8")
    width = stored.groups[0].element_bytes("grad")
    for numel in (1, 127, 128, 129, 1601):
        sent = sent_as(coded)
        assert sent_gradients(sent).num_bytes(numel) == sent.num_bytes(numel) == numel + -(-numel // 128)
    of_both = [sum(c.args.network_bytes for c in lower_exchange(each, Share(0, 2)).commands) for each in layouts]
    assert of_both[1] / of_both[0] == pytest.approx((1 + 1 / 128) / width)
    by_rank = [sum(piece.numel for piece in own_pieces(coded, Share(rank, 2))) for rank in range(2)]
    for rank, own in enumerate(by_rank):
        errors = kept_errors(coded, Share(rank, 2))
        assert errors is not None
        assert sum(errors.of(piece).nbytes for piece in errors.pieces) == 2 * own
    assert by_rank[1] > by_rank[0], "the one with fewer pieces may have more elements"
    assert kept_errors(stored, Share(0, 2)) is None
    pieces = PIECES_UNDER_WAY * (3 * (534 + 5) + 1601 + 13 + 3)  # copies of a share by three nodes, and all shares
    assert exchange_bytes(coded) == 2 * by_rank[1] + pieces + WIDENED_BYTES


def test_errors_count_as_the_update_counts_their_step():
    errors = kept_errors(layout_of_nodes("fp8"), Share(0, 2))
    assert errors is not None
    errors.begin(10.0, usual=0.5)
    errors.end_step(2.0, 1.0, ())
    assert errors.factor(20.0) == 2.0, "this step is clipped as the one before"
    errors.end_step(100.0, 1.0, ())
    assert errors.factor(20.0) == pytest.approx(0.01 / 0.25), "this one keeps far less, of half of what was usual"
    errors.end_step(100.0, 1.0, ())
    errors.end_step(100.0, None, ())
    assert errors.factor(20.0) == pytest.approx(0.01 / 0.125), "without clipping all that a step has lost counts"
    bad = errors.pieces[0].group
    for norm, limit, skipped in ((nan, None, {bad}), (inf, 1.0, {piece.group for piece in errors.pieces})):
        for piece in errors.pieces:
            errors.of(piece).fill_(1.0)
        errors.end_step(norm, limit, {bad})
        assert {piece.group for piece in errors.pieces if not errors.of(piece).any()} == skipped
