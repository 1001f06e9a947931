"""Proves that programs of several ranks are right together, whatever rank runs ahead.

It looks at two steps of all ranks, who take rounds in turn, and at what touches the node's memory and its drive:

- waits: the rank that a command asks raises every semaphore that it awaits far enough, and nobody waits in a circle;
- order: of two commands that touch a common byte, one of them writing, one surely ends before the other starts, by the
  order of streams, by waits within a rank and by semaphores;
- contents: a gradient is fetched as the round before left it, and updated as the last round left it; weights are read
  as the step before updated them; nothing is added twice or left out;
- shares: together the ranks update every element of every trained group once;
- speculation: where it holds, that is so of what was updated before the norm was known and of the rest; where it does
  not, all is updated again, as if nothing had been;
- nodes: of several, every gradient is updated as the sum of all nodes left it, which is added in the order of nodes;
  where they divide states, each node updates the elements whose sums it keeps, once, from states in their places, and
  weights are read when those of all nodes have come;
- split plans: all ranks make the same collectives in the same order, owners add up gradients, and shards are gathered
  whole (`split_checker`);
- stages: every layer runs for every chunk, and what is handed over is what the other rank left there
  (`stages_checker`);
- dealt states and shards: a rank finds each element's where the layout gives them their place on its GPU.
`checker` proves each program by itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from flexengine.schedule.checker import ProgramError
from flexengine.schedule.commands import Stream, UpdateTile
from flexengine.schedule.following import BEYOND
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape
from flexengine.schedule.lowering.kinds import UpdateWay
from flexengine.schedule.ranks.order import Event, Events
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.runs import runs_of_ranks
from flexengine.schedule.ranks.transports import transport_of
from flexengine.schedule.shares import Share
from flexengine.schedule.slots import Memory

SHARED: tuple[Memory, ...] = ("node", "drive")
"""Memories that all ranks of a node read and write."""
WAYS: tuple[tuple[UpdateWay, ...], ...] = (
    ("committed", "committed", "after_norm"),
    ("committed", "rolled_back", "after_norm"),
    ("rolled_back", "committed", "rolled_back"),
    ("after_norm", "committed", "after_norm"),
)
"""Steps of a plan that speculates: each way to update after each other one."""


def check_ranks(layout: Layout, shape: RoundShape, num_rounds: int) -> None:
    """Raise ProgramError unless all ranks' programs are proven right together, of each node where these differ."""
    for node in range(layout.plan.request.nodes if layout.node_states else 1):
        check_runs(layout, runs_of_ranks(layout, shape, num_rounds, node=node), num_rounds, node)
    for ways in WAYS if layout.plan.speculates else ():
        check_runs(layout, runs_of_ranks(layout, shape, num_rounds, ways), num_rounds)


def check_runs(layout: Layout, runs: Sequence[Sequence[RankRun]], num_rounds: int, node: int = 0) -> None:
    """As `check_ranks`, of one node's programs that are lowered already."""
    check_shares(layout, runs, node)
    check_dealt_states(layout, runs)
    check_node_states(layout, runs, node)
    check_given(layout, runs)
    transport_of(layout.plan).check(layout, runs)
    events = Events(runs, num_rounds)
    order = events.in_order()
    _check_memory(layout, events, order, num_rounds)


def check_shares(layout: Layout, runs: Sequence[Sequence[RankRun]], node: int = 0) -> None:
    """Check that the ranks' updates of a step cover each element of what is trained once; of what nodes divide, each of
    this node's, when all nodes' have been found to cover all."""
    for step in range(1 + max(run.step for run in runs[0])):
        _check_shares_of_step(layout, [[run for run in rank if run.step == step] for rank in runs], node)


