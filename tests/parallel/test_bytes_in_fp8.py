"""What plans count of gradients that nodes exchange in FP8 is what is sent and kept."""

from __future__ import annotations

from dataclasses import replace
from random import Random

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


def test_fewer_bytes_cross_in_fp8_and_what_it_loses_is_counted(monkeypatch):
    """As they are written: of shares of odd lengths, and 2 bytes for each element that a rank exchanges."""
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 1601)
    model = small_model()
    plan = random_plan(Random(5), model, sliced=False)
    groups = tuple(GroupPlan() for _ in plan.groups)
    layouts = []
    for exchange in (None, "fp8"):
        request = replace(plan.request, ranks=2, nodes=3, transport="relay", exchange=exchange)
        changes = {"groups": groups, "request": request, "transport": "relay", "touched_only": False}
        layouts.append(Layout(model, replace(plan, **changes)))
    (stored, coded), width = layouts, layouts[0].groups[0].element_bytes("grad")
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
