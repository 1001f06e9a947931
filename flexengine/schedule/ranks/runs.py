"""What each rank of a node runs in a step, for those who check or simulate all of them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from flexengine.schedule.commands import Program
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering.kinds import RoundKind, RoundUpdates, UpdateKind, UpdateWay
from flexengine.schedule.lowering.shape import RoundShape
from flexengine.schedule.ranks.node_exchange import lower_exchange, lower_gather
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.transports import Seat, transport_of
from flexengine.schedule.shares import Share

NUM_STEPS = 2
"""Enough to see each kind of program after each other kind."""

Lowered = dict[tuple[Layout, RoundShape, RoundKind], Program]
"""Programs of rounds that are lowered already; of some transports all ranks run the same."""


def runs_of_ranks(
    layout: Layout, shape: RoundShape, num_rounds: int, ways: Sequence[UpdateWay] = ("after_norm",) * NUM_STEPS,
    node: int = 0,
) -> list[list[RankRun]]:  # fmt: skip
    """What each rank of a node runs in some steps of so many rounds of one shape, two unless `ways` has others.

    Where a speculation is committed, planes have changed places since.
    """
    lowered, ranks = Lowered(), transport_of(layout.plan).layouts(layout, layout.plan.request.ranks)
    found: list[list[RankRun]] = [[] for _ in ranks]
    for rank, one in enumerate(ranks):
        here, there = one, one.swapped()
        known: dict[tuple[Layout, UpdateWay], list[RankRun]] = {}
        for step, way in enumerate(ways):
            if (here, way) not in known:
                known[here, way] = step_of_rank(here, rank, [shape] * num_rounds, way, lowered=lowered, node=node)
            found[rank] += [run._replace(step=step) for run in known[here, way]]
            here, there = (there, here) if way == "committed" else (here, there)
    return found


def step_of_rank(
    layout: Layout, rank: int, shapes: Sequence[RoundShape], way: UpdateWay = "after_norm",
    left: Mapping[int, float] | None = None, lowered: Lowered | None = None, node: int = 0,
) -> list[RankRun]:  # fmt: skip
    """What a rank runs in a step: its turns, what nodes exchange where there are several, the update, and what nodes
    that divide states then gather.

    shapes: of all rounds of the node. node: the rank's. left: for prices, what the CPU has yet to update after a
    speculation that is committed.
    """
    transport, request = transport_of(layout.plan), layout.plan.request
    share, lowered, found = (
        Share(rank, request.ranks, node=node),
        Lowered() if lowered is None else lowered,
        list[RankRun](),
    )
    turns = list(transport.turns(Seat(rank, request.ranks), 0, len(shapes)))
    for number, turn in enumerate(turns):
        if not turn.rounds:
            continue
        speculates: RoundUpdates = "speculative" if way != "after_norm" and number == len(turns) - 1 else "none"
        shape = transport.shape([shapes[place] for place in turn.rounds])
        key = layout, shape, RoundKind(True, number == 0, speculates, turn.wave)
        if key not in lowered:
            lowered[key] = transport.lower_round(*key)
        rounds = range(turn.together[0], turn.together[-1] + 1)
        found.append(RankRun(lowered[key], 0, number, False, rounds, drops=way == "rolled_back"))
    number, everything = len(turns) - 1, range(len(shapes))
    if request.nodes > 1:
        found.append(RankRun(lower_exchange(layout, share), 0, number, False, everything, exchanges=True))
    after = layout.swapped() if way == "committed" and left is None else layout
    kind = UpdateKind(way, share, turns[-1].last == rank, left)
    found.append(RankRun(transport.lower_update(after, kind), 0, number, True, everything))
    if layout.node_states:
        found.append(RankRun(lower_gather(layout, share), 0, number, False, everything, gathers=True))
    return found