def _check_shares_of_step(layout: Layout, runs: Sequence[Sequence[RankRun]], node: int) -> None:
    """Check the updates of one step, of which speculative ones and others are two sets of their own."""
    updated: dict[bool, dict[tuple[int, str], list[tuple[int, int]]]] = {b: defaultdict(list) for b in (False, True)}
    for command in (command for rank in runs for run in rank for command in run.program.commands):
        if isinstance(command.args, UpdateTile):
            tile = command.args
            spans = updated[tile.targets is not None]
            spans[tile.group, tile.segment].append((tile.start, tile.start + tile.count))
    for group, spec in enumerate(layout.model.groups):
        for segment in () if spec.frozen else layout.groups[group].segments:
            key, name, elsewhere = (group, segment.name), f"{spec.name} {segment.name}", list[tuple[int, int]]()
            if group in layout.node_states:
                states, nodes = layout.node_states[group], range(layout.plan.request.nodes)
                of_nodes = [[(s, s + count) for s, count, _ in states.of_node(segment, each)] for each in nodes]
                _check_covered(segment.numel, list(chain.from_iterable(of_nodes)), f"{name} by all nodes")
                elsewhere = list(chain.from_iterable(of_nodes[:node] + of_nodes[node + 1 :]))
            for spans in [found for found in updated.values() if key in found] or [updated[False]]:
                _check_covered(segment.numel, spans[key] + elsewhere, name)


def _check_covered(numel: int, spans: Sequence[tuple[float, float]], name: str, done: str = "updated") -> None:
    """Raise ProgramError unless each of so many elements lies in one of the spans (start, end)."""
    reached = 0
    for start, end in [*sorted(spans), (numel, numel)]:
        if start != reached:
            twice = "twice" if start < reached else "by no rank"
            raise ProgramError(f"elements {start}..{reached} of {name} are {done} {twice}")
        reached = end


def check_given(layout: Layout, runs: Sequence[Sequence[RankRun]]) -> None:
    """Check that ranks give other nodes the gradient of each element, and its weight, once a step, of what nodes
    divide: a node's own proof needs its own shares alone."""
    given: dict[tuple[int, bool, int], list[tuple[int, int]]] = defaultdict(list)
    for run in (run for rank in runs for run in rank if run.is_of_nodes):
        for args in (command.args for command in run.program.commands):
            width = layout.groups[args.group].element_bytes("grad" if run.exchanges else "weights")
            given[run.step, run.gathers, args.group] += [
                (start / width, (start + n) / width) for start, n in args.pieces
            ]
    for step in range(1 + max(run.step for run in runs[0])):
        for group, gathers in ((group, gathers) for group in layout.node_states for gathers in (False, True)):
            name = layout.model.groups[group].name
            _check_covered(layout.groups[group].numel, given[step, gathers, group], name, "exchanged")


def check_node_states(layout: Layout, runs: Sequence[Sequence[RankRun]], node: int) -> None:
    """Check that updates find the planes of their own elements, of groups whose states nodes divide."""
    programs = {run.program: None for rank in runs for run in rank if run.updates} if layout.node_states else {}
    for program, command in ((each, command) for each in programs for command in each.commands):
        tile = command.args
        if not isinstance(tile, UpdateTile) or tile.group not in layout.node_states:
            continue
        states = layout.node_states[tile.group]
        segment = next(s for s in layout.groups[tile.group].segments if s.name == tile.segment)
        span = next(s for s in states.of_node(segment, node) if s.start <= tile.start < s.start + s.count)
        for plane in segment.planes:
            slot, offset = tile.planes[plane.kind]
            place, within = layout.slots[layout.plane_slot(plane.kind, tile.group)], plane.num_bytes(tile.start)
            expected = place.offset + plane.start + within
            if plane.kind in layout.groups[tile.group].state_kinds:
                expected = place.offset + states.offset(segment, plane, span.place + tile.start - span.start)
            if (program.slots[slot].memory, program.slots[slot].offset + offset) != (place.memory, expected):
                raise ProgramError(f"{command.label} takes {plane.kind} from where the node has that of other elements")


