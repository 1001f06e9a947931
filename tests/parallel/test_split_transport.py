"""Ranks that walk the layers together: shares and pieces, programs proven together, prices, and the planner's choice.

`test_several_ranks` holds them to the bits of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any, Literal

import pytest
from thorough import cases

from flexengine.hardware.nodes import PEER_WAIT_S, WITHIN_WAIT_S, with_gpus
from flexengine.hardware.presets import preset
from flexengine.metrics import GIB
from flexengine.models.freezing import with_frozen
from flexengine.models.in_parts import in_parts
from flexengine.models.registry import open_model
from flexengine.models.spec import ModelSpec
from flexengine.plan import GroupPlan, Plan, PlanError, Request
from flexengine.planner.cost import memory
from flexengine.planner.cost.cost_model import CostModel
from flexengine.planner.ranks.plan import plan_for_ranks
from flexengine.planner.ranks.price import priced_together
from flexengine.planner.ranks.split import may_split
from flexengine.reports.plan_text import describe
from flexengine.schedule import fixed_slots, node_states
from flexengine.schedule.checker import ProgramError, check_program
from flexengine.schedule.commands import Access, Command, CommandName, CopyRegion, Program, Signal, Stream
from flexengine.schedule.layout import Layout
from flexengine.schedule.lowering import RoundShape
from flexengine.schedule.lowering.kinds import Wave
from flexengine.schedule.parts import Part, Run
from flexengine.schedule.program_builder import ProgramBuilder
from flexengine.schedule.programs import lower_round
from flexengine.schedule.ranks import checker as ranks_checker
from flexengine.schedule.ranks import semaphores as relay
from flexengine.schedule.ranks import waves
from flexengine.schedule.ranks.checker import check_runs
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.runs import runs_of_ranks
from flexengine.schedule.ranks.semaphores import Semaphores
from flexengine.schedule.ranks.simulator import SIGNAL_S, simulate_ranks, simulate_runs
from flexengine.schedule.ranks.split_commands import ExchangeParts, FoldParts, GatherShares, ShareOfFetch
from flexengine.schedule.ranks.waves import own_regions, owned_pieces, sections_of
from flexengine.schedule.simulator import Rates
from flexengine.schedule.slots import Slot, SlotKey, overlapping_slots
from tests.parallel.test_ranks_checker import (
    awaiting_an_earlier_round,
    awaiting_nothing,
    is_rejected,
    of_another_row,
    of_exchange,
    of_ranks,
)
from tests.schedule.small_plans import divided_model, full_round, random_plan, small_model

# -- shares and pieces -----------------------------------------------------------------------------------------------


def test_ranks_fetch_equal_shares_and_all_what_is_left_over():
    regions = [CopyRegion(0, 0, 9, 0, 1000), CopyRegion(1, 64, 9, 1100, 1000)]
    shares = [own_regions(regions, rank, 3) for rank in range(3)]
    assert shares[0] == [CopyRegion(0, 0, 9, 0, 512), CopyRegion(1, 64 + 436, 9, 1536, 564)]
    assert shares[1] == [CopyRegion(0, 512, 9, 512, 488), shares[0][1]]  # 1000 to 1100 is padding: 1024 is the end
    assert shares[2] == [CopyRegion(1, 64, 9, 1100, 436), shares[0][1]]


@pytest.mark.parametrize("size", [2, 3, 8])
def test_pieces_cover_a_part_and_end_where_partial_sums_do(size, monkeypatch):
    monkeypatch.setattr(fixed_slots, "SQUARED_ELEMENTS", 64)
    monkeypatch.setattr(waves, "SECTION_BYTES", 4 * 1000)
    runs = (Run(0, 0, 1500, 0), Run(9000, 1536, 10, 1), Run(1500, 1664, 900, 2))
    pieces = owned_pieces(Part((), runs, 2564), size, 4)
    assert len(pieces) % size == 0
    found = [(run.run.number, run.before, run.numel) for piece in pieces for run in piece.runs]
    for run in runs:
        ends = [(before, before + numel) for number, before, numel in found if number == run.number]
        assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
        assert ends[-1][1] == run.numel
        assert all(start % 64 == 0 for start, _ in ends)
    sections = sections_of(pieces, size)
    assert sections[0].first == 0
    assert sum(sum(section.counts) for section in sections) == 2564
    assert max(sum(section.counts) for section in sections) < 1000 + 64


# -- programs of all ranks -------------------------------------------------------------------------------------------


def split_plan(plan: Plan, size: int, update: str = "", states: str = "host") -> Plan:
    return replace(of_ranks(plan, size, update, states=states), transport="split")


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 4, 7])
def test_random_plans_are_proven(seed, monkeypatch):
    monkeypatch.setattr(fixed_slots, "SQUARED_ELEMENTS", 256)
    monkeypatch.setattr(waves, "SECTION_BYTES", 1 << (15 if seed % 2 else 28))
    random, size = Random(seed), 2 + seed % 3
    models = [small_model(tied=True), divided_model(), with_frozen(small_model(), ["embed", "block.1"]), small_model()]
    model, parts = models[seed % 4], seed % 4 == 1
    plan = random_plan(random, in_parts(model) if parts else model, sliced=seed % 5 == 0)
    plan = split_plan(replace(plan, in_parts=parts), size, states="dealt" if seed % 3 == 0 else "host")
    plan = replace(plan, request=replace(plan.request, nodes=2 if seed == 3 else 1))
    layout = Layout(model, plan)
    for num_rounds in (1, size + 1):  # of a node
        runs = runs_of_ranks(layout, full_round(layout), num_rounds)
        check_runs(layout, runs, num_rounds)
        for program in {run.program for rank in runs for run in rank if not run.exchanges}:
            check_program(program, layout.gpu_bytes, layout.host_bytes, layout.node_bytes)


def small_runs(tied: bool = False) -> tuple[Layout, list[list[RankRun]]]:
    model = small_model(blocks=1, tied=tied)
    layout = Layout(model, split_plan(random_plan(Random(1), model, sliced=False), 3, "gpu"))
    return layout, runs_of_ranks(layout, full_round(layout), 4)


def test_ranks_whose_rounds_have_other_chunks_make_the_same_collectives():
    layout, runs = small_runs()
    shape = RoundShape(full_round(layout).chunks[:1])
    found = []
    for rank, of_rank in enumerate(runs):
        lowered = {
            run.number: lower_round(layout, shape, run.number == 0, wave=Wave(rank, 3, len(run.rounds)))
            for run in of_rank
            if rank == 1 and not run.updates
        }
        found.append([r if r.updates else r._replace(program=lowered.get(r.number, r.program)) for r in of_rank])
    assert found != runs
    check_runs(layout, found, 4)


Change = Callable[[Command], Command | None]


def changed(runs: list[list[RankRun]], change: Change, ranks: tuple[int, ...] = (0, 1, 2)) -> list[list[RankRun]]:
    """The runs of some ranks with every command replaced by what `change` makes of it."""

    def program(old: Program) -> Program:
        kept = [command for command in map(change, old.commands) if command is not None]
        numbers = {command.index: i for i, command in enumerate(kept)}
        commands = (
            replace(c, index=i, waits=tuple(numbers[w] for w in c.waits if w in numbers)) for i, c in enumerate(kept)
        )
        return replace(old, commands=tuple(commands))

    known = {run.program: program(run.program) for rank in runs for run in rank}
    return [
        [run._replace(program=known[run.program]) if rank in ranks else run for run in of_rank]
        for rank, of_rank in enumerate(runs)
    ]


def args(kind: type, **values: Any) -> Change:
    """Other values in the arguments of all commands of a kind; functions are given the old value."""

    def change(command: Command) -> Command:
        if not isinstance(command.args, kind):
            return command
        new = {name: value(getattr(command.args, name)) for name, value in values.items()}
        return replace(command, args=command.args._replace(**new))

    return change


def without(kind: str) -> Change:
    return lambda command: None if command.kind == kind else command


def without_reads_of_squares(command: Command) -> Command:
    """Tiles are fetched while other ranks may still store gradients."""
    fetches = command.name.verb == "fetch" and command.name.subject == "tile"
    return replace(command, waits=()) if fetches else command


def not_awaiting(command: Command) -> Command:
    return replace(command, awaits=())


def awaiting_own(command: Command) -> Command:
    return replace(command, awaits=tuple(Signal(s.semaphore, "own", s.clock, s.lag) for s in command.awaits))


CHANGES: dict[str, tuple[Change, tuple[int, ...]]] = {
    "a gather less": (without("gather"), (1,)),
    "an exchange less": (without("exchange"), (2,)),
    "squares that are not added up": (without("add_squares"), (0,)),
    "squares of the step before": (without("clear_squares"), (0, 1, 2)),
    "no fold": (without("fold"), (1,)),
    "shares of another size": (args(GatherShares, share_bytes=lambda n: n // 2), (0,)),
    "the share of another rank": (args(GatherShares, rank=lambda rank: (rank + 1) % 3), (0, 1, 2)),
    "the copy of another rank's share": (args(ShareOfFetch, rank=lambda rank: (rank + 1) % 3), (0, 1, 2)),
    "pieces of other sizes": (args(ExchangeParts, counts=lambda counts: counts[::-1]), (1,)),
    "other elements": (args(ExchangeParts, first=lambda first: first + 1), (1,)),
    "a round less": (args(FoldParts, rounds=lambda rounds: rounds - 1), (0,)),
    "a round more": (args(FoldParts, rounds=lambda rounds: rounds + 1), (0,)),
    "nothing stored before": (args(FoldParts, has_previous=lambda _: False), (2,)),
    "a hole": (args(FoldParts, runs=lambda runs: tuple(r._replace(numel=r.numel - 64) for r in runs)), (1,)),
    "the piece of another rank for its own": (
        args(FoldParts, own=lambda own: own and own._replace(first=own.first + 64)),
        (1,),
    ),
    "elements of another owner": (args(FoldParts, runs=lambda runs: tuple(r._replace(before=0) for r in runs)), (1,)),
    "no wait for what others store": (without_reads_of_squares, (0, 1, 2)),
    "no wait for updates": (not_awaiting, (0, 1, 2)),
    "a wait for own updates alone": (awaiting_own, (0, 1, 2)),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_changes_are_noticed(tied, monkeypatch):
    monkeypatch.setattr(fixed_slots, "SQUARED_ELEMENTS", 256)
    layout, runs = small_runs(tied)
    check_runs(layout, runs, 4)
    for what, (change, ranks) in CHANGES.items():
        assert is_rejected(layout, changed(runs, change, ranks)), what


def test_nodes_that_exchange_before_all_ranks_have_stored_are_noticed():
    model = small_model(blocks=1)
    plan = split_plan(random_plan(Random(1), model, sliced=False), 3, "gpu")
    layout = Layout(model, replace(plan, request=replace(plan.request, nodes=2)))
    runs = runs_of_ranks(layout, full_round(layout), 4)
    check_runs(layout, runs, 4)
    assert is_rejected(layout, [[r for r in rank if not r.exchanges] for rank in runs])
    for change in (awaiting_nothing, of_another_row, awaiting_an_earlier_round):
        change_run = of_exchange(change)
        assert is_rejected(layout, [[change_run(run) for run in rank] for rank in runs]), change.__name__
    stored = tuple(signal for group in range(len(model.groups)) if (signal := Semaphores(layout).stored(group)))

    def told_when_a_round_begins(command: Command) -> Command:
        signals = tuple(signal for signal in command.signals if signal not in stored)
        return replace(command, signals=(*signals, *stored) if command.name.subject == "batch" else signals)

    assert is_rejected(layout, changed(runs, told_when_a_round_begins, (1,)))


def test_collectives_in_another_order_are_noticed():
    layout, runs = small_runs()

    def swapped(run: RankRun) -> RankRun:
        """Two gathers change places."""
        commands = list(run.program.commands)
        first, second = [c.index for c in commands if c.kind == "gather"][:2]
        names = commands[first].name, commands[second].name
        commands[first], commands[second] = (
            replace(commands[i], name=name) for i, name in zip((first, second), reversed(names), strict=True)
        )
        return run._replace(program=replace(run.program, commands=tuple(commands)))

    others = [[run if run.updates else swapped(run) for run in runs[0]], *runs[1:]]
    with pytest.raises(ProgramError, match="one collective, but have gather weights"):
        check_runs(layout, others, 4)


# -- prices ----------------------------------------------------------------------------------------------------------


def test_a_collective_starts_when_all_ranks_are_there():
    slots = tuple(Slot(SlotKey(f"{m}{i}", memory=m), 100 * i, 100, "") for m in ("gpu", "node") for i in range(2))

    def program(rank: int, num_bytes: int) -> Program:
        b = ProgramBuilder("paper", slots, overlapping_slots(slots))
        b.copy(CommandName("fetch"), Stream.H2D, "c", [CopyRegion(2, 0, 0, 0, num_bytes)])
        own = [Access(0, "c")], [Access(0, "all")]
        b.add("gather", CommandName("gather"), Stream.COMM, *own, args=GatherShares(rank, 0, 50, 2))
        return b.build()

    links = ({Stream.H2D: 10.0, Stream.D2H: 10.0},) * 2
    rates = Rates(lambda command: 0.0, *links, 0.0, comm_s=lambda command: command.peer_bytes / 25)
    runs = [[RankRun(program(rank, n), 0, 0, False)] for rank, n in enumerate((100, 40))]
    first, second = simulate_runs(runs, 1, rates)
    assert first[0].timing.start_s == pytest.approx([0.0, 10.0])
    assert first[0].end_s == pytest.approx(12.0)
    assert second[0].timing.start_s == pytest.approx([0.0, 10.0 + SIGNAL_S])


def test_a_copy_of_a_ranks_own_piece_waits_for_products():
    """Those between GPUs do not, as copy engines bring them. Both send a piece of 40 bytes."""
    slots = Slot(SlotKey("sent"), 0, 80, ""), Slot(SlotKey("got"), 100, 80, "")
    b = ProgramBuilder("prices", slots, overlapping_slots(slots))
    for own in (False, True):
        args = ExchangeParts(0, 0, 0, (10, 10), 1, 4, brings_own=own)
        b.add("exchange", CommandName("exchange"), Stream.COMM, [Access(0, "sent")], [Access(1, "got")], args=args)
    profile = with_gpus(preset("h200"), 2)
    comm_s = CostModel.of(replace(request("split"), ranks=2), profile, 4096).rates().comm_s
    alone_s, with_own_s = map(comm_s, b.build().commands)
    assert alone_s == pytest.approx(PEER_WAIT_S[profile.link.peer_way] + 40 / profile.link.peer_bytes_per_s)
    assert with_own_s - alone_s == pytest.approx(WITHIN_WAIT_S)


def request(transport: Literal["auto", "relay", "split"], nodes: int = 1) -> Request:
    """A round of one chunk for each GPU: the search for sizes is not of these tests."""
    asked = Request(1024, nodes * 4 * 4096, 6 * GIB, 64 * GIB, ranks=4, nodes=nodes, transport=transport)
    return replace(asked, chunk_tokens=4096, round_tokens=4096)


def with_blocks(name: str, count: int) -> ModelSpec:
    """The first blocks of a preset; a plan of all of them takes longer and decides alike."""
    spec = open_model(name).spec
    return spec.with_layers([*range(count + 1), len(spec.layers) - 1])


@pytest.mark.usefixtures("quick_search")
def test_the_planner_splits_short_steps_where_gpus_reach_each_other_fast():
    spec = with_blocks("preset:qwen3-0.6b", 14)
    found = {name: plan_for_ranks(spec, request(name), with_gpus(preset("h100"), 4)) for name in ("relay", "auto")}
    assert found["relay"].transport == "relay"
    assert found["auto"].transport == "split"
    assert found["auto"].predicted.step_s < 0.95 * found["relay"].predicted.step_s
    assert found["auto"].predicted.gpu_bytes <= 6 * GIB
    assert found["auto"].predicted.gpu_categories["copies between GPUs"] > 0
    assert Plan.from_json(found["auto"].to_json()) == found["auto"]
    assert "the rest crosses between GPUs" in describe(found["auto"], spec)


@pytest.mark.usefixtures("quick_search")
def test_ranks_relay_where_the_rate_between_gpus_is_not_known():
    spec, card = with_blocks("preset:qwen3-0.6b", 6), with_gpus(preset("rtx4090"), 4)
    assert not may_split(request("auto"), card)
    assert plan_for_ranks(spec, request("split", nodes=2), card).transport == "split"
    one_each = replace(request("split", nodes=2), ranks=1)
    assert not may_split(one_each, card)
    assert plan_for_ranks(spec, replace(one_each, transport="auto"), card).transport == "relay"


@pytest.mark.usefixtures("quick_search")
def test_a_split_that_cannot_be_is_refused(monkeypatch):
    monkeypatch.setitem(memory.PEER_MEMORY_BYTES, "copies", 7 * GIB)
    spec, card = open_model("preset:qwen3-0.6b").spec, with_gpus(preset("h100"), 4)
    with pytest.raises(PlanError, match=r"GiB more than those of relays\n  works with: --transport relay"):
        plan_for_ranks(spec, request("split"), card)
    assert plan_for_ranks(spec, request("auto"), card).transport == "relay"
    model = small_model()
    with pytest.raises(ValueError, match="of several ranks of a node"):
        replace(random_plan(Random(1), model, sliced=False), transport="split")


# -- updates before the norm is known ----------------------------------------------------------------------------------


def bold_plan(seed: int, size: int, share: float = 0.7, tied: bool = False, nodes: int = 1) -> Layout:
    """A split plan in which the CPU updates some groups speculatively."""
    model, random = small_model(tied=tied), Random(seed)
    plan = split_plan(random_plan(random, model, sliced=seed % 5 == 0), size)
    homes = [GroupPlan(update="cpu", speculative=random.random() < share) for _ in plan.groups]
    groups = [home if random.random() < 0.8 else GroupPlan(update="gpu") for home in homes]
    groups = (*groups[:-1], GroupPlan(update="cpu", speculative=True))
    return Layout(model, replace(plan, groups=groups, request=replace(plan.request, clipping=True, nodes=nodes)))


@pytest.mark.parametrize("ways", ranks_checker.WAYS, ids="-".join)
@pytest.mark.parametrize("seed", cases(range(4), range(1)))
def test_speculating_plans_are_proven_whatever_came_before(seed, ways, monkeypatch):
    """Two of them on two nodes, which have several pieces of some groups, and of others fewer than there are ranks."""
    monkeypatch.setattr(fixed_slots, "SQUARED_ELEMENTS", 256)
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 1201)
    monkeypatch.setattr(waves, "SECTION_BYTES", 1 << (15 if seed % 2 else 28))
    layout = bold_plan(seed, 2 + seed % 2, tied=seed == 3, nodes=1 + seed // 2)
    assert layout.plan.speculates
    for num_rounds in (1, 4):
        runs = runs_of_ranks(layout, full_round(layout), num_rounds, ways)
        check_runs(layout, runs, num_rounds)
        for program in {run.program for rank in runs for run in rank if not run.is_of_nodes}:
            check_program(program, layout.gpu_bytes, layout.host_bytes, layout.node_bytes)


def with_changed(runs: list[list[RankRun]], change: Callable[[Command], Command]) -> list[list[RankRun]]:
    """The same with every command of all programs changed."""
    known = {p: replace(p, commands=tuple(map(change, p.commands))) for p in {r.program for rank in runs for r in rank}}
    return [[run._replace(program=known[run.program]) for run in rank] for rank in runs]


def test_no_early_update_comes_before_nodes_have_added_up_its_gradient(monkeypatch):
    """Each group awaits its own exchange, of all ranks of the node, in this step."""
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 1201)
    layout = bold_plan(6, 3, share=1.0, nodes=2)
    runs = runs_of_ranks(layout, full_round(layout), 4, ("committed", "committed", "after_norm"))
    check_runs(layout, runs, 4)
    semaphores = relay.Semaphores(layout)
    told = semaphores.exchanged(1)
    [awaited] = semaphores.exchanged_by_node(1)
    earlier = semaphores.exchanged_by_node(len(layout.groups) - 1)[0]

    def other(which: Signal, instead: tuple[Signal, ...]) -> Callable[[Command], Command]:
        def in_place(found: tuple[Signal, ...]) -> tuple[Signal, ...]:
            return tuple(s for signal in found for s in (instead if signal == which else (signal,)))

        return lambda c: replace(c, awaits=in_place(c.awaits), signals=in_place(c.signals))

    for which, instead in (
        (told, ()), (awaited, ()), (awaited, (earlier,)), (awaited, (awaited._replace(of="own"),)),
        (awaited, (awaited._replace(lag=1),)),
    ):  # fmt: skip
        assert is_rejected(layout, with_changed(runs, other(which, instead))), instead


def test_what_orders_ranks_that_speculate_is_needed():
    """A wait for what others have updated speculatively, a signal of it, and a sum of squares of what is stored."""
    plan, bold = bold_plan(6, 3).plan, GroupPlan(update="cpu", speculative=True)
    all_bold = Layout(small_model(), replace(plan, groups=(bold,) * len(plan.groups)))
    # the embedding's gradient, the last, waits for the norm
    some_late = Layout(small_model(), replace(plan, groups=(GroupPlan(update="cpu"), *plan.groups[1:])))

    def changed(layout: Layout, change: Callable[[Command], Command]) -> list[list[RankRun]]:
        found = runs_of_ranks(layout, full_round(layout), 4, ("committed", "committed", "after_norm"))
        return with_changed(found, change)

    for layout in (all_bold, some_late):
        assert not is_rejected(layout, changed(layout, lambda command: command))
    semaphores = relay.Semaphores(all_bold)
    awaited, signal = semaphores.updated_before(1)[1], semaphores.speculated(1)
    for gone in (awaited, signal):
        without = changed(
            all_bold,
            lambda c, gone=gone: replace(
                c,
                awaits=tuple(s for s in c.awaits if s != gone),
                signals=tuple(s for s in c.signals if s != gone),
            ),
        )
        assert is_rejected(all_bold, without), gone
    early = changed(some_late, lambda c: replace(c, waits=()) if c.kind == "add_squares" else c)
    assert is_rejected(some_late, early)


@pytest.mark.usefixtures("quick_search")
def test_split_plans_update_before_the_norm_is_known_where_that_is_faster():
    spec, card = with_blocks("preset:llama-3.2-1b", 9), with_gpus(preset("h100"), 2)
    asked = replace(
        request("split"), ranks=2, max_global_batch_tokens=2 * 16384, max_gpu_bytes=8 * GIB,
        chunk_tokens=8192, round_tokens=16384,
    )  # fmt: skip
    plan = plan_for_ranks(spec, asked, card)
    assert plan.speculates
    assert plan.predicted.host_bytes <= asked.max_host_bytes
    assert plan.predicted.step_s < 0.998 * plan.predicted.after_clipping_s
    waits = plan.after_clipping()
    assert priced_together(Layout(spec, waits), waits.predicted, card).step_s == pytest.approx(waits.predicted.step_s)
    assert "as if nothing were clipped" in describe(plan, spec)
    with pytest.raises(ValueError, match="ranks that walk layers together"):
        replace(plan, transport="relay")
    assert not plan_for_ranks(spec, replace(asked, clipping=False), card).speculates
    all_but_some = asked.max_host_bytes - plan.predicted.host_categories["second planes"] // 2
    fewer = plan_for_ranks(spec, replace(asked, max_host_bytes=all_but_some), card)
    assert fewer.predicted.host_bytes <= all_but_some


def test_what_is_left_of_a_speculation_comes_first_in_the_next_step():
    """The CPU moves a byte a second, so that nothing is done when the GPU has ended; then nearly all is."""
    layout = bold_plan(6, 2, share=1.0)
    links = ({Stream.H2D: 1e6, Stream.D2H: 1e6},) * 2
    steps = [
        simulate_ranks(layout, Rates(lambda command: 1.0, *links, 0.0, comm_s=lambda command: 0.1, cpu_s=cpu_s))
        for cpu_s in (lambda command: command.work.memory_bytes, lambda command: 1e-9)
    ]
    updates = [[c for c in step.ranks[0][0].run.program.commands if c.stream is Stream.CPU] for step in steps]
    assert updates[0]
    late = sum(home.update == "cpu" and not home.speculative for home in layout.plan.groups)
    assert len({c.args.group for c in updates[1]}) == late < len({c.args.group for c in updates[0]})
    assert steps[0].step_s > steps[1].step_s
    last = steps[0].ranks[0][-1].run.program
    assert any(c.name.verb == "speculate" for c in last.commands)
