"""Programs of ranks are proven together, and those with one thing changed are not."""

from __future__ import annotations

from collections.abc import Callable, ItemsView
from dataclasses import replace
from random import Random

import pytest
from engine_helpers import streamed_plan
from family_configs import CASES as FAMILIES

from flexengine import LoRA
from flexengine.models import blocks
from flexengine.models.freezing import with_frozen
from flexengine.models.in_parts import in_parts
from flexengine.models.lora import with_lora
from flexengine.models.registry import build_model
from flexengine.plan import GroupPlan, Plan
from flexengine.schedule import fixed_slots, node_states, pieces
from flexengine.schedule.checker import ProgramError, check_program
from flexengine.schedule.commands import Command, SlotOffset, UpdateTile
from flexengine.schedule.layout import Layout
from flexengine.schedule.ranks.checker import check_ranks, check_runs
from flexengine.schedule.ranks.rank_run import RankRun
from flexengine.schedule.ranks.runs import runs_of_ranks
from tests.schedule.small_plans import divided_model, full_round, random_plan, small_model


def cut_finely(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of small models move in several pieces."""
    monkeypatch.setattr(pieces, "PIECE_BYTES", 1 << 15)
    monkeypatch.setattr(fixed_slots, "SQUARED_ELEMENTS", 256)


def of_ranks(plan: Plan, size: int, update: str = "", nodes: int = 1, states: str = "host") -> Plan:
    """The plan with what ranks share on the host; update: by which processor, "" = as it was.

    states: where the optimizer states lie of what the GPU updates, or the CPU where nodes divide them.
    """
    homes = [GroupPlan(update=update or g.update) if g.trained else g for g in plan.groups]
    by = "cpu" if states == "nodes" else "gpu"
    groups = tuple(replace(home, states=states) if home.update == by else home for home in homes)
    return replace(plan, groups=groups, request=replace(plan.request, ranks=size, nodes=nodes))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_plans_are_proven(seed, size, monkeypatch):
    if seed % 3 == 1:
        cut_finely(monkeypatch)
    random = Random(seed)
    models = [small_model(), small_model(tied=True), divided_model(), with_frozen(small_model(), ["embed", "block.1"])]
    model, parts, sliced = models[seed % 4], seed % 4 == 2, random.random() < 0.5
    plan = random_plan(random, in_parts(model) if parts else model, sliced)
    nodes = 1 + seed % 2 * 2
    states = "dealt" if seed // 2 % 2 else "nodes" if nodes > 1 else "host"
    plan = of_ranks(replace(plan, in_parts=parts), size, nodes=nodes, states=states)
    layout = Layout(model, plan)
    for num_rounds in (1, size, size + 1):
        runs = runs_of_ranks(layout, full_round(layout), num_rounds)
        check_runs(layout, runs, num_rounds)
    for run in (run for rank in runs for run in rank if not run.is_of_nodes):
        check_program(run.program, layout.gpu_bytes, layout.host_bytes, layout.node_bytes)


@pytest.mark.parametrize("split", [False, True], ids=["relayed", "split"])
@pytest.mark.parametrize("parts", [False, True], ids=["whole", "in parts"])
def test_plans_of_adapters_are_proven(parts, split, monkeypatch):
    """In one slot for blocks' weights, beside which adapters stream through slots of their own."""
    monkeypatch.setattr(blocks, "PART_ELEMENTS", 1)
    model = build_model("tiny", FAMILIES["qwen3_moe"]) if parts else small_model()
    lora = LoRA(["all-linear", *(["all-experts"] if parts else [])], rank=2, modules_to_save=["norm"])
    model = with_lora(model, lora)
    plan = replace(streamed_plan(model, chunk_tokens=64, max_seq_len=64), in_parts=parts, weight_slots=1, grad_slots=1)
    plan = replace(of_ranks(plan, 2), transport="split" if split else "relay")
    layout = Layout(model, plan)
    assert any(len(group.parts) > 1 for group in layout.groups) == parts
    for num_rounds in (1, 2, 3):
        runs = runs_of_ranks(layout, full_round(layout), num_rounds)
        check_runs(layout, runs, num_rounds)
    for run in (run for rank in runs for run in rank if not run.exchanges):
        check_program(run.program, layout.gpu_bytes, layout.host_bytes, layout.node_bytes)


# -- programs with one thing changed ---------------------------------------------------------------------------------

Change = Callable[[Command], Command]


def small_runs(
    update: str, tied: bool = False, nodes: int = 1, states: str = "host"
) -> tuple[Layout, list[list[RankRun]]]:
    model = small_model(blocks=1, tied=tied)
    layout = Layout(model, of_ranks(random_plan(Random(1), model, sliced=False), 3, update, nodes, states))
    return layout, runs_of_ranks(layout, full_round(layout), 4)


def changed(runs: list[list[RankRun]], change: Change) -> list[list[RankRun]]:
    """The runs with every command replaced by what `change` makes of it."""
    programs = {run.program: None for rank in runs for run in rank}
    found = {p: replace(p, commands=tuple(change(command) for command in p.commands)) for p in programs}
    return [[run._replace(program=found[run.program]) for run in rank] for rank in runs]


def without_signals(semaphore: int) -> Change:
    return lambda c: replace(c, signals=tuple(s for s in c.signals if s.semaphore != semaphore))


def without_awaits(semaphore: int) -> Change:
    return lambda c: replace(c, awaits=tuple(s for s in c.awaits if s.semaphore != semaphore))


def awaiting(which: int, **other: object) -> Change:
    return lambda c: replace(c, awaits=tuple(s._replace(**other) if s.semaphore == which else s for s in c.awaits))


def signalling(which: int, **other: object) -> Change:
    return lambda c: replace(c, signals=tuple(s._replace(**other) if s.semaphore == which else s for s in c.signals))


def is_rejected(layout: Layout, runs: list[list[RankRun]], node: int = 0) -> bool:
    try:
        check_runs(layout, runs, 4, node)
    except ProgramError:
        return True
    return False


def test_cells_that_change_are_noticed():
    """Each signal dropped, raised late or in another semaphore; each wait dropped, or for another row or value."""
    for update in ("cpu", "gpu"):
        layout, runs = small_runs(update)
        used = {s.semaphore: s.of for rank in runs for run in rank for c in run.program.commands for s in c.awaits}
        assert len(used) == 7  # of three groups the gradient and the update, and the norm
        for semaphore, of in used.items():
            changes = [
                without_signals(semaphore),
                without_awaits(semaphore),
                signalling(semaphore, lag=1),
                awaiting(semaphore, semaphore=99),
            ]
            changes += [awaiting(semaphore, of="previous" if of != "previous" else "own")]
            changes += [awaiting(semaphore, lag=-1), awaiting(semaphore, lag=2), signalling(semaphore, semaphore=99)]
            for number, change in enumerate(changes):
                what = f"change {number} of semaphore {semaphore} ({of}) with updates by the {update}"
                assert is_rejected(layout, changed(runs, change)), what


def test_cells_of_pieces_that_change_are_noticed(monkeypatch):
    """As above, of the second, a middle and the last piece of a round, the last ones of a tied embedding."""
    cut_finely(monkeypatch)
    layout, runs = small_runs("cpu", tied=True)
    check_runs(layout, runs, 4)
    semaphores = [s.semaphore for c in runs[0][0].program.commands for s in c.signals if s.clock == "round"]
    assert len(semaphores) == len(set(semaphores)) > 6
    for semaphore in (semaphores[1], semaphores[len(semaphores) // 2], semaphores[-1]):
        other = semaphores[0]  # of an earlier piece
        changes = [
            without_signals(semaphore),
            without_awaits(semaphore),
            signalling(semaphore, lag=1),
            awaiting(semaphore, of="own"),
        ]
        changes += [
            awaiting(semaphore, lag=2),
            awaiting(semaphore, semaphore=other),
            signalling(semaphore, semaphore=other),
        ]
        for number, change in enumerate(changes):
            assert is_rejected(layout, changed(runs, change)), (
                f"change {number} of semaphore {semaphore} of {len(semaphores)}"
            )


def test_waits_in_a_circle_are_noticed():
    layout, runs = small_runs("cpu")
    first = next(c for c in runs[0][0].program.commands if c.awaits)

    def change(command: Command) -> Command:
        """Weights are fetched for a round when it has relayed their gradient."""
        signals = [s for s in command.awaits if s.clock == "update" and command.name == first.name]
        semaphores = [
            replace(command, awaits=(s._replace(semaphore=grad, of="own", clock="round", lag=0),)) for s in signals
        ]
        return semaphores[0] if semaphores else command

    grad = next(s.semaphore for c in runs[0][0].program.commands for s in c.signals)
    with pytest.raises(ProgramError, match="circle"):
        check_runs(layout, changed(runs, change), 4)


def tile_changed(name: str, by: int) -> Change:
    """The first tile of rank 1 begins or ends elsewhere."""

    def change(command: Command) -> Command:
        if isinstance(command.args, UpdateTile) and command.args.start and command.args.group == 0:
            return replace(command, args=command.args._replace(**{name: getattr(command.args, name) + by}))
        return command

    return change


@pytest.mark.parametrize("change", [("start", -64), ("start", 64), ("count", 64), ("count", -64)], ids=str)
def test_shares_that_overlap_or_leave_a_hole_are_noticed(change):
    layout, runs = small_runs("cpu")
    with pytest.raises(ProgramError, match=r"updated (twice|by no rank)"):
        check_runs(layout, changed(runs, tile_changed(*change)), 4)


def test_states_of_other_elements_are_noticed():
    layout, runs = small_runs("gpu", states="dealt")
    check_runs(layout, runs, 4)

    def change(command: Command) -> Command:
        """Moments lie where those of other elements do."""
        if not isinstance(command.args, UpdateTile):
            return command
        moved = {kind: SlotOffset(slot, offset + 64 * (kind == "exp_avg")) for kind, (slot, offset) in planes(command)}
        return replace(command, args=command.args._replace(planes=moved))

    def planes(command: Command) -> ItemsView[str, SlotOffset]:
        return command.args.planes.items()

    with pytest.raises(ProgramError, match=r"takes exp_avg from .* that of other elements"):
        check_runs(layout, changed(runs, change), 4)


def test_a_tied_gradient_that_is_relayed_twice_a_round_is_noticed():
    layout, runs = small_runs("cpu", tied=True)
    check_runs(layout, runs, 4)
    name = next(g.name for g in layout.model.groups if g.slot_class != "block")

    def relayed_at_once(command: Command) -> Command:
        """What the head spills goes to the stored gradient instead."""
        if (command.name.verb, command.name.subject) != ("offload", "spilled"):
            return command
        grad = next(
            i for i, slot in enumerate(layout.slots) if slot.memory == "node" and str(slot.key) == f"node.grad.{name}"
        )
        return replace(command, copies=tuple(r._replace(target=grad) for r in command.copies))

    with pytest.raises(ProgramError):
        check_runs(layout, changed(runs, relayed_at_once), 4)


def of_exchange(change: Callable[[Command], Command | None], kind: str = "exchanges") -> Callable[[RankRun], RankRun]:
    """Change, or drop, commands of every exchange, or of every run of another kind."""

    def of_run(run: RankRun) -> RankRun:
        if not getattr(run, kind):
            return run
        commands = tuple(c for c in map(change, run.program.commands) if c is not None)
        return run._replace(program=replace(run.program, commands=commands))

    return of_run


def first_dropped(command: Command) -> Command | None:
    return command if command.index else None


def awaiting_an_earlier_round(command: Command) -> Command:
    """The one before of the rank that ran the last."""
    return replace(command, awaits=tuple(s._replace(lag=3) for s in command.awaits))


def awaiting_nothing(command: Command) -> Command:
    return replace(command, awaits=())


def of_another_row(command: Command) -> Command:
    return replace(command, awaits=tuple(s._replace(of="own") for s in command.awaits))


def in_another_order(command: Command) -> Command:
    return replace(command, args=command.args._replace(givers=command.args.givers[::-1]))


def without_a_node(command: Command) -> Command:
    return replace(command, args=command.args._replace(givers=command.args.givers[1:]))


def shorter(command: Command) -> Command:
    *pieces, (offset, num_bytes) = command.args.pieces
    return replace(command, args=command.args._replace(pieces=(*pieces, (offset, num_bytes - 4))))


CHANGED_EXCHANGES = (
    first_dropped, awaiting_an_earlier_round, awaiting_nothing, of_another_row, in_another_order, without_a_node,
    shorter,
)  # fmt: skip


def test_what_nodes_exchange_is_proven_and_changes_are_noticed(monkeypatch):
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 1201)
    for update in ("cpu", "gpu"):
        layout, runs = small_runs(update, nodes=2)
        check_runs(layout, runs, 4)
        for change in CHANGED_EXCHANGES:
            changed_run = of_exchange(change)
            assert is_rejected(layout, [[changed_run(run) for run in rank] for rank in runs]), change.__name__
        others = [[run for run in rank if not run.exchanges] for rank in runs]
        assert is_rejected(layout, others), "no exchange"
        assert is_rejected(layout, [exchanged_late(rank) for rank in runs]), "after the update"
        shares = next(run for run in runs[1] if run.exchanges)
        twice = [run for rank in runs[:1] for own in rank for run in ((own, shares) if own.exchanges else (own,))]
        assert is_rejected(layout, [twice, *runs[1:]]), "the share of another rank, too"


def keeping_less(command: Command) -> Command:
    """The node's share of the first piece begins later."""
    (offset, num_bytes), *others = command.args.kept
    return replace(command, args=command.args._replace(kept=((offset + 4, num_bytes - 4), *others)))


def signalling_nothing(command: Command) -> Command:
    return replace(command, signals=())


def awaiting_the_step_before(command: Command) -> Command:
    return replace(command, awaits=tuple(s._replace(lag=1) for s in command.awaits))


def plane_elsewhere(kind: str) -> Callable[[Command], Command]:
    def change(command: Command) -> Command:
        if not isinstance(command.args, UpdateTile) or command.args.group:
            return command
        slot, offset = command.args.planes[kind]
        planes = {**command.args.planes, kind: SlotOffset(slot, offset + 64)}
        return replace(command, args=command.args._replace(planes=planes))

    return change


@pytest.mark.parametrize("split", [False, True], ids=["relayed", "split"])
def test_what_nodes_divide_is_proven_and_changes_are_noticed(split, monkeypatch):
    monkeypatch.setattr(node_states, "PIECE_ELEMENTS", 1201)
    layout, _ = small_runs("cpu", nodes=3, states="nodes")
    layout = Layout(layout.model, replace(layout.plan, transport="split" if split else "relay"))
    check_ranks(layout, full_round(layout), 4)
    runs = runs_of_ranks(layout, full_round(layout), 4, node=1)
    check_runs(layout, runs, 4, node=1)
    gathers = (
        first_dropped, awaiting_nothing, awaiting_the_step_before, of_another_row, shorter, keeping_less,
        signalling_nothing,
    )  # fmt: skip
    changes = [(change, "gathers") for change in gathers]
    changes += [(change, "exchanges") for change in (first_dropped, awaiting_nothing, shorter, keeping_less)]
    changes += [(plane_elsewhere(kind), "updates") for kind in ("weights", "grad", "exp_avg", "exp_avg_sq")]
    for change, kind in changes:
        changed_run = of_exchange(change, kind)
        found = [[changed_run(run) for run in rank] for rank in runs]
        assert is_rejected(layout, found, node=1), f"{change.__name__} of {kind}"
    assert is_rejected(layout, runs, node=2), "the updates of another node"
    assert is_rejected(layout, [[run for run in rank if not run.gathers] for rank in runs], node=1), "no gather"
    whole = of_exchange(lambda c: replace(c, args=c.args._replace(kept=c.args.pieces)), "gathers")
    assert is_rejected(layout, [[whole(run) for run in rank] for rank in runs], node=1), "nothing gathered"
    fetched_early = [s for rank in runs for run in rank for c in run.program.commands for s in c.awaits]
    gathered = {s.semaphore for s in fetched_early if s.clock == "update" and s.lag == 1}
    for semaphore in gathered:
        for change in (without_awaits(semaphore), awaiting(semaphore, lag=2), awaiting(semaphore, of="own")):
            assert is_rejected(layout, changed(runs, change), node=1), f"semaphore {semaphore}"


def exchanged_late(runs: list[RankRun]) -> list[RankRun]:
    """Exchange and update change places."""
    others = {i: runs[i + 1] for i, run in enumerate(runs) if run.exchanges}
    others |= {i + 1: runs[i] for i in list(others)}
    return [others.get(i, run) for i, run in enumerate(runs)]


def test_forty_layers_on_eight_ranks_are_proven():
    model = small_model(blocks=40)
    layout = Layout(model, of_ranks(random_plan(Random(3), model, sliced=False), 8))
    check_ranks(layout, full_round(layout), 9)