def check_dealt_states(layout: Layout, runs: Sequence[Sequence[RankRun]]) -> None:
    """Check that each rank's updates use the divided planes of their own elements, in any step."""
    rows = ((rank, run) for rank, of_rank in enumerate(runs) for run in of_rank if run.updates)
    for rank, run in rows if layout.plan.deals_states or layout.plan.shards else ():
        for command in (command for command in run.program.commands if isinstance(command.args, UpdateTile)):
            tile, slots = command.args, run.program.slots
            segment = next(s for s in layout.groups[tile.group].segments if s.name == tile.segment)
            sharded = layout.homes[tile.group].sharded
            for plane in (p for p in segment.planes if sharded or layout.is_dealt(p.kind, tile.group)):
                begin, first = layout.plane_start(tile.group, segment, plane, Share(rank, len(runs)))
                whole = layout.slots[layout.plane_slot(plane.kind, tile.group)]
                slot, offset = tile.planes[plane.kind]
                expected = "gpu", whole.offset + begin + plane.num_bytes(tile.start - first)
                if (slots[slot].memory, slots[slot].offset + offset) != expected:
                    raise ProgramError(
                        f"{command.label} (rank {rank}) takes {plane.kind} from {slots[slot].name}, where the rank has"
                        " that of other elements"
                    )


class _Touch(NamedTuple):
    """Bytes [start, end) of what ranks share that an event reads or writes, of a slot of this role and owner.

    Those of a drive follow those of the node's memory in one numbering.
    """

    start: int
    end: int
    writes: bool
    role: str
    owner: str


def _touches(event: Event) -> list[_Touch]:
    """What an event touches of what ranks share, reads first."""
    slots, found = event.run.program.slots, list[_Touch]()

    def add(slot: int, offset: int, num_bytes: int, writes: bool) -> None:
        place = slots[slot]
        if place.memory in SHARED and num_bytes:
            start = place.offset + offset + BEYOND[place.memory]
            found.append(_Touch(start, start + num_bytes, writes, place.key.role, str(place.key.owner)))

    for region in event.command.regions:
        add(region.source, region.source_offset, region.num_bytes, writes=False)
        add(region.target, region.target_offset, region.num_bytes, writes=True)
    return sorted(found, key=lambda touch: touch.writes)


def _update_touches(layout: Layout, event: Event) -> list[_Touch]:
    """The same of an update by the CPU, which works where planes lie."""
    tile, slots = event.command.args, event.run.program.slots
    segment = next(s for s in layout.groups[tile.group].segments if s.name == tile.segment)
    found = []
    for plane in segment.planes:
        slot, offset = tile.planes[plane.kind]
        if slots[slot].memory not in SHARED:  # a copy of what lies on the drive, whose reads and writes count
            continue
        start = slots[slot].offset + offset + BEYOND[slots[slot].memory]
        size, name = plane.num_bytes(tile.count), layout.model.groups[tile.group].name
        found.append(_Touch(start, start + size, False, plane.kind, name))
        if plane.kind != "grad":
            slot, offset = (tile.targets or tile.planes)[plane.kind]
            start = slots[slot].offset + offset + BEYOND[slots[slot].memory]
            found.append(_Touch(start, start + size, True, plane.kind, name))
    return sorted(found, key=lambda touch: touch.writes)


def _exchange_touches(layout: Layout, event: Event) -> list[_Touch]:
    """The same of what nodes add up. Raises: ProgramError unless every node gives, in the order of nodes."""
    args, nodes = event.command.args, layout.plan.request.nodes
    if args.givers != tuple(range(nodes)):
        raise ProgramError(f"{event.label} adds gradients of nodes {args.givers}, not of {nodes} in their order")
    reads, writes = args.pieces, args.pieces if args.kept is None else args.kept
    return _touches_of_nodes(layout, event, "grad", reads, writes)


def _gather_touches(layout: Layout, event: Event) -> list[_Touch]:
    """The same of weights that nodes give each other: their own are read, those of others written."""
    args, cuts = event.command.args, list[tuple[int, int]]()
    for offset, num_bytes in args.pieces:
        inside = [(start, size) for start, size in args.kept if offset <= start < offset + num_bytes]
        reached = offset
        for start, size in [*sorted(inside), (offset + num_bytes, 0)]:
            cuts += [(reached, start - reached)] if start > reached else []
            reached = start + size
    return _touches_of_nodes(layout, event, "weights", args.kept, cuts)


