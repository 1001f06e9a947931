"""Lowers the programs of a plan, of one rank or of one of several, as the plan's transport has them."""

from __future__ import annotations

from flexengine.schedule.commands import Program
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.kinds import EVALUATION, WHOLE_UPDATE, RoundKind, RoundUpdates, UpdateKind, Wave
from flexengine.schedule.lowering.shape import RoundShape
from flexengine.schedule.ranks.transports import transport_of


def lower_round(
    layout: Layout, shape: RoundShape, first: bool, updates: RoundUpdates = "none", wave: Wave | None = None
) -> Program:
    """Forward, loss and backward of one round; the arguments are those of `RoundKind`."""
    return transport_of(layout.plan).lower_round(layout, shape, RoundKind(True, first, updates, wave))


def lower_evaluation(layout: Layout, shape: RoundShape) -> Program:
    """Forward and loss of one round; keeps nothing."""
    return transport_of(layout.plan).lower_round(layout, shape, EVALUATION)


def lower_update(layout: Layout, kind: UpdateKind = WHOLE_UPDATE) -> Program:
    """The optimizer step's own program."""
    return transport_of(layout.plan).lower_update(layout, kind)