def _touches_of_nodes(
    layout: Layout, event: Event, role: str, reads: Sequence[tuple[int, int]], writes: Sequence[tuple[int, int]]
) -> list[_Touch]:
    args = event.command.args
    start, name = event.run.program.slots[args.slot].offset + BEYOND["node"], layout.model.groups[args.group].name
    rows = ((begin, size, flag) for flag, found in ((False, reads), (True, writes)) for begin, size in found)
    return [_Touch(start + begin, start + begin + size, flag, role, name) for begin, size, flag in rows]


def _touches_of(layout: Layout, event: Event) -> list[_Touch]:
    if event.run.is_of_nodes:
        return (_exchange_touches if event.run.exchanges else _gather_touches)(layout, event)
    if event.run.drops and isinstance(event.command.args, UpdateTile):
        return []  # the rank ends or drops it before it goes on, and nobody reads what it wrote
    return _update_touches(layout, event) if event.command.stream is Stream.CPU else _touches(event)


def _check_memory(layout: Layout, events: Events, order: list[int], num_rounds: int) -> None:
    """Check order and contents of all that touches what ranks share."""
    touches = {index: _touches_of(layout, event) for index, event in enumerate(events.all)}
    borders = sorted({border for found in touches.values() for touch in found for border in touch[:2]})
    places = {border: place for place, border in enumerate(borders)}
    frozen = {group.name for group in layout.model.groups if group.frozen}
    memory, transport = _NodeBytes(len(borders), events, order), transport_of(layout.plan)
    for index in order:
        run = events.all[index].run
        for touch in touches[index]:
            if touch.role in ("grad", "handed"):
                held = transport.held(layout, events.all[index], *touch[3:], touch.writes)
            elif touch.role == "norm_squares" or touch.owner in frozen:
                held = (run.step if touch.role == "norm_squares" else 0), 0
            else:
                held = run.step + (touch.writes or run.gathers), 0
            touched = range(places[touch.start], places[touch.end])
            if run.gathers and touch.writes:  # what other nodes have updated, and nobody here
                memory.touch(index, touched, touch._replace(writes=False), (run.step, 0))
            memory.touch(index, touched, touch, held)


class _NodeBytes:
    """What ranks share, cut where anything that is touched begins or ends: who touched it last, and what it holds."""

    def __init__(self, count: int, events: Events, order: list[int]) -> None:
        self._events, self._clocks = events, events.clocks(order)
        self._writer = [-1] * count
        self._readers: list[dict[int, int]] = [{} for _ in range(count)]  # since the last write, by lane
        self._held: list[tuple[int, ...] | None] = [None] * count  # None: as loaded

    def touch(self, index: int, places: range, touch: _Touch, held: tuple[int, ...]) -> None:
        """Have an event read what the bytes should hold, (step, round), or write that."""
        lane = self._events.all[index].lane
        for place in places:
            self._require(self._writer[place], index, touch)
            if touch.writes:
                for reader in self._readers[place].values():
                    self._require(reader, index, touch)
                self._writer[place], self._readers[place], self._held[place] = index, {}, held
                continue
            loaded = (0, 0) if touch.role not in ("grad", "handed", "norm_squares") else None
            found = self._held[place] or loaded
            if found != held:
                label = self._events.all[index].label
                raise ProgramError(
                    f"{label} expects {touch.role} of {touch.owner} after {held} (step, round), not {found}"
                )
            self._readers[place][lane] = index

    def _require(self, earlier: int, index: int, touch: _Touch) -> None:
        if earlier < 0 or earlier == index:
            return
        before, event = self._events.all[earlier], self._events.all[index]
        if self._clocks[index, before.lane] < before.position:
            raise ProgramError(
                f"{event.label} does not wait for {before.label}, and both touch {touch.role} of {touch.owner}"
            )
